"""Counter-based randomness: pure functions of (key, index), the same on every machine and library version.

A Feistel network gives a permutation of 0..n-1 that is evaluated at single indices, so a shuffled order needs no
memory and no state beyond the index itself.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 6
_WORD = (1 << 64) - 1
_FEW = 64
"""Numbers that are mixed as fast as one."""


def mix(values: NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    """The splitmix64 finalizer of values + key: 64 well-mixed bits per value."""
    with np.errstate(over="ignore"):
        mixed = values + np.uint64((key * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) & _WORD)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return mixed ^ (mixed >> np.uint64(31))


def derive_key(*parts: int) -> int:
    """One 64-bit key from several integers, order mattering: (seed, epoch) -> key."""
    key = 0
    for part in parts:
        key = int(mix(np.array([key ^ (part & _WORD)], dtype=np.uint64), len(parts))[0])
    return key


def permute(indices: NDArray[np.integer], size: int, key: int) -> NDArray[np.int64]:
    """The images of indices under the permutation of 0..size-1 that `key` names.

    (left, right) -> (right, left ^ mix(right)) on 2h bits with 4^h >= size; images that fall outside are
    permuted again until they fall inside (cycle walking), which keeps the map one-to-one.
    """
    if size < 1:
        raise ValueError(f"a permutation needs at least one element, not {size}")
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    low = np.uint64((1 << int(half)) - 1)
    values = np.asarray(indices).astype(np.uint64)
    if values.size and int(values.max()) >= size:
        raise ValueError(f"index {int(values.max())} is outside 0..{size - 1}")

    def mixed(right: NDArray[np.uint64], number: int) -> NDArray[np.uint64]:
        return mix(right, key + number) & low

    # All that a half can be is mixed once, if that is little: an image may have to be permuted again a dozen times.
    few = int(low) < max(_FEW, values.size)
    tables = [mixed(np.arange(int(low) + 1, dtype=np.uint64), number) for number in range(_ROUNDS)] if few else []
    walking = np.ones(values.shape, dtype=bool)
    while walking.any():
        left, right = values[walking] >> half, values[walking] & low
        for number in range(_ROUNDS):
            left, right = right, left ^ (tables[number][right] if few else mixed(right, number))
        values[walking] = (left << half) | right
        walking = values >= np.uint64(size)
    return values.astype(np.int64)


def uniform_integers(indices: NDArray[np.integer], bound: NDArray[np.integer] | int, key: int) -> NDArray[np.int64]:
    """A draw from 0..bound-1 for each index; bounds here are tiny against 2^64, so the modulus bias is nil."""
    return (mix(np.asarray(indices).astype(np.uint64), key) % np.asarray(bound).astype(np.uint64)).astype(np.int64)
