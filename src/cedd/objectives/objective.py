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

from torch import Tensor

from cedd.network import SupportsRowLosses
from cedd.parameterization import Parameterization
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
    """Row losses for which a head may offer a fused implementation."""

    way: ClassVar[str]
    """The name of the head's method."""

    @abstractmethod
    def total(self, head: SupportsRowLosses, features: Tensor, shares: Tensor) -> Tensor:
        """The sum over the rows of features [N, D], each times its share [N]."""


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
