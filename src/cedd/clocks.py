"""The two clocks of a token: alpha(t) drives masking, beta(t) drives shuffling; both start at 0 and never go back.

    Q_t = alpha'(t) Q_absorb + beta'(t) Q_uniform

Every process of the paper is a pair of clocks:

    Proportional(m, s)    alpha = m sigma(t),          beta = s sigma(t)             absorb, uniform, roulette
    EvolvingShare(p_m)    alpha = p_m(t) sigma(t),     beta = (1-p_m(t)) sigma(t)    eroulette, the paper's form
    RunningShare(q)       alpha' = q(t) sigma'(t),     beta' = (1-q(t)) sigma'(t)    eroulette, always valid

and so are two formulas of t without a schedule:

    Hybrid(p_u)           1 - exp(-alpha) = t/(1+c),   exp(-alpha-beta) = (1-t)/(1+c)   GIDD's and SCDD's marginals

A clock pair also has two integrals, on which the analytic terms of the bound rest: how much shuffling a token meets
while it is still unmasked, and how much masking it meets while it has never been redrawn.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from cedd.parts import Part, Table
from cedd.quadrature import Panels, adaptive_panels, bisect, integrate, integrate_panels
from cedd.schedules import Schedule, Time, check_time, double

TimeFunction = Callable[[Tensor], Tensor | float]
_JUST_AFTER_ZERO = torch.finfo(torch.float64).tiny
_SMALLEST_RISE = 0.2
"""Lower limit of Hybrid's `rise`: with a smaller power sigma is not small at the smallest positive float64."""
_SMALLEST_EPS = 1e-12
"""Lower limit of Hybrid's `eps`: t has 16 digits, which leaves 1 - t with four of them at the end."""


CLOCKS: dict[str, type[Clocks]] = {}
"""The clocks by name; those of your own can be added."""
SHARES: dict[str, Any] = {}
"""Shares of masking by name: functions of time, and classes of them."""


class Clocks(Part, ABC):
    """alpha, beta and their rates, as four functions of t. A field `schedule` is the schedule that they run on."""

    table: ClassVar[Table] = Table("clocks", "cedd.clocks.CLOCKS", CLOCKS)
    parts: ClassVar[Mapping[str, Table]] = {
        "schedule": Schedule.table,
        **dict.fromkeys(("p_m", "mask_share"), Table("share of masking", "cedd.clocks.SHARES", SHARES)),
    }

    valid: ClassVar[bool] = False
    """Whether every instance of this very class is known to be valid. Instances of other classes, subclasses included,
    are checked (`check_clocks`)."""

    @property
    def axis(self) -> Schedule:
        """A coordinate of time in which both clocks are smooth: their schedule, or else their own sum."""
        return getattr(self, "schedule", None) or TotalNoise(self)

    @abstractmethod
    def alpha(self, t: Time) -> Tensor:
        """Mask clock."""

    @abstractmethod
    def beta(self, t: Time) -> Tensor:
        """Shuffle clock."""

    @abstractmethod
    def alpha_rate(self, t: Time) -> Tensor:
        """alpha'(t)."""

    @abstractmethod
    def beta_rate(self, t: Time) -> Tensor:
        """beta'(t)."""

    def both(self, t: Time) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """alpha, beta, alpha' and beta', computed together."""
        return self.alpha(t), self.beta(t), self.alpha_rate(t), self.beta_rate(t)

    def total(self, t: Time) -> Tensor:
        """alpha + beta."""
        return self.alpha(t) + self.beta(t)

    def time(self, sigma: Tensor) -> Tensor:
        """The first time at which alpha + beta = sigma, by bisection."""
        return bisect(self.total, sigma, 0.0, 1.0)

    def shuffling_while_alive(self) -> float:
        """The integral over (0, 1] of exp(-alpha) dbeta."""
        return self._integral(lambda t: torch.exp(-self.alpha(t)) * self.beta_rate(t))

    def masking_while_kept(self) -> float:
        """The integral, from clean data to t = 1, of exp(-alpha-beta) dalpha."""
        return self._integral(lambda t: torch.exp(-self.alpha(t) - self.beta(t)) * self.alpha_rate(t))

    def _integral(self, integrand: Callable[[Tensor], Tensor]) -> float:
        """The integral over t in (0, 1], done over the axis."""
        axis = self.axis

        def f(sigma: Tensor) -> Tensor:
            t = axis.inverse(sigma)
            return integrand(t) / axis.rate(t)

        return integrate(f, axis.start, axis.end, tolerance=1e-12)


@dataclass(frozen=True)
class TotalNoise(Schedule):
    """sigma = alpha + beta of clocks without a schedule."""

    clocks: Clocks

    def sigma(self, t: Time) -> Tensor:
        return self.clocks.total(t)

    def rate(self, t: Time) -> Tensor:
        return self.clocks.alpha_rate(t) + self.clocks.beta_rate(t)

    def inverse(self, sigma: Tensor | float) -> Tensor:
        return self.clocks.time(double(sigma))


def _exponential_integral(rate: float, lo: float, hi: float) -> float:
    """The integral of exp(-rate x) over [lo, hi]; its length where rate is 0."""
    if rate == 0.0:
        return hi - lo
    scale = double(rate)
    return float(torch.exp(-scale * lo) * -torch.expm1(-scale * (hi - lo)) / scale)


@dataclass(frozen=True)
class Proportional(Clocks):
    """Both clocks are multiples of one schedule.

    A schedule that starts at sigma_min > 0 makes both clocks jump there right after t = 0, where data are clean.
    """

    schedule: Schedule
    mask_scale: float
    shuffle_scale: float
    valid: ClassVar[bool] = True

    def _elapsed(self, t: Time) -> Tensor:
        time = double(t)  # which the schedule checks
        return torch.where(time > 0, self.schedule.sigma(time), 0.0)

    def alpha(self, t: Time) -> Tensor:
        return self.mask_scale * self._elapsed(t)

    def beta(self, t: Time) -> Tensor:
        return self.shuffle_scale * self._elapsed(t)

    def both(self, t: Time) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        elapsed, rate = self._elapsed(t), self.schedule.rate(t)
        masking, shuffling = self.mask_scale, self.shuffle_scale
        return masking * elapsed, shuffling * elapsed, masking * rate, shuffling * rate

    def total(self, t: Time) -> Tensor:
        elapsed = self._elapsed(t)
        return self.mask_scale * elapsed + self.shuffle_scale * elapsed

    def alpha_rate(self, t: Time) -> Tensor:
        return self.mask_scale * self.schedule.rate(t)

    def beta_rate(self, t: Time) -> Tensor:
        return self.shuffle_scale * self.schedule.rate(t)

    def time(self, sigma: Tensor) -> Tensor:
        """The schedule's own inverse; just after 0 where the schedule starts above sigma."""
        time = self.schedule.inverse(sigma / (self.mask_scale + self.shuffle_scale))
        return torch.where(sigma > 0, time.clamp_min(_JUST_AFTER_ZERO), 0.0)

    def shuffling_while_alive(self) -> float:
        whole = _exponential_integral(self.mask_scale, self.schedule.start, self.schedule.end)
        return self.shuffle_scale * whole

    def masking_while_kept(self) -> float:
        total = self.mask_scale + self.shuffle_scale
        return self.mask_scale * _exponential_integral(total, 0.0, self.schedule.end)


@dataclass(frozen=True)
class Hybrid(Clocks):
    """Masks and shuffles in closed form: GIDD's marginals (von Rütte et al. 2025), as two commuting clocks.

        keep = (1-t)/(1+c),   masked = t/(1+c),   c = B t^rise (1-t)^fall,   B = 2^(rise+fall) p_u/(1-p_u),
        alpha = log(1 + t/(1-t+c)),               beta = log(1 + c/(1-t)),

    so that at t = 1/2 a token is shuffled with probability p_u. Both would be infinite at t = 1: the last part of the
    time, eps, runs at half the speed, and t = 1 is 1 - eps/2 in these formulas.

    Args:
        p_u: the share of shuffled tokens at t = 1/2, in [0, 1).
        rise: how the shuffled share starts, in [0.2, 1]: 1/2 in GIDD.
        fall: how it ends, in (0, 1]: 1/2 in GIDD.
        eps: see above, in [1e-12, 1/2); GIDD's times end at 1 - 1e-4.
    """

    valid: ClassVar[bool] = True
    p_u: float = 0.1
    rise: float = 0.5
    fall: float = 0.5
    eps: float = 1e-4

    def __post_init__(self) -> None:
        if not 0.0 <= self.p_u < 1.0:
            raise ValueError(f"p_u must be in [0, 1) (got {self.p_u!r})")
        if not _SMALLEST_RISE <= self.rise <= 1.0:
            raise ValueError(f"rise must be in [{_SMALLEST_RISE:g}, 1] (default 0.5) (got {self.rise!r})")
        if not 0.0 < self.fall <= 1.0:
            raise ValueError(f"fall must be in (0, 1], or the mask clock would run backwards (got {self.fall!r})")
        if not _SMALLEST_EPS <= self.eps < 0.5:
            raise ValueError(f"eps must be at least {_SMALLEST_EPS:g} and below 1/2 (default 1e-4) (got {self.eps!r})")

    @property
    def scale(self) -> float:
        """B."""
        return 2 ** (self.rise + self.fall) * self.p_u / (1 - self.p_u)

    def _parts(self, t: Time) -> tuple[Tensor, Tensor, Tensor]:
        """t of the formulas, 1 - t, and c."""
        time = check_time(t)
        time = time - (time - (1 - self.eps)).clamp_min(0.0) / 2
        rest = 1 - time
        return time, rest, self.scale * time**self.rise * rest**self.fall

    def alpha(self, t: Time) -> Tensor:
        time, rest, c = self._parts(t)
        return torch.log1p(time / (rest + c))

    def beta(self, t: Time) -> Tensor:
        _, rest, c = self._parts(t)
        return torch.log1p(c / rest)

    def alpha_rate(self, t: Time) -> Tensor:
        time, rest, c = self._parts(t)
        rate = (1 + c * (1 - self.rise + self.fall * time / rest)) / ((1 + c) * (rest + c))
        return self._slower_at_the_end(t, rate)

    def beta_rate(self, t: Time) -> Tensor:
        time, rest, c = self._parts(t)
        # c/t, with a time just after 0 in the place of 0, where the rate of a root is infinite
        c_per_t = self.scale * time.clamp_min(torch.finfo(torch.float64).tiny) ** (self.rise - 1) * rest**self.fall
        return self._slower_at_the_end(t, (self.rise * c_per_t + (1 - self.fall) * c / rest) / (rest + c))

    def _slower_at_the_end(self, t: Time, rate: Tensor) -> Tensor:
        return torch.where(check_time(t) > 1 - self.eps, rate / 2, rate)

    def time(self, sigma: Tensor) -> Tensor:
        """In closed form for GIDD's roots, where exp(sigma) (1-t) = 1 + c is quadratic in t; with g = expm1(sigma)

        t = (g² + 4 (g / (B + sqrt(B² + 4 g)))²) / ((1+g)² + B²).
        """
        if (self.rise, self.fall) != (0.5, 0.5):
            return super().time(sigma)
        B, g = self.scale, torch.expm1(sigma)
        share = g / (B + torch.sqrt(B**2 + 4 * g)).clamp_min(torch.finfo(torch.float64).tiny)
        time = (g**2 + 4 * share**2) / ((1 + g) ** 2 + B**2)
        return (time + (time - (1 - self.eps)).clamp_min(0.0)).clamp_max(1.0)


class _SharedSchedule(Clocks):
    """Two clocks that divide a schedule by a share of masking; raises a ValueError if a clock would run backwards."""

    schedule: Schedule

    def time(self, sigma: Tensor) -> Tensor:
        """The schedule's own inverse, since alpha + beta is the schedule."""
        return self.schedule.inverse(sigma)

    def _require_clean_start(self, schedule: Schedule) -> None:
        if schedule.start != 0.0:
            raise ValueError(
                "an eroulette needs a schedule with sigma(0) = 0, since its share at the jump from 0 to sigma(0) "
                "is not defined; use LogLinear, Polynomial or Cosine"
            )

    def _require_monotone(self, name: str, share: TimeFunction, advice: str, *, may_jump: bool) -> None:
        """Refuse a share with which a clock would have to run backwards, naming the first time at which one does.

        The rates find a decreasing clock. If the clock is the share times sigma (`may_jump`), only its values show a
        jump or a start below 0.
        """
        clocks = {"mask": (self.alpha, self.alpha_rate), "shuffle": (self.beta, self.beta_rate)}
        found = [
            (bad, clock)
            for clock, (value, rate) in clocks.items()
            for bad in (first_negative(rate), first_decrease(value) if may_jump else None)
            if bad is not None
        ]
        if not found:
            return
        bad, clock = min(found)
        here = float(evaluate(share, torch.tensor([max(bad, 1e-12)], dtype=torch.float64)))
        why = "" if -1e-6 <= here <= 1 + 1e-6 else f" ({name} is {here:.6g} there, outside [0, 1])"
        raise ValueError(f"the {clock} clock runs backwards: its rate turns negative at t = {bad:.6g}{why}; {advice}")


def _grid() -> Tensor:
    """Times in (0, 1], dense at both ends."""
    near_zero = torch.logspace(-12, -3, 400, dtype=torch.float64)
    linear = torch.linspace(1e-3, 1 - 1e-3, 20_000, dtype=torch.float64)
    return torch.cat([near_zero[:-1], linear[:-1], 1 - near_zero.flip(0), torch.ones(1, dtype=torch.float64)])


def first_negative(rate: Callable[[Tensor], Tensor]) -> float | None:
    """The first t in (0, 1] at which rate(t) < 0, or is not a number: found on a grid, refined by bisection."""
    grid = _grid()
    values = rate(grid)
    negative = ~(values >= -1e-12 * (1 + values.abs().nan_to_num(0.0)))
    return _pin_down(grid, negative, lambda t, _: not bool(rate(t) >= 0))


def first_decrease(clock: Callable[[Tensor], Tensor]) -> float | None:
    """The first t in (0, 1] before which clock(t), 0 at 0, decreases: found on a grid and refined by bisection."""
    grid = _grid()
    values = clock(grid)
    before = torch.cat([torch.zeros(1, dtype=torch.float64), values[:-1]])
    falls = ~(values - before >= -1e-12 * (1 + values.abs().nan_to_num(0.0)))
    return _pin_down(grid, falls, lambda t, index: not bool(clock(t) >= before[index]))


def _pin_down(grid: Tensor, bad: Tensor, is_bad: Callable[[Tensor, int], bool]) -> float | None:
    """The first bad time: between the first bad point of the grid and the one before it."""
    if not bool(bad.any()):
        return None
    index = int(bad.int().argmax())
    high, low = float(grid[index]), float(grid[index - 1]) if index else 0.0
    while high - low > 1e-12:
        middle = (low + high) / 2
        if is_bad(torch.tensor([middle], dtype=torch.float64), index):
            high = middle
        else:
            low = middle
    return high


def check_clocks(clocks: Clocks) -> None:
    """Raise a ValueError for clocks that depend on more than time, do not start at 0, decrease, are both constant, or
    whose rates are not their derivatives."""
    if vars(type(clocks)).get("valid", False):
        return
    named = {"alpha": (clocks.alpha, clocks.alpha_rate), "beta": (clocks.beta, clocks.beta_rate)}
    times = torch.linspace(0.1, 0.9, 6, dtype=torch.float64).reshape(2, 3)
    for called in ("alpha", "beta", "alpha_rate", "beta_rate"):
        found: object = getattr(clocks, called)(times)
        if not isinstance(found, Tensor) or found.shape != times.shape:
            got = f"shape {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise ValueError(
                f"{called}(t) must be a tensor of t's shape, here {list(times.shape)} (got {got}): a process is two "
                "clocks that are functions of time alone, the same for every token and position"
            )
    edges = torch.linspace(1e-3, 1 - 1e-3, 257, dtype=torch.float64)
    for name, (clock, rate) in named.items():
        if abs(float(clock(0.0))) > 1e-12:
            raise ValueError(f"{name}(0) must be 0, since data are clean at t = 0 (got {float(clock(0.0)):.6g})")
        if (bad := first_decrease(clock)) is not None:
            raise ValueError(f"a clock never runs backwards, but {name}(t) falls at t = {bad:.6g}")
        grown, summed = clock(edges).diff(), integrate_panels(rate, edges[:-1], edges[1:])
        wrong = ~((grown - summed).abs() <= 1e-3 * clock(edges[-1]))
        if bool(wrong.any()):
            k = int(wrong.int().argmax())
            raise ValueError(
                f"{name}_rate must be the derivative of {name}: between t = {edges[k]:.4g} and {edges[k + 1]:.4g} "
                f"{name} grows by {grown[k]:.6g}, its rate times the time is {summed[k]:.6g}"
            )
    fine = torch.linspace(1e-3, 1 - 1e-3, 20_000, dtype=torch.float64)
    still = clocks.alpha_rate(fine) + clocks.beta_rate(fine) <= 0
    if bool((pause := still[1:] & still[:-1]).any()):
        raise ValueError(
            f"both clocks are constant at t = {float(fine[int(pause.int().argmax())]):.4g}, but the noise must "
            "increase at all times; remove the pause"
        )


_NOT_TORCH = "a share of masking must be a function of a tensor of times, written with torch operations"


def evaluate(function: TimeFunction, t: Tensor) -> Tensor:
    """function(t) as a float64 tensor of t's shape; a constant is spread."""
    try:
        return torch.as_tensor(function(t), dtype=torch.float64, device=t.device).expand(t.shape)
    except (RuntimeError, TypeError) as error:
        raise ValueError(_NOT_TORCH) from error


def value_and_slope(function: TimeFunction, t: Tensor) -> tuple[Tensor, Tensor]:
    """function(t) and its derivative, by automatic differentiation of the elementwise function."""
    with torch.enable_grad():
        point = t.detach().clone().requires_grad_(True)
        value = evaluate(function, point)
        if not value.requires_grad:
            if value.numel() and bool((value != value.flatten()[0]).any()):
                raise ValueError(_NOT_TORCH)
            return value.detach(), torch.zeros_like(t)
        (slope,) = torch.autograd.grad(value.sum(), point)
    return value.detach(), slope


@dataclass(frozen=True)
class EvolvingShare(_SharedSchedule):
    """alpha = p_m(t) sigma(t), beta = (1 - p_m(t)) sigma(t); valid only where neither product decreases."""

    valid: ClassVar[bool] = True
    schedule: Schedule
    p_m: TimeFunction

    def __post_init__(self) -> None:
        self._require_clean_start(self.schedule)
        self._require_monotone(
            "p_m",
            self.p_m,
            "choose a p_m(t) whose two clocks never decrease, or give the instantaneous share as mask_share=...",
            may_jump=True,
        )

    def alpha(self, t: Time) -> Tensor:
        time = check_time(t)
        # p_m may be infinite or undefined at 0 itself, where both clocks are 0 anyway.
        return torch.where(time > 0, evaluate(self.p_m, time) * self.schedule.sigma(time), 0.0)

    def beta(self, t: Time) -> Tensor:
        time = check_time(t)
        return torch.where(time > 0, (1 - evaluate(self.p_m, time)) * self.schedule.sigma(time), 0.0)

    def alpha_rate(self, t: Time) -> Tensor:
        time = check_time(t).clamp_min(1e-12)
        share, slope = value_and_slope(self.p_m, time)
        return slope * self.schedule.sigma(time) + share * self.schedule.rate(time)

    def beta_rate(self, t: Time) -> Tensor:
        time = check_time(t).clamp_min(1e-12)
        share, slope = value_and_slope(self.p_m, time)
        return -slope * self.schedule.sigma(time) + (1 - share) * self.schedule.rate(time)


@dataclass(frozen=True)
class RunningShare(_SharedSchedule):
    """alpha' = q(t) sigma'(t), beta' = (1 - q(t)) sigma'(t), with q the share of masking at time t, in [0, 1].

    The clocks are integrals of q and 1-q over sigma, tabulated once, to 1e-13, and looked up with one short
    Gauss-Legendre sum per value.
    """

    valid: ClassVar[bool] = True
    schedule: Schedule
    mask_share: TimeFunction

    def __post_init__(self) -> None:
        self._require_clean_start(self.schedule)
        advice = "choose a share that stays within [0, 1]"
        self._require_monotone("mask_share", self.mask_share, advice, may_jump=False)

    def _mask_share_at(self, sigma: Tensor) -> Tensor:
        return evaluate(self.mask_share, self.schedule.inverse(sigma))

    def _shuffle_share_at(self, sigma: Tensor) -> Tensor:
        return 1 - self._mask_share_at(sigma)

    @cached_property
    def _mask_table(self) -> Panels:
        return adaptive_panels(self._mask_share_at, 0.0, self.schedule.end, tolerance=1e-13)

    @cached_property
    def _shuffle_table(self) -> Panels:
        return adaptive_panels(self._shuffle_share_at, 0.0, self.schedule.end, tolerance=1e-13)

    def alpha(self, t: Time) -> Tensor:
        sigma = self.schedule.sigma(t)
        return self._mask_table.up_to(self._mask_share_at, sigma.cpu()).to(sigma.device)

    def beta(self, t: Time) -> Tensor:
        # Its own table, not sigma - alpha: that difference has no digits left where the share of masking is near 1.
        sigma = self.schedule.sigma(t)
        return self._shuffle_table.up_to(self._shuffle_share_at, sigma.cpu()).to(sigma.device)

    def alpha_rate(self, t: Time) -> Tensor:
        time = check_time(t)
        return evaluate(self.mask_share, time) * self.schedule.rate(time)

    def beta_rate(self, t: Time) -> Tensor:
        time = check_time(t)
        return (1 - evaluate(self.mask_share, time)) * self.schedule.rate(time)


@dataclass(frozen=True)
class PowerShare:
    """A mask share for `eroulette` that is saved with a model: start + (stop - start) t^power."""

    start: float = 0.0
    stop: float = 1.0
    power: float = 1.0

    def __post_init__(self) -> None:
        for name, value in (("start", self.start), ("stop", self.stop)):
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"{name} must be in [0, 1] (got {value!r})")
        if not self.power > 0:
            raise ValueError(f"power must be positive (got {self.power!r})")

    def __call__(self, t: Tensor) -> Tensor:
        return self.start + (self.stop - self.start) * t**self.power


CLOCKS.update(
    {"proportional": Proportional, "evolving-share": EvolvingShare, "running-share": RunningShare, "hybrid": Hybrid}
)
SHARES["power"] = PowerShare
