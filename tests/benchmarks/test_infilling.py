"""The benchmark of infilled words: the questions, and the table of correct answers."""

import sys
from pathlib import Path

import pytest

from tests.benchmarks.scripts import definitions
from tests.tasks.models import fixer, save_random

infilling = definitions("infilling")
TEXT = "".join(
    f"They said it. The old captain of the {ship} went home in the rain. "
    for ship in ["ferry", "steamer", "schooner"] * 40
)


def test_question_is_word_of_sentence_in_its_block():
    loaded = fixer("roulette", length=200)
    asked = list(infilling.questions(TEXT, loaded.tokenizer, 200, 5))
    assert len(asked) == 5
    for one in asked:
        sentence = one.before + one.word + one.after
        assert sentence.startswith("The old captain")
        assert sentence.endswith("in the rain.")
        assert one.far_before + sentence + one.far_after in TEXT
        assert infilling.WAYS["paragraph"].template(one, loaded).width <= 200
        assert infilling.WAYS["paragraph"].template(one, loaded).width > 150
        assert infilling.WAYS["passage"].template(one, loaded).width == len(sentence)
        page = infilling.WAYS["page"].template(one, loaded)
        assert one.word.join(part.text for part in page.parts[::2]) in TEXT
        assert page.width > 400
    with pytest.raises(ValueError, match="sentences to ask about; 500 are wanted"):
        list(infilling.questions(TEXT, loaded.tokenizer, 200, 500))


def test_correct_words_are_counted_per_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    """A random model is never right; one way is not worse than itself."""
    (tmp_path / "text.txt").write_text(TEXT)
    run = save_random(tmp_path / "run", "absorb", "cedd", time_input="none", length=128)
    words = ["infilling.py", str(run), "--data", str(tmp_path / "text.txt"), "--words", "3"]
    monkeypatch.setattr(sys, "argv", [*words, "--ways", *infilling.WAYS])
    assert infilling.main() == 0
    table = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in table[2:]] == list(infilling.WAYS)
    assert table[2].startswith("| paragraph | 0.0 (0.0 to ")
    assert table[2].endswith("| +0.0 ± 0.0 |")
    monkeypatch.setattr(sys, "argv", [*words, "--ways", "aloud"])
    assert infilling.main() == 2
    assert "--ways are some of paragraph" in capsys.readouterr().err
    for many in ("1", "0", "-1"):
        monkeypatch.setattr(sys, "argv", [*words[:-1], many])
        assert infilling.main() == 2
        assert f"--words must be at least 2, of which an interval can be made (got {many}" in capsys.readouterr().err
