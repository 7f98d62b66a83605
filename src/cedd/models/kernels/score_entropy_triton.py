"""Score entropy and its gradient in one kernel: one program per row, one sweep over V, in place.

Shapes: R rows, V vocabulary. Imported only where there is a CUDA device.

The gradient of an output does not depend on the other outputs of its row, so one sweep reads each output, adds its
score and log-score to the sums, and writes its gradient. `cedd.network.ScoreRows` has the equation, and `head_loss.py`
the plain version.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

from cedd.models.kernels.row_triton import LOG2_E, clear_row
from cedd.network import ScoreRows

BLOCK = 1024
"""Outputs per iteration of a program: 8 per thread, 16 bytes."""

WARPS = 4


@triton.jit
def _scores(values, shift, columns, skip):
    """Scores and log-scores of outputs; 0 and 0 at the token that is skipped."""
    logs = tl.where(columns == skip, 0.0, values.to(tl.float32) + shift)
    return tl.where(columns == skip, 0.0, tl.exp2(logs * LOG2_E)), logs


@triton.jit
def _score_entropy_kernel(
    outputs, row_stride, weights, targets, skips, shifts, commons, extras, losses, vocab_size, whole,
    WANT_GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Complete blocks, up to `whole`, are processed without a mask, then the rest with one, as in the kernel of the
    cross entropy."""
    row = tl.program_id(0).to(tl.int64)
    outputs += row * row_stride
    weight = tl.load(weights + row)
    offsets = tl.arange(0, BLOCK)
    rest = whole + offsets
    in_rest = rest < vocab_size

    if weight == 0.0:  # the row contributes nothing
        tl.store(losses + row, 0.0)
        if WANT_GRADIENT:
            clear_row(outputs, offsets, whole, rest, in_rest, BLOCK)
        return

    target = tl.load(targets + row)
    skip = tl.load(skips + row)
    shift = tl.load(shifts + row).to(tl.float32)
    common = tl.load(commons + row)
    extra = tl.load(extras + row)
    at_target = tl.where(target == skip, 0.0, tl.load(outputs + target).to(tl.float32) + shift)
    tl.debug_barrier()  # every warp has read it before any warp overwrites it
    each = weight * common.to(tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    log_sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, whole, BLOCK):
        columns = start + offsets
        scores, logs = _scores(tl.load(outputs + columns), shift, columns, skip)
        sums += scores
        log_sums += logs
        if WANT_GRADIENT:
            tl.store(outputs + columns, weight * scores - each)
    scores, logs = _scores(tl.load(outputs + rest, mask=in_rest, other=0.0), shift, rest, skip)
    sums += tl.where(in_rest, scores, 0.0)
    log_sums += tl.where(in_rest, logs, 0.0)
    total = tl.sum(sums, 0).to(tl.float64) - common * tl.sum(log_sums, 0) - extra * at_target
    tl.store(losses + row, total.to(tl.float32))

    if WANT_GRADIENT:
        tl.store(outputs + rest, weight * scores - each, mask=in_rest)
        tl.debug_barrier()
        tl.store(outputs + target, weight * (tl.exp2(at_target * LOG2_E) - (common + extra).to(tl.float32)))
        tl.debug_barrier()
        if skip < vocab_size:
            tl.store(outputs + skip, 0.0)


def score_entropy_in_place(outputs: Tensor, weights: Tensor, want_gradient: bool, rows: ScoreRows) -> Tensor:
    """outputs [R, V] with unit column stride become the gradient of Σ weights · losses; returns the losses [R]."""
    count, vocab_size = outputs.shape
    losses = torch.empty(count, dtype=torch.float32, device=outputs.device)
    block = min(BLOCK, triton.next_power_of_2(vocab_size))
    with torch.cuda.device_of(outputs):
        _score_entropy_kernel[(count,)](  # pyright: ignore[reportIndexIssue]
            outputs,
            outputs.stride(0),
            *(tensor.contiguous() for tensor in (weights, rows.target, rows.skip)),
            *(tensor.double().contiguous() for tensor in (rows.shift, rows.common, rows.extra)),
            losses,
            vocab_size,
            vocab_size // block * block,
            WANT_GRADIENT=want_gradient,
            BLOCK=block,
            num_warps=min(WARPS, max(1, block // 256)),
        )
    return losses
