"""Shared parts of kernels that compute exponentials or process a row of V outputs. Imported only where there is a CUDA
device."""

from __future__ import annotations

import math

import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]

LOG2_E = tl.constexpr(math.log2(math.e))
"""Exponents are taken in units of log 2, the hardware's own."""


@triton.jit
def clear_row(outputs, offsets, whole, rest, in_rest, BLOCK: tl.constexpr):
    """Write zeros to the row of a loss of weight 0: complete blocks, up to `whole`, without a mask, then the rest."""
    nothing = tl.zeros(offsets.shape, outputs.dtype.element_ty)
    for start in range(0, whole, BLOCK):
        tl.store(outputs + start + offsets, nothing)
    tl.store(outputs + rest, nothing, mask=in_rest)
