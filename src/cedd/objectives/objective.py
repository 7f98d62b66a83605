"""What an objective is: which positions count, and what one row of outputs costs.

Shapes: B batch, L positions, V vocabulary; N rows are the positions that count, out of B*L.

An objective sees rows, never whole [B, L, V] outputs: the vocabulary head can then run on those rows only, a chunk
at a time. Cross entropies are told apart by a record (target, weight, and what to add to one logit), because a
fused head can do them without autograd; anything else is a function from rows of outputs to losses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from cedd.parameterization import Affine, Parameterization
from cedd.process import Noise, TokenProcess


@dataclass(frozen=True)
class Rows:
    """The positions that count, flattened: x0, x_t [N] and a Noise with fields [N]."""

    x0: Tensor
    x_t: Tensor
    noise: Noise


@dataclass(frozen=True)
class CrossEntropyRows:
    """weight * -log softmax(o + raise_by at raise_at)[target], row by row; all [N].

    `raise_at` is a token id (any token where `raise_by` is 0).
    """

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

    def cross_entropy(self, parameterization: Parameterization, rows: Rows) -> CrossEntropyRows | None:
        """The loss as a weighted cross entropy, where it is one."""
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
