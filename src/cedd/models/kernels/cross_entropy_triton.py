"""Cross entropy and its gradient in one kernel: one program per row, two sweeps over V, in place.

Shapes: R rows, V vocabulary. Imported only where there is a CUDA device.

The first sweep keeps, in every lane, a running maximum m and the sum of exp(o - m), rescaled as m grows. Lanes are
combined once, at the end, so that no step waits for another warp. The second sweep overwrites each output by its
gradient. A row of 50,257 bfloat16 outputs is 100 kB, so the second sweep reads from the cache. Both sweeps are limited
by instructions, not by memory, so the loops contain only what depends on the output.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

from cedd.models.kernels.row_triton import LOG2_E, clear_row

BLOCK = 4096
"""Outputs per iteration of a program: 16 per thread."""

VECTOR = 8
"""Number of neighbouring outputs that a thread loads together: 16 bytes."""

WARPS = 8


@triton.jit
def _absorb(values, maxima, totals):
    """Add a vector of values per lane to its running maximum m and sum of 2^(v - m)."""
    larger = tl.maximum(maxima, tl.max(values, 1))
    totals = totals * tl.exp2(maxima - larger) + tl.sum(tl.exp2(values - larger[:, None]), 1)
    return larger, totals


@triton.jit
def _cross_entropy_kernel(
    outputs, row_stride, weights, targets, shift_tokens, shifts, losses, vocab_size, whole,
    HAS_SHIFT: tl.constexpr, WANT_GRADIENT: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Both sweeps process the complete blocks, up to `whole`, without a mask, and then the rest with one: a mask that
    ends inside a vector would turn every load and store of the loop into one of two bytes. The loops ignore the target
    and the shifted token, which are corrected afterwards."""
    row = tl.program_id(0).to(tl.int64)
    outputs += row * row_stride
    weight = tl.load(weights + row)
    target = tl.load(targets + row)
    BLOCK: tl.constexpr = LANES * VECTOR
    offsets = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    rest = whole + offsets
    in_rest = rest < vocab_size

    if weight == 0.0:  # the row contributes nothing: skip its arithmetic
        tl.store(losses + row, 0.0)
        if WANT_GRADIENT:
            clear_row(outputs, offsets, whole, rest, in_rest, BLOCK)
        return

    # In units of log 2, the hardware's own. A large negative number, not -inf, so that no difference is a NaN.
    maxima = tl.full([LANES], -1e30, tl.float32)
    totals = tl.zeros([LANES], tl.float32)
    for start in range(0, whole, BLOCK):
        values = tl.load(outputs + start + offsets).to(tl.float32) * LOG2_E
        maxima, totals = _absorb(values, maxima, totals)
    last = tl.load(outputs + rest, mask=in_rest, other=float("-inf")).to(tl.float32) * LOG2_E
    maxima, totals = _absorb(last, maxima, totals)
    at_target = tl.load(outputs + target).to(tl.float32) * LOG2_E
    maximum = tl.max(maxima, 0)
    shift_token = target
    plain = at_target
    shifted = at_target
    if HAS_SHIFT:
        shift_token = tl.load(shift_tokens + row)
        plain = tl.load(outputs + shift_token).to(tl.float32) * LOG2_E
        shifted = plain + tl.load(shifts + row) * LOG2_E
        at_target = tl.where(shift_token == target, shifted, at_target)
        maximum = tl.maximum(maximum, shifted)
    total = tl.sum(totals * tl.exp2(maxima - maximum), 0)
    if HAS_SHIFT:  # replaces the token's term by one that is at least as large, so that nothing cancels
        total = tl.maximum(total - tl.exp2(plain - maximum), 0.0) + tl.exp2(shifted - maximum)
    log_normalizer = maximum + tl.log2(total)
    tl.store(losses + row, (log_normalizer - at_target) / LOG2_E)
    tl.debug_barrier()  # every warp has read these outputs before any warp overwrites them

    if WANT_GRADIENT:
        # weight · 2^(v - normalizer), the weight (of either sign) outside.
        for start in range(0, whole, BLOCK):
            values = tl.load(outputs + start + offsets).to(tl.float32)
            tl.store(outputs + start + offsets, weight * tl.exp2(values * LOG2_E - log_normalizer))
        tl.store(outputs + rest, weight * tl.exp2(last - log_normalizer), mask=in_rest)
        tl.debug_barrier()
        if HAS_SHIFT:
            tl.store(outputs + shift_token, weight * tl.exp2(shifted - log_normalizer))
        tl.store(outputs + target, weight * (tl.exp2(at_target - log_normalizer) - 1.0))


def cross_entropy_in_place(
    outputs: Tensor,
    weights: Tensor,
    want_gradient: bool,
    targets: Tensor,
    shift_tokens: Tensor | None,
    shifts: Tensor | None,
) -> Tensor:
    """outputs [R, V] with unit column stride become weights · (softmax - onehot); returns -log softmax [R]."""
    rows, vocab_size = outputs.shape
    losses = torch.empty(rows, dtype=torch.float32, device=outputs.device)
    has_shift = shift_tokens is not None and shifts is not None
    block = min(BLOCK, max(VECTOR, triton.next_power_of_2(vocab_size)))
    with torch.cuda.device_of(outputs):
        _cross_entropy_kernel[(rows,)](  # type: ignore[index]
            outputs,
            outputs.stride(0),
            weights.contiguous(),
            targets.contiguous(),
            shift_tokens.contiguous() if shift_tokens is not None else targets,
            shifts.float().contiguous() if shifts is not None else losses,
            losses,
            vocab_size,
            vocab_size // block * block,
            HAS_SHIFT=has_shift,
            WANT_GRADIENT=want_gradient,
            LANES=block // VECTOR,
            VECTOR=VECTOR,
            num_warps=min(WARPS, max(1, block // 512)),
        )
    return losses
