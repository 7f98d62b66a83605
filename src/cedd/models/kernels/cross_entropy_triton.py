"""Cross entropy and its gradient in one kernel: one program a row, two sweeps over V, in place.

Shapes: R rows, V vocabulary. Imported only where there is a CUDA device.

The first sweep keeps, in every lane, a running maximum m and the sum of exp(o - m), rescaled whenever m grows; lanes
are joined once, at its end, so that no step of it waits for another warp. The second overwrites each output by its
gradient. A row of 50,257 bfloat16 outputs is 100 kB, so the second sweep reads from the cache what the first one
fetched.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

BLOCK = 4096
"""Outputs a program holds at once: 16 for each of its threads."""

WARPS = 8


@triton.jit
def _shifted(values, columns, shift_token, shift, HAS_SHIFT: tl.constexpr):  # noqa: ANN001, ANN202
    if HAS_SHIFT:
        values += tl.where(columns == shift_token, shift, 0.0)
    return values


@triton.jit
def _absorb(values, maxima, totals):  # noqa: ANN001, ANN202
    """One value a lane into its running maximum and sum, with one exponential: of the value beyond the maximum, or
    of the maximum beyond the value."""
    apart = tl.exp(-tl.abs(values - maxima))
    totals = tl.where(values > maxima, totals * apart + 1.0, totals + apart)
    return tl.maximum(maxima, values), totals


@triton.jit
def _cross_entropy_kernel(  # noqa: ANN202
    outputs,  # noqa: ANN001
    row_stride,  # noqa: ANN001
    weights,  # noqa: ANN001
    targets,  # noqa: ANN001
    shift_tokens,  # noqa: ANN001
    shifts,  # noqa: ANN001
    losses,  # noqa: ANN001
    vocab_size,  # noqa: ANN001
    whole,  # noqa: ANN001
    HAS_SHIFT: tl.constexpr,
    WANT_GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Both sweeps go through the whole blocks, up to `whole`, without a mask, and then through the rest with one: a
    mask that ends inside a vector would turn every load and store of the loop into one of two bytes."""
    row = tl.program_id(0).to(tl.int64)
    outputs += row * row_stride
    weight = tl.load(weights + row)
    target = tl.load(targets + row)
    offsets = tl.arange(0, BLOCK)
    rest = whole + offsets
    in_rest = rest < vocab_size

    if weight == 0.0:  # the row contributes nothing: skip its arithmetic
        tl.store(losses + row, 0.0)
        if WANT_GRADIENT:
            nothing = tl.zeros([BLOCK], tl.float32)
            for start in range(0, whole, BLOCK):
                tl.store(outputs + start + offsets, nothing)
            tl.store(outputs + rest, nothing, mask=in_rest)
        return

    shift_token = -1
    shift = 0.0
    if HAS_SHIFT:
        shift_token = tl.load(shift_tokens + row).to(tl.int32)
        shift = tl.load(shifts + row)
    at_target = _shifted(tl.load(outputs + target).to(tl.float32), target, shift_token, shift, HAS_SHIFT)

    # One maximum and one sum a lane; a large negative number, not -inf, so that the first difference is no NaN.
    maxima = tl.full([BLOCK], -1e30, tl.float32)
    totals = tl.zeros([BLOCK], tl.float32)
    for start in range(0, whole, BLOCK):
        columns = start + offsets
        values = _shifted(tl.load(outputs + columns).to(tl.float32), columns, shift_token, shift, HAS_SHIFT)
        maxima, totals = _absorb(values, maxima, totals)
    last = tl.load(outputs + rest, mask=in_rest, other=float("-inf")).to(tl.float32)
    last = _shifted(last, rest, shift_token, shift, HAS_SHIFT)
    maxima, totals = _absorb(last, maxima, totals)
    maximum = tl.max(maxima, 0)
    total = tl.sum(totals * tl.exp(maxima - maximum), 0)
    log_normalizer = maximum + tl.log(total)
    tl.store(losses + row, log_normalizer - at_target)
    tl.debug_barrier()  # every warp has read the target's output before any warp overwrites it

    if WANT_GRADIENT:
        for start in range(0, whole, BLOCK):
            columns = start + offsets
            values = _shifted(tl.load(outputs + columns).to(tl.float32), columns, shift_token, shift, HAS_SHIFT)
            gradient = weight * (tl.exp(values - log_normalizer) - tl.where(columns == target, 1.0, 0.0))
            tl.store(outputs + columns, gradient)
        gradient = weight * (tl.exp(last - log_normalizer) - tl.where(rest == target, 1.0, 0.0))
        tl.store(outputs + rest, gradient, mask=in_rest)


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
    block = min(BLOCK, triton.next_power_of_2(vocab_size))
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
            BLOCK=block,
            num_warps=min(WARPS, max(1, block // 512)),
        )
    return losses
