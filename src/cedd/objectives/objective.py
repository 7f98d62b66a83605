"""What an objective is: which positions count, and what one row of outputs costs.

Shapes: B batch, L positions, V vocabulary; N rows are the positions that count, out of B*L.

An objective sees rows, never whole [B, L, V] outputs: the vocabulary head can then run on those rows only, a chunk
at a time. Cross entropies and score entropies come down to a few numbers a row, and are told apart by a record of
them, because a fused head can do them without autograd; anything else is a function from rows of outputs to losses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from cedd.network import ScoreRows
from cedd.parameterization import Affine, Parameterization
from cedd.process import Noise, TokenProcess


@dataclass(frozen=True)
class Rows:
    """The positions that count, flattened: x0, x_t [N] and a Noise with fields [N]."""

    x0: Tensor
    x_t: Tensor
    noise: Noise


class RowTotal(Protocol):
    """What a head's loss returns: the differentiable sum over rows."""

    @property
    def total(self) -> Tensor: ...


class SupportsRowLosses(Protocol):
    """A vocabulary head that costs chosen rows of features in chunks, without all outputs at once."""

    def loss(
        self,
        features: Tensor,
        row_loss: Callable[..., Tensor],
        row_args: tuple[Tensor, ...],
        row_weights: Tensor | None,
    ) -> RowTotal:
        """The weighted sum of row_loss(outputs [R, V], *row_args [R]) over the rows of features [N, D]."""
        ...

    def cross_entropy(
        self, features: Tensor, targets: Tensor, row_weights: Tensor, *, shift: tuple[Tensor, Tensor]
    ) -> RowTotal:
        """The weighted sum of -log softmax(outputs + shift amounts at shift tokens)[targets]."""
        ...

    def score_entropy(self, features: Tensor, rows: ScoreRows, row_weights: Tensor) -> RowTotal:
        """The weighted sum of the rows' score entropies."""
        ...


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

    @abstractmethod
    def check(self, process: TokenProcess) -> None:
        """Refuse a process the objective makes no sense on, saying what to use instead."""

    @abstractmethod
    def positions(self, x_t: Tensor, noise: Noise) -> Tensor:
        """Which positions count: [B, L] bool, for a noise with fields [B, L]."""

    @abstractmethod
    def row_loss(self, parameterization: Parameterization, outputs: Tensor, rows: Rows) -> Tensor:
        """The loss of each row, [N, V] outputs -> [N]."""

    def closed_form(self, parameterization: Parameterization, rows: Rows) -> ClosedForm | None:
        """The loss as one that a fused head knows, where it is one."""
        return None

    def network_input(self, x0: Tensor, x_t: Tensor, process: TokenProcess) -> Tensor:
        """What the network is shown: the noisy tokens."""
        return x_t


def require_probabilities(parameterization: Parameterization) -> Affine:
    """Cross entropy needs a parameterization by probabilities."""
    if not isinstance(parameterization, Affine):
        name = type(parameterization).__name__
        raise ValueError(f"cross entropy needs probabilities: {name} gives ratios; use Denoiser or Bayes")
    return parameterization
