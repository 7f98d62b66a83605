"""The terms of the bound's integrand that need no network: K and the out-rate, per position and on average."""

from dataclasses import dataclass

import torch
from torch import Tensor

from cedd import Noise
from cedd.dynamics.reverse import known_entropy


@dataclass(frozen=True)
class KnownTerms:
    """K and the out-rate at each position; both [*S] float64."""

    entropy: Tensor
    out_rate: Tensor


def known_terms(x_t: Tensor, x0: Tensor, noise: Noise) -> KnownTerms:
    """K and the out-rate at each position, for x_t, x0 [*S] and a noise of shape [*S]."""
    leave = noise.alpha_rate + noise.beta_rate * (1 - 1 / noise.vocab_size)
    return KnownTerms(known_entropy(noise).pick(x_t, x0, noise), torch.where(noise.is_mask(x_t), 0.0, leave))


def mean_known_terms(noise: Noise) -> KnownTerms:
    """Means of the known terms over x_t given t, equal for every x0: weights a (masked), c (same), (V-1) b (moved)."""
    known, others = known_entropy(noise), (noise.vocab_size - 1) * noise.b
    masked = torch.where(noise.alpha > 0, noise.a * known.masked, 0.0)
    leave = noise.alpha_rate + noise.beta_rate * (1 - 1 / noise.vocab_size)
    return KnownTerms(masked + noise.c * known.same + others * known.moved, noise.alive * leave)
