"""Score entropy: the part of the path integrand that the network can change (SEDD, SEDDs).

Per position, with r_y = p(y|x0) / p(x_t|x0) and lbar = s - r log s, summed over y != x_t with the forward rates:

    masked:            alpha'   [ sum_y s_y     - (b/a) sum_y log s_y         - (keep/a) log s_{x0} ]
    unmasked, x = x0:  beta'/V  [ sum_{y!=x} s_y - E/(E+V) sum_{y!=x} log s_y ]
    unmasked, x != x0: beta'/V  [ sum_{y!=x} s_y - sum_{y!=x} log s_y          - (V/E) log s_{x0} ]

All three are  rate [ sum s - common sum log s - extra log s_{x0} ]  with three numbers per position.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cedd.network import HeadLosses, ScoreRows
from cedd.objectives.objective import ClosedForm, Objective, Rows
from cedd.parameterization import TINY, Parameterization, at_token, can_jump, put_at_token, shifted_outputs
from cedd.process import Noise


@dataclass(frozen=True)
class TrueRatios:
    """The conditional ratios r_y at a position as three numbers; all [*S] float64.

    rate: the forward rate Q_t(x_t, y), the same for every token y != x_t;
    common: r_y for y not in {x_t, x0};  extra: r_{x0} - common, 0 where x_t = x0.
    """

    rate: Tensor
    common: Tensor
    extra: Tensor

    def cost(self, sum_s: Tensor, sum_log_s: Tensor, log_s_x0: Tensor, possible: Tensor) -> Tensor:
        """rate [ sum s - common sum log s - extra log s_{x0} ], the sums over y != x_t; 0 where it is not possible to
        leave x_t. A token with log s = -inf has no cost if common is 0."""
        others = torch.where(self.common > 0, self.common * sum_log_s, 0.0)
        return torch.where(possible, self.rate * (sum_s - others - self.extra * log_s_x0), 0.0)


def true_ratios(x_t: Tensor, x0: Tensor, noise: Noise) -> TrueRatios:
    """rate, common and extra at the top of this file."""
    V, masked, same = noise.vocab_size, noise.is_mask(x_t), x_t == x0
    e = noise.expm1_beta
    expm1_alpha = noise.expm1_alpha.clamp_min(TINY)
    b_over_a = -torch.expm1(-noise.beta) / (V * expm1_alpha)
    keep_over_a = torch.exp(-noise.beta) / expm1_alpha
    return TrueRatios(
        rate=noise.forward_rate(masked),
        common=torch.where(masked, b_over_a, torch.where(same, e / (e + V), 1.0)),
        extra=torch.where(masked, keep_over_a, torch.where(same, 0.0, V / e.clamp_min(TINY))),
    )


def score_entropy(log_ratios: Tensor, x0: Tensor, x_t: Tensor, noise: Noise) -> Tensor:
    """lbar of each position: log_ratios [*S, V], x0, x_t [*S], noise of shape [*S] -> [*S] of the noise's type.

    The entry of log_ratios at x_t itself is ignored. Positions that the process cannot leave have no cost. A token with
    log s = -inf has no cost if its true ratio is 0, and an infinite one otherwise.
    """
    masked, possible = noise.is_mask(x_t), can_jump(x_t, noise)
    ratios = true_ratios(x_t, x0, noise)
    wide = ratios.rate.dtype  # float64, where the device has it
    log_s = put_at_token(torch.where(possible[..., None], log_ratios, 0.0), x_t, 0.0, masked)
    sum_s = torch.exp(log_s).sum(-1, dtype=wide) - (~masked).to(wide)  # the entry at x_t is exp(0) = 1
    return ratios.cost(sum_s, log_s.sum(-1, dtype=wide), at_token(log_s, x0).to(wide), possible)


@dataclass(frozen=True)
class ScoreEntropyRows(ClosedForm):
    """weight [N] times the score entropy with the numbers of each row."""

    numbers: ScoreRows
    weight: Tensor

    def total(self, head: HeadLosses, features: Tensor, shares: Tensor) -> Tensor:
        return head.score_entropy(features, self.numbers, self.weight * shares).total


@dataclass(frozen=True)
class ScoreEntropy(Objective):
    """The score entropy of any parameterization, on any process."""

    def row_loss(self, parameterization: Parameterization, outputs: Tensor, rows: Rows) -> Tensor:
        log_ratios = parameterization.log_ratios(outputs, rows.x_t, rows.noise)
        return score_entropy(log_ratios, rows.x0, rows.x_t, rows.noise)

    def closed_form(self, parameterization: Parameterization, rows: Rows) -> ScoreEntropyRows | None:
        """The record for a fused head, if the outputs are log-ratios up to one number per row."""
        meaning = shifted_outputs(parameterization)
        if meaning is None:
            return None
        ratios = true_ratios(rows.x_t, rows.x0, rows.noise)
        shift = meaning.shift(rows.x_t, rows.noise)
        numbers = ScoreRows(target=rows.x0, skip=rows.x_t, shift=shift, common=ratios.common, extra=ratios.extra)
        return ScoreEntropyRows(numbers, torch.where(can_jump(rows.x_t, rows.noise), ratios.rate, 0.0))
