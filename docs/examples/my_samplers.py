"""Samplers of your own, for Python and for `cedd sample --sampler docs.examples.my_samplers:REMASKING`."""

from collections.abc import Callable
from dataclasses import dataclass

# region rule
import torch
from torch import Tensor

from cedd.network import put_at
from cedd.parameterization import AffineScore
from cedd.process import Noise
from cedd.samplers import CONFIDENCE_ORDERS, ConfidenceOrder, Leap, StepRule


def remasking(strength: float) -> StepRule:
    """A step on absorb that masks tokens again with probability `remask`, and reveals more masks to compensate.

    a is the share of masks in the process, and alive = 1 - a. To keep this share, a(t) stay + alive(t) remask = a(s).
    """

    def leap(score: AffineScore, earlier: Noise) -> Leap:
        noise, masked = score.noise, score.masked
        remask = (strength * (noise.t - earlier.t)).clamp(max=(earlier.a / noise.alive).clamp(max=1.0))
        stay = torch.where(masked, (earlier.a - noise.alive * remask) / noise.a, 1 - remask)
        nothing = torch.zeros_like(stay)
        return Leap(stay, torch.where(masked, nothing, remask), floor=nothing, slope=masked.double())

    return StepRule.from_leap("remasking", leap, jump_first=True)


REMASKING = remasking(8.0)
# endregion


# region sampler
@dataclass(frozen=True)
class AboveThreshold(ConfidenceOrder):
    """Reveals the most confident mask, and all masks whose best token has at least this probability."""

    name: str = "above-threshold"
    confidence: Callable[[Tensor], Tensor] = CONFIDENCE_ORDERS["probability"].confidence
    threshold: float = 0.9

    def chosen(self, log_probs: Tensor, places: Tensor, masked: Tensor, steps_left: int) -> Tensor:
        """Which of the masks [R], at these places of the flattened batch, are revealed now: [B, L] bool."""
        first = super().chosen(log_probs, places, masked, steps_left=masked.shape[1])
        return first | put_at(torch.zeros_like(masked), places, self.confidence(log_probs) >= self.threshold)


# endregion
