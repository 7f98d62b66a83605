"""The comparison of correctors: texts with few wrong words, and the suggestions of programs applied to them."""

import sys
import types
from pathlib import Path

import pytest

from cedd.apps.correct.lexicon import LEXICON_WEIGHTS_FILE
from cedd.models.locate import packaged
from cedd.storage import read_json
from tests.benchmarks.scripts import definitions


@pytest.fixture(scope="module")
def scripts():
    return definitions("english_words", "correctors")


def test_one_word_in_fifty_is_wrong(scripts):
    clean = [scripts.Misspelt(text, text) for text in ("one two three four five six seven eight nine ten",) * 200]
    wrong = [scripts.Misspelt("a letter came by post", "a leter came by post", scripts.Pair("leter", "letter"))] * 50
    text = " ".join(scripts.mostly_right([*clean, *wrong], 100)).split()
    assert 0.015 < text.count("leter") / len(text) < 0.03


def test_every_nth_word_is_wrong(scripts):
    clean = [scripts.Misspelt("one two three four", "one two three four")] * 2
    wrong = [scripts.Misspelt("a letter", "a leter", scripts.Pair("leter", "letter"), "birkbeck")]
    assert scripts.every_nth_wrong([*clean, *wrong], 2, 3) == ["one two leter four one leter three four"]
    assert scripts.every_nth_wrong([*clean, *wrong], 1, 0) == ["one two three four"]


def test_first_suggestion_is_applied(scripts):
    answer = "*\n& leter 3 4: letter, later, lever\n# xqz 10\n& hoem 2 14: home, hoe\n"
    assert scripts.with_suggestions("the leter xqz hoem.", answer) == "the letter xqz home."


def test_misspellings_are_stored_with_all_known_intended_words(scripts):
    pairs = [
        scripts.Pair("ther", "there"),
        scripts.Pair("ther", "their"),
        scripts.Pair("ther", "there"),
        scripts.Pair("hte", "unheard"),
    ]
    assert scripts.memory_of(pairs, {"there", "their"}) == {"ther": ("there", "their")}


def test_given_weights_match_packaged_weights(scripts):
    weights = read_json(packaged("english") / LEXICON_WEIGHTS_FILE)
    for row in ("alone", "network"):
        assert {name: weights[row][name] for name in scripts.GIVEN} == scripts.GIVEN


def test_missing_programs_are_skipped_with_package_name(scripts, monkeypatch, tmp_path):
    options = types.SimpleNamespace(jamspell=None, corpus=tmp_path)
    monkeypatch.setattr(scripts.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(scripts.shutil, "which", lambda name: None)
    for name, make in scripts.CORRECTORS.items():
        if not name.startswith("cedd"):
            with pytest.raises(scripts.Absent, match=rf"(pip install|there is no program) {name}$"):
                make(options)


def test_jamspell_trains_missing_model_and_corrects(scripts, monkeypatch, tmp_path):
    class Tool:
        loaded = False

        def TrainLangModel(self, text, alphabet, path):
            assert (Path(text).read_text(), Path(alphabet).read_text()[-2:]) == ("A sentence.\n", "z'")
            return Path(path).write_text("model") > 0

        def LoadLangModel(self, path):
            self.loaded = Path(path).read_text() == "model"
            return self.loaded

        def FixFragment(self, text):
            assert self.loaded
            return text.replace("teh", "the")

    module = types.ModuleType("jamspell")
    monkeypatch.setattr(module, "TSpellCorrector", Tool, raising=False)
    monkeypatch.setitem(sys.modules, "jamspell", module)
    monkeypatch.setattr(scripts.importlib.util, "find_spec", lambda name: module)
    monkeypatch.setitem(scripts.jamspell.__globals__, "training_sentences", lambda corpus, count: ["A sentence."])
    with pytest.raises(scripts.Absent, match="--jamspell"):
        scripts.jamspell(None, tmp_path)
    (tmp_path / "other").write_text("other")
    with pytest.raises(scripts.Absent, match="is not a model of JamSpell"):
        scripts.jamspell(tmp_path / "other", tmp_path)
    assert scripts.jamspell(tmp_path / "model", tmp_path)(["teh cat"]) == ["the cat"]


def test_results_of_other_tools_on_same_sentences_are_kept(scripts, tmp_path):
    file, about = tmp_path / "tools.json", {"part": "test", "sentences": 3, "bytes": 5}
    scripts.save_results(file, about, {"typos": {"start_s": 1, "shares": ()}})
    scripts.save_results(file, {**about, "bytes": 6}, {"cedd correct": {"start_s": 2, "shares": ()}})
    assert list(read_json(file)["tools"]) == ["cedd correct", "typos"]
    assert read_json(file)["tools"]["typos"] == {"start_s": 1}
    scripts.save_results(file, {**about, "sentences": 4}, {"cedd correct": {"start_s": 2, "shares": ()}})
    assert list(read_json(file)["tools"]) == ["cedd correct"]


def test_missing_data_gives_one_line_error(scripts, monkeypatch, capsys, tmp_path):
    for lists in ([], ["birkbeck", "holbrook", "norvig", "wikipedia"]):
        (tmp_path / "misspellings").mkdir(exist_ok=True)
        for name in lists:
            (tmp_path / "misspellings" / f"{name}.tsv").write_text("written\tmeant\nteh\tthe\n")
        monkeypatch.setenv("CEDD_DATA", str(tmp_path))
        monkeypatch.setattr("sys.argv", ["correctors.py", "--only", "aspell"])
        with pytest.raises(SystemExit):
            scripts.main()
        assert capsys.readouterr().err.splitlines()[-1].startswith("correctors.py: error: ")
