"""Discrete flow matching from a mask source: cross entropy over all positions.

Its path is absorb's kernel with alive = kappa, where the flow time is 1 - t: kappa = t is the log-linear schedule,
kappa = t^k the polynomial one (both up to their eps). Only its velocity differs, and that is the sampler's matter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cedd.objectives.cross_entropy import CrossEntropy
from cedd.process import Noise, TokenProcess


@dataclass(frozen=True)
class FlowMatching(CrossEntropy):
    """Cross entropy at every position, masked or not."""

    def check(self, process: TokenProcess) -> None:
        if not process.has_mask or process.can_shuffle:
            raise ValueError("dfm runs from a mask source; use absorb(V, Polynomial(power=k)) for kappa = t^k")

    def positions(self, x_t: Tensor, noise: Noise) -> Tensor:
        return torch.ones_like(x_t, dtype=torch.bool)
