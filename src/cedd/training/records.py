"""The records of a run: a progress bar, log.jsonl, TensorBoard on request, and a plot at the end."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from cedd.storage import atomic_file, atomic_write, finite

LOG_FILE = "log.jsonl"
PLOT_FILE = "loss.png"


def read_log(path: Path) -> list[dict[str, Any]]:
    """The records of a log; a line that was truncated by a kill, or is none of ours, is skipped."""
    records: list[dict[str, Any]] = []
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if _is_record(record):
                records.append(record)
    return records


def _is_record(value: Any) -> bool:
    """Whether a line of a log is one that a run wrote."""
    if not isinstance(value, dict) or not isinstance(value.get("step"), int) or "kind" not in value:
        return False
    if value["kind"] == "nonfinite":  # its figures are words
        return True
    figures = (value.get(name) for name in ("loss", "nats_per_token", "stderr"))
    return all(figure is None or isinstance(figure, int | float) for figure in figures)


class Records:
    """The records of one run. On a resume, what was logged after the checkpoint's step is removed.

    Without a folder nothing is kept: ranks other than the first have none.
    """

    def __init__(self, folder: Path | None, steps: int, step: int, console: Console, tensorboard: bool = False) -> None:
        self._writer = _tensorboard_writer(folder, step) if tensorboard and folder is not None else None
        self._file = None if folder is None else _continue_log(folder / LOG_FILE, step)
        self._console = console
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

    def __enter__(self) -> Records:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        if self._file is not None:
            self._file.close()
        if self._writer is not None:
            self._writer.close()

    def write(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        """Append a record, flushed to the file, and pass its numbers to TensorBoard."""
        if self._file is not None:
            self._file.write(json.dumps({"step": step, "kind": kind, **finite(values)}) + "\n")
            self._file.flush()
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
        """The run has so many steps now."""
        self._progress.update(self._task, total=steps)

    def say(self, message: str) -> None:
        self._console.print(message, highlight=False, markup=False, soft_wrap=True)


def _continue_log(path: Path, step: int) -> TextIO:
    """The log, open for more, without what was written after `step`."""
    kept = [record for record in read_log(path) if record.get("step", 0) <= step]
    atomic_write(path, b"".join(json.dumps(record).encode() + b"\n" for record in kept))
    return path.open("a", encoding="utf-8")


def _tensorboard_writer(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError("TensorBoard is not installed; pip install 'cedd[log]', or leave --tensorboard off") from error
    return SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)


def plot_log(folder: Path) -> Path | None:
    """The loss and the bound over steps, as loss.png; None where there is nothing to draw."""
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
