"""`cedd train`: output, exit codes, and one-line errors for invalid input."""

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from cedd.cli import main
from cedd.methods import method_from_config
from cedd.names import ALIASES
from cedd.training.config import PRESETS
from cedd.training.distributed import LossModule
from tests.training.processes import command, command_on_terminal, start_server, wait
from tests.training.runs import checkpoint_steps, write_corpus

Words = list[str]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def words(tmp_path: Path, cache: Path, out: Path) -> Words:
    """A run of a few steps on a small text."""
    corpus = write_corpus(tmp_path / "words.txt", 2000)
    small = "--length 12 --batch.size 8 --model.width 16 --model.depth 1 --steps 4 --evaluation.every 0 --device cpu"
    return ["train", "tiny", "--data", str(corpus), "--out", str(out), "--text.cache", str(cache), *small.split()]


def error_line(words: Words, capsys: pytest.CaptureFixture[str], code: int = 2) -> str:
    """The one-line error of a command."""
    assert main(words) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    lines = printed.err.splitlines()
    assert len(lines) == 1, printed.err
    assert lines[0].startswith("cedd: error: ")
    return lines[0]


@pytest.mark.usefixtures("pictures")
def test_train_prints_one_line_of_json(words: Words, out: Path, capsys: pytest.CaptureFixture[str]):
    words += ["--log-every", "1", "--json"]
    assert main(words) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert result["out"] == str(out)
    assert (result["step"], result["finished"], result["reason"]) == (4, True, "finished")
    assert result["loss"] > 0
    assert f"step 4: finished; model in {out}" in printed.err
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    # A second run has nothing to do; missing values are null in JSON.
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["loss"] is None
    # Without --json, nothing goes to stdout.
    assert main(words[:-1]) == 0
    assert capsys.readouterr().out == ""


def test_bound_of_scaled_scores_is_finite(words: Words, capsys: pytest.CaptureFixture[str]):
    quick = "--evaluation.every 4 --evaluation.sequences 4 --evaluation.draws 2 --evaluation.samples 0"
    assert main([*words, *quick.split(), "--method", "sedds", "--process", "uniform", "--json"]) == 0
    printed = capsys.readouterr()
    assert 0 < json.loads(printed.out)["bound"] < 1000
    assert "bound inf" not in printed.err


def test_settings_reach_the_run(words: Words, out: Path):
    changes = "--method sedd --process uniform --optimizer.schedule cosine --batch.accumulate 2 --keep 1"
    assert main([*words, *changes.split(), "--checkpoint-every", "1"]) == 0
    saved = json.loads((out / "train.json").read_text())
    assert (saved["method"], saved["process"]["name"]) == ("sedd", "uniform")
    assert (saved["optimizer"]["schedule"], saved["batch"]["accumulate"]) == ("cosine", 2)
    assert method_from_config(json.loads((out / "config.json").read_text())["method"]).name == "sedd"
    assert checkpoint_steps(out) == [4]


@pytest.mark.parametrize("alias", ALIASES)
def test_published_name_stands_for_method_and_process(words: Words, out: Path, alias: str):
    assert main([*words, "--method", alias]) == 0
    for file in ("train.json", "config.json"):
        saved = json.loads((out / file).read_text())
        assert (method_from_config(saved["method"]).name, saved["process"]["name"]) == ALIASES[alias]
    method, process = ALIASES[alias]
    assert main([*words, "--method", method, "--process", process, "--resume", "must"]) == 0


def test_presets_are_aligned_in_columns(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    lines = capsys.readouterr().out.splitlines()[-len(PRESETS) :]
    starts = {line.index(summary) for line, (summary, _) in zip(lines, PRESETS.values(), strict=True)}
    assert starts == {2 + max(map(len, PRESETS)) + 2}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--checkpoint-evry", "3"], "unexpected argument '--checkpoint-evry'; did you mean --checkpoint-every?"),
        (["--optimizer.amsgrad", "0.9"], "--optimizer.amsgrad"),
        (["--optimizer.momentum", "1"], "optimizer.momentum must be in [0, 1) (got 1.0"),
        (["--process.schedule", "cosin"], "--process.schedule: invalid choice: 'cosin'; did you mean 'cosine'?"),
        (["--process.until", "0.4"], "unexpected argument --process.until: roulette takes p_m, schedule"),
        (["--process.p-m"], "--process.p-m needs a value"),
        (["--process", "eroulette", "--process.mask-share.end", "1"], "mask_share takes start, stop, power"),
        (["--method", "sed"], "unknown method 'sed'; did you mean 'sedd'?"),
        (
            ["--method", "mdlm", "--process", "uniform"],
            "mdlm is ceddt on absorb: leave the process out, or use ceddt on uniform",
        ),
        (["--method", "dfm"], "absorb"),
        (["--data", "/nowhere/words.txt"], "file not found: /nowhere/words.txt"),
        (["--steps", "0"], "steps must be at least 1"),
        (["--optimizer.ema-every", "0"], "--optimizer.ema-every must be at least 1, if given (got 0"),
        (
            ["--optimizer.ema-every", "8", "--steps", "7"],
            "--optimizer.ema-every must be at most the number of steps, 7",
        ),
        (["--seed", "-5"], "seed must be between 0 and 2^63 - 1 (got -5"),
        (["--seed", str(2**63)], "seed must be between 0 and 2^63 - 1"),
        (["--model.width", "18", "--model.heads", "4"], "width must be a multiple of 8"),
        (["--model.depth", "0"], "depth must be at least 1"),
        (["--process.p-m", "2"], "--process.p-m must be in [1e-20, 1] (got 2.0"),
        (["--optimizer.rate", "nan"], "optimizer.rate must be positive and finite (got nan"),
        (["--optimizer.rate", "inf"], "optimizer.rate must be positive and finite (got inf"),
        (["--optimizer.beta1", "1.5"], "optimizer.beta1 must be in [0, 1) (got 1.5"),
        (["--optimizer.weight-decay", "-1"], "--optimizer.weight-decay must be finite, and 0 (none) or more (got -1.0"),
        (["--optimizer.warmup", "-5"], "optimizer.warmup must be at least 0 (got -5"),
        (["--optimizer.clip", "nan"], "optimizer.clip must be a norm, or 0 for no clipping (got nan"),
        (["--optimizer.final-share", "2"], "--optimizer.final-share must be in [0, 1] (got 2.0"),
        (["--evaluation.samples", "-1"], "--evaluation.samples must be at least 0, which turns it off (got -1"),
        (
            ["--batch.size", "7", "--batch.accumulate", "2"],
            "--batch.size must be a multiple of batch.accumulate = 2 (got 7)",
        ),
        (["--data", "EMPTY"], "empty.txt is empty: use a file with text in it"),
        (["--text.cache", "EMPTY"], "empty.txt/packed: Not a directory"),
        (["--text.tokenizer", "bpe:abc"], "needs a vocabulary size of at least 2, as in bpe:8000 (got 'abc')"),
        (["--text.holdout", "1.5"], "--text.holdout must be between 0 and 1 (got 1.5)"),
        (["--text.holdout", "nan"], "--text.holdout must be between 0 and 1 (got nan)"),
        (
            ["--text.holdout", "nan", "--text.holdout-by", "documents", "--text.tokenizer", "bpe:300"],
            "--text.holdout must be between 0 and 1 (got nan)",
        ),
        (["--resume", "must"], "no run to resume"),
        (["--text.tokenizer", "words"], "words"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_invalid_settings_give_one_line_error(
    words: Words, out: Path, changes: Words, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    empty = tmp_path / "empty.txt"
    empty.touch()
    assert message in error_line([*words, *(str(empty) if word == "EMPTY" else word for word in changes)], capsys)
    assert not out.exists()


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory. Tried to ...")])
def test_out_of_memory_gives_one_line_error(
    words: Words, error: Exception, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr("cedd.tasks.train.run_training", refuse)
    assert "out of memory; use a smaller batch" in error_line(words, capsys, code=1)


def test_folder_of_another_run_gives_one_line_error(words: Words, out: Path, capsys: pytest.CaptureFixture[str]):
    assert main(words) == 0
    capsys.readouterr()
    refused = error_line([*words, "--optimizer.rate", "1"], capsys)
    assert f"{out} holds another run (optimizer.rate is 1.0, not 0.003); add --allow-changes" in refused
    assert f"{out} already holds a run" in error_line([*words, "--resume", "never"], capsys)


def test_nan_loss_gives_one_line_error(
    words: Words, out: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    healthy, calls = LossModule.forward, iter(range(100))

    def forward(module: LossModule, batch: object) -> torch.Tensor:
        return healthy(module, batch) * (float("nan") if next(calls) == 2 else 1.0)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(LossModule, "forward", forward)
    assert main([*words, "--checkpoint-every", "2"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("cedd: error: step 3 (batch 2): the loss is nan")
    assert str(out / "checkpoints" / "step-00000002") in line


def wait_for_steps(child: BaseProcess, out: Path, meanwhile: Callable[[], object] = lambda: None) -> int:
    """Wait until a few steps are logged; return the child's process id."""
    log, deadline = out / "log.jsonl", time.monotonic() + 60
    while not (log.is_file() and log.read_text().count("\n") > 3):
        assert child.exitcode is None
        meanwhile()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert child.pid is not None
    return child.pid


LONG = ("--json", "--steps", "100000", "--checkpoint-every", "100000", "--log-every", "1")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_saves_and_sets_exit_code(words: Words, out: Path, tmp_path: Path, number: signal.Signals):
    """With a real signal: exit code 128 plus its number, a message, a checkpoint; the same command resumes."""
    start_server()
    child = command([*words, *LONG], tmp_path / "first")
    os.kill(wait_for_steps(child, out), number)
    assert wait(child) == 128 + number
    result = json.loads((tmp_path / "first" / "stdout").read_text())
    assert (result["reason"], result["finished"], result["signal"]) == ("stopped", False, number)
    assert f"step {result['step']}: stopped; model in {out}" in (tmp_path / "first" / "stderr").read_text()
    assert checkpoint_steps(out) == [result["step"]]
    assert main([*words, "--steps", str(result["step"] + 1)]) == 0
    assert checkpoint_steps(out)[-1] == result["step"] + 1


@pytest.mark.slow
def test_closed_terminal_saves_and_stops(words: Words, out: Path):
    """Closing the window sends SIGHUP, and writing to the terminal fails from then on."""
    start_server()
    ours, theirs = os.openpty()
    child = command_on_terminal([*words, *LONG], os.ttyname(theirs))
    os.close(theirs)
    os.set_blocking(ours, False)
    shown = bytearray()

    def read() -> None:
        with suppress(BlockingIOError, OSError):  # nothing yet, or not yet opened by the child
            shown.extend(os.read(ours, 4096))

    wait_for_steps(child, out, read)
    os.close(ours)
    assert b"step" in shown  # its bar
    assert wait(child) == 128 + signal.SIGHUP
    assert len(checkpoint_steps(out)) == 1
