"""95% confidence intervals of statistics over independent texts, by the jackknife.

Shapes: N texts.

A statistic θ is a function of sums over texts. Leaving out text i changes it to θ₋ᵢ, and the pseudo-values

    pᵢ = θ + (N - 1) (θ - θ₋ᵢ)

behave like N independent values with mean θ; for a mean they are the values themselves. For means and ratios of sums
the interval is the one that the bounds use (Hall's transformation of Student's t, `cedd.bounds.estimate`), because
perplexities are skewed. For other statistics it is Student's: where θ is far from linear in a single unusual text,
its pseudo-value exaggerates the effect of the text, and Hall's correction would amplify that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from cedd.bounds.estimate import exp_or_inf, mean_and_stderr, mean_interval, student_quantile

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class IntervalEstimate:
    """A value and the ends of its 95% interval; both ends are None if there is none (with a single text, for
    example)."""

    value: float
    low: float | None
    high: float | None

    @property
    def ci95(self) -> tuple[float | None, float | None]:
        return self.low, self.high

    def exp(self) -> IntervalEstimate:
        """The exponential of the value and of both ends."""
        return self.mapped(exp_or_inf)

    def mapped(self, function: Callable[[float], float]) -> IntervalEstimate:
        """An increasing function of the value and of both ends."""
        low, high = (None if end is None else function(end) for end in self.ci95)
        return IntervalEstimate(function(self.value), low, high)


def interval_estimate(value: float, ends: tuple[float, float]) -> IntervalEstimate:
    """A value with an interval of `cedd.bounds`, whose ends are NaN if there is none."""
    low, high = (None if math.isnan(end) else end for end in ends)
    return IntervalEstimate(value, low, high)


def leave_one_out_sums(values: Floats, texts: int) -> Floats:
    """The sum of `values` [n], then the sums without text 0, 1, ..., texts - 1: [1 + texts], n <= texts."""
    total = values.sum()
    with np.errstate(invalid="ignore"):  # a judge may find a text impossible: inf - inf
        return np.concatenate([[total], total - values, np.full(texts - len(values), total)])


def jackknife(statistic: Floats, *, linear: bool = True) -> IntervalEstimate:
    """The interval of a statistic [1 + N]: its value, then its values with each of the N texts left out.

    `linear`: whether the statistic is a mean or a ratio of sums (see the module's docstring).
    """
    value, texts = float(statistic[0]), len(statistic) - 1
    if texts < 2 or not np.isfinite(statistic).all():
        return IntervalEstimate(value, None, None)
    influence = (texts - 1) * (value - statistic[1:])
    values = torch.from_numpy(value + influence - influence.mean())
    if linear:
        return interval_estimate(value, mean_interval(values))
    half = student_quantile(texts - 1) * mean_and_stderr(values)[1]
    return IntervalEstimate(value, value - half, value + half)
