"""The interface of training objectives: the loss of one row of outputs.

Shapes: V vocabulary; N rows are the positions that count (the dynamics say which).

An objective takes rows, never whole [B, L, V] outputs, so that the vocabulary head runs on those rows only, in chunks.
Cross entropies and score entropies depend on a few numbers per row. They are described by a record of these numbers,
because a fused head can compute them without autograd. Any other objective is a function from rows of outputs to
losses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from cedd.network import HeadLosses
from cedd.parameterization import Parameterization
from cedd.parts import Part, Table
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
    """Row losses for which heads have a fused implementation (`network.HeadLosses`)."""

    @abstractmethod
    def total(self, head: HeadLosses, features: Tensor, shares: Tensor) -> Tensor:
        """The sum over the rows of features [N, D], each times its share [N]."""


OBJECTIVES: dict[str, type[Objective]] = {}
"""The objectives by name; those of your own can be added."""


class Objective(Part, ABC):
    """A training loss as rows."""

    table: ClassVar[Table] = Table("objective", "cedd.objectives.OBJECTIVES", OBJECTIVES)

    def check(self, parameterization: Parameterization) -> None:
        """Raise a ValueError for outputs that the objective does not support; the message names an alternative."""
        del parameterization

    @abstractmethod
    def row_loss(self, parameterization: Parameterization, outputs: Tensor, rows: Rows) -> Tensor:
        """The loss of each row, [N, V] outputs -> [N]."""

    def closed_form(self, parameterization: Parameterization, rows: Rows) -> ClosedForm | None:
        """The loss in the form of a fused head, if there is one."""
        return None
