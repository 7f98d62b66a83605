"""Remasking: tokens of an absorb process are sometimes masked again, so that mistakes can be corrected.

Shapes: [*S] any common shape of positions.

A token is masked again with probability r, and masks are revealed sooner, so that the share of masks at every time is
that of the process (ReMDM: Wang, Schiff, Sahoo and Kuleshov 2025):

    a mask:   p(stays) = (a_s - alive_t r) / a_t,   else it becomes y with f_y          a token:   p(is masked) = r

so r is at most min(1, a_s / alive_t): a share of this maximum (`rescaled`), or a constant up to it (`capped`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cedd.dynamics.rules import StepRule
from cedd.parameterization import AffineScore, Leap
from cedd.process import Noise, TokenProcess


def remask_capped(most: float = 0.04) -> StepRule:
    """The rule that masks a token again with probability `most`, or the largest possible one if that is less."""
    return _remasking("remask-capped", most, lambda possible: possible.clamp_max(most))


def remask_rescaled(share: float = 0.05) -> StepRule:
    """The rule that masks a token again with `share` times the largest probability that the process allows."""
    return _remasking("remask-rescaled", share, lambda possible: share * possible)


def _remasking(name: str, strength: float, chosen: Callable[[Tensor], Tensor]) -> StepRule:
    if not 0 <= strength <= 1:
        raise ValueError(f"the strength of {name} must be in [0, 1] (got {strength})")

    def leap(score: AffineScore, earlier: Noise) -> Leap:
        noise, masked = score.noise, score.masked
        remask = chosen((earlier.a / noise.alive).clamp_max(1.0))
        nothing = torch.zeros_like(remask)
        stay = torch.where(masked, (earlier.a - noise.alive * remask) / noise.a, 1 - remask)
        return Leap(stay, torch.where(masked, nothing, remask), nothing, masked.double())

    def check(process: TokenProcess) -> None:
        if not process.has_mask:
            raise ValueError(f"{name} masks tokens again, and this process has no masks; use sampler='analytic'")
        if process.can_shuffle:
            raise ValueError(f"the sampler {name} needs a process that only masks (absorb); use 'analytic'")

    return StepRule.from_leap(name, leap, jump_first=True, check=check)
