"""`cedd spelling`: both protocols from the command line, on models whose beliefs are known."""

import json

import pytest

from cedd.cli import main
from cedd.cli.spelling import Arguments, one_pass, paper_protocol, read_book, user_protocol
from cedd.data.corruption import corrupt_letters
from cedd.tasks import LanguageModel
from cedd.tasks.correct import correction_options
from tests.tasks.models import mending

TEXT = "the cat sat by the bay, a day away. say, can a cat play all day.\n" * 12


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    path = tmp_path_factory.mktemp("book") / "book.txt"
    path.write_text(TEXT.replace("\n", " "))
    return str(path)


def mender() -> LanguageModel:
    """Reads q as a and z as y, and all else as it stands."""
    setting = mending()
    return LanguageModel(setting.folder, setting.device)


def test_both_protocols_as_json(run, book, capsys):
    words = ["spelling", run, "--data", book, "--blocks", "12", "--thresholds", "0.5", "0.1", "--steps", "4"]
    assert main([*words, "--json", "--seed", "3", "--device", "cpu"]) == 0
    first = capsys.readouterr().out
    record = json.loads(first)
    assert record["paper"]["blocks"] == 12
    paper = record["paper"]
    assert paper["all"]["total"] == paper["masked"]["total"] + paper["shuffled"]["total"] > 5
    ways = [(c["way"], c["options"]["threshold"]) for c in record["user"]["corrections"]]
    swept = [(way, threshold) for way in ("1 pass", "3 passes", "4 steps") for threshold in (0.5, 0.1)]
    assert ways == [("its own", 0.5), *swept]
    for correction in record["user"]["corrections"]:
        parts = sum(correction[name]["count"] for name in ("fixed", "missed", "altered"))
        assert parts == correction["before"]["count"] == correction["fixed"]["total"] > 5
    assert main([*words, "--json", "--seed", "3", "--device", "cpu"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again | {"seconds": 0} == record | {"seconds": 0}


def test_the_tables_fit_a_terminal(run, book, capsys, tmp_path):
    plot = tmp_path / "fixed.svg"
    words = ["spelling", run, "--data", book, "--blocks", "8", "--thresholds", "0.5", "0.2", "--steps", "2"]
    assert main([*words, "--plot", str(plot), "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "Paper's protocol: bayes on roulette" in printed
    assert "User's protocol: bayes on roulette" in printed
    assert max(map(len, printed.splitlines())) <= 80
    assert "…" not in printed
    assert all(head in printed for head in ("threshold", "fixed", "altered", "missed", "broken", "others", "wrong"))
    assert "</svg>" in plot.read_text()


def test_one_opinion_serves_all_thresholds_and_is_what_correct_does(monkeypatch):
    model = mender()
    text = "the czt sqt by the bzy."
    thresholds = (0.5, 0.3, 0.1, 0.01, 0.0)
    options = correction_options(model.setting, {"steps": 1, "passes": 1})
    calls = []
    network = model.setting.folder.model
    monkeypatch.setattr(network, "features", lambda x, s, f=network.features: calls.append(len(x)) or f(x, s))
    texts = list(one_pass(model, text, options, thresholds))
    once = len(calls)
    assert texts == [str(model.correct(text, threshold=threshold, passes=1)) for threshold in thresholds]
    assert len(calls) == once * (1 + len(thresholds))
    assert len(set(texts)) == 3  # q and z are mended, then only q, then nothing
    assert texts[-1] == text


def test_known_beliefs_fix_what_they_should(tmp_path):
    """Of all letters only q (meant as a) and z (meant as y) are changed: no letter of this text is broken."""
    model = mender()
    path = tmp_path / "book.txt"
    path.write_text(20 * TEXT.replace("\n", "é"))
    arguments = Arguments("", str(path), rate=0.1, passes=(1,), steps=(), thresholds=(0.5, 0.0), json=True)
    book = read_book(model, str(path), None)
    assert book.unknown == 20 * 12
    own, best, nothing = user_protocol(model, book, arguments)
    assert own.outcomes.record() == best.outcomes.record()
    mistakes = corrupt_letters(book.text, 0.1, seed=0)
    mended = sum((a, b) in (("a", "q"), ("y", "z")) for a, b in zip(book.text, mistakes.text, strict=True))
    assert best.outcomes.fixed.count == mended > 10
    assert best.outcomes.broken.count == best.outcomes.broken_others.count == 0
    assert nothing.outcomes.missed.value == 1.0
    restored = paper_protocol(model, book, arguments)
    assert restored.masked.total == 0 < restored.shuffled.total


def test_only_the_middle_of_a_book(book):
    model = mender()
    part = read_book(model, book, 3)
    assert len(part.text) == 3 * model.length
    assert part.text in TEXT.replace("\n", " ")
    assert not TEXT.startswith(part.text)


def test_absorb_is_measured_by_the_papers_protocol_only(absorb, book, capsys):
    words = ["spelling", absorb, "--data", book, "--blocks", "8", "--device", "cpu"]
    assert main([*words, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["user"] is None
    assert "only masks" in record["note"]
    assert record["paper"]["shuffled"]["total"] == 0 < record["paper"]["masked"]["total"]
    assert main(words) == 0
    assert "left out" in capsys.readouterr().out
    assert main([*words, "--protocol", "user"]) == 2
    assert "only masks" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--blocks", "0"], "at least 1"),
        (["--t", "0"], "must lie in"),
        (["--thresholds", "2"], "threshold is a probability"),
        (["--steps", "0"], "steps must be at least 1"),
        (["--rate", "1.5"], "share between 0 and 1"),
        (["--plot", "fixed.txt"], "must end in"),
        (["--protocol", "paper", "--plot", "fixed.png"], "leave it out"),
        (["--data", "nowhere.txt"], "nowhere.txt"),
    ],
)
def test_bad_input_is_one_line(run, book, capsys, more, message):
    assert main(["spelling", run, "--data", book, "--device", "cpu", *more]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
