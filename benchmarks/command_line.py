"""The command line of a benchmark: its options as the package's commands take theirs, bad input as one line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from cedd.cli.parsing import parse_arguments

Arguments = TypeVar("Arguments")


def command(script: str | Path, kind: type[Arguments], run: Callable[[Arguments], Any]) -> int:
    """Run a script with what its command line asks for; its exit code, 2 for bad input."""
    path = Path(script)
    try:
        parsed = parse_arguments(kind, sys.argv[1:], prog=path.name, description=kind.__doc__ or "")
        return run(parsed) or 0
    except (ValueError, OSError) as error:
        print(f"{path.stem}: {error}", file=sys.stderr)
        return 2
