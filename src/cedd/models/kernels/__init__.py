"""What a network does between its matrix products, fused where that pays: the head with its loss in chunks of rows, the
seams of the residual stream, rotations. Each kernel has a twin in plain torch."""

from __future__ import annotations

from importlib.util import find_spec

_TRITON = find_spec("triton") is not None


def has_triton() -> bool:
    """Whether kernels can be built here."""
    return _TRITON
