"""Time reversal: the process run backwards by the ratios s_y ~ p_t(y) / p_t(x_t), at the rates Q_t(x_t, y) s_y.

Shapes: [*S] any common shape of positions, V vocabulary, n states; N rows.

The bound. With lbar = s - r log s the score entropy (cedd.objectives.score_entropy) and K(r) = r (log r - 1):

    J1 = E int l    + KL(p_{1|0} || p_r)                        l = lbar + K
    J2 = E int lbar - int E[out-rate] + H(p_1, p_r)

    K:  masked alpha' [(V-1) K(b/a) + K(c/a)];   x = x0: beta'/V (V-1) K(b/c);   x != x0: beta'/V [K(c/b) - (V-2)]
    out-rate:  masked 0;   unmasked alpha' + beta' (1 - 1/V)

With the terminal terms kept the two are equal: K + out-rate depends on (x_t, x0, t) only, its mean at each t is known,
and the integral of that mean is H(p_{1|0}) - H(p_{0+|0}). So lbar + c (K + out-rate - its mean), for any c, has the
same expectation. The three bounds are one integral plus constants that no model influences, each divided by L:

    tight   E int l + KL(p_{1|0} || p_r)                         a valid bound
    j1      E int l                                              the paper's J1
    j2      E int lbar - int E[out-rate] + H(p_r)                the paper's J2

Paths that end before t = 0. With a schedule that starts at sigma_min > 0 the path ends at x_{0+}. Ratios that grow like
1/t at clean tokens (ScaledScore on a process that shuffles) would make tokens jump infinitely often, so their path ends
at a small t0, and x_0 is drawn from x_{t0}. By the chain rule E[-log p(x_0 | x_{t0})] is added to `tight`. It is then a
valid bound for a sampler that ends in the same way:

    tight   E int_{t0}^1 l + KL(p_{1|0} || p_r) + E[-log p(x_0 | x_{t0})]

The paper's j1 and j2 are cut at t = 1e-4: the mean over later times is taken as the mean over all times.

The step rules:

    analytic       the exact reverse step for the ratios at t:  P(x|z) (e^{-dQ} s)(z)
    euler          h Q_t(x, y) s_y, cut off where the sum exceeds 1
    tau-leaping    the same rates frozen over the step:  p(jumps) = 1 - exp(-h sum_y Q_t(x, y) s_y)
    remask-capped, remask-rescaled    see `cedd.dynamics.remask`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from cedd.dynamics.dynamics import Bound, Dynamics
from cedd.dynamics.path import Cases, PathCost, Reconstruction, Target, case_probabilities
from cedd.dynamics.remask import remask_capped, remask_rescaled
from cedd.dynamics.rules import DenseLaw, StayBySum, StepRule
from cedd.objectives.objective import Rows
from cedd.objectives.score_entropy import score_entropy, true_ratios
from cedd.parameterization import (
    TINY,
    Affine,
    AffineScore,
    Leap,
    Parameterization,
    Score,
    at_token,
    can_jump,
    reverse_stay,
    shifted_outputs,
    step_law,
)
from cedd.process import Noise, TokenProcess
from cedd.row_sums import log_sum_exp, score_sums, softplus_sum

JUST_AFTER_ZERO = torch.finfo(torch.float64).tiny
_LEAST_KEPT = 1e-7  # costs of tokens, for the guess of the proposal
_EPSILON = torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class Reversal(Dynamics):
    """The time reversal of any process, by the ratios of any parameterization.

    stop: t0 at the top of this file, for parameterizations that need it.
    """

    stop: float = 1e-3

    def end(self, parameterization: Parameterization, process: TokenProcess) -> float:
        return self.stop if parameterization.stops_short(process) else 0.0

    def target(
        self, parameterization: Parameterization, process: TokenProcess, bound: Bound, *, with_entropy: bool, low: float
    ) -> Target:
        """See the top of this file: `tight` ends at `low`, and the paper's bounds are cut there."""
        final, start = process.terminal(), float(process.kernel(max(low, JUST_AFTER_ZERO)).entropy)
        scale = 1.0 if bound == "tight" else 1 / (1 - low)
        jumps, jumps_since = process.integrated_out_rate(), process.integrated_out_rate(low)
        known_mean = scale * (final.conditional_entropy - start - jumps_since)  # E int K
        paper = final.paper_prior_entropy - jumps
        if with_entropy:
            terminal = {"tight": final.kl, "j1": 0.0, "j2": paper - known_mean}[bound]
        else:
            terminal = {"tight": final.cross_entropy - start - jumps_since, "j1": known_mean, "j2": paper}[bound]
        stopped, ends_early = low > 0, low > 0 or process.jumps_at_zero
        law = parameterization.log_reconstruction if stopped else parameterization.log_posterior
        return Target(
            path=ScorePath(parameterization, with_entropy),
            low=low,
            scale=scale,
            reconstruction=Reconstruction(law) if bound == "tight" and ends_early else None,
            terminal=terminal,
        )

    def last_rule(self, parameterization: Parameterization, process: TokenProcess) -> StepRule:
        return RECONSTRUCTION if self.end(parameterization, process) > 0 else RULES["analytic"]

    def rules(self) -> Mapping[str, StepRule]:
        return RULES


# ----------------------------------------------------------------------------------------------------------------
# The cost of the path


@dataclass(frozen=True)
class ScorePath(PathCost):
    """l = lbar + K of any parameterization, the integrand of J1; without K, that of J2."""

    parameterization: Parameterization
    with_entropy: bool = True

    @property
    def vanishes_in_noise(self) -> bool:
        return self.parameterization.vanishes_in_noise

    @property
    def lasts_in_shuffles(self) -> bool:
        return not isinstance(self.parameterization, Affine)

    def positions(self, x_t: Tensor, noise: Noise) -> Tensor:
        return can_jump(x_t, noise)

    def rows(self, outputs: Tensor, rows: Rows) -> Tensor:
        meaning = self.parameterization
        if isinstance(meaning, Affine):
            return self._with_known(affine_score_entropy(meaning, outputs, rows), rows)
        ratios = shifted_outputs(meaning)
        if ratios is not None:
            return self._with_known(ratio_score_entropy(ratios, outputs, rows), rows)
        return self.plain(outputs, rows)

    def plain(self, outputs: Tensor, rows: Rows) -> Tensor:
        log_ratios = self.parameterization.log_ratios(outputs, rows.x_t, rows.noise)
        return self._with_known(score_entropy(log_ratios, rows.x0, rows.x_t, rows.noise), rows)

    def _with_known(self, cost: Tensor, rows: Rows) -> Tensor:
        if not self.with_entropy:
            return cost
        noise = rows.noise
        cost = cost + known_entropy(noise).pick(rows.x_t, rows.x0, noise)
        if not isinstance(self.parameterization, Affine):
            return cost
        # After enough redraws all ratios are 1, and a difference of terms as large as beta' is only rounding error.
        settled = (noise.expm1_beta * _EPSILON > noise.vocab_size) & ~noise.is_mask(rows.x_t)
        return torch.where(settled & cost.isfinite(), 0.0, cost)

    def magnitude(self, noise: Noise) -> Cases:
        """Masks appear at rate alpha' alive and cost -log f each, and moved tokens appear at beta' keep. A bad network
        also assigns costs to many tokens that have not moved; rare draws of these would have large weights, so such
        tokens get a third of the guess for masks. Ratios that come from the network itself have a cost even if no token
        is kept, where a guess of zero would turn off the control variates. If only masks have a cost, a bad network may
        still have large costs near t = 1, where sequences with a token among masks are rare: two of five draws there
        keep a token."""
        shuffling = noise.beta_rate * noise.keep.clamp_min(_LEAST_KEPT)
        masking = noise.alpha_rate * noise.alive.clamp_min(TINY)
        context = torch.zeros_like(masking) if self.vanishes_in_noise else masking * noise.a * (2 / 3)
        same = torch.where(noise.beta_rate > 0, shuffling + masking / 3, context)
        return Cases(same=same, moved=shuffling, masked=masking)

    def share(self, noise: Noise) -> Cases:
        """By the guess alone, tokens would rarely be moved once few are kept: for ratios that come from the network
        itself, likely and costly sequences would be drawn once in a million times, with a weight of a million. So three
        eighths of the draws follow the guess, three eighths the costs of the cases for equal ratios, and a quarter are
        unmasked tokens, moved or not with the probabilities of the process, because near t = 1 a token among masks may
        cost more than all masks. For equal ratios the weight of a draw is then at most 8/3 of the mean at its time.
        """
        by_guess = super().share(noise)
        if not self.lasts_in_shuffles:
            return by_guess
        p = case_probabilities(noise)
        equal = Cases(noise.beta_rate * p.same, noise.beta_rate * p.moved, noise.alpha_rate * p.masked)
        token = Cases(p.same, p.moved, torch.zeros_like(p.masked))
        shuffles = (noise.beta_rate > 0).double()
        return by_guess.mixed(equal.normalised(), shuffles / 2).mixed(token.normalised(), shuffles / 4)


def affine_score_entropy(parameterization: Affine, outputs: Tensor, rows: Rows) -> Tensor:
    """lbar for s_y = base + gain f_y, [N, V] -> [N]: all but sum_y log s_y is closed form in float64.

    Where r_y is 0 for all y but x0 (absorb) that sum is not needed, and log f at x0 is all that is read.
    """
    x0, x_t, noise = rows.x0, rows.x_t, rows.noise
    normaliser = log_sum_exp(outputs)
    score = parameterization.coefficients(at_token(outputs, x_t).double() - normaliser, x_t, noise)
    at_x0 = torch.logaddexp(score.log_base, at_token(outputs, x0).double() - normaliser + score.log_gain)
    ratios = true_ratios(x_t, x0, noise)
    cost = score.others() - ratios.extra * at_x0
    spread = (ratios.common > 0).nonzero().squeeze(-1)
    if spread.numel():
        # sum_y log s_y = sum_y [log base + softplus(o_y - Z + log gain - log base)], less the entry at x_t
        log_base, offset = score.log_base[spread], (score.log_gain - score.log_base - normaliser)[spread]
        these = outputs if len(spread) == len(outputs) else outputs[spread]
        tokens = (~score.masked[spread]).double()
        total = (noise.vocab_size - tokens) * log_base + softplus_sum(these, offset, x_t[spread])
        cost = cost.index_put((spread,), -ratios.common[spread] * total, accumulate=True)
    return torch.where(can_jump(x_t, noise), ratios.rate * cost, 0.0)


def ratio_score_entropy(parameterization: Score, outputs: Tensor, rows: Rows) -> Tensor:
    """lbar for log s_y = o_y + a number of the position, [N, V] -> [N]."""
    x0, x_t, noise = rows.x0, rows.x_t, rows.noise
    ratios, shift = true_ratios(x_t, x0, noise), parameterization.shift(x_t, noise)
    at_x0 = torch.where(x0 == x_t, 0.0, at_token(outputs, x0).double() + shift)
    return ratios.cost(*score_sums(outputs, shift, x_t), at_x0, can_jump(x_t, noise))


def _k(ratio: Tensor) -> Tensor:
    """K(r) = r (log r - 1), 0 at r = 0."""
    return torch.xlogy(ratio, ratio) - ratio


def known_entropy(noise: Noise) -> Cases:
    """The sum of Q_t(x_t, y) K(r_y) over y != x_t, in each case."""
    V, e = noise.vocab_size, noise.expm1_beta
    expm1_alpha = noise.expm1_alpha.clamp_min(TINY)
    b_over_a = -torch.expm1(-noise.beta) / (V * expm1_alpha)
    c_over_a = b_over_a + torch.exp(-noise.beta) / expm1_alpha
    shuffle = noise.beta_rate / V
    masked = noise.alpha_rate * ((V - 1) * _k(b_over_a) + _k(c_over_a))
    same = shuffle * (V - 1) * _k(e / (e + V))
    moved = shuffle * (_k(1 + V / e.clamp_min(TINY)) - (V - 2))
    no_shuffle = noise.beta <= 0
    return Cases(torch.where(no_shuffle, 0.0, same), torch.where(no_shuffle, 0.0, moved), masked)


# ----------------------------------------------------------------------------------------------------------------
# The step rules


def _rule_by_rates(name: str, stay: Callable[[Tensor], Tensor]) -> StepRule:
    """A rule with the rates at t; `stay` converts h sum_y Q_t(x, y) s_y to the probability of staying."""

    def leap(score: AffineScore, earlier: Noise) -> Leap:
        noise, masked = score.noise, score.masked
        forward = noise.forward_rate(masked) * (noise.t - earlier.t)
        possible = masked | (noise.beta > 0)
        nothing = torch.zeros_like(forward)
        total = torch.where(possible, forward * score.others(), nothing)
        floor = torch.where(possible, forward * torch.exp(score.log_base), nothing)
        slope = torch.where(possible, forward * torch.exp(score.log_gain), nothing)
        return Leap(stay(total), nothing, floor, slope)

    def law(parameterization: Parameterization, outputs: Tensor, x_t: Tensor, noise: Noise, earlier: Noise) -> Tensor:
        rates = parameterization.jump_rates(outputs, x_t, noise)
        jumps = (noise.t - earlier.t).to(rates)[..., None] * rates
        staying = stay(jumps.sum(-1))
        return step_law(staying, torch.zeros_like(staying), jumps, x_t, noise)

    def stay_by_sum(others: Tensor, x_t: Tensor, noise: Noise, earlier: Noise) -> Tensor:
        return stay((noise.t - earlier.t) * noise.forward_rate(noise.is_mask(x_t)) * others)

    return StepRule(name, leap, law, jump_first=True, only_reverses=True, of_tensors=True, stay=stay_by_sum)


def _reconstruction_law(
    parameterization: Parameterization, outputs: Tensor, x_t: Tensor, noise: Noise, earlier: Noise
) -> Tensor:
    law = parameterization.log_reconstruction(outputs, x_t, noise).exp()
    return torch.cat([law, torch.zeros_like(law[..., :1])], -1) if noise.has_mask else law


def _reversing(name: str, law: DenseLaw, stay: StayBySum | None = None) -> StepRule:
    return StepRule(name, AffineScore.reverse, law, jump_first=True, only_reverses=True, of_tensors=True, stay=stay)


RECONSTRUCTION = _reversing("reconstruction", _reconstruction_law)
"""The last step of a path that ends before t = 0, as in its bound."""

RULES: Mapping[str, StepRule] = {
    rule.name: rule
    for rule in (
        _reversing("analytic", lambda meaning, *step: meaning.reverse_step(*step), reverse_stay),
        _rule_by_rates("euler", lambda total: (1 - total).clamp_min(0.0)),
        _rule_by_rates("tau-leaping", lambda total: torch.exp(-total)),
        remask_capped(),
        remask_rescaled(),
    )
}
