"""A bound as a path: the cost of each position at each time, and the costs of both ends.

Shapes: B batch, L positions, V vocabulary; N rows are the positions with a cost.

A position is in one of three cases: `same` (x_t = x0), `moved` (another token), `masked`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cedd.network import Network, Places, flat_places
from cedd.objectives.objective import Rows
from cedd.parameterization import at_token, can_jump
from cedd.process import Kernel, Noise


@dataclass(frozen=True)
class Cases:
    """Three numbers, one for each case of a position; tensors of one shape."""

    same: Tensor
    moved: Tensor
    masked: Tensor

    def pick(self, x_t: Tensor, x0: Tensor, noise: Noise) -> Tensor:
        """The value for the case of each position, for fields that broadcast with x_t."""
        return torch.where(noise.is_mask(x_t), self.masked, torch.where(x_t == x0, self.same, self.moved))

    def stack(self) -> Tensor:
        """The three in a last dimension, in the order same, moved, masked (the codes 0, 1, 2)."""
        return torch.stack([self.same, self.moved, self.masked], -1)

    def normalised(self) -> Cases:
        total = self.same + self.moved + self.masked
        return Cases(self.same / total, self.moved / total, self.masked / total)

    def mixed(self, other: Cases, share: Tensor) -> Cases:
        """A mixture: these numbers, with a share of the others."""
        pairs = ((self.same, other.same), (self.moved, other.moved), (self.masked, other.masked))
        return Cases(*[torch.where(share > 0, one + share * (two - one), one) for one, two in pairs])


def case_probabilities(kernel: Kernel) -> Cases:
    """c, (V-1) b and a."""
    return Cases(kernel.c, (kernel.vocab_size - 1) * kernel.b, kernel.a)


class PathCost(ABC):
    """The cost of a position at a time of the path: the integrand of a bound, row by row."""

    @property
    def vanishes_in_noise(self) -> bool:
        """Whether masks cost little near t = 1, for every network."""
        return True

    @property
    def lasts_in_shuffles(self) -> bool:
        """Whether, for a bad network, tokens can cost as much after many shuffles as after the first."""
        return False

    @abstractmethod
    def positions(self, x_t: Tensor, noise: Noise) -> Tensor:
        """The positions that need the network, [B, L] bool, for a noise with fields [B, L]. The others have no cost."""

    @abstractmethod
    def rows(self, outputs: Tensor, rows: Rows) -> Tensor:
        """The cost of each row, outputs [N, V] -> [N] float64."""

    def plain(self, outputs: Tensor, rows: Rows) -> Tensor:
        """The same for rows of any shape [*S], without shortcuts, for enumeration."""
        return self.rows(outputs, rows)

    @abstractmethod
    def magnitude(self, noise: Noise) -> Cases:
        """A guess of the total cost of the positions of each case at time t; zero for a case without a cost. It is the
        scale of control variates and the default of `share`. It does not bias estimates.
        """

    def share(self, noise: Noise) -> Cases:
        """q of the proposal, which sums to one; by default in proportion to `guess`."""
        return self.magnitude(noise).normalised()


@dataclass(frozen=True)
class Reconstruction(PathCost):
    """-log p(x_0 | x_t): the cost of the data at the end of a path that ends before t = 0.

    log_law: (outputs, x_t, noise) -> log p(x_0 | x_t), normalised over the V tokens.
    """

    log_law: Callable[[Tensor, Tensor, Noise], Tensor]

    def positions(self, x_t: Tensor, noise: Noise) -> Tensor:
        return can_jump(x_t, noise)

    def rows(self, outputs: Tensor, rows: Rows) -> Tensor:
        return -at_token(self.log_law(outputs, rows.x_t, rows.noise), rows.x0).double()

    def magnitude(self, noise: Noise) -> Cases:
        return Cases(same=noise.c, moved=noise.shuffled, masked=noise.a)


@dataclass(frozen=True)
class Target:
    """A bound in parts, in nats per token.

    `scale` times the path from t = 1 to `low`, the reconstruction at its end if there is one, and the terms that do not
    depend on the network.
    """

    path: PathCost
    low: float
    scale: float
    reconstruction: Reconstruction | None
    terminal: float


def position_costs(network: Network, cost: PathCost, x0: Tensor, x_t: Tensor, noise: Noise) -> Tensor:
    """The cost of every position [B, L], float64, for x0, x_t [B, L] and a noise with fields [B]."""
    wide = noise.like(x_t)
    places = flat_places(cost.positions(x_t, wide))
    costs = torch.zeros(x0.numel(), dtype=torch.float64, device=x0.device)
    if len(places):
        rows = Rows(x0.reshape(-1)[places], x_t.reshape(-1)[places], wide.rows(places))
        outputs = network.rows(x_t, noise.sigma.to(x0.device), Places(places))
        costs[places] = outputs.map(lambda chunk, part: cost.rows(chunk, rows.part(part)))
    return costs.reshape(x0.shape)
