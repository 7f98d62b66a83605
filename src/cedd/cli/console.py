"""Where commands print: text as it is, whatever it holds."""

from __future__ import annotations

from typing import Any, NoReturn

from rich.console import Console
from rich.text import Text

from cedd.names import printable


class PlainConsole(Console):
    """No markup unless asked for, no highlighting, and what a terminal would obey is shown escaped."""

    def __init__(self, *, markup: bool = False, **options: Any) -> None:
        super().__init__(markup=markup, highlight=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().render_str(printable(text), **options)

    def on_broken_pipe(self) -> NoReturn:
        """Whoever read our output has seen enough, which is no failure of ours (rich would exit with 1)."""
        raise BrokenPipeError
