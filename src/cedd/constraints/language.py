"""Languages: sets of texts that samples can be constrained to."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from cedd.constraints.byte_automaton import ByteAutomaton, compile_expression
from cedd.constraints.regex_parser import parse_regex
from cedd.constraints.schema_parser import WHITESPACE, parse_schema
from cedd.constraints.syntax import ANY, Both, Expression, Repeat, least_bytes, one_text_of
from cedd.storage import JSONMapping

MOST_SHOWN = 60
"""Characters of a constraint's name in messages."""


@dataclass(frozen=True)
class Language:
    """A set of texts, for `LanguageModel.generate(constraint=...)` and `infill`.

    Args:
        expression: the expression that describes the texts.
        name: the name in error messages.
    """

    expression: Expression
    name: str

    @cached_property
    def automaton(self) -> ByteAutomaton:
        """The minimal automaton over UTF-8 bytes."""
        made = compile_expression(self.expression)
        if made.is_empty:
            raise ValueError(f"no text satisfies the constraint {self.name}")
        return made

    def matches(self, text: str) -> bool:
        """Whether the language contains a text."""
        return self.automaton.matches(text.encode("utf-8", "surrogatepass"))

    def check_room(self, tokens: int, longest: int) -> None:
        """Raise a ValueError, before compilation for tokens, if every text is much longer than some number of tokens of
        at most `longest` bytes."""
        least = least_bytes(self.expression) / max(1, longest)
        if 2 * tokens + 64 < least < math.inf:
            raise ValueError(
                f"no text of {tokens:,} tokens satisfies {self.name}; the shortest takes at least {math.ceil(least):,}"
            )

    def __repr__(self) -> str:
        return f"Language({self.name})"


def _named(kind: str, text: str) -> str:
    return f"{kind}({text if len(text) <= MOST_SHOWN else text[: MOST_SHOWN - 1] + '…'})"


def regex(pattern: str) -> Language:
    """The language of texts that a regular expression matches as a whole.

    Args:
        pattern: a pattern in Python's syntax; `cedd.constraints.regex_parser` lists what is supported. Classes such as
            \\w are ASCII.
    """
    return Language(parse_regex(pattern), _named("regex", repr(pattern)))


def choice(texts: Iterable[str]) -> Language:
    """The language that consists of these texts."""
    if isinstance(texts, str):
        raise ValueError(f"the choices must be a list of strings (got the string {texts[:MOST_SHOWN]!r})")
    given = list(texts) if isinstance(texts, Iterable) else []  # pyright: ignore[reportUnnecessaryIsInstance]
    if not given or not all(isinstance(text, str) for text in given):
        raise ValueError(f"the choices must be a non-empty list of strings (got {given[:4] or texts!r})")
    return Language(one_text_of(given), _named("choice", repr(given)))


def length(least: int = 0, most: int | None = None) -> Language:
    """Texts of `least` to `most` characters; without `most` there is no upper limit."""
    last = least if most is None else most
    if not isinstance(least, int) or not isinstance(last, int) or not 0 <= least <= last:
        raise ValueError(f"a length needs integers 0 <= least <= most (got {least!r} and {most!r})")
    return Language(Repeat(ANY, least, most), _named("length", f"{least}, {most}"))


def intersect(*languages: Language) -> Language:
    """The intersection of languages."""
    if not languages or not all(isinstance(language, Language) for language in languages):
        raise ValueError(f"intersect takes languages, such as regex(...) and length(...) (got {languages!r})")
    joined = languages[0].expression
    for language in languages[1:]:
        joined = Both(joined, language.expression)
    return Language(joined, _named("intersect", ", ".join(language.name for language in languages)))


def json_schema(schema: JSONMapping | bool | str, *, whitespace: str = WHITESPACE, depth: int = 2) -> Language:
    """JSON texts that are valid under a schema.

    Args:
        schema: a dictionary, or JSON text. Unsupported keywords raise an error that names them.
        whitespace: a regular expression for the white space after each colon and comma.
        depth: largest nesting depth of untyped values and of recursive references.
    """
    made = parse_schema(schema, whitespace, depth)
    return Language(made, _named("json_schema", schema if isinstance(schema, str) else repr(schema)))
