"""What a command that takes minutes is doing."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


class Stages:
    """What is being done: a bar on a terminal, a line a stage elsewhere; both on standard error."""

    def __init__(self, progress: Progress, console: Console) -> None:
        self._progress, self._console = progress, console
        self._task = progress.add_task("", total=None)

    def begin(self, text: str) -> None:
        self._progress.reset(self._task, description=text, total=None)
        if not self._console.is_terminal:
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def move(self, done: int, planned: int) -> None:
        self._progress.update(self._task, completed=done, total=planned)


@contextmanager
def showing_stages() -> Generator[Stages]:
    """Show stages while the block runs."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield Stages(progress, console)
