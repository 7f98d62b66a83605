"""The files of benchmarks/, which are scripts and no package."""

import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def definitions(*names: str) -> SimpleNamespace:
    """Everything that these files define, by name; they import each other as a script's neighbours."""
    if not BENCHMARKS.is_dir():
        pytest.skip("benchmarks/ is part of the source tree only")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        found = [vars(importlib.import_module(name)) for name in names]
    return SimpleNamespace(**{name: value for module in found for name, value in module.items()})
