"""Muon: a matrix moves along its orthogonalized momentum, whose singular values are all about 1.

Shapes: n matrices of R rows and C columns.

With G the gradient, M ← μM + (1-μ)G and N = μM + (1-μ)G, Nesterov's look ahead, the step is

    W ← (1 - rate·decay) W - rate · 0.2 sqrt(max(R, C)) · U Vᵀ,        N = U S Vᵀ.

The factor gives its entries the size that AdamW's steps have, so that one rate serves both. U Vᵀ comes from five
Newton-Schulz iterations, x ← (a + b xxᵀ + c (xxᵀ)²) x, whose coefficients raise small singular values fast and leave
all of them near 1, which is close enough. The projection to queries, keys and values is one matrix.

The steps are those of `torch.optim.Muon`, which takes one matrix after the other and skips a step only if the host
decides so. Here matrices of one shape are stepped together, and the device decides. Where matrices are sharded, every
rank gathers N, computes all of U Vᵀ, and moves its own rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn

from cedd.training.config import OptimizerConfig
from cedd.training.distributed import local_part, with_full_matrices
from cedd.training.optimizer import Optimizer, excess_of

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
SIZE = 0.2
"""Root mean square of the entries of an AdamW step, in units of its rate."""


def orthogonalized(matrices: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Approximately U Vᵀ of each matrix U S Vᵀ, [n, R, C]; by default in bfloat16 on a GPU, where it is fast."""
    a, b, c = COEFFICIENTS
    x = matrices.to(dtype or (torch.bfloat16 if matrices.is_cuda else torch.float32))
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp_min(1e-7)
    tall = x.shape[1] > x.shape[2]  # xᵀx is then the smaller product
    for _ in range(ITERATIONS):
        gram = x.mT @ x if tall else x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, *((x, polynomial) if tall else (polynomial, x)), beta=a)
    return x


def step_size(matrix: Tensor) -> float:
    """The length of a step along U Vᵀ at rate 1."""
    return SIZE * math.sqrt(max(matrix.shape))


class Muon(Optimizer):
    """Muon for some matrices; those of one shape are updated together."""

    MOMENTS = ("exp_avg",)

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], config: OptimizerConfig, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(parameters, 1.0 if config.matrix_rate is None else config.matrix_rate / config.rate)
        self.values = [matrix.detach() for matrix in parameters.values()]
        self.momenta = list(self.moments["exp_avg"].values())
        self.momentum, self.decay, self.dtype = config.momentum, config.weight_decay, dtype
        shapes = dict.fromkeys(value.shape for value in self.values)
        self._alike = [[i for i, value in enumerate(self.values) if value.shape == shape] for shape in shapes]
        self._directions: list[Tensor] = []

    def step(self, rate: float, norm: Tensor, clip: float, finite: Tensor) -> None:
        """The host does not wait for the device."""
        excess, rate = excess_of(norm, clip), self.relative_rate * rate
        orthogonalize = partial(orthogonalized, dtype=self.dtype)
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters.values()]
        for alike in self._alike:
            values, momenta = ([local_part(all_[i]) for i in alike] for all_ in (self.values, self.momenta))
            gradient = torch.stack([local_part(gradients[i]) for i in alike]).to(momenta[0].dtype) / excess
            before, like = torch.stack(momenta), self.values[alike[0]]
            momentum = before.lerp(gradient, 1 - self.momentum)
            direction = with_full_matrices(orthogonalize, gradient.lerp(momentum, self.momentum), like)
            step = direction.to(momentum.dtype) * (-rate * step_size(like))
            if self.decay:
                step -= rate * self.decay * torch.stack(values)
            torch._foreach_add_(values, torch.where(finite, step, 0.0).unbind())  # type: ignore[attr-defined]
            torch._foreach_copy_(momenta, torch.where(finite, momentum, before).unbind())  # type: ignore[attr-defined]
        self.count(finite)

    def use_kernels(self, averages: Sequence[Tensor], copies: Sequence[Tensor | None]) -> None:
        from cedd.training.update_triton import MatrixTable

        device = self.values[0].device
        self._directions = [
            torch.zeros((len(alike), *self.values[alike[0]].shape), dtype=torch.bfloat16, device=device)
            for alike in self._alike
        ]
        places = dict(zip(chain(*self._alike), chain(*self._directions), strict=True))
        directions, lengths = [places[i] for i in range(len(places))], [step_size(value) for value in self.values]
        if not any(direction.data_ptr() % 16 for direction in directions):
            self.table = MatrixTable(lengths, self.values, self.momenta, directions, averages, copies)

    def sweep(self, rate: float, excess: Tensor, finite: Tensor, pace: float) -> None:
        self.table.look_ahead(excess, finite, self.momentum)
        for directions in self._directions:
            directions.copy_(orthogonalized(directions, torch.bfloat16))
        self.table.move(finite, rate=self.relative_rate * rate, decay=self.decay, pace=pace)
        self.count(finite)
