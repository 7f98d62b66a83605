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
    x = matrices.to(dtype or (torch.bfloat16 if matrices.is_cuda else torch.float32))
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp_min(1e-7)
    tall = x.shape[1] > x.shape[2]  # then its columns are the fewer products
    for _ in range(ITERATIONS):
        gram = x.mT @ x if tall else x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, *((x, polynomial) if tall else (polynomial, x)), beta=a)
    return x


def step_size(matrix: Tensor) -> float:
    """How far a matrix goes along U Vᵀ at a rate of 1."""
    return SIZE * math.sqrt(max(matrix.shape))


class Muon:
    """The steps of some matrices; what it remembers of each (`exp_avg`, and `step`, their number) is the caller's.

    `step` takes one. Where kernels sweep over momenta and values (`update_triton.MatrixTable`) they leave N in `room`,
    and `even_out` is all that is left to do.
    """

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
        self._room: list[Tensor] = []

    def step(self, gradients: Sequence[Tensor], excess: Tensor, finite: Tensor, rate: float) -> None:
        """One step with the gradients divided by excess [], and none if finite [] is false; nobody waits for either."""
        for alike in self._alike:
            gradient = torch.stack([gradients[i] for i in alike]).float() / excess
            before = torch.stack([self.momenta[i] for i in alike])
            momentum = before.lerp(gradient, 1 - self.momentum)
            direction = orthogonalized(gradient.lerp(momentum, self.momentum), self.dtype).float()
            values = [self.values[i] for i in alike]
            step = direction * (-rate * step_size(values[0]))
            if self.decay:
                step -= rate * self.decay * torch.stack(values)
            torch._foreach_add_(values, torch.where(finite, step, 0.0).unbind())  # type: ignore[attr-defined]
            momenta = [self.momenta[i] for i in alike]
            torch._foreach_copy_(momenta, torch.where(finite, momentum, before).unbind())  # type: ignore[attr-defined]
        self.count(finite)

    def count(self, finite: Tensor) -> None:
        """Note that a step was taken, if finite []."""
        torch._foreach_add_(self.counts, [finite.to(self.counts[0])] * len(self.counts))  # type: ignore[attr-defined]

    def room(self) -> list[Tensor]:
        """A place for the direction of each matrix, in bfloat16; those of one shape lie together."""
        self._room = [
            torch.zeros((len(alike), *self.values[alike[0]].shape), dtype=torch.bfloat16, device=self.values[0].device)
            for alike in self._alike
        ]
        places = {
            i: place
            for alike, stack in zip(self._alike, self._room, strict=True)
            for i, place in zip(alike, stack.unbind(), strict=True)
        }
        return [places[i] for i in range(len(self.values))]

    def even_out(self) -> None:
        """Make U Vᵀ of every N that lies in the room, in its place."""
        for stack in self._room:
            stack.copy_(orthogonalized(stack, torch.bfloat16))
