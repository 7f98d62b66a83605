"""A console that prints text unchanged."""

from __future__ import annotations

from typing import Any, NoReturn

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from cedd.names import printable

_USUAL_WIDTH = 80
_LONGEST_NAME = 12  # a longer word of a table's first column may be broken


class PlainConsole(Console):
    """A console without markup (unless asked for) or highlighting. Control characters are shown escaped, and nothing is
    cut off."""

    def __init__(self, *, markup: bool = False, **options: Any) -> None:
        super().__init__(markup=markup, highlight=False, emoji=False, **options)
        if self.width < 1:  # COLUMNS=0, which some set where there is no terminal
            self.width = _USUAL_WIDTH

    def print(self, *objects: object, **options: Any) -> None:
        """Like rich's, but tables are never cropped: their lines may be longer than the console is wide."""
        width = self._width
        for table in objects:
            if isinstance(table, Table):
                self.width, options["crop"] = max(self.width, self._least_width(table)), False
        try:
            super().print(*objects, **options)
        finally:
            self._width = width

    def _least_width(self, table: Table) -> int:
        """Width of a table whose columns are as wide as their longest word, or longest line if they do not wrap."""
        options = self.options.update(max_width=10_000)
        for number, column in enumerate(table.columns):
            sizes = [Measurement.get(self, options, cell) for cell in (column.header, *column.cells)]
            least = max(size.maximum if column.no_wrap else size.minimum for size in sizes)
            if number == 0 and not column.no_wrap:
                column.overflow, least = "fold", min(least, _LONGEST_NAME)
            column.min_width = max(least, column.min_width or 0)
        return Measurement.get(self, options, table).minimum

    def render_str(self, text: str, **options: Any) -> Text:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().render_str(printable(text), **options)

    def on_broken_pipe(self) -> NoReturn:
        """Raise, where rich would exit with 1: a closed output is not a failure."""
        raise BrokenPipeError
