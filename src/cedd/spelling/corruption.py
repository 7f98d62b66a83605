"""Simulated spelling mistakes: letters replaced, or neighbours transposed."""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cedd.data.permutation import derive_key, permute, uniform_integers

LETTERS = (string.ascii_lowercase, string.ascii_uppercase)


@dataclass(frozen=True)
class Corruption:
    """A text with mistakes: `text[p] != original[p]` exactly at the sorted `positions` p."""

    text: str
    original: str
    positions: NDArray[np.int64]


def corrupt_letters(text: str, rate: float = 0.05, seed: int = 0, letters: tuple[str, ...] = LETTERS) -> Corruption:
    """Replace the share `rate` of the letters, each by another letter of its class (case is kept).

    Of n letters exactly round(rate * n) are replaced, at positions drawn without replacement; spaces, digits and
    punctuation stay. The result depends on (text, rate, seed, letters) only.
    """
    _check_rate(rate)
    if any(len(set(group)) != len(group) or len(group) < 2 for group in letters):
        raise ValueError("each class of letters needs at least two different letters to swap")
    place_of = {letter: (group, rank) for group in letters for rank, letter in enumerate(group)}
    candidates = np.array([i for i, character in enumerate(text) if character in place_of], dtype=np.int64)
    count = round(rate * len(candidates))
    if count == 0:
        return Corruption(text, text, np.zeros(0, dtype=np.int64))
    chosen = permute(np.arange(count), len(candidates), derive_key(seed, 0))
    positions = np.sort(candidates[chosen])
    sizes = np.array([len(place_of[text[p]][0]) for p in positions])
    shifts = 1 + uniform_integers(positions, sizes - 1, derive_key(seed, 1))  # 1..size-1: never the same letter
    characters = list(text)
    for position, shift in zip(positions.tolist(), shifts.tolist(), strict=True):
        group, rank = place_of[text[position]]
        characters[position] = group[(rank + shift) % len(group)]
    return Corruption("".join(characters), text, positions)


def swap_letters(text: str, rate: float = 0.02, seed: int = 0) -> Corruption:
    """Transpose the share `rate` of neighbouring pairs of different letters of one class (of one case).

    Of n such pairs about round(rate * n) are transposed, drawn without replacement, except for those that overlap with
    an earlier draw. The result depends on (text, rate, seed) only.
    """
    _check_rate(rate)
    group_of = {letter: number for number, group in enumerate(LETTERS) for letter in group}
    groups = [group_of.get(character, -1) for character in text]
    pairs = [i for i in range(len(text) - 1) if groups[i] == groups[i + 1] >= 0 and text[i] != text[i + 1]]
    drawn = permute(np.arange(round(rate * len(pairs))), max(len(pairs), 1), derive_key(seed, 2))
    characters, taken = list(text), set[int]()
    for first in (pairs[number] for number in drawn.tolist()):
        if not taken & {first, first + 1}:
            taken |= {first, first + 1}
            characters[first : first + 2] = text[first + 1], text[first]
    return Corruption("".join(characters), text, np.array(sorted(taken), dtype=np.int64))


def _check_rate(rate: float) -> None:
    if not 0.0 <= rate <= 1.0:
        raise ValueError(f"the corruption rate must be in [0, 1] (got {rate})")


class Mistake(NamedTuple):
    """A kind of mistake."""

    make: Callable[[str, float, int], Corruption]
    """Corrupts a text, given a rate and a seed."""
    span: int
    """Number of adjacent letters that one mistake makes wrong."""
    kind: str
    """What the rate refers to."""
    counted: str
    """The name of several mistakes."""


MISTAKES: Mapping[str, Mistake] = {
    "letters": Mistake(corrupt_letters, 1, "letters replaced", "letters replaced"),
    "swaps": Mistake(swap_letters, 2, "neighbours exchanged", "transpositions"),
}
