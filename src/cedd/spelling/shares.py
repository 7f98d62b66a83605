"""Shares of mistakes, with intervals.

Shapes: N blocks.

Mistakes in one block share its words, so blocks are the independent units of an interval.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from cedd.bounds.estimate import Interval, student_quantile
from cedd.storage import JSONObject


@dataclass(frozen=True)
class Share:
    """`hits` out of `totals`, per block: [N] int64 each."""

    hits: Tensor
    totals: Tensor

    def __add__(self, other: Share) -> Share:
        """Both kinds together, block by block."""
        return Share(self.hits + other.hits, self.totals + other.totals)

    @property
    def count(self) -> int:
        return int(self.hits.sum())

    @property
    def total(self) -> int:
        return int(self.totals.sum())

    @property
    def value(self) -> float:
        """The ratio estimate: all hits divided by all totals."""
        return self.count / self.total if self.total else math.nan

    @property
    def stderr(self) -> float:
        """Standard error of the ratio R = sum h / sum m over N independent blocks: sqrt(N/(N-1) sum (h - R m)^2) / sum
        m."""
        blocks = len(self.hits)
        if blocks < 2 or not self.total:
            return math.nan
        residuals = self.hits.double() - self.value * self.totals.double()
        return math.sqrt(blocks / (blocks - 1) * float((residuals**2).sum())) / self.total

    @property
    def ci95(self) -> Interval:
        """Wilson's interval for the effective number of independent trials with this standard error, at most the total.

        Unlike value +- 2 stderr it stays within [0, 1] and has a positive width if nothing, or everything, was hit.
        """
        value, error, blocks = self.value, self.stderr, len(self.hits)
        if math.isnan(error):
            return math.nan, math.nan
        count = min(self.total, value * (1 - value) / error**2) if error > 0 else self.total
        squared = student_quantile(blocks - 1) ** 2 / count
        centre = (value + squared / 2) / (1 + squared)
        half = math.sqrt(squared * (value * (1 - value) + squared / 4)) / (1 + squared)
        return max(0.0, centre - half), min(1.0, centre + half)

    def record(self) -> JSONObject:
        """As JSON, with null for undefined numbers."""
        numbers = {"share": self.value, "stderr": self.stderr, "low": self.ci95[0], "high": self.ci95[1]}
        finite = {name: round(x, 6) if math.isfinite(x) else None for name, x in numbers.items()}
        return {**finite, "count": self.count, "total": self.total}
