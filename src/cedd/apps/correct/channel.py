"""The noise model of human misspellings: the probability that a word is written as another string.

After Brill and Moore (2000): a meant word is cut into parts, and each part is written as a string of its own,

    p(written | meant) = max over cuts of prod p(part_i -> string_i),

with parts of up to 3 letters, so that the letters around an edit count (ei -> ie, mm -> m, ^n -> ^kn). ^ and $ stand
for the edges of the word. The probabilities are learnt from pairs of real misspellings.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache

LONGEST_PART = 3
RARE = -10.0
"""log p of an unseen edit of one letter."""
KEPT = -0.02
"""log p that a letter is written as it is."""
BAND = 4
"""Maximum offset between the two strings in an alignment."""
WRITTEN_KEPT = 256
"""Number of strings that are cached with their matches."""
SWAPPED, DROPPED, DOUBLED, ADDED, REPLACED, VOWEL, ADJACENT_KEY = "~s", "~d", "~2", "~a", "~r", "~v", "~k"
WRONG_KEY = "~k~k"
ALTERNATIVES = {SWAPPED: 1, DROPPED: 1, DOUBLED: 1, ADDED: 26, REPLACED: 25, VOWEL: 5, ADJACENT_KEY: 4, WRONG_KEY: 4}
"""Classes of edits, and about how many one-letter edits each has. ADJACENT_KEY: a key adjacent to the previous one was
added; WRONG_KEY: a key adjacent to the right one was hit."""
VOWELS = "aeiouy"
_ROWS = ("qwertyuiop", "asdfghjkl", "zxcvbnm")
_ADJACENT = {
    key: "".join(
        other
        for near, line in enumerate(_ROWS)
        for at, other in enumerate(line)
        if other != key and abs(near - row) <= 1 and abs((at + near / 2) - (place + row / 2)) <= 1
    )
    for row, keys in enumerate(_ROWS)
    for place, key in enumerate(keys)
}


Match = tuple[int, int, float]
"""(place, letters, log p) of an edited part in what was written."""


class Written:
    """A string with the positions of its parts, and the matches of intended parts (`Channel.matches`)."""

    def __init__(self, text: str) -> None:
        self.text, self.matches, self.places = text, dict[str, list[Match]](), defaultdict[str, list[int]](list)
        for size in range(LONGEST_PART + 2):
            for place in range(len(text) - size + 1):
                self.places[text[place : place + size]].append(place)


def alignment(written: str, meant: str) -> list[tuple[str, str]]:
    """(part, string) of single letters, swapped pairs and empty strings: the fewest edits."""
    n, m = len(meant), len(written)
    cost = [[i + j if not i * j else 0 for j in range(m + 1)] for i in range(n + 1)]
    for i in range(1, n + 1):
        for j in range(1, m + 1):
            same = meant[i - 1] == written[j - 1]
            cost[i][j] = min(cost[i - 1][j - 1] + (not same), cost[i - 1][j] + 1, cost[i][j - 1] + 1)
            if swapped(meant, written, i, j):
                cost[i][j] = min(cost[i][j], cost[i - 2][j - 2] + 1)
    steps: list[tuple[str, str]] = []
    i, j = n, m
    while i or j:
        here = cost[i][j]
        if i and j and here == cost[i - 1][j - 1] + (meant[i - 1] != written[j - 1]):
            di, dj = 1, 1
        elif swapped(meant, written, i, j) and here == cost[i - 2][j - 2] + 1:
            di, dj = 2, 2
        elif i and here == cost[i - 1][j] + 1:
            di, dj = 1, 0
        else:
            di, dj = 0, 1
        steps.append((meant[i - di : i], written[j - dj : j]))
        i, j = i - di, j - dj
    return steps[::-1]


def swapped(meant: str, written: str, i: int, j: int) -> bool:
    """Whether the two letters before i and those before j are each other's reverse."""
    return i > 1 and j > 1 and meant[i - 2 : i] == written[j - 2 : j][::-1] and meant[i - 1] != meant[i - 2]


def class_of(part: str, string: str, before: str, after: str) -> str:
    """The class of an edit, which gives unseen edits their probability; `before` is the written letter before it and
    `after` the intended letter after it."""
    if len(part) == 2:
        return SWAPPED
    if not string:
        return DROPPED
    if not part:
        return DOUBLED if string in (before, after) else ADJACENT_KEY if adjacent(before, string) else ADDED
    if adjacent(part, string):
        return WRONG_KEY
    return VOWEL if part in VOWELS and string in VOWELS else REPLACED


def adjacent(a: str, b: str) -> bool:
    """Whether two keys are neighbours on a keyboard (QWERTY)."""
    return b in _ADJACENT.get(a, "")


def learn_edits(pairs: Iterable[tuple[str, str, float]], least: float = 2.0) -> dict[tuple[str, str], float]:
    """log p(part -> string) from pairs (written, meant, weight): for single edits in their context, if their total
    weight is at least `least`, and for the classes of edits, as (class, "")."""
    edits, parts = defaultdict[tuple[str, str], float](float), defaultdict[str, float](float)
    for written, meant, weight in pairs:
        steps = [("^", "^"), *alignment(written, meant), ("$", "$")]
        if sum(a != b for a, b in steps) > 1 + len(meant) / 3:
            continue  # a different word rather than a misspelling
        marked = f"^{meant}$"
        for size in range(1, LONGEST_PART + 1):
            for i in range(len(marked) - size + 1):
                parts[marked[i : i + size]] += weight
        seen = dict[tuple[str, str], None]()  # ordered, so that the result is reproducible
        for first, (one, other) in enumerate(steps):
            if one != other:
                kind = class_of(one, other, steps[first - 1][1][-1:], steps[first + 1][0][:1])
                edits[kind, ""] += weight / ALTERNATIVES[kind]
            for last in range(first + 1, min(len(steps), first + 4) + 1):
                span = steps[first:last]
                part, string = "".join(a for a, _ in span), "".join(b for _, b in span)
                if part != string and 0 < len(part) <= LONGEST_PART and len(string) <= LONGEST_PART + 1:
                    seen[part, string] = None
        for edit in seen:
            edits[edit] += weight
        parts["~"] += weight * len(meant)
    kinds = {(kind, ""): math.log((edits[kind, ""] + 1e-3) / parts["~"]) for kind in ALTERNATIVES}
    seen_often = {edit: count for edit, count in edits.items() if edit not in kinds and count >= least}
    return kinds | {edit: math.log(count / max(parts[edit[0]], 2 * count)) for edit, count in seen_often.items()}


@dataclass(frozen=True)
class Channel:
    """Edits (part, string) with their log p."""

    edits: Mapping[tuple[str, str], float]

    @cached_property
    def by_part(self) -> dict[str, dict[str, float]]:
        table: dict[str, dict[str, float]] = {}
        for (part, string), value in self.edits.items():
            table.setdefault(part, {})[string] = value
        return table

    @cached_property
    def single(self) -> Callable[..., float]:
        """log p of an edit by its class alone."""

        @cache
        def value(part: str, string: str, before: str = "", after: str = "") -> float:
            if {part, string} & {"^", "$"}:
                return -math.inf
            return (
                self.edits.get((class_of(part, string, before, after), ""), RARE) - 0.7
            )  # seen edits are more probable

        return value

    @cached_property
    def written(self) -> Callable[[str], Written]:
        """A string with its edges, from a cache."""
        return lru_cache(maxsize=WRITTEN_KEPT)(lambda string: Written(f"^{string}$"))

    def matches(self, part: str, written: Written) -> list[Match]:
        """Where a string contains an edit of this part."""
        if part not in written.matches:
            table = self.by_part.get(part, {})
            written.matches[part] = [
                (place, len(string), table[string])
                for string in table.keys() & written.places.keys()
                for place in written.places[string]
            ]
        return written.matches[part]

    def log_probability(self, written: str, meant: str, least: float = -math.inf) -> float:
        """log p(written | meant), or about `least` where it is less, which is faster."""
        whole = self.written(written)
        a, b = f"^{meant}$", whole.text
        shorter = min(len(a), len(b))
        skip = end = 0
        while skip < shorter - 1 and a[skip] == b[skip]:
            skip += 1
        skip = max(0, skip - 2)  # two letters of context
        while end < shorter - skip - 1 and a[-1 - end] == b[-1 - end]:
            end += 1
        end = max(0, end - 2)
        return KEPT * (skip + end) + max(self._best(a, whole, skip, end, least), least)

    def _best(self, a: str, written: Written, skip: int, end: int, least: float) -> float:
        """log p of the best way to write a as b, without `skip` letters at the start of both and `end` at the end.

        best[i][j] is that of a[skip:i] as b[skip:j], j being in a band around i.
        """
        b = written.text
        n, m = len(a) - end, len(b) - end
        best = [[-math.inf] * (m + 1) for _ in range(n + 1)]
        best[skip][skip] = 0.0
        back, ahead = min(0, m - n) - BAND // 2, max(0, m - n) + BAND // 2
        for i in range(skip, n + 1):
            row, band = best[i], range(max(skip, i + back), min(m, i + ahead) + 1)
            self._add_letters(row, b, a[i] if i < n else "", skip, band, least)
            places = [j for j in band if row[j] > least] if i < n else []
            if not places:  # no path can exceed `least`
                continue
            self._write_letter(best, a[:n], b[:m], i, places)
            for size in range(1, min(LONGEST_PART, n - i) + 1):
                target = best[i + size]
                for j, length, value in self.matches(a[i : i + size], written):
                    to = j + length
                    if to <= m and j in places and row[j] + value > target[to]:
                        target[to] = row[j] + value
        return best[n][m]

    def _add_letters(self, row: list[float], b: str, after: str, skip: int, band: range, least: float) -> None:
        """Added letters before the letter `after`."""
        for j in band:
            if row[j] > least and j + 1 < len(row):
                step = row[j] + self.single("", b[j], b[j - 1] if j > skip else "", after)
                if step > row[j + 1]:
                    row[j + 1] = step

    def _write_letter(self, best: list[list[float]], a: str, b: str, i: int, places: Iterable[int]) -> None:
        """The letter a[i] dropped, kept, replaced, or swapped with the next."""
        single, row, below = self.single, best[i], best[i + 1]
        dropped, turned = single(a[i], ""), a[i + 1] + a[i] if i + 1 < len(a) else None
        for j in places:
            here = row[j]
            if here + dropped > below[j]:
                below[j] = here + dropped
            if j < len(b):
                step = here + (KEPT if a[i] == b[j] else single(a[i], b[j]))
                if step > below[j + 1]:
                    below[j + 1] = step
                if turned == b[j : j + 2]:
                    best[i + 2][j + 2] = max(best[i + 2][j + 2], here + single(a[i : i + 2], ""))
