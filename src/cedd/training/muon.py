"""Muon: a matrix moves by its momentum with all singular values made alike, whatever the gradient's own were.

Shapes: n matrices of R rows and C columns.

With G the gradient, M ← μM + (1-μ)G and N = μM + (1-μ)G, Nesterov's look ahead, the step is

    W ← (1 - rate·decay) W - rate · 0.2 sqrt(max(R, C)) · U Vᵀ,        N = U S Vᵀ.

The factor gives its entries the size that AdamW's steps have, so that one rate serves both. U Vᵀ comes from five
Newton-Schulz iterations, x ← (a + b xxᵀ + c (xxᵀ)²) x, whose coefficients lift small singular values fast and leave
all of them around 1, not at 1, which serves as well. The one that makes queries, keys and values is one matrix.

The steps are those of `torch.optim.Muon`. That takes one matrix after the other, and cannot leave out a step unless the
host knows that it should; here those of one shape are taken together, and the device decides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
SIZE = 0.2
"""The root mean square of the entries of a step of AdamW, in units of its rate."""


def is_muons(name: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter is one that Muon is for: a matrix inside a block, not an embedding, head or modulation."""
    return name.startswith("backbone.blocks.") and parameter.ndim == 2


def orthogonalized(matrices: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """About U Vᵀ of each matrix U S Vᵀ, [n, R, C]; in bfloat16 on a GPU, where it is fast, unless told otherwise."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x.to(dtype or (torch.bfloat16 if x.is_cuda else torch.float32))
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp_min(1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Muon:
    """The steps of some matrices; what it remembers of each (`exp_avg`, and `step`, their number) is the caller's."""

    def __init__(
        self,
        matrices: Sequence[nn.Parameter],
        states: Sequence[dict[str, Tensor]],
        momentum: float,
        decay: float,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.values = [matrix.detach() for matrix in matrices]
        self.momenta = [state["exp_avg"] for state in states]
        self.counts = [state["step"] for state in states]
        self.momentum, self.decay, self.dtype = momentum, decay, dtype
        shapes = dict.fromkeys(value.shape for value in self.values)
        self._alike = [[i for i, value in enumerate(self.values) if value.shape == shape] for shape in shapes]

    def step(self, gradients: Sequence[Tensor], excess: Tensor, finite: Tensor, rate: float) -> None:
        """One step with the gradients divided by excess [], and none if finite [] is false; nobody waits for either."""
        for alike in self._alike:
            gradient = torch.stack([gradients[i] for i in alike]).float() / excess
            before = torch.stack([self.momenta[i] for i in alike])
            momentum = before.lerp(gradient, 1 - self.momentum)
            direction = orthogonalized(gradient.lerp(momentum, self.momentum), self.dtype).float().contiguous()
            rows, columns = direction.shape[1:]
            step = direction * (-rate * SIZE * math.sqrt(max(rows, columns)))
            values = [self.values[i] for i in alike]
            if self.decay:
                step -= rate * self.decay * torch.stack(values)
            torch._foreach_add_(values, torch.where(finite, step, 0.0).unbind())  # type: ignore[attr-defined]
            momenta = [self.momenta[i] for i in alike]
            torch._foreach_copy_(momenta, torch.where(finite, momentum, before).unbind())  # type: ignore[attr-defined]
        torch._foreach_add_(self.counts, [finite.to(self.counts[0])] * len(self.counts))  # type: ignore[attr-defined]
