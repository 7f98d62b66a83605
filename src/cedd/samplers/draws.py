"""The random numbers of texts: each is a function of the text's seed, its use, the step and the position, nothing else.

Shapes: B texts, L positions; R chosen positions.

A text's numbers must not depend on which other texts are drawn with it. A generator that hands out one number after
another to the whole batch cannot do that, and one generator a text costs a Python call a text and step. So the numbers
are counted, not handed out: number c of a text with the key k is

    mix(k + c gamma),        c = (step, use, position) packed into one integer,

where mix and gamma are those of SplitMix64 (Steele, Lea and Flood 2014). Any of them is found without the others, for
all texts at once, so a sampler asks for those that it needs only, and a part of the batch that did not fit into the
memory is simply drawn again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum
from operator import index

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Words = NDArray[np.uint64]
Numbers = NDArray[np.float64]
Rows = NDArray[np.int64]

_GAMMA = 0x9E3779B97F4A7C15
_ROUNDS = [(np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB))]
_LAST_SHIFT = np.uint64(31)
_WORD = (1 << 64) - 1
_POSITION_BITS, _USE_BITS = 32, 4
_BITS, _LOWER_BITS = 53, np.uint64(11)  # of a word, those that a float64 in [0, 1) has, and the others


class Use(IntEnum):
    """What a number is drawn for."""

    TOKEN = 0
    """Which token the noise is."""
    MASK = 1
    """Whether the noise is a mask."""
    JUMP = 2
    """Whether a position jumps, or when it is revealed."""
    TARGET = 3
    """Where it jumps to."""
    PLACE = 4
    """Which positions are redrawn at the same time."""
    REDRAW = 5
    """As what."""


def _mix(words: Words) -> Words:
    """SplitMix64's function, in place."""
    shifted = np.empty_like(words)
    for shift, factor in _ROUNDS:
        np.right_shift(words, shift, out=shifted)
        np.bitwise_xor(words, shifted, out=words)
        np.multiply(words, factor, out=words)
    np.right_shift(words, _LAST_SHIFT, out=shifted)
    return np.bitwise_xor(words, shifted, out=words)


def _keys(seeds: Sequence[int]) -> Words:
    """A key for each seed: any integer, of which 64 bits count."""
    return _mix(np.array([index(seed) & _WORD for seed in seeds], dtype=np.uint64))


def text_seeds(seed: int, n: int) -> list[int]:
    """The seeds of texts 0..n-1 of a run with one seed: text i's is a function of (seed, i)."""
    numbers = np.arange(1, n + 1, dtype=np.uint64) * np.uint64(_GAMMA)
    return _mix(_keys([seed]) + numbers).tolist()


def one_for_each(seeds: Sequence[int], n: int) -> Sequence[int]:
    """The seeds, if they are those of n texts."""
    if len(seeds) != n:
        raise ValueError(f"{n} sequences need a seed each; got {len(seeds)}")
    return seeds


class Draws:
    """The random numbers of B texts of L positions.

    Args:
        seeds: one for each text; the same seed gives the same numbers.
        length: L.
    """

    def __init__(self, seeds: Sequence[int], length: int) -> None:
        places = np.arange(length, dtype=np.uint64) * np.uint64(_GAMMA)
        self._words = (_keys(seeds)[:, None] + places).reshape(-1)
        self.shape = (len(seeds), length)

    def uniform(self, use: Use, step: int = 0) -> Tensor:
        """U[0, 1) in float64 for every position, [B, L], on the host."""
        return torch.as_tensor(_fractions(_mix(self._words + _first(use, step)))).view(self.shape)

    def at(self, rows: Rows, use: Use, step: int = 0) -> Numbers:
        """The same for some flat positions [R] of the batch only, [R]."""
        return _fractions(_mix(self._words[rows] + _first(use, step)))

    def below(self, limit: float, use: Use, step: int = 0) -> tuple[Rows, Numbers]:
        """The flat positions [R] whose numbers lie below a limit in [0, 1], and these numbers [R].

        The comparison is one of words: the upper bits m of a word are a number m / 2^53 < limit if m < limit 2^53.
        """
        words, count = _mix(self._words + _first(use, step)), math.ceil(limit * 2**_BITS)
        if count < 1:
            return np.zeros(0, dtype=np.int64), np.zeros(0)
        rows = np.flatnonzero(words <= np.uint64((count << int(_LOWER_BITS)) - 1))
        return rows, _fractions(words[rows])


def _first(use: Use, step: int) -> np.uint64:
    """What a use and a step add to the words."""
    counter = ((step << _USE_BITS) + use.value) << _POSITION_BITS
    return np.uint64((counter + 1) * _GAMMA & _WORD)


def _fractions(words: Words) -> Numbers:
    """The upper 53 bits as numbers in [0, 1)."""
    return np.right_shift(words, _LOWER_BITS).astype(np.float64) * 2.0**-_BITS
