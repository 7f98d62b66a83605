"""Between two branches of the residual stream: adds the output of one and normalizes the sum for the next.

Shapes: B batch, L positions, D width.

    x' = x + gate · dropout(branch),        h = norm(x') (1 + scale) + shift

with gate, scale and shift one vector per sequence, or one for each of G equal stretches, each of which is then treated
as a sequence. This happens twice per block, so with Triton it is one kernel, and otherwise a function that makes ten
passes over [B, L, D], forward and backward, half as many as autograd. With x̂ = (x' - mean)·r the normalized stream, r
= 1/std, and given the gradients of x' and h,

    dscale = Σ_l dh x̂        dshift = Σ_l dh        e = dh (1 + scale)
    dx = dx' + r (e - mean(e) - x̂ mean(e x̂))        dgate = Σ_l dx dropout(branch)        dbranch = gate dropout'(dx).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from cedd.device import runs_alone, takes_kernels
from cedd.models.kernels import EPSILON, at_least_float32, dropout_scale


def add_and_norm(
    x: Tensor, branch: Tensor, gate: Tensor, shift: Tensor, scale: Tensor, dropped: int, seed: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(x', h), in the type of x. x, branch [B, L, D]; gate, shift, scale [B, G, D], where G divides L.

    dropped: how many of 256 entries of the branch are dropped. seed: [] int32 on the device, the seed of the kernel's
    random numbers; without a kernel they come from torch's generator.
    """
    if (stretches := scale.shape[1]) != 1:
        first, second, *modulation = (_as_sequences(part, stretches) for part in (x, branch, gate, shift, scale))
        added, normed = add_and_norm(first, second, modulation[0], modulation[1], modulation[2], dropped, seed)
        return added.view(x.shape), normed.view(x.shape)
    if takes_kernels(x):
        from cedd.models.kernels.residual_triton import add_and_norm_kernel

        return add_and_norm_kernel(x, branch, gate, shift, scale, dropped, seed)
    x, branch, gate = x.contiguous(), branch.to(x.dtype), gate.to(x.dtype)
    if not (torch.is_grad_enabled() or dropped or torch.compiler.is_compiling()):
        added = torch.addcmul(x, branch, gate)
        normed = F.layer_norm(at_least_float32(added), x.shape[-1:], eps=EPSILON)
        return added, torch.addcmul(at_least_float32(shift), normed, 1 + at_least_float32(scale)).to(x.dtype)
    made = _AddAndNorm.apply(x, branch, gate, shift, scale, dropped_entries(x, dropped), dropout_scale(dropped))
    assert isinstance(made, tuple)
    return made


def modulated_norm(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """h of a stream x [B, L, D] to which nothing is added, in the dtype of x; one kernel if no gradient is needed."""
    if (stretches := scale.shape[1]) != 1:
        return modulated_norm(*(_as_sequences(part, stretches) for part in (x, shift, scale))).view(x.shape)
    if takes_kernels(x) and runs_alone():
        from cedd.models.kernels.residual_triton import modulated_norm_kernel

        return modulated_norm_kernel(x, shift, scale)
    normed = F.layer_norm(at_least_float32(x), x.shape[-1:], eps=EPSILON)
    return (normed * (1 + scale) + shift).to(x.dtype)


def _as_sequences(vectors: Tensor, stretches: int) -> Tensor:
    """[B, L, D] -> [B G, L / G, D]: each stretch becomes a sequence."""
    batch, count, width = vectors.shape
    return vectors.reshape(batch * stretches, count // stretches, width)


def dropped_entries(x: Tensor, dropped: int) -> Tensor | None:
    """The entries to drop (None: no entries), by one random byte per entry; four bytes cost as much as one float."""
    if dropped == 0:
        return None
    words = math.ceil(x.shape[-1] / 4)
    bits = torch.randint(-(2**31), 2**31, (*x.shape[:-1], words), dtype=torch.int32, device=x.device)
    return bits.view(torch.uint8)[..., : x.shape[-1]] < dropped


def drop(x: Tensor, dropped: int) -> Tensor:
    """Dropout of ``dropped`` of 256 entries; the others are scaled up."""
    entries = dropped_entries(x, dropped)
    return x if entries is None else x.masked_fill(entries, 0.0) * dropout_scale(dropped)


class _AddAndNorm(torch.autograd.Function):
    """The equations above; each line is one sweep."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        branch: Tensor,
        gate: Tensor,
        shift: Tensor,
        scale: Tensor,
        drop: Tensor | None,
        rescale: float,
    ) -> tuple[Tensor, Tensor]:
        gate = gate * rescale
        kept = branch if drop is None else branch.masked_fill(drop, 0.0)
        added = torch.addcmul(x, kept, gate)
        wide, scale = at_least_float32(added), 1 + at_least_float32(scale)
        normed, mean, rstd = torch.native_layer_norm(wide, (x.shape[-1],), None, None, EPSILON)
        ctx.save_for_backward(added, mean, rstd, normed, kept, drop, gate, scale)
        ctx.rescale, ctx.types = rescale, (gate.dtype, shift.dtype)
        return added, torch.addcmul(at_least_float32(shift), normed, scale).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_added: Tensor, d_h: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        added, mean, rstd, normed, kept, drop, gate, scale = ctx.saved_tensors
        d_h = at_least_float32(d_h)
        d_shift = d_h.sum(1, keepdim=True)
        d_scale = (d_h * normed).sum(1, keepdim=True)
        d_normed = d_h * scale
        d_x, _, _ = torch.ops.aten.native_layer_norm_backward(
            d_normed, at_least_float32(added), (added.shape[-1],), mean, rstd, None, None, (True, False, False)
        )
        d_x = d_x.add_(d_added).to(added.dtype)
        d_gate = (d_x * kept).sum(1, keepdim=True, dtype=d_h.dtype) * ctx.rescale
        d_branch = d_x * gate
        if drop is not None:
            d_branch.masked_fill_(drop, 0.0)
        gate_type, type_ = ctx.types
        return d_x, d_branch, d_gate.to(gate_type), d_shift.to(type_), d_scale.to(type_), None, None
