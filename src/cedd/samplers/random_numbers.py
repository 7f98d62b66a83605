"""The random numbers of sequences: each is a function of the sequence's seed, its use, the step and the position alone.

Shapes: B sequences, L positions; R chosen positions.

The numbers of a sequence must not depend on which others are drawn with it. One generator for the whole batch cannot
do that, and one per sequence costs a Python call per sequence and step. So the numbers are those of a counter: number c
of a sequence with the key k is

    mix(k + c gamma),        c = (step, use, position) packed into one integer,

where mix and gamma are those of SplitMix64 (Steele, Lea and Flood 2014). Any of them is found without the others, for
all sequences at once, so only the numbers that are needed are computed, and a part of the batch that did not fit into
memory is simply drawn again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cedd.process import check_seed
from cedd.splitmix import GAMMA, WORD, Words, mix

UniformNumbers = NDArray[np.float64]
FlatRows = NDArray[np.int64]

_POSITION_BITS, _USE_BITS = 32, 4
_BITS, _LOWER_BITS = 53, np.uint64(11)  # of a word, those that a float64 in [0, 1) has, and the others


class Use(IntEnum):
    """What a number is drawn for."""

    TOKEN = 0
    """The token of the noise."""
    MASK = 1
    """Whether the noise is a mask."""
    JUMP = 2
    """Whether a position jumps, or the time at which it is revealed."""
    TARGET = 3
    """The new token."""
    PLACE = 4
    """Which positions a corrector redraws together."""
    REDRAW = 5
    """The tokens of redrawn positions."""
    GUESS = 6
    """Tokens in place of masks, to estimate the reward of an unfinished text."""
    RESAMPLE = 7
    """Which particles are resampled."""
    CHOOSE = 8
    """Which particle is the result."""


def _keys(seeds: Sequence[int]) -> Words:
    """A key for each seed."""
    return mix(np.array([check_seed(seed) for seed in seeds], dtype=np.uint64))


MOST_TEXTS = 1 << 24
"""Largest number of texts per call."""
MOST_TOKENS = 1 << 30
"""Largest number of tokens per call: the samples alone take 8 GiB."""


def check_count(n: int) -> None:
    """Refuse a number of texts that cannot be drawn in one call, before anything is allocated for them."""
    if n > MOST_TEXTS:
        raise ValueError(f"cannot draw more than {MOST_TEXTS:,} texts in one call (got {n:,})")


def check_shape(shape: tuple[int, int]) -> None:
    """Refuse samples [N, L] that cannot be drawn in one call, before anything is allocated for them."""
    if len(shape) != 2 or min(shape) < 1:
        raise ValueError(f"samples need a shape (number, length) of at least (1, 1) (got {tuple(shape)})")
    check_count(shape[0])
    if (tokens := shape[0] * shape[1]) > MOST_TOKENS:
        raise ValueError(
            f"cannot draw more than {MOST_TOKENS:,} tokens in one call (got {shape[0]:,} x {shape[1]:,} = {tokens:,})"
        )


def text_seeds(seed: int, n: int) -> list[int]:
    """The seeds of texts 0..n-1 of a run with one seed: text i's is a function of (seed, i)."""
    check_count(n)
    numbers = np.arange(1, n + 1, dtype=np.uint64) * np.uint64(GAMMA)
    return mix(_keys([seed]) + numbers).tolist()


def check_seeds(seeds: Sequence[int], n: int) -> Sequence[int]:
    """The seeds, after a check that there are n."""
    if len(seeds) != n:
        raise ValueError(f"{n} sequences need a seed each (got {len(seeds)})")
    return seeds


class RandomNumbers:
    """The random numbers of B texts of L positions.

    Args:
        seeds: one for each text; the same seed gives the same numbers.
        length: L.
    """

    def __init__(self, seeds: Sequence[int], length: int) -> None:
        places = np.arange(length, dtype=np.uint64) * np.uint64(GAMMA)
        self._words = (_keys(seeds)[:, None] + places).reshape(-1)
        self.shape = (len(seeds), length)

    def uniform(self, use: Use, step: int = 0) -> Tensor:
        """U[0, 1) in float64 for every position, [B, L], on the host."""
        return torch.as_tensor(_fractions(mix(self._words + _first(use, step)))).view(self.shape)

    def at(self, rows: FlatRows, use: Use, step: int = 0) -> UniformNumbers:
        """The same for some flat positions [R] of the batch only, [R]."""
        return _fractions(mix(self._words[rows] + _first(use, step)))

    def below(self, limit: float, use: Use, step: int = 0) -> tuple[FlatRows, UniformNumbers]:
        """The flat positions [R] whose numbers lie below a limit in [0, 1], and these numbers [R].

        Integers are compared: the number of a word with upper bits m is m / 2^53, which is below the limit if m < limit
        2^53.
        """
        words, count = mix(self._words + _first(use, step)), math.ceil(limit * 2**_BITS)
        if count < 1:
            return np.zeros(0, dtype=np.int64), np.zeros(0)
        rows = np.flatnonzero(words <= np.uint64((count << int(_LOWER_BITS)) - 1))
        return rows, _fractions(words[rows])


def _first(use: Use, step: int) -> np.uint64:
    """The offset of the words for a use and a step."""
    counter = ((step << _USE_BITS) + use.value) << _POSITION_BITS
    return np.uint64((counter + 1) * GAMMA & WORD)


def _fractions(words: Words) -> UniformNumbers:
    """The upper 53 bits as numbers in [0, 1)."""
    return np.right_shift(words, _LOWER_BITS).astype(np.float64) * 2.0**-_BITS
