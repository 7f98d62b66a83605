"""Rotary positions in one sweep, if no gradient is needed; `rotation.py` has the equations.

Shapes: B batch, L positions, H heads, W head width. Imported only where there is a CUDA device.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

WARPS = 4


@triton.jit
def _rotate_kernel(qkv, cosine, sine, length, heads, half, HEADS: tl.constexpr, HALF: tl.constexpr):
    """A program processes all heads of q and k of one position; the tables [L, 3, 1, W] are in halves (cos, cos) and
    (-sin, sin)."""
    row = tl.program_id(0).to(tl.int64)
    columns, head = tl.arange(0, HALF), tl.arange(0, HEADS)
    table = (row % length) * 6 * half + columns
    cosines = tl.load(cosine + table, mask=columns < half, other=0.0).to(tl.float32)[None, :]
    sines = tl.load(sine + table + half, mask=columns < half, other=0.0).to(tl.float32)[None, :]
    here = row * 6 * heads * half + head[:, None] * 2 * half + columns[None, :]
    is_entry = (head < 2 * heads)[:, None] & (columns < half)[None, :]
    first = tl.load(qkv + here, mask=is_entry, other=0.0).to(tl.float32)
    second = tl.load(qkv + here + half, mask=is_entry, other=0.0).to(tl.float32)
    tl.store(qkv + here, first * cosines - second * sines, mask=is_entry)
    tl.store(qkv + here + half, first * sines + second * cosines, mask=is_entry)


@torch.library.custom_op("cedd::rotate_in_place", mutates_args=("qkv",))
def rotate_in_place(qkv: Tensor, cosine: Tensor, sine: Tensor) -> None:
    """As `cedd.models.kernels.rotation.rotate`, for contiguous q, k and v [B, L, 3, H, W]; v is unchanged."""
    batch, length, _, heads, width = qkv.shape
    half = width // 2
    sizes = {"HEADS": triton.next_power_of_2(2 * heads), "HALF": triton.next_power_of_2(half), "num_warps": WARPS}
    with torch.cuda.device_of(qkv):
        _rotate_kernel[(batch * length,)](  # pyright: ignore[reportIndexIssue]
            qkv, cosine.contiguous(), sine.contiguous(), length, heads, half, **sizes
        )
