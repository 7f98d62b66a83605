"""Counter-based randomness: functions of (key, index), the same on every machine and library version.

A Feistel network permutes 0..n-1 and is evaluated at single indices, so a shuffled order needs no memory.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cedd.splitmix import GAMMA, WORD, Words, mix

_ROUNDS = 6
_FEW = 64
"""Number of values that are hashed as fast as one."""


def _hash(values: Words, key: int) -> Words:
    """64 well-mixed bits per value, by key."""
    with np.errstate(over="ignore"):
        return mix(values + np.uint64((key * GAMMA + GAMMA) & WORD))


def derive_key(*parts: int) -> int:
    """A 64-bit key from several integers, such as (seed, epoch), in this order."""
    key = 0
    for part in parts:
        key = int(_hash(np.array([key ^ (part & WORD)], dtype=np.uint64), len(parts))[0])
    return key


def permute(indices: NDArray[np.integer], size: int, key: int) -> NDArray[np.int64]:
    """The images of indices under the permutation of 0..size-1 with this key.

    (left, right) -> (right, left ^ hash(right)) on 2h bits with 4^h >= size. Images outside of 0..size-1 are permuted
    again until they fall inside (cycle walking), which keeps the map one-to-one.
    """
    if size < 1:
        raise ValueError(f"a permutation needs at least one element, not {size}")
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    low = np.uint64((1 << int(half)) - 1)
    values = np.asarray(indices).astype(np.uint64)
    if values.size and int(values.max()) >= size:
        raise ValueError(f"index {int(values.max())} is outside 0..{size - 1}")

    def mixed(right: NDArray[np.uint64], number: int) -> NDArray[np.uint64]:
        return _hash(right, key + number) & low

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
    """A number from 0..bound-1 for each index. Bounds are far below 2^64, so the modulus bias is negligible."""
    return (_hash(np.asarray(indices).astype(np.uint64), key) % np.asarray(bound).astype(np.uint64)).astype(np.int64)
