"""Progress on standard error: a bar for one task, or a line per stage."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

from cedd.cli.console import PlainConsole
from cedd.names import printable


@contextmanager
def progress_bar(name: str, visible: bool) -> Generator[Callable[[float, float], None]]:
    """A progress bar on a terminal, removed when done. The block gets the function that moves it: (done, planned)."""
    console = PlainConsole(stderr=True)
    if not (visible and console.is_terminal):
        yield lambda done, planned: None
        return
    # Imported late: short texts are corrected faster than this import.
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(printable(name), total=None)
        yield lambda done, planned: bar.update(task, completed=done, total=planned)


class Stages:
    """The stages of a long command: a bar on a terminal, otherwise a line per stage."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self.console = PlainConsole(stderr=True)
        columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=24), TimeElapsedColumn())
        self.bar = Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal)
        self.task = self.bar.add_task("", total=None)

    def begin(self, text: str) -> None:
        self.bar.reset(self.task, description=printable(text), total=None)
        if not self.console.is_terminal:
            self.console.print(text, soft_wrap=True)

    def move(self, done: int, planned: int) -> None:
        self.bar.update(self.task, completed=done, total=planned)
