"""Short sequences' attention in one kernel each way; `attention.py` has the equations.

Shapes: B batch, L positions, H heads, W head width. Imported only where there is a CUDA device.

A program has one head of one sequence, whole. The two halves of a head, which a turn mixes, are tensors of their own,
so that to turn them moves nothing between threads: a product over W is then the sum of two over W/2.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

from cedd.models.kernels.row_triton import LOG2_E

WARPS = 8
"""Of a program; the fastest of `benchmarks/kernels.py` on an H200."""
CHIP_FITS = not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] == 9
"""Whether a program has room here. It was measured on Hopper; for other chips the compiler spills half of it, or the
shared memory is too small. Asked at import, for a compiler that traces the network cannot ask."""


@triton.jit
def _half(values, positions, stride, length, HALF: tl.constexpr):
    """[L, W/2] of a head; 0 where there is no position."""
    here = positions[:, None] * stride + tl.arange(0, HALF)[None, :]
    return tl.load(values + here, mask=(positions < length)[:, None], other=0.0)


@triton.jit
def _store_half(values, half, positions, stride, length, HALF: tl.constexpr):
    here = positions[:, None] * stride + tl.arange(0, HALF)[None, :]
    tl.store(values + here, half, mask=(positions < length)[:, None])


@triton.jit
def _turned(values, cosines, sines, positions, stride, length, HALF: tl.constexpr):
    """Both halves of a head, turned, in the type of the values."""
    first = _half(values, positions, stride, length, HALF)
    second = _half(values + HALF, positions, stride, length, HALF)
    a = first * cosines - second * sines
    b = first * sines + second * cosines
    return a.to(values.dtype.element_ty), b.to(values.dtype.element_ty)


@triton.jit
def _store_turned_back(
    values,
    a,
    b,
    cosines,
    sines,
    positions,
    stride,
    length,
    HALF: tl.constexpr,
):
    _store_half(values, a * cosines + b * sines, positions, stride, length, HALF)
    _store_half(values + HALF, b * cosines - a * sines, positions, stride, length, HALF)


@triton.jit
def _place(length, HALF: tl.constexpr):
    """Where this program's head begins: in o, in q (k and v are one and two widths on), and among the levels."""
    head, heads, sequence = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    width, within = heads * 2 * HALF, head * 2 * HALF
    at_o = sequence * length * width + within
    at_q = sequence * length * (3 * width) + within
    return at_o, at_q, (sequence * heads + head) * length, width


@triton.jit
def _read(qkv, cosine, sine, positions, width, length, HALF: tl.constexpr):
    """A head's halves of q and k, turned, its v, and the cos and sin that turned them; the tables [L, 3, 1, W] have
    those in halves (cos, cos) and (-sin, sin)."""
    cosines = _half(cosine, positions, 6 * HALF, length, HALF).to(tl.float32)
    sines = _half(sine + HALF, positions, 6 * HALF, length, HALF).to(tl.float32)
    k1, k2 = _turned(qkv + width, cosines, sines, positions, 3 * width, length, HALF)
    values = _half(qkv + 2 * width, positions, 3 * width, length, 2 * HALF)
    q1, q2 = _turned(qkv, cosines, sines, positions, 3 * width, length, HALF)
    return q1, q2, k1, k2, values, cosines, sines


@triton.jit
def _scores(a1, a2, b1, b2, slope, keys, queries, length, CAUSAL: tl.constexpr):
    """slope a bᵀ in units of log 2, -inf where a query does not see a key; keys, queries: those of rows and columns."""
    scores = tl.dot(a1, tl.trans(b1), input_precision="ieee")
    scores = tl.dot(a2, tl.trans(b2), scores, input_precision="ieee") * (slope * LOG2_E)
    seen = keys < length
    if CAUSAL:
        seen = seen & (keys <= queries)
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def _forward_kernel(
    qkv,
    cosine,
    sine,
    mixed,
    levels,
    length,
    slope,
    CAUSAL: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at_o, at_q, at_level, width = _place(length, HALF)
    here = tl.arange(0, BLOCK)
    q1, q2, k1, k2, values, _, _ = _read(qkv + at_q, cosine, sine, here, width, length, HALF)
    scores = _scores(q1, q2, k1, k2, slope, here[None, :], here[:, None], length, CAUSAL)
    top = tl.max(scores, 1)
    scores = tl.exp2(scores - top[:, None])
    total = tl.sum(scores, 1)
    product = tl.dot(scores.to(values.dtype), values, input_precision="ieee") / total[:, None]
    _store_half(mixed + at_o, product, here, width, length, 2 * HALF)
    tl.store(levels + at_level + here, top + tl.log2(total), mask=here < length)


@triton.jit
def _backward_kernel(
    d_mixed,
    qkv,
    cosine,
    sine,
    levels,
    d_qkv,
    length,
    slope,
    CAUSAL: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Keys go down and queries across, so that what three of the products begin with is in registers already."""
    at_o, at_q, at_level, width = _place(length, HALF)
    here = tl.arange(0, BLOCK)
    q1, q2, k1, k2, values, cosines, sines = _read(qkv + at_q, cosine, sine, here, width, length, HALF)
    gradient = _half(d_mixed + at_o, here, width, length, 2 * HALF)
    level = tl.load(levels + at_level + here, mask=here < length, other=0.0)
    scores = _scores(k1, k2, q1, q2, slope, here[:, None], here[None, :], length, CAUSAL)
    shares = tl.exp2(scores - level[None, :])
    d_values = tl.dot(shares.to(values.dtype), gradient, input_precision="ieee")
    d_shares = tl.dot(values, tl.trans(gradient), input_precision="ieee")
    mean = tl.sum(shares * d_shares, 0)
    d_scores = (shares * (d_shares - mean[None, :]) * slope).to(values.dtype)
    d_k1 = tl.dot(d_scores, q1, input_precision="ieee")
    d_k2 = tl.dot(d_scores, q2, input_precision="ieee")
    d_scores = tl.trans(d_scores)
    d_q1 = tl.dot(d_scores, k1, input_precision="ieee")
    d_q2 = tl.dot(d_scores, k2, input_precision="ieee")
    d_qkv += at_q
    _store_turned_back(d_qkv, d_q1, d_q2, cosines, sines, here, 3 * width, length, HALF)
    _store_turned_back(d_qkv + width, d_k1, d_k2, cosines, sines, here, 3 * width, length, HALF)
    _store_half(d_qkv + 2 * width, d_values, here, 3 * width, length, 2 * HALF)


def _options(qkv: Tensor, causal: bool) -> dict[str, Any]:
    block = max(16, triton.next_power_of_2(qkv.shape[1]))
    return {"CAUSAL": causal, "HALF": qkv.shape[-1] // 2, "BLOCK": block, "num_warps": WARPS}


@torch.library.custom_op("cedd::attend_short", mutates_args=())
def _forward(qkv: Tensor, cosine: Tensor, sine: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """o [B, L, H, W], and the logarithm of each query's sum over keys [B, H, L], to base 2."""
    qkv = qkv.contiguous()
    batch, length, _, heads, width = qkv.shape
    mixed = torch.empty(batch, length, heads, width, dtype=qkv.dtype, device=qkv.device)
    levels = torch.empty(batch, heads, length, dtype=torch.float32, device=qkv.device)
    with torch.cuda.device_of(qkv):
        _forward_kernel[heads, batch](  # pyright: ignore[reportIndexIssue]
            qkv, cosine.contiguous(), sine.contiguous(), mixed, levels, length, width**-0.5, **_options(qkv, causal)
        )
    return mixed, levels


@torch.library.custom_op("cedd::attend_short_backward", mutates_args=())
def _backward(d_mixed: Tensor, qkv: Tensor, cosine: Tensor, sine: Tensor, levels: Tensor, causal: bool) -> Tensor:
    d_mixed, qkv = d_mixed.contiguous(), qkv.contiguous()
    batch, length, _, heads, width = qkv.shape
    d_qkv = torch.empty_like(qkv)
    with torch.cuda.device_of(qkv):
        _backward_kernel[heads, batch](  # pyright: ignore[reportIndexIssue]
            d_mixed,
            qkv,
            cosine.contiguous(),
            sine.contiguous(),
            levels,
            d_qkv,
            length,
            width**-0.5,
            **_options(qkv, causal),
        )
    return d_qkv


@_forward.register_fake
def _(qkv: Tensor, *others: object) -> tuple[Tensor, Tensor]:
    batch, length, _, heads, width = qkv.shape
    levels = torch.empty(batch, heads, length, dtype=torch.float32, device=qkv.device)
    return torch.empty(batch, length, heads, width, dtype=qkv.dtype, device=qkv.device), levels


@_backward.register_fake
def _(d_mixed: Tensor, qkv: Tensor, *_: object) -> Tensor:
    return torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    qkv, cosine, sine, ctx.causal = inputs
    ctx.save_for_backward(qkv, cosine, sine, output[1])


def _differentiate(ctx: Any, d_mixed: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return _backward(d_mixed, *ctx.saved_tensors, ctx.causal), None, None, None


_forward.register_autograd(_differentiate, setup_context=_remember)


def attend_short(qkv: Tensor, cosine: Tensor, sine: Tensor, causal: bool = False) -> Tensor:
    """q, k, v [B, L, 3, H, W], not yet turned, and the tables of their positions [L, 3, 1, W] -> o [B, L, H, W]."""
    return _forward(qkv, cosine, sine, causal)[0]
