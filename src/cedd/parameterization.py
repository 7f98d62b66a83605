"""What a network's output means: the one place that turns outputs into ratios, rates, steps and posteriors.

Shapes: outputs [*S, V] (no mask column), x_t [*S], and a Noise whose fields have the shape [*S] (rows or [B, L]).

A parameterization says what the log-ratios log s_y ~ log p_t(y) / p_t(x_t) are, for every token y != x_t:

    Score         log s_y = o_y                                                                   (SEDD)
    ScaledScore   log s_y = o_y + log mean_h p(y|h) / p(x|h)                                      (SEDDs)
    Denoiser      s_y = sum_h f_h p(y|h) / p(x|h),   f = softmax(o) is p(x_0 | x_t)               (CEDD)
    Bayes         s_y = m(y) / m(x),  m(y) = sum_h g_h p(y|h),  g = softmax(o) is the belief about x_0 before
                  position i's own noisy token is looked at                                       (leave-one-out)

The last two are affine in their probabilities, s_y = base + gain f_y, with a base and a gain that depend on one
number of the network only: its probability of the token that is there. This is what makes samplers cheap.

All vectors of shape [*S] are float64; nothing of shape [*S, V] is, unless the outputs are.
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

TINY = torch.finfo(torch.float64).tiny  # what a denominator is at least
_LIFTED_BELOW, _LIFT = 0.5, 1.1  # the paper's rescaling of sigma where there is a mask
_MAX_LOG_RATE = 80.0  # an untrained score may say anything; exp of this is still far inside float32


def _log_expm1(x: Tensor) -> Tensor:
    """log(exp(x) - 1) for x >= 0: finite at 0 (a number of about -708), and where exp(x) is not."""
    return torch.where(x > 40.0, x, torch.log(torch.expm1(x.clamp_max(40.0)).clamp_min(TINY)))


def _log_redrawn(beta: Tensor) -> Tensor:
    """log(1 - exp(-beta)): the probability of a redraw; -inf at 0."""
    return torch.log(-torch.expm1(-beta))


def can_jump(x_t: Tensor, noise: Kernel) -> Tensor:
    """Where the reverse process can leave x_t: at masks, and at tokens that may have been shuffled. [*S] bool."""
    return noise.is_mask(x_t) | (noise.beta > 0).to(x_t.device)


def step_law(stay: Tensor, remask: Tensor, jumps: Tensor, x_t: Tensor, noise: Kernel) -> Tensor:
    """The law of one step over the n states, [*S, n]: stay, be masked again, or jump.

    Where an imperfect score gives negative jumps [*S, V] they are cut off, and the rest is scaled to what is left by
    staying and remasking; where nothing can be jumped to, a position stays. The only place that clamps.
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
"""The parameterizations by name; those of your own can be added."""


class Parameterization(Part, ABC):
    """The meaning of outputs [*S, V] at noisy tokens x_t [*S]."""

    table: ClassVar[Table] = Table("parameterization", "cedd.parameterization.PARAMETERIZATIONS", PARAMETERIZATIONS)

    meaning: ClassVar[str] = "of a kind of their own"
    """What the outputs are, in words: networks of the same can be trained on as one another's."""
    vanishes_in_noise: ClassVar[bool] = False
    """Whether the ratios at a mask fall like keep/a, as the true ones do, whatever the network says."""

    @abstractmethod
    def log_ratios(self, outputs: Tensor, x_t: Tensor, noise: Noise) -> Tensor:
        """log s_y for y != x_t, finite everywhere; the entry at x_t itself has no meaning."""

    @abstractmethod
    def log_posterior(self, outputs: Tensor, x_t: Tensor, noise: Noise) -> Tensor:
        """log p(x_0 | x_t), normalised over the V tokens."""

    def log_reconstruction(self, outputs: Tensor, x_t: Tensor, noise: Noise) -> Tensor:
        """The log of the law by which a path that stops short of t = 0 draws x_0 from x_t, normalised over the V
        tokens: the posterior, in a form that gives every possible token a chance."""
        return self.log_posterior(outputs, x_t, noise)

    def stops_short(self, process: TokenProcess) -> bool:
        """Whether the ratios at clean tokens grow like 1/t whatever the network says, so that the path has to stop
        short of t = 0: down to it, tokens would jump infinitely often."""
        del process
        return False

    def kinks(self, process: TokenProcess) -> tuple[float, ...]:
        """The sigmas at which the ratios are not smooth in time, which integrals want to know."""
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

        For a perfect network this is Bayes' rule; for an imperfect one the staying probability is taken first
        and the jumps share the rest (see `step_law`). A step over a large dbeta asks for differences between
        ratios that are all close to one: their rounding is blown up by exp(dbeta), so take more steps there.
        """
        step = noise.since(earlier)
        masked = noise.is_mask(x_t)
        log_scores = self.log_scores(outputs, x_t, noise)
        # Scores in units of the largest, so that no exponential overflows: the jumps are scaled at the end anyway.
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
    """dbeta, kept so small that ratios which differ by the dtype's rounding only come out alike, not as noise."""
    return beta.clamp_max(-math.log(64 * torch.finfo(dtype).eps))


def _beyond_common(scores: Tensor, beta: Tensor) -> Tensor:
    """s_z - (1 - exp(-dbeta)) S/V: what a ratio has beyond what a redraw explains. [*S, V]."""
    share = -torch.expm1(-beta) / scores.shape[-1]
    return scores - share.to(scores)[..., None] * scores.sum(-1, keepdim=True)


def certain_where_fixed(log_posterior: Tensor, x_t: Tensor, noise: Noise) -> Tensor:
    """At a token that cannot have been shuffled, x_0 = x_t with probability one. [*S, V]."""
    fixed = ~can_jump(x_t, noise)
    certain = torch.where(fixed[..., None], -math.inf, log_posterior)
    return put_at_token(certain, x_t, 0.0, ~fixed)


def _evidence(noise: Noise) -> Tensor:
    """log(c/b) = log(1 + V/E): how much more likely a token is to be seen if it is the clean one."""
    excess = math.log(noise.vocab_size) - _log_expm1(noise.beta)
    return torch.logaddexp(torch.zeros_like(excess), excess)


# ----------------------------------------------------------------------------------------------------------------
# Ratios straight from the network


@dataclass(frozen=True)
class Score(Parameterization):
    """log s_y = o_y: the network gives the ratios themselves (SEDD)."""

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
        """The reverse step all the way to clean data, where no mask is left: P(x_t | z) (K^-1 s)(z), normalised.

        Up to a factor that is s_z - (1 - exp(-beta)) S/V, cut off at 0, and c/b times that at the token itself.
        """
        masked = noise.is_mask(x_t)
        log_scores = self.log_scores(outputs, x_t, noise)
        scores = torch.exp(log_scores - log_scores.amax(-1, keepdim=True))
        log_weights = torch.log(_beyond_common(scores, _resolvable(noise.beta, scores.dtype)).clamp_min(0.0))
        raised = at_token(log_weights, x_t) + _evidence(noise).to(scores)
        log_weights = put_at_token(log_weights, x_t, raised, masked)
        return certain_where_fixed(log_weights - log_weights.logsumexp(-1, keepdim=True), x_t, noise)

    def log_reconstruction(self, outputs: Tensor, x_t: Tensor, noise: Noise) -> Tensor:
        """Bayes' rule with the ratios at a small t in the place of those of the data: p(x_t | z) s_z, normalised.

        It differs from the posterior by what a redraw explains, (1 - exp(-beta)) S/V, which for a network that is off
        may be more than there is.
        """
        log_weights = self.log_scores(outputs, x_t, noise)
        log_weights = put_at_token(log_weights, x_t, _evidence(noise).to(log_weights), noise.is_mask(x_t))
        return certain_where_fixed(log_weights - log_weights.logsumexp(-1, keepdim=True), x_t, noise)


@dataclass(frozen=True)
class ScaledScore(Score):
    """log s_y = o_y + log mean_h p(y|h)/p(x|h): the network only corrects the ratio of ignorance (SEDDs)."""

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
    """The parameterization, if its log-ratios are the outputs plus a number of the position; else None. One that is
    made of these may be any."""
    return parameterization if type(parameterization) in (Score, ScaledScore) else None  # type: ignore[return-value]


# ----------------------------------------------------------------------------------------------------------------
# Ratios from probabilities: s_y = base + gain f_y


@dataclass(frozen=True)
class Leap:
    """One step back of positions [*S], float64. Whether a token jumps needs one number of the network, f at the token
    that is there; where to needs its row.

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

    def at(self, index: Tensor) -> Leap:
        """That of some of positions [R]."""
        return Leap(self.stay[index], self.remask[index], self.floor[index], self.slope[index])

    def law(self, probs: Tensor, x_t: Tensor, noise: Kernel) -> Tensor:
        """The law over the n states, [*S, n], for probabilities f [*S, V]."""
        floor, slope = self.floor.to(probs)[..., None], self.slope.to(probs)[..., None]
        return step_law(self.stay, self.remask, slope * probs + floor, x_t, noise)


@dataclass(frozen=True)
class AffineScore:
    """s_y = base + gain f_y for y != x_t, with `log_prob_x` = log f at x_t (no meaning at a mask); all [*S].

    In terms of a belief w about x_0, s_y = b W + keep w_y with W the sum of w: base is b W, gain f_y is keep w_y, and
    own = keep w_x = 1 - base. `exact` says where that holds with the kernel's own b and keep: everywhere but where the
    paper rescales sigma. None says everywhere, too, and spares the other way of `reverse`.
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

        By the belief, P(x_t | z) (b_s W + keep_s w_z), which has no differences: base and gain change by b_s/b_t and
        keep_s/keep_t. Where sigma is rescaled there is no such belief, and the ratios are used as they are; sigma is
        small there, and so is the step.
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
        """base and gain, from the network's log-probability of the token that is there. All [*S].

        At a mask they are b/a and keep/a, whatever the probabilities mean.
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
        """What has to be added to the current token's logit to make softmax(o) the posterior; 0 at a mask. [*S]."""

    def posterior_logits(self, outputs: Tensor, x_t: Tensor, noise: Noise) -> Tensor:
        """Logits of p(x_0 | x_t): the outputs with the current token's raised by its own evidence."""
        outputs = full_precision(outputs)
        raised = at_token(outputs, x_t) + self.evidence(x_t, noise).to(outputs)
        return put_at_token(outputs, x_t, raised, noise.is_mask(x_t))

    def log_posterior(self, outputs: Tensor, x_t: Tensor, noise: Noise) -> Tensor:
        """The softmax of the posterior's logits; at a token that cannot have been shuffled x_0 = x_t is certain."""
        return certain_where_fixed(torch.log_softmax(self.posterior_logits(outputs, x_t, noise), -1), x_t, noise)

    def score(self, log_probs: Tensor, x_t: Tensor, noise: Noise) -> AffineScore:
        """base and gain, from log-probabilities [*S, V].

        log f_x = -log(1 + sum_{y != x} f_y / f_x): where f_x is near 1, a 1 - f_x in float32 has no digits left.
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
        """The same law as the ratios give, but with its coefficients formed in float64."""
        log_probs = log_probabilities(outputs)
        return self.score(log_probs, x_t, noise).reverse(earlier).law(torch.exp(log_probs), x_t, noise)


@dataclass(frozen=True)
class Denoiser(Affine):
    """f = softmax(o) is p(x_0 | x_t) (CEDD).

        masked:    s_y = (b + keep f_y) / a
        unmasked:  s_y = 1 + f_y V/E - f_x V/(E+V),    E = expm1(beta)

    Args:
        rescale: the paper's taming of t -> 0. The sigma inside the *unmasked* ratios (and nowhere else) is replaced
            by a larger one: without a mask max(sigma, sigma_floor), with one log(1.1 sigma + 1.1) below 0.5, which
            jumps by 0.0008 there. On for the paper's methods.
        sigma_floor: see `rescale` (0.003 in the paper's spelling experiments).
    """

    rescale: bool = True
    sigma_floor: float = 0.0015

    def __post_init__(self) -> None:
        if not 0.0 <= self.sigma_floor < math.inf:
            raise ValueError(f"sigma_floor must be a number from 0 up (got {self.sigma_floor!r})")

    def rescaled_sigma(self, sigma: Tensor, has_mask: bool) -> Tensor:
        """sigma as the unmasked ratios see it."""
        if not self.rescale:
            return sigma
        if not has_mask:
            return sigma.clamp_min(self.sigma_floor)
        return torch.where(sigma < _LIFTED_BELOW, torch.log(_LIFT * sigma + _LIFT), sigma)

    def stops_short(self, process: TokenProcess) -> bool:
        """Where E in V/E is not kept away from 0."""
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
    """g = softmax(o) is the belief before position i's own token is seen; its known likelihood is applied exactly.

        m(y) = b + keep g_y,   m(mask) = a,   s_y = m(y) / m(x)
        p(x_0 = h | x_t) is proportional to p(x|h) g_h: log(c/b) = log(1 + V/E) is added to the current token's logit.

    Confidence as t -> 0 comes from the likelihood, so nothing needs rescaling.
    """

    def unmasked(self, log_prob_x: Tensor, noise: Noise) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        log_e, log_v = _log_expm1(noise.beta), math.log(noise.vocab_size)
        log_m = torch.logaddexp(log_e, log_v + log_prob_x)  # log of E + V g_x, which is m(x) up to b/E
        return log_e - log_m, log_v - log_m, log_v + log_prob_x - log_m, None

    def evidence(self, x_t: Tensor, noise: Noise) -> Tensor:
        """log(c/b) = log(1 + V/E): how much the token that is there speaks for itself."""
        return torch.where(noise.is_mask(x_t), 0.0, _evidence(noise))


PARAMETERIZATIONS.update({"score": Score, "scaled-score": ScaledScore, "denoiser": Denoiser, "bayes": Bayes})
