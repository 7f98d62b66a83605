"""Bounds and likelihoods by enumeration, for spaces small enough to list every sequence.

Shapes: V vocabulary, n states (V+1 with a mask), L positions; N = n^L noisy and M = V^L clean sequences, both in the
order of itertools.product (so that a vector over M reshapes to [V] * L); K times.

    tight   E int lbar - int E[out-rate] + H(p_1, p_r) - H(p_{0+|0}) + E[-log p(x_0 | x_{0+})]
    j1      E int l                                    the paper's, without KL(p_{1|0} || p_r)
    j2      E int lbar - int E[out-rate] + H(p_r)      the paper's, with p_r all mask (or uniform)

each divided by L. The last two terms of `tight` are the jump of a schedule with sigma(0) > 0: data are clean at t = 0
and have seen sigma(0) of noise right after it, so the path ends at x_{0+} and x_0 is read off by the posterior. They
are zero for every other schedule. Discrete flow matching has a path of its own, which stops short of t = 0.

The learned reverse process has the rates Q_t(x_t, y) s_y. Its law at t = 0 is found by fourth-order Magnus steps in
log(exp(sigma) - 1), the variable in which rates of order 1/t are of order one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from cedd.bounds.flow_matching import FLOW_LOW, FlowPath
from cedd.bounds.integrand import known_terms
from cedd.names import suggestion
from cedd.objectives import Method, Model, get_method
from cedd.objectives.autoregressive import start_symbol
from cedd.objectives.flow_matching import FlowMatching
from cedd.objectives.objective import Rows
from cedd.objectives.score_entropy import score_entropy
from cedd.objectives.times import shift_right
from cedd.parameterization import put_at_token
from cedd.process import Noise, TokenProcess
from cedd.quadrature import integrate

Bound = Literal["tight", "j1", "j2"]
BOUNDS: tuple[Bound, ...] = ("tight", "j1", "j2")

_MAX_STATES = 1024  # the reverse process needs matrices of this size
_CHUNK = 1 << 21  # numbers held at once
_SMALLEST_SIGMA = 1e-12  # where the reverse process is stopped, if its schedule goes on to zero
_JUST_AFTER_ZERO = torch.finfo(torch.float64).tiny


# ----------------------------------------------------------------------------------------------------------------
# Time


@dataclass(frozen=True)
class Axis:
    """(stop, 1] by the schedule's own sigma, cut where the network's ratios have a kink in it."""

    process: TokenProcess
    stop: float = 0.0

    @cached_property
    def edges(self) -> tuple[float, ...]:
        """Ends and kinks, in units of the schedule's sigma, in increasing order."""
        schedule = self.process.schedule
        start = float(schedule.sigma(self.stop))
        kinks: tuple[float, ...] = getattr(self.process.rescaling, "kinks", ())
        inner = [k for kink in kinks if start < (k := self._where_sigma_is(kink)) < schedule.end]
        return (start, *sorted(inner), schedule.end)

    def _where_sigma_is(self, total: float) -> float:
        """The schedule's sigma at which alpha + beta = total, by bisection."""
        low, high = self.process.schedule.start, self.process.schedule.end
        for _ in range(60):
            middle = (low + high) / 2
            t = self.process.schedule.inverse(middle)
            low, high = (middle, high) if float(self.process.sigma(t)) < total else (low, middle)
        return (low + high) / 2

    def time(self, sigma: Tensor) -> tuple[Tensor, Tensor]:
        """t and dt/dsigma where the schedule is at sigma (just after 0 where it starts there)."""
        t = self.process.schedule.inverse(sigma).clamp_min(_JUST_AFTER_ZERO)
        return t, 1 / self.process.schedule.rate(t)

    def integrate(self, f: Callable[[Tensor], Tensor], tolerance: float) -> float:
        """The integral over (stop, 1] of f(t [K]) -> [K]; infinity where f grows like 1/t at 0.

        sigma = start + (end - start) u^4, so that the logarithms at t = 0 are harmless.
        """
        start, span = self.edges[0], self.edges[-1] - self.edges[0]

        def over_u(u: Tensor) -> Tensor:
            t, slope = self.time(start + span * u.reshape(-1) ** 4)
            return (f(t) * slope).reshape(u.shape) * 4 * span * u**3

        if start == 0.0 and not self._vanishes(f):
            return math.inf
        scale = float(over_u(torch.linspace(0.05, 1, 20, dtype=torch.float64)).abs().mean())
        cuts = [((edge - start) / span) ** 0.25 for edge in self.edges]
        return sum(integrate(over_u, low, high, tolerance * max(1.0, scale)) for low, high in itertools.pairwise(cuts))

    def _vanishes(self, f: Callable[[Tensor], Tensor]) -> bool:
        """Whether sigma f -> 0 as sigma -> 0: a logarithm does, and so does a root; 1/sigma does not."""
        sigma = torch.tensor([1e-10, 1e-13], dtype=torch.float64)
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
    def neighbours(self) -> Tensor:
        """The place in `states` of each sequence with token y put at position i: [N, L, V]."""
        place = self.process.num_states ** torch.arange(self.length - 1, -1, -1)
        here = (self.states * place).sum(-1)
        change = torch.arange(self.process.vocab_size) - self.states[..., None]
        return here[:, None, None] + change * place[:, None]

    @cached_property
    def one_hot(self) -> Tensor:
        """The clean sequences as indicators [M, L, V], float64."""
        return torch.nn.functional.one_hot(self.clean, self.process.vocab_size).double()

    def in_chunks(self, f: Callable[[Tensor], Tensor], t: Tensor) -> Tensor:
        """f(t) for t [K], as many times at once as fit."""
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
class Network:
    """A model with its meaning, evaluated at every state of a space."""

    space: Space
    method: Method
    model: Model
    sigma_dtype: torch.dtype
    device: torch.device

    @property
    def process(self) -> TokenProcess:
        return self.space.process

    @property
    def stop(self) -> float:
        """The time at which the reverse process ends."""
        return 0.0

    @cached_property
    def axis(self) -> Axis:
        return Axis(self.process, self.stop)

    @property
    def tolerance(self) -> float:
        """What quadrature and steps can ask for: the rounding of sigma shows in the outputs."""
        return 1e-9 if self.sigma_dtype == torch.float64 else 1e-6

    def at(self, t: Tensor) -> tuple[Tensor, Tensor, Noise]:
        """outputs [K, N, L, V] float64, x_t [K, N, L] and a noise of that shape, at times t [K]."""
        times, (count, length) = len(t), self.space.states.shape
        noise = self.process.noise(t)
        x = self.space.states.repeat(times, 1).to(self.device)
        sigma = noise.sigma.repeat_interleave(count).to(device=self.device, dtype=self.sigma_dtype)
        with torch.no_grad():
            outputs = self.model(x, sigma)
        shape = (times * count, length, self.process.vocab_size)
        if tuple(outputs.shape) != shape:
            raise ValueError(
                f"the network must return [B, L, V] = {list(shape)}, without a mask column; got {list(outputs.shape)}"
            )
        x_t = self.space.states.expand(times, count, length)
        return outputs.detach().double().cpu().reshape(*x_t.shape, -1), x_t, noise.like(x_t)

    def log_ratios(self, t: Tensor) -> Tensor:
        """log s_y at every state, [K, N, L, V]; the entry at x_t itself has no meaning."""
        return self.method.require_scores().log_ratios(*self.at(t))

    def readings(self, t: Tensor) -> Tensor:
        """p(x_0^i | x_t) at every state, [K, N, L, V]."""
        return self.method.require_scores().log_posterior(*self.at(t)).exp()

    def losses(self, t: Tensor, with_entropy: bool) -> Tensor:
        """lbar, or l `with_entropy`, at every state for each clean token at the position: [K, N, L, V]."""
        log_ratios = self.log_ratios(t)
        x_t, x0, noise = self._for_each_token(t, log_ratios.shape)
        loss = score_entropy(log_ratios[..., None, :].expand(*x0.shape, x0.shape[-1]), x0, x_t, noise)
        return loss + known_terms(x_t, x0, noise).entropy if with_entropy else loss

    def _for_each_token(self, t: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor, Noise]:
        """x_t, x0 and the noise in the shape [K, N, L, V(x0)]."""
        x_t = self.space.states[..., None].expand(shape)
        return x_t, torch.arange(shape[-1]).expand(shape), self.process.noise(t).like(x_t)

    def jump_rates(self, t: Tensor) -> Tensor:
        """The rates of the reverse process from every state to each token at each position: [K, N, L, V]."""
        return self.method.require_scores().jump_rates(*self.at(t))

    def reverse_rates(self, t: Tensor) -> Tensor:
        """The generator of the reverse process, [K, N, N]; columns are sources and sum to zero."""
        rates = self.jump_rates(t)
        times, count = rates.shape[:2]
        by_source = torch.zeros(times, count, count, dtype=torch.float64)
        by_source.scatter_add_(2, self.space.neighbours.flatten(1).expand(times, -1, -1), rates.flatten(2))
        by_source.diagonal(dim1=1, dim2=2).sub_(rates.sum((2, 3)))
        return by_source.mT


@dataclass(frozen=True)
class FlowNetwork(Network):
    """Discrete flow matching: its velocity moves every position towards the prediction (bounds/flow_matching.py)."""

    @property
    def stop(self) -> float:
        return FLOW_LOW

    def losses(self, t: Tensor, with_entropy: bool) -> Tensor:
        outputs, _, _ = self.at(t)
        x_t, x0, noise = self._for_each_token(t, outputs.shape)
        return FlowPath().rows(outputs[..., None, :].expand(*x0.shape, x0.shape[-1]), Rows(x0, x_t, noise))

    def jump_rates(self, t: Tensor) -> Tensor:
        """kappa'/(1-kappa) f_y with kappa = alive: alpha' / (exp(alpha) - 1) f_y, masked or not."""
        outputs, x_t, noise = self.at(t)
        rates = (noise.alpha_rate / noise.expm1_alpha)[..., None] * torch.softmax(outputs, -1)
        return put_at_token(rates, x_t, 0.0, noise.is_mask(x_t))


def _network(
    model: Model, space: Space, method: Method, sigma_dtype: torch.dtype, device: torch.device | None
) -> Network:
    kind = FlowNetwork if isinstance(method.objective, FlowMatching) else Network
    return kind(space, method, model, sigma_dtype, device or torch.device("cpu"))


# ----------------------------------------------------------------------------------------------------------------
# The bound


def exact_bound(
    model: Model,
    process: TokenProcess,
    p0: Tensor,
    *,
    method: str | Method,
    bound: Bound = "tight",
    sigma_dtype: torch.dtype = torch.float32,
) -> float:
    """A bound of the module's head, in nats per token, by enumeration and quadrature.

    It is infinite where the network's ratios grow too fast at t = 0.

    Args:
        model: any callable `(x_t [B, L], sigma [B]) -> [B, L, V]`.
        process: the process, with (V+1)^L small enough to enumerate.
        p0: the law of the data, [V] * L; it sums to one.
        method: what the model's outputs mean.
        bound: "tight", "j1" or "j2".
        sigma_dtype: what the network is told of the time is float32, as everywhere, which leaves 7 digits; a network
            that is a function of float64 can ask for it and get 9.
    """
    chosen, space = get_method(method), space_of(process, p0)
    chosen.check(process)
    if bound not in BOUNDS:
        raise ValueError(f"unknown bound {bound!r}{suggestion(bound, BOUNDS)}")
    own = chosen.causal or isinstance(chosen.objective, FlowMatching)
    if own and bound != "tight":
        raise ValueError(f"{chosen.name} has a bound of its own and no {bound}; ask for bound='tight'")
    if chosen.causal:
        return exact_cross_entropy(model, process, p0, method=chosen)
    network, flat = _network(model, space, chosen, sigma_dtype, p0.device), p0.double().cpu().reshape(-1)
    path = path_integral(network, flat, with_entropy=bound == "j1") / space.length
    terminal = process.terminal()
    if bound == "j1":
        return path
    if bound == "j2":
        return path - process.integrated_out_rate() + terminal.paper_prior_entropy
    if isinstance(network, FlowNetwork):  # its path is a divergence already
        return path + terminal.kl + _reading(network, flat)
    known = terminal.cross_entropy - process.integrated_out_rate()
    return path + known + _jump_at_zero(network, flat)


def path_integral(network: Network, p0: Tensor, *, with_entropy: bool) -> float:
    """E int lbar dt, or E int l dt `with_entropy`, summed over positions; p0 [M]."""
    space = network.space

    def at(t: Tensor) -> Tensor:
        weight = space.belief(p0, t)
        return torch.where(weight > 0, weight * network.losses(t, with_entropy), 0.0).sum((1, 2, 3))

    return network.axis.integrate(lambda t: space.in_chunks(at, t), network.tolerance)


def _reading(network: Network, p0: Tensor) -> float:
    """E[-log p(x_0 | x_t)] per token at the end of the path."""
    t = torch.tensor([max(network.stop, _JUST_AFTER_ZERO)], dtype=torch.float64)
    return float(-torch.xlogy(network.space.belief(p0, t), network.readings(t)).sum() / network.space.length)


def _jump_at_zero(network: Network, p0: Tensor) -> float:
    """E[-log p(x_0 | x_{0+})] - H(p_{0+|0}) per token: what a schedule with sigma(0) > 0 adds."""
    if network.process.schedule.start == 0.0:
        return 0.0
    column = network.process.kernel(_JUST_AFTER_ZERO).column(torch.tensor(0))
    return _reading(network, p0) + float(torch.xlogy(column, column).sum())


# ----------------------------------------------------------------------------------------------------------------
# The learned reverse process


def exact_cross_entropy(
    model: Model,
    process: TokenProcess,
    p0: Tensor,
    *,
    method: str | Method,
    sigma_dtype: torch.dtype = torch.float32,
) -> float:
    """H(p_0, p_0^theta) / L, in nats per token, of the law p_0^theta from which the learned reverse process samples.

    It is never above the `tight` of `exact_bound`.

    Args:
        model: any callable `(x_t [B, L], sigma [B]) -> [B, L, V]`.
        process: the process, with (V+1)^L small enough to enumerate.
        p0: the law of the data, [V] * L; it sums to one.
        method: what the model's outputs mean.
        sigma_dtype: in which the network is told of the time, float32 as everywhere.
    """
    length = space_of(process, p0).length
    learned = learned_distribution(model, process, length, method=method, sigma_dtype=sigma_dtype, device=p0.device)
    return float(-torch.xlogy(p0.double().cpu(), learned).sum() / length)


def learned_distribution(
    model: Model,
    process: TokenProcess,
    length: int,
    *,
    method: str | Method,
    sigma_dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> Tensor:
    """p_0^theta of the learned reverse process that starts in p_r at t = 1: [V] * L, float64.

    Masks that are left at the end (a bounded score leaves some) are read off the posterior.
    """
    chosen, space = get_method(method), Space(process, length)
    chosen.check(process)
    if chosen.causal:
        return _chain_rule(space, model, device)
    network = _network(model, space, chosen, sigma_dtype, device)
    # The error of n steps is of order n^-4, then n^-6: two answers give a third, better one (Richardson).
    steps, coarse, answer = 24, _reverse(network, 12), torch.zeros(())
    while steps <= 6144:
        fine = _reverse(network, steps)
        previous, answer = answer, fine + (fine - coarse) / 15
        if bool(((answer - previous).abs() <= 10 * network.tolerance * (answer.abs() + 1e-9)).all()):
            return answer.clamp_min(0.0).reshape((process.vocab_size,) * length)
        steps, coarse = 2 * steps, fine
    raise ValueError("the learned reverse process did not converge: the network's outputs are too rough in time")


def _chain_rule(space: Space, model: Model, device: torch.device | None) -> Tensor:
    """prod_i p(x_i | x_<i) of a causal network, for every clean sequence."""
    inputs = shift_right(space.clean, start_symbol(space.process)).to(device or torch.device("cpu"))
    with torch.no_grad():
        outputs = model(inputs, torch.zeros(len(inputs), device=inputs.device)).double().cpu()
    log_probs = torch.log_softmax(outputs, -1).gather(-1, space.clean[..., None]).squeeze(-1)
    return log_probs.sum(-1).exp().reshape((space.process.vocab_size,) * space.length)


def _reverse(network: Network, steps: int) -> Tensor:
    """The learned law at t = 0 over the clean sequences [M], with about `steps` Magnus steps."""
    space, process = network.space, network.process
    edges = [max(edge, _SMALLEST_SIGMA) for edge in network.axis.edges]
    marks = [edge + math.log(-math.expm1(-edge)) for edge in reversed(edges)]  # log(exp(sigma) - 1)
    law = process.prior()[space.states].prod(-1)
    for high, low in itertools.pairwise(marks):
        share = max(2, math.ceil(steps * (high - low) / (marks[0] - marks[-1])))
        law = _magnus(network, law, high, low, share)
    read = network.readings(network.axis.time(torch.tensor([edges[0]], dtype=torch.float64))[0])[0]
    if process.schedule.start == 0.0:  # the path is at its end: only masks are still to be read
        tokens = torch.nn.functional.one_hot(space.states.clamp_max(process.vocab_size - 1), process.vocab_size)
        read = torch.where((space.states == process.vocab_size)[..., None], read, tokens.double())
    return law @ torch.stack([read[:, i][:, space.clean[:, i]] for i in range(space.length)]).prod(0)


def _magnus(network: Network, law: Tensor, high: float, low: float, steps: int) -> Tensor:
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
    return law


def _generator(network: Network, w: Tensor) -> Tensor:
    """The reverse rates per unit of -w at w [K]: [K, N, N]."""
    sigma = torch.logaddexp(w, torch.zeros_like(w))
    t, slope = network.axis.time(sigma)
    return network.reverse_rates(t) * (slope * -torch.expm1(-sigma))[:, None, None]
