"""`cedd spelling`: both protocols from the command line, on models with known predictions."""

import json
import re
from dataclasses import asdict, replace

import pytest

from cedd.cli import main
from cedd.data.tokenizers import BPETokenizer
from cedd.spelling.book import read_book
from cedd.spelling.correct import CorrectionProgress, corrections
from cedd.spelling.corruption import corrupt_letters
from cedd.spelling.options import correction_options
from cedd.spelling.paper_protocol import PaperProtocol
from cedd.spelling.user_protocol import UserProtocol, outcomes
from cedd.tasks import LanguageModel
from tests.tasks.models import fixer

TEXT = "the cat sat by the bay, a day away. say, can a cat play all day.\n" * 12


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    path = tmp_path_factory.mktemp("book") / "book.txt"
    path.write_text(TEXT.replace("\n", " "))
    return str(path)


def known_corrector(**correction) -> LanguageModel:
    """Reads q as a and z as y, and leaves everything else unchanged."""
    setting = fixer()
    return LanguageModel(replace(setting.folder, config={"correction": correction}), setting.device)


@pytest.mark.slow
def test_both_protocols_as_json(run, book, capsys):
    words = ["spelling", run, "--data", book, "--blocks", "8", "--thresholds", "0.5", "0.1", "--steps", "4"]
    assert main([*words, "--json", "--seed", "3", "--device", "cpu"]) == 0
    first = capsys.readouterr().out
    record = json.loads(first)
    assert record["paper"]["blocks"] == 8
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


def test_tables_fit_a_terminal(run, book, capsys, tmp_path):
    plot = tmp_path / "fixed.svg"
    words = ["spelling", run, "--data", book, "--blocks", "8", "--thresholds", "0.5", "0.2", "--steps", "2"]
    assert main([*words, "--plot", str(plot), "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "Paper's protocol: bayes on roulette" in printed
    assert "User's protocol: bayes on roulette" in printed
    assert max(map(len, printed.splitlines())) <= 80
    assert "…" not in printed
    assert all(head in printed for head in ("threshold", "fixed", "altered", "missed", "broken", "others", "wrong"))
    assert len(re.findall(r"\d\.\d to \d+\.\d\b", printed)) >= 1 + 3 * 2  # intervals of fixed
    assert "±" not in printed
    assert "</svg>" in plot.read_text()


def test_every_setting_matches_correct(tmp_path):
    """With a surprise limit in the model's folder, which reverts changes in passages of improbable z's."""
    model = known_corrector(max_surprise=3.2)
    (tmp_path / "book.txt").write_text(TEXT.replace("\n", " ") + 150 * "zzz zaz ")
    protocol = UserProtocol(rate=0.4, thresholds=(0.3,), passes=(1, 3), steps=(4,))
    book = read_book(model, str(tmp_path / "book.txt"), 0)
    mistakes = corrupt_letters(book.text, 0.4, seed=0)
    found = {(c.way, c.threshold): c.outcomes for c in protocol.measure(model, book, 0)}
    ways = {"its own": {}, "1 pass": {"passes": 1}, "3 passes": {"passes": 3}, "4 steps": {"passes": 1, "steps": 4}}
    for (way, threshold), seen in found.items():
        text = model.correct(mistakes.text, **ways[way], threshold=threshold, seed=0)
        assert seen.record() == outcomes(mistakes.original, mistakes.text, text, model.length).record()
    unlimited = known_corrector().correct(mistakes.text, passes=1, threshold=0.3)
    fixed = outcomes(mistakes.original, mistakes.text, unlimited, model.length).fixed.count
    assert 0 < found["1 pass", 0.3].fixed.count < fixed
    assert len(found) == 1 + 3


def test_settings_share_the_first_pass(monkeypatch):
    model = known_corrector()
    calls: list[int] = []
    network, text = model.folder.model, "the czt sqt by the bzy."
    monkeypatch.setattr(network, "features", lambda x, s, f=network.features: calls.append(len(x)) or f(x, s))
    asked = [{"passes": n, "threshold": at, "swaps": 0.0} for n in (1, 3) for at in (0.5, 0.3, 0.0)]
    ways = [correction_options(model, given) for given in asked]
    texts = [str(corrected) for corrected in corrections(model, text, ways)]
    shared = len(calls)
    assert texts == [str(model.correct(text, **asdict(way))) for way in ways]
    assert len(calls) - shared == shared + len(ways) - 1  # alone, each of the others needs one more pass
    assert len(set(texts)) == 3  # q and z are corrected, then only q, then nothing


@pytest.mark.slow
def test_progress_bar_advances_with_every_pass_and_ends_full():
    model = known_corrector()
    told = []
    ways = [correction_options(model, given) for given in ({}, {"passes": 1}, {"steps": 4, "t": 0.2})]
    counter = CorrectionProgress(ways, lambda done, planned: told.append((done, planned)))
    for _ in corrections(model, 2 * TEXT.replace("a", "q"), ways, 0, counter.read):
        counter.finish()
    done, planned = zip(*told, strict=True)
    assert set(planned) == {(1 + 2 + 3) + 3 + 6}
    assert list(done) == sorted(done)
    assert done[-1] == planned[-1]
    assert len(told) > 20  # not only at the end of a way


def test_transpositions_can_be_measured(run, book, capsys):
    words = [
        "spelling",
        run,
        "--data",
        book,
        "--blocks",
        "12",
        "--mistakes",
        "swaps",
        "--rate",
        "0.1",
        "--device",
        "cpu",
    ]
    assert main([*words, "--passes", "1", "--thresholds", "0.5", "--json", "--swaps", "0"]) == 0
    user = json.loads(capsys.readouterr().out)["user"]
    assert (user["mistakes"], user["rate"]) == ("swaps", 0.1)
    for correction in user["corrections"]:
        assert correction["options"]["swaps"] == 0
        assert 2 * correction["fixed"]["total"] == correction["before"]["count"] > 10
    assert main([*words, "--protocol", "user", "--passes", "1", "--thresholds", "0.5"]) == 0
    assert "transpositions" in capsys.readouterr().out


def test_known_predictions_fix_expected_letters(tmp_path):
    """Only q (for a) and z (for y) are changed, so no letter of this text is broken."""
    model = known_corrector()
    path = tmp_path / "book.txt"
    path.write_text(20 * TEXT.replace("\n", " é "))
    protocol = UserProtocol(rate=0.1, passes=(1,), thresholds=(0.5, 0.0))
    book = read_book(model, str(path), 0)
    assert book.unknown == 20 * 12
    own, best, nothing = protocol.measure(model, book, 0)
    assert own.outcomes.record() == best.outcomes.record()
    mistakes = corrupt_letters(book.text, 0.1, seed=0)
    corrected = sum((a, b) in (("a", "q"), ("y", "z")) for a, b in zip(book.text, mistakes.text, strict=True))
    assert best.outcomes.fixed.count == corrected > 10
    assert best.outcomes.broken.count == best.outcomes.broken_others.count == 0
    assert nothing.outcomes.missed.value == 1.0
    restored = PaperProtocol().measure(model, book, 0)
    assert restored.masked.total == 0 < restored.shuffled.total


def test_read_book_takes_only_the_middle(book):
    model = known_corrector()
    part = read_book(model, book, 3)
    assert len(part.text) == 3 * model.length
    assert part.text in TEXT.replace("\n", " ")
    assert not TEXT.startswith(part.text)
    pieces = fixer("absorb", tokenizer=BPETokenizer.train([TEXT], 300))
    part = read_book(pieces, book, 3)
    assert part.blocks.shape == (3, pieces.length)  # of tokens, which are several characters each
    assert len(part.text) > 2 * part.blocks.numel()
    assert part.text in TEXT.replace("\n", " ")


def test_absorb_uses_only_paper_protocol(absorb, book, capsys):
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


def test_text_shorter_than_a_block_uses_only_user_protocol(run, tmp_path, capsys):
    (tmp_path / "line.txt").write_text("the cat sat by the bay")
    words = ["spelling", run, "--data", str(tmp_path / "line.txt"), "--device", "cpu"]
    assert main([*words, "--rate", "0.2", "--passes", "1", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["paper"] is None
    assert record["user"]["corrections"][0]["fixed"]["total"] == 3
    assert record["note"] == "The paper's protocol was left out: the text has 22 tokens, fewer than one block of 32."
    assert main([*words, "--protocol", "paper"]) == 2
    assert "the text has 22 tokens, fewer than one block of 32" in capsys.readouterr().err


def test_text_without_letters_is_reported(run, tmp_path, capsys):
    (tmp_path / "figures.txt").write_text("., ." * 40)
    words = ["spelling", run, "--data", str(tmp_path / "figures.txt"), "--device", "cpu"]
    assert main([*words, "--protocol", "user"]) == 2
    error = capsys.readouterr().err
    assert "too short: at a rate of 0.05 there are no letters replaced" in error
    assert error.count("\n") == 1
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "Paper's protocol" in printed
    assert "The user's protocol was left out: the text is too short" in " ".join(printed.split())
    (tmp_path / "figures.txt").write_text("., .")
    assert main(words) == 2
    assert "the text has 4 tokens, fewer than one block of 32; the text is too short" in capsys.readouterr().err


def test_one_block_has_no_interval(run, book, capsys):
    assert main(["spelling", run, "--data", book, "--blocks", "1", "--rate", "0.2", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "nan" not in printed
    assert not re.search(r"\d to \d", printed)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--blocks", "-1"], "0 for the whole book"),
        (["--t", "0"], "must be in"),
        (["--thresholds", "2"], "threshold must be in"),
        (["--steps", "0"], "steps must be at least 1"),
        (["--rate", "1.5"], "above 0 and at most 1"),
        (["--rate", "0"], "above 0 and at most 1 (got 0"),
        (["--plot", "fixed.txt"], "must end in"),
        (["--protocol", "paper", "--plot", "fixed.png"], "does not support"),
        (["--data", "nowhere.txt"], "nowhere.txt"),
    ],
)
def test_invalid_input_gives_one_line_error(run, book, capsys, more, message):
    assert main(["spelling", run, "--data", book, "--device", "cpu", *more]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
