"""Rotary positions (RoPE; Su et al. 2021): turn pairs of entries of q and k by angles that grow with the position.

Shapes: B batch, L positions, H heads, W head width.

Pair i of a head is (x_i, x_{i+W/2}), turned by position · 10000^(-2i/W). With the halves' tables laid side by side,
c = (cos, cos) and s = (-sin, sin), and x̃ the vector with its halves exchanged,

    rotate(x) = x c + x̃ s,        and its transpose, for the gradient:        g c + (g s)~.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def rotary_tables(length: int, head_width: int) -> tuple[Tensor, Tensor]:
    """(c, s) for (q, k, v), [L, 3, 1, W]; v turns by 0.

    Turning v by nothing lets the three go through as one tensor. Taken apart, v would stay a slice of the
    product that made it, and the backward pass would keep that whole product beside the rotated q and k.
    """
    frequencies = 10_000.0 ** -(torch.arange(0, head_width, 2, dtype=torch.float64) / head_width)
    turns = torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)
    angles = torch.arange(length, dtype=torch.float64)[:, None, None, None] * turns[:, None, None] * frequencies
    cosine, sine = angles.cos(), angles.sin()
    return torch.cat((cosine, cosine), -1).float(), torch.cat((-sine, sine), -1).float()


def exchanged(x: Tensor) -> Tensor:
    """The last axis with its halves exchanged."""
    return x.unflatten(-1, (2, -1)).flip(-2).flatten(-2)


def rotate(qkv: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """q, k and v [B, L, 3, H, W] with q and k turned, by the tables of their positions."""
    if torch.compiler.is_compiling():  # by halves: the compiler's kernels for an exchange are twice as slow
        half = qkv.shape[-1] // 2
        (first, second), cosine, sine = qkv.chunk(2, -1), cosine[..., :half], sine[..., half:]
        return torch.cat((first * cosine - second * sine, first * sine + second * cosine), -1).to(qkv.dtype)
    turned = _Rotate.apply(qkv, cosine, sine)
    assert isinstance(turned, Tensor)
    return turned


class _Rotate(torch.autograd.Function):
    """The same in three sweeps a way, where autograd would take twice as many."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        return (qkv * cosine).addcmul_(exchanged(qkv), sine).to(qkv.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        cosine, sine = ctx.saved_tensors
        return (gradient * cosine).add_(exchanged(gradient * sine)).to(gradient.dtype), None, None
