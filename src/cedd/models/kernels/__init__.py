"""The vocabulary head with its loss, in chunks of rows: never more than one [chunk, V], forward and backward."""

from __future__ import annotations

from importlib.util import find_spec

_TRITON = find_spec("triton") is not None


def has_triton() -> bool:
    """Whether kernels can be built here."""
    return _TRITON
