"""Draws of the path: times, noisy sequences, their costs under the network, and one value per sequence.

Shapes: N sequences, L positions, D draws per sequence (a draw is a time and a noisy sequence at it), T targets.

In block diffusion the sequences are blocks, G consecutive ones for each text; one network evaluation reads a draw of
all blocks of a text.

Errors. The Monte Carlo error comes from the two halves, which are independent designs on the same sequences: a quarter
of the mean squared difference of a sequence's two values estimates the variance of its mean, with N degrees of freedom
per round. The part of the values that depends on the level only is not noise in the mean, because levels are stratified
across all sequences. It is subtracted first, estimated by the mean of the four draws at the nearest levels.

With fewer than 16 such differences, or with too few draws per round, the error comes from the strata instead. Each of
the S = D/2 strata per half has one draw per sequence. Levels of different strata are independent; those within a
stratum are not, because its N draws are stratified again. Let s_k and s'_k be the sums of the N values in stratum k of
the two halves, with given coefficients c of the control variates. They are independent and identically distributed,
however much the sequences differ, so the variance of the mean, sum_k (Var s_k + Var s'_k) / (2 N S)^2, has the unbiased
estimate sum_k d_k^2 / (2 N S)^2, d_k = s_k - s'_k. Both halves have coefficients, which are c plus noise that adds e_k
and e'_k to d_k. E[d_k^2 + d'_k^2 - d_k d'_k] counts this noise twice, which is what it adds if the halves have it in
common, and less otherwise: the estimate is conservative.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from cedd.bounds.control import HalfDraws, coefficients, expectations, often_seen, variates
from cedd.bounds.proposal import EXTRA_UNIFORMS, case_codes, directed_draw, number_of_uniforms, plain_draw
from cedd.bounds.times import (
    CLEAN_COSTS,
    CLEAN_IS_FREE,
    JUMPS_COST,
    NOISE_COSTS,
    DrawnTimes,
    PathTimes,
    Shares,
    stratified_levels,
)
from cedd.dynamics.path import Cases, PathCost, Target, case_probabilities, position_costs
from cedd.dynamics.reverse import JUST_AFTER_ZERO
from cedd.network import Network
from cedd.process import Noise, TokenProcess, uniform_noise

_BLOCK = 1 << 24  # positions whose costs are in memory at once, for the control variates
_DRAWS_PER_RECONSTRUCTION = 8
_FEW_DIFFERENCES = 16
_NEIGHBOURS = 4
_LARGEST_SINGLE = 1e30  # larger costs are stored in float64
_PROBES = (1e-9, 1e-12, 1e-15, 1e-20, 1e-30, 1e-37)  # sigmas at which the cost of clean sequences is evaluated
_NEGLIGIBLE = 1e-3  # nats per token and e-fold of sigma


def parts_of(count: int, size: int) -> Iterator[Tensor]:
    """0..count-1 in order, `size` at a time."""
    for start in range(0, count, size):
        yield torch.arange(start, min(start + size, count))


class Batch(NamedTuple):
    """Clean sequences and their noise on the device, the network for them, and their indices in the request."""

    network: Network
    x0: Tensor
    noise: Noise
    part: Tensor


@dataclass(frozen=True)
class Evaluation:
    """A network on a data set, ready to be drawn from: data [N, L] on the CPU.

    targets: T bounds of one path, estimated from the same draws.
    """

    network: Network
    process: TokenProcess
    data: Tensor
    targets: tuple[Target, ...]
    batch: int
    report: Callable[[int], None]
    nested: bool = False
    """Whether sequences of different lengths with a common prefix have the same noise there."""
    group: int = 1
    """G, the number of consecutive sequences (blocks) per text."""
    _costs: list[float] = field(default_factory=list[float], init=False, repr=False, compare=False)

    @property
    def device(self) -> torch.device:
        return self.network.device

    @property
    def path(self) -> PathCost:
        """The path that all targets share."""
        return self.targets[0].path

    @property
    def low(self) -> float:
        """The earliest time of all targets; times are drawn from here to 1."""
        return min(target.low for target in self.targets)

    @cached_property
    def clean_tokens_cost(self) -> bool:
        """Whether unchanged tokens have a cost."""
        x0 = self.data[:1]
        noise = self.process.noise(torch.full((1,), 0.5, dtype=torch.float64))
        return bool(self.path.positions(x0, noise.like(x0)).any())

    @property
    def time_shares(self) -> Shares:
        """The density of times, by where the cost of a bad network can be large."""
        if self.clean_tokens_cost:
            return JUMPS_COST if self.path.lasts_in_shuffles else CLEAN_COSTS
        return CLEAN_IS_FREE if self.path.vanishes_in_noise else NOISE_COSTS

    @cached_property
    def times(self) -> PathTimes:
        """The times of all draws."""
        deep = self._levels_off if self._may_diverge else None
        return PathTimes(self.process, self.data.shape[1], self.low, self.time_shares, deep or _PROBES[0])

    def _tilt(self, drawn: DrawnTimes) -> Tensor:
        """The second function of time of the control variates."""
        if self.times.shares is NOISE_COSTS:
            return 1 / drawn.noise.keep.clamp_min(1e-300)
        return 2 * drawn.v - 1

    def half(self, draws: int, which: Tensor, generator: torch.Generator) -> HalfDraws:
        """One stratified design over the sequences `which` [n], with `draws` directed draws per sequence."""
        drawn = self.times.at(stratified_levels(len(which), draws, generator).reshape(-1))
        magnitude = self.path.magnitude(drawn.noise)
        order = self._order(len(which), draws)
        share = self.path.share(drawn.noise.rows(order))
        parts = [
            self._directed(batch, Cases(*self._on_device(batch.part, share.same, share.moved, share.masked)), generator)
            for batch in self._batches(which[order // draws], drawn.noise.rows(order))
        ]
        cost, case, odds = (torch.cat(column)[order.argsort()] for column in zip(*parts, strict=True))
        integrand = cost.mean(-1) * drawn.dt / odds
        values = [torch.where(drawn.noise.t >= one.low, one.scale * integrand, 0.0) for one in self.targets]

        def by_sequence(x: Tensor) -> Tensor:
            return x.reshape(len(which), draws, *x.shape[1:])

        return HalfDraws(
            values=torch.stack([by_sequence(value) for value in values]),
            v=by_sequence(drawn.v),
            dv=by_sequence(drawn.dv),
            dt=by_sequence(drawn.dt),
            odds=by_sequence(odds),
            tilt=by_sequence(self._tilt(drawn)),
            probability=by_sequence(case_probabilities(drawn.noise).stack()),
            magnitude=by_sequence(magnitude.stack()),
            case=by_sequence(case),
            cost=by_sequence(cost if bool(cost.max() > _LARGEST_SINGLE) else cost.float()),
        )

    def _directed(self, batch: Batch, share: Cases, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """cost [B, L] float64, case [B, L] int8 and odds [B] of one directed draw of each sequence, on the CPU."""
        x0, noise = batch.x0, batch.noise
        draw = directed_draw(x0, noise, share, self._uniforms(x0, generator))
        cost = position_costs(batch.network, self.path, x0, draw.x_t, noise)
        self.report(len(x0) // self.group)
        self.network.check_outputs()  # moving the costs to the CPU waits for the device anyway
        return cost.cpu(), case_codes(draw.x_t, x0, noise).cpu(), draw.odds.cpu()

    def plain(self, which: Tensor, t: Tensor, cost: PathCost, generator: torch.Generator) -> Tensor:
        """The costs per token of plain draws of the sequences `which` [n] at times t [n, D]: [n, D]."""
        values, order = list[Tensor](), self._order(*t.shape)
        for batch in self._batches(which[order // t.shape[1]], self.process.noise(t.reshape(-1)[order])):
            x_t = plain_draw(batch.x0, batch.noise, self._uniforms(batch.x0, generator))
            values.append(position_costs(batch.network, cost, batch.x0, x_t, batch.noise).mean(1).cpu())
            self.report(len(x_t) // self.group)
        self.network.check_outputs()
        return torch.cat(values)[order.argsort()].reshape(t.shape)

    def reconstruction(self, target: Target, draws: int, which: Tensor, generator: torch.Generator) -> Tensor:
        """The cost of each sequence at the end of its path, [n, some] (0 where the path ends in the data)."""
        if target.reconstruction is None:
            return torch.zeros(len(which), 1, dtype=torch.float64)
        count = -(-draws // _DRAWS_PER_RECONSTRUCTION)
        t = torch.full((len(which), count), max(target.low, JUST_AFTER_ZERO), dtype=torch.float64)
        return self.plain(which, t, target.reconstruction, generator)

    def infinite_at_zero(self) -> str | None:
        """Why the integral is infinite for targets that go down to t = 0; None where it is finite.

        It is infinite if the cost of a clean sequence stays above 0.001 sigma'/sigma for all small sigma. (The limit is
        not relative to 1/t: if sigma starts like a root of t, as for hybrid, all costs grow like its rate, and their
        integral is finite. Smaller multiples diverge, too, but add at most 0.001 nats each time the earliest sigma is
        divided by e.)
        """
        if not self._may_diverge or self._levels_off is not None:
            return None
        how = "is infinite" if self._cost_per_log_sigma[-1] == math.inf else "grows like 1/t"
        return f"the cost of clean tokens {how}"

    @property
    def _may_diverge(self) -> bool:
        return self.low == 0 and not self.process.jumps_at_zero and self.clean_tokens_cost

    @property
    def _cost_per_log_sigma(self) -> list[float]:
        """The largest cost of a clean sequence per token and e-fold of sigma, at each of `_PROBES` until it is
        negligible. Groups of sequences with a negligible cost at one probe are not evaluated at the next."""
        # Not a cached_property: in Python 3.11 its lock, common to all instances, would be held during network calls.
        expensive = torch.arange(len(self.data) if not self._costs else 0)
        for sigma in _PROBES:
            if len(expensive) == 0:
                break
            costs = self._clean_costs(expensive, sigma)
            self._costs.append(float(costs.max()))
            is_expensive = ~(costs <= _NEGLIGIBLE).view(-1, self.group).all(1)
            expensive = expensive[is_expensive.repeat_interleave(self.group)]
        return self._costs

    @property
    def _levels_off(self) -> float | None:
        """The largest of `_PROBES` at which the cost of clean sequences is negligible."""
        costs = self._cost_per_log_sigma
        return _PROBES[len(costs) - 1] if costs[-1] <= _NEGLIGIBLE else None

    def _clean_costs(self, which: Tensor, sigma: float) -> Tensor:
        """The cost of clean sequences per token and e-fold of sigma: their cost times sigma over its rate, [n]."""
        early = self.process.noise(self.process.clocks.time(torch.full((len(which),), sigma, dtype=torch.float64)))
        costs: list[Tensor] = []
        for network, x0, noise, _ in self._batches(which, early):
            costs.append(position_costs(network, self.path, x0, x0, noise).mean(1).double().cpu())
            self.report(len(x0) // self.group)
        return torch.cat(costs) * early.sigma / (early.alpha_rate + early.beta_rate)

    def _batches(self, which: Tensor, noise: Noise) -> Iterator[Batch]:
        """The sequences `which` with their noise, in batches."""
        for part in parts_of(len(which), self.batch * self.group):
            chosen = which[part]
            x0 = self.data[chosen].to(self.device)
            yield Batch(self.network.of_sequences(chosen), x0, noise.rows(part).to(self.device), part)

    def _order(self, count: int, draws: int) -> Tensor:
        """The indices of [n, D], flattened, in the order of evaluation: one draw of all sequences of a group, then the
        next draw."""
        return torch.arange(count * draws).reshape(-1, self.group, draws).transpose(1, 2).reshape(-1)

    def whole_groups(self, count: int) -> int:
        """`count` sequences, rounded down to whole groups."""
        return max(1, count // self.group) * self.group

    def _on_device(self, part: Tensor, *fields: Tensor) -> list[Tensor]:
        return [field[part].to(self.device) for field in fields]

    def _uniforms(self, x0: Tensor, generator: torch.Generator) -> Tensor:
        count, size = len(x0), number_of_uniforms(x0.shape[1])
        if not self.nested:
            return uniform_noise((count, size), self.device, generator)
        numbers = uniform_noise((size, count), self.device, generator).T  # longer texts have the same numbers first
        by_position = numbers[:, EXTRA_UNIFORMS:].reshape(count, -1, 2)
        return torch.cat([by_position[..., 0], by_position[..., 1], numbers[:, :EXTRA_UNIFORMS]], 1)


def child_generators(count: int, generator: torch.Generator | None) -> list[torch.Generator]:
    """Generators on the CPU, seeded from `generator` (or torch's own), one per purpose. Drawing from one of them does
    not change the numbers of another, so two models have the same times and noise."""
    device = generator.device if generator is not None else torch.device("cpu")
    seeds = torch.randint(2**62, (count,), generator=generator, device=device)
    return [torch.Generator().manual_seed(int(seed)) for seed in seeds]


# ----------------------------------------------------------------------------------------------------------------
# From draws to values


@dataclass(frozen=True)
class SequenceValues:
    """One value per sequence [N], without `terminal`, and the Monte Carlo variance of their mean.

    shared: the part of this variance that all values have in common, which their scatter does not include.
    curve: the part of the scatter that comes from a common curve in time and does not affect the mean.
    heavy_tailed: whether the variance of the draws diverges.
    """

    per_sequence: Tensor
    variance: float
    freedom: int
    shared: float = 0.0
    curve: float = 0.0
    heavy_tailed: bool = False


class StratifiedDraws:
    """Rounds of two halves each; the control variates of one half are fitted on the other."""

    def __init__(self, evaluation: Evaluation) -> None:
        self.evaluation = evaluation
        self.values: tuple[list[Tensor], list[Tensor]] = ([], [])  # a round: [T, N, D/2]
        self.variates: tuple[list[Tensor], list[Tensor]] = ([], [])  # a round: [N, D/2, Z]
        self.reconstructions: tuple[list[Tensor], list[Tensor]] = ([], [])  # a round: [T, N]
        self.levels: tuple[list[Tensor], list[Tensor]] = ([], [])  # v of a round: [N, D/2]
        self.sightings = torch.zeros(2, 3, dtype=torch.int64)  # draws of each half in which each case occurs

    def add(self, draws: int, generator: torch.Generator | None) -> None:
        """Add a round of `draws` per sequence, rounded up to an even number."""
        count, length = self.evaluation.data.shape
        each = (draws + 1) // 2
        size = self.evaluation.whole_groups(_BLOCK // (each * length))
        blocks = [self._block(each, which, generator) for which in parts_of(count, size)]
        for half in range(2):
            values, columns, ends, v = zip(*(b[half] for b in blocks), strict=True)
            self.levels[half].append(torch.cat(v))
            self.values[half].append(torch.cat(values, 1))
            self.variates[half].append(torch.cat(columns))
            self.reconstructions[half].append(torch.cat(ends, 1))

    def _block(
        self, draws: int, which: Tensor, generator: torch.Generator | None
    ) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Values, variates, reconstructions and levels of both halves for some of the sequences."""
        first, second, first_end, second_end = child_generators(4, generator)
        here = self.evaluation
        halves = [here.half(draws, which, g) for g in (first, second)]
        ends = [
            torch.stack([here.reconstruction(target, draws, which, g).mean(1) for target in here.targets])
            for g in (first_end, second_end)
        ]
        self.sightings += torch.stack([half.sightings for half in halves])
        learnt = [expectations(half) for half in halves]
        return [(halves[h].values, variates(halves[h], learnt[1 - h]), ends[h], halves[h].v) for h in range(2)]

    def why_infinite(self, target: int) -> str | None:
        """The sequence of the last round with an infinite cost and its cause, in words; None if all are finite."""
        values, ends = ([half[-1][target] for half in both] for both in (self.values, self.reconstructions))
        return _why_infinite(values, ends, self.evaluation.group)

    def settle(self, target: int) -> SequenceValues:
        """The values of all draws so far. Costs are never negative, so control variates are left out if they make the
        mean negative."""
        settled = self._settle(target, controlled=True)
        return settled if float(settled.per_sequence.mean()) >= 0 else self._settle(target, controlled=False)

    def _settle(self, target: int, controlled: bool) -> SequenceValues:
        """Subtract the control variates and estimate the variance from the difference between the halves."""
        fits = [self._fit(half, target, controlled) for half in range(2)]
        residuals = [self._residuals(half, target, fits[1 - half]) for half in range(2)]
        values = torch.stack([torch.stack([r.mean(1) for r in parts]) for parts in residuals])  # [2, rounds, N]
        ends = torch.stack([torch.stack([of_round[target] for of_round in parts]) for parts in self.reconstructions])
        means = values + ends
        count, total, curve = means[0].numel(), sum(part.numel() for part in residuals[0]), 0.0
        if count >= _FEW_DIFFERENCES and residuals[0][0].numel() > _NEIGHBOURS:
            excess = [
                [_beyond_neighbours(r, v).mean(1) for r, v in zip(*of_half, strict=True)]
                for of_half in zip(residuals, self.levels, strict=True)
            ]
            noise = torch.stack([torch.stack(parts) for parts in excess])
            variance, freedom = _half_variance(noise) + _half_variance(ends), count
            curve, of_values = max(0.0, _half_variance(means) - variance), variance
        else:
            first, second = (self._differences(target, fit) for fit in fits)
            variance, freedom = _stratum_variance(first, second, total)
            squares = [float((a - b).square().sum()) for a, b in zip(*residuals, strict=True)]
            variance, of_values = (x + _half_variance(ends) for x in (variance, sum(squares) / (2 * total) ** 2))
        # The noise of the coefficients is common to all sequences: Z coefficients from M values add Z/M.
        shared = of_values * max(int((fit != 0).sum()) for fit in fits) / total
        return SequenceValues(means.mean((0, 1)), variance + shared, freedom, shared, curve)

    def _fit(self, half: int, target: int, controlled: bool) -> Tensor:
        """The coefficients [Z] that are fitted on a half."""
        values = torch.cat([v[target] for v in self.values[half]], 1)
        columns = torch.cat(self.variates[half], 1)
        if not controlled:
            return torch.zeros(columns.shape[-1], dtype=torch.float64)
        if len(values) < _FEW_DIFFERENCES:  # differences between a few sequences would add noise to the coefficients
            values, columns = values - values.mean(1, keepdim=True), columns - columns.mean(1, keepdim=True)
        return coefficients(values.reshape(-1), columns.flatten(0, 1), often_seen(self.sightings[half]))

    def _residuals(self, half: int, target: int, fit: Tensor) -> list[Tensor]:
        """The values of a half minus their variates, [N, D/2] per round."""
        return [v[target] - z @ fit for v, z in zip(self.values[half], self.variates[half], strict=True)]

    def _differences(self, target: int, fit: Tensor) -> Tensor:
        """d_k of the module's head, with these coefficients in both halves: [rounds, D/2]."""
        first, second = (self._residuals(half, target, fit) for half in range(2))
        return torch.stack([(a - b).sum(0) for a, b in zip(first, second, strict=True)])


def _why_infinite(values: Sequence[Tensor], ends: Sequence[Tensor], group: int) -> str | None:
    """The cause of an infinite cost in words, from costs along the path and at its end, each [N, ...]."""
    for costs, why in ((values, "a draw of sequence {} costs"), (ends, "the path's last step to sequence {} costs")):
        for part in costs:
            if len(found := torch.isinf(part).nonzero()):
                return f"{why.format(int(found[0, 0]) // group)} infinitely much"
    return None


def _half_variance(means: Tensor) -> float:
    """The variance of the mean over both halves, from the differences of a sequence's two values [2, rounds, N]."""
    return float((means[0] - means[1]).square().sum()) / 4 / means[0].numel() ** 2


def _beyond_neighbours(values: Tensor, levels: Tensor) -> Tensor:
    """Values [N, D] (more than four) minus the mean at the four nearest levels, scaled to the variance of their
    noise."""
    order = levels.reshape(-1).argsort()
    sorted_values = values.reshape(-1)[order]
    first = (torch.arange(len(order)) - _NEIGHBOURS // 2).clamp(0, len(order) - 1 - _NEIGHBOURS)
    window = first[:, None] + torch.arange(_NEIGHBOURS + 1)
    around = (sorted_values[window].sum(1) - sorted_values) / _NEIGHBOURS
    result = torch.empty_like(sorted_values)
    result[order] = (sorted_values - around) / math.sqrt(1 + 1 / _NEIGHBOURS)
    return result.reshape(values.shape)


def _stratum_variance(d: Tensor, other: Tensor, values: int) -> tuple[float, int]:
    """The variance of the mean of both halves, each of this number of values, from d_k and d'_k of the module's head,
    and its degrees of freedom (Satterthwaite: strata that scatter little count for little)."""
    squares = d.square() + other.square() - d * other
    total, fourth = float(squares.sum()), float(squares.square().sum())
    return total / (2 * values) ** 2, max(1, round(total**2 / fourth)) if fourth > 0 else squares.numel()


class IndependentDraws:
    """Independent uniform times and plain noise.

    Times are met with density 1; at a small t a token is touched with a probability of the order of t, and counts for
    1/t then: the chance of a value above x falls like 1/x^2, and the variance diverges like a logarithm.
    """

    def __init__(self, evaluation: Evaluation) -> None:
        self.evaluation = evaluation
        (self.target,) = evaluation.targets
        self.values: list[Tensor] = []  # a round: [N, D]
        self.reconstructions: list[Tensor] = []  # a round: [N, some]

    def add(self, draws: int, generator: torch.Generator | None) -> None:
        """Add a round of `draws` per sequence."""
        here, low = self.evaluation, self.target.low
        path, end = child_generators(2, generator)
        every = torch.arange(len(here.data))
        t = low + (1 - low) * torch.rand(len(every), draws, generator=path, dtype=torch.float64)
        values = here.plain(every, t, here.path, path)
        self.values.append(self.target.scale * (1 - low) * values)
        self.reconstructions.append(here.reconstruction(self.target, draws, every, end))

    def why_infinite(self, target: int) -> str | None:
        """As in `StratifiedDraws`."""
        del target  # there is one
        return _why_infinite(self.values[-1:], self.reconstructions[-1:], self.evaluation.group)

    def settle(self, target: int) -> SequenceValues:
        """Plain means, with the variance of the draws within each sequence."""
        del target
        values, ends = torch.cat(self.values, 1), torch.cat(self.reconstructions, 1)
        per_sequence = values.mean(1) + ends.mean(1)
        variances = [
            float(part.var(1).mean()) / part.numel() if part.shape[1] > 1 else math.nan
            for part in (values, *([] if self.target.reconstruction is None else [ends]))
        ]
        return SequenceValues(per_sequence, sum(variances), len(values) * (values.shape[1] - 1), heavy_tailed=True)
