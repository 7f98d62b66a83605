"""The times at which a bound is measured: a change of variable that covers (0, 1] without truncation.

There are two changes of variable, which depend on the two clocks only:

1. For a good network, the path integrand is of the order of the rate at which tokens change for the first time,
   keep (alpha' + beta') with keep = exp(-alpha-beta). In a variable that grows at this rate, the integrand is bounded,
   except for a logarithm at t = 0. Other networks have larger costs elsewhere, so v is a mixture:

       A   even in keep         good networks
       B   even in sigma        sigma = alpha + beta: costs of alpha' + beta' where keep is small. B is larger if the
                                ratios do not have a factor keep for every network.
       C   even in t            the same
       D   even in log(sigma)   above e = 1e-4: clean tokens with costs of up to 1/sigma
       E   even in jumps j      networks that output ratios: tokens that cost as much at every shuffle until they are
                                masked, and masks at the rate of masking. j' = beta' (1-a) + alpha' a is the rate of
                                jumps if all ratios are equal.
       F   even in log(sigma)   above f = 1e-9, or less if clean sequences have costs there (`Evaluation.times`): ratios
                                of probabilities that are close to zero

   The costs of D and F are a tail that few draws reach, and the other draws give no sign of it. If the path ends
   before t = 0, e = f = sigma(low). With s = sigma(t) - sigma(low) and s1 = sigma(1) - sigma(low),

       v(t) = A (keep(low) - keep(t)) / (keep(low) - keep(1)) + B s / s1 + C (t - low) / (1 - low)
              + D log(1 + s / e) / log(1 + s1 / e) + E (j(t) - j(low)) / (j(1) - j(low))
              + F log(1 + s / f) / log(1 + s1 / f)

   where j' / sigma' is taken to be constant on each of 512 equal parts of sigma, so that j is exact.

2. About L v positions have changed at v, so the cost of a sequence varies like 1/sqrt(v) around its mean, down to the v
   at which the proposal (bounds/proposal.py) forces one position to change. More draws go where this variation is
   large: v has a density rho(v) proportional to 1 + 1/sqrt(v + 1/(8 L)), piecewise constant, so that its inverse is
   exact. The coordinate of the draws is the level u in [0, 1], which is stratified:

       int f(t) dt = int f(t(v(u))) dt/dv / rho(v) du
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from cedd.process import Noise, TokenProcess
from cedd.quadrature import bisect


class Shares(NamedTuple):
    """A, B, C, D, E and F of the module's head, which sum to one."""

    keep: float
    sigma: float
    time: float
    log: float
    jumps: float = 0.0
    deep: float = 0.0


CLEAN_IS_FREE = Shares(0.7, 0.15, 0.15, 0.0)
NOISE_COSTS = Shares(0.5, 0.35, 0.15, 0.0)
CLEAN_COSTS = Shares(0.35, 0.2, 0.1, 0.2, deep=0.15)
JUMPS_COST = Shares(0.3, 0.1, 0.1, 0.15, 0.35)
_EVEN_BELOW = 1e-4
_JUST_AFTER_ZERO = torch.finfo(torch.float64).tiny
_SMALLEST = 1e-9  # in v: what lies below counts for less than that
_HALVINGS = 48
_STEPS = 2**_HALVINGS
_POWER = 16
_SECANTS = 6
_PANELS = 512


@dataclass(frozen=True)
class DrawnTimes:
    """Times with their weights, all of one shape: noise, v, dv/du, and dt/du (what the integrand is multiplied by)."""

    noise: Noise
    v: Tensor
    dv: Tensor
    dt: Tensor


@dataclass(frozen=True)
class PathTimes:
    """Levels u in [0, 1] <-> times t in (low, 1], for sequences of a given length.

    shares: CLEAN_COSTS where tokens that noise has not touched cost something, JUMPS_COST where they may do so
        at every jump; NOISE_COSTS where masks may cost as much in pure noise as anywhere.
    deep: f of the module's head, where the path does not stop short of 0.
    """

    process: TokenProcess
    length: int
    low: float = 0.0
    shares: Shares = CLEAN_IS_FREE
    deep: float = 1e-9

    def at(self, u: Tensor) -> DrawnTimes:
        """The times of the levels u, which are uniform in [0, 1]."""
        edges, density, cumulative = self._density
        panel = (torch.searchsorted(cumulative, u, right=True) - 1).clamp(0, len(density) - 1)
        v = edges[panel] + (u - cumulative[panel]) / density[panel]
        noise = self.process.noise(self.time(v))
        dv = 1 / density[panel]
        return DrawnTimes(noise, v, dv, dv * self.time_per_v(noise))

    @cached_property
    def _density(self) -> tuple[Tensor, Tensor, Tensor]:
        """Edges [K+1] of panels in v, the density rho on each [K], and its integral up to each edge [K+1]."""
        edges = (torch.arange(_PANELS + 1, dtype=torch.float64) / _PANELS) ** 2
        middle, width = (edges[1:] + edges[:-1]) / 2, edges[1:] - edges[:-1]
        density = 1 + (middle + 1 / (8 * self.length)).rsqrt()
        density = density / (density * width).sum()
        return edges, density, torch.cat([torch.zeros(1, dtype=torch.float64), torch.cumsum(density * width, 0)])

    @cached_property
    def _sigma_at_ends(self) -> tuple[float, float]:
        sigma = self.process.sigma(torch.tensor([max(self.low, _JUST_AFTER_ZERO), 1.0], dtype=torch.float64))
        return float(sigma[0]), float(sigma[1])

    @cached_property
    def _logarithms(self) -> tuple[tuple[float, float], ...]:
        """D and F of the module's head, each over its log(1 + s1 / e), and e and f."""
        start, end = self._sigma_at_ends
        parts = ((self.shares.log, _EVEN_BELOW), (self.shares.deep, self.deep))
        ends = [(share, start if self.low > 0 else max(even, start)) for share, even in parts if share > 0]
        return tuple((share / math.log1p((end - start) / even), even) for share, even in ends)

    def v(self, t: Tensor) -> Tensor:
        """v(t) of the module's head."""
        start, end = self._sigma_at_ends
        since = self.process.sigma(t) - start
        touched = torch.expm1(-since) / math.expm1(start - end)  # of keep, without the cancellation at small t
        by_time = (t - self.low) / (1 - self.low)
        share = self.shares
        v = share.keep * touched + share.sigma * since / (end - start) + share.time * by_time
        for scale, even in self._logarithms:
            v = v + scale * torch.log1p(since / even)
        if share.jumps > 0:
            width, slope, jumps = self._jumps
            part = self._part(since)
            v = v + share.jumps * (jumps[part] + slope[part] * (since - width * part)).clamp(0.0, 1.0)
        return v

    @cached_property
    def _jumps(self) -> tuple[float, Tensor, Tensor]:
        """Equal parts of sigma: their width, dj/dsigma in each [K] and j at its start [K]; j ends at 1."""
        start, end = self._sigma_at_ends
        width = (end - start) / _PANELS
        middle = start + width * (torch.arange(_PANELS, dtype=torch.float64) + 0.5)
        noise = self.process.noise(self.process.clocks.time(middle))
        slope = (noise.beta_rate * (1 - noise.a) + noise.alpha_rate * noise.a) / (noise.alpha_rate + noise.beta_rate)
        slope = slope / (width * slope.sum())
        return width, slope, width * (torch.cumsum(slope, 0) - slope)

    def _part(self, since: Tensor) -> Tensor:
        """The index of the part that contains sigma(low) + since."""
        return (since / self._jumps[0]).long().clamp(0, _PANELS - 1)

    def time(self, v: Tensor) -> Tensor:
        """t(v): the first of 2^_HALVINGS steps at which v is reached. The secant method comes within one step in a few
        calls. Where it fails, at kinks and jumps of the clocks, bisection is used."""
        goal = v.clamp(_SMALLEST, 1.0)
        steps = (self._by_secants(goal) * _STEPS).floor()[..., None] + torch.arange(-1, 3, dtype=torch.float64)
        times = self.after(steps.clamp(1, _STEPS) / _STEPS)
        missing = (self.v(times) < goal[..., None]).cumprod(-1).sum(-1, keepdim=True)
        t = times.gather(-1, missing.clamp_max(3)).squeeze(-1)
        missed = ((missing == 0) | (missing == 4)).squeeze(-1)
        if bool(missed.any()):
            share = bisect(lambda share: self.v(self.after(share)), goal[missed], 0.0, 1.0, _HALVINGS)
            t[missed] = self.after(share)
        return t

    def after(self, share: Tensor) -> Tensor:
        """The time at this share of the way from low to 1, in a coordinate that resolves times close to low: all of the
        noise may be added within the first 1e-40."""
        return self.low + (1 - self.low) * share**_POWER

    @cached_property
    def _table(self) -> tuple[Tensor, Tensor]:
        """Shares of the way from low to 1, denser at both ends, and v there, from 0 to 1."""
        shares = torch.sin(torch.linspace(0, math.pi / 2, _PANELS + 1, dtype=torch.float64)) ** 2
        inside = self.v(self.after(shares[1:-1]))
        return shares, torch.cat([torch.zeros_like(inside[:1]), inside, torch.ones_like(inside[:1])])

    def _by_secants(self, goal: Tensor) -> Tensor:
        """The approximate share of the way at which v is reached, between two entries of the table."""
        shares, values = self._table
        place = torch.searchsorted(values[1:-1], goal)
        low, high = shares[place], shares[place + 1]
        before, at_before, now, at_now = low, values[place], high, values[place + 1]
        for _ in range(_SECANTS):
            step = (goal - at_now) * (now - before) / (at_now - at_before)
            before, at_before = now, at_now
            now = torch.where(step.isfinite(), now + step, now).maximum(low).minimum(high)
            at_now = self.v(self.after(now))
        return now

    def time_per_v(self, noise: Noise) -> Tensor:
        """dt/dv at the noise's times."""
        start, end = self._sigma_at_ends
        rate = noise.alpha_rate + noise.beta_rate
        touching = torch.exp(start - noise.sigma) * rate / -math.expm1(start - end)
        by_sigma, by_time = rate / (end - start), 1 / (1 - self.low)
        share = self.shares
        total = share.keep * touching + share.sigma * by_sigma + share.time * by_time
        for scale, even in self._logarithms:
            total = total + scale * rate / (noise.sigma - start + even)
        if share.jumps > 0:
            total = total + share.jumps * rate * self._jumps[1][self._part(noise.sigma - start)]
        return 1 / total


def stratified_levels(sequences: int, draws: int, generator: torch.Generator) -> Tensor:
    """u [N, D]: each sequence has one level in each of D equal strata, and all sequences together have one in each of
    N*D. Each entry is uniform in its stratum, whatever the others of its sequence are."""
    order = torch.stack([torch.randperm(sequences, generator=generator) for _ in range(draws)], 1)
    jitter = torch.rand(sequences, draws, generator=generator, dtype=torch.float64)
    return (torch.arange(draws) + (order + jitter) / sequences) / draws
