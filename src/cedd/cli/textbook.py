"""The plain implementations that `cedd bench` times ours against: files of the source tree's benchmarks/."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

_BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


def load_textbook(name: str) -> Any | None:
    """The module benchmarks/textbook_NAME.py, where the source tree is at hand (an installed wheel has none)."""
    path = _BENCHMARKS / f"textbook_{name}.py"
    if not path.is_file():
        return None
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
