"""Regular languages as expressions over Unicode characters: what the front ends make and automata are compiled from.

    Characters      one character of a set of code points
    Sequence        parts, one after the other
    Alternatives    one of several
    Repeat          the same, between `least` and `most` times
    Both            texts that two expressions match

Expressions are values: equal ones have the same hash, and none refers to where it came from.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

Range = tuple[int, int]
"""Code points from the first to the last, both included."""

LAST = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)


@dataclass(frozen=True)
class Characters:
    """One character of disjoint ranges of code points, in order. UTF-8 cannot write surrogates: no set has them."""

    ranges: tuple[Range, ...]


@dataclass(frozen=True)
class Sequence:
    """Parts, one after the other; without parts, the empty text."""

    parts: tuple[Expression, ...]


@dataclass(frozen=True)
class Alternatives:
    """One of several; without options, no text at all."""

    options: tuple[Expression, ...]


@dataclass(frozen=True)
class Repeat:
    """The same expression `least` to `most` times, or without end."""

    part: Expression
    least: int
    most: int | None


@dataclass(frozen=True)
class Both:
    """The texts that are in both languages."""

    one: Expression
    other: Expression


Expression = Characters | Sequence | Alternatives | Repeat | Both

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
    """Ranges less some others."""
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


def separated(parts: Iterable[tuple[Expression, bool]], separator: Expression) -> Expression:
    """Parts with a separator between them; those with True may be missing, with theirs.

    Up to the first part that must be there, each carries the separator after it, and from there on before it. Where
    none must, any may be the first.
    """
    given = list(parts)
    fixed = next((i for i, (_, may_miss) in enumerate(given) if not may_miss), None)
    if fixed is None:
        first_of = [
            sequence(part, *(optional(sequence(separator, later)) for later, _ in given[i + 1 :]))
            for i, (part, _) in enumerate(given)
        ]
        return alternatives(EMPTY, *first_of)
    before = [optional(sequence(part, separator)) for part, _ in given[:fixed]]
    after = [sequence(separator, part) for part, _ in given[fixed + 1 :]]
    after = [
        optional(part) if may_miss else part for part, (_, may_miss) in zip(after, given[fixed + 1 :], strict=True)
    ]
    return sequence(*before, given[fixed][0], *after)
