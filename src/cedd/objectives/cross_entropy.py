"""Denoising cross entropy: w * -log p(x_0 | x_t), summed over the positions that count.

    CEDD   w = 1          CEDD*  w = log(e + 0.3/t)          CEDDT  w = sigma' / (exp(sigma) - 1)

A weight is a function of the noise and of x_t, row by row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from cedd.network import HeadLosses
from cedd.objectives.objective import ClosedForm, Objective, Rows
from cedd.parameterization import Affine, Parameterization
from cedd.parts import Table
from cedd.process import Noise
from cedd.row_sums import full_precision

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
class CrossEntropyRows(ClosedForm):
    """weight * -log softmax(o + raise_by at raise_at)[target], row by row; all [N].

    `raise_at` is a token id (any token where `raise_by` is 0).
    """

    target: Tensor
    weight: Tensor
    raise_at: Tensor
    raise_by: Tensor

    def loss(self, outputs: Tensor) -> Tensor:
        """The reference implementation, [N, V] -> [N], of the fused forms."""
        logits = full_precision(outputs)
        logits = logits.scatter_add(-1, self.raise_at[:, None], self.raise_by.to(logits)[:, None])
        picked = torch.log_softmax(logits, -1).gather(-1, self.target[:, None]).squeeze(-1)
        return -self.weight.to(picked) * picked

    def total(self, head: HeadLosses, features: Tensor, shares: Tensor) -> Tensor:
        shift = self.raise_at, self.raise_by
        return head.cross_entropy(features, self.target, self.weight * shares, shift=shift).total


WEIGHTS: dict[str, Any] = {"constant": constant, "star": star, "likelihood": likelihood}
"""Weights by name: functions, and classes of them; those of your own can be added."""


@dataclass(frozen=True)
class CrossEntropy(Objective):
    """w * -log p(x_0 | x_t)."""

    parts: ClassVar[Mapping[str, Table]] = {"weight": Table("weight", "cedd.objectives.WEIGHTS", WEIGHTS)}
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


def require_probabilities(parameterization: Parameterization) -> Affine:
    """Cross entropy needs a parameterization by probabilities."""
    if not isinstance(parameterization, Affine):
        name = type(parameterization).__name__
        raise ValueError(f"cross entropy needs probabilities: {name} gives ratios; use Denoiser or Bayes")
    return parameterization
