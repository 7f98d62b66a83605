"""The integrand of the bounds, position by position, and the part of it that is known without a network.

    J1 = E int l    + KL(p_{1|0} || p_r)                        l = lbar + K
    J2 = E int lbar - int E[out-rate] + H(p_1, p_r)

with lbar = s - r log s the score entropy (cedd.objectives.score_entropy) and K(r) = r (log r - 1). With the terminal
terms kept the two are equal: K + out-rate depends on (x_t, x0, t) only, its mean at each t is known, and the integral
of that mean is H(p_{1|0}). So lbar + c (K + out-rate - its mean), for any c, has the same expectation.

    K:  masked alpha' [(V-1) K(b/a) + K(c/a)];   x = x0: beta'/V (V-1) K(b/c);   x != x0: beta'/V [K(c/b) - (V-2)]
    out-rate:  masked 0;   unmasked alpha' + beta' (1 - 1/V)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cedd.process import Noise

_TINY = torch.finfo(torch.float64).tiny


def _k(ratio: Tensor) -> Tensor:
    """K(r) = r (log r - 1), 0 at r = 0."""
    return torch.xlogy(ratio, ratio) - ratio


@dataclass(frozen=True)
class KnownTerms:
    """K and the out-rate at each position; both [*S] float64."""

    entropy: Tensor
    out_rate: Tensor


def _entropy_by_case(noise: Noise) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of Q_t(x_t, y) K(r_y) over y != x_t at a mask, at the clean token, and at another token."""
    V, e = noise.vocab_size, noise.expm1_beta
    expm1_alpha = noise.expm1_alpha.clamp_min(_TINY)
    b_over_a = -torch.expm1(-noise.beta) / (V * expm1_alpha)
    c_over_a = b_over_a + torch.exp(-noise.beta) / expm1_alpha
    shuffle = noise.beta_rate / V
    masked = noise.alpha_rate * ((V - 1) * _k(b_over_a) + _k(c_over_a))
    same = shuffle * (V - 1) * _k(e / (e + V))
    moved = shuffle * (_k(1 + V / e.clamp_min(_TINY)) - (V - 2))
    no_shuffle = noise.beta <= 0
    return masked, torch.where(no_shuffle, 0.0, same), torch.where(no_shuffle, 0.0, moved)


def known_terms(x_t: Tensor, x0: Tensor, noise: Noise) -> KnownTerms:
    """K and the out-rate at each position, for x_t, x0 [*S] and a noise of shape [*S]."""
    is_mask = noise.is_mask(x_t)
    masked, same, moved = _entropy_by_case(noise)
    leave = noise.alpha_rate + noise.beta_rate * (1 - 1 / noise.vocab_size)
    return KnownTerms(
        entropy=torch.where(is_mask, masked, torch.where(x_t == x0, same, moved)),
        out_rate=torch.where(is_mask, 0.0, leave),
    )


def mean_known_terms(noise: Noise) -> KnownTerms:
    """Their means over x_t given t, the same for every x0: weights a (masked), c (same), (V-1) b (moved)."""
    masked, same, moved = _entropy_by_case(noise)
    others = (noise.vocab_size - 1) * noise.b
    leave = noise.alpha_rate + noise.beta_rate * (1 - 1 / noise.vocab_size)
    is_possible = noise.alpha > 0
    return KnownTerms(
        entropy=torch.where(is_possible, noise.a * masked, 0.0) + noise.c * same + others * moved,
        out_rate=noise.alive * leave,
    )
