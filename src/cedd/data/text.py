"""Any text as tokens, and back: a character that the tokenizer does not know is read as the one most like it.

Shapes: N tokens of the text.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cedd.data.tokenizers import Tokenizer

Ids = NDArray[np.int64]
Flags = NDArray[np.bool_]
MOST_UNKNOWN = 0.01
"""The share of unknown characters above which no figure is given for a text, unless asked."""
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class EncodedText:
    """A text as tokens [N]; `protected` ones stand for characters that the tokenizer does not know."""

    text: str
    tokenizer: Tokenizer
    ids: Ids
    protected: Flags
    starts: NDArray[np.intp] | None
    """Where each begins in the text, in characters; None where tokens are neither characters nor bytes."""

    def starts_of(self, places: NDArray[np.intp]) -> list[int]:
        """Where the tokens at these places begin in the text, in characters."""
        if self.starts is not None:
            return self.starts[places].tolist()
        between = zip([0, *places[:-1].tolist()], places.tolist(), strict=True)
        return np.cumsum([len(self.tokenizer.decode(self.ids[i:j])) for i, j in between]).tolist()

    def written(self, ids: Ids) -> str:
        """The text with these tokens [N]; where tokens are characters, what has not changed stays as it was written."""
        if self.tokenizer.characters is None:
            return self.tokenizer.decode(ids)
        characters, places = list(self.text), np.flatnonzero(ids != self.ids)
        for start, i in zip(self.starts_of(places), places.tolist(), strict=True):
            characters[start] = self.tokenizer.decode(ids[i : i + 1])
        return "".join(characters)


_PLAIN = str.maketrans("‘’‚‛“”„‟′″–—―‐‑−\t\r", "''''\"\"\"\"'\"------  ")
"""Characters of print and of other systems, as a typewriter writes them."""


def check_text(text: object, what: str) -> None:
    """Refuse what is no text: a list of texts, bytes, or nothing."""
    if not isinstance(text, str):
        raise TypeError(f"{what} is a text (str), not {type(text).__name__}")


def without_surrogates(tokenizer: Tokenizer, text: str) -> list[tuple[str, str]]:
    """A text cut at lone surrogates, (part, surrogate) each: to a tokenizer of characters they are unknown characters
    like others, but bytes cannot write them."""
    if tokenizer.characters is not None:
        return [(text, "")]
    return list(zip(_SURROGATE.split(text), [*_SURROGATE.findall(text), ""], strict=True))


def without_returns(tokenizer: Tokenizer, text: str) -> str:
    """A text whose lines end in \\n alone, as those that models are trained on, unless \\r is a character of theirs."""
    return text if "\r" in (tokenizer.characters or {}) else text.replace("\r\n", "\n")


def encode_text(tokenizer: Tokenizer, text: str) -> EncodedText:
    """Tokens of any text. An unknown character is protected, and read as the known one that is most like it (é as e,
    a curly quote as a straight one), else as the one for unknown ones, else as a space, else as the first token; an
    unknown \\r before \\n is skipped."""
    table = tokenizer.characters
    if table is None:
        ids = tokenizer.encode(text)
        return EncodedText(text, tokenizer, ids, np.zeros(len(ids), dtype=np.bool_), tokenizer.starts(text))
    shown = without_returns(tokenizer, text)
    hidden = [] if shown == text else [match.start() for match in re.finditer("\r\n", text)]
    unknown = {character for character in set(shown) if character not in table}
    filler = table.get(tokenizer.unknown or " ", next(iter(table.values())))
    read_as = {**table} | {
        character: table.get(unicodedata.normalize("NFKD", character.translate(_PLAIN))[0], filler)
        for character in unknown
    }
    ids = np.fromiter((read_as[character] for character in shown), np.int64, len(shown))
    protected = np.fromiter((character in unknown for character in shown), np.bool_, len(shown))
    return EncodedText(text, tokenizer, ids, protected, np.delete(np.arange(len(text)), hidden))


def encode_given(tokenizer: Tokenizer, text: str) -> Ids:
    """Tokens of any text that stays as it is, [N]; lone surrogates, which bytes cannot write, are skipped."""
    return np.concatenate([encode_text(tokenizer, part).ids for part, _ in without_surrogates(tokenizer, text)])


def never_written(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Tokens that stand for no text, among them the one for unknown characters where it is none itself (U+FFFD)."""
    table = tokenizer.characters
    unknown = (table[REPLACEMENT],) if table is not None and tokenizer.unknown == REPLACEMENT else ()
    return (*unknown, *tokenizer.silent)


def unknown_share(
    tokenizer: Tokenizer,
    ids: NDArray[np.integer],
    most: float = MOST_UNKNOWN,
    unless: str = "; --most-unknown (most_unknown=) allows more",
) -> float:
    """The share of tokens that stand for characters outside the alphabet; refused above `most`, unless what is said.

    They are all one token, and a network finds it easy to guess one token: what it says of a text that it cannot read
    is a good figure that means nothing.
    """
    table = tokenizer.characters
    if table is None or tokenizer.unknown is None or not ids.size:
        return 0.0
    share = float(np.mean(ids == table[tokenizer.unknown]))
    if share > most:
        raise ValueError(
            f"{share:.1%} of the text are characters that the tokenizer {tokenizer.name!r} does not know (more than "
            f"{most:.1%}): a figure would be of {tokenizer.unknown!r}, not of the text. Use a model of such text"
            f"{unless}"
        )
    return share


def before_first(text: str, ends: Iterable[str]) -> str:
    """The text up to the first of the `ends` that is in it; empty ones end nothing."""
    return text[: min((place for end in ends if end and (place := text.find(end)) >= 0), default=len(text))]
