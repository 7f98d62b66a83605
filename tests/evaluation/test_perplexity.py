"""Perplexity of model folders on data: units, comparison, files, and the command with its errors."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import cedd
from cedd.bounds.estimate import BoundEstimate, mean_interval
from cedd.bounds.estimator import estimate_bounds
from cedd.cli import main
from cedd.data.text import never_written
from cedd.data.tokenizers import CharTokenizer
from cedd.evaluation.options import EvaluationOptions
from cedd.evaluation.perplexity import choose_sequences, compare, load_data, measure, requested_bounds
from cedd.models.folder import load_folder
from cedd.models.locate import pretrained_names
from cedd.samplers import SamplingOptions, default_steps, order_nats
from tests.tasks.models import ALPHABET, save_random

TEXT = "the cat sat on the mat and the dog sat on the cat. " * 40
WORDS = len(TEXT.split())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    kinds = {
        "roulette": ("roulette", "bayes"),
        "uniform": ("uniform", "cedd-star"),
        "absorb": ("absorb", "cedd"),
        "scaled": ("uniform", "sedds"),
        "flow": ("absorb", "dfm"),
        "causal": ("absorb", "ar"),
    }
    return {name: save_random(folder / name, *kind) for name, kind in kinds.items()}


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CEDD_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def evaluate(capsys: pytest.CaptureFixture[str], *words: str | Path) -> dict:
    code = main(["evaluate", *map(str, words), "--device", "cpu", "--json"])
    output = capsys.readouterr()
    assert code == 0, output.err
    return json.loads(output.out)


@pytest.mark.slow
def test_packaged_model_is_shown_by_name(text: Path, runs: dict[str, Path], capsys: pytest.CaptureFixture[str]):
    few = ("--data", text, "--draws", "2", "--max-sequences", "1")
    assert evaluate(capsys, runs["absorb"], *few)["runs"][0]["run"] == str(runs["absorb"])
    if "english-char" not in pretrained_names():
        pytest.skip("no model comes with this copy of the package")
    assert evaluate(capsys, "english-char", *few)["runs"][0]["run"] == "english-char"
    assert main(["evaluate", "english-char", *map(str, few), "--device", "cpu"]) == 0
    assert "english-char: bayes-star on roulette" in capsys.readouterr().out


# ---- numbers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["roulette", *(pytest.param(name, marks=pytest.mark.slow) for name in ("uniform", "absorb"))]
)
def test_all_bounds_are_estimated_from_same_draws(name: str, runs: dict[str, Path], text: Path, capsys) -> None:
    record = evaluate(capsys, runs[name], "--data", text, "--bound", "all", "--draws", "4")
    bounds = record["runs"][0]["bounds"]
    assert list(bounds) == ["tight", "j1", "j2"]
    assert len({bound["evaluations"] for bound in bounds.values()}) == 1  # from the same draws
    assert [bound["earliest_time"] for bound in bounds.values()] == [0.0, 1e-4, 1e-4]
    for one in bounds:
        alone = evaluate(capsys, runs[name], "--data", text, "--draws", "4", "--bound", one)["runs"][0]["bounds"][one]
        near = (
            1e-12 if one == "tight" else 4 * math.hypot(alone["monte_carlo_stderr"], bounds[one]["monte_carlo_stderr"])
        )
        assert alone["nats_per_token"] == pytest.approx(bounds[one]["nats_per_token"], abs=near)


def test_units_and_protocol(runs: dict[str, Path], text: Path, capsys) -> None:
    record = evaluate(capsys, runs["roulette"], "--data", text, "--draws", "2")
    bound, data = record["runs"][0]["bounds"]["tight"], record["data"]
    assert bound["perplexity"] == pytest.approx(math.exp(bound["nats_per_token"]))
    # a character tokenizer: tokens are characters, of which all are bytes
    assert bound["bits_per_character"] == pytest.approx(bound["bits_per_token"])
    assert bound["bits_per_byte"] == pytest.approx(bound["bits_per_token"])
    assert bound["perplexity_per_word"] == pytest.approx(math.exp(bound["nats_per_token"] * len(TEXT) / WORDS))
    assert data["evaluated_words"] == pytest.approx(WORDS * data["evaluated_tokens"] / len(TEXT))
    assert data["blocks"] * data["length"] + data["remainder_tokens"] == data["tokens"] == len(TEXT)
    assert data["evaluated_sequences"] == data["blocks"] == bound["sequences"]
    for name in ("protocol_sha256", "content_sha256", "policy_sha256", "tokenizer_fingerprint"):
        assert len(data[name]) == 64
    assert data["detokenizer"] == "none"


def test_protocol_hash_covers_measured_sequences(runs: dict[str, Path], text: Path, capsys) -> None:
    few = ("--data", text, "--draws", "1", "--max-sequences")
    hashes = [evaluate(capsys, runs["causal"], *few, n)["data"]["protocol_sha256"] for n in ("20", "40", "63", "200")]
    assert len(set(hashes)) == 3
    assert hashes[2] == hashes[3], "all 63 of them, either way"
    other = text.with_name("other.txt")
    other.write_text(TEXT[::-1], encoding="utf-8")
    assert evaluate(capsys, runs["causal"], "--data", other, *few[2:], "20")["data"]["protocol_sha256"] != hashes[0]


def test_bits_per_byte_use_measured_blocks(tmp_path: Path, text: Path, capsys) -> None:
    """A text whose second half has two-byte characters, and a remainder of four-byte ones, counted by decoding."""
    tokenizer = CharTokenizer("ab é😀")
    run = save_random(tmp_path / "run", "absorb", "ar", tokenizer=tokenizer)
    text.write_text("ab " * 200 + "éé " * 200 + "😀" * 20, encoding="utf-8")
    for more in ([], ["--max-sequences", "4"], ["--max-sequences", "1"]):
        record = evaluate(capsys, run, "--data", text, *more)
        data, bound = record["data"], record["runs"][0]["bounds"]["tight"]
        folder = load_folder(run)
        most = int(more[1]) if more else None
        blocks, _ = choose_sequences(load_data(str(text), folder.tokenizer, folder.length), most, folder.tokenizer)
        shown = folder.tokenizer.decode(blocks.flatten().numpy())
        assert data["evaluated_bytes"] == pytest.approx(len(shown.encode()))
        assert data["evaluated_characters"] == pytest.approx(len(shown))
        bits = bound["bits_per_token"] * len(shown) / len(shown.encode())
        assert bound["bits_per_byte"] == pytest.approx(bits)
        pair = evaluate(capsys, run, run, "--data", text, *more)
        assert pair["comparisons"][0]["bytes_per_unit"] == pytest.approx(len(shown.encode()) / len(blocks))


def test_function_and_command_give_same_record(runs: dict[str, Path], text: Path, capsys) -> None:
    record = evaluate(capsys, runs["roulette"], runs["absorb"], "--data", text, "--draws", "2", "--max-sequences", "9")
    loaded = cedd.load(runs["roulette"], "cpu")
    result = cedd.evaluate([loaded, runs["absorb"]], text, draws=2, max_sequences=9, device="cpu")
    assert {**json.loads(json.dumps(result.record())), "seconds": 0} == {**record, "seconds": 0}
    assert result.perplexity == record["runs"][0]["bounds"]["tight"]["perplexity"]
    assert list(result.perplexity_ci95) == record["runs"][0]["bounds"]["tight"]["perplexity_ci95"]
    alone = cedd.evaluate(loaded, text, draws=2, max_sequences=9, tolerance=0.5)
    assert alone.evaluations[0].main.reached
    with pytest.raises(ValueError, match=r"unexpected argument 'drws' in .*; did you mean 'draws'"):
        cedd.evaluate(loaded, text, drws=2)
    with pytest.raises(ValueError, match="at least one model"):
        cedd.evaluate([], text)


def test_result_matches_estimate_bound(runs: dict[str, Path], text: Path) -> None:
    folder = load_folder(runs["absorb"])
    data, protocol = choose_sequences(load_data(str(text), folder.tokenizer, folder.length), 7, folder.tokenizer)
    assert data.shape == (7, folder.length)
    found = measure(folder, data, protocol, EvaluationOptions(draws=4, seed=3)).main
    generator = torch.Generator().manual_seed(3)
    direct = cedd.estimate_bound(folder.model, folder.process, data, method="cedd", draws=4, generator=generator)
    assert torch.equal(found.per_sequence, direct.per_sequence)


@pytest.mark.parametrize("steps", [pytest.param((), marks=pytest.mark.slow), ("--steps", "5")])
def test_order_likelihood_is_reported_next_to_bound(steps, runs: dict[str, Path], text: Path, capsys) -> None:
    words = (runs["absorb"], "--data", text, "--draws", "2", "--max-sequences", "3")
    (run,) = evaluate(capsys, *words, "--order", "margin", *steps, "--batch", "2")["runs"]
    assert run["bounds"]["tight"] == evaluate(capsys, *words, "--batch", "2")["runs"][0]["bounds"]["tight"]
    folder, found = load_folder(runs["absorb"]), run["bounds"]["margin-order"]
    data, _ = choose_sequences(load_data(str(text), folder.tokenizer, folder.length), 3, folder.tokenizer)
    taken = int(steps[1]) if steps else min(default_steps(folder.length), folder.length)
    options = SamplingOptions(sampler="margin", steps=taken, exclude=never_written(folder.tokenizer))
    nats = order_nats(folder.model, folder.process, data, method="cedd", options=options) / folder.length
    assert found["nats_per_token"] == pytest.approx(float(nats.mean()), rel=1e-12)
    assert found["ci95"] == pytest.approx(mean_interval(nats))
    assert (found["monte_carlo_stderr"], found["evaluations"]) == (0.0, 3 * taken)
    assert main(["evaluate", *map(str, words), "--order", "margin", "--steps", "2", "--device", "cpu"]) == 0
    assert "margin-order is the exact likelihood of a sampler" in " ".join(capsys.readouterr().out.split())


def test_order_likelihood_uses_sampling_defaults_of_model(runs: dict[str, Path], text: Path, tmp_path, capsys):
    """The model's own temperature and top-p apply unless they are given. Text that they exclude is never drawn."""
    own = tmp_path / "own"
    shutil.copytree(runs["absorb"], own)
    config = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps(config | {"sampling": {"temperature": 0.8, "top_p": 0.5}}))
    words = ("--data", text, "--draws", "2", "--max-sequences", "2", "--order", "margin", "--steps", "4")
    (given,) = evaluate(capsys, runs["absorb"], *words, "--temperature", "0.8")["runs"]
    (plain,) = evaluate(capsys, own, *words, "--top-p", "1")["runs"]
    assert plain["bounds"]["margin-order"] == given["bounds"]["margin-order"]
    (cut,) = evaluate(capsys, own, *words)["runs"]
    assert cut["bounds"]["margin-order"]["infinite"]
    assert main(["evaluate", *map(str, (own, *words)), "--device", "cpu"]) == 0
    assert "margin-order is infinite: the sampler never draws some" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("name", "freedom"), [("flow", True), ("causal", False)])
def test_methods_with_their_own_bound(name: str, freedom: bool, runs: dict[str, Path], text: Path, capsys) -> None:
    record = evaluate(capsys, runs[name], "--data", text, "--bound", "all", "--draws", "4")
    bounds = record["runs"][0]["bounds"]
    assert list(bounds) == ["tight"]
    assert (bounds["tight"]["monte_carlo_stderr"] > 0) is freedom
    assert math.isfinite(bounds["tight"]["nats_per_token"])


def test_corrector_increases_bound(runs: dict[str, Path], text: Path, capsys) -> None:
    plain, strong = (
        evaluate(capsys, runs["flow"], "--data", text, "--draws", "4", *more)["runs"][0]["bounds"]["tight"]
        for more in ([], ["--corrector", "5"])
    )
    assert strong["nats_per_token"] > plain["nats_per_token"]


def test_scaled_scores_have_finite_bound(runs: dict[str, Path], text: Path, capsys) -> None:
    """Their path stops at the time in the folder, or at --time-floor; both bounds are valid."""
    few = ("--data", text, "--draws", "4")
    usual = evaluate(capsys, runs["scaled"], *few)["runs"][0]["bounds"]["tight"]
    assert not usual["infinite"]
    assert usual["earliest_time"] == 1e-3
    later = evaluate(capsys, runs["scaled"], *few, "--time-floor", "0.1")["runs"][0]["bounds"]["tight"]
    assert later["earliest_time"] == 0.1
    assert later["nats_per_token"] < usual["nats_per_token"]
    down_to_zero = evaluate(capsys, runs["scaled"], *few, "--time-floor", "0")["runs"][0]["bounds"]["tight"]
    assert down_to_zero["infinite"]
    assert down_to_zero["why_infinite"] == "the cost of clean tokens is infinite"
    assert main(["evaluate", str(runs["scaled"]), *map(str, few), "--time-floor", "0", "--device", "cpu"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "The bound is infinite: the cost of clean tokens is infinite. --time-floor 1e-3 stops" in said


def test_evaluation_runs_until_tolerance_is_reached(runs: dict[str, Path], text: Path, capsys) -> None:
    options = ("--data", text, "--draws", "2", "--max-sequences", "20", "--fixed-set")
    rough = evaluate(capsys, runs["absorb"], *options)["runs"][0]["bounds"]["tight"]
    fine = evaluate(capsys, runs["absorb"], *options, "--tolerance", "4%")["runs"][0]["bounds"]["tight"]
    assert fine["tolerance_reached"]
    low, high = fine["ci95"]
    assert (high - low) / 2 <= math.log1p(0.04)
    assert fine["evaluations"] >= rough["evaluations"]


@pytest.fixture(scope="module")
def with_unknown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer reads unknown characters as U+FFFD."""
    tokenizer = CharTokenizer(ALPHABET, unknown="\ufffd")
    return save_random(tmp_path_factory.mktemp("unknown") / "run", tokenizer=tokenizer)


def test_text_with_many_unknown_characters_is_rejected(with_unknown: Path, text: Path, capsys) -> None:
    few = ("--draws", "2", "--max-sequences", "20")
    assert evaluate(capsys, with_unknown, "--data", text, *few)["data"]["unknown_share"] == 0
    foreign = text.with_name("foreign.txt")
    foreign.write_text("\u05e9\u05dc\u05d5\u05dd " * 400, encoding="utf-8")  # four of five characters
    words = ["evaluate", str(with_unknown), "--data", str(foreign), *few, "--device", "cpu"]
    assert main(words) == 2
    assert "80.0% of the characters are unknown" in capsys.readouterr().err
    assert main([*words, "--max-unknown", "1"]) == 0
    assert "80.00% of the tokens stand for characters" in " ".join(capsys.readouterr().out.split())
    record = evaluate(capsys, *words[1:-2], "--max-unknown", "1")
    assert record["data"]["unknown_share"] == pytest.approx(0.8, abs=0.01)
    model = cedd.load(with_unknown, "cpu")
    with pytest.raises(ValueError, match="unknown to the tokenizer"):
        model.perplexity("\u05e9\u05dc\u05d5\u05dd")
    assert model.perplexity("\u05e9 cat", draws=2, max_unknown=0.5).unknown_share == 0.2


def test_rare_unknown_character_is_reported_but_accepted(with_unknown: Path, text: Path, capsys) -> None:
    text.write_text(TEXT + "\u05e9" + TEXT, encoding="utf-8")
    assert 0 < evaluate(capsys, with_unknown, "--data", text, "--draws", "2")["data"]["unknown_share"] < 0.001


# ---- two runs -----------------------------------------------------------------------------------------------


def test_runs_are_compared_on_same_draws(runs: dict[str, Path], text: Path, capsys) -> None:
    record = evaluate(capsys, runs["roulette"], runs["absorb"], "--data", text, "--draws", "4")
    first, second = (run["bounds"]["tight"] for run in record["runs"])
    comparison = record["comparison"]
    difference = second["nats_per_token"] - first["nats_per_token"]
    assert comparison["difference_nats_per_token"] == pytest.approx(difference, abs=1e-9)
    assert comparison["ci95"][0] < difference < comparison["ci95"][1]
    assert -1 <= comparison["correlation"] <= 1
    itself = evaluate(capsys, runs["roulette"], runs["roulette"], "--data", text, "--draws", "4")["comparison"]
    assert itself["difference_nats_per_token"] == 0
    assert itself["ci95"] == [0, 0]


def estimate_of(values: torch.Tensor) -> BoundEstimate:
    return BoundEstimate("tight", float(values.mean()), values, 0.1, 0.1, 5, False, 0.0, 1, 1, 8)


def test_paired_interval_is_interval_of_differences() -> None:
    generator = torch.Generator().manual_seed(1)
    hard = 3 * torch.randn(50, generator=generator, dtype=torch.float64)
    noise = 0.1 * torch.randn(2, 50, generator=generator, dtype=torch.float64)
    low, high = compare(estimate_of(hard + noise[0]), estimate_of(hard + 0.2 + noise[1])).ci95
    assert low is not None
    assert high is not None
    assert low < 0.2 < high
    assert high - low < 0.1  # the interval of each value alone is 0.85 wide on each side
    with pytest.raises(ValueError, match="same sequences"):
        compare(estimate_of(hard), estimate_of(hard[1:]))


def test_huge_perplexities_are_shown_without_overflow(
    runs: dict[str, Path], text: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ratios of a nearly untrained network cost hundreds of nats per token; such figures are abbreviated."""

    def costly(*arguments, **options) -> dict[str, BoundEstimate]:
        made = estimate_bounds(*arguments, **options)
        return {
            name: replace(one, nats_per_token=500.0, per_sequence=1e3 * one.per_sequence) for name, one in made.items()
        }

    monkeypatch.setattr("cedd.evaluation.perplexity.estimate_bounds", costly)
    both = [str(runs["roulette"]), str(runs["scaled"])]
    words = ["evaluate", *both, "--data", str(text), "--draws", "2", "--device", "cpu"]
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["comparison"]["perplexity_ratio"] is None
    assert main(words) == 0
    table = capsys.readouterr().out
    assert "1.404e+217" in table  # and not its 218 digits
    assert max(map(len, table.splitlines())) < 200


# ---- files ----------------------------------------------------------------------------------------------------


def test_per_sequence_values_are_written(runs: dict[str, Path], text: Path, tmp_path: Path, capsys) -> None:
    options = ("--data", text, "--draws", "2", "--bound", "all")
    array, lines = tmp_path / "values.npy", tmp_path / "values.jsonl"
    record = evaluate(capsys, runs["absorb"], *options, "--per-sequence", array)
    evaluate(capsys, runs["absorb"], runs["roulette"], *options, "--per-sequence", lines)
    values = np.load(array, allow_pickle=False)
    count = record["data"]["blocks"]
    assert values.shape == (3, count)
    assert values[0].mean() == pytest.approx(record["runs"][0]["bounds"]["tight"]["nats_per_token"])
    rows = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]
    assert [row["sequence"] for row in rows] == list(range(count))
    assert rows[5]["tight_nats_per_token:1:absorb"] == pytest.approx(values[0, 5])
    assert len(rows[0]) == 7


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_running_estimate_is_plotted(runs: dict[str, Path], text: Path, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"running{suffix}"
    cedd.evaluate(runs["absorb"], text, draws=2, max_sequences=10, device="cpu").save_plot(path)
    assert path.stat().st_size > 1000


def test_table_contains_key_results(
    runs: dict[str, Path], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # so that no cell is wrapped
    words = ["evaluate", str(runs["roulette"]), str(runs["absorb"]), "--data", str(text), "--draws", "2"]
    assert main([*words, "--plot", str(tmp_path / "plot.png"), "--device", "cpu"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for part in ("perplexity per token", "bits per byte", "roulette", "tokens left over"):
        assert part in said
    assert "Differences are paired over the same 63 sequences" in said
    assert main([words[0], words[1], *words[3:], "--device", "cpu"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for part in ("95% interval", "terminal", "bits per character", "network evaluations"):
        assert part in said


def test_requested_bounds(runs: dict[str, Path]) -> None:
    assert requested_bounds(load_folder(runs["absorb"]), "all") == ("tight", "j1", "j2")
    assert requested_bounds(load_folder(runs["causal"]), "all") == ("tight",)


# ---- bad input --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ABSORB", "--data", "EMPTY"], "empty"),
        (["ABSORB", "--data", "SHORT"], "fewer than one block of 32"),
        (["ABSORB", "--data", "FOREIGN"], "character '☃'"),
        (["ABSORB", "--data", "/no/such/file"], "file not found: /no/such/file"),
        (["ABSORB", "--data", "wikitxt2"], "did you mean 'wikitext2'?"),
        (["/no/such/run", "--data", "TEXT"], "no run or model at"),
        (["WEIGHTLESS", "--data", "TEXT"], "no weights"),
        (["MISMATCHED", "--data", "TEXT"], "not the one the model was trained with"),
        (["CAUSAL", "--data", "TEXT", "--bound", "j1"], "exact likelihood"),
        (["FLOW", "--data", "TEXT", "--bound", "j2"], "its own bound"),
        (["ABSORB", "--data", "TEXT", "--bound", "j3"], "j3"),
        (["ABSORB", "--data", "TEXT", "--tolerance", "small"], "a share such as 0.5%"),
        (["ABSORB", "--data", "TEXT", "--tolerance", "0"], "between 0 and 100%"),
        (["ABSORB", "--data", "TEXT", "--draws", "0"], "draws must be at least 1"),
        (["ABSORB", "--data", "TEXT", "--seed", "-3"], "--seed must be between 0 and 2^63 - 1 (got -3)"),
        (["ABSORB", "--data", "TEXT", "--steps", "8"], "no effect without --order"),
        (["ABSORB", "--data", "TEXT", "--top-p", "0.9"], "--top-p has no effect without --order"),
        (["ABSORB", "--data", "TEXT", "--order", "entropy", "--top-p", "2"], "--top-p must be in (0, 1]"),
        (["ABSORB", "--data", "TEXT", "--order", "entropy", "--steps", "0"], "at least 1"),
        (["CAUSAL", "--data", "EMPTY", "--order", "entropy"], "its bound is its exact likelihood"),
        (["ROULETTE", "--data", "EMPTY", "--order", "entropy"], "never change once revealed"),
        (["ABSORB", "--data", "EMPTY", "--batch", "0"], "--batch must be at least 1 (got 0)"),
        (["ABSORB", "--data", "TEXT", "--max-sequences", "0"], "--max-sequences must be at least 1"),
        (["ABSORB", "--data", "TEXT", "--corrector", "1"], "belongs to flow matching"),
        (["ABSORB", "--data", "TEXT", "--plot", "OUT/x.txt"], "must end in .png"),
        (["ABSORB", "--data", "TEXT", "--plot", "/nowhere/x.png"], "folder not found: /nowhere"),
        (["ABSORB", "--data", "TEXT", "--per-sequence", "OUT/x.csv"], "must end in .npy"),
    ],
)
def test_invalid_input_gives_one_line_error_and_writes_nothing(
    words: list[str], message: str, runs: dict[str, Path], text: Path, tmp_path: Path, capsys
) -> None:
    weightless, mismatched, out = (tmp_path / name for name in ("weightless", "mismatched", "out"))
    out.mkdir()
    for folder in (weightless, mismatched):
        folder.mkdir()
        for file in runs["absorb"].iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
    (weightless / "model.safetensors").unlink()
    config = json.loads((mismatched / "config.json").read_text(encoding="utf-8"))
    config["tokenizer"]["fingerprint"] = "0" * 64
    (mismatched / "config.json").write_text(json.dumps(config), encoding="utf-8")
    texts = {"EMPTY": "", "SHORT": "a cat", "FOREIGN": TEXT + "☃" + TEXT}
    for name, content in texts.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    named = {
        "TEXT": text,
        "ABSORB": runs["absorb"],
        "CAUSAL": runs["causal"],
        "ROULETTE": runs["roulette"],
        "FLOW": runs["flow"],
        "WEIGHTLESS": weightless,
        "MISMATCHED": mismatched,
    } | {name: tmp_path / name for name in texts}
    given = [str(named.get(word, word)).replace("OUT", str(out)) for word in words]
    assert main(["evaluate", *given, "--device", "cpu"]) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert message in said.err
    assert said.out == ""
    assert list(out.iterdir()) == []
