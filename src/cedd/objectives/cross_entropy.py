"""Denoising cross entropy: w * -log p(x_0 | x_t), summed over the positions that count.

    CEDD   w = 1          CEDD*  w = log(e + 0.3/t)          CEDDT  w = sigma' / (exp(sigma) - 1)

A weight is a function of the noise and of x_t, row by row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cedd.objectives.objective import CrossEntropyRows, Objective, Rows, require_probabilities
from cedd.parameterization import Parameterization
from cedd.process import Noise

Weight = Callable[[Noise, Tensor], Tensor]
"""(noise, x_t) -> the weight of each row; all [N]."""


def constant(noise: Noise, x_t: Tensor) -> Tensor:
    """w = 1."""
    return torch.ones_like(noise.t)


def star(noise: Noise, x_t: Tensor) -> Tensor:
    """w = log(e + 0.3/t)."""
    return torch.log(math.e + 0.3 / noise.t.clamp_min(torch.finfo(torch.float64).tiny))


def likelihood(noise: Noise, x_t: Tensor) -> Tensor:
    """w = sigma' / (exp(sigma) - 1), the weight that makes absorb's cross entropy its likelihood bound."""
    return (noise.alpha_rate + noise.beta_rate) / torch.expm1(noise.sigma).clamp_min(torch.finfo(torch.float64).tiny)


@dataclass(frozen=True)
class CrossEntropy(Objective):
    """w * -log p(x_0 | x_t)."""

    weight: Weight = constant

    def check(self, parameterization: Parameterization) -> None:
        require_probabilities(parameterization)

    def row_loss(self, parameterization: Parameterization, outputs: Tensor, rows: Rows) -> Tensor:
        return self.closed_form(parameterization, rows).loss(outputs)

    def closed_form(self, parameterization: Parameterization, rows: Rows) -> CrossEntropyRows:
        affine = require_probabilities(parameterization)
        return CrossEntropyRows(
            target=rows.x0,
            weight=self.weight(rows.noise, rows.x_t),
            raise_at=rows.x_t.clamp_max(rows.noise.vocab_size - 1),
            raise_by=affine.evidence(rows.x_t, rows.noise),
        )
