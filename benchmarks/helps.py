"""The help of a script: its docstring and every option with its default. Nothing of the package is imported here, since
some scripts run other versions of it.
"""

from __future__ import annotations

import argparse


class _WithDefaults(argparse.RawDescriptionHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str | None:
        has_none = action.default is None or action.default is False or action.default == argparse.SUPPRESS
        value = ", ".join(map(str, action.default)) if isinstance(action.default, list | tuple) else "%(default)s"
        return action.help if has_none else f"{action.help} (default: {value})"


def parser_of(docstring: str | None) -> argparse.ArgumentParser:
    """A parser without options."""
    return argparse.ArgumentParser(description=docstring, formatter_class=_WithDefaults)
