"""The noise of people: how probable it is that a word was written as another string.

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
from functools import cache, cached_property

LONGEST_PART = 3
RARE = -10.0
"""log p of an edit of one letter that was never seen."""
KEPT = -0.02
"""log p that a letter is written as it is."""
BAND = 4
"""How far the two words may be shifted against each other."""
SWAPPED, DROPPED, DOUBLED, ADDED, REPLACED, VOWEL, KEY_BESIDE = "~s", "~d", "~2", "~a", "~r", "~v", "~k"
ALTERNATIVES = {SWAPPED: 1, DROPPED: 1, DOUBLED: 1, ADDED: 26, REPLACED: 25, VOWEL: 5, KEY_BESIDE: 4, KEY_BESIDE * 2: 4}
"""Classes of edits, and about how many edits of one letter each has: a key beside the one before was added, or one
beside the right one was hit (twice its sign)."""
VOWELS = "aeiouy"
_ROWS = ("qwertyuiop", "asdfghjkl", "zxcvbnm")
_BESIDE = {
    key: "".join(
        other
        for near, line in enumerate(_ROWS)
        for at, other in enumerate(line)
        if other != key and abs(near - row) <= 1 and abs((at + near / 2) - (place + row / 2)) <= 1
    )
    for row, keys in enumerate(_ROWS)
    for place, key in enumerate(keys)
}


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
    """The class of an edit of the alignment, by which those that were never seen are judged; before it a letter was
    written, and after it one is meant."""
    if len(part) == 2:
        return SWAPPED
    if not string:
        return DROPPED
    if not part:
        return DOUBLED if string in (before, after) else KEY_BESIDE if beside(before, string) else ADDED
    if beside(part, string):
        return KEY_BESIDE + KEY_BESIDE
    return VOWEL if part in VOWELS and string in VOWELS else REPLACED


def beside(a: str, b: str) -> bool:
    """Whether two keys are neighbours on a keyboard (QWERTY)."""
    return b in _BESIDE.get(a, "")


def learn_edits(pairs: Iterable[tuple[str, str, float]], least: float = 2.0) -> dict[tuple[str, str], float]:
    """log p(part -> string) from pairs (written, meant, weight): of single edits with their neighbours as context, if
    they weigh `least` together; and of the classes of edits, as (class, "")."""
    edits, parts = defaultdict[tuple[str, str], float](float), defaultdict[str, float](float)
    for written, meant, weight in pairs:
        steps = [("^", "^"), *alignment(written, meant), ("$", "$")]
        if sum(a != b for a, b in steps) > 1 + len(meant) / 3:
            continue  # another word, rather than a misspelling
        marked = f"^{meant}$"
        for size in range(1, LONGEST_PART + 1):
            for i in range(len(marked) - size + 1):
                parts[marked[i : i + size]] += weight
        seen = set[tuple[str, str]]()
        for first, (one, other) in enumerate(steps):
            if one != other:
                kind = class_of(one, other, steps[first - 1][1][-1:], steps[first + 1][0][:1])
                edits[kind, ""] += weight / ALTERNATIVES[kind]
            for last in range(first + 1, min(len(steps), first + 4) + 1):
                span = steps[first:last]
                part, string = "".join(a for a, _ in span), "".join(b for _, b in span)
                if part != string and 0 < len(part) <= LONGEST_PART and len(string) <= LONGEST_PART + 1:
                    seen.add((part, string))
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
        """log p of an edit of the alignment by its class alone."""

        @cache
        def value(part: str, string: str, before: str = "", after: str = "") -> float:
            if {part, string} & {"^", "$"}:
                return -math.inf
            return (
                self.edits.get((class_of(part, string, before, after), ""), RARE) - 0.7
            )  # those that were seen are more likely

        return value

    def log_probability(self, written: str, meant: str, least: float = -math.inf) -> float:
        """log p(written | meant); about `least` where it is less, which is found sooner."""
        a, b = f"^{meant}$", f"^{written}$"
        skip = 0
        while skip < min(len(a), len(b)) - 1 and a[skip] == b[skip]:
            skip += 1
        skip = max(0, skip - 2)  # two letters of context
        kept, a, b = KEPT * skip, a[skip:], b[skip:]
        end = 0
        while end < min(len(a), len(b)) - 1 and a[-1 - end] == b[-1 - end]:
            end += 1
        end = max(0, end - 2)
        if end:
            kept, a, b = kept + KEPT * end, a[:-end], b[:-end]
        return kept + max(self._best(a, b, least), least)

    def _best(self, a: str, b: str, least: float) -> float:
        n, m = len(a), len(b)
        low = -math.inf
        best = [[low] * (m + 1) for _ in range(n + 1)]
        best[0][0] = 0.0
        shift = m - n
        back, ahead = min(0, shift) - BAND // 2, max(0, shift) + BAND // 2
        empty: dict[str, float] = {}
        for i in range(n + 1):
            row = best[i]
            tables = [
                (size, self.by_part.get(a[i : i + size], empty)) for size in range(1, min(LONGEST_PART, n - i) + 1)
            ]
            tables = [(size, table) for size, table in tables if table]
            for j in range(max(0, i + back), min(m, i + ahead) + 1):
                here = row[j]
                if here <= least:
                    continue
                if i < n and j < m:
                    step = here + (KEPT if a[i] == b[j] else self.single(a[i], b[j]))
                    if step > best[i + 1][j + 1]:
                        best[i + 1][j + 1] = step
                    if i + 1 < n and a[i] == b[j + 1 : j + 2] and a[i + 1] == b[j]:
                        best[i + 2][j + 2] = max(best[i + 2][j + 2], here + self.single(a[i : i + 2], ""))
                if i < n and (step := here + self.single(a[i], "")) > best[i + 1][j]:
                    best[i + 1][j] = step
                if j < m and (step := here + self.single("", b[j], b[j - 1 : j], a[i : i + 1])) > row[j + 1]:
                    row[j + 1] = step
                for size, table in tables:
                    target = best[i + size]
                    for length in range(min(LONGEST_PART + 1, m - j) + 1):
                        value = table.get(b[j : j + length])
                        if value is not None and here + value > target[j + length]:
                            target[j + length] = here + value
        return best[n][m]
