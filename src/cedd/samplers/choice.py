"""Drawing a token: inverse CDF in float64, temperature and top-p.

Shapes: R rows, V vocabulary. Functions take only the rows of positions that may change.

The argmax of log-probabilities plus Gumbel noise is not used: float32 noise is at most about 16.6, so tokens with less
than about 6e-8 of the largest probability are drawn too rarely or never, and a vocabulary can have 50,000 of them. The
inverse CDF with one uniform float64 number has no such truncation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from numbers import Integral

import torch
from torch import Tensor

from cedd.dynamics.rules import StepRule
from cedd.parameterization import Affine, Leap, at_token, put_at_token
from cedd.process import Noise
from cedd.samplers.options import check_sharpening


def inverse_cdf(weights: Tensor, u: Tensor, *, log: bool = False) -> Tensor:
    """Index drawn from weights [R, V] >= 0 (of any sum > 0) with uniform numbers u [R] in [0, 1): [R] int64.

    It works on two levels of about sqrt(V): sums of blocks, then one block. An entry of weight 0 is never drawn.
    log: whether the weights are logarithms, of any dtype.
    """
    rows, size = weights.shape
    width = math.isqrt(size - 1) + 1
    count = -(-size // width)
    padded = weights.new_empty(rows, count * width, dtype=torch.float64)
    padded[:, size:].zero_()
    if log:
        # Relative to the largest, so that none overflows; the sum of a row does not matter.
        torch.sub(weights, weights.amax(-1, keepdim=True).double(), out=padded[:, :size]).exp_()
    else:
        padded[:, :size] = weights
    blocks = padded.view(rows, count, width)
    block, rest = _first_beyond(blocks.sum(-1), u.to(weights.device, torch.float64), relative=True)
    inside = blocks.gather(1, block[:, None, None].expand(rows, 1, width)).squeeze(1)
    place, _ = _first_beyond(inside, rest, relative=False)
    return (block * width + place).clamp_max(size - 1)  # out of range only for a row of nan, which is refused elsewhere


_ROUNDED_BY = 1e-9
"""Upper bound on the rounding error of the sum of a distribution."""


def is_surely_mask(v: Tensor, chance: Tensor) -> Tensor:
    """Positions where `inverse_cdf` of a distribution over the n states gives the mask for numbers v, for any
    probabilities of the tokens.

    The mask is the last state, with this probability. Most masks that stay are found without further computation, and
    the result is the same.
    """
    return v >= 1 - chance + _ROUNDED_BY


def may_move(v: Tensor, stay: Tensor, is_mask: Tensor) -> Tensor:
    """Positions where `inverse_cdf` of a distribution over the n states may give a state other than the current one.

    The current state has at least the probability `stay`, and the states before it have at most the rest. It is
    therefore drawn for all v between the rest and `stay`, and a mask, the last state, for all v above the rest.
    """
    rest = 1 - stay + _ROUNDED_BY
    return ~((v > rest) & (is_mask | (v < 1 - rest)))


def _first_beyond(weights: Tensor, target: Tensor, relative: bool) -> tuple[Tensor, Tensor]:
    """The first index whose cumulated weight exceeds the target (a share of the total if `relative`), and how far
    the target lies inside that entry."""
    edges = weights.cumsum(-1)
    total = edges[:, -1]
    goal = target * total if relative else target
    # By rounding the target can equal the total: then it is the last entry with a positive weight.
    goal = torch.minimum(goal, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(edges, goal[:, None], right=True).clamp_max(weights.shape[1] - 1)
    before = (edges.gather(1, index) - weights.gather(1, index)).squeeze(1)
    return index.squeeze(1), (goal - before).clamp_min(0.0)


def check_excluded(tokens: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """Excluded tokens in order; raises a ValueError if they are not tokens, or if none is left."""
    if isinstance(tokens, str) or not all(isinstance(token, Integral) for token in tokens):
        raise ValueError(f"exclude takes token ids, as in tokenizer.encode(text) (got {tokens!r})")
    excluded = tuple(sorted(set(tokens)))
    if excluded and not (excluded[0] >= 0 and excluded[-1] < vocab_size and len(excluded) < vocab_size):
        shown = f"{excluded[0]}, ..., {excluded[-1]}: {len(excluded)} tokens" if len(excluded) > FEW else str(excluded)
        raise ValueError(f"the tokens to exclude must be in 0..{vocab_size - 1} and leave one to draw (got {shown})")
    return excluded


FEW = 8
"""Largest number of tokens that are excluded one by one."""


@lru_cache(maxsize=16)
def _tokens(tokens: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(tokens, device=device)


@dataclass(frozen=True)
class Sharpening:
    """Changes to the distribution of a token.

    temperature: divisor of the logits; 0 takes the most probable token.
    top_p: only the most probable tokens that together have this probability remain.
    excluded: tokens that are never drawn; the others are renormalized.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    excluded: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_sharpening(self.temperature, self.top_p)

    @property
    def active(self) -> bool:
        """Whether it changes the distribution beyond excluding tokens."""
        return self.temperature != 1.0 or self.top_p != 1.0

    @property
    def plain(self) -> Sharpening:
        """The same without temperature and top-p, because at temperature 0 all distributions are equally confident."""
        return Sharpening(excluded=self.excluded)

    def without(self, values: Tensor, nothing: float) -> Tensor:
        """The values [R, V] or [R, n], with `nothing` at excluded tokens."""
        if self.excluded:
            values = values.clone()
            if len(self.excluded) > FEW:
                return values.index_fill_(1, _tokens(self.excluded, values.device), nothing)
            for token in self.excluded:  # one slice each, so that no index is copied to the device
                values[:, token].fill_(nothing)
        return values

    def log_probs(self, logits: Tensor) -> Tensor:
        """log softmax of logits [R, V] after sharpening; -inf at removed tokens."""
        logits = self.without(logits, -math.inf)
        if self.temperature == 0:
            best = logits.argmax(-1, keepdim=True)
            return torch.full_like(logits, -math.inf).scatter(-1, best, 0.0)
        log_probs = torch.log_softmax(logits if self.temperature == 1 else logits / self.temperature, -1)
        return self._nucleus(log_probs) if self.top_p < 1 else log_probs

    def draw(self, logits: Tensor, u: Tensor) -> Tensor:
        """Tokens [R] from softmax(logits [R, V]) after sharpening, by uniform numbers u [R]."""
        sharp = self.log_probs(logits.double()) if self.active else self.without(logits, -math.inf)
        return inverse_cdf(sharp, u, log=True)

    def _nucleus(self, log_probs: Tensor) -> Tensor:
        if log_probs.device.type != "cpu":
            return torch.log_softmax(self._kept(log_probs), -1)
        # Tokens below this have together less than 1 - top_p, so none of them remains and they need not be sorted.
        least = math.log((1 - self.top_p) / log_probs.shape[-1]) - _ROUNDED_BY
        found = torch.full_like(log_probs, -math.inf)
        for row, result in zip(log_probs, found, strict=True):
            some = (row > least).nonzero().squeeze(1)
            result[some] = self._kept(row[some])
        return torch.log_softmax(found, -1)

    def _kept(self, log_probs: Tensor) -> Tensor:
        """The values [..., n], -inf at all but the most probable tokens."""
        ordered, places = log_probs.sort(dim=-1, descending=True, stable=True)
        probs = ordered.exp()
        kept = ordered.masked_fill_(probs.cumsum(-1) - probs >= self.top_p, -math.inf)
        return torch.empty_like(log_probs).scatter_(-1, places, kept)

    def ratios(self, outputs: Tensor, masked: Tensor) -> Tensor:
        """Outputs [R, V] of a network that outputs ratios, without the excluded tokens.

        Given that x_0 is not excluded, the ratio of two tokens is unchanged, and the ratios at a mask are larger: the
        other tokens share the sum.
        """
        if not self.excluded:
            return outputs
        rest = self.without(outputs, -math.inf)
        shared = outputs.logsumexp(-1) - rest.logsumexp(-1)
        return rest + torch.where(masked, shared, 0.0)[:, None]

    def jumps(self, law: Tensor, x_t: Tensor) -> Tensor:
        """A distribution [R, n] with the same probability of staying at x_t and sharpened probabilities of jumps.

        This is for networks that output ratios, which have no distribution of x_0 to sharpen.
        """
        law = self.without(law, 0.0)
        if not self.active:
            return law
        stay = law.gather(-1, x_t[:, None])
        others = law.scatter(-1, x_t[:, None], 0.0)
        sharp = self.log_probs(torch.log(others)).exp()
        sharp = torch.where(others.sum(-1, keepdim=True) > 0, sharp * others.sum(-1, keepdim=True), others)
        return sharp.scatter(-1, x_t[:, None], stay)


@dataclass(frozen=True)
class Reveal:
    """`Sharpening.draw` as a function that equals that of an equal sharpening (see `OutputRows.apply`)."""

    sharpening: Sharpening

    @property
    def of_tensors(self) -> bool:
        return not self.sharpening.active

    def __call__(self, outputs: Tensor, u: Tensor) -> Tensor:
        return self.sharpening.draw(outputs, u)


def beliefs(parameterization: Affine, sharpening: Sharpening, outputs: Tensor, x: Tensor, noise: Noise) -> Tensor:
    """log of the network's probabilities [R, V], sharpened like p(x_0 | x_t).

    If they do not include the likelihood of x itself (bayes), it is added before and removed afterwards. Without it the
    distribution is broad, and sharpening it would change tokens about which the model is certain.
    """
    if not sharpening.active:
        return torch.log_softmax(sharpening.without(outputs, -math.inf), -1)
    posterior = sharpening.log_probs(parameterization.posterior_logits(outputs, x, noise))
    without = at_token(posterior, x) - parameterization.evidence(x, noise)
    return torch.log_softmax(put_at_token(posterior, x, without, noise.is_mask(x)), -1)


def leap_of(
    rule: StepRule,
    parameterization: Affine,
    sharpening: Sharpening,
    outputs: Tensor,
    x: Tensor,
    now: Noise,
    next_: Noise,
) -> tuple[Leap, Tensor]:
    """A rule's step at positions x [R] with outputs [R, V] (float64), and the probabilities [R, V] that it uses."""
    if sharpening.active:
        probs = beliefs(parameterization, sharpening, outputs, x, now).exp_()
    else:  # saves a sweep over [R, V]
        probs = torch.softmax(sharpening.without(outputs, -math.inf), -1)
    return rule.leap(parameterization.coefficients(at_token(probs, x).log(), x, now), next_), probs


def jump_weights(leap: Leap, probs: Tensor, x: Tensor, now: Noise, sharpening: Sharpening) -> Tensor:
    """Weights of the new tokens at positions x [R] that jump, [R, V]: floor + slope p, and 0 at the current token."""
    weights = torch.addcmul(leap.floor[:, None], leap.slope[:, None], probs).clamp_min_(0.0)
    here = x.clamp_max(weights.shape[-1] - 1)[:, None]
    weights.scatter_(-1, here, weights.gather(-1, here) * now.is_mask(x)[:, None])
    return sharpening.without(weights, 0.0)
