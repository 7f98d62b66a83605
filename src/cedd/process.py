"""The token process: one continuous-time Markov chain with a mask clock and a shuffle clock.

Shapes: B batch, L positions, V vocabulary, n states (V+1 with a mask, V without); [*S] any common shape.

A token is kept with probability `keep`, shuffled (redrawn uniformly from V) with `alive - keep`, masked with
`1 - alive`, where alive = exp(-alpha) and keep = exp(-alpha-beta):

    p(j|i) = keep [j = i] + b   for a token j,      p(mask|i) = a,
    b = (alive - keep) / V,     a = 1 - alive,      c = b + keep.

The same holds from s to t with the differences of the clocks, and with negated differences for the inverse
matrix. Columns are sources: K[x, y] is the probability of going from y to x. Absorb is beta = 0, uniform is
alpha = 0; no code here depends on which process it is.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Self

import numpy as np
import torch
from torch import Tensor

from cedd.clocks import (
    Clocks,
    EvolvingShare,
    Hybrid,
    PowerShare,
    Proportional,
    RunningShare,
    TimeFunction,
    check_clocks,
)
from cedd.device import has_float64
from cedd.names import suggestion
from cedd.quadrature import integrate
from cedd.schedules import LogLinear, Schedule, Time, check_time, check_times, double, schedule_from_config
from cedd.splitmix import mix
from cedd.storage import JSONMapping, JSONObject

# ----------------------------------------------------------------------------------------------------------------
# Randomness


def check_seed(seed: int) -> int:
    """A seed as an int in 0..2^64 - 1. Beyond, two seeds would give the same numbers."""
    number = operator.index(seed)
    if not 0 <= number < 1 << 64:
        raise ValueError(f"a seed must be in 0..2^64 - 1 (got {number})")
    return number


def seeded_generator(seed: int) -> torch.Generator:
    """A generator on the CPU. All 64 bits of the seed count, although torch's generator reads only the last 32."""
    number = check_seed(seed)
    if number >> 32:
        number = int(mix(np.array([number], dtype=np.uint64))[0]) & 0xFFFFFFFF
    return torch.Generator().manual_seed(number)


def uniform_noise(
    shape: torch.Size | tuple[int, ...], device: torch.device, generator: torch.Generator | None
) -> Tensor:
    """U[0, 1) in float64 (float32 where a device has none), drawn on the generator's device."""
    source = generator.device if generator is not None else device
    dtype = torch.float64 if has_float64(source) and has_float64(device) else torch.float32
    return torch.rand(shape, generator=generator, device=source, dtype=dtype).to(device)


def uniform_tokens(
    shape: torch.Size | tuple[int, ...], vocab_size: int, device: torch.device, generator: torch.Generator | None
) -> Tensor:
    """Token ids drawn uniformly from 0..V-1."""
    source = generator.device if generator is not None else device
    return torch.randint(vocab_size, shape, generator=generator, device=source).to(device)


# ----------------------------------------------------------------------------------------------------------------
# Kernels


_MAX_EXPONENT = 700.0
"""exp of a larger number overflows float64; a fraction with it in the denominator is set to 0."""


@dataclass(frozen=True)
class Kernel:
    """Transition matrices over clock differences (alpha, beta), one for each entry of their shape [*S].

    Args:
        vocab_size: V.
        has_mask: whether there is a mask state, V.
        alpha: the difference of the mask clock, [*S] float64.
        beta: the difference of the shuffle clock.
    """

    vocab_size: int
    has_mask: bool
    alpha: Tensor
    beta: Tensor

    @property
    def num_states(self) -> int:
        return self.vocab_size + int(self.has_mask)

    @property
    def alive(self) -> Tensor:
        """exp(-alpha): the probability of not being masked."""
        return torch.exp(-self.alpha)

    @property
    def keep(self) -> Tensor:
        """exp(-alpha-beta): the probability of neither mask nor redraw."""
        return torch.exp(-self.alpha - self.beta)

    @property
    def a(self) -> Tensor:
        """p(mask | token) = 1 - alive."""
        return -torch.expm1(-self.alpha)

    @property
    def shuffled(self) -> Tensor:
        """alive - keep: the probability of being redrawn and not masked."""
        return -torch.exp(-self.alpha) * torch.expm1(-self.beta)

    @property
    def b(self) -> Tensor:
        """p(j | i) for two different tokens."""
        return self.shuffled / self.vocab_size

    @property
    def c(self) -> Tensor:
        """p(i | i) for a token."""
        return self.b + self.keep

    @property
    def expm1_alpha(self) -> Tensor:
        """exp(alpha) - 1, so that keep/a = exp(-beta) / expm1_alpha; kept finite for any alpha."""
        return torch.expm1(self.alpha.clamp_max(_MAX_EXPONENT))

    @property
    def expm1_beta(self) -> Tensor:
        """E = exp(beta) - 1, so that c/b - 1 = V/E and 1 - b/c = V/(E+V); kept finite for any beta."""
        return torch.expm1(self.beta.clamp_max(_MAX_EXPONENT))

    @property
    def entropy(self) -> Tensor:
        """The entropy of a token's distribution after this kernel."""
        V, a, b, c = self.vocab_size, self.a, self.b, self.c
        return -torch.xlogy(a, a) - torch.xlogy(c, c) - (V - 1) * torch.xlogy(b, b)

    # The record as a whole

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """The same record with `function` applied to each of its tensors."""
        changed = {f.name: function(value) for f in fields(self) if isinstance(value := getattr(self, f.name), Tensor)}
        return replace(self, **changed)

    def to(self, device: torch.device | str) -> Self:
        """The same record on another device (it stays on the CPU where the device has no float64)."""
        return self.map(lambda v: v.to(device)) if has_float64(device) else self

    def like(self, x: Tensor) -> Self:
        """The same record with fields of shape [B] broadcast to x [B, ...], and scalar fields to all of x."""

        def spread(value: Tensor) -> Tensor:
            return value.reshape(value.shape + (1,) * (x.dim() - value.dim())).expand(x.shape)

        return self.map(spread)

    def rows(self, index: Tensor) -> Self:
        """The entries at `index` (ids or a Boolean mask) of the flattened fields: [*S] -> [N]."""
        return self.map(lambda v: v.reshape(-1)[index.to(v.device)])

    def stacked(self) -> Tensor:
        """The fields stacked in one tensor, [*S, F]; `of_stacked` reverses this."""
        values = (getattr(self, f.name) for f in fields(self))
        return torch.stack([value for value in values if isinstance(value, Tensor)], -1)

    @classmethod
    def of_stacked(cls, vocab_size: int, has_mask: bool, values: Tensor) -> Self:
        """The record whose stacked fields are [*S, F]."""
        return cls(vocab_size, has_mask, *values.unbind(-1))

    def inverse(self) -> Kernel:
        """The inverse matrix: both clocks run backwards."""
        return Kernel(self.vocab_size, self.has_mask, -self.alpha, -self.beta)

    # Entries, in O(V)

    def is_mask(self, x: Tensor) -> Tensor:
        return x == self.vocab_size

    def probability(self, y: Tensor, x: Tensor) -> Tensor:
        """K[y, x]: from x to y, elementwise; x, y [*S]."""
        from_token = torch.where(self.is_mask(y), self.a, self.b + self.keep * (x == y))
        return torch.where(self.is_mask(x), self.is_mask(y).to(from_token), from_token)

    def column(self, x: Tensor) -> Tensor:
        """K[:, x], the law of the next state given x: [*S] -> [*S, n]."""
        return self._wide().probability(self._states(x), x[..., None])

    def dense(self) -> Tensor:
        """The whole matrix [*S, n, n]; for small V, to look at and to test."""
        states = torch.arange(self.num_states, device=self.alpha.device)
        wide = self.map(lambda v: v[..., None, None])
        return wide.probability(states[:, None], states[None, :])

    def apply(self, v: Tensor) -> Tensor:
        """K v for v [*S, n], in O(V): tokens get keep v_y + b sum(v), the mask gets a sum(v) + v_mask."""
        tokens = v[..., : self.vocab_size]
        total = tokens.sum(-1, keepdim=True)
        wide = self._wide()
        moved = wide.keep * tokens + wide.b * total
        return torch.cat([moved, wide.a * total + v[..., self.vocab_size :]], -1) if self.has_mask else moved

    def move(self, x: Tensor, u: Tensor, redraw: Tensor) -> Tensor:
        """The next state of every token of x, given its randomness: u in [0, 1) and a uniform token, of x's shape."""
        kernel = self.like(x)
        masked = torch.full_like(x, self.vocab_size)  # never chosen without a mask: there u < alive = 1
        moved = torch.where(u < kernel.alive.to(u), redraw, masked)
        kept = (u < kernel.keep.to(u)) | self.is_mask(x)
        return torch.where(kept, x, moved)

    def sample(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draw the next state of every token of x [B, L]; fields [B] or of x's shape."""
        u = uniform_noise(x.shape, x.device, generator)
        return self.move(x, u, uniform_tokens(x.shape, self.vocab_size, x.device, generator))

    def _wide(self) -> Self:
        return self.map(lambda v: v[..., None])

    def _states(self, x: Tensor) -> Tensor:
        return torch.arange(self.num_states, device=x.device).expand(*x.shape, self.num_states)


@dataclass(frozen=True)
class Noise(Kernel):
    """The noise at time t: the kernel from clean data to t, and the rates of the clocks.

    Args:
        vocab_size: V.
        has_mask: whether there is a mask state, V.
        alpha: the mask clock at t, [*S] float64.
        beta: the shuffle clock at t.
        t: the time.
        alpha_rate: alpha'(t).
        beta_rate: beta'(t).
    """

    t: Tensor
    alpha_rate: Tensor
    beta_rate: Tensor

    @property
    def sigma(self) -> Tensor:
        """alpha + beta: the total noise, which is the network's time input."""
        return self.alpha + self.beta

    def forward_rate(self, masked: Tensor) -> Tensor:
        """Q_t(x, y), the rate from any other token y to x: alpha' to a mask, beta'/V to a token. [*S]."""
        return torch.where(masked, self.alpha_rate, self.beta_rate / self.vocab_size)

    def since(self, earlier: Kernel) -> Kernel:
        """The kernel from an earlier noise level to this one."""
        return Kernel(self.vocab_size, self.has_mask, self.alpha - earlier.alpha, self.beta - earlier.beta)


# ----------------------------------------------------------------------------------------------------------------
# The process

_LARGEST_TOTAL = 1e30
"""The largest sigma(1): networks take sigma in float32."""
_SMALLEST_SHARE = 1e-20
"""The smallest share of masking, except for 0."""


@dataclass(frozen=True)
class Terminal:
    """What is left at t = 1, in nats per token, for the prior p_r = (1-e1) mask + e1 uniform, e1 = alive(1)."""

    cross_entropy: float
    """H(p_1, p_r), which does not depend on the data."""
    conditional_entropy: float
    """H(p_{1|0})."""
    kl: float
    """KL(p_{1|0} || p_r)."""
    paper_prior_entropy: float
    """H(p_r) for the paper's p_r: all mask, or uniform without a mask."""


@dataclass(frozen=True)
class TokenProcess:
    """A noise process: two clocks over V tokens, with or without a mask state. Make one with absorb(), uniform(),
    roulette(), eroulette() or hybrid().

    Args:
        vocab_size: V.
        has_mask: whether there is a mask state, V.
        clocks: alpha(t) and beta(t).
        spec: the name in PROCESSES and the arguments except V and the schedule; needed to save the process.
    """

    vocab_size: int
    has_mask: bool
    clocks: Clocks
    spec: JSONMapping | None = field(default=None, repr=False, compare=False)

    def __init_subclass__(cls) -> None:
        """Refuse subclasses that replace a part of the process, since losses and bounds would not use it."""
        replaced = sorted(name for name in vars(TokenProcess) if not name.startswith("_") and name in vars(cls))
        if replaced:
            raise TypeError(
                f"{cls.__name__} overrides {', '.join(replaced)} of TokenProcess, which losses, bounds and samplers do "
                "not call: a process is two clocks, functions of time alone; subclass cedd.clocks.Clocks instead"
            )

    def __post_init__(self) -> None:
        try:  # a plain int, from anything that is one
            object.__setattr__(self, "vocab_size", operator.index(self.vocab_size))
        except TypeError:
            raise ValueError(f"the vocabulary size must be an integer (got {self.vocab_size!r})") from None
        if self.vocab_size < 2:
            raise ValueError(f"a vocabulary needs at least 2 tokens (got V = {self.vocab_size})")
        check_clocks(self.clocks)
        if not (total := float(self.sigma(1.0))) <= _LARGEST_TOTAL:
            raise ValueError(f"sigma(1) = alpha(1) + beta(1) must be at most {_LARGEST_TOTAL:g} (got {total:g})")

    # Names of things

    @property
    def num_states(self) -> int:
        """V + 1 with a mask, V without."""
        return self.vocab_size + int(self.has_mask)

    @property
    def mask_id(self) -> int | None:
        """V if the process has a mask, otherwise None."""
        return self.vocab_size if self.has_mask else None

    @cached_property
    def can_shuffle(self) -> bool:
        """Whether a token can turn into another token: then unmasked tokens can be corrected."""
        return float(self.beta(1.0)) > 0.0

    @property
    def schedule(self) -> Schedule | None:
        """The noise schedule that the clocks run on, if they run on one."""
        return getattr(self.clocks, "schedule", None)

    @property
    def axis(self) -> Schedule:
        """A coordinate of time in which the process is smooth; integrals and the times of draws use it."""
        return self.clocks.axis

    @property
    def jumps_at_zero(self) -> bool:
        """Whether there is noise right after t = 0 (a schedule with sigma(0) > 0)."""
        return self.axis.start > 0

    def config(self) -> JSONObject:
        """A JSON record from which `process_from_config` makes this process again: by its `spec`, or else by its
        clocks."""
        if self.spec is None:
            sizes = {"vocab_size": self.vocab_size, "has_mask": self.has_mask}
            return {"name": "clocks", **sizes, "clocks": self.clocks.config()}
        record = {"vocab_size": self.vocab_size, **self.spec}
        return record if self.schedule is None else {**record, "schedule": self.schedule.config()}

    # Clocks

    def alpha(self, t: Time) -> Tensor:
        """The mask clock at t."""
        return self.clocks.alpha(t)

    def beta(self, t: Time) -> Tensor:
        """The shuffle clock at t."""
        return self.clocks.beta(t)

    def sigma(self, t: Time) -> Tensor:
        """alpha + beta: the total noise, which is the network's time input."""
        return self.clocks.total(t)

    def alpha_rate(self, t: Time) -> Tensor:
        """alpha'(t)."""
        return self.clocks.alpha_rate(t)

    def beta_rate(self, t: Time) -> Tensor:
        """beta'(t)."""
        return self.clocks.beta_rate(t)

    # Kernels

    def kernel(self, t: Time, s: Time = 0.0) -> Kernel:
        """The transition kernel from time s to time t >= s."""
        start, end = check_time(s), check_time(t)
        if bool((start > end).any()):
            raise ValueError("a kernel runs forward in time: s must not be later than t (use .inverse() to go back)")
        alpha, beta = self.alpha(end) - self.alpha(start), self.beta(end) - self.beta(start)
        return Kernel(self.vocab_size, self.has_mask, alpha, beta)

    def noise(self, t: Time) -> Noise:
        """The kernel from clean data to t, with the clocks' rates there."""
        time = check_time(t)
        alpha, beta, alpha_rate, beta_rate = self.clocks.both(time)
        return Noise(
            vocab_size=self.vocab_size,
            has_mask=self.has_mask,
            alpha=alpha,
            beta=beta,
            t=time,
            alpha_rate=alpha_rate,
            beta_rate=beta_rate,
        )

    def transition_matrix(self, t: Time, s: Time = 0.0) -> Tensor:
        """[n, n] float64, column-stochastic: entry (x, y) is the probability of x at t given y at s."""
        return self.kernel(t, s).dense()

    def rate_matrix(self, t: Time) -> Tensor:
        """Q_t = alpha' Q_absorb + beta' Q_uniform, [*S, n, n] float64 for t of shape [*S]; columns sum to zero."""
        n, V = self.num_states, self.vocab_size
        mask_rate, shuffle_rate = double(self.alpha_rate(t)).cpu(), double(self.beta_rate(t)).cpu()
        matrix = torch.zeros(*mask_rate.shape, n, n, dtype=torch.float64)
        matrix[..., :V, :V] = (shuffle_rate / V)[..., None, None]
        matrix[..., V:, :V] = mask_rate[..., None, None]
        tokens = torch.arange(V)
        matrix[..., tokens, tokens] -= (mask_rate + shuffle_rate)[..., None]
        return matrix

    def sample(self, x0: Tensor, t: Time, generator: torch.Generator | None = None) -> Tensor:
        """x_t ~ p_t(. | x0), position by position; x0 [B, L] token ids, t [B], [B, L] or one time for all."""
        self.check_tokens(x0)
        return self.kernel(check_times(t, x0, "x0")).to(x0.device).sample(x0, generator)

    def check_tokens(self, x0: Tensor) -> None:
        """Raise a ValueError if ids lie outside 0..V-1."""
        _check_ids(x0, self.vocab_size, "token ids", " (the mask is not data)")

    def check_states(self, x_t: Tensor) -> None:
        """Raise a ValueError if ids lie outside 0..n-1."""
        _check_ids(x_t, self.num_states, "noisy tokens", "" if self.has_mask else " (this process has no mask)")

    # The end at t = 1

    def prior(self) -> Tensor:
        """p_r [n]: (1-e1) mask + e1 uniform with e1 = alive(1); uniform without a mask."""
        alive = self.kernel(1.0).alive
        tokens = (alive / self.vocab_size).expand(self.vocab_size)
        return torch.cat([tokens, (1 - alive).reshape(1)]) if self.has_mask else tokens.clone()

    def terminal(self) -> Terminal:
        """The terms of the bound at t = 1, in closed form."""
        V, end = self.vocab_size, self.kernel(1.0)
        alive, a, b, c = end.alive, end.a, end.b, end.c
        xlogy, unchanged = torch.xlogy, torch.exp(-end.beta)
        return Terminal(
            cross_entropy=float(-xlogy(a, a) - xlogy(alive, alive / V)),
            conditional_entropy=float(end.entropy),
            kl=float(c * torch.log1p((V - 1) * unchanged) + (V - 1) * xlogy(b, -torch.expm1(-end.beta))),
            paper_prior_entropy=0.0 if self.has_mask else math.log(V),
        )

    def integrated_out_rate(self, since: float = 0.0) -> float:
        """The expected number of jumps of one token over (since, 1]: the integral of alive (alpha' + beta' (1-1/V)).

        Its negative is the analytic term of J2 (paper, Proposition 6). It is integrated once, because every bound needs
        it.
        """
        if since not in self._out_rates:
            self._out_rates[since] = self._integrate_out_rate(since)
        return self._out_rates[since]

    @cached_property
    def _out_rates(self) -> dict[float, float]:
        """Cached integrals."""
        return {}

    def _integrate_out_rate(self, since: float) -> float:
        start = torch.exp(-self.alpha_just_after_zero)
        masked = float(start * -torch.expm1(-(self.alpha(1.0) - self.alpha_just_after_zero)))
        whole = masked + (1 - 1 / self.vocab_size) * self.clocks.shuffling_while_alive()
        return whole - integrate(self._mean_out_rate, 0.0, since) if since > 0 else whole

    def _mean_out_rate(self, t: Tensor) -> Tensor:
        leave = self.alpha_rate(t) + self.beta_rate(t) * (1 - 1 / self.vocab_size)
        return torch.exp(-self.alpha(t)) * leave

    @property
    def alpha_just_after_zero(self) -> Tensor:
        """alpha(0+): zero, except for a schedule that starts at sigma_min."""
        return self.alpha(torch.tensor(torch.finfo(torch.float64).tiny, dtype=torch.float64))

    def corrected_probability(self) -> float:
        """The probability that a token, when it is masked, is no longer the one it started as.

        In reverse: the share of tokens that are unmasked as something else first and corrected later. For
        roulette it is (1-1/V) (1 - p_m - exp(-p_m sigma_1) + p_m exp(-sigma_1)), about 1 - p_m. It is the
        integral of alpha' (1-1/V) (alive - keep).
        """
        masked = float(self.kernel(1.0).a)
        return (1 - 1 / self.vocab_size) * (masked - self.clocks.masking_while_kept())


def _check_ids(x: object, count: int, what: str, hint: str) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{what} must be a tensor of integers (got {type(x).__name__})")
    if x.dtype not in (torch.int32, torch.int64):  # torch indexes with no others, and a mask may not fit into them
        raise ValueError(f"{what} must be int32 or int64, as from .long() (got {x.dtype})")
    if x.numel() and (int(x.min()) < 0 or int(x.max()) >= count):
        raise ValueError(f"{what} must be in 0..{count - 1} (got {int(x.min())}..{int(x.max())}{hint})")


# ----------------------------------------------------------------------------------------------------------------
# The processes of the paper, and one of others


def _share(value: float, name: str = "p_m", least: float = 0.0) -> float:
    """A share of masking as a plain number, checked."""
    share = float(value)
    if 0.0 < share < _SMALLEST_SHARE:
        least = _SMALLEST_SHARE
    if not least <= share <= 1.0:
        raise ValueError(f"{name} must be in [{least:g}, 1] (got {share!r})")
    return share


def _or_log_linear(schedule: Schedule | None) -> Schedule:
    if schedule is None:
        return LogLinear()
    if not isinstance(schedule, Schedule):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"the schedule must be LogLinear, Polynomial, Cosine or Geometric (got {schedule!r})")
    return schedule


def absorb(vocab_size: int, schedule: Schedule | None = None) -> TokenProcess:
    """Masked diffusion: tokens are masked and stay masked; alpha = sigma, beta = 0.

    Args:
        vocab_size: V.
        schedule: sigma(t); log-linear by default.
    """
    clocks = Proportional(_or_log_linear(schedule), mask_scale=1.0, shuffle_scale=0.0)
    return TokenProcess(vocab_size, True, clocks, {"name": "absorb"})


def uniform(vocab_size: int, schedule: Schedule | None = None) -> TokenProcess:
    """Tokens are redrawn uniformly, without a mask: alpha = 0, beta = sigma.

    Args:
        vocab_size: V.
        schedule: sigma(t); log-linear by default.
    """
    clocks = Proportional(_or_log_linear(schedule), mask_scale=0.0, shuffle_scale=1.0)
    return TokenProcess(vocab_size, False, clocks, {"name": "uniform"})


def roulette(vocab_size: int, p_m: float = 0.95, schedule: Schedule | None = None) -> TokenProcess:
    """Tokens are redrawn until they are masked; each jump masks with probability p_m.

    It runs at sigma = schedule / p_m, so that the mask clock is the schedule itself: alpha = p_m sigma,
    beta = (1-p_m) sigma.

    Args:
        vocab_size: V.
        p_m: the share of jumps that mask, in [1e-20, 1]; without masking the process is `uniform`.
        schedule: the mask clock; log-linear by default.
    """
    if p_m == 0:
        raise ValueError("p_m = 0 never masks; use the process uniform, or p_m in [1e-20, 1]")
    share = _share(p_m, least=_SMALLEST_SHARE)
    clocks = Proportional(_or_log_linear(schedule), mask_scale=1.0, shuffle_scale=(1.0 - share) / share)
    return TokenProcess(vocab_size, True, clocks, {"name": "roulette", "p_m": share})


def eroulette(
    vocab_size: int,
    p_m: TimeFunction | float | None = None,
    schedule: Schedule | None = None,
    *,
    mask_share: TimeFunction | float | None = None,
) -> TokenProcess:
    """Roulette with a share of masking that changes with time, on the schedule as given.

    It takes either p_m or mask_share: a function of t written with torch operations, or a number. Only numbers and
    PowerShare can be saved.

    Args:
        vocab_size: V.
        p_m: alpha = p_m(t) sigma(t), beta = (1-p_m(t)) sigma(t), as in the paper. An error names the first t at which
            one of the two would decrease.
        schedule: sigma(t), with sigma(0) = 0; log-linear by default.
        mask_share: q in alpha' = q(t) sigma'(t), beta' = (1-q(t)) sigma'(t), with values in [0, 1].
    """
    if (p_m is None) == (mask_share is None):
        raise ValueError("eroulette takes either p_m=... or mask_share=..., a function of t in [0, 1]")
    form, share = ("p_m", p_m) if p_m is not None else ("mask_share", mask_share)
    assert share is not None
    if callable(share):
        function, saved = share, asdict(share) if isinstance(share, PowerShare) else None
    else:
        saved = _share(share, form)
        function = PowerShare(saved, saved)
    kind = {"p_m": EvolvingShare, "mask_share": RunningShare}[form]
    spec = None if saved is None else {"name": "eroulette", form: saved}
    return TokenProcess(vocab_size, True, kind(_or_log_linear(schedule), function), spec)


def hybrid(
    vocab_size: int, p_u: float = 0.1, *, rise: float = 0.5, fall: float = 0.5, eps: float = 1e-4
) -> TokenProcess:
    """Masking with shuffling in between: at time t a share (1-t)/(1+c) of the tokens is kept and t/(1+c) is masked,
    with c = B t^rise (1-t)^fall and a share p_u shuffled at t = 1/2.

    With the default powers these are the marginals of GIDD (von Rütte et al. 2025). GIDD's own chain has other paths,
    because its masks can become tokens again. A bound is therefore valid for GIDD's networks, but differs from the
    number that GIDD prints.

    Args:
        vocab_size: V.
        p_u: the share of shuffled tokens at t = 1/2; with 0 it is `absorb`.
        rise: the power of the shuffled share at t = 0, in [0.2, 1].
        fall: its power at t = 1, in (0, 1].
        eps: length of the last part of the time, in [1e-12, 1/2), which runs at half speed because the clocks would be
            infinite at t = 1.
    """
    clocks = Hybrid(float(p_u), float(rise), float(fall), float(eps))
    return TokenProcess(vocab_size, True, clocks, {"name": "hybrid", **asdict(clocks)})


def _of_clocks(vocab_size: int, has_mask: bool, clocks: JSONMapping) -> TokenProcess:
    """A process by the record of its clocks."""
    return TokenProcess(vocab_size, has_mask, Clocks.from_config(clocks))


PROCESSES: dict[str, Callable[..., TokenProcess]] = {
    "absorb": absorb,
    "uniform": uniform,
    "roulette": roulette,
    "eroulette": eroulette,
    "hybrid": hybrid,
}


def process_from_config(config: JSONMapping) -> TokenProcess:
    """The process whose `config()` was this record."""
    if not isinstance(config, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"the process must be a JSON object (got {config!r})")
    arguments = dict(config)
    name = arguments.pop("name", None)
    if name == "clocks":
        return _of_clocks(**arguments)
    if name not in PROCESSES:
        raise ValueError(f"unknown process {name!r}{suggestion(str(name), PROCESSES)}")
    if isinstance(arguments.get("schedule"), Mapping):
        arguments["schedule"] = schedule_from_config(arguments["schedule"])
    for form in ("p_m", "mask_share"):
        if isinstance(arguments.get(form), Mapping):
            arguments[form] = PowerShare(**arguments[form])
    try:
        return PROCESSES[name](**arguments)
    except TypeError as error:
        raise ValueError(f"invalid arguments of the process {name}: {error}") from error
