"""Triton kernels for the sums of `cedd.row_sums`: one program per row, one sweep over V.

Shapes: R rows, V vocabulary. Imported only where there is a CUDA device.

Whole blocks of a row, up to `whole`, are read without a mask and the rest with one, because a mask that ends inside a
vector turns every load into loads of two bytes. A lane adds about fifty outputs in float32; lanes are combined in
float64. The offset is passed as two float32 numbers, because outputs may be large and their differences from it small.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

BLOCK = 2048
"""Outputs per iteration of a program: 16 per thread."""

WARPS = 4


@triton.jit
def _add_exp(values, maxima, totals):
    """Add values to a lane's running maximum m and sum of exp(v - m)."""
    larger = tl.maximum(maxima, values)
    return larger, totals * tl.exp(maxima - larger) + tl.exp(values - larger)


@triton.jit
def _log_sum_exp_kernel(outputs, row_stride, skips, results, vocab_size, whole, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    outputs += row * row_stride
    skip = tl.load(skips + row)
    offsets = tl.arange(0, BLOCK)
    maxima = tl.full([BLOCK], -1e30, tl.float32)  # not -inf, so that no difference is a NaN
    totals = tl.zeros([BLOCK], tl.float32)
    for start in range(0, whole, BLOCK):
        columns = start + offsets
        values = tl.where(columns == skip, float("-inf"), tl.load(outputs + columns).to(tl.float32))
        maxima, totals = _add_exp(values, maxima, totals)
    rest = whole + offsets
    values = tl.load(outputs + rest, mask=rest < vocab_size, other=float("-inf")).to(tl.float32)
    maxima, totals = _add_exp(tl.where(rest == skip, float("-inf"), values), maxima, totals)
    largest = tl.max(maxima, 0)
    total = tl.sum((totals * tl.exp(maxima - largest)).to(tl.float64), 0)
    tl.store(results + row, largest.to(tl.float64) + tl.log(total))


@triton.jit
def _softplus(values):
    """max(v, 0) + log(1 + e) with e = exp(-|v|): the rounding error of 1 + e is compensated by e / ((1 + e) - 1)."""
    small = tl.exp(-tl.abs(values))
    raised = 1.0 + small
    excess = raised - 1.0
    lost = excess == 0.0
    return tl.maximum(values, 0.0) + tl.where(lost, small, tl.log(raised) * (small / tl.where(lost, 1.0, excess)))


@triton.jit
def _softplus_kernel(outputs, row_stride, highs, lows, skips, results, vocab_size, whole, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    outputs += row * row_stride
    high, low, skip = tl.load(highs + row), tl.load(lows + row), tl.load(skips + row)
    offsets = tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, whole, BLOCK):
        columns = start + offsets
        values = (tl.load(outputs + columns).to(tl.float32) + high) + low
        sums += tl.where(columns == skip, 0.0, _softplus(values))
    rest = whole + offsets
    counts = (rest < vocab_size) & (rest != skip)
    values = (tl.load(outputs + rest, mask=counts, other=0.0).to(tl.float32) + high) + low
    sums += tl.where(counts, _softplus(values), 0.0)
    tl.store(results + row, tl.sum(sums.to(tl.float64), 0))


@triton.jit
def _score_kernel(
    outputs, row_stride, highs, lows, skips, results, log_results, vocab_size, whole, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    outputs += row * row_stride
    high, low, skip = tl.load(highs + row), tl.load(lows + row), tl.load(skips + row)
    offsets = tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK], tl.float32)
    log_sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, whole, BLOCK):
        columns = start + offsets
        values = (tl.load(outputs + columns).to(tl.float32) + high) + low
        sums += tl.where(columns == skip, 0.0, tl.exp(values))
        log_sums += tl.where(columns == skip, 0.0, values)
    rest = whole + offsets
    counts = (rest < vocab_size) & (rest != skip)
    values = (tl.load(outputs + rest, mask=counts, other=0.0).to(tl.float32) + high) + low
    sums += tl.where(counts, tl.exp(values), 0.0)
    log_sums += tl.where(counts, values, 0.0)
    tl.store(results + row, tl.sum(sums.to(tl.float64), 0))
    tl.store(log_results + row, tl.sum(log_sums.to(tl.float64), 0))


def _launch(kernel: object, outputs: Tensor, *others: Tensor) -> None:
    """One program for each row of outputs [R, V]."""
    outputs = outputs if outputs.stride(-1) == 1 else outputs.contiguous()
    count, vocab_size = outputs.shape
    block = min(BLOCK, triton.next_power_of_2(vocab_size))
    if count:
        with torch.cuda.device_of(outputs):
            kernel[(count,)](  # type: ignore[index]
                outputs,
                outputs.stride(0),
                *(tensor.contiguous() for tensor in others),
                vocab_size,
                vocab_size // block * block,
                BLOCK=block,
                num_warps=min(WARPS, max(1, block // 256)),
            )


def _results(outputs: Tensor) -> Tensor:
    return torch.empty(len(outputs), dtype=torch.float64, device=outputs.device)


def _in_two(offset: Tensor) -> tuple[Tensor, Tensor]:
    """A float64 number as the sum of two float32 numbers; the second is 0 for infinity."""
    high = offset.float()
    low = torch.where(high.isfinite(), offset - high.double(), 0.0)
    return high, low.float()


def log_sum_exp_of_rows(outputs: Tensor, skip: Tensor | None) -> Tensor:
    """`cedd.row_sums.log_sum_exp`."""
    results = _results(outputs)
    nothing = torch.full((len(outputs),), outputs.shape[1], device=outputs.device)
    _launch(_log_sum_exp_kernel, outputs, nothing if skip is None else skip, results)
    return results


def softplus_sum_of_rows(outputs: Tensor, offset: Tensor, skip: Tensor) -> Tensor:
    """`cedd.row_sums.softplus_sum`."""
    results = _results(outputs)
    _launch(_softplus_kernel, outputs, *_in_two(offset), skip, results)
    return results


def score_sums_of_rows(outputs: Tensor, offset: Tensor, skip: Tensor) -> tuple[Tensor, Tensor]:
    """`cedd.row_sums.score_sums`."""
    results, log_results = _results(outputs), _results(outputs)
    _launch(_score_kernel, outputs, *_in_two(offset), skip, results, log_results)
    return results, log_results
