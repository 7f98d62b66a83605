"""The tokens of a text, which of them may be corrected, and the case of replacements."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from cedd.spelling.token_groups import non_words

APOSTROPHES = ("'", "’", "‘")
LONGEST = 24
"""Maximum number of letters of a word that may be corrected."""
_TOKEN = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*|\d+|[.!?;:,]|\n\s*\n")
_PLAIN = re.compile(r"[a-zA-Z]+(?:['’][a-zA-Z]+)*\Z")
_CASES = (str.islower, str.isupper, lambda word: word[:1].isupper() and word[1:].islower())
_BEFORE, _AFTER = set("`$#<&@{=~^|\\"), set("`([={}>@~^|\\")
"""Characters before or after a word that indicate code."""


@dataclass(frozen=True)
class Token:
    """A word, a number, a stop or a comma."""

    start: int
    stop: int
    text: str
    key: str
    """Its form in the lexicon: lower case, straight apostrophes; # for any number, a full stop for any stop."""
    free: bool
    """Whether it is a word that may be corrected."""
    opens: bool
    """Whether it begins a sentence or a quotation, so that a capital carries no information."""
    elided: bool = False
    """Whether an apostrophe before or after it replaces letters that are not spoken: 'umble, risin'."""
    code: bool = False
    """Whether it is part of code or an address."""

    @property
    def plain(self) -> bool:
        """Whether it consists of at most LONGEST plain letters and apostrophes."""
        return self.stop - self.start <= LONGEST and _PLAIN.match(self.text) is not None

    @property
    def capitals(self) -> bool:
        """Whether it is all capitals."""
        return self.text.isupper() and len(self.text) > 1


def key_of(token: str) -> str:
    """A token's form in the lexicon."""
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


def acronyms(tokens: Sequence[Token]) -> list[bool]:
    """Whether each token is all capitals and most of the three words before and after it are not."""
    capitals = [0, *accumulate(token.capitals for token in tokens)]
    words = [0, *accumulate(token.key[0].isalpha() for token in tokens)]
    found: list[bool] = []
    for place, token in enumerate(tokens):
        first, last = max(0, place - 3), min(len(tokens), place + 4)
        around = words[last] - words[first] - 1
        found.append(token.capitals and 2 * (capitals[last] - capitals[first] - 1) < max(around, 1))
    return found


def without_capitals(text: str, tokens: Iterable[Token]) -> str:
    """The text with all-capitals words in lower case, of the same length; the network has seen few capitals."""
    parts, end = list[str](), 0
    for token in tokens:
        if token.free and token.capitals:
            parts += [text[end : token.start], token.text.lower()]
            end = token.stop
    return "".join([*parts, text[end:]])


def like(model: str, word: str) -> str:
    """The word in the case of `model`: all capitals, capitalized, or unchanged; the pronoun of I'm is a capital."""
    if "’" in model:
        word = word.replace("'", "’")
    if model.isupper() and sum(map(str.isalpha, model)) > 1:
        return word.upper()
    return word[:1].upper() + word[1:] if model[:1].isupper() or word.startswith(("i'", "i’")) else word
