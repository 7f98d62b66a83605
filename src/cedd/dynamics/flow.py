"""Discrete flow matching from a mask source, with or without its corrector: its loss, its bound and its steps.

The path is absorb's kernel with kappa = alive, at the flow time s = 1 - t: kappa = s is the log-linear schedule,
kappa = s^k the polynomial one (both up to their eps). So kappa'/kappa = alpha', the mask clock's rate, and
kappa'/(1-kappa) = alpha' / (exp(alpha) - 1). The network is trained by cross entropy over all positions. Only the
velocity differs from time reversal: it moves *every* position towards the prediction p(. | x_t), and the corrector
moves unmasked ones back to the mask:

    v = a_s u_hat - b_s u_check,      u_hat = kappa'/(1-kappa) (p - delta),      u_check = kappa'/kappa (delta - mask)

The path-space KL of the conditional path (a mask turns into x0 at rate kappa'/(1-kappa)) from it is (the paper's B, end
of its appendix B; x0 here is its x_1)

    masked:     kappa'/(1-kappa) [ a - 1 - log a - log p(x0) ]
    unmasked:   a kappa'/(1-kappa) (1 - p(x_t)) + b kappa'/kappa

As t -> 0 the unmasked term is of the order of (1 - p(x_t)) / t: unless the network copies unmasked tokens perfectly,
the integral down to 0 diverges and so does the bound, since the flow then moves tokens infinitely often. A sampler
therefore stops earlier, and so does the bound: at t = `low` the remaining masks are drawn from the prediction, at a
cost of -log p(x0) each, and the tokens stay. With KL(p_{1|0} || p_r) at the other end this is a valid bound for such a
sampler.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from cedd.dynamics.dynamics import Bound, Dynamics
from cedd.dynamics.path import Cases, PathCost, Reconstruction, Target
from cedd.dynamics.rules import StepRule
from cedd.objectives.cross_entropy import CrossEntropy
from cedd.objectives.objective import Objective, Rows
from cedd.parameterization import TINY, AffineScore, Denoiser, Leap, Parameterization, at_token, put_at_token
from cedd.parts import Table
from cedd.process import Noise, TokenProcess
from cedd.row_sums import log_sum_exp


@dataclass(frozen=True)
class Corrector:
    """The corrector of flow matching: weights a_s and b_s = a_s - 1 of the forward and the backward velocity.

    a_s = 1 + strength s^start (1-s)^stop at flow time s = 1 - t (the paper: 1, 1/2, 1/2).
    """

    strength: float = 1.0
    start: float = 0.5
    stop: float = 0.5

    def __post_init__(self) -> None:
        for name, value in (("strength", self.strength), ("start", self.start), ("stop", self.stop)):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"the corrector's {name} must be finite and at least 0 (got {value!r})")

    def excess(self, t: Tensor) -> Tensor:
        """a_s - 1 = b_s."""
        return self.strength * (1 - t) ** self.start * t**self.stop


NO_CORRECTOR = Corrector(strength=0.0)


@dataclass(frozen=True)
class Flow(Dynamics):
    """The velocity at the top of this file, with or without a corrector."""

    parts: ClassVar[Mapping[str, Table]] = {"corrector": Table("corrector", "", {"corrector": Corrector})}
    corrector: Corrector = NO_CORRECTOR
    stop: float = 1e-4

    bounds: ClassVar[tuple[Bound, ...]] = ("tight",)
    grid: ClassVar[str] = "flow"

    def check_parts(self, parameterization: Parameterization, objective: Objective) -> None:
        if not (isinstance(parameterization, Denoiser) and isinstance(objective, CrossEntropy)):
            raise ValueError("flow matching learns p(x_0 | x_t); use it with Denoiser and CrossEntropy")

    def check_process(self, process: TokenProcess) -> None:
        if not process.has_mask or process.can_shuffle:
            raise ValueError("dfm runs from a mask source; use absorb(V, Polynomial(power=k)) for kappa = t^k")

    def with_corrector(self, corrector: object) -> Flow:
        if not isinstance(corrector, Corrector):
            raise TypeError(f"corrector must be a cedd.Corrector (got {corrector!r})")
        return replace(self, corrector=corrector)

    def positions(self, x_t: Tensor, noise: Noise) -> Tensor:
        return torch.ones_like(x_t, dtype=torch.bool)

    def target(
        self, parameterization: Parameterization, process: TokenProcess, bound: Bound, *, with_entropy: bool, low: float
    ) -> Target:
        stops = low > 0 or process.jumps_at_zero
        reconstruction = Reconstruction(parameterization.log_reconstruction) if stops else None
        return Target(FlowPath(self.corrector), low, 1.0, reconstruction, process.terminal().kl)

    def rules(self) -> Mapping[str, StepRule]:
        return flow_rules(self.corrector)

    def last_rule(self, parameterization: Parameterization, process: TokenProcess) -> StepRule:
        return _LAST_RULE

    def only_reveals(self, process: TokenProcess) -> bool:
        return False

    def jump_rates(self, parameterization: Parameterization, outputs: Tensor, x_t: Tensor, noise: Noise) -> Tensor:
        """The velocity at the top of this file, with kappa = alive: a alpha' / (exp(alpha) - 1) f_y, masked or not, and
        b alpha' from a token to the mask."""
        masked, excess = noise.is_mask(x_t), self.corrector.excess(noise.t)
        speed = (1 + excess) * noise.alpha_rate / noise.expm1_alpha
        to_tokens = put_at_token(speed[..., None] * torch.softmax(outputs, -1), x_t, 0.0, masked)
        to_mask = torch.where(masked, 0.0, excess * noise.alpha_rate)
        return torch.cat([to_tokens, to_mask[..., None]], -1)


# ----------------------------------------------------------------------------------------------------------------
# The cost of the path


@dataclass(frozen=True)
class FlowPath(PathCost):
    """The integrand at the top of this file."""

    corrector: Corrector = NO_CORRECTOR

    def positions(self, x_t: Tensor, noise: Noise) -> Tensor:
        return torch.ones_like(x_t, dtype=torch.bool)

    def rows(self, outputs: Tensor, rows: Rows) -> Tensor:
        noise, masked = rows.noise, rows.noise.is_mask(rows.x_t)
        normaliser = log_sum_exp(outputs)
        log_p = at_token(outputs, rows.x0).double() - normaliser
        # 1 - p(x_t) as the sum over the other tokens, because 1 minus a float32 number near 1 is inaccurate
        others = log_sum_exp(outputs, rows.x_t)
        excess = self.corrector.excess(noise.t)
        unmasking = noise.alpha_rate / noise.expm1_alpha
        at_mask = unmasking * (excess - torch.log1p(excess) - log_p)
        at_token_ = (1 + excess) * unmasking * torch.exp(others - normaliser) + excess * noise.alpha_rate
        return torch.where(masked, at_mask, at_token_)

    def magnitude(self, noise: Noise) -> Cases:
        unmasking = noise.alpha_rate * noise.alive
        return Cases(
            same=unmasking * (0.3 + self.corrector.excess(noise.t)), moved=torch.zeros_like(unmasking), masked=unmasking
        )


# ----------------------------------------------------------------------------------------------------------------
# The step rules


def _integrated_hazards(noise: Noise, earlier: Noise) -> tuple[Tensor, Tensor]:
    """The integrals over the step of kappa'/(1-kappa) and of kappa'/kappa, kappa = alive."""
    return torch.log(noise.a) - torch.log(earlier.a), noise.alpha - earlier.alpha


def _euler_hazards(noise: Noise, earlier: Noise) -> tuple[Tensor, Tensor]:
    """The same with the rates at t: h kappa'/(1-kappa) and h kappa'/kappa."""
    rate = (noise.t - earlier.t) * noise.alpha_rate
    return rate / noise.expm1_alpha.clamp_min(TINY), rate


def _flow_rule(
    name: str,
    corrector: Corrector,
    hazards: Callable[[Noise, Noise], tuple[Tensor, Tensor]],
    happens: Callable[[Tensor], Tensor],
) -> StepRule:
    """With probability q a position is redrawn from f, with probability r a token is masked again."""

    def leap(score: AffineScore, earlier: Noise) -> Leap:
        noise = score.noise
        towards, away = hazards(noise, earlier)
        excess = corrector.excess(noise.t)
        redraw, mask = (1 + excess) * towards, torch.where(score.masked, 0.0, excess * away)
        event = happens(redraw + mask)
        share = torch.where(torch.isinf(redraw), 0.0, mask / (redraw + mask).clamp_min(TINY))
        q, r = event * (1 - share), event * share
        elsewhere = torch.where(score.masked, 1.0, -torch.expm1(score.log_prob_x))
        return Leap((1 - r - q * elsewhere).clamp(0.0, 1.0), r, torch.zeros_like(q), q)

    return StepRule.from_leap(name, leap, jump_first=True)


def flow_rules(corrector: Corrector = NO_CORRECTOR) -> Mapping[str, StepRule]:
    """The rules of discrete flow matching from a mask source, with or without its corrector.

    The velocity kappa'/(1-kappa) (f - [x]) redraws every position from f, masked or not; a corrector multiplies it by
    1 + b and masks tokens again at the rate b kappa'/kappa (paper, end of appendix B). `analytic` integrates the
    hazards over the step (without a corrector a mask is revealed with exactly 1 - a_s/a_t), `euler` takes them at t.
    """

    def at_least_one(total: Tensor) -> Tensor:
        return -torch.expm1(-total)

    rules = (
        _flow_rule("analytic", corrector, _integrated_hazards, at_least_one),
        _flow_rule("euler", corrector, _euler_hazards, lambda total: total.clamp_max(1.0)),
        _flow_rule("tau-leaping", corrector, _euler_hazards, at_least_one),
    )
    return {rule.name: rule for rule in rules}


def _fill_masks(score: AffineScore, earlier: Noise) -> Leap:
    """The last step: masks are drawn from f, tokens stay, as in the bound (see the top of this file)."""
    masked = score.masked.double()
    nothing = torch.zeros_like(masked)
    return Leap(1 - masked, nothing, nothing, masked)


_LAST_RULE = StepRule.from_leap("the last step", _fill_masks, jump_first=True)
