"""The bound of discrete flow matching from a mask source, with or without its corrector.

The path is absorb's kernel with kappa = alive, the flow time being s = 1 - t, so that with Q = alpha' the mask clock's
rate kappa'/kappa = alpha' and kappa'/(1-kappa) = alpha' / (exp(alpha) - 1). The learned velocity moves *every* position
towards the prediction p(. | x_t), and the corrector moves unmasked ones back to the mask:

    v = a_s u_hat - b_s u_check,      u_hat = kappa'/(1-kappa) (p - delta),      u_check = kappa'/kappa (delta - mask)

The path-space KL of the conditional path (a mask turns into x0 at rate kappa'/(1-kappa)) from it is (the paper's B, end
of its appendix B; x0 here is its x_1)

    masked:     kappa'/(1-kappa) [ a - 1 - log a - log p(x0) ]
    unmasked:   a kappa'/(1-kappa) (1 - p(x_t)) + b kappa'/kappa

As t -> 0 the unmasked term is of the order of (1 - p(x_t)) / t: unless the network copies unmasked tokens perfectly,
the integral down to 0 diverges and so does the bound, since the flow then moves tokens infinitely often. A sampler
stops before. So does the bound: at t = `low` the masks that are left are read off the prediction, at -log p(x0) each,
and the tokens stay. This, with KL(p_{1|0} || p_r) at the other end, is a true bound on what such a sampler draws.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cedd.bounds.proposal import Cases
from cedd.bounds.rows import PathCost
from cedd.objectives.objective import Rows
from cedd.parameterization import at_token, put_at_token
from cedd.process import Noise

FLOW_LOW = 1e-4
"""Where the flow stops unless told otherwise."""


@dataclass(frozen=True)
class Corrector:
    """a_s = 1 + strength s^start (1-s)^stop, b_s = a_s - 1, at flow time s = 1 - t (the paper: 1, 1/2, 1/2)."""

    strength: float = 1.0
    start: float = 0.5
    stop: float = 0.5

    def __post_init__(self) -> None:
        if min(self.strength, self.start, self.stop) < 0:
            raise ValueError(f"a corrector's strength and powers must not be negative; got {self}")

    def excess(self, t: Tensor) -> Tensor:
        """a_s - 1 = b_s."""
        return self.strength * (1 - t) ** self.start * t**self.stop


NO_CORRECTOR = Corrector(strength=0.0)


@dataclass(frozen=True)
class FlowPath(PathCost):
    """The integrand of the module's head."""

    corrector: Corrector = NO_CORRECTOR

    def positions(self, x_t: Tensor, noise: Noise) -> Tensor:
        return torch.ones_like(x_t, dtype=torch.bool)

    def rows(self, outputs: Tensor, rows: Rows) -> Tensor:
        noise, masked = rows.noise, rows.noise.is_mask(rows.x_t)
        logits = outputs.float() if outputs.dtype in (torch.bfloat16, torch.float16) else outputs
        normaliser = torch.logsumexp(logits, -1).double()
        log_p = at_token(logits, rows.x0).double() - normaliser
        # 1 - p(x_t) as the sum over the other tokens: 1 minus a float32 number near 1 has no digits left
        others = torch.logsumexp(put_at_token(logits, rows.x_t, -torch.inf, masked), -1).double()
        excess = self.corrector.excess(noise.t)
        unmasking = noise.alpha_rate / noise.expm1_alpha
        at_mask = unmasking * (excess - torch.log1p(excess) - log_p)
        at_token_ = (1 + excess) * unmasking * torch.exp(others - normaliser) + excess * noise.alpha_rate
        return torch.where(masked, at_mask, at_token_)

    def magnitude(self, noise: Noise) -> Cases:
        unmasking = noise.alpha_rate * noise.alive
        return Cases(
            same=unmasking * (0.3 + self.corrector.excess(noise.t)),
            moved=torch.zeros_like(unmasking),
            masked=unmasking,
        )
