"""Regular languages as expressions over Unicode characters, which the parsers make and automata are compiled from.

    Characters      one character of a set of code points
    Sequence        parts, one after the other
    Alternatives    one of several
    Repeat          the same part, between `least` and `most` times
    Separated       parts with a separator between them, some of which are optional
    Both            texts that two expressions match

Expressions are values: equal expressions have equal hashes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

Range = tuple[int, int]
"""The first and last code point, inclusive."""

LAST = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)


@dataclass(frozen=True)
class Characters:
    """One character of disjoint ranges of code points, in order, without surrogates, which UTF-8 cannot encode."""

    ranges: tuple[Range, ...]


@dataclass(frozen=True)
class Sequence:
    """Parts, one after the other; the empty text if there are no parts."""

    parts: tuple[Expression, ...]


@dataclass(frozen=True)
class Alternatives:
    """One of several; no text if there are no options."""

    options: tuple[Expression, ...]


@dataclass(frozen=True)
class Repeat:
    """A part `least` to `most` times; any number of times from `least` if `most` is None."""

    part: Expression
    least: int
    most: int | None


@dataclass(frozen=True)
class Both:
    """The texts that both expressions match."""

    one: Expression
    other: Expression


@dataclass(frozen=True)
class Separated:
    """Parts in order with a separator between them; True marks optional parts."""

    parts: tuple[tuple[Expression, bool], ...]
    separator: Expression


Expression = Characters | Sequence | Alternatives | Repeat | Both | Separated

EMPTY = Sequence(())
NOTHING = Alternatives(())


def characters(ranges: Iterable[Range]) -> Characters:
    """The union of ranges in any order, without surrogates."""
    merged: list[Range] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return Characters(_without(merged, [_SURROGATES]))


def _without(ranges: Iterable[Range], holes: Iterable[Range]) -> tuple[Range, ...]:
    """Ranges without some others."""
    rest = list(ranges)
    for low, high in holes:
        cut: list[Range] = []
        for first, last in rest:
            cut += [part for part in ((first, min(last, low - 1)), (max(first, high + 1), last)) if part[0] <= part[1]]
        rest = cut
    return tuple(rest)


def excluding(chosen: Characters, excluded: Characters) -> Characters:
    """The characters of one set that are not in another."""
    return Characters(_without(chosen.ranges, excluded.ranges))


def one_of(text: str) -> Characters:
    """One of the characters of a text."""
    return characters((ord(character), ord(character)) for character in text)


ANY = characters([(0, LAST)])
DIGIT = characters([(ord("0"), ord("9"))])


def literal(text: str) -> Expression:
    """The text itself."""
    if bad := next((character for character in text if _SURROGATES[0] <= ord(character) <= _SURROGATES[1]), None):
        raise ValueError(f"a lone surrogate ({bad!r}) is not text and cannot be written in UTF-8")
    return sequence(*(Characters(((ord(character), ord(character)),)) for character in text))


def sequence(*parts: Expression) -> Expression:
    """Parts, one after the other."""
    return parts[0] if len(parts) == 1 else Sequence(parts)


def alternatives(*options: Expression) -> Expression:
    """One of several."""
    return options[0] if len(options) == 1 else Alternatives(options)


def optional(part: Expression) -> Expression:
    """Once, or not at all."""
    return Repeat(part, 0, 1)


MOST_CHARACTERS = 100_000


def one_text_of(texts: Iterable[str]) -> Expression:
    """One of some texts."""
    given = list(dict.fromkeys(texts))
    if (count := sum(map(len, given))) > MOST_CHARACTERS:
        raise ValueError(f"the choices have at most {MOST_CHARACTERS:,} characters in total (got {count:,})")
    return alternatives(*map(literal, given))


def least_bytes(expression: Expression) -> float:
    """A lower bound on the number of bytes of a text of the expression; infinite if there is no text. It is exact
    without intersections."""
    match expression:
        case Characters(ranges):
            return len(chr(ranges[0][0]).encode()) if ranges else math.inf
        case Sequence(parts):
            return sum(map(least_bytes, parts))
        case Alternatives(options):
            return min(map(least_bytes, options), default=math.inf)
        case Repeat(part, least, _):
            return least * least_bytes(part) if least else 0
        case Both(one, other):
            return max(least_bytes(one), least_bytes(other))
        case Separated(parts, separator):
            needed = [least_bytes(part) for part, may_miss in parts if not may_miss]
            return sum(needed) + max(0, len(needed) - 1) * least_bytes(separator)
