"""Letters that changed places: "drak" for "dark", judged by the model itself.

Shapes: N tokens of the text.

Of two neighbours a, b the model can say in one reading how it likes each of them where the other stays: g_1(.|b) and
g_2(.|a), beliefs before the letter itself is seen. By the chain rule those of two readings, of the text as it is and
of the text with the two exchanged, have in them how it likes both together, over "bb" or over "aa":

    p(ba)/p(ab) = g_1(b|b)/g_1(a|b) g_2(a|b)/g_2(b|b)  =  g_2(a|a)/g_2(b|a) g_1(b|a)/g_1(a|a).

With W = log g_1(b|b)/g_1(a|b) + log g_2(a|a)/g_2(b|a), the wish to exchange them (`opinion.exchange_wish`), and W' the
wish to change them back once that is done, the mean of both ways is log p(ba)/p(ab) = (W - W')/2. No mask is needed,
and W, which costs nothing, says which pairs are worth a second reading; pairs that are far from each other share it.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from cedd.data.text import Flags, Ids
from cedd.data.tokenizers import Tokenizer
from cedd.spelling.letters import token_groups
from cedd.spelling.scores import Opinion, Think, log_odds, within

Places = NDArray[np.intp]
LEAST_WISH = -3.0
"""Pairs with a lower one are not looked at: one of 123 that were exchanged in a book, and 97% of all its pairs."""
APART = 16
"""Pairs so far apart are exchanged in the same reading, and a change so far away leaves a judgement as it was."""
READINGS = 3
"""How often a text is read, in one pass, with pairs exchanged; a good model wants to see few."""


def letter_groups(tokenizer: Tokenizer) -> NDArray[np.int64]:
    """The groups within which letters change places (plain, of one script and case), [V]; no token is in one if tokens
    are no letters."""
    try:
        return token_groups(tokenizer, "letters")
    except ValueError:
        return np.full(tokenizer.vocab_size, -1)


def exchanged(ids: Ids, firsts: Places) -> Ids:
    """The tokens with these and their right neighbours exchanged."""
    result = ids.copy()
    result[firsts], result[firsts + 1] = ids[firsts + 1], ids[firsts]
    return result


class Swaps:
    """What the model thinks of exchanging neighbours in a text of N tokens, which changes from pass to pass.

    Args:
        think: how the model is asked what it thinks of a text.
        share: of neighbouring letters, those that are expected to have changed places.
        letters: groups of tokens, [V]: only two of one group, which is not negative, change places.
    """

    def __init__(self, think: Think, share: float, letters: NDArray[np.int64], N: int) -> None:
        self.think, self.letters = think, letters
        self.prior = log_odds(share) if share else -math.inf
        self.log_odds = np.full(N, np.nan)
        """That the token and the next one were meant the other way round; nan where nobody has looked yet."""

    def weigh(self, ids: Ids, opinion: Opinion, free: Flags, changed: Flags) -> tuple[Opinion, Places]:
        """The opinion, which now speaks of exchanges where they are likelier than other changes, and their places.

        changed: the tokens that were changed since the text was last weighed.
        """
        if self.prior == -math.inf:
            return opinion, np.zeros(0, np.intp)
        self.log_odds[within(changed, APART) > 0] = np.nan
        self.log_odds[~self.candidates(ids, opinion, free)] = -np.inf
        for firsts in far_apart(np.flatnonzero(np.isnan(self.log_odds)), opinion.exchange):
            touched = np.zeros(len(ids), np.bool_)
            touched[firsts] = touched[firsts + 1] = True
            after = self.think(exchanged(ids, firsts), earlier=(opinion, touched))
            self.log_odds[firsts] = (opinion.exchange[firsts] - after.exchange[firsts]) / 2 + self.prior
        self.log_odds[np.isnan(self.log_odds)] = -np.inf
        return persuaded(opinion, ids, self.log_odds)

    def candidates(self, ids: Ids, opinion: Opinion, free: Flags) -> Flags:
        """The first ones of pairs that may be exchanged, and might be wrong, [N]."""
        group, pair = self.letters[ids], np.zeros(len(ids), np.bool_)
        pair[:-1] = (group[:-1] == group[1:]) & (ids[:-1] != ids[1:]) & free[:-1] & free[1:]
        return pair & (group >= 0) & (opinion.exchange > LEAST_WISH)


def persuaded(opinion: Opinion, ids: Ids, log_odds: NDArray[np.float64]) -> tuple[Opinion, Places]:
    """The opinion with each exchange in it that is likelier than one that shares a letter with it, and than every other
    letter in the place of either; and where these exchanges begin."""
    other = np.pad(opinion.log_odds, (0, 1), constant_values=-np.inf)
    beside = np.pad(log_odds, 1, constant_values=-np.inf)
    firsts = np.flatnonzero(log_odds > np.maximum.reduce([other[:-1], other[1:], beside[:-2], beside[2:]]))
    both, probability = np.concatenate([firsts, firsts + 1]), 1 / (1 + np.exp(-np.tile(log_odds[firsts], 2)))
    best, confidence, own = opinion.best.copy(), opinion.confidence.copy(), opinion.own.copy()
    best[both], confidence[both], own[both] = exchanged(ids, firsts)[both], probability, 1 - probability
    return replace(opinion, best=best, confidence=confidence, own=own), firsts


def far_apart(places: Places, wishes: NDArray[np.float64]) -> list[Places]:
    """The places in groups, `READINGS` at most, in which no two are nearer than `APART`; where they stand too close
    together for that, those with the least wish, [N], are in none."""
    groups: list[list[int]] = [[] for _ in range(READINGS)]
    taken = np.zeros((READINGS, len(wishes)), np.bool_)
    for place in places[np.argsort(-wishes[places], kind="stable")].tolist():
        number = int(np.argmin(taken[:, place]))
        if not taken[number, place]:
            taken[number, max(0, place - APART + 1) : place + APART] = True
            groups[number].append(place)
    return [np.array(group, dtype=np.intp) for group in groups if group]
