"""The output of a run: log, progress line and plot."""

import json
import re
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from cedd.storage import finite
from cedd.training.config import TrainConfig
from cedd.training.run_log import LOG_FILE, RunLog, plot_log, read_log


def quiet() -> Console:
    return Console(quiet=True)


def test_records_after_resumed_step_are_dropped(tmp_path: Path):
    with RunLog(tmp_path, 10, 0, quiet()) as records:
        for step in range(1, 6):
            records.write(step, "train", {"loss": 1.0 / step})
    with (tmp_path / LOG_FILE).open("a") as log:
        log.write('{"step": 6, "ki')
    with RunLog(tmp_path, 10, 3, quiet()) as records:
        records.write(4, "train", {"loss": 9.0})
    assert [(r["step"], r["loss"]) for r in read_log(tmp_path / LOG_FILE)] == [(1, 1.0), (2, 0.5), (3, 1 / 3), (4, 9.0)]


def test_damaged_log_is_continued_with_warning(tmp_path: Path):
    path, screen = tmp_path / LOG_FILE, StringIO()
    good = b'{"step": 1, "kind": "train", "loss": 1.5}\n'
    records = (
        {"step": 1, "kind": "train"},
        {"step": 2, "kind": "bound", "stderr": 1},
        {"step": 1, "kind": "train", "loss": 10**400},
        {"step": 2, "kind": 5},
        [],
    )
    damage = [
        b"\xff\xfe\x00\n",
        b"\n",
        b"[" * 99_999 + b"\n",
        *(json.dumps(record).encode() + b"\n" for record in records),
    ]
    path.write_bytes(good + b"".join(damage) + good + b'{"step": 2, "ki')
    with RunLog(tmp_path, 10, 3, Console(file=screen, width=300)) as log:
        log.write(4, "train", {"loss": 9.0})
    assert [(r["step"], r["loss"]) for r in read_log(path)] == [(1, 1.5), (1, 1.5), (4, 9.0)]
    assert screen.getvalue() == f"{path} is damaged: {len(damage)} lines cannot be read and will be dropped\n"
    assert plot_log(tmp_path) is not None


def test_records_are_written_to_disk_immediately(tmp_path: Path):
    with RunLog(tmp_path, 10, 0, quiet()) as records:
        records.write(1, "train", {"loss": 1.0})
        assert len(read_log(tmp_path / LOG_FILE)) == 1


def test_nothing_is_written_without_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with RunLog(None, 10, 0, quiet(), tensorboard=True) as records:
        records.write(1, "train", {"loss": 1.0})
    assert not list(tmp_path.iterdir())


def test_nonfinite_numbers_become_null():
    values = {"a": float("inf"), "b": [float("nan"), 2.0], "c": 1.5, "d": "inf", "e": None, "f": 3}
    assert finite(values) == {"a": None, "b": [None, 2.0], "c": 1.5, "d": "inf", "e": None, "f": 3}


def test_progress_line_shows_step_metrics_and_time_left(tmp_path: Path):
    screen = StringIO()
    console = Console(file=screen, force_terminal=True, width=100)
    with RunLog(tmp_path, 200, 50, console) as records:
        records.advance(51, "loss 1.2345  9,876 tokens/s")
    assert "step 51/200" in screen.getvalue()
    assert "loss 1.2345  9,876 tokens/s" in screen.getvalue()
    assert "-:--:--" in screen.getvalue()  # one step is too few to estimate the time left


def test_lines_are_plain_and_unwrapped_without_a_terminal(tmp_path: Path):
    screen = StringIO()
    long = "/a/folder" * 20
    with RunLog(tmp_path, 200, 0, Console(file=screen, width=80)) as records:
        records.advance(1, "loss 1.2345")
        records.advance(2, "loss 1.1")  # too soon after the first for another line
        records.say(f"resuming {long} [1.5, 1.6]")
    assert screen.getvalue().splitlines() == ["step 1  loss 1.2345", f"resuming {long} [1.5, 1.6]"]


def test_plot_of_loss_and_bound_is_written_as_png(tmp_path: Path):
    assert plot_log(tmp_path) is None
    with RunLog(tmp_path, 10, 0, quiet()) as records:
        for step in range(1, 5):
            records.write(step, "train", {"loss": 1.0 / step})
        records.write(2, "bound", {"nats_per_token": 1.0, "stderr": 0.1})
        records.write(4, "bound", {"nats_per_token": float("inf"), "stderr": float("nan")})
        records.write(4, "sample", {"text": "one two"})
    picture = plot_log(tmp_path)
    assert picture is not None
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.jsonl", "loss.png"]


def test_tensorboard_on_request(tmp_path: Path):
    if find_spec("tensorboard") is None:
        with pytest.raises(ValueError, match=r"pip install 'cedd\[log\]'"):
            RunLog(tmp_path, 10, 0, quiet(), tensorboard=True)
        return
    with RunLog(tmp_path, 10, 0, quiet(), tensorboard=True) as records:
        records.write(1, "train", {"loss": 1.0, "note": "text is left out"})
    assert list((tmp_path / "tensorboard").glob("events.out.tfevents*"))


def test_on_log_receives_every_record(tmp_path: Path):
    found: list[Mapping[str, Any]] = []
    with RunLog(tmp_path, 10, 0, quiet(), on_log=found.append) as records:
        records.write(1, "train", {"loss": 1.0, "norm": float("inf")})
        records.write(2, "bound", {"nats_per_token": 2.0, "stderr": 0.1, "ci95": (1.8, 2.2)})
    assert found == read_log(tmp_path / LOG_FILE)


def test_wandb_example_in_docs_logs_loss_and_bound(config: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch):
    """Runs the code of docs/guides/train.md with a stub wandb module that records its calls."""
    page = (Path(__file__).parents[2] / "docs" / "guides" / "train.md").read_text(encoding="utf-8")
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "wandb" in block]
    logged: list[tuple[int, dict[str, float]]] = []
    wandb = SimpleNamespace(init=lambda **_: None, log=lambda figures, step: logged.append((step, figures)))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    chosen = config("run", {"evaluation.every": 4, "evaluation.sequences": 4, "evaluation.samples": 0, "steps": 4})
    monkeypatch.setattr(TrainConfig, "preset", lambda *_, **__: chosen)
    exec(code, {})
    assert [step for step, figures in logged if "train/loss" in figures] == [1, 2, 3, 4]
    (last,) = [figures for _, figures in logged if "bound/nats_per_token" in figures]
    assert last["bound/perplexity"] > 1
