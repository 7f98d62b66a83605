"""What the commands that sample share: their options, and the live view."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console
from rich.live import Live
from rich.text import Text
from torch import Tensor

from cedd.cli.given import CommonArguments
from cedd.cli.progress import progress_bar
from cedd.data.tokenizers import MASK_CHARACTER
from cedd.models.loaded import LoadedModel, SamplingOptions
from cedd.samplers import GRIDS, SAMPLERS, Corrector
from cedd.samplers.loop import Callback
from cedd.storage import check_writable
from cedd.tasks.template import Template
from cedd.tasks.trajectory import Trajectory

PAGE_SUFFIXES = (".html", ".htm")

if TYPE_CHECKING:
    Sampler = Grid = str
else:  # the tables' names: a new row is a new choice
    Sampler, Grid = (tyro.extras.literal_type_from_choices(table) for table in (SAMPLERS, GRIDS))


@dataclass(frozen=True)
class SamplerOptions:
    """How to sample."""

    sampler: Sampler = "analytic"
    steps: int | None = None
    """Steps from noise to data; by default one a token, from 64 to 256 (first-hitting takes one a token always)."""
    grid: Grid = "uniform"
    """Where the steps lie: evenly in time, or evenly in jumps."""
    temperature: float = 1.0
    top_p: float = 1.0
    corrector: float | None = None
    """Strength of flow matching's corrector (dfm only; the paper's is 1)."""
    batch: int | None = None
    """Sequences at once; by default all, and fewer when the memory does not suffice."""

    def sampling(self, seed: int | None) -> SamplingOptions:
        corrector = None if self.corrector is None else Corrector(self.corrector)
        return SamplingOptions(
            self.sampler, self.steps, self.temperature, self.top_p, self.grid, corrector, self.batch, seed
        )


@dataclass(frozen=True)
class ViewOptions:
    """How to see the first text being denoised."""

    watch: bool = False
    """Show the first text in the terminal while it is denoised."""
    html: Path | None = None
    """Write its way from noise to text as a page."""
    gif: Path | None = None
    """The same as a moving picture."""

    def check(self) -> None:
        """Refuse files that could not be written, before the model is loaded."""
        check_writable(self.html, PAGE_SUFFIXES)
        check_writable(self.gif, (".gif",))

    @contextmanager
    def recording(self, template: Template, n: int, title: str, *, quiet: bool) -> Generator[Callback | None]:
        """A callback for the sampler that fills the template n times, if anything is to be seen; the files are written
        when the block ends. Who does not watch has a bar."""
        with _bar(n, visible=not (self.watch or quiet)) as moved:
            if not self.watch and self.html is None and self.gif is None:
                yield moved
                return
            trajectory = Trajectory(template.tokenizer, template.characters)
            with _shown(trajectory, self.watch and not quiet) as callback:
                yield _both(callback, moved)
        if self.html is not None:
            trajectory.save_html(self.html, title)
        if self.gif is not None:
            trajectory.save_gif(self.gif)


@dataclass(frozen=True, kw_only=True)
class SamplingArguments(CommonArguments):
    """Options of the commands that print samples."""

    n: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 1
    """Number of texts."""
    options: Annotated[SamplerOptions, tyro.conf.arg(name="")] = field(default_factory=SamplerOptions)
    view: Annotated[ViewOptions, tyro.conf.arg(name="")] = field(default_factory=ViewOptions)
    seed: int | None = None
    """The same seed gives the same texts on the same device."""

    def texts(self, loaded: LoadedModel, template: Template, title: str) -> list[str]:
        """The template filled n times, seen as it is asked for."""
        with self.view.recording(template, self.n, title, quiet=self.json) as callback:
            return template.fill(loaded, self.n, self.options.sampling(self.seed), callback)


@contextmanager
def _bar(n: int, *, visible: bool) -> Generator[Callback | None]:
    """A bar on a terminal's standard error, gone when done: how much of the time of n sequences has gone by."""
    if not (visible and Console(stderr=True).is_terminal):
        yield None
        return
    with progress_bar("sampling, %", visible) as progress:
        done = rows = 0

        def callback(step: int, t: float, x: Tensor) -> None:
            nonlocal done, rows
            if step == 0:  # a new part of the n begins
                done, rows = done + rows, len(x)
            progress(100 * min(1.0, (done + rows * (1 - t)) / n), 100)

        yield callback


def _both(first: Callback, second: Callback | None) -> Callback:
    """One callback for two."""
    if second is None:
        return first

    def callback(step: int, t: float, x: Tensor) -> None:
        first(step, t, x)
        second(step, t, x)

    return callback


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
def _shown(trajectory: Trajectory, live: bool) -> Generator[Callback]:
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
