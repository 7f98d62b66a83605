"""What may have been meant by a word: words of the lexicon a few edits away, two words, or one with its neighbour.

Shapes: V words, N words that are near.

Each letter of a word is counted up to 2, in two bits: an edit changes at most two bits, a swap none. So words whose
bits differ in more than 2k places are more than k edits away, and one sweep over [V] numbers leaves few to compare.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from cedd.spelling.lexicon import Lexicon
from cedd.spelling.words import LONGEST

FAR = ((1, None, 0), (2, 90_000, 0), (3, 30_000, 8))
"""(edits, among how many of the most frequent words, from which length on)."""
FAR_FROM_KNOWN = ((1, 60_000, 0), (2, 3_000, 4))
"""The same for a word that the lexicon has."""
MOST = 40
"""Near words whose probability as what was meant is computed."""
A_DISTANCE = 5.0
"""What an edit costs beside the logarithm of a word's count, to choose those."""
_CODES = np.zeros(256, np.uint8)
_CODES[[ord(c) for c in "abcdefghijklmnopqrstuvwxyz'"]] = np.arange(1, 28)


@dataclass(frozen=True)
class Candidate:
    """What may have been meant, and log p(written | meant)."""

    words: tuple[str, ...]
    log_channel: float


class Neighbours:
    """The words of a lexicon near a written one."""

    def __init__(self, lexicon: Lexicon) -> None:
        self.lexicon = lexicon
        self.near = lru_cache(maxsize=50_000)(self._near)

    @cached_property
    def letters(self) -> NDArray[np.uint8]:
        """[V, LONGEST], 1 to 27; 0 after the end, and everywhere for words with other characters."""
        coded = np.array([word.encode() for word in self.lexicon.words], f"S{LONGEST + 2}")
        raw = coded.view(np.uint8).reshape(len(coded), -1)
        letters = _CODES[raw]
        other = ((raw > 0) & (letters == 0)).any(-1) | (raw[:, LONGEST] > 0)
        letters[other] = 0
        return np.ascontiguousarray(letters[:, :LONGEST])

    @cached_property
    def lengths(self) -> NDArray[np.int8]:
        return (self.letters > 0).sum(-1).astype(np.int8)

    @cached_property
    def bits(self) -> NDArray[np.uint64]:
        once, twice = np.zeros(len(self.letters), np.uint64), np.zeros(len(self.letters), np.uint64)
        for column in self.letters.T:
            bit = np.where(column > 0, np.uint64(1) << column.astype(np.uint64), np.uint64(0))
            twice |= once & bit
            once |= bit
        return once | twice << np.uint64(32)

    def _near(self, written: str, known: bool = False) -> tuple[Candidate, ...]:
        """The words that are most probably meant by a string, without their context."""
        code = _CODES[np.frombuffer(written.encode(), np.uint8)]
        once = twice = 0
        for letter in code.tolist():
            once, twice = once | 1 << letter, twice | (once & 1 << letter)
        differ = ones(self.bits ^ np.uint64(once | twice << 32))
        apart = np.abs(self.lengths - np.int8(len(written)))
        places, distances = np.zeros(0, np.intp), np.zeros(0, np.int8)
        for edits, among, from_length in FAR_FROM_KNOWN if known else FAR:
            if len(written) < from_length:
                continue
            some = slice(among)
            found = np.flatnonzero((differ[some] <= 2 * edits) & (apart[some] <= edits) & (self.lengths[some] > 0))
            found = np.setdiff1d(found, places, assume_unique=True)
            distance = edit_distances(self.letters[found], self.lengths[found], code)
            kept = distance <= edits
            places, distances = np.append(places, found[kept]), np.append(distances, distance[kept])
        rank = self.lexicon.log_counts[places] - A_DISTANCE * distances
        places = places[np.argsort(-rank, kind="stable")[:MOST]]
        words: list[str] = [self.lexicon.words[place] for place in places.tolist()]
        channel = self.lexicon.channel
        return tuple(Candidate((w,), channel.log_probability(written, w)) for w in words if w != written)

    def splits(self, written: str, least: float = 5.0) -> list[Candidate]:
        """The string as two words, neither of them rare."""
        index, log_counts = self.lexicon.index, self.lexicon.log_counts
        found: list[Candidate] = []
        for cut in range(1, len(written)):
            first, second = index.get(written[:cut]), index.get(written[cut:])
            if first is None or second is None or min(log_counts[first], log_counts[second]) < least:
                continue
            if (cut == 1 and written[0] not in "ai") or (cut == len(written) - 1 and written[-1] not in "ai"):
                continue
            found.append(Candidate((written[:cut], written[cut:]), 0.0))
        return found


def ones(numbers: NDArray[np.uint64]) -> NDArray[np.uint8]:
    """How many bits are set."""
    if hasattr(np, "bitwise_count"):  # numpy 2
        return np.bitwise_count(numbers)
    return np.unpackbits(numbers.view(np.uint8).reshape(-1, 8), axis=1).sum(1, dtype=np.uint8)


def edit_distances(words: NDArray[np.uint8], lengths: NDArray[np.int8], code: NDArray[np.uint8]) -> NDArray[np.int8]:
    """Edits (replace, insert, delete, swap neighbours) from each of N words to a string, [N]."""
    N, m = len(words), len(code)
    width = int(lengths.max(initial=0))
    rows = [np.tile(np.arange(m + 1, dtype=np.int8)[:, None], (1, N))]  # of prefixes of the words; [m + 1, N] each
    result = np.where(lengths == 0, m, 0).astype(np.int8)
    for i in range(1, width + 1):
        letter = words[:, i - 1]
        row = np.empty((m + 1, N), np.int8)
        row[0] = i
        same = letter[None, :] == code[:, None]  # [m, N]
        replaced = rows[-1][:-1] + ~same
        row[1:] = np.minimum(replaced, rows[-1][1:] + 1)
        if i > 1:
            earlier = words[:, i - 2]
            swap = same[:-1] & (earlier[None, :] == code[1:, None])
            row[2:] = np.where(swap, np.minimum(row[2:], rows[-2][:-2] + 1), row[2:])
        for j in range(1, m + 1):
            np.minimum(row[j], row[j - 1] + 1, out=row[j])
        rows = [rows[-1], row]
        result = np.where(lengths == i, row[m], result)
    return result
