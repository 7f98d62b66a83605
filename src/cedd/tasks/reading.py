"""Text as tokens, and back: what a model may read of any text, and which of it may be changed.

Shapes: N tokens of the text, V vocabulary.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cedd.data.tokenizers import ByteTokenizer, Tokenizer

Ids = NDArray[np.int64]
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Reading:
    """A text as tokens [N]; `protected` ones stand for what the tokenizer does not know."""

    ids: Ids
    protected: NDArray[np.bool_]


def _characters(tokenizer: Tokenizer) -> dict[str, int] | None:
    """The table of a tokenizer whose tokens are characters."""
    return getattr(tokenizer, "characters", None)


def _stand_in(tokenizer: Tokenizer) -> str | None:
    """The character that stands for those outside the alphabet, where a tokenizer has one; it is never written."""
    return getattr(tokenizer, "unknown", None)


_PLAIN = str.maketrans("‘’‚‛“”„‟′″–—―‐‑−\t\r", "''''\"\"\"\"'\"------  ")
"""Characters of print and of other systems, as a typewriter writes them."""


def without_surrogates(tokenizer: Tokenizer, text: str) -> list[tuple[str, str]]:
    """A text cut at lone surrogates, (part, surrogate) each: to a tokenizer of characters they are characters like
    others that it does not know, but bytes cannot write them."""
    if _characters(tokenizer) is not None:
        return [(text, "")]
    return list(zip(_SURROGATE.split(text), [*_SURROGATE.findall(text), ""], strict=True))


def read_text(tokenizer: Tokenizer, text: str) -> Reading:
    """Tokens of any text. An unknown character is protected, and read as the known one that is most like it (é as e,
    a curly quote as a straight one), else as what stands for unknown ones, else as a space, else as the first token."""
    table = _characters(tokenizer)
    if table is None:
        ids = tokenizer.encode(text)
        return Reading(ids, np.zeros(len(ids), dtype=np.bool_))
    unknown = {character for character in set(text) if character not in table}
    filler = table.get(_stand_in(tokenizer) or " ", next(iter(table.values())))
    read_as = table | {
        character: table.get(unicodedata.normalize("NFKD", character.translate(_PLAIN))[0], filler)
        for character in unknown
    }
    ids = np.fromiter((read_as[character] for character in text), np.int64, len(text))
    protected = np.fromiter((character in unknown for character in text), np.bool_, len(text))
    return Reading(ids, protected)


def read_given(tokenizer: Tokenizer, text: str) -> Ids:
    """Tokens of any text that stays as it is, [N]; of lone surrogates, which bytes cannot write, nothing is read."""
    parts = [read_text(tokenizer, part).ids for part, _ in without_surrogates(tokenizer, text)]
    return np.concatenate(parts)


def never_written(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The token that stands for unknown characters, where it is none itself (U+FFFD)."""
    stand_in, table = _stand_in(tokenizer), _characters(tokenizer)
    return (table[stand_in],) if table is not None and stand_in == REPLACEMENT else ()


def token_groups(tokenizer: Tokenizer, change: str | None) -> NDArray[np.int64]:
    """The group of each token, [V]: a token may become another of its group, and one of group -1 never changes.

    For letters the groups are small, capital, and letters without case; -1 is all that is no letter. For all there is
    one group, and -1 is what stands for no text: a vocabulary may have tokens that are no characters.
    """
    V = tokenizer.vocab_size
    table = _characters(tokenizer)
    if table is None and isinstance(tokenizer, ByteTokenizer):
        table = {chr(byte): byte for byte in range(128 if change != "all" else 256)}
    if table is None and change == "letters":
        raise ValueError("letters can be told apart only where tokens are characters or bytes; use change='all'")
    if table is None:
        return np.zeros(V, dtype=np.int64)
    groups = np.full(V, -1, dtype=np.int64)
    for character, token in table.items():
        if change == "all":
            groups[token] = -int(character == _stand_in(tokenizer))
        elif character.isalpha():
            groups[token] = int(character.islower()) + 2 * int(character.isupper())
    return groups


def starts_of(tokenizer: Tokenizer, ids: Ids, places: NDArray[np.intp]) -> list[int]:
    """Where the tokens at these places begin in the text, in characters."""
    if _characters(tokenizer) is not None:
        return places.tolist()
    between = zip([0, *places[:-1].tolist()], places.tolist(), strict=True)
    return np.cumsum([len(tokenizer.decode(ids[i:j])) for i, j in between]).tolist()


def write_text(tokenizer: Tokenizer, text: str, ids: Ids, places: NDArray[np.intp]) -> str:
    """The text with other tokens at these places; where tokens are characters all else stays as it was written."""
    if _characters(tokenizer) is None:
        return tokenizer.decode(ids)
    letters = list(text)
    for i in places.tolist():
        letters[i] = tokenizer.decode(ids[i : i + 1])
    return "".join(letters)
