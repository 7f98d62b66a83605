"""Scores of each token of a text: its probability, and that of its most probable replacement.

Shapes: W windows, L positions, V vocabulary, N tokens of the text, R rows.

The text is read in windows as noisy data at a small t. A model of typing errors then replaces the noise of the process
(`best_replacement`): a wrong letter is another letter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cedd.data.text import Flags, Ids
from cedd.data.windows import windows
from cedd.models.loaded_model import LoadedModel
from cedd.network import Network, Places
from cedd.process import TokenProcess
from cedd.quadrature import bisect
from cedd.samplers.grids import LAST_TIME
from cedd.schedules import double
from cedd.spelling.changes import Watch as Watch

BATCH = 16
"""Windows per batch."""
Floats = NDArray[np.float64]
Scorer = Callable[..., "TokenScores"]
"""`score_tokens` with all arguments bound but the text and `earlier`."""
_TINY = 1e-300


@dataclass(frozen=True)
class TokenScores:
    """For each token, [N]: the likeliest other token, its probability, and the token's own."""

    best: Ids
    confidence: Floats
    own: Floats
    surprise: Floats
    """-log g of the token, where g is its leave-one-out probability."""
    swap_gain: Floats
    """Gain in log-probability of transposing the token and the next one, each by itself (`swap_gain`)."""

    @property
    def columns(self) -> tuple[NDArray[Any], ...]:
        return self.best, self.confidence, self.own, self.surprise, self.swap_gain

    @property
    def trust(self) -> Floats:
        """p_keep / (p_keep + p_best): the token's probability relative to its most probable replacement."""
        return self.own / np.maximum(self.own + self.confidence, _TINY)

    @property
    def log_odds(self) -> Floats:
        """log(best / own): the evidence for the replacement."""
        return np.log(np.maximum(self.confidence, _TINY)) - np.log(np.maximum(self.own, _TINY))

    def suspicious(self, threshold: float) -> Flags:
        """Which tokens should be replaced."""
        return self.trust < min(threshold, 0.5)

    def where(self, chosen: Flags, other: TokenScores) -> TokenScores:
        """These scores at the chosen tokens, and the other ones elsewhere."""
        return TokenScores(*(np.where(chosen, a, b) for a, b in zip(self.columns, other.columns, strict=True)))

    def strongest(self, wanted: Flags, reach: int, pairs: NDArray[np.intp] | None = None) -> Flags:
        """The wanted changes that are the strongest within `reach`.

        `pairs` are the first tokens of pairs that change together or not at all.
        """
        turn = wanted & local_maxima(np.where(wanted, np.abs(self.log_odds), -np.inf), reach)
        if pairs is not None:
            turn[pairs] = turn[pairs + 1] = turn[pairs] & turn[pairs + 1]
        return turn


MOST_SURPRISE = 4.0
"""Limit of a single letter's surprise, so that one name or mistake does not make a whole line surprising."""


def mean_surprise(scores: TokenScores, left: Flags) -> Floats:
    """Mean surprise of the text around each token, in nats per letter, [N].

    The mean over unchanged letters within 64 tokens (fewer than 32 count as 32). An English model predicts corrected
    English as well as error-free English, and other languages badly even if few of their letters are suspicious.
    """
    surprise = np.where(left, np.minimum(scores.surprise, MOST_SURPRISE), 0.0)
    return sums_within(surprise, 64) / np.maximum(sums_within(left, 64), 32)


def sums_within(values: NDArray[Any], reach: int) -> Floats:
    """The sum of all values within `reach` of each position, [N]."""
    return np.convolve(values.astype(np.float64), np.ones(2 * reach + 1), "full")[reach : reach + len(values)]


def local_maxima(strength: Floats, reach: int) -> Flags:
    """Positions where no value within `reach` is larger, [N]. The windows of the running maximum double in width."""
    reach = min(reach, len(strength))
    highest, width, window = np.pad(strength, reach, constant_values=-np.inf), 1, 2 * reach + 1
    while width < window:
        step = min(width, window - width)
        highest, width = np.maximum(highest[:-step], highest[step:]), width + step
    return strength >= highest


# ----------------------------------------------------------------------------------------------------------------
# Rates and times


def rate_of_time(process: TokenProcess, t: float) -> float:
    """The share of wrong tokens among unmasked tokens at time t.

    An unmasked token has been redrawn from all V with probability (alive - keep)/alive = 1 - exp(-beta), and is then
    wrong except for one draw in V: rate = (1 - exp(-beta(t))) (1 - 1/V).
    """
    return -float(torch.expm1(-process.beta(t))) * (1 - 1 / process.vocab_size)


def time_of_rate(process: TokenProcess, rate: float) -> float:
    """The time of this rate: beta(t) = -log(1 - rate V/(V-1)), by bisection, since beta never decreases.

    For log-linear uniform t is nearly the rate itself; for log-linear roulette (1-t)^((1-p_m)/p_m) = 1 - rate V/(V-1),
    both up to the schedule's eps.
    """
    most = rate_of_time(process, 1.0)
    if not 0 < rate < most:
        raise ValueError(f"rate must be in (0, {most:.3g}) for this model's process unless t is given (got {rate:g})")
    beta = double(-math.log1p(-rate * process.vocab_size / (process.vocab_size - 1)))
    return max(float(bisect(process.beta, beta, 0.0, 1.0, halvings=40)), 2 * LAST_TIME)


# ----------------------------------------------------------------------------------------------------------------
# The network's scores, window by window


@torch.no_grad()
def score_tokens(
    loaded: LoadedModel,
    ids: Ids,
    groups: NDArray[np.int64],
    t: float,
    rate: float,
    *,
    earlier: tuple[TokenScores, Flags] | None = None,
    watch: Watch | None = None,
) -> TokenScores:
    """The scores of each token of a text (see `best_replacement`).

    `earlier`: scores of an earlier version of the text, and the tokens that have changed since. Windows without a
    change keep their scores.
    """
    cuts = windows(len(ids), loaded.length)
    whole = len(cuts)
    network = Network.of(loaded.model, loaded.process.vocab_size, loaded.device)
    kinds = torch.from_numpy(groups).to(network.device)
    nothing = np.zeros(len(ids))
    scores = TokenScores(ids, nothing, nothing + 1, nothing, nothing) if earlier is None else earlier[0]
    scores = TokenScores(*(values.copy() for values in scores.columns))
    if earlier is not None:
        cuts = [w for w in cuts if earlier[1][w.start : w.stop].any()]
    for begin in range(0, len(cuts), BATCH):
        group = cuts[begin : begin + BATCH]
        x = torch.from_numpy(np.stack([ids[w.start : w.stop] for w in group])).to(network.device)
        columns = [column.cpu().numpy() for column in _score_windows(loaded, network, x, kinds, t, rate)]
        for row, w in enumerate(group):
            inside = slice(w.first - w.start, w.last - w.start)
            for target, column in zip(scores.columns, columns, strict=True):
                target[w.first : w.last] = column[row, inside]
        if watch is not None:
            watch(len(group) / whole)
    return scores


def log_posteriors(
    loaded: LoadedModel, network: Network, x: Tensor, places: Tensor, t: float
) -> Iterator[tuple[Tensor, slice]]:
    """log p(x_0 | x) at flat places [R] of windows x [W, L], read as noisy data at time t, in parts [r, V] with the
    slice of places of each."""
    noise, seen = loaded.process.noise(t).to(x.device), x.flatten()[places]
    for outputs, rows in network.rows(x, noise.sigma, Places(places)).chunks():
        tokens = seen[rows]
        yield loaded.method.parameterization.log_posterior(outputs, tokens, noise.like(tokens)), rows


def _score_windows(
    loaded: LoadedModel, network: Network, x: Tensor, groups: Tensor, t: float, rate: float
) -> list[Tensor]:
    """The columns of `TokenScores` for windows of the text, [W, L] each, computed in chunks of the vocabulary head."""
    flat, noise_rate = x.flatten(), rate_of_time(loaded.process, t)
    sides = torch.stack([x.roll(1, 1), x.roll(-1, 1)], -1).flatten(0, 1)  # [W L, 2]
    parts: list[tuple[Tensor, ...]] = []
    for log_posterior, rows in log_posteriors(loaded, network, x, torch.arange(len(flat), device=x.device), t):
        replacement = best_replacement(log_posterior, flat[rows], groups, noise_rate, rate)
        unseen = leave_one_out(log_posterior, torch.cat([flat[rows][:, None], sides[rows]], -1), noise_rate)
        parts.append((*replacement, unseen))
    *replacement, unseen = (torch.cat(column) for column in zip(*parts, strict=True))
    unseen = unseen.view(*x.shape, 3)
    return [*(column.view(x.shape) for column in replacement), -unseen[..., 0], swap_gain(unseen)]


def best_replacement(
    log_posterior: Tensor, x: Tensor, groups: Tensor, noise_rate: float, rate: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The likeliest token other than x, its probability, and that of x itself; [R] each.

    The network's log p(x_0 | x_t) [R, V] assumes that x comes from its own process at t: right with probability 1 - r,
    and wrong as each of V - 1 tokens with r / (V - 1), r = `noise_rate`. In a *typed* text x is wrong with probability
    `rate`, and the intended token is one of the G - 1 others of its group (a letter of the same case). Bayes' rule
    replaces the first assumption by the second: tokens outside the group are excluded, and the odds of x fall by

        [(1 - r) (V - 1) / r]  /  [(1 - rate) (G - 1) / rate].

    If the likeliest other token is outside the group, the intended token cannot be written, and x is kept.
    """
    V = log_posterior.shape[-1]
    allowed = (groups == groups[x][:, None]) & (groups >= 0)  # [R, V]
    size = allowed.sum(-1).clamp_min(2).to(log_posterior)
    shift = torch.log((size - 1) / (V - 1)) + log_odds(noise_rate) - log_odds(rate)
    best = log_posterior.scatter(-1, x[:, None], -math.inf).argmax(-1)
    posterior = log_posterior.scatter_add(-1, x[:, None], shift[:, None]).masked_fill(~allowed, -math.inf).softmax(-1)
    own, confidence = (posterior.gather(-1, token[:, None]).squeeze(-1) for token in (x, best))
    stays = ~allowed.gather(-1, best[:, None]).squeeze(-1)
    return torch.where(stays, x, best), torch.where(stays, 0.0, confidence), torch.where(stays, 1.0, own)


def leave_one_out(log_posterior: Tensor, tokens: Tensor, noise_rate: float) -> Tensor:
    """log g of several tokens, [R, K], the first of which is x: their probabilities given all the text but x.

    Bayes' rule is inverted, since the network has seen x: its posterior f has the odds of x raised by e = (1 - r) (V -
    1) / r, r = `noise_rate`, so g is f, but f / e at x, divided by the sum 1 - f_x + f_x / e.
    """
    log_e = math.log(log_posterior.shape[-1] - 1) - log_odds(noise_rate)
    log_f = log_posterior.gather(-1, tokens)
    log_f_x = log_f[:, :1]
    total = torch.log(-torch.expm1(log_f_x.clamp_max(0.0)) + torch.exp(log_f_x - log_e))
    return torch.where(tokens == tokens[:, :1], log_f - log_e, log_f) - total


def swap_gain(unseen: Tensor) -> Tensor:
    """The gain in log g of the right neighbour in the token's place, plus that of the token in its neighbour's, [W, L];
    0 at the last token. Computed from log g of the token, its left and its right neighbour, [W, L, 3]."""
    preferred = unseen[..., 1:] - unseen[..., :1]
    return torch.nn.functional.pad(preferred[:, :-1, 1] + preferred[:, 1:, 0], (0, 1))


def log_odds(probability: float) -> float:
    """log p/(1-p)."""
    return math.log(probability) - math.log1p(-probability)
