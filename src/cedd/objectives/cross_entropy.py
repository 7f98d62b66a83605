"""Denoising cross entropy: w(t) * -log p(x_0 | x_t), summed over the positions that can have changed (CEDD, ours).

    CEDD   w = 1          CEDD*  w = log(e + 0.3/t)          CEDDT  w = sigma' / (exp(sigma) - 1)

For absorb only masked positions count: elsewhere x_0 = x_t is known.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cedd.objectives.objective import CrossEntropyRows, Objective, Rows, require_probabilities
from cedd.parameterization import Parameterization, can_return
from cedd.process import Noise, TokenProcess

Weight = Callable[[Noise], Tensor]


def constant(noise: Noise) -> Tensor:
    """w = 1."""
    return torch.ones_like(noise.t)


def star(noise: Noise) -> Tensor:
    """w = log(e + 0.3/t)."""
    return torch.log(math.e + 0.3 / noise.t.clamp_min(torch.finfo(torch.float64).tiny))


def likelihood(noise: Noise) -> Tensor:
    """w = sigma' / (exp(sigma) - 1), the weight that makes absorb's cross entropy its likelihood bound."""
    return (noise.alpha_rate + noise.beta_rate) / torch.expm1(noise.sigma).clamp_min(torch.finfo(torch.float64).tiny)


@dataclass(frozen=True)
class CrossEntropy(Objective):
    """w(t) * -log p(x_0 | x_t) at the positions that the process can have changed."""

    weight: Weight = constant

    def check(self, process: TokenProcess) -> None:
        """Every process has one."""

    def positions(self, x_t: Tensor, noise: Noise) -> Tensor:
        return can_return(x_t, noise)

    def row_loss(self, parameterization: Parameterization, outputs: Tensor, rows: Rows) -> Tensor:
        return self.closed_form(parameterization, rows).loss(outputs)

    def closed_form(self, parameterization: Parameterization, rows: Rows) -> CrossEntropyRows:
        affine = require_probabilities(parameterization)
        return CrossEntropyRows(
            target=rows.x0,
            weight=self.weight(rows.noise),
            raise_at=rows.x_t.clamp_max(rows.noise.vocab_size - 1),
            raise_by=affine.evidence(rows.x_t, rows.noise),
        )
