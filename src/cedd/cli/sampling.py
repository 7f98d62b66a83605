"""What the commands that sample share: their options, and the live view."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console
from rich.live import Live
from rich.text import Text
from torch import Tensor

from cedd.cli.correct import write_output
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
        return SamplingOptions(**{**vars(self), "corrector": corrector, "seed": seed})


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
        trajectory, callbacks = Trajectory(template.tokenizer, template.characters), list[Callback]()
        with ExitStack() as opened:
            if self.watch or self.html is not None or self.gif is not None:
                callbacks.append(trajectory)
            if self.watch and not quiet and (console := Console()).is_terminal:
                # Transient: what is left on the screen is the text itself, which the command prints.
                live = Live(
                    get_renderable=lambda: last_frame(trajectory), console=console, auto_refresh=False, transient=True
                )
                opened.enter_context(live)
                callbacks.append(lambda step, t, x: live.refresh())
            if not self.watch and not quiet and Console(stderr=True).is_terminal:
                callbacks.append(_moving(opened.enter_context(progress_bar("sampling, %", True)), n))

            def callback(step: int, t: float, x: Tensor) -> None:
                for one in callbacks:
                    one(step, t, x)

            yield callback if callbacks else None
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

    def show(self, loaded: LoadedModel, template: Template, title: str, named: str, between: str, **facts: Any) -> None:
        """Fill the template n times, seen as it is asked for, and print the texts, or all as JSON."""
        with self.view.recording(template, self.n, title, quiet=self.json) as callback:
            texts = template.fill(loaded, self.n, self.options.sampling(self.seed), callback)
        if self.json:
            print(json.dumps({named: texts, **facts, "seed": self.seed}))
        else:
            write_output(between.join(texts) + "\n")


def _moving(progress: Callable[[float, float], None], n: int) -> Callback:
    """A callback that moves a bar: how much of the time of n sequences has gone by."""
    done = rows = 0

    def callback(step: int, t: float, x: Tensor) -> None:
        nonlocal done, rows
        if step == 0:  # a new part of the n begins
            done, rows = done + rows, len(x)
        progress(100 * min(1.0, (done + rows * (1 - t)) / n), 100)

    return callback


def last_frame(trajectory: Trajectory) -> Text:
    """The latest state in colours: masks dim, what just changed bright."""
    text, last = Text(), len(trajectory.frames) - 1
    if last < 0:
        return text
    for piece, new in zip(trajectory.pieces(trajectory.frames[last]), trajectory.changed(last), strict=True):
        text.append(piece, style="bright_black" if piece == MASK_CHARACTER else "bold black on yellow" if new else "")
    text.append(f"\n\nt = {trajectory.times[last]:.3f}\n", style="bright_black")
    return text
