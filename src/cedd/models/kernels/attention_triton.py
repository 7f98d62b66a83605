"""Attention of short sequences, rotary positions included, in one kernel each way; `attention.py` has the equations.

Shapes: B batch, L positions, H heads, W head width. Imported only where there is a CUDA device.

A program computes one head of one sequence. The two halves of a head, which a rotation mixes, are separate tensors, so
that a rotation moves no data between threads; a product over W is then the sum of two over W/2.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

from cedd.models.kernels import EPSILON
from cedd.models.kernels.row_triton import LOG2_E

NORM_EPSILON = tl.constexpr(EPSILON)
WARPS = 8
"""Warps of a program; the fastest number by `benchmarks/kernel_times.py` on an H200."""
CHIP_FITS = not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] == 9
"""Whether a program fits this chip. On chips other than Hopper the compiler spills half of the registers, or the shared
memory is too small. It is determined at import, because it cannot be while a compiler traces the network."""


@triton.jit
def _half(values, positions, stride, length, HALF: tl.constexpr):
    """[L, W/2] of a head; 0 beyond the last position."""
    here = positions[:, None] * stride + tl.arange(0, HALF)[None, :]
    return tl.load(values + here, mask=(positions < length)[:, None], other=0.0)


@triton.jit
def _store_half(values, half, positions, stride, length, HALF: tl.constexpr):
    here = positions[:, None] * stride + tl.arange(0, HALF)[None, :]
    tl.store(values + here, half, mask=(positions < length)[:, None])


@triton.jit
def _rotated(values, cosines, sines, positions, stride, length, HALF: tl.constexpr):
    """Both halves of a head, rotated, in the type of the values."""
    first = _half(values, positions, stride, length, HALF)
    second = _half(values + HALF, positions, stride, length, HALF)
    a = first * cosines - second * sines
    b = first * sines + second * cosines
    return a.to(values.dtype.element_ty), b.to(values.dtype.element_ty)


@triton.jit
def _normed(a, b, HALF: tl.constexpr):
    """Both halves of vectors, scaled to a mean square of 1, and the scales [L, 1]."""
    wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
    squares = tl.sum(wide_a * wide_a, 1) + tl.sum(wide_b * wide_b, 1)
    factors = tl.rsqrt(squares / (2 * HALF) + NORM_EPSILON)[:, None]
    return (wide_a * factors).to(a.dtype), (wide_b * factors).to(b.dtype), factors


@triton.jit
def _through_norm(d_a, d_b, a, b, factors, HALF: tl.constexpr):
    """The backward pass of `_normed`."""
    mean = ((tl.sum(d_a * a, 1) + tl.sum(d_b * b, 1)) / (2 * HALF))[:, None]
    return (d_a - a * mean) * factors, (d_b - b * mean) * factors


@triton.jit
def _store_rotated_back(values, a, b, cosines, sines, positions, stride, length, HALF: tl.constexpr):
    _store_half(values, a * cosines + b * sines, positions, stride, length, HALF)
    _store_half(values + HALF, b * cosines - a * sines, positions, stride, length, HALF)


@triton.jit
def _place(length, HALF: tl.constexpr):
    """The offsets of this program's head in o, in q (k and v are one and two widths after it), and in the log-sums."""
    head, heads, sequence = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    width, within = heads * 2 * HALF, head * 2 * HALF
    at_o = sequence * length * width + within
    at_q = sequence * length * (3 * width) + within
    return at_o, at_q, (sequence * heads + head) * length, width


@triton.jit
def _read(qkv, cosine, sine, positions, width, length, HALF: tl.constexpr):
    """A head's halves of q and k, rotated, its v, and the cos and sin that rotated them; the tables [L, 3, 1, W] have
    those in halves (cos, cos) and (-sin, sin)."""
    cosines = _half(cosine, positions, 6 * HALF, length, HALF).to(tl.float32)
    sines = _half(sine + HALF, positions, 6 * HALF, length, HALF).to(tl.float32)
    k1, k2 = _rotated(qkv + width, cosines, sines, positions, 3 * width, length, HALF)
    values = _half(qkv + 2 * width, positions, 3 * width, length, 2 * HALF)
    q1, q2 = _rotated(qkv, cosines, sines, positions, 3 * width, length, HALF)
    return q1, q2, k1, k2, values, cosines, sines


@triton.jit
def _scores(a1, a2, b1, b2, scale, keys, queries, length, CAUSAL: tl.constexpr):
    """scale a bᵀ in units of log 2, -inf where a query does not attend to a key; keys, queries: the indices of rows and
    columns."""
    scores = tl.dot(a1, tl.trans(b1), input_precision="ieee")
    scores = tl.dot(a2, tl.trans(b2), scores, input_precision="ieee") * (scale * LOG2_E)
    seen = keys < length
    if CAUSAL:
        seen = seen & (keys <= queries)
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def _forward_kernel(
    qkv, cosine, sine, output, log_sums, length, scale,
    CAUSAL: tl.constexpr, NORMED: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at_o, at_q, at_sum, width = _place(length, HALF)
    here = tl.arange(0, BLOCK)
    q1, q2, k1, k2, values, _, _ = _read(qkv + at_q, cosine, sine, here, width, length, HALF)
    if NORMED:
        q1, q2, _ = _normed(q1, q2, HALF)
        k1, k2, _ = _normed(k1, k2, HALF)
    scores = _scores(q1, q2, k1, k2, scale, here[None, :], here[:, None], length, CAUSAL)
    maximum = tl.max(scores, 1)
    scores = tl.exp2(scores - maximum[:, None])
    total = tl.sum(scores, 1)
    product = tl.dot(scores.to(values.dtype), values, input_precision="ieee") / total[:, None]
    _store_half(output + at_o, product, here, width, length, 2 * HALF)
    tl.store(log_sums + at_sum + here, maximum + tl.log2(total), mask=here < length)


@triton.jit
def _backward_kernel(
    d_output, qkv, cosine, sine, log_sums, d_qkv, length, scale,
    CAUSAL: tl.constexpr, NORMED: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows are keys and columns are queries, so that the first factor of three of the products is already in
    registers."""
    at_o, at_q, at_sum, width = _place(length, HALF)
    here = tl.arange(0, BLOCK)
    q1, q2, k1, k2, values, cosines, sines = _read(qkv + at_q, cosine, sine, here, width, length, HALF)
    if NORMED:
        q1, q2, of_q = _normed(q1, q2, HALF)
        k1, k2, of_k = _normed(k1, k2, HALF)
    gradient = _half(d_output + at_o, here, width, length, 2 * HALF)
    log_sum = tl.load(log_sums + at_sum + here, mask=here < length, other=0.0)
    scores = _scores(k1, k2, q1, q2, scale, here[:, None], here[None, :], length, CAUSAL)
    probabilities = tl.exp2(scores - log_sum[None, :])
    d_values = tl.dot(probabilities.to(values.dtype), gradient, input_precision="ieee")
    d_probabilities = tl.dot(values, tl.trans(gradient), input_precision="ieee")
    mean = tl.sum(probabilities * d_probabilities, 0)
    d_scores = (probabilities * (d_probabilities - mean[None, :]) * scale).to(values.dtype)
    d_k1 = tl.dot(d_scores, q1, input_precision="ieee")
    d_k2 = tl.dot(d_scores, q2, input_precision="ieee")
    d_scores = tl.trans(d_scores)
    d_q1 = tl.dot(d_scores, k1, input_precision="ieee")
    d_q2 = tl.dot(d_scores, k2, input_precision="ieee")
    if NORMED:
        d_q1, d_q2 = _through_norm(d_q1, d_q2, q1, q2, of_q, HALF)  # pyright: ignore[reportPossiblyUnboundVariable]
        d_k1, d_k2 = _through_norm(d_k1, d_k2, k1, k2, of_k, HALF)  # pyright: ignore[reportPossiblyUnboundVariable]
    d_qkv += at_q
    _store_rotated_back(d_qkv, d_q1, d_q2, cosines, sines, here, 3 * width, length, HALF)
    _store_rotated_back(d_qkv + width, d_k1, d_k2, cosines, sines, here, 3 * width, length, HALF)
    _store_half(d_qkv + 2 * width, d_values, here, 3 * width, length, 2 * HALF)


def _launch(kernel: Any, qkv: Tensor, causal: bool, largest_score: float | None, *tensors: Tensor) -> None:
    """One program for each head of each sequence. Tensors that the kernel only reads need not be contiguous."""
    batch, length, _, heads, width = qkv.shape
    block = max(16, triton.next_power_of_2(length))
    normed, scale = (False, width**-0.5) if largest_score is None else (True, largest_score / width)
    options = {"CAUSAL": causal, "NORMED": normed, "HALF": width // 2, "BLOCK": block, "num_warps": WARPS}
    with torch.cuda.device_of(qkv):
        kernel[heads, batch](*(tensor.contiguous() for tensor in tensors), length, scale, **options)


def _outputs(qkv: Tensor) -> tuple[Tensor, Tensor]:
    """Empty tensors for o [B, L, H, W] and the log-sums [B, H, L]."""
    batch, length, _, heads, width = qkv.shape
    output = torch.empty(batch, length, heads, width, dtype=qkv.dtype, device=qkv.device)
    return output, torch.empty(batch, heads, length, dtype=torch.float32, device=qkv.device)


@torch.library.custom_op("cedd::attend_short", mutates_args=())
def _forward(
    qkv: Tensor, cosine: Tensor, sine: Tensor, causal: bool, largest_score: float | None
) -> tuple[Tensor, Tensor]:
    """o [B, L, H, W], and each query's log-sum-exp over its keys [B, H, L], to base 2."""
    output, log_sums = _outputs(qkv)
    _launch(_forward_kernel, qkv, causal, largest_score, qkv, cosine, sine, output, log_sums)
    return output, log_sums


@torch.library.custom_op("cedd::attend_short_backward", mutates_args=())
def _backward(
    d_output: Tensor,
    qkv: Tensor,
    cosine: Tensor,
    sine: Tensor,
    log_sums: Tensor,
    causal: bool,
    largest_score: float | None,
) -> Tensor:
    d_qkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    _launch(_backward_kernel, qkv, causal, largest_score, d_output, qkv, cosine, sine, log_sums, d_qkv)
    return d_qkv


@_forward.register_fake
def _(qkv: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return _outputs(qkv)


@_backward.register_fake
def _(d_output: Tensor, qkv: Tensor, *_: object) -> Tensor:
    return torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    qkv, cosine, sine, *ctx.options = inputs
    ctx.save_for_backward(qkv, cosine, sine, output[1])


def _differentiate(ctx: Any, d_output: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return _backward(d_output, *ctx.saved_tensors, *ctx.options), None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_remember)


def attend_short(
    qkv: Tensor, cosine: Tensor, sine: Tensor, causal: bool = False, largest_score: float | None = None
) -> Tensor:
    """q, k, v [B, L, 3, H, W], not yet rotated, and the tables of their positions [L, 3, 1, W] -> o [B, L, H, W]."""
    return _forward(qkv, cosine, sine, causal, largest_score)[0]
