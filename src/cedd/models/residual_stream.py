"""The residual stream and its norms.

Shapes: B batch, L positions, D width, N chosen positions of the flattened batch.

A block adds its branches to the stream x [B, L, D]:

    x = x + modulation.gated(branch(norm(x, modulation)))

for x + gate * dropout(branch(norm(x) * (1 + scale) + shift)). One kernel adds a branch and normalizes the sum for the
next one (`kernels/residual.py`), so a branch is stored separately until a norm reads the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node
from torch.utils.checkpoint import checkpoint

from cedd.models.kernels import at_least_float32
from cedd.models.kernels.residual import add_and_norm, drop, modulated_norm
from cedd.models.kernels.rows import gather_rows, scatter_rows


class Modulation(NamedTuple):
    """The modulation of one branch by the noise level, [B, G, D] each, one for each of G equal stretches of a sequence;
    None: no modulation."""

    shift: Tensor | None = None
    scale: Tensor | None = None
    gate: Tensor | None = None
    seed: Tensor | None = None
    """[], the seed of the fused kernel's dropout; set by `prepare_branches`."""
    where: Tensor | None = None
    """[N], the positions at which the branch is computed, if not all; set by `prepare_branches`."""

    def gated(self, output: Tensor) -> GatedBranch:
        return GatedBranch(output, self)


class GatedBranch(NamedTuple):
    """gate * dropout(output), not multiplied yet."""

    output: Tensor
    modulation: Modulation


def prepare_branches(
    modulations: Sequence[Modulation], where: Tensor | None, device: torch.device, dropout: bool
) -> list[Modulation]:
    """The modulations of all branches and of the last norm, with the positions of the last branch and, on CUDA, the
    seeds of the dropout inside the norms."""
    if dropout and device.type == "cuda":
        seeds = torch.randint(2**31 - 1, (len(modulations),), dtype=torch.int32, device=device).unbind()
        modulations = [modulation._replace(seed=seed) for modulation, seed in zip(modulations, seeds, strict=True)]
    *others, last_branch, last_norm = modulations
    return [*others, last_branch._replace(where=where), last_norm]


@dataclass(eq=False)
class ResidualStream:
    """x [B, L, D], and the branch that was added last, which the next norm adds to it."""

    x: Tensor
    branch: Tensor | None = None
    gate: Tensor | None = None

    def __add__(self, branch: GatedBranch) -> ResidualStream:
        assert self.branch is None, "norm the stream between two branches"
        output, modulation = branch
        if modulation.where is not None:
            output = scatter_rows(output, modulation.where, self.x.shape[:2].numel()).view(self.x.shape)
        return ResidualStream(self.x, output, modulation.gate)


# FSDP looks for the tensors of a block's inputs and outputs, to gather its weights again before the backward pass: in
# dataclasses since torch 2.13, and in registered nodes before.
register_pytree_node(
    ResidualStream,
    lambda stream: ([stream.x, stream.branch, stream.gate], None),
    lambda parts, _: ResidualStream(*parts),
)


class AdaptiveNorm(nn.Module):
    """Layer norm without a bias, modulated: norm(x) * (1 + scale) + shift; without a modulation it has a weight of its
    own."""

    def __init__(self, width: int, dropout: float, has_weight: bool) -> None:
        super().__init__()
        self.width, self.dropped = width, round(dropout * 256)
        self.weight = nn.Parameter(torch.ones(width)) if has_weight else None

    def forward(self, stream: ResidualStream, modulation: Modulation) -> Tensor:
        """[B, L, D], or [N, D] if the modulation names positions. The stream's last branch is added on the way."""
        dropped = self.dropped if self.training else 0
        shift, scale, _, seed, where = modulation
        x, branch, gate = stream.x, stream.branch, stream.gate
        if branch is not None and gate is not None and shift is not None and scale is not None:
            x, normed = add_and_norm(x, branch, gate, shift, scale, dropped, seed)
        else:
            x = x if branch is None else x + drop(branch, dropped)
            if shift is not None and scale is not None:
                normed = modulated_norm(x, shift, scale)
            else:
                weight = None if self.weight is None else at_least_float32(self.weight)
                normed = F.layer_norm(at_least_float32(x), (self.width,), weight).to(x.dtype)
        stream.x, stream.branch, stream.gate = x, None, None
        return normed if where is None else gather_rows(normed.flatten(0, 1), where)


def checkpointed(block: Callable[..., ResidualStream], stream: ResidualStream, *inputs: Any) -> ResidualStream:
    """block(stream, *inputs), recomputed in the backward pass, on a copy of the stream, which norms modify."""

    def run(*parts: Tensor | None) -> tuple[Tensor | None, ...]:
        after = block(ResidualStream(*parts), *inputs)  # type: ignore[arg-type]
        return after.x, after.branch, after.gate

    return ResidualStream(*checkpoint(run, stream.x, stream.branch, stream.gate, use_reentrant=False))
