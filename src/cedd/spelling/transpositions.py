"""Transpositions: "drak" for "dark", scored by the model itself.

Shapes: N tokens of the text.

For two neighbours a, b one forward pass gives g_1(.|b) and g_2(.|a): the leave-one-out probabilities of each given the
other. By the chain rule two passes, on the text as it is and on the text with the two transposed, determine the joint
ratio, over "bb" or over "aa":

    p(ba)/p(ab) = g_1(b|b)/g_1(a|b) g_2(a|b)/g_2(b|b)  =  g_2(a|a)/g_2(b|a) g_1(b|a)/g_1(a|a).

With W = log g_1(b|b)/g_1(a|b) + log g_2(a|a)/g_2(b|a), the gain of transposing them (`scores.swap_gain`), and W' the
gain of transposing them back afterwards, the mean of both ways is log p(ba)/p(ab) = (W - W')/2. No mask is needed, and
W, which costs nothing, indicates which pairs are worth a second pass; distant pairs share it.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from cedd.data.text import Flags, Ids
from cedd.data.tokenizers import Tokenizer
from cedd.spelling.scores import Floats, Scorer, TokenScores, log_odds, sums_within
from cedd.spelling.token_groups import token_groups

Places = NDArray[np.intp]
LEAST_GAIN = -3.0
"""Pairs with a lower gain are skipped: one of 123 that were transposed in a book, and 97% of all its pairs."""
APART = 16
"""Pairs at least this far apart are transposed in the same pass, and a change this far away leaves a score valid."""
READINGS = 3
"""Forward passes with transposed pairs, per correction pass; a good model needs few."""


def letter_groups(tokenizer: Tokenizer) -> NDArray[np.int64]:
    """The groups within which letters are transposed (plain, of one script and case), [V]; all -1 if tokens are not
    letters."""
    try:
        return token_groups(tokenizer, "letters")
    except ValueError:
        return np.full(tokenizer.vocab_size, -1)


def transposed(ids: Ids, firsts: Places) -> Ids:
    """The tokens with these and their right neighbours swapped."""
    result = ids.copy()
    result[firsts], result[firsts + 1] = ids[firsts + 1], ids[firsts]
    return result


class Transpositions:
    """Scores of transposing neighbours in a text of N tokens, which changes from pass to pass.

    Args:
        score: scores the tokens of a text.
        share: expected share of transposed neighbouring letters.
        letters: groups of tokens, [V]: only two of one group, which is not negative, are transposed.
        N: number of tokens.
    """

    def __init__(self, score: Scorer, share: float, letters: NDArray[np.int64], N: int) -> None:
        self.score, self.letters = score, letters
        self.prior = log_odds(share) if share else -math.inf
        self.log_odds = np.full(N, np.nan)
        """Log odds that the token and the next one are transposed; NaN if not known yet."""

    def weigh(self, ids: Ids, scores: TokenScores, free: Flags, changed: Flags) -> tuple[TokenScores, Places]:
        """The scores with transpositions where they are likelier than other changes, and the first tokens of these.

        `changed`: the tokens changed since the last call.
        """
        if self.prior == -math.inf:
            return scores, np.zeros(0, np.intp)
        self.log_odds[sums_within(changed, APART) > 0] = np.nan
        self.log_odds[~self.candidates(ids, scores, free)] = -np.inf
        for firsts in far_apart(np.flatnonzero(np.isnan(self.log_odds)), scores.swap_gain):
            touched = np.zeros(len(ids), np.bool_)
            touched[firsts] = touched[firsts + 1] = True
            after = self.score(transposed(ids, firsts), earlier=(scores, touched))
            self.log_odds[firsts] = (scores.swap_gain[firsts] - after.swap_gain[firsts]) / 2 + self.prior
        self.log_odds[np.isnan(self.log_odds)] = -np.inf
        return with_transpositions(scores, ids, self.log_odds)

    def candidates(self, ids: Ids, scores: TokenScores, free: Flags) -> Flags:
        """First tokens of pairs that may be transposed and might be wrong, [N]."""
        group, pair = self.letters[ids], np.zeros(len(ids), np.bool_)
        pair[:-1] = (group[:-1] == group[1:]) & (ids[:-1] != ids[1:]) & free[:-1] & free[1:]
        return pair & (group >= 0) & (scores.swap_gain > LEAST_GAIN)


def with_transpositions(scores: TokenScores, ids: Ids, log_odds: Floats) -> tuple[TokenScores, Places]:
    """The scores with each transposition that is likelier than overlapping ones and than every replacement of either
    letter; and the first tokens of these."""
    other = np.pad(scores.log_odds, (0, 1), constant_values=-np.inf)
    beside = np.pad(log_odds, 1, constant_values=-np.inf)
    firsts = np.flatnonzero(log_odds > np.maximum.reduce([other[:-1], other[1:], beside[:-2], beside[2:]]))
    both, probability = np.concatenate([firsts, firsts + 1]), 1 / (1 + np.exp(-np.tile(log_odds[firsts], 2)))
    best, confidence, own = scores.best.copy(), scores.confidence.copy(), scores.own.copy()
    best[both], confidence[both], own[both] = transposed(ids, firsts)[both], probability, 1 - probability
    return replace(scores, best=best, confidence=confidence, own=own), firsts


def far_apart(places: Places, gains: Floats) -> list[Places]:
    """The places in at most `READINGS` groups in which no two are nearer than `APART`. If there are too many, those
    with the least gain [N] are in no group."""
    groups: list[list[int]] = [[] for _ in range(READINGS)]
    taken = np.zeros((READINGS, len(gains)), np.bool_)
    for place in places[np.argsort(-gains[places], kind="stable")].tolist():
        number = int(np.argmin(taken[:, place]))
        if not taken[number, place]:
            taken[number, max(0, place - APART + 1) : place + APART] = True
            groups[number].append(place)
    return [np.array(group, dtype=np.intp) for group in groups if group]
