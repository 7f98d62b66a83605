"""Words of a text: where they stand, which of them may be corrected, and how their case is kept."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from cedd.spelling.letters import non_words

APOSTROPHES = ("'", "’", "‘")
LONGEST = 24
"""Letters of a word that may be corrected; longer strings are hardly words."""
_TOKEN = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*|\d+|[.!?;:,]|\n\s*\n")
_PLAIN = re.compile(r"[a-zA-Z]+(?:['’][a-zA-Z]+)*\Z")
_CASES = (str.islower, str.isupper, lambda word: word[:1].isupper() and word[1:].islower())
_BEFORE, _AFTER = set("`$#<&@{=~^|\\"), set("`([={}>@~^|\\")
"""Signs of code right before or right after a word."""


@dataclass(frozen=True)
class Token:
    """A word, a number, a stop or a comma of a text."""

    start: int
    stop: int
    text: str
    key: str
    """As the lexicon has it: lower case, straight apostrophes; # is any number, a point any stop."""
    free: bool
    """Whether it is a word that may be corrected."""
    opens: bool
    """Whether a sentence or a quotation begins with it: then a capital says nothing."""
    elided: bool = False
    """Whether an apostrophe stands right before or after it, for letters that are not spoken: 'umble, risin'."""
    code: bool = False
    """Whether it is part of code, an address or the like."""

    @property
    def plain(self) -> bool:
        """Whether it consists of plain letters and apostrophes, as few as English words have."""
        return self.stop - self.start <= LONGEST and _PLAIN.match(self.text) is not None

    @property
    def capitals(self) -> bool:
        """Whether it is written in capitals throughout."""
        return self.text.isupper() and len(self.text) > 1


def key_of(token: str) -> str:
    """A token as the lexicon has it."""
    if token[0].isalpha():
        return token.replace("’", "'").lower()
    return "#" if token[0].isdigit() else "," if token == "," else "."


def tokens_of(text: str) -> list[Token]:
    """The tokens of a text in order."""
    never = non_words(text)
    found: list[Token] = []
    opens = True
    for match in _TOKEN.finditer(text):
        start, stop, word = match.start(), match.end(), match[0]
        key = key_of(word)
        code = (
            bool(never[start])
            or (start > 0 and text[start - 1] in _BEFORE)
            or (stop < len(text) and text[stop] in _AFTER)
        )
        free = (
            not code
            and 1 < stop - start <= LONGEST
            and _PLAIN.match(word) is not None
            and any(case(word) for case in _CASES)
        )
        opening = opens or (start > 0 and text[start - 1] in "\"“(['‘_*")
        elided = text[max(0, start - 1) : start] in APOSTROPHES or text[stop : stop + 1] in APOSTROPHES
        found.append(Token(start, stop, word, key, free, opening, elided, code))
        opens = key == "."
    return found


def acronyms(tokens: Sequence[Token], reach: int = 3) -> list[bool]:
    """Whether each token is in capitals while most words around it are not."""
    capitals = [0, *accumulate(token.capitals for token in tokens)]
    words = [0, *accumulate(token.key[0].isalpha() for token in tokens)]
    found: list[bool] = []
    for place, token in enumerate(tokens):
        first, last = max(0, place - reach), min(len(tokens), place + reach + 1)
        around = words[last] - words[first] - 1
        found.append(token.capitals and 2 * (capitals[last] - capitals[first] - 1) < max(around, 1))
    return found


def without_capitals(text: str, tokens: Iterable[Token]) -> str:
    """The text with words in capitals in lower case, letter for letter: a network may have seen few of them."""
    parts, end = list[str](), 0
    for token in tokens:
        if token.free and token.capitals:
            parts += [text[end : token.start], token.text.lower()]
            end = token.stop
    return "".join([*parts, text[end:]])


def like(model: str, word: str) -> str:
    """The word in the case of another: all capitals, a capital first, or as it is."""
    if "’" in model:
        word = word.replace("'", "’")
    if model.isupper() and sum(map(str.isalpha, model)) > 1:
        return word.upper()
    return word[:1].upper() + word[1:] if model[:1].isupper() else word
