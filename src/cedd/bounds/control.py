"""Control variates: variables with mean exactly zero that are correlated with the integrand and subtracted from it.

Shapes: N sequences, D draws each, L positions, C = 3 cases (same, moved, masked), Z variates, T targets.

Every draw belongs to one of two *halves*, each an independent design over all sequences. What is subtracted in half A
is computed from half B alone: the coefficients (least squares of B's values on B's variates) and the expected costs of
positions. Given B, the mean over A of what is subtracted is zero, so the estimate is exactly unbiased.

The variates of a draw with level weight dv, time weight dt and proposal odds (see times, proposal):

    time        dv P_k(2v - 1), k = 0..5 (less 1 for k = 0): they integrate to zero over u
    counts      dt [ 1/odds sum_i Omega_case / L  over the positions in one case  -  magnitude of the case ]
    positions   the same with each position weighted by e_i, the cost of position i beyond its case in half B
    tilted      the counts multiplied by another function of time, because Omega is approximate: 2v - 1, or 1/keep if
                masks may cost as much in pure noise as at any other time

Omega_case = magnitude / probability is the scale on which a position in that case costs something. For given t the
mean over x_t of the second and third is zero by construction. K + out-rate, the difference of J1 and J2, is a function
of counts and time and lies in the span of the counts, up to a factor of time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

TIME_DEGREE = 5
SHRINK = 4.0
"""Weight of the expectation for a position's whole sequence, in observations of the position."""
SHRINK_SEQUENCE = 20.0
"""Weight of the expectation for all sequences, in observations of the sequence."""
_ROWS_PER_VARIATE = 12
_LEAST_SIGHTINGS = 40
"""Number of draws in which a case must have occurred for its variates to be used. Coefficients of rarer cases would be
too noisy."""


@dataclass(frozen=True)
class HalfDraws:
    """All draws of one half, on the CPU: [N, D] float64 but where said otherwise."""

    values: Tensor  # [T, N, D], the integrands, weighted: their means over draws are unbiased for the path integrals
    v: Tensor
    dv: Tensor
    dt: Tensor
    odds: Tensor
    tilt: Tensor
    probability: Tensor  # [N, D, C]
    magnitude: Tensor  # [N, D, C]
    case: Tensor  # [N, D, L] int8
    cost: Tensor  # [N, D, L] float32

    @property
    def sightings(self) -> Tensor:
        """The number of draws in which each case occurs, [C]."""
        return torch.stack([(self.case == case).any(-1).sum() for case in range(3)])

    @property
    def omega(self) -> Tensor:
        """magnitude / probability, [N, D, C]; 0 for a case that does not occur."""
        return torch.where(self.magnitude > 0, self.magnitude / self.probability.clamp_min(1e-300), 0.0)


def legendre(x: Tensor, degree: int) -> Tensor:
    """P_0(x) .. P_degree(x) in the last dimension."""
    terms = [torch.ones_like(x), x]
    for k in range(1, degree):
        terms.append(((2 * k + 1) * x * terms[k] - k * terms[k - 1]) / (k + 1))
    return torch.stack(terms[: degree + 1], -1)


def expectations(half: HalfDraws) -> Tensor:
    """e [N, L, C]: the cost of each position in each case, in units of Omega, beyond a parabola in v that is fitted to
    all sequences; shrunk to the sequence's own excess, and that to zero."""
    n, _, length = half.case.shape
    result = torch.zeros(n, length, 3, dtype=torch.float64)
    omega = half.omega
    for case in range(3):
        here = half.case == case
        scale = omega[..., case]
        seen = here.sum(-1).double()  # [N, D]
        weight = torch.where(scale > 0, seen, 0.0).reshape(-1)
        if float(weight.sum()) == 0:
            continue
        cost = torch.where(here, half.cost.double() / torch.where(scale > 0, scale, 1.0)[..., None], 0.0)
        design = legendre(2 * half.v.reshape(-1) - 1, 2)
        mean = cost.sum(-1).reshape(-1) / seen.reshape(-1).clamp_min(1)
        curve = (design @ _least_squares(design, mean, weight)).reshape(half.v.shape)
        excess = torch.where(here, cost - curve[..., None], 0.0)
        sightings = here.double().sum(1)  # [N, L]
        of_sequence = excess.sum((1, 2)) / (sightings.sum(1) + SHRINK_SEQUENCE)
        result[..., case] = (excess.sum(1) + SHRINK * of_sequence[:, None]) / (sightings + SHRINK)
    return result


_CASE_OF_COLUMN = torch.tensor([-1] * 3 + [0, 1, 2] * 2 + [-1] * (TIME_DEGREE - 2) + [0, 1, 2])
"""The case of each column of `variates`; -1 for those of time."""


def variates(half: HalfDraws, expected: Tensor) -> Tensor:
    """[N, D, Z], for expectations [N, L, C] from the draws of the other half."""
    time = half.dv[..., None] * legendre(2 * half.v - 1, TIME_DEGREE)
    time[..., 0] -= 1
    counts = _centred(half, torch.ones(1, half.case.shape[-1], 3, dtype=torch.float64))
    tilted = counts * half.tilt[..., None]
    # The most useful ones first: those at the end are omitted if there are few draws.
    return torch.cat([time[..., :3], _centred(half, expected), counts, time[..., 3:], tilted], -1)


def _centred(half: HalfDraws, expected: Tensor) -> Tensor:
    """dt [ 1/odds sum_i Omega e_i / L - magnitude mean(e) ] for each case: [N, D, C]."""
    length = half.case.shape[-1]
    sums = [
        torch.where(half.case == case, expected[:, None, :, case], 0.0).sum(-1) / length  # [N, D]
        for case in range(3)
    ]
    found = half.omega * torch.stack(sums, -1) / half.odds[..., None]
    return half.dt[..., None] * (found - half.magnitude * expected.mean(1)[:, None])


def _least_squares(design: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
    """Coefficients [Z] of target [M] on design [M, Z]; a small ridge penalty handles equal columns."""
    scale = design.std(0).clamp_min(1e-300) if weight is None else torch.ones(design.shape[1], dtype=torch.float64)
    scaled = design / scale
    left = scaled if weight is None else scaled * weight[:, None]
    ridge = 1e-6 * float((left * scaled).sum(0).mean()) + 1e-300
    gram = left.T @ scaled + ridge * torch.eye(design.shape[1], dtype=torch.float64)
    solution = cast(Tensor, torch.linalg.solve(gram, left.T @ target))  # pyright: ignore[reportUnknownMemberType]
    return solution / scale


def often_seen(sightings: Tensor) -> Tensor:
    """The columns of `variates` whose case occurs often enough, by the counts [C]: [Z] bool."""
    return (_CASE_OF_COLUMN < 0) | (sightings >= _LEAST_SIGHTINGS)[_CASE_OF_COLUMN]


def coefficients(value: Tensor, variate: Tensor, usable: Tensor) -> Tensor:
    """Least squares of values [M] on variates [M, Z], about their sample means: [Z], 0 for columns that are left out.

    Columns beyond a twelfth of the number of values are left out (the last first), as are those that do not vary or are
    not usable [Z].
    """
    result = torch.zeros(variate.shape[1], dtype=torch.float64)
    if len(value) < _ROWS_PER_VARIATE or not bool(torch.isfinite(value).all()):
        return result
    # For absorb the variates of counts are zero except for rounding, because its odds are the count itself.
    varies = variate.std(0) > 1e-6 * value.std()
    chosen = (varies & usable).nonzero().squeeze(-1)[: len(value) // _ROWS_PER_VARIATE]
    if len(chosen):
        columns = variate[:, chosen]
        result[chosen] = _least_squares(columns - columns.mean(0), value - value.mean())
    return result
