"""Parameterizations: the meaning of a network's outputs as ratios, rates, reverse steps and posteriors.

Shapes: outputs [*S, V] (no mask column), x_t [*S], and a Noise whose fields have the shape [*S] (rows or [B, L]).

A parameterization defines the log-ratios log s_y ~ log p_t(y) / p_t(x_t) for every token y != x_t:

    Score         log s_y = o_y                                                                   (SEDD)
    ScaledScore   log s_y = o_y + log mean_h p(y|h) / p(x|h)                                      (SEDDs)
    Denoiser      s_y = sum_h f_h p(y|h) / p(x|h),   f = softmax(o) is p(x_0 | x_t)               (CEDD)
    Bayes         s_y = m(y) / m(x),  m(y) = sum_h g_h p(y|h),  g = softmax(o) is p(x_0 at i | x_t at all
                  other positions)                                                                (leave-one-out)

The last two are affine in their probabilities, s_y = base + gain f_y, where base and gain depend on one output only,
the probability of the current token. This is what makes samplers cheap.

All vectors of shape [*S] are float64; tensors of shape [*S, V] have the dtype of the outputs.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import softplus

from cedd.parts import Part, Table
from cedd.process import Kernel, Noise, TokenProcess
from cedd.row_sums import at_token, full_precision, log_probabilities, log_sum_exp, put_at_token
from cedd.schedules import double

TINY = torch.finfo(torch.float64).tiny  # lower limit of denominators
_LIFTED_BELOW, _LIFT = 0.5, 1.1  # the paper's rescaling of sigma for processes with a mask
_MAX_LOG_RATE = 80.0  # scores of an untrained network may be arbitrarily large; exp of this is well within float32


def _log_expm1(x: Tensor) -> Tensor:
    """log(exp(x) - 1) for x >= 0; finite at 0 (about -708) and where exp(x) overflows."""
    return torch.where(x > 40.0, x, torch.log(torch.expm1(x.clamp_max(40.0)).clamp_min(TINY)))


def _log_redrawn(beta: Tensor) -> Tensor:
    """log(1 - exp(-beta)): the probability of a redraw; -inf at 0."""
    return torch.log(-torch.expm1(-beta))


def can_jump(x_t: Tensor, noise: Kernel) -> Tensor:
    """Positions at which the reverse process can leave x_t: masks, and tokens that may have been shuffled. [*S]
    bool."""
    return noise.is_mask(x_t) | (noise.beta > 0).to(x_t.device)


def step_law(stay: Tensor, remask: Tensor, jumps: Tensor, x_t: Tensor, noise: Kernel) -> Tensor:
    """The distribution of one step over the n states, [*S, n]: stay, be masked again, or jump.

    An imperfect score can give negative jump probabilities [*S, V]. They are set to zero, and the others are scaled to
    the probability that is not taken by staying and remasking; a position without a possible jump stays.
    """
    masked = noise.is_mask(x_t)
    jumps = put_at_token(jumps.clamp_min(0.0), x_t, 0.0, masked)
    total = jumps.sum(-1)
    stay, remask = stay.to(jumps), remask.to(jumps)
    stay = torch.where(total > 0, stay, 1 - remask)
    scale = torch.where(total > 0, (1 - (stay + remask)) / total.clamp_min(torch.finfo(total.dtype).tiny), 0.0)
    law = put_at_token(jumps * scale[..., None], x_t, stay, masked)
    return torch.cat([law, torch.where(masked, stay, remask)[..., None]], -1) if noise.has_mask else law


PARAMETERIZATIONS: dict[str, type[Parameterization]] = {}
"""The parameterizations by name; add your own here."""


class Parameterization(Part, ABC):
    """The meaning of a network's outputs o [*S, V] at noisy tokens x_t [*S].

    It defines the ratios s_y ~ p_t(y) / p_t(x_t) for every token y; a, b, keep and E are those of `Kernel`.
    """

    table: ClassVar[Table] = Table("parameterization", "cedd.parameterization.PARAMETERIZATIONS", PARAMETERIZATIONS)

    meaning: ClassVar[str] = "of another kind"
    """The meaning of the outputs, in words. A network can be trained further with a method of the same meaning."""
    vanishes_in_noise: ClassVar[bool] = False
    """Whether the ratios at a mask decrease like keep/a for every network, as the true ones do."""

    @abstractmethod
    def log_ratios(self, outputs: Tensor, x_t: Tensor, noise: Noise) -> Tensor:
        """log s_y for y != x_t, finite everywhere; the entry at x_t itself is not defined."""

    @abstractmethod
    def log_posterior(self, outputs: Tensor, x_t: Tensor, noise: Noise) -> Tensor:
        """log p(x_0 | x_t), normalized over the V tokens."""

    def log_reconstruction(self, outputs: Tensor, x_t: Tensor, noise: Noise) -> Tensor:
        """The log of the distribution of x_0 given x_t at the end of a path that stops before t = 0, normalized over
        the V tokens: the posterior, in a form that gives every possible token a positive probability."""
        return self.log_posterior(outputs, x_t, noise)

    def stops_short(self, process: TokenProcess) -> bool:
        """Whether the ratios at clean tokens grow like 1/t for every network. The path then has to stop before t = 0,
        because the expected number of jumps down to it is infinite."""
        del process
        return False

    def kinks(self, process: TokenProcess) -> tuple[float, ...]:
        """The sigmas at which the ratios are not smooth in time, for the nodes of integrals."""
        del process
        return ()

    def log_scores(self, outputs: Tensor, x_t: Tensor, noise: Noise) -> Tensor:
        """log s_y with the known entries filled in: 0 at x_t, -inf where the process cannot jump back."""
        ratios = self.log_ratios(outputs, x_t, noise)
        possible = can_jump(x_t, noise)[..., None]
        ratios = torch.where(possible, ratios, -math.inf)
        return put_at_token(ratios, x_t, 0.0, noise.is_mask(x_t))

    def jump_rates(self, outputs: Tensor, x_t: Tensor, noise: Noise) -> Tensor:
        """Reverse rates Q_t(x_t, y) s_y from x_t to each token y, 0 at x_t itself: alpha' s_y at a mask,
        beta'/V s_y at a token. The reverse process never jumps to the mask."""
        masked = noise.is_mask(x_t)
        forward = noise.forward_rate(masked)
        scores = torch.exp(self.log_scores(outputs, x_t, noise).clamp_max(_MAX_LOG_RATE))
        return put_at_token(forward.to(scores)[..., None] * scores, x_t, 0.0, masked)

    def reverse_step(self, outputs: Tensor, x_t: Tensor, noise: Noise, earlier: Noise) -> Tensor:
        """p(x_s | x_t) over the n states, by the ratios at t: P(x_t | z) (e^{-dQ} s)(z). [*S, n].

            (e^{-dQ} s)(z) = exp(dalpha + dbeta) [s_z - (1 - exp(-dbeta)) S/V],    S the sum of s over all tokens

        For a perfect network this is Bayes' rule. For an imperfect one the probability of staying is kept, and the
        jumps share the rest (see `step_law`). A step with a large dbeta takes differences of ratios that are all close
        to one, and multiplies their rounding errors by exp(dbeta); use more steps there.
        """
        step = noise.since(earlier)
        masked = noise.is_mask(x_t)
        log_scores = self.log_scores(outputs, x_t, noise)
        # Scores relative to the largest, so that no exponential overflows; the jumps are scaled at the end.
        unit = log_scores.amax(-1).clamp_min(0.0)
        scores = torch.exp(log_scores - unit[..., None])
        total = double(scores.sum(-1)) * torch.exp(double(unit))
        beta = _resolvable(step.beta, scores.dtype)
        stay = _stay(total, masked, step, beta)
        return step_law(stay, torch.zeros_like(stay), _beyond_common(scores, beta), x_t, noise)


def _stay(total: Tensor, masked: Tensor, step: Kernel, beta: Tensor) -> Tensor:
    """The probability of staying in a `reverse_step`, for the sum S of the ratios over all tokens."""
    V = step.vocab_size
    at_mask = 1 - step.expm1_alpha * total
    at_token = (1 + torch.expm1(beta) / V) * (1 + torch.expm1(-beta) * total / V)
    return torch.where(masked, at_mask, at_token).clamp(0.0, 1.0)


def reverse_stay(others: Tensor, x_t: Tensor, noise: Noise, earlier: Noise) -> Tensor:
    """The probability of staying in a `reverse_step` of float64, for the sum of the ratios over y != x_t. [*S]."""
    step, masked = noise.since(earlier), noise.is_mask(x_t)
    return _stay(others + (~masked).double(), masked, step, _resolvable(step.beta, torch.float64))


def _resolvable(beta: Tensor, dtype: torch.dtype) -> Tensor:
    """dbeta, limited so that ratios that differ only by rounding give equal results instead of noise."""
    return beta.clamp_max(-math.log(64 * torch.finfo(dtype).eps))


def _beyond_common(scores: Tensor, beta: Tensor) -> Tensor:
    """s_z - (1 - exp(-dbeta)) S/V: the part of each ratio that a redraw does not explain. [*S, V]."""
    share = -torch.expm1(-beta) / scores.shape[-1]
    return scores - share.to(scores)[..., None] * scores.sum(-1, keepdim=True)


def certain_where_fixed(log_posterior: Tensor, x_t: Tensor, noise: Noise) -> Tensor:
    """The log posterior with x_0 = x_t at tokens that cannot have been shuffled. [*S, V]."""
    fixed = ~can_jump(x_t, noise)
    certain = torch.where(fixed[..., None], -math.inf, log_posterior)
    return put_at_token(certain, x_t, 0.0, ~fixed)


def _evidence(noise: Noise) -> Tensor:
    """log(c/b) = log(1 + V/E): the log-likelihood ratio of seeing a token if it is the clean one."""
    excess = math.log(noise.vocab_size) - _log_expm1(noise.beta)
    return torch.logaddexp(torch.zeros_like(excess), excess)


# ----------------------------------------------------------------------------------------------------------------
# Ratios straight from the network


@dataclass(frozen=True)
class Score(Parameterization):
    """log s_y = o_y: the network outputs the log-ratios (SEDD)."""

    meaning: ClassVar[str] = "ratios"

    def log_ratios(self, outputs: Tensor, x_t: Tensor, noise: Noise) -> Tensor:
        return full_precision(outputs)

    def shift(self, x_t: Tensor, noise: Noise) -> Tensor:
        """log s_y - o_y, the same for all y. [*S]."""
        return torch.zeros_like(noise.beta)

    def others(self, outputs: Tensor, x_t: Tensor, noise: Noise) -> Tensor:
        """The sum of s_y over the tokens y != x_t, [R, V] -> [R] float64."""
        return torch.exp(log_sum_exp(outputs, x_t) + self.shift(x_t, noise))

    def log_posterior(self, outputs: Tensor, x_t: Tensor, noise: Noise) -> Tensor:
        """The reverse step to clean data, without the mask: P(x_t | z) (K^-1 s)(z), normalized.

        Up to a factor this is max(s_z - (1 - exp(-beta)) S/V, 0), multiplied by c/b at the token itself.
        """
        masked = noise.is_mask(x_t)
        log_scores = self.log_scores(outputs, x_t, noise)
        scores = torch.exp(log_scores - log_scores.amax(-1, keepdim=True))
        log_weights = torch.log(_beyond_common(scores, _resolvable(noise.beta, scores.dtype)).clamp_min(0.0))
        raised = at_token(log_weights, x_t) + _evidence(noise).to(scores)
        log_weights = put_at_token(log_weights, x_t, raised, masked)
        return certain_where_fixed(log_weights - log_weights.logsumexp(-1, keepdim=True), x_t, noise)

    def log_reconstruction(self, outputs: Tensor, x_t: Tensor, noise: Noise) -> Tensor:
        """Bayes' rule with the ratios at a small t in place of those of the data: p(x_t | z) s_z, normalized.

        The posterior subtracts (1 - exp(-beta)) S/V, the part that a redraw explains, which can exceed the ratio for an
        inexact network.
        """
        log_weights = self.log_scores(outputs, x_t, noise)
        log_weights = put_at_token(log_weights, x_t, _evidence(noise).to(log_weights), noise.is_mask(x_t))
        return certain_where_fixed(log_weights - log_weights.logsumexp(-1, keepdim=True), x_t, noise)


@dataclass(frozen=True)
class ScaledScore(Score):
    """log s_y = o_y + log mean_h p(y|h)/p(x|h): the network corrects the ratios of a uniform p(x_0) (SEDDs)."""

    meaning: ClassVar[str] = "scaled ratios"
    vanishes_in_noise: ClassVar[bool] = True

    def log_ratios(self, outputs: Tensor, x_t: Tensor, noise: Noise) -> Tensor:
        outputs = full_precision(outputs)
        return outputs + self.shift(x_t, noise).to(outputs)[..., None]

    def shift(self, x_t: Tensor, noise: Noise) -> Tensor:
        """-log(V expm1(alpha)) at a mask; log(1 + 1/E - 1/(E+V)), E = expm1(beta), at a token."""
        V = noise.vocab_size
        log_v, log_e = math.log(V), _log_expm1(noise.beta)
        at_mask = -log_v - _log_expm1(noise.alpha)
        # 1/E - 1/(E+V) = V / (E (E+V))
        excess = log_v - log_e - torch.logaddexp(log_e, torch.full_like(log_e, log_v))
        return torch.where(noise.is_mask(x_t), at_mask, torch.logaddexp(torch.zeros_like(excess), excess))

    def stops_short(self, process: TokenProcess) -> bool:
        return process.can_shuffle and not process.jumps_at_zero


def shifted_outputs(parameterization: Parameterization) -> Score | None:
    """The parameterization, if its log-ratios are the outputs plus one number per position; otherwise None. Subclasses
    do not count, because they may change anything."""
    return parameterization if type(parameterization) in (Score, ScaledScore) else None  # type: ignore[return-value]


# ----------------------------------------------------------------------------------------------------------------
# Ratios from probabilities: s_y = base + gain f_y


@dataclass(frozen=True)
class Leap:
    """One reverse step at positions [*S], float64. Whether a token jumps depends on one output, f at the current token;
    the new token depends on the whole row.

    Args:
        stay: the probability that a position does not change.
        remask: the probability that a token is masked again; 0 at a mask.
        floor: the probability of becoming y is proportional to max(floor + slope f_y, 0), for tokens y other than the
            current one.
        slope: see `floor`.
    """

    stay: Tensor
    remask: Tensor
    floor: Tensor
    slope: Tensor

    def at(self, index: Tensor) -> Leap:
        """The step at some of the positions [R]."""
        return Leap(self.stay[index], self.remask[index], self.floor[index], self.slope[index])

    def law(self, probs: Tensor, x_t: Tensor, noise: Kernel) -> Tensor:
        """The distribution over the n states, [*S, n], for probabilities f [*S, V]."""
        floor, slope = self.floor.to(probs)[..., None], self.slope.to(probs)[..., None]
        return step_law(self.stay, self.remask, slope * probs + floor, x_t, noise)


@dataclass(frozen=True)
class AffineScore:
    """s_y = base + gain f_y for y != x_t, with `log_prob_x` = log f at x_t (not defined at a mask); all [*S].

    In terms of unnormalized weights w of x_0, s_y = b W + keep w_y with W the sum of w: base is b W, gain f_y is
    keep w_y, and own = keep w_x = 1 - base. `exact` marks positions where this holds with the kernel's own b and keep,
    which is everywhere except where the paper rescales sigma. None means everywhere, and saves the other computation in
    `reverse`.
    """

    noise: Noise
    masked: Tensor
    log_prob_x: Tensor
    log_base: Tensor
    log_gain: Tensor
    log_own: Tensor
    exact: Tensor | None

    def others(self) -> Tensor:
        """The sum of s_y over the tokens y != x_t: (V - [token]) base + gain (1 - f_x)."""
        count = self.noise.vocab_size - (~self.masked).to(torch.float64)
        rest = torch.where(self.masked, 1.0, -torch.expm1(self.log_prob_x))
        return count * torch.exp(self.log_base) + torch.exp(self.log_gain) * rest

    def reverse(self, earlier: Kernel) -> Leap:
        """The step from t back to an earlier noise level (see Parameterization.reverse_step).

        With the weights w this is P(x_t | z) (b_s W + keep_s w_z), without differences: base and gain are multiplied by
        b_s/b_t and keep_s/keep_t. Where sigma is rescaled there are no such weights, and the ratios are used directly;
        sigma and the step are small there.
        """
        step = self.noise.since(earlier)
        possible = self.masked | (self.noise.beta > 0)
        parts = self._by_belief(step, earlier)
        if self.exact is not None:
            ways = zip(parts, self._by_ratios(step), strict=True)
            parts = (torch.where(self.exact, belief, ratios) for belief, ratios in ways)
        stay, floor, slope = (
            torch.where(possible, part, otherwise) for part, otherwise in zip(parts, (1.0, 0.0, 0.0), strict=True)
        )
        return Leap(stay, torch.zeros_like(self.noise.beta), floor, slope)

    def _by_belief(self, step: Kernel, earlier: Kernel) -> tuple[Tensor, Tensor, Tensor]:
        """stay, floor and slope of the leap."""
        likelihood = torch.where(self.masked, step.a, step.b)
        shrunk = torch.where(
            self.noise.beta > 0, step.alpha + _log_redrawn(earlier.beta) - _log_redrawn(self.noise.beta), 0.0
        )
        grown = step.alpha + step.beta
        floor, own = torch.exp(self.log_base + shrunk), torch.exp(self.log_own + grown)
        stay = torch.where(self.masked, earlier.a / self.noise.a.clamp_min(TINY), step.c * (floor + own))
        return stay.clamp(0.0, 1.0), likelihood * floor, likelihood * torch.exp(self.log_gain + grown)

    def _by_ratios(self, step: Kernel) -> tuple[Tensor, Tensor, Tensor]:
        back, masked = step.inverse(), self.masked
        total = self.others() + (~masked).to(torch.float64)
        stay = torch.where(masked, 1 + back.a * total, step.c * (back.keep + back.b * total)).clamp(0.0, 1.0)
        likelihood = torch.where(masked, step.a, step.b)
        # keep⁻ base + b⁻ total, with base's own share of the total taken out of the difference in closed form:
        # (keep⁻ + V b⁻) base = alive⁻ base.
        beyond = total - self.noise.vocab_size * torch.exp(self.log_base)
        floor = likelihood * (back.alive * torch.exp(self.log_base) + back.b * beyond)
        return stay, floor, likelihood * back.keep * torch.exp(self.log_gain)


class Affine(Parameterization):
    """A parameterization whose scores are affine in f = softmax(o)."""

    meaning: ClassVar[str] = "probabilities of the clean token"
    vanishes_in_noise: ClassVar[bool] = True

    def coefficients(self, log_prob_x: Tensor, x_t: Tensor, noise: Noise) -> AffineScore:
        """base and gain, from the network's log-probability of the current token. All [*S].

        At a mask they are b/a and keep/a for all subclasses.
        """
        masked, log_expm1_alpha = noise.is_mask(x_t), _log_expm1(noise.alpha)
        masked_base = _log_redrawn(noise.beta) - math.log(noise.vocab_size) - log_expm1_alpha
        log_base, log_gain, log_own, exact = self.unmasked(log_prob_x, noise)
        return AffineScore(
            noise,
            masked,
            log_prob_x,
            log_base=torch.where(masked, masked_base, log_base),
            log_gain=torch.where(masked, -noise.beta - log_expm1_alpha, log_gain),
            log_own=log_own,
            exact=None if exact is None else masked | exact,
        )

    @abstractmethod
    def unmasked(self, log_prob_x: Tensor, noise: Noise) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """log_base, log_gain, log_own and exact of the `AffineScore` at a token. All [*S]."""

    @abstractmethod
    def evidence(self, x_t: Tensor, noise: Noise) -> Tensor:
        """The number to add to the current token's logit so that softmax gives the posterior; 0 at a mask. [*S]."""

    def posterior_logits(self, outputs: Tensor, x_t: Tensor, noise: Noise) -> Tensor:
        """Logits of p(x_0 | x_t): the outputs, with the likelihood ratio added to the current token's logit."""
        outputs = full_precision(outputs)
        raised = at_token(outputs, x_t) + self.evidence(x_t, noise).to(outputs)
        return put_at_token(outputs, x_t, raised, noise.is_mask(x_t))

    def log_posterior(self, outputs: Tensor, x_t: Tensor, noise: Noise) -> Tensor:
        """The log-softmax of the posterior's logits; at a token that cannot have been shuffled, x_0 = x_t."""
        return certain_where_fixed(torch.log_softmax(self.posterior_logits(outputs, x_t, noise), -1), x_t, noise)

    def score(self, log_probs: Tensor, x_t: Tensor, noise: Noise) -> AffineScore:
        """base and gain, from log-probabilities [*S, V].

        log f_x = -log(1 + sum_{y != x} f_y / f_x), because 1 - f_x in float32 has no digits left where f_x is near 1.
        """
        log_prob_x = -softplus(log_sum_exp(log_probs, x_t) - double(at_token(log_probs, x_t)))
        return self.coefficients(log_prob_x.to(noise.alpha.device), x_t, noise)

    def log_ratios(self, outputs: Tensor, x_t: Tensor, noise: Noise) -> Tensor:
        log_probs = log_probabilities(outputs)
        score = self.score(log_probs, x_t, noise)
        return torch.logaddexp(
            score.log_base.to(log_probs)[..., None], log_probs + score.log_gain.to(log_probs)[..., None]
        )

    def reverse_step(self, outputs: Tensor, x_t: Tensor, noise: Noise, earlier: Noise) -> Tensor:
        """The same distribution as from the ratios, with coefficients computed in float64."""
        log_probs = log_probabilities(outputs)
        return self.score(log_probs, x_t, noise).reverse(earlier).law(torch.exp(log_probs), x_t, noise)


@dataclass(frozen=True)
class Denoiser(Affine):
    """f = softmax(o) is p(x_0 | x_t) (CEDD).

        masked:    s_y = (b + keep f_y) / a
        unmasked:  s_y = 1 + f_y V/E - f_x V/(E+V),    E = expm1(beta)

    Args:
        rescale: the paper's rescaling for t -> 0. The sigma in the *unmasked* ratios (and nowhere else) is replaced by
            a larger one: max(sigma, sigma_floor) for processes without a mask, log(1.1 sigma + 1.1) below 0.5 for
            others, which jumps by 0.0008 at 0.5. On for the paper's methods.
        sigma_floor: see `rescale` (0.003 in the paper's spelling experiments).
    """

    rescale: bool = True
    sigma_floor: float = 0.0015

    def __post_init__(self) -> None:
        if not 0.0 <= self.sigma_floor < math.inf:
            raise ValueError(f"sigma_floor must be at least 0 (got {self.sigma_floor!r})")

    def rescaled_sigma(self, sigma: Tensor, has_mask: bool) -> Tensor:
        """The sigma in the unmasked ratios."""
        if not self.rescale:
            return sigma
        if not has_mask:
            return sigma.clamp_min(self.sigma_floor)
        return torch.where(sigma < _LIFTED_BELOW, torch.log(_LIFT * sigma + _LIFT), sigma)

    def stops_short(self, process: TokenProcess) -> bool:
        """Positions where E in V/E is not rescaled."""
        tamed = self.rescale and (process.has_mask or self.sigma_floor > 0)
        return process.can_shuffle and not process.jumps_at_zero and not tamed

    def kinks(self, process: TokenProcess) -> tuple[float, ...]:
        if not (self.rescale and process.can_shuffle):
            return ()
        return (_LIFTED_BELOW,) if process.has_mask else (self.sigma_floor,)

    def ratio_beta(self, noise: Noise) -> Tensor:
        """The shuffle clock's share of the rescaled sigma, [*S]."""
        if not self.rescale:
            return noise.beta
        sigma = noise.sigma
        share = torch.where(sigma > 0, noise.beta / sigma.clamp_min(TINY), 0.0)
        return share * self.rescaled_sigma(sigma, noise.has_mask)

    def unmasked(self, log_prob_x: Tensor, noise: Noise) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        beta = self.ratio_beta(noise)
        log_v, log_e = math.log(noise.vocab_size), _log_expm1(beta)
        log_sum = torch.logaddexp(log_e, torch.full_like(log_e, log_v))  # log(E + V)
        # 1 - f_x V/(E+V) = (1 - f_x) + f_x E/(E+V), which keeps its digits when f_x is near 1 and E near 0
        base = -torch.expm1(log_prob_x) + torch.exp(log_prob_x + log_e - log_sum)
        exact = beta == noise.beta if self.rescale else None
        return torch.log(base.clamp_min(TINY)), log_v - log_e, log_prob_x + log_v - log_sum, exact

    def evidence(self, x_t: Tensor, noise: Noise) -> Tensor:
        return torch.zeros_like(noise.beta)  # f is the posterior already


@dataclass(frozen=True)
class Bayes(Affine):
    """g = softmax(o) is p(x_0 at i | x_t at all other positions); the known likelihood of x_t at i is applied exactly.

        m(y) = b + keep g_y,   m(mask) = a,   s_y = m(y) / m(x)
        p(x_0 = h | x_t) is proportional to p(x|h) g_h: log(c/b) = log(1 + V/E) is added to the current token's logit.

    As t -> 0 the likelihood determines the token, so sigma needs no rescaling.
    """

    def unmasked(self, log_prob_x: Tensor, noise: Noise) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        log_e, log_v = _log_expm1(noise.beta), math.log(noise.vocab_size)
        log_m = torch.logaddexp(log_e, log_v + log_prob_x)  # log of E + V g_x, which is m(x) up to b/E
        return log_e - log_m, log_v - log_m, log_v + log_prob_x - log_m, None

    def evidence(self, x_t: Tensor, noise: Noise) -> Tensor:
        """log(c/b) = log(1 + V/E), the likelihood ratio in favour of the current token."""
        return torch.where(noise.is_mask(x_t), 0.0, _evidence(noise))


PARAMETERIZATIONS.update({"score": Score, "scaled-score": ScaledScore, "denoiser": Denoiser, "bayes": Bayes})
