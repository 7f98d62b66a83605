"""Any text as tokens, and back: what a tokenizer does not know is read as what is most like it.

Shapes: N tokens of the text.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cedd.data.tokenizers import Tokenizer

Ids = NDArray[np.int64]
Flags = NDArray[np.bool_]
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Reading:
    """A text as tokens [N]; `protected` ones stand for what the tokenizer does not know."""

    ids: Ids
    protected: Flags
    starts: NDArray[np.intp] | None
    """Where each begins in the text, in characters; None where tokens are neither characters nor bytes."""


_PLAIN = str.maketrans("‘’‚‛“”„‟′″–—―‐‑−\t\r", "''''\"\"\"\"'\"------  ")
"""Characters of print and of other systems, as a typewriter writes them."""


def without_surrogates(tokenizer: Tokenizer, text: str) -> list[tuple[str, str]]:
    """A text cut at lone surrogates, (part, surrogate) each: to a tokenizer of characters they are characters like
    others that it does not know, but bytes cannot write them."""
    if tokenizer.characters is not None:
        return [(text, "")]
    return list(zip(_SURROGATE.split(text), [*_SURROGATE.findall(text), ""], strict=True))


def without_returns(tokenizer: Tokenizer, text: str) -> str:
    """A text whose lines end in \\n alone, as the network was taught, where tokens are characters and \\r is none."""
    table = tokenizer.characters
    return text if table is None or "\r" in table else text.replace("\r\n", "\n")


def read_text(tokenizer: Tokenizer, text: str) -> Reading:
    """Tokens of any text. An unknown character is protected, and read as the known one that is most like it (é as e,
    a curly quote as a straight one), else as what stands for unknown ones, else as a space, else as the first token;
    of an unknown \\r before \\n nothing is read."""
    table = tokenizer.characters
    if table is None:
        ids = tokenizer.encode(text)
        return Reading(ids, np.zeros(len(ids), dtype=np.bool_), tokenizer.starts(text))
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
    return Reading(ids, protected, np.delete(np.arange(len(text)), hidden))


def read_given(tokenizer: Tokenizer, text: str) -> Ids:
    """Tokens of any text that stays as it is, [N]; of lone surrogates, which bytes cannot write, nothing is read."""
    parts = [read_text(tokenizer, part).ids for part, _ in without_surrogates(tokenizer, text)]
    return np.concatenate(parts)


def never_written(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The token that stands for unknown characters, where it is none itself (U+FFFD)."""
    table = tokenizer.characters
    return (table[REPLACEMENT],) if table is not None and tokenizer.unknown == REPLACEMENT else ()


def starts_of(tokenizer: Tokenizer, reading: Reading, places: NDArray[np.intp]) -> list[int]:
    """Where the tokens at these places begin in the text, in characters."""
    if reading.starts is not None:
        return reading.starts[places].tolist()
    between = zip([0, *places[:-1].tolist()], places.tolist(), strict=True)
    return np.cumsum([len(tokenizer.decode(reading.ids[i:j])) for i, j in between]).tolist()


def write_text(tokenizer: Tokenizer, text: str, reading: Reading, ids: Ids, places: NDArray[np.intp]) -> str:
    """The text with other tokens at these places; where tokens are characters all else stays as it was written."""
    if tokenizer.characters is None:
        return tokenizer.decode(ids)
    letters = list(text)
    for start, i in zip(starts_of(tokenizer, reading, places), places.tolist(), strict=True):
        letters[start] = tokenizer.decode(ids[i : i + 1])
    return "".join(letters)
