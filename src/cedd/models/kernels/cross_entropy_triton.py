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

BLOCK = 2048
"""Outputs a program holds at once: 8 for each of its threads, a load of 16 bytes in bfloat16."""

WARPS = 8


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
    HAS_SHIFT: tl.constexpr,
    WANT_GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    outputs += row * row_stride
    weight = tl.load(weights + row)
    target = tl.load(targets + row)
    offsets = tl.arange(0, BLOCK)

    if weight == 0.0:  # the row contributes nothing: skip its arithmetic
        tl.store(losses + row, 0.0)
        if WANT_GRADIENT:
            for start in range(0, vocab_size, BLOCK):
                columns = start + offsets
                tl.store(outputs + columns, tl.zeros([BLOCK], tl.float32), mask=columns < vocab_size)
        return

    shift_token = -1
    shift = 0.0
    if HAS_SHIFT:
        shift_token = tl.load(shift_tokens + row).to(tl.int32)
        shift = tl.load(shifts + row)

    at_target = tl.load(outputs + target).to(tl.float32)
    if HAS_SHIFT:
        at_target += tl.where(target == shift_token, shift, 0.0)

    # One maximum and one sum a lane; a large negative number, not -inf, so that the first difference is no NaN.
    maxima = tl.full([BLOCK], -1e30, tl.float32)
    totals = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab_size, BLOCK):
        columns = start + offsets
        values = tl.load(outputs + columns, mask=columns < vocab_size, other=float("-inf")).to(tl.float32)
        if HAS_SHIFT:
            values += tl.where(columns == shift_token, shift, 0.0)
        # One exponential for both cases: the new value beyond the old maximum, or the old maximum beyond it.
        apart = tl.exp(-tl.abs(values - maxima))
        totals = tl.where(values > maxima, totals * apart + 1.0, totals + apart)
        maxima = tl.maximum(maxima, values)
    maximum = tl.max(maxima, 0)
    total = tl.sum(totals * tl.exp(maxima - maximum), 0)
    log_normalizer = maximum + tl.log(total)
    tl.store(losses + row, log_normalizer - at_target)
    tl.debug_barrier()  # every warp has read the target's output before any warp overwrites it

    if WANT_GRADIENT:
        for start in range(0, vocab_size, BLOCK):
            columns = start + offsets
            inside = columns < vocab_size
            values = tl.load(outputs + columns, mask=inside, other=float("-inf")).to(tl.float32)
            if HAS_SHIFT:
                values += tl.where(columns == shift_token, shift, 0.0)
            gradient = weight * (tl.exp(values - log_normalizer) - tl.where(columns == target, 1.0, 0.0))
            tl.store(outputs + columns, gradient, mask=inside)


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
            HAS_SHIFT=has_shift,
            WANT_GRADIENT=want_gradient,
            BLOCK=block,
            num_warps=min(WARPS, max(1, block // 512)),
        )
    return losses
