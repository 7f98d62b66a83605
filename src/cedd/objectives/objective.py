"""What an objective is: what one row of outputs costs.

Shapes: V vocabulary; N rows are the positions that count (the dynamics say which).

An objective sees rows, never whole [B, L, V] outputs: the vocabulary head can then run on those rows only, a chunk
at a time. Cross entropies and score entropies come down to a few numbers a row, and are told apart by a record of
them, because a fused head can do them without autograd; anything else is a function from rows of outputs to losses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from cedd.network import ScoreRows, SupportsRowLosses
from cedd.parameterization import Affine, Parameterization
from cedd.process import Noise


@dataclass(frozen=True)
class Rows:
    """The positions that count, flattened: x0, x_t [N] and a Noise with fields [N]."""

    x0: Tensor
    x_t: Tensor
    noise: Noise

    def part(self, which: slice) -> Rows:
        """Some of the rows."""
        return Rows(self.x0[which], self.x_t[which], self.noise.map(lambda v: v[which]))


class ClosedForm(ABC):
    """Losses of rows that a head may have a way of its own for."""

    way: ClassVar[str]
    """The name of the head's method."""

    @abstractmethod
    def total(self, head: SupportsRowLosses, features: Tensor, shares: Tensor) -> Tensor:
        """The sum over the rows of features [N, D], each times its share [N]."""


@dataclass(frozen=True)
class CrossEntropyRows(ClosedForm):
    """weight * -log softmax(o + raise_by at raise_at)[target], row by row; all [N].

    `raise_at` is a token id (any token where `raise_by` is 0).
    """

    way = "cross_entropy"

    target: Tensor
    weight: Tensor
    raise_at: Tensor
    raise_by: Tensor

    def loss(self, outputs: Tensor) -> Tensor:
        """The plain form, [N, V] -> [N], which every fused form must agree with."""
        logits = outputs.float() if outputs.dtype in (torch.bfloat16, torch.float16) else outputs
        logits = logits.scatter_add(-1, self.raise_at[:, None], self.raise_by.to(logits)[:, None])
        picked = torch.log_softmax(logits, -1).gather(-1, self.target[:, None]).squeeze(-1)
        return -self.weight.to(picked) * picked

    def total(self, head: SupportsRowLosses, features: Tensor, shares: Tensor) -> Tensor:
        shift = self.raise_at, self.raise_by
        return head.cross_entropy(features, self.target, self.weight * shares, shift=shift).total


@dataclass(frozen=True)
class ScoreEntropyRows(ClosedForm):
    """weight [N] times the score entropy that the numbers of a row make."""

    way = "score_entropy"

    numbers: ScoreRows
    weight: Tensor

    def total(self, head: SupportsRowLosses, features: Tensor, shares: Tensor) -> Tensor:
        return head.score_entropy(features, self.numbers, self.weight * shares).total


class Objective(ABC):
    """A training loss as rows."""

    def check(self, parameterization: Parameterization) -> None:
        """Refuse outputs that the objective makes no sense of, saying what to use instead."""
        del parameterization

    @abstractmethod
    def row_loss(self, parameterization: Parameterization, outputs: Tensor, rows: Rows) -> Tensor:
        """The loss of each row, [N, V] outputs -> [N]."""

    def closed_form(self, parameterization: Parameterization, rows: Rows) -> ClosedForm | None:
        """The loss as one that a fused head knows, where it is one."""
        return None


def require_probabilities(parameterization: Parameterization) -> Affine:
    """Cross entropy needs a parameterization by probabilities."""
    if not isinstance(parameterization, Affine):
        name = type(parameterization).__name__
        raise ValueError(f"cross entropy needs probabilities: {name} gives ratios; use Denoiser or Bayes")
    return parameterization
