"""The log of a run: a progress bar, log.jsonl, TensorBoard on request, and a plot at the end."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from cedd.storage import JSONMapping, JSONObject, atomic_file, atomic_write, finite

LOG_FILE = "log.jsonl"
PLOT_FILE = "loss.png"


def read_log(path: Path) -> list[JSONObject]:
    """The records of a log; truncated and damaged lines are skipped."""
    return _split_log(path)[0]


def _split_log(path: Path) -> tuple[list[JSONObject], int]:
    """The records of a log, and the number of complete lines that are not records."""
    if not path.is_file():
        return [], 0
    *lines, last = [_record_in(line) for line in path.read_bytes().split(b"\n")]
    return [record for record in (*lines, last) if record is not None], lines.count(None)


def _record_in(line: bytes) -> JSONObject | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if _is_record(value) else None


_FIGURES = {"train": ("loss",), "bound": ("nats_per_token", "stderr")}
"""Fields of each kind of record: numbers, or null if not finite."""


def _is_record(value: object) -> bool:
    """Whether a JSON value is a record written by a run."""
    if not isinstance(value, dict) or not isinstance(value.get("step"), int) or not isinstance(value.get("kind"), str):
        return False
    names = _FIGURES.get(value["kind"], ())
    return all(name in value and _is_figure(value[name]) for name in names)


def _is_figure(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and abs(value) < sys.float_info.max)


class RunLog:
    """The log of one run. On a resume, records after the checkpoint's step are removed.

    Args:
        folder: where log.jsonl is written; None on ranks other than the first, which log nothing.
        steps: total number of steps.
        step: steps taken before.
        console: where the progress bar is shown.
        tensorboard: whether to write the log for TensorBoard too.
        on_log: called with each record.
    """

    def __init__(
        self,
        folder: Path | None,
        steps: int,
        step: int,
        console: Console,
        tensorboard: bool = False,
        on_log: Callable[[JSONMapping], None] | None = None,
    ) -> None:
        self._on_log = on_log
        self._writer = _tensorboard_writer(folder, step) if tensorboard and folder is not None else None
        self._console = console
        self._file = None if folder is None else self._continued(folder / LOG_FILE, step)
        self._progress = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[figures]}", markup=False),
            TimeRemainingColumn(),
            console=console,
            refresh_per_second=4,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("training", total=steps, completed=step, figures="")
        self._last_print = 0.0

    def __enter__(self) -> RunLog:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        if self._file is not None:
            self._file.close()
        if self._writer is not None:
            self._writer.close()

    def _continued(self, path: Path, step: int) -> TextIO:
        """The log, open for appending, without records after `step`; damaged lines are removed with a warning."""
        records, damaged = _split_log(path)
        if damaged > 0:
            self.say(f"{path} is damaged: {damaged} line{'s' * (damaged > 1)} cannot be read and will be dropped")
        kept = [record for record in records if record["step"] <= step]
        atomic_write(path, b"".join(json.dumps(record).encode() + b"\n" for record in kept))
        return path.open("a", encoding="utf-8")

    def write(self, step: int, kind: str, values: JSONMapping) -> None:
        """Append a record to the file, and pass it to `on_log` and its numbers to TensorBoard."""
        record = {"step": step, "kind": kind, **finite(values)}
        if self._file is not None:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        if self._on_log is not None:
            self._on_log(record)
        if self._writer is not None:
            for name, value in values.items():
                if isinstance(value, int | float):
                    self._writer.add_scalar(f"{kind}/{name}", value, step)

    def advance(self, step: int, figures: str) -> None:
        """Update the progress bar; without a terminal, print a line every few seconds."""
        self._progress.update(self._task, completed=step, figures=figures)
        now = time.monotonic()
        if not self._console.is_terminal and now - self._last_print > 5.0:
            self._last_print = now
            self._console.print(f"step {step}  {figures}", highlight=False, soft_wrap=True)

    def expect(self, steps: int) -> None:
        """Set the total number of steps."""
        self._progress.update(self._task, total=steps)

    def say(self, message: str) -> None:
        self._console.print(message, highlight=False, markup=False, soft_wrap=True)


def _tensorboard_writer(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError("TensorBoard is not installed; pip install 'cedd[log]', or leave --tensorboard off") from error
    return SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)


def plot_log(folder: Path) -> Path | None:
    """Plot loss and bound over steps to loss.png; None if there is nothing to plot."""
    records = read_log(folder / LOG_FILE)
    steps = [r for r in records if r["kind"] == "train"]
    bounds = [r for r in records if r["kind"] == "bound" and r["nats_per_token"] is not None]
    if not steps:
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot([r["step"] for r in steps], [r["loss"] for r in steps], lw=0.8, color="tab:blue", label="training loss")
    if bounds:
        x = [r["step"] for r in bounds]
        y = [r["nats_per_token"] for r in bounds]
        band = [1.96 * (r["stderr"] or 0.0) for r in bounds]
        axes.errorbar(x, y, yerr=band, color="tab:orange", marker="o", ms=3, label="validation bound, 95%")
    axes.set_xlabel("step")
    axes.set_ylabel("nats per token")
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    path = folder / PLOT_FILE
    with atomic_file(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
    return path
