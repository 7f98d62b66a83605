"""`cedd evaluate --bound importance`: the numbers, the table, and errors."""

import json
from pathlib import Path

import pytest
import torch

import cedd
from cedd.bounds.importance import ImportanceEstimate
from cedd.cli import main
from cedd.evaluation.perplexity import choose_sequences, load_data
from cedd.evaluation.tokens import read_tokens
from cedd.models.folder import load_folder, save_folder
from tests.tasks.models import save_random

TEXT = "the cat sat on the mat and the dog sat on the cat. " * 40


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    kinds = {"first": ("absorb", "cedd"), "score": ("absorb", "sedds"), "causal": ("absorb", "ar")}
    kinds["roulette"] = ("roulette", "cedd")
    return {name: save_random(folder / name, *kind) for name, kind in kinds.items()}


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    monkeypatch.setenv("CEDD_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return ("--data", str(path), "--bound", "importance", "--max-sequences", "5", "--device", "cpu")


def record(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    code = main(["evaluate", *words, "--json"])
    output = capsys.readouterr()
    assert code == 0, output.err
    return json.loads(output.out)


@pytest.mark.parametrize("name", ["first", "score"])
def test_record_matches_estimate_bound(name: str, runs, words, capsys) -> None:
    found = record(capsys, str(runs[name]), *words, "--orders", "4", "--seed", "3")
    bound = found["runs"][0]["bounds"]["importance"]
    folder = load_folder(runs[name])
    data, _ = choose_sequences(load_data(words[1], folder.tokenizer, folder.length), 5, folder.tokenizer)
    generator = torch.Generator().manual_seed(3)
    how = {"method": folder.method, "bound": "importance", "orders": 4, "generator": generator}
    direct = cedd.estimate_bound(folder.model, folder.process, data, **how)
    assert isinstance(direct, ImportanceEstimate)
    assert bound["nats_per_token"] == pytest.approx(direct.nats_per_token)
    assert bound["by_orders"] == pytest.approx({str(k): nats for k, nats in direct.by_orders.items()})
    assert bound["by_orders_ci95"]["4"] == bound["ci95"] == pytest.approx(direct.ci95)
    assert bound["effective_sample_size"] == pytest.approx(direct.effective_sample_size)
    assert bound["orders"] == found["data"]["orders"] == 4
    assert bound["evaluations"] == 5 * 4 * folder.length
    assert "first-hitting" in bound["law"]
    assert ("ratios at its mask divided by their sum" in bound["law"]) == (name == "score")


def test_protocol_hash_covers_orders_and_sequences(runs, words, capsys) -> None:
    def protocol(*more: str) -> str:
        return record(capsys, str(runs["first"]), *words, *more)["data"]["protocol_sha256"]

    usual = protocol("--orders", "2")
    assert usual == protocol("--orders", "2", "--batch", "3", "--seed", "1")
    assert len({usual, protocol("--orders", "4"), protocol("--orders", "2", "--max-sequences", "4")}) == 3


def test_table_names_distribution_and_orders(runs, words, capsys) -> None:
    assert main(["evaluate", str(runs["first"]), *words, "--orders", "2"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "importance, K = 2" in output
    assert "nats per token, K = 1" in output
    assert "effective sample size" in output
    assert "The perplexity is at most" in output
    assert "under the first-hitting sampler" in output
    assert "of which terminal term" not in output  # there is none


def test_unreached_tolerance_is_quoted_as_given(runs, words, capsys) -> None:
    assert main(["evaluate", str(runs["first"]), *words, "--orders", "2", "--tolerance", "0.001%"]) == 0
    assert "The interval is wider than 0.001%, because" in " ".join(capsys.readouterr().out.split())


def test_unreached_tolerance_on_fixed_set_is_due_to_limit(runs, words, tmp_path: Path, capsys) -> None:
    folder = load_folder(runs["first"])
    for name, values in folder.model.named_parameters():
        if "modulation" in name:
            torch.nn.init.normal_(values, std=0.3)  # zero at first: contexts would not matter
    save_folder(tmp_path / "varied", folder)
    how = ("--orders", "4", "--tolerance", "0.001%", "--fixed-set")
    assert main(["evaluate", str(tmp_path / "varied"), *words, *how]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "because 4 orders are all that --orders (default: 4096) or --seconds allow" in output
    assert "gives the interval for these sequences only" not in output


def test_unknown_errors_are_not_printed_as_nan(runs, words, capsys) -> None:
    for how in (("--orders", "1"), ("--orders", "32", "--length", "2", "--max-sequences", "1")):
        assert main(["evaluate", str(runs["first"]), *words, *how]) == 0
        output = capsys.readouterr().out
        assert "nan" not in output.lower()
    assert "It is at least" in output


def test_runs_are_compared_on_same_orders_and_ar_is_exact(runs, words, capsys) -> None:
    found = record(capsys, str(runs["first"]), str(runs["causal"]), *words, "--orders", "2")
    first, causal = (run["bounds"]["importance"] for run in found["runs"])
    assert causal["evaluations"] == 5
    difference = found["comparison"]["difference_nats_per_token"]
    assert difference == pytest.approx(causal["nats_per_token"] - first["nats_per_token"])
    again = record(capsys, str(runs["first"]), str(runs["first"]), *words, "--orders", "2")
    assert again["comparison"]["difference_nats_per_token"] == 0.0
    assert main(["evaluate", str(runs["first"]), str(runs["causal"]), *words, "--orders", "2"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "The perplexity is exact, because the model is autoregressive." in output


def test_command_resumes_from_checkpoint_and_adapts_orders(runs, words, tmp_path: Path, capsys) -> None:
    path = tmp_path / "weights.npz"
    usual = record(capsys, str(runs["first"]), *words, "--orders", "4")
    kept = record(capsys, str(runs["first"]), *words, "--orders", "2", "--checkpoint", str(path))
    assert kept["data"]["orders"] == 2
    assert path.is_file()
    more = record(capsys, str(runs["first"]), *words, "--orders", "4", "--checkpoint", str(path))
    assert more["record_sha256"] == usual["record_sha256"]
    wide = record(capsys, str(runs["first"]), *words, "--tolerance", "90%", "--fixed-set")
    assert wide["data"]["orders"] == 2
    assert main(["evaluate", str(runs["causal"]), *words, "--checkpoint", str(path), "--seconds", "3"]) == 0
    capsys.readouterr()
    both = [str(runs["first"]), str(runs["causal"])]
    assert main(["evaluate", *both, *words, "--seconds", "3"]) == 2
    assert "models are compared with equal numbers of orders" in capsys.readouterr().err
    assert main(["evaluate", *both, *words, "--checkpoint", str(path)]) == 2
    assert "--checkpoint keeps the orders of one model" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"--seconds must be a positive number \(got '3'\)"):
        cedd.evaluate(runs["first"], bound="importance", seconds="3")


def test_checkpoint_may_be_a_string(runs, words, tmp_path: Path) -> None:
    path = tmp_path / "weights.npz"
    how = {"bound": "importance", "orders": 2, "max_sequences": 2, "device": "cpu"}
    found = [cedd.evaluate(runs["first"], words[1], checkpoint=str(path), **how).perplexity for _ in range(2)]
    assert found[0] == found[1]
    assert path.is_file()


def test_unknown_bound_is_reported_with_all_bounds(runs, words) -> None:
    with pytest.raises(ValueError, match="unknown bound 'importnce'; did you mean 'importance'"):
        cedd.evaluate(runs["first"], words[1], bound="importnce")


@pytest.mark.parametrize("bound", ["tight", "exact"])
def test_tokens_of_other_bounds_are_rejected(bound: str, runs, words, tmp_path: Path) -> None:
    found = cedd.evaluate(runs["first"], words[1], bound=bound, length=2, max_sequences=2, device="cpu")
    with pytest.raises(ValueError, match=f"the costs of tokens need bound='importance' .got '{bound}'"):
        found.save_tokens(tmp_path / "tokens.jsonl")


@pytest.mark.parametrize("name", ["first", "causal"])
def test_tokens_are_written_with_their_costs(name: str, runs, words, tmp_path: Path, capsys) -> None:
    path = tmp_path / "tokens.jsonl"
    found = record(capsys, str(runs[name]), *words, "--orders", "2", "--tokens", str(path))
    bound = found["runs"][0]["bounds"]["importance"]
    texts = read_tokens(path)
    assert "".join(text for text, _ in texts[0]) == TEXT[: len(texts[0])]
    assert len(texts) == 5
    mean = sum(nats for costs in texts for _, nats in costs) / sum(map(len, texts))
    assert mean == pytest.approx(bound["by_orders"]["1"] if name == "first" else bound["nats_per_token"])
    assert read_tokens(path, 2) == texts[:2]
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ValueError, match=r"empty\.jsonl: the file is empty"):
        read_tokens(tmp_path / "empty.jsonl")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("roulette", (), "a revealed token never changes"),
        ("first", ("--orders", "0"), "--orders must be at least 1 (got 0)"),
        ("first", ("--bound", "tight", "--orders", "4"), "--orders has no effect without --bound importance"),
        ("first", ("--draws", "8"), "--draws has no effect with --bound importance"),
        ("first", ("--seconds", "0"), "--seconds must be a positive number (got 0.0)"),
        ("first", ("--checkpoint", "weights.txt"), "must end in .npz"),
        ("first", ("--bound", "tight", "--seconds", "4"), "--seconds has no effect without --bound importance"),
        ("first", ("--bound", "tight", "--checkpoint", "w.npz"), "--checkpoint has no effect without --bound"),
        ("first", ("--bound", "tight", "--tokens", "t.jsonl"), "--tokens needs --bound importance"),
        ("first", ("--tokens", "t.txt"), "t.txt"),
        ("first", ("--time-floor", "1e-3"), "--time-floor has no effect with --bound importance"),
        ("first", ("--corrector", "1"), "--corrector has no effect with --bound importance"),
    ],
)
def test_invalid_options_give_one_line_errors(name: str, options, message: str, runs, words, capsys) -> None:
    assert main(["evaluate", str(runs[name]), *words, *options]) != 0
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1
