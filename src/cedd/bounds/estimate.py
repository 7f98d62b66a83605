"""The estimate of a bound: a value, its error in two senses, and an interval for each.

Shapes: N sequences.

There are two errors. The distance from the bound of the *population* of the sequences has the standard error of a mean
of N independent values, one per sequence (clustered by sequence: the draws of one sequence are never counted as
independent data). The distance from the bound on exactly *these* sequences, the limit of infinitely many draws, has the
Monte Carlo standard error, which is smaller, and which more draws reduce.

The values of sequences are skewed to the right: if the mean is too low, its estimated error is usually too small, and
Student's interval ends below the true value. The interval for the population is Student's for Hall's transformation of
the t statistic, which removes the skewness (P. Hall, On the removal of skewness by transformation, 1992):

    g(T) = T + a/3 T^2 + a^2/27 T^3 + a/6,        a = skewness of the values / sqrt(N)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from numbers import Real

import torch
from torch import Tensor

Interval = tuple[float, float]

_NORMAL_975 = 1.959963984540054
_ROUNDING = 1e-6
_HOPELESS = 0.05  # the share of Monte Carlo noise in the variance below which more draws are not worthwhile
_NO_CODE_LENGTHS = ("j1", "j2")


def check_code_length(nats_per_token: float) -> None:
    """Refuse a negative bound on a negative log-likelihood, which only an error of arithmetic can produce."""
    if nats_per_token < -_ROUNDING:
        raise ValueError(
            f"the bound came out as {nats_per_token:.6g} nats per token, but a code length is never negative: the "
            "network's outputs or the parameters of the process are beyond what float64 can resolve"
        )


@dataclass(frozen=True)
class BoundEstimate:
    """An estimate of a bound in nats per token.

    Args:
        bound: tight, j1 or j2, or the order of the sampler whose likelihood this is.
        nats_per_token: the mean of `per_sequence`.
        per_sequence: one value per sequence, [N] float64.
        sequence_stderr: standard error for the population of sequences.
        monte_carlo_stderr: standard error for exactly these sequences (0 if the value is exact, NaN if it cannot be
            estimated).
        monte_carlo_freedom: degrees of freedom of `monte_carlo_stderr`.
        fixed_set: whether `stderr` and `ci95` are for exactly these sequences instead of for the population.
        terminal: constant added to the integral over the path, in nats per token; it does not depend on the network.
        evaluations: noisy sequences evaluated by the network.
        draws: noisy versions of each sequence.
        length: L.
        reached: whether the requested tolerance was reached.
        heavy_tailed: whether the variance of the draws diverges at t = 0. There is then no interval, because it would
            be too narrow.
        earliest_time: the time at which the path of `tight` stops and x_0 is drawn (0 if it does not stop), or at
            which j1 and j2 are cut.
        why_infinite: the reason why the bound is infinite; None if it is finite.
    """

    bound: str
    nats_per_token: float
    per_sequence: Tensor
    sequence_stderr: float
    monte_carlo_stderr: float
    monte_carlo_freedom: int
    fixed_set: bool
    terminal: float
    evaluations: int
    draws: int
    length: int
    reached: bool = True
    heavy_tailed: bool = False
    earliest_time: float = 0.0
    why_infinite: str | None = None

    def __post_init__(self) -> None:
        if self.bound not in _NO_CODE_LENGTHS:
            check_code_length(self.nats_per_token)

    @property
    def stderr(self) -> float:
        """The standard error of nats_per_token: clustered by sequence, or Monte Carlo only for a fixed set."""
        return self.monte_carlo_stderr if self.fixed_set else self.sequence_stderr

    @property
    def ci95(self) -> Interval:
        """The 95% interval of nats_per_token (NaN if there is none)."""
        return self.monte_carlo_ci95 if self.fixed_set else self.sequence_ci95

    @property
    def sequence_ci95(self) -> Interval:
        """The 95% interval for the population of sequences, by Hall's transformation."""
        return self._interval(self.sequence_stderr, len(self.per_sequence) - 1, skewness_of_mean(self.per_sequence))

    @property
    def monte_carlo_ci95(self) -> Interval:
        """The 95% interval for exactly these sequences, by Student's t."""
        return self._interval(self.monte_carlo_stderr, self.monte_carlo_freedom)

    def _interval(self, error: float, freedom: int, skewness: float = 0.0) -> Interval:
        """Without values below 0, unless the bound itself may be negative."""
        low, high = _interval(self.nats_per_token, error, 0 if self.heavy_tailed else freedom, skewness)
        return (low, high) if self.bound in _NO_CODE_LENGTHS else (max(low, 0.0), high)

    @property
    def perplexity(self) -> float:
        """exp of nats_per_token."""
        return exp_or_inf(self.nats_per_token)

    @property
    def perplexity_ci95(self) -> Interval:
        """The 95% interval of `perplexity`."""
        low, high = self.ci95
        return exp_or_inf(low), exp_or_inf(high)

    @property
    def bits_per_token(self) -> float:
        """nats_per_token / log 2."""
        return self.nats_per_token / math.log(2)

    def running(self) -> tuple[Tensor, Tensor]:
        """The estimate after 2, 3, ... N sequences, in their order, and the half-width of its 95% band: [N-1] each."""
        return running_mean(self.per_sequence)


def check_tolerance(tolerance: float | None) -> None:
    """Raise a ValueError for an invalid relative half-width of a perplexity's interval."""
    if tolerance is not None and not (isinstance(tolerance, Real) and 0 < tolerance < math.inf):
        raise ValueError(f"tolerance must be a positive fraction, such as 0.005 for half a percent (got {tolerance!r})")


def is_within(estimate: BoundEstimate, tolerance: float) -> bool:
    """Whether the 95% interval of the perplexity is this narrow."""
    low, high = estimate.ci95
    return (high - low) / 2 <= math.log1p(tolerance)


def cannot_narrow(estimate: BoundEstimate) -> bool:
    """Whether more draws cannot narrow the interval: the sequences differ more than their draws scatter."""
    if estimate.fixed_set:
        return estimate.monte_carlo_stderr == 0
    if estimate.monte_carlo_freedom < 1:
        return False
    # By their 95% intervals, since an error from a few differences can be small by chance.
    draws = student_quantile(estimate.monte_carlo_freedom) * estimate.monte_carlo_stderr
    return draws**2 < _HOPELESS * (_NORMAL_975 * estimate.sequence_stderr) ** 2


def exact_estimate(bound: str, values: Tensor, draws: int, length: int, fixed_set: bool) -> BoundEstimate:
    """The estimate from values [N] in nats per token that are known exactly, each from `draws` network evaluations."""
    mean, error = mean_and_stderr(values)
    return BoundEstimate(
        bound=bound,
        nats_per_token=mean,
        per_sequence=values,
        sequence_stderr=error,
        monte_carlo_stderr=0.0,
        monte_carlo_freedom=len(values),
        fixed_set=fixed_set or len(values) < 2,
        terminal=0.0,
        evaluations=draws * len(values),
        draws=draws,
        length=length,
    )


def running_mean(values: Tensor) -> tuple[Tensor, Tensor]:
    """Means of the first 2, 3, ... N values and the half-widths of their 95% intervals."""
    count = torch.arange(1, len(values) + 1, dtype=torch.float64)
    shifted = values - values[0]  # so that the difference of squares below keeps its digits
    mean = torch.cumsum(shifted, 0) / count
    variance = (torch.cumsum(shifted**2, 0) - count * mean**2).clamp_min(0) / (count - 1).clamp_min(1)
    quantile = torch.tensor([student_quantile(n) for n in range(1, len(values))], dtype=torch.float64)
    return (values[0] + mean)[1:], quantile * (variance / count).sqrt()[1:]


def mean_and_stderr(values: Tensor) -> tuple[float, float]:
    """The mean of independent values and its standard error (NaN for a single value)."""
    error = float(values.std() / math.sqrt(len(values))) if len(values) > 1 else math.nan
    return float(values.mean()), error


def skewness_of_mean(values: Tensor) -> float:
    """The skewness of the mean of independent values: that of the values over sqrt(N)."""
    centred = values - values.mean()
    spread = float(centred.square().mean())
    if not (math.isfinite(spread) and spread > 0):
        return 0.0
    return float(centred.pow(3).mean()) / spread**1.5 / math.sqrt(len(values))


def mean_interval(values: Tensor) -> Interval:
    """The 95% interval of the mean of the population of independent values."""
    mean, error = mean_and_stderr(values)
    return _interval(mean, error, len(values) - 1, skewness_of_mean(values))


def exp_or_inf(x: float) -> float:
    """e^x; infinity where that overflows float64, and NaN stays NaN."""
    return math.inf if x >= 700 else math.exp(x)


def shown(value: float, digits: int = 4) -> str:
    """The value with this number of decimals, or in scientific notation if it is large."""
    return f"{value:.{digits}f}" if value < 1e4 else f"{value:.4g}"


def _interval(centre: float, error: float, freedom: int, skewness: float = 0.0) -> Interval:
    if freedom < 1 or math.isnan(error):
        return (math.nan, math.nan)
    if error == 0:
        return centre, centre
    quantile = student_quantile(freedom)
    return centre - error * _untransformed(quantile, skewness), centre - error * _untransformed(-quantile, skewness)


def _untransformed(value: float, a: float) -> float:
    """The T with g(T) = value, as at the top of this file: 3/a ((1 + a (value - a/6))^(1/3) - 1)."""
    if abs(a) < 1e-6:
        return value
    return 3 / a * (math.cbrt(1 + a * (value - a / 6)) - 1)


def combined_freedom(errors: Sequence[tuple[float, int]]) -> int:
    """Degrees of freedom of the error of a sum of independent estimates, from the error and the degrees of freedom of
    each. By Welch and Satterthwaite it is (Σ v_i)² / Σ v_i² / freedom_i with v_i = error_i²."""
    least, variances = min((freedom for _, freedom in errors), default=0), [error**2 for error, _ in errors]
    if least < 1 or not sum(variances) > 0:
        return least
    return int(sum(variances) ** 2 / sum(v**2 / freedom for v, (_, freedom) in zip(variances, errors, strict=True)))


@cache
def student_quantile(freedom: int) -> float:
    """The t with P(|T| <= t) = 0.95 for Student's T with `freedom` >= 1 degrees of freedom."""
    if freedom < 1:
        raise ValueError(f"Student's t needs at least one degree of freedom (got {freedom})")
    if freedom > 200:  # Cornish and Fisher's expansion: the next term is below 1e-8
        z, n = _NORMAL_975, freedom
        first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
        return z + first / n + second / n**2 + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384 / n**3
    low, high = 0.0, 13.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_within(middle, freedom) < 0.95 else (low, middle)
    return (low + high) / 2


def _student_within(t: float, freedom: int) -> float:
    """P(|T| <= t) for a whole number of degrees of freedom (Abramowitz and Stegun 26.7.3, 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for k in range(1 + odd, freedom, 2):
        total += term
        term *= cosine**2 * k / (k + 1)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
