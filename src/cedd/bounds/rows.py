"""Costs of positions, from a network whose [B, L, V] outputs need not exist at once.

Shapes: B batch, L positions, V vocabulary, D width; N rows are the positions that cost something.

A network that offers `features` [B, L, D] and a `head` is run once per batch, and its head on the rows that count, a
chunk of rows at a time. Any other callable gives [B, L, V], of which the rows are taken. All sums over the vocabulary
are done within a chunk; costs are float64.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from cedd.bounds.integrand import known_terms
from cedd.bounds.proposal import Cases
from cedd.device import has_float64
from cedd.network import Model, has_head
from cedd.objectives.objective import Rows
from cedd.objectives.score_entropy import score_entropy, true_ratios
from cedd.parameterization import Affine, Parameterization, at_token, can_return
from cedd.process import Noise

_CHUNK = {"cpu": 1 << 22, "cuda": 1 << 26}
"""Outputs held at once, in numbers: a quarter of a gigabyte on a GPU, a part of the cache's size on a CPU."""


def for_float64(model: Model, device: torch.device) -> tuple[Model, torch.device]:
    """A network and where its outputs are to be costed: on its own device, or on the CPU where that has no float64."""
    if has_float64(device):
        return model, device
    kind = _TwoHalvesElsewhere if has_head(cast(object, model)) else _Elsewhere
    return kind(model, device), torch.device("cpu")


@dataclass(frozen=True)
class _Elsewhere:
    """A network on another device, called from the CPU."""

    model: Model
    device: torch.device

    def __call__(self, x_t: Tensor, sigma: Tensor) -> Tensor:
        return self.model(x_t.to(self.device), sigma.to(self.device)).cpu()


class _TwoHalvesElsewhere(_Elsewhere):
    """The same, in two halves."""

    def features(self, x_t: Tensor, sigma: Tensor) -> Tensor:
        assert has_head(self.model)
        return self.model.features(x_t.to(self.device), sigma.to(self.device)).cpu()

    def head(self, features: Tensor) -> Tensor:
        assert has_head(self.model)
        return self.model.head(features.to(self.device)).cpu()


class PathCost(ABC):
    """What a position costs at one time of the path: the integrand of a bound, row by row."""

    @abstractmethod
    def positions(self, x_t: Tensor, noise: Noise) -> Tensor:
        """Where the network is needed, [B, L] bool, for a noise with fields [B, L]. The others cost nothing."""

    @abstractmethod
    def rows(self, outputs: Tensor, rows: Rows) -> Tensor:
        """The cost of each row, outputs [N, V] -> [N] float64."""

    @abstractmethod
    def magnitude(self, noise: Noise) -> Cases:
        """A guess of what the positions of each case cost at time t, all together: q of the proposal, unnormalised.

        It only steers the draws; zero where a case costs nothing.
        """


@dataclass(frozen=True)
class ScorePath(PathCost):
    """l = lbar + K of any parameterization, the integrand of J1; without K, that of J2."""

    parameterization: Parameterization
    with_entropy: bool = True

    def positions(self, x_t: Tensor, noise: Noise) -> Tensor:
        return can_return(x_t, noise)

    def rows(self, outputs: Tensor, rows: Rows) -> Tensor:
        if isinstance(self.parameterization, Affine):
            cost = affine_score_entropy(self.parameterization, outputs, rows)
        else:
            log_ratios = self.parameterization.log_ratios(outputs, rows.x_t, rows.noise)
            cost = score_entropy(log_ratios, rows.x0, rows.x_t, rows.noise)
        return cost + known_terms(rows.x_t, rows.x0, rows.noise).entropy if self.with_entropy else cost

    def magnitude(self, noise: Noise) -> Cases:
        """Masks are set at rate alpha' alive and cost -log f each. Moved tokens are as many, at beta' keep; and a token
        that has not moved pays for the suspicion that it has."""
        shuffling = noise.beta_rate * noise.keep
        return Cases(same=shuffling, moved=shuffling, masked=noise.alpha_rate * noise.alive)


@dataclass(frozen=True)
class Reading(PathCost):
    """-log p(x_0 | x_t): what it costs to read the data off the end of a path that stops short of t = 0."""

    parameterization: Parameterization

    def positions(self, x_t: Tensor, noise: Noise) -> Tensor:
        return can_return(x_t, noise)

    def rows(self, outputs: Tensor, rows: Rows) -> Tensor:
        return -at_token(self.parameterization.log_posterior(outputs, rows.x_t, rows.noise), rows.x0).double()

    def magnitude(self, noise: Noise) -> Cases:
        return Cases(same=noise.c, moved=noise.shuffled, masked=noise.a)


def affine_score_entropy(parameterization: Affine, outputs: Tensor, rows: Rows) -> Tensor:
    """lbar for s_y = base + gain f_y, [N, V] -> [N]: all but sum_y log s_y is closed form in float64.

    Where r_y is 0 for all y but x0 (absorb) that sum is not needed, and log f at x0 is all that is read.
    """
    x0, x_t, noise = rows.x0, rows.x_t, rows.noise
    logits = outputs.float() if outputs.dtype in (torch.bfloat16, torch.float16) else outputs
    normaliser = torch.logsumexp(logits, -1).double()
    score = parameterization.coefficients(at_token(logits, x_t).double() - normaliser, x_t, noise)
    at_x0 = torch.logaddexp(score.log_base, at_token(logits, x0).double() - normaliser + score.log_gain)
    ratios = true_ratios(x_t, x0, noise)
    cost = score.others() - ratios.extra * at_x0
    spread = (ratios.common > 0).nonzero().squeeze(-1)
    if spread.numel():
        # sum_y log s_y = sum_y [log base + softplus(o_y - Z + log gain - log base)], less the entry at x_t
        log_base, x = score.log_base[spread], x_t[spread]
        shift = score.log_gain[spread] - log_base - normaliser[spread]
        beyond = torch.nn.functional.softplus(logits[spread] + shift.to(logits)[:, None])
        tokens = (~score.masked[spread]).double()
        total = (noise.vocab_size - tokens) * log_base + beyond.sum(-1).double() - tokens * at_token(beyond, x).double()
        cost = cost.index_put((spread,), -ratios.common[spread] * total, accumulate=True)
    return torch.where(can_return(x_t, noise), ratios.rate * cost, 0.0)


def position_costs(model: Model, cost: PathCost, x0: Tensor, x_t: Tensor, noise: Noise) -> Tensor:
    """The cost of every position [B, L], float64, for x0, x_t [B, L] and a noise with fields [B]."""
    wide = noise.like(x_t)
    places = cost.positions(x_t, wide).reshape(-1).nonzero().squeeze(-1)
    rows = Rows(x0.reshape(-1)[places], x_t.reshape(-1)[places], wide.rows(places))
    costs = torch.zeros(x0.numel(), dtype=torch.float64, device=x0.device)
    sigma = noise.sigma.to(device=x0.device, dtype=torch.float32)

    def of_chunk(outputs: Tensor, part: slice) -> Tensor:
        return cost.rows(outputs, Rows(rows.x0[part], rows.x_t[part], rows.noise.map(lambda v: v[part])))

    costs[places] = run_rows(model, x_t, sigma, places, noise.vocab_size, of_chunk)
    return costs.reshape(x0.shape)


def run_rows(
    model: Model,
    inputs: Tensor,
    sigma: Tensor,
    places: Tensor,
    vocab_size: int,
    cost: Callable[[Tensor, slice], Tensor],
) -> Tensor:
    """cost(outputs of a chunk of rows, which rows) over the chosen places [N] of the network's outputs: [N] float64.

    inputs [B, L], sigma [B] float32.
    """
    hidden, head = _network(model, inputs, sigma, vocab_size)
    size = max(1, _CHUNK.get(inputs.device.type, _CHUNK["cpu"]) // vocab_size)
    done = [torch.zeros(0, dtype=torch.float64, device=inputs.device)]
    for start in range(0, len(places), size):
        part = slice(start, start + size)
        done.append(cost(head(hidden[places[part]]), part))
    return torch.cat(done)


def _network(model: Model, inputs: Tensor, sigma: Tensor, vocab_size: int) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """One row a position, [B*L, D] or [B*L, V], and what turns chosen rows into outputs."""
    if has_head(model):
        return model.features(inputs, sigma).flatten(0, 1), model.head
    outputs = model(inputs, sigma)
    expected = (*inputs.shape, vocab_size)
    if tuple(outputs.shape) != expected:
        raise ValueError(
            f"the network must return [B, L, V] = {list(expected)}, without a mask column; got {list(outputs.shape)}"
        )
    return outputs.flatten(0, 1), lambda rows: rows
