"""Integrals over one variable to a stated tolerance: adaptive Gauss-Legendre panels, all of them at once.

Each panel is integrated with 7 and with 16 nodes; a panel whose two answers agree, and whose ends are where its 16
nodes say they are, is accepted, the others are halved. A kink or a jump costs a few dozen tiny panels around it and
nothing elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

Integrand = Callable[[Tensor], Tensor]
_MAX_HALVINGS = 60
_AT_ONCE = ((8, 7), (256, 3))
"""Up to how many goals a bisection halves an interval how many times in one call."""


@cache
def gauss_legendre(nodes: int) -> tuple[Tensor, Tensor]:
    """Nodes and weights on [0, 1]."""
    x, w = np.polynomial.legendre.leggauss(nodes)
    return torch.from_numpy((x + 1) / 2), torch.from_numpy(w / 2)


@cache
def _to_the_ends(nodes: int) -> Tensor:
    """[2, nodes]: what the polynomial through the nodes' values is at 0 and at 1 (Lagrange)."""
    x, _ = gauss_legendre(nodes)
    rows = [[math.prod((end - float(o)) / float(n - o) for o in x if o != n) for n in x] for end in (0.0, 1.0)]
    return torch.tensor(rows, dtype=torch.float64)


def integrate_panels(f: Integrand, lo: Tensor, hi: Tensor, nodes: int = 16) -> Tensor:
    """The integral of f over each panel [lo_k, hi_k], by one Gauss-Legendre rule; shape of lo."""
    x, w = gauss_legendre(nodes)
    points = lo[..., None] + (hi - lo)[..., None] * x
    return (f(points) * w).sum(-1) * (hi - lo)


@dataclass(frozen=True)
class Panels:
    """Accepted panels of one integral, in order: edges [K+1] and the integral up to each edge [K+1]."""

    edges: Tensor
    cumulative: Tensor

    @property
    def total(self) -> float:
        return float(self.cumulative[-1])

    def up_to(self, f: Integrand, x: Tensor) -> Tensor:
        """The integral of f from the first edge to x (elementwise): whole panels from the table, then the rest."""
        k = (torch.searchsorted(self.edges, x.contiguous(), right=True) - 1).clamp(0, len(self.edges) - 2)
        return self.cumulative[k] + integrate_panels(f, self.edges[k], x)


def adaptive_panels(f: Integrand, lo: float, hi: float, tolerance: float = 1e-12) -> Panels:
    """Panels on [lo, hi] over which f integrates to within `tolerance` (absolute, relative above one)."""
    if not hi > lo:
        zero = torch.zeros(2, dtype=torch.float64)
        return Panels(torch.tensor([lo, hi], dtype=torch.float64), zero)
    edges = torch.linspace(lo, hi, 9, dtype=torch.float64)
    left, right = edges[:-1], edges[1:]
    accepted: list[tuple[Tensor, Tensor, Tensor]] = []
    for _ in range(_MAX_HALVINGS):
        width = right - left
        # 7 and not 8: two even rules both cut a jump near the middle of the panel in half, and agree on it.
        coarse = integrate_panels(f, left, right, nodes=7)
        x, w = gauss_legendre(16)
        values = f(left[:, None] + width[:, None] * x)
        fine = (values * w).sum(-1) * width
        if not bool(torch.isfinite(fine).all()):
            raise ValueError("the integrand is not finite on the interval")
        # A jump between the last node and the end is seen by no rule: ask the integrand there.
        ends = f(torch.stack([left + 1e-9 * width, right - 1e-9 * width], -1))
        unseen = (ends - values @ _to_the_ends(16).T).abs().sum(-1) * x[0] * width
        # A panel's share of the tolerance is its share of the interval, but never below rounding.
        share = tolerance * (1 + fine.abs()) * (width / (hi - lo)).clamp_min(1e-4)
        done = ((coarse - fine).abs() + unseen <= share) | (width <= 1e-15 * (hi - lo))
        accepted.append((left[done], right[done], fine[done]))
        left, right = left[~done], right[~done]
        if left.numel() == 0:
            break
        middle = (left + right) / 2
        left, right = torch.cat([left, middle]), torch.cat([middle, right])
    else:
        raise ValueError("the integral did not converge: the integrand is too rough")
    starts, ends, values = (torch.cat(parts) for parts in zip(*accepted, strict=True))
    order = torch.argsort(starts)
    zero = torch.zeros(1, dtype=torch.float64)
    return Panels(
        edges=torch.cat([starts[order], ends[order][-1:]]), cumulative=torch.cat([zero, torch.cumsum(values[order], 0)])
    )


def integrate(f: Integrand, lo: float, hi: float, tolerance: float = 1e-12) -> float:
    """The integral of f (vectorised, float64) over [lo, hi]."""
    total = adaptive_panels(f, lo, hi, tolerance).total
    if not math.isfinite(total):
        raise ValueError("the integral is not finite")
    return total


def bisect(rising: Callable[[Tensor], Tensor], goal: Tensor, low: float, high: float, halvings: int = 500) -> Tensor:
    """Where a function that rises on [low, high] reaches each goal, from above.

    A call of the function takes as long for one number as for hundreds: few goals have several halvings at once.
    """
    below, above = torch.full_like(goal, low), torch.full_like(goal, high)
    at_once = next((halved for most, halved in _AT_ONCE if goal.numel() <= most), 1)
    cuts = torch.arange(2**at_once + 1, dtype=goal.dtype, device=goal.device) / 2**at_once
    for _ in range(-(-halvings // at_once)):
        points = torch.lerp(below[..., None], above[..., None], cuts)
        place = (rising(points[..., 1:-1]) < goal[..., None]).sum(-1, keepdim=True)
        ends = points.gather(-1, place).squeeze(-1), points.gather(-1, place + 1).squeeze(-1)
        if torch.equal(ends[0], below) and torch.equal(ends[1], above):  # no number lies between them
            break
        below, above = ends
    return above
