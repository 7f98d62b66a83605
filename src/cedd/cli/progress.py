"""Progress on standard error: a bar for one task, a line a stage for several."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape


@contextmanager
def progress_bar(name: str, visible: bool) -> Generator[Callable[[float, float], None]]:
    """A bar on a terminal's standard error, gone when done; the block is given what moves it: (done, planned)."""
    console = Console(stderr=True)
    if not (visible and console.is_terminal):
        yield lambda done, planned: None
        return
    # Not before there is something to see: short texts are corrected sooner than this is imported.
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(escape(name)), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(name, total=None)
        yield lambda done, planned: bar.update(task, completed=done, total=planned)


class Stages:
    """The stages of a command that takes minutes: a bar on a terminal, a line a stage elsewhere."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self.console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TimeElapsedColumn())
        self.bar = Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal)
        self.task = self.bar.add_task("", total=None)

    def begin(self, text: str) -> None:
        self.bar.reset(self.task, description=text, total=None)
        if not self.console.is_terminal:
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def move(self, done: int, planned: int) -> None:
        self.bar.update(self.task, completed=done, total=planned)
