"""Bounds and likelihoods by enumeration, for spaces small enough to list every sequence.

Shapes: V vocabulary, n states (V+1 with a mask), L positions; N = n^L noisy and M = V^L clean sequences, both in the
order of itertools.product (so that a vector over M reshapes to [V] * L); K times.

    tight   E int lbar - int E[out-rate] + H(p_1, p_r) - H(p_{t0|0}) + E[-log p(x_0 | x_{t0})]
    j1      E int l                                    the paper's, without KL(p_{1|0} || p_r)
    j2      E int lbar - int E[out-rate] + H(p_r)      the paper's, with p_r all mask (or uniform)

each divided by L. The last two terms of `tight` are for paths that end at t0 > 0, or at 0+ if the schedule has sigma(0)
> 0 (data are clean at t = 0 and have sigma(0) of noise right after it); otherwise they are zero. The paper's two bounds
are cut at t = 1e-4. The path of discrete flow matching also ends before t = 0.

In block diffusion each of these is the sum over blocks and over the texts before them, weighted by their probabilities.

The learned reverse process has the rates Q_t(x_t, y) s_y. Its law at t = 0 is found by fourth-order Magnus steps in
log(exp(sigma) - 1), the variable in which rates of order 1/t are of order one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from cedd.block_layout import GivenPast
from cedd.bounds.estimate import check_code_length
from cedd.dynamics import Bound
from cedd.dynamics.path import PathCost
from cedd.dynamics.reverse import JUST_AFTER_ZERO
from cedd.methods import Method, get_method, model_first
from cedd.network import AnyModel, Network
from cedd.objectives.objective import Rows
from cedd.process import Noise, TokenProcess
from cedd.quadrature import bisect, integrate

_MAX_STATES = 1024  # the reverse process needs matrices of this size
_CHUNK = 1 << 21  # numbers held at once
_SMALLEST_SIGMA = 1e-12  # where the reverse process is stopped, if its noise goes on to zero
_SCALES = (1.0, 40.0)  # sigmas between which tokens lose nearly all, and beyond which they lose nothing
_PROBES = (1e-34, 1e-37)  # sigmas at which a cost that still grows like 1/sigma is taken to do so down to 0


# ----------------------------------------------------------------------------------------------------------------
# Time


@dataclass(frozen=True)
class Axis:
    """(stop, 1] in the process's own coordinate of time, split where the network's ratios are not smooth in it."""

    process: TokenProcess
    stop: float = 0.0
    kinks: tuple[float, ...] = ()

    @cached_property
    def edges(self) -> tuple[float, ...]:
        """Ends and kinks in that coordinate, in increasing order."""
        return self._with_ends(self.kinks)

    def _with_ends(self, sigmas: tuple[float, ...]) -> tuple[float, ...]:
        """The ends in that coordinate, and the points between them at which alpha + beta has these values."""
        start, end = float(self.process.axis.sigma(self.stop)), self.process.axis.end
        return (start, *sorted(k for k in map(float, self.coordinate(sigmas)) if start < k < end), end)

    def coordinate(self, sigmas: tuple[float, ...]) -> Tensor:
        """The times at which alpha + beta has these values, [K]."""
        axis, totals = self.process.axis, torch.tensor(sigmas, dtype=torch.float64)
        return bisect(lambda own: self.process.sigma(axis.inverse(own)), totals, axis.start, axis.end)

    def time(self, sigma: Tensor) -> tuple[Tensor, Tensor]:
        """t and dt/dsigma where the coordinate is sigma (just after 0 where it starts there)."""
        t = self.process.axis.inverse(sigma).clamp_min(JUST_AFTER_ZERO)
        return t, 1 / self.process.axis.rate(t)

    def integrate(self, f: Callable[[Tensor], Tensor], tolerance: float) -> float:
        """The integral over (stop, 1] of f(t [K]) -> [K]; infinity where f is, or grows like 1/t at 0.

        sigma = start + (end - start) u^4, so that the logarithms at t = 0 are harmless. It is split at the noise at
        which tokens lose their information, which may be a small part of the range: a roulette with p_m = 1e-9 masks
        1e9 times later.
        """
        start, span = self.edges[0], self.edges[-1] - self.edges[0]

        def over_u(u: Tensor) -> Tensor:
            t, slope = self.time(start + span * u.reshape(-1) ** 4)
            return (f(t) * slope).reshape(u.shape) * 4 * span * u**3

        if start == 0.0 and not self._vanishes(f):
            return math.inf
        scale = float(over_u(torch.linspace(0.05, 1, 20, dtype=torch.float64)).abs().mean())
        if scale == math.inf:
            return math.inf
        cuts = [((edge - start) / span) ** 0.25 for edge in self._with_ends((*self.kinks, *_SCALES))]
        return sum(integrate(over_u, low, high, tolerance * max(1.0, scale)) for low, high in itertools.pairwise(cuts))

    def _vanishes(self, f: Callable[[Tensor], Tensor]) -> bool:
        """Whether sigma f -> 0 as sigma -> 0, as for a logarithm or a root, but not for 1/sigma."""
        sigma = self.coordinate(_PROBES)
        t, slope = self.time(sigma)
        left = (f(t) * slope * sigma).abs()
        return bool((left[1] < 1e-9) | (left[1] < 0.9 * left[0]))


# ----------------------------------------------------------------------------------------------------------------
# The space


@dataclass(frozen=True)
class Space:
    """Every sequence of a process on L positions."""

    process: TokenProcess
    length: int

    def __post_init__(self) -> None:
        count = self.process.num_states**self.length
        if self.length < 1 or count > _MAX_STATES:
            raise ValueError(
                f"{self.process.num_states}^{self.length} = {count} noisy sequences cannot be enumerated (at most "
                f"{_MAX_STATES}, L at least 1); use estimate_bound for larger spaces"
            )

    @cached_property
    def states(self) -> Tensor:
        """The noisy sequences [N, L]."""
        return _sequences(self.process.num_states, self.length)

    @cached_property
    def clean(self) -> Tensor:
        """The clean sequences [M, L]."""
        return _sequences(self.process.vocab_size, self.length)

    @cached_property
    def _places(self) -> Tensor:
        """The stride of each position in the index of a sequence: [L]."""
        return self.process.num_states ** torch.arange(self.length - 1, -1, -1)

    def index(self, x: Tensor) -> Tensor:
        """The indices in `states` of noisy sequences [..., L]."""
        return (x * self._places).sum(-1)

    @cached_property
    def changed(self) -> Tensor:
        """The index in `states` of each sequence with state y at position i: [N, L, n]."""
        change = torch.arange(self.process.num_states) - self.states[..., None]
        return self.index(self.states)[:, None, None] + change * self._places[:, None]

    @property
    def neighbours(self) -> Tensor:
        """The same for tokens y alone: [N, L, V]."""
        return self.changed[..., : self.process.vocab_size]

    @cached_property
    def one_hot(self) -> Tensor:
        """The clean sequences as indicators [M, L, V], float64."""
        return torch.nn.functional.one_hot(self.clean, self.process.vocab_size).double()

    def in_chunks(self, f: Callable[[Tensor], Tensor], t: Tensor) -> Tensor:
        """f(t) for t [K], in pieces that fit in memory."""
        V = self.process.vocab_size
        numbers_per_time = len(self.states) * max(self.length * V * V, len(self.clean))
        return torch.cat([f(part) for part in _chunks(t, _CHUNK // numbers_per_time)])

    def likelihood(self, t: Tensor) -> Tensor:
        """p_t(x | x0) for all pairs: [K, N, M]."""
        matrix = self.process.kernel(t).dense()
        factors = [matrix[:, self.states[:, i]][:, :, self.clean[:, i]] for i in range(self.length)]
        return torch.stack(factors).prod(0)

    def marginal(self, p0: Tensor, t: Tensor) -> Tensor:
        """p_t(x) for p0 [M]: [K, N]."""
        return self.likelihood(t) @ p0

    def belief(self, p0: Tensor, t: Tensor) -> Tensor:
        """p(x_t = x, x_0^i = h): [K, N, L, V]."""
        return torch.einsum("knm,mlv->knlv", self.likelihood(t) * p0, self.one_hot)


def _sequences(states: int, length: int) -> Tensor:
    return torch.cartesian_prod(*[torch.arange(states)] * length).reshape(-1, length)


def _chunks(values: Tensor, size: int) -> Iterator[Tensor]:
    """Pieces of at most `size` (at least one) along the first axis."""
    step = max(1, size)
    return (values[start : start + step] for start in range(0, len(values), step))


def space_of(process: TokenProcess, p0: Tensor) -> Space:
    """The space on which p0, of shape [V] * L, is a distribution."""
    if p0.dim() < 1 or any(size != process.vocab_size for size in p0.shape):
        raise ValueError(
            f"p0 must have the shape [V] * L, here {process.vocab_size} in each of its L dimensions; "
            f"got {tuple(p0.shape)}"
        )
    if not bool((p0 >= 0).all()) or abs(float(p0.double().sum()) - 1) > 1e-6:
        raise ValueError("p0 must be a distribution: no negative entries, and a sum of one")
    return Space(process, p0.dim())


# ----------------------------------------------------------------------------------------------------------------
# The network on the space


@dataclass(frozen=True)
class Enumerated:
    """A network and the meaning of its outputs, evaluated at every state of a space."""

    space: Space
    method: Method
    network: Network
    stop: float
    """The earliest time."""

    @property
    def process(self) -> TokenProcess:
        return self.space.process

    @cached_property
    def axis(self) -> Axis:
        return Axis(self.process, self.stop, self.method.parameterization.kinks(self.process))

    @cached_property
    def smallest(self) -> float:
        """The axis's coordinate at which the reverse process is stopped, if its noise goes on to zero."""
        return float(self.axis.coordinate((_SMALLEST_SIGMA,)))

    @property
    def tolerance(self) -> float:
        """What quadrature and steps can ask for: the rounding of sigma shows in the outputs."""
        return 1e-9 if self.network.sigma_dtype == torch.float64 else 1e-6

    def at(self, t: Tensor) -> tuple[Tensor, Tensor, Noise]:
        """outputs [K, N, L, V] float64, x_t [K, N, L] and a noise of that shape, at times t [K]."""
        times, (count, length) = len(t), self.space.states.shape
        noise = self.process.noise(t)
        x = self.space.states.repeat(times, 1).to(self.network.device)
        with torch.no_grad():
            outputs = self.network.outputs(x, noise.sigma.repeat_interleave(count).to(x.device))
        x_t = self.space.states.expand(times, count, length)
        return outputs.cpu().reshape(*x_t.shape, -1), x_t, noise.like(x_t)

    def reconstructions(self) -> Tensor:
        """p(x_0^i | x_t) at every state of the path's end, [N, L, V]."""
        t = self.axis.time(torch.tensor([max(self.axis.edges[0], self.smallest)], dtype=torch.float64))[0]
        meaning = self.method.require_scores()
        law = meaning.log_reconstruction if self.stop > 0 else meaning.log_posterior
        return law(*self.at(t)).exp()[0]

    def losses(self, path: PathCost, t: Tensor) -> Tensor:
        """What the path costs at every state for each clean token at the position: [K, N, L, V]."""
        outputs, x_t, noise = self.at(t)
        shape = outputs.shape
        x0 = torch.arange(shape[-1]).expand(shape)
        rows = Rows(x0, x_t[..., None].expand(shape), noise.map(lambda v: v[..., None].expand(shape)))
        return path.plain(outputs[..., None, :].expand(*shape, shape[-1]), rows)

    def reverse_rates(self, t: Tensor) -> Tensor:
        """The generator of the reverse process, [K, N, N]; columns are sources and sum to zero."""
        rates = self.method.dynamics.jump_rates(self.method.require_scores(), *self.at(t))
        times, count = rates.shape[:2]
        by_source = torch.zeros(times, count, count, dtype=torch.float64)
        by_source.scatter_add_(2, self.space.changed.flatten(1).expand(times, -1, -1), rates.flatten(2))
        by_source.diagonal(dim1=1, dim2=2).sub_(rates.sum((2, 3)))
        return by_source.mT


def enumerated(
    model: AnyModel,
    space: Space,
    method: Method,
    *,
    sigma_dtype: torch.dtype,
    device: torch.device | None = None,
    stop: float | None = None,
) -> Enumerated:
    """The model with the meaning of its outputs, for every state of a space, down to `stop` (by default the end of its
    path)."""
    network = Network.of(model, space.process.vocab_size, device or torch.device("cpu"))
    end = method.dynamics.end(method.parameterization, space.process) if stop is None else stop
    return Enumerated(space, method, replace(network, sigma_dtype=sigma_dtype, double=True), end)


# ----------------------------------------------------------------------------------------------------------------
# The bound


@model_first("cedd.exact_bound(model, process, p0, method=...)")
def exact_bound(
    model: AnyModel,
    process: TokenProcess,
    p0: Tensor,
    *,
    method: str | Method,
    bound: Bound = "tight",
    block: int | None = None,
    time_floor: float | None = None,
    sigma_dtype: torch.dtype = torch.float32,
) -> float:
    """A bound in nats per token, computed exactly by enumeration and quadrature.

    It is infinite if the network's ratios grow too fast at t = 0.

    Args:
        model: any callable `(x_t [B, L], sigma [B]) -> [B, L, V]`.
        process: the process, with (V+1)^L small enough to enumerate.
        p0: the distribution of the data, [V] * L, which sums to one.
        method: what the model's outputs mean.
        bound: "tight", "j1" or "j2".
        block: tokens per block, for block diffusion; by default that of the method. (V+1)^b must be small enough.
        time_floor: where `tight` stops and x_0 is drawn, and where j1 and j2 are cut; the default is that of
            `estimate_bound`.
        sigma_dtype: dtype of the time input. The default float32 limits the result to 7 digits; a network that accepts
            float64 gets 9.
    """
    chosen = get_method(method).in_blocks(block)
    chosen.check(process)
    chosen.check_bound(bound, time_floor)
    if chosen.blocks_of(p0.dim()) > 1:
        how = {"bound": bound, "time_floor": time_floor, "sigma_dtype": sigma_dtype}
        return _over_blocks(exact_bound, model, process, p0, chosen, **how)
    space = space_of(process, p0)
    if not chosen.dynamics.noisy:
        return exact_cross_entropy(model, process, p0, method=chosen)
    low = chosen.dynamics.earliest(chosen.parameterization, process, bound) if time_floor is None else time_floor
    network = enumerated(model, space, chosen, sigma_dtype=sigma_dtype, device=p0.device, stop=low)
    # With K the integrand is never negative. Without, it would be nearly the rate of jumps, of which there may be 1e20.
    value = integrated_bound(network, p0.double().cpu().reshape(-1), bound, with_entropy=True)
    if bound == "tight":
        check_code_length(value)
    return value


def integrated_bound(network: Enumerated, p0: Tensor, bound: Bound, *, with_entropy: bool) -> float:
    """The bound of data p0 [M] in nats per token, down to `network.stop`; its integrand is l = lbar + K, or lbar."""
    dynamics, meaning = network.method.dynamics, network.method.parameterization
    target = dynamics.target(meaning, network.process, bound, with_entropy=with_entropy, low=network.stop)
    path = target.scale * path_integral(network, p0, target.path) / network.space.length
    return path + target.terminal + (0.0 if target.reconstruction is None else _reconstruction(network, p0))


def _over_blocks(
    measured: Callable[..., float], model: AnyModel, process: TokenProcess, p0: Tensor, method: Method, **how: Any
) -> float:
    """A measure in nats per token, summed over blocks, each given every possible text before it."""
    block, vocab_size, total = method.block or p0.dim(), process.vocab_size, 0.0
    for known in range(0, p0.dim(), block):
        joint = p0.double().cpu().reshape(vocab_size**known, vocab_size**block, -1).sum(-1)
        pasts = _sequences(vocab_size, known) if known else torch.zeros(1, 0, dtype=torch.int64)
        for number, past in enumerate(pasts):
            if (chance := float(joint[number].sum())) > 0:
                law = (joint[number] / chance).reshape((vocab_size,) * block)
                after = _AfterText(model, block, past)
                total += chance * block * measured(after, process, law, method=method.of_one_block, **how)
    return total / p0.dim()


@dataclass(frozen=True)
class _AfterText:
    """The network of a block after one text [P]."""

    model: AnyModel
    block: int
    past: Tensor

    def __call__(self, x_t: Tensor, sigma: Tensor) -> Tensor:
        return GivenPast(self.model, self.block)(x_t, sigma, past=self.past.to(x_t).expand(len(x_t), -1))


def path_integral(network: Enumerated, p0: Tensor, path: PathCost) -> float:
    """E int of the path's cost dt, summed over positions; p0 [M]."""
    space = network.space

    def at(t: Tensor) -> Tensor:
        weight = space.belief(p0, t)
        return torch.where(weight > 0, weight * network.losses(path, t), 0.0).sum((1, 2, 3))

    return network.axis.integrate(lambda t: space.in_chunks(at, t), network.tolerance)


def _reconstruction(network: Enumerated, p0: Tensor) -> float:
    """E[-log p(x_0 | x_t)] per token at the end of the path."""
    t = torch.tensor([max(network.stop, JUST_AFTER_ZERO)], dtype=torch.float64)
    read, weight = network.reconstructions(), network.space.belief(p0, t)[0]
    return float(-torch.xlogy(weight, read).sum() / network.space.length)


# ----------------------------------------------------------------------------------------------------------------
# The learned reverse process


@model_first("cedd.exact_cross_entropy(model, process, p0, method=...)")
def exact_cross_entropy(
    model: AnyModel,
    process: TokenProcess,
    p0: Tensor,
    *,
    method: str | Method,
    block: int | None = None,
    sigma_dtype: torch.dtype = torch.float32,
) -> float:
    """H(p_0, p_0^theta) / L in nats per token, where p_0^theta is the distribution of the learned reverse process.

    It is never above the `tight` of `exact_bound`.

    Args:
        model: any callable `(x_t [B, L], sigma [B]) -> [B, L, V]`.
        process: the process, with (V+1)^L small enough to enumerate.
        p0: the distribution of the data, [V] * L, which sums to one.
        method: what the model's outputs mean.
        block: tokens per block, as for `exact_bound`.
        sigma_dtype: dtype of the time input.
    """
    chosen = get_method(method).in_blocks(block)
    if chosen.blocks_of(p0.dim()) > 1:
        return _over_blocks(exact_cross_entropy, model, process, p0, chosen, sigma_dtype=sigma_dtype)
    length = space_of(process, p0).length
    learned = learned_distribution(model, process, length, method=method, sigma_dtype=sigma_dtype, device=p0.device)
    return float(-torch.xlogy(p0.double().cpu(), learned).sum() / length)


def learned_distribution(
    model: AnyModel,
    process: TokenProcess,
    length: int,
    *,
    method: str | Method,
    sigma_dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> Tensor:
    """p_0^theta of the learned reverse process that starts in p_r at t = 1: [V] * L, float64. In block diffusion, block
    by block.

    Masks that remain at the end (as with a bounded score) are drawn from the posterior.
    """
    chosen = get_method(method)
    chosen.check(process)
    if chosen.blocks_of(length) > 1:
        return _written_in_blocks(model, process, length, chosen, sigma_dtype=sigma_dtype, device=device)
    space = Space(process, length)
    network = enumerated(model, space, chosen, sigma_dtype=sigma_dtype, device=device)
    if not chosen.dynamics.noisy:
        return _chain_rule(network)
    # The error of n steps is of order n^-4, then n^-6: two answers give a third, better one (Richardson).
    steps, coarse, answer = 24, _reverse(network, 12), torch.zeros(())
    while steps <= 6144:
        fine = _reverse(network, steps)
        previous, answer = answer, fine + (fine - coarse) / 15
        if bool(((answer - previous).abs() <= 10 * network.tolerance * (answer.abs() + 1e-9)).all()):
            return answer.clamp_min(0.0).reshape((process.vocab_size,) * length)
        steps, coarse = 2 * steps, fine
    raise _no_convergence(process)


def _written_in_blocks(model: AnyModel, process: TokenProcess, length: int, method: Method, **how: Any) -> Tensor:
    """The product of the laws of the blocks, each after every possible text before it."""
    block, vocab_size = method.block or length, process.vocab_size
    law = torch.ones(1, dtype=torch.float64)
    for known in range(0, length, block):
        pasts = _sequences(vocab_size, known) if known else torch.zeros(1, 0, dtype=torch.int64)
        after = (_AfterText(model, block, past) for past in pasts)
        parts = [learned_distribution(one, process, block, method=method.of_one_block, **how) for one in after]
        law = (law[:, None] * torch.stack([part.reshape(-1) for part in parts])).reshape(-1)
    return law.reshape((vocab_size,) * length)


def _no_convergence(process: TokenProcess) -> ValueError:
    return ValueError(
        "the learned reverse process did not converge: the network's outputs are too rough in time, or the process "
        f"jumps too often (sigma(1) = {float(process.sigma(1.0)):.3g})"
    )


def _chain_rule(network: Enumerated) -> Tensor:
    """prod_i p(x_i | x_<i) of a network without noise, for every clean sequence."""
    space, run = network.space, network.network
    with torch.no_grad():
        nats = network.method.dynamics.token_nats(run, space.process, space.clean.to(run.device)).cpu()
    return nats.sum(-1).neg().exp().reshape((space.process.vocab_size,) * space.length)


def _reverse(network: Enumerated, steps: int) -> Tensor:
    """The learned law at t = 0 over the clean sequences [M], with about `steps` Magnus steps."""
    space, process = network.space, network.process
    edges = [max(edge, network.smallest) for edge in network.axis.edges]
    marks = [edge + math.log(-math.expm1(-edge)) for edge in reversed(edges)]  # log(exp(sigma) - 1)
    law = process.prior()[space.states].prod(-1)
    for high, low in itertools.pairwise(marks):
        share = max(2, math.ceil(steps * (high - low) / (marks[0] - marks[-1])))
        law = _magnus(network, law, high, low, share)
    read = network.reconstructions()
    if network.stop == 0 and not process.jumps_at_zero:  # the path is at its end: only masks are still to be drawn
        tokens = torch.nn.functional.one_hot(space.states.clamp_max(process.vocab_size - 1), process.vocab_size)
        read = torch.where((space.states == process.vocab_size)[..., None], read, tokens.double())
    return law @ torch.stack([read[:, i][:, space.clean[:, i]] for i in range(space.length)]).prod(0)


def _magnus(network: Enumerated, law: Tensor, high: float, low: float, steps: int) -> Tensor:
    """Carry `law` from w = high down to low, w = log(exp(sigma) - 1), in equal steps of

    exp( h/2 (A1 + A2) + sqrt(3)/12 h^2 [A2, A1] ),    A1, A2 the generators at the two Gauss points of a step.
    """
    h = (high - low) / steps
    starts = high - h * torch.arange(steps, dtype=torch.float64)
    for part in _chunks(starts, _CHUNK // len(law) ** 2):
        first = _generator(network, part - h * (0.5 - math.sqrt(3) / 6))
        second = _generator(network, part - h * (0.5 + math.sqrt(3) / 6))
        exponent = h / 2 * (first + second) + math.sqrt(3) / 12 * h**2 * (second @ first - first @ second)
        for step in torch.matrix_exp(exponent):
            law = step @ law
    if not abs(float(law.sum()) - 1) <= 10 * network.tolerance:
        raise _no_convergence(network.process)
    return law


def _generator(network: Enumerated, w: Tensor) -> Tensor:
    """The reverse rates per unit of -w at w [K]: [K, N, N]."""
    sigma = torch.logaddexp(w, torch.zeros_like(w))
    t, slope = network.axis.time(sigma)
    return network.reverse_rates(t) * (slope * -torch.expm1(-sigma))[:, None, None]
