"""Access to the files of benchmarks/, which are scripts and not a package."""

import contextlib
import importlib
import io
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def definitions(*names: str) -> SimpleNamespace:
    """Everything that these files define, by name; they can import each other like scripts in one folder."""
    if not BENCHMARKS.is_dir():
        pytest.skip("benchmarks/ is part of the source tree only")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        found = [vars(importlib.import_module(name)) for name in names]
    return SimpleNamespace(**{name: value for module in found for name, value in module.items()})


def run(script: Path, *words: str) -> tuple[int, str]:
    """Run a script with these arguments in this process, which has already imported torch; returns its exit code and
    its output on stderr."""
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(said):
        patch.syspath_prepend(str(script.parent))
        patch.setattr(sys, "argv", [str(script), *words])
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                runpy.run_path(str(script), run_name="__main__")
        except SystemExit as end:
            return int(end.code or 0), said.getvalue()
    return 0, said.getvalue()
