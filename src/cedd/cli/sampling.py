"""What the commands that sample share: their settings on the command line, and the live view."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.live import Live
from rich.text import Text
from torch import Tensor

from cedd.data.tokenizers import MASK_CHARACTER
from cedd.samplers import Corrector
from cedd.samplers.loop import Callback
from cedd.tasks.setting import Settings
from cedd.tasks.trajectory import Trajectory


@dataclass(frozen=True)
class SamplerOptions:
    """How to sample."""

    sampler: Literal["analytic", "euler", "tau-leaping", "first-hitting"] = "analytic"
    steps: int = 256
    """Steps from noise to data (first-hitting takes one a token, whatever this says)."""
    grid: Literal["uniform", "jumps"] = "uniform"
    """Where the steps lie: evenly in time, or evenly in jumps."""
    temperature: float = 1.0
    top_p: float = 1.0
    corrector: float | None = None
    """Strength of flow matching's corrector (dfm only; the paper's is 1)."""
    batch: int | None = None
    """Sequences at once; by default all, and fewer when the memory does not suffice."""

    def settings(self, seed: int | None) -> Settings:
        corrector = None if self.corrector is None else Corrector(self.corrector)
        return Settings(self.sampler, self.steps, self.temperature, self.top_p, self.grid, corrector, self.batch, seed)


class _View:
    """Draws the latest state when the terminal asks for it, a few times a second."""

    def __init__(self, trajectory: Trajectory) -> None:
        self._trajectory = trajectory

    def __rich__(self) -> Text:
        return frame_text(self._trajectory, -1)


def frame_text(trajectory: Trajectory, frame: int) -> Text:
    """One frame in colours: masks dim, what just changed bright."""
    if not trajectory.frames:
        return Text("")
    last = len(trajectory.frames) + frame if frame < 0 else frame
    changed, text = trajectory.changed(last), Text()
    for piece, new in zip(trajectory.pieces(trajectory.frames[last]), changed, strict=True):
        text.append(piece, style="bright_black" if piece == MASK_CHARACTER else "bold black on yellow" if new else "")
    text.append(f"\n\nt = {trajectory.times[last]:.3f}\n", style="bright_black")
    return text


@contextmanager
def watching(trajectory: Trajectory, live: bool) -> Generator[Callback]:
    """A callback that records, and shows what it records while the block runs."""
    if not live:
        yield trajectory
        return
    console = Console()
    # Transient: what is left on the screen is the text itself, which the command prints.
    with Live(_View(trajectory), console=console, auto_refresh=False, transient=True) as view:

        def callback(step: int, t: float, x: Tensor) -> None:
            trajectory(step, t, x)
            if console.is_terminal:
                view.refresh()

        yield callback


def save_views(trajectory: Trajectory, html: Path | None, gif: Path | None, title: str) -> None:
    """Write what was asked for."""
    if html is not None:
        trajectory.save_html(html, title)
    if gif is not None:
        trajectory.save_gif(gif)


def check_writable(*paths: Path | None) -> None:
    """Refuse a file that could not be written before an hour is spent on what goes into it."""
    for path in paths:
        if path is not None and not path.expanduser().resolve().parent.is_dir():
            raise ValueError(f"there is no folder {path.parent} to write {path.name} to")
