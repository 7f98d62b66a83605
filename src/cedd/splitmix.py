"""SplitMix64 (Steele, Lea and Flood 2014): a hash of 64-bit words, from which counters make random numbers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

GAMMA = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio, an odd number: the difference of successive states of the generator."""
WORD = (1 << 64) - 1
"""The largest 64-bit word."""
_ROUNDS = ((np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB)))
_LAST_SHIFT = np.uint64(31)


def mix(words: Words) -> Words:
    """The finalizer of SplitMix64, a bijection of 64-bit words, applied in place."""
    shifted = np.empty_like(words)
    for shift, factor in _ROUNDS:
        np.right_shift(words, shift, out=shifted)
        np.bitwise_xor(words, shifted, out=words)
        np.multiply(words, factor, out=words)
    np.right_shift(words, _LAST_SHIFT, out=shifted)
    return np.bitwise_xor(words, shifted, out=words)
