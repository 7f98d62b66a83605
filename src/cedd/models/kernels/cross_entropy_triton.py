"""Cross entropy and its gradient in one kernel: one program a row, two sweeps over V, in place.

Shapes: R rows, V vocabulary. Imported only where there is a CUDA device.

The first sweep keeps a running maximum m and Σ exp(o - m), rescaled whenever m grows; the second overwrites
each output by its gradient. A row of 50,257 bfloat16 outputs is 100 kB, so the second sweep reads from the cache
what the first one fetched.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

BLOCK = 8192
"""Outputs a program holds at once: 16 for each of its threads."""


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

    maximum = float("-inf")
    total = 0.0
    target_output = 0.0
    for start in range(0, vocab_size, BLOCK):
        columns = start + offsets
        inside = columns < vocab_size
        values = tl.load(outputs + columns, mask=inside, other=float("-inf")).to(tl.float32)
        if HAS_SHIFT:
            values += tl.where(columns == shift_token, shift, 0.0)
        new_maximum = tl.maximum(maximum, tl.max(values, 0))
        total = total * tl.exp(maximum - new_maximum) + tl.sum(tl.exp(values - new_maximum), 0)
        # Picked up here, not loaded alone: a lone load would race with another warp's write below.
        target_output += tl.sum(tl.where(columns == target, values, 0.0), 0)
        maximum = new_maximum
    log_normalizer = maximum + tl.log(total)
    tl.store(losses + row, log_normalizer - target_output)

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
            num_warps=16 if block >= 8192 else 4,
        )
    return losses
