"""Candidates for a word: similar words of the lexicon, or two words.

Shapes: V words, N similar words, P pairs of words that are easily confused.

For a string that is not a word, a sweep over the lexicon finds the words that can be a few edits away: each letter is
counted up to 2, in two bits, and an edit changes at most two bits, a swap none. A rough log p(written | word), letter
by letter, ranks these; the noise model itself (`channel`) scores the best. For a known word all words are found
beforehand that differ from it in one letter, in order, or in the place of one letter (both become the same string when
a letter is left out), in an ending, or that sound the same.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, combinations

import numpy as np
from numpy.typing import NDArray

from cedd.apps.correct.channel import RARE, Channel
from cedd.apps.correct.forms import BOUND, sounds
from cedd.apps.correct.lexicon import Floats, Integers, Lexicon
from cedd.apps.correct.words import LONGEST

FAR = ((1, None, 0), (2, 60_000, 0), (3, 6_000, 4), (3, 20_000, 5), (4, 6_000, 6), (4, 12_000, 8), (5, 6_000, 9))
"""(maximum edits, number of most frequent words searched, minimum length)."""
NEAR, SCORED, LIKELY = 48, 16, 8.0
"""Number of similar words that are found; number of these that the noise model scores; by how much their rank may be
below the best, in nats."""
A_COUNT, IN_CONTEXT = 0.6, {"count": 0.4, "context": 0.5}
"""Weights of the logarithm of a word's count relative to the rough log p(written | word) in the rank: without context,
and together with log p of the word sequence."""
CONFUSED = 30_000
"""Real-word errors are searched among this many most frequent words."""
HOMOPHONE_WORDS, ENDINGS = 12_000, ("ed", "d", "ing", "ly", "es", "'s")
"""Homophones are searched among this many; endings that are easily dropped or added."""
SLACK = 1.0
"""By how much log p of the noise model may be below the rough log p."""
CACHED_STRINGS = 512
"""Number of strings whose similar words are cached."""
REMEMBERED = -6.0
"""Minimum of log p(written | meant) for a misspelling of the training lists."""
_ALPHABET = "abcdefghijklmnopqrstuvwxyz'"
_CODES = np.zeros(256, np.uint8)
_CODES[[ord(c) for c in _ALPHABET]] = np.arange(1, 28)
_BITS = np.append(np.uint64(0), np.uint64(1) << np.arange(1, 28, dtype=np.uint64))
_BASE = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Candidate:
    """Words that may have been meant, and log p(written | words)."""

    words: tuple[str, ...]
    log_channel: float


class Neighbours:
    """Finds words of a lexicon that are similar to a written one."""

    def __init__(self, lexicon: Lexicon) -> None:
        self.lexicon = lexicon
        self.near = lru_cache(maxsize=CACHED_STRINGS)(self._near)
        self.scored = lru_cache(maxsize=SCORED * CACHED_STRINGS)(self.log_channel)

    @cached_property
    def letters(self) -> NDArray[np.uint8]:
        """[V, LONGEST], 1 to 27; 0 after the end, and everywhere for words with other characters."""
        text = np.frombuffer("\n".join([*self.lexicon.words, ""]).encode(), np.uint8)
        ends = np.flatnonzero(text == ord("\n"))
        starts = np.append(0, ends[:-1] + 1)
        sizes = ends - starts
        letters = np.zeros((len(sizes), LONGEST), np.uint8)
        other = sizes > LONGEST
        for place in range(LONGEST):
            words = np.flatnonzero((sizes > place) & ~other)
            code = _CODES[text[starts[words] + place]]
            letters[words, place] = code
            other[words[code == 0]] = True
        letters[other] = 0
        return letters

    @cached_property
    def lengths(self) -> NDArray[np.int8]:
        return (self.letters > 0).sum(-1).astype(np.int8)

    @cached_property
    def bits(self) -> NDArray[np.uint64]:
        once, twice = np.zeros(len(self.letters), np.uint64), np.zeros(len(self.letters), np.uint64)
        for column in self.letters.T:
            bit = _BITS[column]
            twice |= once & bit
            once |= bit
        return once | twice << np.uint64(32)

    @cached_property
    def costs(self) -> RoughCosts:
        return RoughCosts.of(self.lexicon.channel)

    def log_channel(self, written: str, meant: str, least: float = -math.inf) -> float:
        """log p(written | meant), or about `least` if it is less; pairs of the training lists have at least
        REMEMBERED."""
        value = self.lexicon.channel.log_probability(written, meant, least)
        return max(value, REMEMBERED) if meant in self.lexicon.memory.get(written, ()) else value

    def _near(self, written: str) -> tuple[Integers, Floats]:
        """The numbers of the words that were most probably meant, and a rough log p(written | word)."""
        code = _CODES[np.frombuffer(written.encode(), np.uint8)]
        once = twice = 0
        for letter in code.tolist():
            once, twice = once | 1 << letter, twice | (once & 1 << letter)
        differ = ones(self.bits ^ np.uint64(once | twice << 32)).astype(np.int8)
        apart = np.abs(self.lengths - np.int8(len(written)))
        found = np.zeros(len(differ), np.bool_)
        for edits, among, from_length in FAR:
            if len(written) >= from_length:
                some = slice(among)
                found[some] |= (differ[some] <= 2 * edits - apart[some]) & (apart[some] <= edits)
        places = np.flatnonzero(found & (self.lengths > 0))
        rough = rough_log_channel(self.letters[places], self.lengths[places], code, self.costs)
        rank = rough + A_COUNT * self.lexicon.log_counts[places]
        best = np.argsort(-rank, kind="stable")[:NEAR]
        return places[best], rough[best].astype(np.float64)

    def meant(self, written: str, near: tuple[Integers, Floats], context: Floats) -> list[Candidate]:
        """The words that were most probably meant, of those that are `near`; `context` is log p of the text with
        each."""
        numbers, rough = near
        rank = rough + IN_CONTEXT["count"] * self.lexicon.log_counts[numbers] + IN_CONTEXT["context"] * context
        best = np.sort(np.argsort(-rank, kind="stable")[:SCORED])
        best = best[rank[best] >= rank.max(initial=-math.inf) - LIKELY]
        least = dict.fromkeys(self.lexicon.memory.get(written, ()), REMEMBERED)
        least |= {self.lexicon.words[numbers[i]]: float(rough[i]) - SLACK for i in best}
        return [Candidate((w,), self.scored(written, w, low)) for w, low in least.items() if w != written]

    def these(self, written: str, numbers: Iterable[int]) -> list[Candidate]:
        """Words by their numbers, as candidates."""
        words = (self.lexicon.words[number] for number in numbers)
        return [Candidate((word,), self.log_channel(written, word)) for word in words]

    def splits(self, written: str) -> list[Candidate]:
        """The string as two words, neither of them rare."""
        index, log_counts = self.lexicon.index, self.lexicon.log_counts
        found: list[Candidate] = []
        for cut in range(1, len(written)):
            first, second = index.get(written[:cut]), index.get(written[cut:])
            if first is None or second is None or min(log_counts[first], log_counts[second]) < 5.0:
                continue
            if (cut == 1 and written[0] not in "ai") or (cut == len(written) - 1 and written[-1] not in "ai"):
                continue
            if written[:cut] in BOUND:
                continue
            found.append(Candidate((written[:cut], written[cut:]), 0.0))
        return found

    @cached_property
    def confused(self) -> tuple[Integers, Integers]:
        """(first [CONFUSED + 1], other [P]): word i may be written for the words other[first[i] : first[i + 1]]."""
        pairs = self.confused_pairs() if self.lexicon.confused is None else self.lexicon.confused
        size = min(CONFUSED, len(self.lexicon.words))
        return np.searchsorted(pairs, size * np.arange(size + 1)), pairs % size

    def confused_pairs(self) -> Integers:
        """i V + j, ascending, where word i may be written for word j and V is CONFUSED or the number of words."""
        size = min(CONFUSED, len(self.lexicon.words))
        pairs = same_without_a_letter(self.letters[:size], self.lengths[:size])
        index = self.lexicon.index
        seen = [
            size * index[written] + index[meant]
            for written, all_meant in self.lexicon.memory.items()
            for meant in all_meant
            if index.get(written, size) < size and index.get(meant, size) < size
        ]
        both = chain(inflections(self.lexicon.words[:size]), homophones(self.lexicon.words[:HOMOPHONE_WORDS]))
        alike = np.fromiter(chain.from_iterable(both), np.int64).reshape(-1, 2)
        alike = size * alike + alike[:, ::-1]
        return sorted_unique(np.concatenate([pairs, np.array(seen, np.int64), alike.flatten()]))

    @cached_property
    def letter_surprise(self) -> Floats:
        """-log p of a letter after two others in the words of the lexicon, [28, 28, 28]; 0 is the end, or before it."""
        end = np.zeros((len(self.letters), 1), np.uint8)
        before, last, counts = end[:, 0], end[:, 0], np.zeros(28**3)
        for letter in np.hstack([self.letters, end]).T:
            codes = (before.astype(np.uint16) * 28 + last) * 28 + letter  # 28^3 fits
            counts += np.bincount(codes, minlength=28**3)
            before, last = last, letter
        counts = counts.reshape(28, 28, 28)
        counts[:, 0, 0] = 0  # beyond the end of a word
        counts = counts + 0.5
        return -np.log(counts / counts.sum(-1, keepdims=True))

    def strangeness(self, written: str) -> float:
        """The mean surprise of a string's letters."""
        code = np.pad(_CODES[np.frombuffer(written.encode(), np.uint8)], (2, 1))
        return float(self.letter_surprise[code[:-2], code[1:-1], code[2:]].mean())


def ones(numbers: NDArray[np.uint64]) -> NDArray[np.uint8]:
    """The number of bits that are set."""
    if hasattr(np, "bitwise_count"):  # numpy 2
        return np.bitwise_count(numbers)
    return np.unpackbits(numbers.view(np.uint8).reshape(-1, 8), axis=1).sum(1, dtype=np.uint8)


def inflections(words: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Pairs of words, by number, that differ by an ending."""
    index = {word: number for number, word in enumerate(words)}
    for ending in ENDINGS:
        for word in [word for word in words if word.endswith(ending)]:
            if (other := index.get(word.removesuffix(ending))) is not None:
                yield other, index[word]


def homophones(words: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Pairs of words, by number, that sound the same."""
    groups: dict[str, list[int]] = defaultdict(list)
    for number, sound in enumerate(sounds(words)):
        groups[sound].append(number)
    return (pair for group in groups.values() for pair in combinations(group, 2))


def same_without_a_letter(letters: NDArray[np.uint8], lengths: NDArray[np.int8]) -> Integers:
    """All i V + j, i != j, where words i and j become equal when at most one letter is removed from each."""
    size, width = letters.shape
    before, after = np.zeros((size, width + 1), np.uint64), np.zeros((size, width + 1), np.uint64)
    power = np.cumprod(np.append(np.uint64(1), np.full(width, _BASE)))
    for i in range(width):
        before[:, i + 1] = before[:, i] * _BASE + letters[:, i]
    for i in reversed(range(width)):
        inside = i < lengths
        weight = power[np.maximum(lengths - i - 1, 0)]
        after[:, i] = np.where(inside, letters[:, i] * weight + after[:, i + 1], 0)
    hashes, words = [before[np.arange(size), lengths]], [np.arange(size)]
    for i in range(width):
        some = np.flatnonzero((i < lengths) & (lengths > 1))
        hashes.append(before[some, i] * power[lengths[some] - i - 1] + after[some, i + 1])
        words.append(some)
    h, word = np.concatenate(hashes), np.concatenate(words)
    usable = lengths[word] > 0
    h, word = h[usable], word[usable]
    order = np.argsort(h)
    h, word = h[order], word[order]
    pairs: list[Integers] = []
    shift = 1
    while (same := np.flatnonzero(h[shift:] == h[:-shift])).size:
        one, other = word[same], word[same + shift]
        pairs += [part[one != other] for part in (size * one + other, size * other + one)]
        shift += 1
    return sorted_unique(np.concatenate([np.zeros(0, np.int64), *pairs]))


def sorted_unique(numbers: Integers) -> Integers:
    """The different numbers in order, like `np.unique`, which imports masked arrays and is slower."""
    numbers = np.sort(numbers)
    return numbers[np.append(True, numbers[1:] != numbers[:-1])[: len(numbers)]]


@dataclass(frozen=True)
class RoughCosts:
    """-log p of edits of single letters, by the intended letter; index 0 means none."""

    replaced: NDArray[np.float32]
    """[28, 28], 0 on the diagonal; row 0: a letter was added; column 0: it was dropped."""
    doubled: float
    undoubled: float
    swapped: float

    @staticmethod
    def of(channel: Channel) -> RoughCosts:
        """The costs under a noise model: those of known edits, otherwise those of their classes."""
        replaced = np.zeros((28, 28), np.float32)
        for i, meant in enumerate(" " + _ALPHABET):
            for j, written in enumerate(" " + _ALPHABET):
                if i != j:
                    part, string = meant.strip(), written.strip()
                    seen = channel.edits.get((part, string), RARE) if part else RARE
                    replaced[i, j] = -max(seen, channel.single(part, string))
        return RoughCosts(
            replaced, -channel.single("", "a", "a"), -channel.single("a", "") / 1.5, -channel.single("ab", "")
        )


def rough_log_channel(
    words: NDArray[np.uint8], lengths: NDArray[np.int8], code: NDArray[np.uint8], costs: RoughCosts
) -> NDArray[np.float32]:
    """log p(string | word), letter by letter, for each of N words, [N]."""
    N, m = len(words), len(code)
    width = int(lengths.max(initial=0))
    letters = np.ascontiguousarray(words[:, :width].T)
    added = costs.replaced[0][code].copy()
    added[1:] = np.where(code[1:] == code[:-1], np.minimum(added[1:], costs.doubled), added[1:])
    first = np.concatenate([[0], np.cumsum(added)]).astype(np.float32)
    written, dropped_letters = np.ascontiguousarray(costs.replaced[:, code].T), costs.replaced[:, 0].copy()
    earlier, row = np.empty((0, N), np.float32), np.repeat(first[:, None], N, 1)  # of prefixes of the words, [m + 1, N]
    result, replaced, longer = np.full(N, first[-1], np.float32), np.empty((m, N), np.float32), np.empty(N, np.float32)
    for i, letter in enumerate(letters):
        index = letter.astype(np.intp)  # as `take` wants it
        dropped = dropped_letters.take(index, mode="clip")
        before = letters[i - 1] if i else np.zeros_like(letter)
        doubled = letter == before
        dropped = np.where(doubled, np.minimum(dropped, costs.undoubled), dropped)
        new = row + dropped
        written.take(index, 1, out=replaced, mode="clip")
        replaced += row[:-1]
        np.minimum(new[1:], replaced, out=new[1:])
        if i and m > 1:
            swapped = (letter == code[:-1, None]) & (before == code[1:, None]) & ~doubled
            if (places := np.flatnonzero(swapped)).size:
                both = new[2:].reshape(-1)
                both[places] = np.minimum(both[places], earlier[:-2].reshape(-1)[places] + costs.swapped)
        for j in range(m):
            np.add(new[j], added[j], out=longer)
            np.minimum(new[j + 1], longer, out=new[j + 1])
        earlier, row = row, new
        np.copyto(result, row[m], where=lengths == i + 1)
    return -result
