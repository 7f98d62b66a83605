r"""Regular expressions, as Python writes them, as expressions of `syntax`.

A pattern must match the whole text (`re.fullmatch`); ^ and $ are allowed at the ends and have no effect.

    literals          any character; \n \t \r \f \v \a \0 \xhh \uhhhh \Uhhhhhhhh, octal \ooo, and \ before punctuation
    classes           [a-z_] [^...] . \d \w \s \D \W \S      ASCII, as with re.ASCII; "." is all but a line break
    groups            (...) (?:...) (?P<name>...) (?flags:...) (?#comment)
    alternatives      a|b
    quantifiers       * + ? {n} {n,} {,m} {n,m}; lazy ones match the same texts
    flags             (?i) for ASCII letters, (?s), (?a); at the beginning or for a group

Look-around, back-references, word boundaries, conditions, atomic groups and possessive quantifiers are not supported:
finite automata cannot express them, or only at a large size.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass

from cedd.constraints.syntax import (
    ANY,
    DIGIT,
    Characters,
    Expression,
    Repeat,
    alternatives,
    characters,
    excluding,
    one_of,
    sequence,
)

_WORD = characters([*DIGIT.ranges, (ord("a"), ord("z")), (ord("A"), ord("Z")), (ord("_"), ord("_"))])
_SPACE = one_of(" \t\n\r\f\v")
_CLASSES = {"d": DIGIT, "w": _WORD, "s": _SPACE}
_CLASSES |= {name.upper(): excluding(ANY, chosen) for name, chosen in _CLASSES.items()}
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a"}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_REFUSED_ESCAPES = {
    "b": r"the word boundary \b",
    "B": r"the word boundary \B",
    "A": r"the anchor \A (anchors are implied)",
    "Z": r"the anchor \Z (anchors are implied)",
    "z": r"the anchor \z (anchors are implied)",
    "N": r"\N{...} (write the character itself)",
}
_REFUSED_GROUPS = {
    "?=": "look-ahead (?=...)",
    "?!": "look-ahead (?!...)",
    "?<=": "look-behind (?<=...)",
    "?<!": "look-behind (?<!...)",
    "?P=": "the back-reference (?P=...)",
    "?(": "the condition (?(...)...)",
    "?>": "the atomic group (?>...)",
}
MOST_CHARACTERS = 20_000
"""Largest number of characters of a pattern."""
MOST_COUNT = 10_000
"""Largest count in braces."""
MOST_NESTED = 50
"""Largest number of nested groups."""


@dataclass(frozen=True)
class _Flags:
    """(?i) and (?s)."""

    ignores_case: bool = False
    dot_is_any: bool = False

    def with_letters(self, letters: str, refuse: _Refusal) -> _Flags:
        if other := set(letters) - set("isa"):
            raise refuse(f"the flag (?{min(other)})")
        return _Flags(self.ignores_case or "i" in letters, self.dot_is_any or "s" in letters)

    def of(self, chosen: Characters) -> Characters:
        """Both cases of ASCII letters, if case is ignored."""
        if not self.ignores_case:
            return chosen
        both = list(chosen.ranges)
        for low, high, shift in ((ord("a"), ord("z"), -32), (ord("A"), ord("Z"), 32)):
            meets = ((max(first, low), min(last, high)) for first, last in chosen.ranges)
            both += [(first + shift, last + shift) for first, last in meets if first <= last]
        return characters(both)


@dataclass(frozen=True)
class _Refusal:
    pattern: str

    def __call__(self, what: str) -> ValueError:
        return ValueError(f"regular expression {_short(self.pattern)}: {what} is not supported")


def _short(pattern: str) -> str:
    return repr(pattern if len(pattern) <= 80 else pattern[:79] + "…")


def parse_regex(pattern: str) -> Expression:
    """The expression of a pattern; a ValueError if it is invalid or not supported."""
    if not isinstance(pattern, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"a regular expression must be a string (got {type(pattern).__name__})")
    if len(pattern) > MOST_CHARACTERS:
        raise ValueError(f"a regular expression has at most {MOST_CHARACTERS:,} characters (got {len(pattern):,})")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about sets that later Python versions may read differently
            re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"invalid regular expression {_short(pattern)}: {error}") from None
    return _RegexParser(pattern).parse()


class _RegexParser:
    """Parses a pattern that `re` accepts, so it does not check for syntax errors."""

    def __init__(self, pattern: str) -> None:
        self._pattern, self._place, self._depth = pattern, 0, 0
        self._refuse = _Refusal(pattern)

    def parse(self) -> Expression:
        flags = _Flags()
        while begins := re.compile(r"\(\?([a-zA-Z]+)\)").match(self._pattern, self._place):
            flags = flags.with_letters(begins[1], self._refuse)
            self._place = begins.end()
        return self._alternatives(flags)

    def _ahead(self, text: str) -> bool:
        return self._pattern.startswith(text, self._place)

    def _take(self, text: str) -> bool:
        found = self._ahead(text)
        self._place += len(text) * found
        return found

    def _next(self) -> str:
        self._place += 1
        return self._pattern[self._place - 1]

    @property
    def _over(self) -> bool:
        return self._place == len(self._pattern)

    def _alternatives(self, flags: _Flags) -> Expression:
        options = [self._sequence(flags)]
        while self._take("|"):
            options.append(self._sequence(flags))
        return alternatives(*options)

    def _sequence(self, flags: _Flags) -> Expression:
        parts: list[Expression] = []
        if self._depth == 0:
            self._take("^")
        while not (self._over or self._ahead("|") or self._ahead(")")):
            if self._depth == 0 and self._ahead("$") and self._pattern[self._place + 1 : self._place + 2] in ("", "|"):
                self._place += 1
                break
            self._skip_comments()
            if not (self._over or self._ahead("|") or self._ahead(")")):
                parts.append(self._quantified(self._atom(flags)))
        return sequence(*parts)

    def _skip_comments(self) -> None:
        while self._take("(?#"):
            self._place = self._pattern.index(")", self._place) + 1

    def _quantified(self, atom: Expression) -> Expression:
        self._skip_comments()
        counts = re.compile(r"\*|\+|\?|\{(?=\d|,)(\d*)(,?)(\d*)\}").match(self._pattern, self._place)
        if counts is None:
            return atom
        self._place = counts.end()
        if self._take("+"):
            raise self._refuse("a possessive quantifier")
        self._take("?")
        if counts[0] in "*+?":
            return Repeat(atom, int(counts[0] == "+"), 1 if counts[0] == "?" else None)
        least = int(counts[1] or 0)
        most = int(counts[3]) if counts[3] else None if counts[2] else least
        if max(least, most or 0) > MOST_COUNT:
            raise ValueError(f"regular expression {_short(self._pattern)}: counts are at most {MOST_COUNT:,}")
        return Repeat(atom, least, most)

    def _atom(self, flags: _Flags) -> Expression:
        """One character, class or group."""
        character = self._next()
        if character == "(":
            return self._group(flags)
        if character == "[":
            return self._set(flags)
        if character == ".":
            return ANY if flags.dot_is_any else excluding(ANY, one_of("\n"))
        if character in "^$":
            raise self._refuse(f"{character!r} other than at the ends")
        if character == "\\":
            return flags.of(self._escape(in_set=False))
        return flags.of(one_of(character))

    def _group(self, flags: _Flags) -> Expression:
        for sign, name in _REFUSED_GROUPS.items():
            if self._ahead(sign):
                raise self._refuse(name)
        if named := re.compile(r"\?P<[^>]*>").match(self._pattern, self._place):
            self._place = named.end()
        elif own := re.compile(r"\?([a-zA-Z]*)(-[a-zA-Z]+)?:").match(self._pattern, self._place):
            if own[2]:
                raise self._refuse(f"removing a flag, (?{own[1]}{own[2]}:...),")
            flags = flags.with_letters(own[1], self._refuse)
            self._place = own.end()
        self._depth += 1
        if self._depth > MOST_NESTED:
            raise ValueError(f"regular expression {_short(self._pattern)}: more than {MOST_NESTED} nested groups")
        inside = self._alternatives(flags)
        self._depth -= 1
        self._place += 1
        return inside

    def _set(self, flags: _Flags) -> Characters:
        negated, chosen, first = self._take("^"), list[tuple[int, int]](), True
        while first or not self._ahead("]"):
            first = False
            low = self._set_member()
            range_follows = self._ahead("-") and self._pattern[self._place + 1] != "]"
            if range_follows and len(low.ranges) == 1 and low.ranges[0][0] == low.ranges[0][1]:
                self._place += 1
                chosen.append((low.ranges[0][0], self._set_member().ranges[0][1]))
            else:
                chosen += low.ranges
        self._place += 1
        found = flags.of(characters(chosen))
        return excluding(ANY, found) if negated else found

    def _set_member(self) -> Characters:
        character = self._next()
        return self._escape(in_set=True) if character == "\\" else one_of(character)

    def _escape(self, in_set: bool) -> Characters:
        """After the backslash."""
        name = self._next()
        if name in _CLASSES:
            return _CLASSES[name]
        if name in _CONTROLS:
            return one_of(_CONTROLS[name])
        if name in _HEX_DIGITS:
            return self._code(_HEX_DIGITS[name])
        if name == "b" and in_set:
            return one_of("\b")
        if name in _REFUSED_ESCAPES:
            raise self._refuse(_REFUSED_ESCAPES[name])
        if name.isdigit():
            return self._number(in_set)
        return one_of(name)

    def _number(self, in_set: bool) -> Characters:
        r"""After a backslash and a digit: an octal code, \0 and up to two digits or three digits, or a reference."""
        self._place -= 1
        octal = re.compile(r"0[0-7]{0,2}|[0-3][0-7]{2}|[0-7]{1,3}" if in_set else r"0[0-7]{0,2}|[0-3][0-7]{2}").match(
            self._pattern, self._place
        )
        if octal is None:
            raise self._refuse(f"the back-reference \\{self._pattern[self._place]}")
        self._place = octal.end()
        return one_of(chr(int(octal[0], 8)))

    def _code(self, digits: int) -> Characters:
        code = int(self._pattern[self._place : self._place + digits], 16)
        self._place += digits
        if 0xD800 <= code <= 0xDFFF:
            raise self._refuse(f"the surrogate \\u{code:04x}")
        return Characters(((code, code),))
