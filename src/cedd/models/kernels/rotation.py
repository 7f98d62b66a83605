"""Rotary positions (RoPE; Su et al. 2021): pairs of entries of q and k are rotated by angles that grow with
the position.

Shapes: B batch, L positions, H heads, W head width.

Pair i of a head is (x_i, x_{i+W/2}), rotated by position · 10000^(-2i/W). With the halves' tables laid side by side,
c = (cos, cos) and s = (-sin, sin), and x̃ the vector with its halves swapped,

    rotate(x) = x c + x̃ s,        and its transpose, for the gradient:        g c + (g s)~.

On a CPU, where swapping halves costs as much as a matrix product, the rows of the projection to q and k are reordered
so that the two entries of a pair are adjacent. Each pair is then a complex number, which is multiplied by exp(i angle)
in place. q·k does not depend on the order of the entries.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from cedd.device import runs_alone, takes_kernels
from cedd.models.transformer_config import BASE

Product = Callable[..., Tensor]


def linear(x: Tensor, layer: nn.Linear, order: Tensor | None = None) -> Tensor:
    """layer(x) [..., D], with its entries in this order [D]."""
    made = layer(x)
    return made if order is None else made.index_select(-1, order)


def rotary_tables(length: int, head_width: int) -> tuple[Tensor, Tensor]:
    """(c, s) for (q, k, v), [L, 3, 1, W]; v is rotated by 0, so that all three are one tensor. A separate v would be a
    slice of the projection's output, and the backward pass would keep that whole output in addition to the rotated q
    and k.
    """
    frequencies = BASE ** -(torch.arange(0, head_width, 2, dtype=torch.float64) / head_width)
    rotated = torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)
    angles = torch.arange(length, dtype=torch.float64)[:, None, None, None] * rotated[:, None, None] * frequencies
    cosine, sine = angles.cos(), angles.sin()
    return torch.cat((cosine, cosine), -1).float(), torch.cat((-sine, sine), -1).float()


class Heads(NamedTuple):
    """The inputs of attention, [B, H, L, W] each."""

    queries: Tensor
    keys: Tensor
    values: Tensor


def project_and_rotate(
    x: Tensor, projection: nn.Linear, heads: int, cosine: Tensor, sine: Tensor, product: Product = linear
) -> Heads:
    """Queries and keys of x [B, L, D], rotated by the tables of their positions, and values."""
    weight, plain = projection.weight, (torch.float32, torch.float64)
    if x.device.type == "cpu" and x.dtype in plain and x.dtype == weight.dtype and not _is_traced():
        if not torch.is_grad_enabled() and x.shape[:2].numel() < x.shape[2]:
            # Of few positions, as in a block after a cache, the entries are put in order and not the weight.
            qkv = product(x, projection, _paired(heads, cosine.shape[-1]))
            return Heads(*_rotate_pairs(qkv, _rotations(heads, cosine, sine, x.dtype)))
        rotated = _ProjectAndRotate.apply(x, weight, heads, cosine, sine)
        assert isinstance(rotated, tuple)
        return Heads(*rotated)
    qkv = projection(x).unflatten(-1, (3, heads, -1))  # [B, L, 3, H, W]
    if takes_kernels(qkv) and runs_alone():
        from cedd.models.kernels.rotation_triton import rotate_in_place

        rotate_in_place(qkv, cosine, sine)
    else:
        qkv = rotate(qkv, cosine, sine)
    return Heads(*qkv.transpose(1, 3).unbind(2))


def _is_traced() -> bool:
    """Whether a compiler or autocast must see the product itself."""
    return torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu")


def swap_halves(x: Tensor) -> Tensor:
    """The last axis with its halves swapped."""
    return x.unflatten(-1, (2, -1)).flip(-2).flatten(-2)


def rotate(qkv: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """q, k and v [B, L, 3, H, W] with q and k rotated, by the tables of their positions."""
    if torch.compiler.is_compiling():  # by halves: the compiler's kernels for a swap are twice as slow
        half = qkv.shape[-1] // 2
        (first, second), cosine, sine = qkv.chunk(2, -1), cosine[..., :half], sine[..., half:]
        return torch.cat((first * cosine - second * sine, first * sine + second * cosine), -1).to(qkv.dtype)
    rotated = _Rotate.apply(qkv, cosine, sine)
    assert isinstance(rotated, Tensor)
    return rotated


class _Rotate(torch.autograd.Function):
    """The same in three sweeps per pass, half as many as with autograd."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        return (qkv * cosine).addcmul_(swap_halves(qkv), sine).to(qkv.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        cosine, sine = ctx.saved_tensors
        return (gradient * cosine).add_(swap_halves(gradient * sine)).to(gradient.dtype), None, None


class _ProjectAndRotate(torch.autograd.Function):
    """(q, k, v) [B, H, L, W] from x [B, L, D] and the projection's weight [3 D, D], pairs as complex numbers."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, heads: int, cosine: Tensor, sine: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        rotations = _rotations(heads, cosine, sine, x.dtype)
        weight = weight.index_select(0, _paired(heads, cosine.shape[-1]))
        ctx.save_for_backward(x, weight, rotations)
        return _rotate_pairs(F.linear(x, weight), rotations)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, rotations = ctx.saved_tensors
        d_queries, d_keys, d_values = (gradient.transpose(1, 2) for gradient in gradients)  # [B, L, H, W]
        d_qkv = x.new_empty(*x.shape[:2], 3, *d_values.shape[2:])
        back = rotations.conj_physical()
        torch.mul(_pairs(d_queries), back[:, 0], out=_pairs(d_qkv[:, :, 0]))
        torch.mul(_pairs(d_keys), back[:, 1], out=_pairs(d_qkv[:, :, 1]))
        d_qkv[:, :, 2] = d_values
        d_qkv = d_qkv.flatten(2)
        d_x = d_qkv @ weight if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return d_x, None, None, None, None
        d_weight = d_qkv.flatten(0, 1).T @ x.flatten(0, 1)
        order = _paired(d_values.shape[2], d_values.shape[3])
        return d_x, torch.empty_like(d_weight).index_copy_(0, order, d_weight), None, None, None


@functools.lru_cache(maxsize=1)
def _rotations(heads: int, cosine: Tensor, sine: Tensor, dtype: torch.dtype) -> Tensor:
    """exp(i angle) for q and k, [L, 2, H, W/2], from the tables. All layers use the same."""
    half = cosine.shape[-1] // 2
    rotations = torch.complex(cosine[:, :2, :, :half], sine[:, :2, :, half:]).to(dtype.to_complex())
    return rotations.expand(-1, -1, heads, -1).contiguous()


def _rotate_pairs(qkv: Tensor, rotations: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(q, k, v) [B, H, L, W] from entries [B, L, 3 D] in the order of `_paired`, which are overwritten."""
    qkv = qkv.unflatten(-1, (3, rotations.shape[2], -1))
    _pairs(qkv[:, :, :2]).mul_(rotations)
    queries, keys, values = qkv.transpose(1, 3).unbind(2)
    return queries, keys, values


def _pairs(x: Tensor) -> Tensor:
    """[..., W] with adjacent pairs, as complex numbers [..., W/2]; a view if possible."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))


@functools.cache
def _paired(heads: int, width: int) -> Tensor:
    """The rows of a projection [3 H W, D], reordered so that x_i and x_{i+W/2} of q and k are adjacent."""
    rows = torch.arange(3 * heads * width).view(3, heads, 2, width // 2)
    return torch.cat((rows[:2].transpose(2, 3).flatten(), rows[2].flatten()))
