"""Attention of a few new positions after a cache, rotary positions included, in one kernel; `attention.py` has the
equations.

Shapes: B batch, n new positions, P positions of the cache, H heads, W head width. Imported only where there is a CUDA
device.

A program computes one head of one sequence: it rotates the new queries and keys, writes the new keys and values into
the cache, and attends to them and to the filled part of the cache, tile by tile. How much of the cache is filled is
read on the device, so that one recorded CUDA graph serves all lengths.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

from cedd.models.kernels.attention_triton import (
    _half,  # pyright: ignore[reportPrivateUsage]
    _normed,  # pyright: ignore[reportPrivateUsage]
    _read,  # pyright: ignore[reportPrivateUsage]
    _scores,  # pyright: ignore[reportPrivateUsage]
    _store_half,  # pyright: ignore[reportPrivateUsage]
)

WARPS = 4
TILE = 64
"""Keys of the cache that are read at once."""


@triton.jit
def _cached_kernel(
    qkv, cosine, sine, positions, keys, values, output, length, room, scale,
    NORMED: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    head, heads, sequence = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    width, within = heads * 2 * HALF, head * 2 * HALF
    here, past = tl.arange(0, BLOCK), tl.load(positions)
    q1, q2, k1, k2, own, _, _ = _read(
        qkv + sequence * length * (3 * width) + within, cosine, sine, here, width, length, HALF
    )
    if NORMED:
        q1, q2, _ = _normed(q1, q2, HALF)
        k1, k2, _ = _normed(k1, k2, HALF)
    place = (sequence * heads + head) * room * (2 * HALF)
    keys += place
    values += place
    new = past * (2 * HALF)
    _store_half(keys + new, k1, here, 2 * HALF, length, HALF)
    _store_half(keys + new + HALF, k2, here, 2 * HALF, length, HALF)
    _store_half(values + new, own, here, 2 * HALF, length, 2 * HALF)

    scores = _scores(q1, q2, k1, k2, scale, here[None, :], here[:, None], length, False)
    maximum = tl.max(scores, 1)
    scores = tl.exp2(scores - maximum[:, None])
    total = tl.sum(scores, 1)
    product = tl.dot(scores.to(own.dtype), own, input_precision="ieee")
    for start in range(0, past, TILE):
        tile = start + tl.arange(0, TILE)
        before = _scores(
            q1, q2, _half(keys, tile, 2 * HALF, past, HALF), _half(keys + HALF, tile, 2 * HALF, past, HALF),
            scale, tile[None, :], here[:, None], past, False,
        )  # fmt: skip
        larger = tl.maximum(maximum, tl.max(before, 1))
        shares, rescale = tl.exp2(before - larger[:, None]), tl.exp2(maximum - larger)
        total = total * rescale + tl.sum(shares, 1)
        seen = _half(values, tile, 2 * HALF, past, 2 * HALF)
        product = tl.dot(shares.to(seen.dtype), seen, product * rescale[:, None], input_precision="ieee")
        maximum = larger
    _store_half(output + sequence * length * width + within, product / total[:, None], here, width, length, 2 * HALF)


@torch.library.custom_op("cedd::attend_cached", mutates_args=("keys", "values"))
def attend_cached(
    qkv: Tensor,
    cosine: Tensor,
    sine: Tensor,
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
    largest_score: float | None,
) -> Tensor:
    """q, k, v [B, n, 3, H, W], not yet rotated -> o [B, n, H, W].

    Args:
        cosine, sine: the tables [n, 3, 1, W] of the positions.
        positions: [n] consecutive numbers; all earlier positions of the cache are filled.
        keys, values: the cache [B, H, P, W], contiguous, of the type of qkv; the new ones are written at the positions.
    """
    batch, length, _, heads, width = qkv.shape
    output = torch.empty(batch, length, heads, width, dtype=qkv.dtype, device=qkv.device)
    normed, scale = (False, width**-0.5) if largest_score is None else (True, largest_score / width)
    block = max(16, triton.next_power_of_2(length))
    sizes = {"NORMED": normed, "HALF": width // 2, "BLOCK": block, "TILE": TILE, "num_warps": WARPS}
    with torch.cuda.device_of(qkv):
        _cached_kernel[heads, batch](  # pyright: ignore[reportIndexIssue]
            *(tensor.contiguous() for tensor in (qkv, cosine, sine)), positions, keys, values, output,
            length, keys.shape[2], scale, **sizes,
        )  # fmt: skip
    return output
