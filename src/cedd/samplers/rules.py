"""Step rules: the law of one step back from t to s, as data. The loop is written once and asks the rule only.

Shapes: [*S] any common shape of positions, V vocabulary, n states; K steps of a time grid.

A rule says the same thing twice. For a network that gives probabilities f (Denoiser, Bayes), a `Leap`: four numbers a
position, of which only `stay` needs the network, and of it only f at the token that is there:

    p(stays) = stay,    p(is masked again) = remask,    p(becomes y != x) proportional to max(floor + slope f_y, 0).

For a network that gives ratios (Score), the whole law over the n states.

    analytic       the exact reverse step for the ratios at t:  P(x|z) (e^{-dQ} s)(z)
    euler          h Q_t(x, y) s_y, cut off where the sum exceeds 1
    tau-leaping    the same rates frozen over the step:  p(jumps) = 1 - exp(-h sum_y Q_t(x, y) s_y)

Discrete flow matching has rules of its own (`flow_rules`): its velocity moves every position towards the prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from cedd.bounds.flow_matching import Corrector
from cedd.parameterization import Affine, AffineScore, Parameterization, put_at_token, settle_step
from cedd.process import Kernel, Noise

_TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True)
class Leap:
    """One step of positions [*S], float64.

    Args:
        stay: the probability that a position stays as it is.
        remask: that a token is masked again; 0 at a mask.
        floor: p(becomes y) is proportional to max(floor + slope f_y, 0), for every token y that is not there.
        slope: see `floor`.
    """

    stay: Tensor
    remask: Tensor
    floor: Tensor
    slope: Tensor


AffineLaw = Callable[[AffineScore, Noise], Leap]
DenseLaw = Callable[[Parameterization, Tensor, Tensor, Noise, Noise], Tensor]


@dataclass(frozen=True)
class StepRule:
    """The law of a step, said twice.

    Args:
        name: what the table and error messages call it.
        leap: the law for networks that give probabilities, from what is known of the step and f at the token that is
            there.
        law: the law for any outputs, over the n states; `from_leap` makes it of the leap.
    """

    name: str
    leap: AffineLaw
    law: DenseLaw

    @staticmethod
    def from_leap(name: str, leap: AffineLaw) -> StepRule:
        """A rule for networks that give probabilities only, which is all that a leap needs."""

        def law(
            parameterization: Parameterization, outputs: Tensor, x_t: Tensor, noise: Noise, earlier: Noise
        ) -> Tensor:
            if not isinstance(parameterization, Affine):
                raise ValueError(
                    f"the sampler {name!r} needs probabilities, and this method's network gives ratios; "
                    "use cedd, bayes or dfm, or sampler='analytic'"
                )
            log_probs = torch.log_softmax(outputs, -1)
            return leap_law(leap(parameterization.score(log_probs, x_t, noise), earlier), log_probs.exp(), x_t, noise)

        return StepRule(name, leap, law)


# ----------------------------------------------------------------------------------------------------------------
# What is known of a step without the network


@dataclass(frozen=True)
class Chances:
    """Probabilities of each of K steps that need no network, float64 [K].

    reveal: that a mask becomes a token.    remask: that a token is masked again.
    change: the most with which a token can become anything else, whatever the network says.
    """

    reveal: Tensor
    remask: Tensor
    change: Tensor

    def at(self, k: int) -> tuple[float, float, float]:
        """reveal, remask and change of step k."""
        return float(self.reveal[k]), float(self.remask[k]), float(self.change[k])

    def where(self, condition: Tensor, other: Chances) -> Chances:
        """These chances in the steps where `condition` [K] holds, the others' elsewhere."""
        return Chances(
            torch.where(condition, self.reveal, other.reveal),
            torch.where(condition, self.remask, other.remask),
            torch.where(condition, self.change, other.change),
        )


def chances(rule: StepRule, parameterization: Affine, noise: Noise, earlier: Noise) -> Chances:
    """The chances of the steps from noise [K] to earlier [K].

    `stay` of a token is a linear or a Moebius function of f_x, hence monotone: its least value is at f_x = 0 or 1.
    """
    token = torch.zeros_like(noise.t, dtype=torch.int64)

    def leap(x: Tensor, log_prob: float) -> Leap:
        log_prob_x = torch.full_like(noise.t, log_prob)
        return rule.leap(parameterization.coefficients(log_prob_x, x, noise), earlier)

    doubtful, certain = leap(token, -torch.inf), leap(token, 0.0)
    change = 1 - torch.minimum(doubtful.stay, certain.stay)
    if not noise.has_mask:
        return Chances(torch.zeros_like(change), torch.zeros_like(change), change)
    reveal = 1 - leap(torch.full_like(token, noise.vocab_size), 0.0).stay
    # Clean data have no masks: a step to t = 0 reveals all of them, not all but one in 10^16.
    reveal = torch.where(earlier.t == 0, 1.0, reveal)
    return Chances(reveal, doubtful.remask, change)


def leap_law(leap: Leap, probs: Tensor, x_t: Tensor, noise: Kernel) -> Tensor:
    """A leap as a law over the n states, [*S, n], for probabilities f [*S, V]."""
    masked = noise.is_mask(x_t)
    jumps = (leap.floor.to(probs)[..., None] + leap.slope.to(probs)[..., None] * probs).clamp_min(0.0)
    jumps = put_at_token(jumps, x_t, 0.0, masked)
    stay, remask = leap.stay.to(probs), leap.remask.to(probs)
    stay = torch.where((jumps > 0).any(-1), stay, 1 - remask)
    law = put_at_token(settle_step(stay + remask, jumps), x_t, stay, masked)
    return torch.cat([law, torch.where(masked, stay, remask)[..., None]], -1) if noise.has_mask else law


# ----------------------------------------------------------------------------------------------------------------
# The reverse process of a token process


def _analytic_leap(score: AffineScore, earlier: Noise) -> Leap:
    law = score.reverse(earlier)
    return Leap(law.stay, torch.zeros_like(law.stay), law.floor, law.slope)


def _analytic_law(
    parameterization: Parameterization, outputs: Tensor, x_t: Tensor, noise: Noise, earlier: Noise
) -> Tensor:
    return parameterization.reverse_step(outputs, x_t, noise, earlier)


def _leap_by_rates(score: AffineScore, earlier: Noise, stay: Callable[[Tensor], Tensor]) -> Leap:
    noise, masked = score.noise, score.masked
    forward = torch.where(masked, noise.alpha_rate, noise.beta_rate / noise.vocab_size) * (noise.t - earlier.t)
    possible = masked | (noise.beta > 0)
    nothing = torch.zeros_like(forward)
    total = torch.where(possible, forward * score.others(), nothing)
    floor = torch.where(possible, forward * torch.exp(score.log_base), nothing)
    slope = torch.where(possible, forward * torch.exp(score.log_gain), nothing)
    return Leap(stay(total), nothing, floor, slope)


def _law_by_rates(
    parameterization: Parameterization,
    outputs: Tensor,
    x_t: Tensor,
    noise: Noise,
    earlier: Noise,
    stay: Callable[[Tensor], Tensor],
) -> Tensor:
    masked = noise.is_mask(x_t)
    rates = parameterization.jump_rates(outputs, x_t, noise)
    jumps = (noise.t - earlier.t).to(rates)[..., None] * rates
    staying = stay(jumps.sum(-1))
    law = put_at_token(settle_step(staying, jumps), x_t, staying, masked)
    return torch.cat([law, torch.where(masked, staying, 0.0)[..., None]], -1) if noise.has_mask else law


def _at_most_one(total: Tensor) -> Tensor:
    """Euler: p(stays) = 1 - h sum of rates, cut off at 0."""
    return (1 - total).clamp_min(0.0)


def _frozen(total: Tensor) -> Tensor:
    """Rates frozen over the step: p(stays) = exp(-h sum of rates)."""
    return torch.exp(-total)


def _rule_by_rates(name: str, stay: Callable[[Tensor], Tensor]) -> StepRule:
    return StepRule(
        name,
        lambda score, earlier: _leap_by_rates(score, earlier, stay),
        lambda parameterization, outputs, x_t, noise, earlier: _law_by_rates(
            parameterization, outputs, x_t, noise, earlier, stay
        ),
    )


RULES: Mapping[str, StepRule] = {
    "analytic": StepRule("analytic", _analytic_leap, _analytic_law),
    "euler": _rule_by_rates("euler", _at_most_one),
    "tau-leaping": _rule_by_rates("tau-leaping", _frozen),
}

# ----------------------------------------------------------------------------------------------------------------
# Discrete flow matching


def _integrated_hazards(noise: Noise, earlier: Noise) -> tuple[Tensor, Tensor]:
    """The integrals over the step of kappa'/(1-kappa) and of kappa'/kappa, kappa = alive."""
    return torch.log(noise.a) - torch.log(earlier.a), noise.alpha - earlier.alpha


def _euler_hazards(noise: Noise, earlier: Noise) -> tuple[Tensor, Tensor]:
    """The same at the rates of t: h kappa'/(1-kappa) and h kappa'/kappa."""
    rate = (noise.t - earlier.t) * noise.alpha_rate
    return rate / noise.expm1_alpha.clamp_min(_TINY), rate


def _flow_rule(
    name: str,
    corrector: Corrector | None,
    hazards: Callable[[Noise, Noise], tuple[Tensor, Tensor]],
    happens: Callable[[Tensor], Tensor],
) -> StepRule:
    """With probability q a position is redrawn from f, with probability r a token is masked again."""

    def leap(score: AffineScore, earlier: Noise) -> Leap:
        noise = score.noise
        towards, away = hazards(noise, earlier)
        excess = corrector.excess(noise.t) if corrector is not None else torch.zeros_like(noise.t)
        redraw, mask = (1 + excess) * towards, torch.where(score.masked, 0.0, excess * away)
        event = happens(redraw + mask)
        share = torch.where(torch.isinf(redraw), 0.0, mask / (redraw + mask).clamp_min(_TINY))
        q, r = event * (1 - share), event * share
        elsewhere = torch.where(score.masked, 1.0, -torch.expm1(score.log_prob_x))
        return Leap((1 - r - q * elsewhere).clamp(0.0, 1.0), r, torch.zeros_like(q), q)

    return StepRule.from_leap(name, leap)


def flow_rules(corrector: Corrector | None = None) -> Mapping[str, StepRule]:
    """The rules of discrete flow matching from a mask source, with or without its corrector.

    The velocity kappa'/(1-kappa) (f - [x]) redraws every position from f, masked or not; a corrector multiplies it by
    1 + b and masks tokens again at the rate b kappa'/kappa (paper, end of appendix B). `analytic` integrates the
    hazards over the step (without a corrector a mask is revealed with exactly 1 - a_s/a_t), `euler` takes them at t.
    """

    def at_least_one(total: Tensor) -> Tensor:
        return -torch.expm1(-total)

    def cut_off(total: Tensor) -> Tensor:
        return total.clamp_max(1.0)

    return {
        "analytic": _flow_rule("analytic", corrector, _integrated_hazards, at_least_one),
        "euler": _flow_rule("euler", corrector, _euler_hazards, cut_off),
        "tau-leaping": _flow_rule("tau-leaping", corrector, _euler_hazards, at_least_one),
    }
