"""The command line of a benchmark, with the options, errors and exit codes of the package's commands."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from cedd.cli import run_command
from cedd.cli.parser import parse

Arguments = TypeVar("Arguments")


def command(script: str | Path, kind: type[Arguments], run: Callable[[Arguments], int | None]) -> int:
    """Run a script with what its command line asks for; its exit code, 2 for bad input, which is one line."""
    path = Path(script)

    def parsed() -> Any:
        return parse(kind, sys.argv[1:], prog=path.name)

    return run_command(path.stem, lambda: run(parsed()))
