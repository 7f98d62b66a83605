"""The proposal of noisy sequences: the state of one position is forced, which keeps the variance finite as t -> 0.

Shapes: B sequences, L positions, V vocabulary. A position is in one of three cases: `same` (x_t = x0), `moved` (another
token), `masked`, with probabilities p = (c, (V-1) b, a) at time t.

At a small t almost every noisy sequence is clean and costs nothing, and the rare others cost of order 1/t. With x_t
drawn from the process, the second moment of the integrand therefore diverges like the integral of 1/t. Instead, one
position, drawn uniformly, gets its case with other probabilities q, and the rest is drawn from the process. A sequence
is then more probable than under the process by the factor

    odds(x_t) = 1/L sum_i q(case_i) / p(case_i),

a function of the numbers of moved and masked positions only, and the integrand divided by it has the same mean. For
absorb with q all mask, odds = k / (L a) with k masked positions, and the integrand divided by it is the *mean* of
-log f over them, whose scale depends on k but not on t. q(same) may be 0 only if a sequence with only this case costs
nothing. For networks that output ratios (Score) it must be positive: a single token left among masks is a rare context
that may cost more than all others. If shuffled tokens have such ratios, a q that rarely moves one turns likely
sequences into rare draws of large weight; `ScorePath.share` is therefore a mixture of three.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cedd.dynamics.path import Cases, case_probabilities
from cedd.process import Noise

EXTRA_UNIFORMS = 3


def number_of_uniforms(length: int) -> int:
    """The number of uniform numbers for one noisy sequence, for every process."""
    return 2 * length + EXTRA_UNIFORMS


@dataclass(frozen=True)
class DirectedDraw:
    """x_t [B, L], and odds [B]: its probability under the proposal relative to the process."""

    x_t: Tensor
    odds: Tensor


def case_codes(x_t: Tensor, x0: Tensor, noise: Noise) -> Tensor:
    """The case of each position, int8: 0 same, 1 moved, 2 masked."""
    return torch.where(noise.is_mask(x_t), 2, torch.where(x_t == x0, 0, 1)).to(torch.int8)


def _token(u: Tensor, count: int) -> Tensor:
    """0..count-1, uniformly, from u in [0, 1]."""
    return (u * count).long().clamp_max(count - 1)


def plain_draw(x0: Tensor, noise: Noise, uniforms: Tensor) -> Tensor:
    """x_t from the process itself, noise with fields [B]."""
    length = x0.shape[1]
    return noise.move(x0, uniforms[:, :length], _token(uniforms[:, length : 2 * length], noise.vocab_size))


def directed_draw(x0: Tensor, noise: Noise, share: Cases, uniforms: Tensor) -> DirectedDraw:
    """x_t with the case of one position drawn from `share` (q, fields [B] that sum to one)."""
    length, V = x0.shape[1], noise.vocab_size
    x_t = plain_draw(x0, noise, uniforms)
    token_u, case_u, place_u = uniforms[:, -3], uniforms[:, -2], uniforms[:, -1]
    place = _token(place_u, length)[:, None]
    clean = x0.gather(1, place).squeeze(1)
    other = _token(token_u, V - 1)
    other = other + (other >= clean)
    chosen = torch.where(
        case_u < share.masked,
        torch.full_like(clean, V),
        torch.where(case_u < share.masked + share.moved, other, clean),
    )
    x_t = x_t.scatter(1, place, chosen[:, None])
    p = case_probabilities(noise)
    tiny = torch.finfo(torch.float64).tiny
    gain = Cases(share.same / p.same, share.moved / p.moved.clamp_min(tiny), share.masked / p.masked.clamp_min(tiny))
    wide = Cases(gain.same[:, None], gain.moved[:, None], gain.masked[:, None])
    return DirectedDraw(x_t, wide.pick(x_t, x0, noise).mean(1))
