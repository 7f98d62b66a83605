"""What a model thinks of each token of a text: the likeliest other one, and how far it trusts what is there.

Shapes: W windows, L positions, V vocabulary, N tokens of the text, R rows.

The text is read in windows as if it were noisy data at a small t; what is known of typed mistakes then replaces the
noise of the process (`judge`): a wrong letter is another letter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cedd.data.text import Ids
from cedd.models.loaded import Setting
from cedd.network import Network, Places
from cedd.process import TokenProcess
from cedd.samplers.grids import LAST_TIME

BATCH = 16
"""Windows that are read at once."""
Watch = Callable[[float], None]
"""Told, now and then, how much the network has read since, in whole texts."""
Think = Callable[..., "Opinion"]
"""`ask` but for the text, and `earlier`."""


@dataclass(frozen=True)
class Opinion:
    """What the model thinks of each token, [N]: the likeliest other one, that one's probability and its own."""

    best: Ids
    confidence: NDArray[np.float64]
    own: NDArray[np.float64]
    surprise: NDArray[np.float64]
    """-log g of the token, g being what the model believes before it sees it."""
    exchange: NDArray[np.float64]
    """How far it would have the token and the next one the other way round (`exchange_wish`)."""

    @property
    def columns(self) -> tuple[NDArray[Any], ...]:
        return self.best, self.confidence, self.own, self.surprise, self.exchange

    @property
    def trust(self) -> NDArray[np.float64]:
        """own / (own + best): what the token weighs beside its likeliest replacement."""
        return self.own / np.maximum(self.own + self.confidence, 1e-300)

    def doubted(self, threshold: float) -> NDArray[np.bool_]:
        """Which tokens should be replaced."""
        return self.trust < min(threshold, 0.5)

    def where(self, chosen: NDArray[np.bool_], other: Opinion) -> Opinion:
        """This opinion of the chosen tokens, and the other one of the rest."""
        return Opinion(*(np.where(chosen, a, b) for a, b in zip(self.columns, other.columns, strict=True)))

    @property
    def log_odds(self) -> NDArray[np.float64]:
        """log(best / own): what speaks for the replacement."""
        return np.log(np.maximum(self.confidence, 1e-300)) - np.log(np.maximum(self.own, 1e-300))

    def surest_of(
        self, wanted: NDArray[np.bool_], reach: int, pairs: NDArray[np.intp] | None = None
    ) -> NDArray[np.bool_]:
        """The wanted changes within whose `reach` no other wanted one is stronger.

        pairs: the first ones of two that change together or not at all.
        """
        turn = wanted & surest(np.where(wanted, np.abs(self.log_odds), -np.inf), reach)
        if pairs is not None:
            turn[pairs] = turn[pairs + 1] = turn[pairs] & turn[pairs + 1]
        return turn


MOST_SURPRISE = 4.0
"""A single letter counts for no more, so that a name or a mistake does not make a whole line strange."""


def strangeness(opinion: Opinion, left: NDArray[np.bool_]) -> NDArray[np.float64]:
    """How little the model could foretell the text around each token, in nats a letter, [N].

    The mean surprise of the letters that were left within 64 tokens (of fewer than 32 as if there were 32). To an
    English model corrected English is as easy to foretell as English without mistakes; another language, or none, is
    not, however few of its letters the model doubts.
    """
    surprise = np.where(left, np.minimum(opinion.surprise, MOST_SURPRISE), 0.0)
    return within(surprise, 64) / np.maximum(within(left, 64), 32)


def within(values: NDArray[Any], reach: int) -> NDArray[np.float64]:
    """The sum of what lies within `reach` of each, [N]."""
    return np.convolve(values.astype(np.float64), np.ones(2 * reach + 1), "full")[reach : reach + len(values)]


def surest(strength: NDArray[np.float64], reach: int) -> NDArray[np.bool_]:
    """Where nothing within `reach` is stronger, [N]: the highest of windows, each twice as wide as the last."""
    reach = min(reach, len(strength))
    highest, width, window = np.pad(strength, reach, constant_values=-np.inf), 1, 2 * reach + 1
    while width < window:
        step = min(width, window - width)
        highest, width = np.maximum(highest[:-step], highest[step:]), width + step
    return strength >= highest


# ----------------------------------------------------------------------------------------------------------------
# Rates and times


def rate_of_time(process: TokenProcess, t: float) -> float:
    """The share of wrong tokens among those that are not masked at time t.

    Such a token has been redrawn from all V with probability (alive - keep)/alive = 1 - exp(-beta), and is then wrong
    but for one draw in V: rate = (1 - exp(-beta(t))) (1 - 1/V).
    """
    return -float(torch.expm1(-process.beta(t))) * (1 - 1 / process.vocab_size)


def time_of_rate(process: TokenProcess, rate: float) -> float:
    """The time of this rate: beta(t) = -log(1 - rate V/(V-1)), by bisection, since beta never decreases.

    For log-linear uniform t is nearly the rate itself; for log-linear roulette (1-t)^((1-p_m)/p_m) = 1 - rate V/(V-1),
    both but for the schedule's eps.
    """
    most = rate_of_time(process, 1.0)
    if not 0 < rate < most:
        raise ValueError(
            f"a rate of wrong tokens must lie in (0, {most:.3g}) for this model's process; got {rate:g}, without t"
        )
    low, high = 0.0, 1.0
    while high - low > 1e-12:
        middle = (low + high) / 2
        low, high = (middle, high) if rate_of_time(process, middle) < rate else (low, middle)
    return max(high, 2 * LAST_TIME)


# ----------------------------------------------------------------------------------------------------------------
# The network's opinion, window by window


@dataclass(frozen=True)
class Window:
    """Tokens start..stop-1, of which it decides those from `first` to `last`-1: the rest is context."""

    start: int
    stop: int
    first: int
    last: int


def windows(count: int, length: int) -> list[Window]:
    """Windows of `length` tokens that overlap by a quarter and together decide every token once."""
    if count <= length:
        return [Window(0, count, 0, count)]
    context = length // 8
    stride = length - 2 * context
    starts = [*range(0, count - length, stride), count - length]
    made: list[Window] = []
    decided = 0
    for start in starts:
        last = count if start == count - length else start + length - context
        made.append(Window(start, start + length, decided, last))
        decided = last
    return made


@torch.no_grad()
def ask(
    setting: Setting,
    ids: Ids,
    groups: NDArray[np.int64],
    t: float,
    rate: float,
    *,
    earlier: tuple[Opinion, NDArray[np.bool_]] | None = None,
    watch: Watch | None = None,
) -> Opinion:
    """What the model thinks of each token of a text (see `judge`).

    earlier: an opinion of the text as it was, and which tokens have changed since: windows without a change keep it.
    """
    cuts = windows(len(ids), setting.folder.length)
    whole = len(cuts)
    network = Network.of(setting.folder.model, setting.vocab_size, setting.device)
    kinds = torch.from_numpy(groups).to(network.device)
    nothing = np.zeros(len(ids))
    opinion = Opinion(ids, nothing, nothing + 1, nothing, nothing) if earlier is None else earlier[0]
    opinion = Opinion(*(values.copy() for values in opinion.columns))
    if earlier is not None:
        cuts = [w for w in cuts if earlier[1][w.start : w.stop].any()]
    for begin in range(0, len(cuts), BATCH):
        group = cuts[begin : begin + BATCH]
        x = torch.from_numpy(np.stack([ids[w.start : w.stop] for w in group])).to(network.device)
        judged = [column.cpu().numpy() for column in _judge_windows(setting, network, x, kinds, t, rate)]
        for row, w in enumerate(group):
            inside = slice(w.first - w.start, w.last - w.start)
            for target, column in zip(opinion.columns, judged, strict=True):
                target[w.first : w.last] = column[row, inside]
        if watch is not None:
            watch(len(group) / whole)
    return opinion


def _judge_windows(
    setting: Setting, network: Network, x: Tensor, groups: Tensor, t: float, rate: float
) -> list[Tensor]:
    """An `Opinion` of windows of the text, [W, L] each, through the vocabulary in chunks."""
    folder: Any = setting.folder
    noise, noise_rate = folder.process.noise(t).to(x.device), rate_of_time(folder.process, t)
    flat = x.flatten()
    sides = torch.stack([x.roll(1, 1), x.roll(-1, 1)], -1).flatten(0, 1)  # [W L, 2]
    parts: list[tuple[Tensor, ...]] = []
    everywhere = Places(torch.arange(len(flat), device=x.device))
    for outputs, rows in network.rows(x, noise.sigma, everywhere).chunks():
        log_posterior = folder.method.parameterization.log_posterior(outputs, flat[rows], noise.like(flat[rows]))
        judged = judge(log_posterior, flat[rows], groups, noise_rate, rate)
        unseen = foretold(log_posterior, torch.cat([flat[rows][:, None], sides[rows]], -1), noise_rate)
        parts.append((*judged, unseen))
    *judged, unseen = (torch.cat(column) for column in zip(*parts, strict=True))
    unseen = unseen.view(*x.shape, 3)
    return [*(column.view(x.shape) for column in judged), -unseen[..., 0], exchange_wish(unseen)]


def judge(
    log_posterior: Tensor, x: Tensor, groups: Tensor, noise_rate: float, rate: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The likeliest token other than x, its probability, and that of x itself; [R] each.

    The network's log p(x_0 | x_t) [R, V] takes x for a token of its own process at t: right with 1 - r, and wrong as
    each of V - 1 tokens with r / (V - 1), r = `noise_rate`. What is known of a *typed* text is something else: x is
    wrong with probability `rate`, and what was meant is one of the G - 1 others of its group (a letter of the same
    case). Bayes' rule puts the one in the place of the other: all outside the group drops out, the odds of x fall by

        [(1 - r) (V - 1) / r]  /  [(1 - rate) (G - 1) / rate].

    Where the likeliest other token of all is outside the group, what was meant cannot be written, and x stays as it is.
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


def foretold(log_posterior: Tensor, tokens: Tensor, noise_rate: float) -> Tensor:
    """log g of several tokens, [R, K], the first of which is x: what all the text but x says of each.

    The network has seen x, and Bayes' rule is undone: its posterior f has the odds of x raised by
    e = (1 - r) (V - 1) / r, r = `noise_rate`, so g is f, but f / e at x, divided by the sum 1 - f_x + f_x / e.
    """
    log_e = math.log(log_posterior.shape[-1] - 1) - log_odds(noise_rate)
    log_f = log_posterior.gather(-1, tokens)
    log_f_x = log_f[:, :1]
    total = torch.log(-torch.expm1(log_f_x.clamp_max(0.0)) + torch.exp(log_f_x - log_e))
    return torch.where(tokens == tokens[:, :1], log_f - log_e, log_f) - total


def exchange_wish(foretold: Tensor) -> Tensor:
    """What speaks for the token's right neighbour in its place, plus what speaks for it in that one's, [W, L]; 0 at the
    last, which has none. From log g of the token, its left and its right neighbour, [W, L, 3]."""
    preferred = foretold[..., 1:] - foretold[..., :1]
    return torch.nn.functional.pad(preferred[:, :-1, 1] + preferred[:, 1:, 0], (0, 1))


def log_odds(probability: float) -> float:
    """log p/(1-p)."""
    return math.log(probability) - math.log1p(-probability)
