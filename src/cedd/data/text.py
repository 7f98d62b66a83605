"""Encoding any text: a character that the tokenizer does not know is replaced by a similar one.

Shapes: N tokens of the text.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cedd.data.tokenizers import REPLACEMENT, Tokenizer

Ids = NDArray[np.int64]
Flags = NDArray[np.bool_]
MAX_UNKNOWN_SHARE = 0.01
"""Default limit of the share of unknown characters, above which a text is not evaluated."""
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class EncodedText:
    """A text as tokens [N]; `protected` tokens stand for characters that the tokenizer does not know."""

    text: str
    tokenizer: Tokenizer
    ids: Ids
    protected: Flags
    starts: NDArray[np.intp] | None
    """Position in the text of each token's first character; None if tokens are neither characters nor bytes."""

    def starts_of(self, places: NDArray[np.intp]) -> list[int]:
        """Positions in the text, in characters, of the tokens at these places."""
        if self.starts is not None:
            return self.starts[places].tolist()
        between = zip([0, *places[:-1].tolist()], places.tolist(), strict=True)
        return np.cumsum([len(self.tokenizer.decode(self.ids[i:j])) for i, j in between]).tolist()

    def written(self, ids: Ids) -> str:
        """The text with these tokens [N] instead. If tokens are characters, unchanged ones keep their original
        spelling."""
        if self.tokenizer.characters is None:
            return self.tokenizer.decode(ids)
        characters, places = list(self.text), np.flatnonzero(ids != self.ids)
        for start, i in zip(self.starts_of(places), places.tolist(), strict=True):
            characters[start] = self.tokenizer.decode(ids[i : i + 1])
        return "".join(characters)


_PLAIN = str.maketrans("‘’‚‛“”„‟′″–—―‐‑−\t\r", "''''\"\"\"\"'\"------  ")
"""Typographic characters and those of other systems, with their ASCII equivalents."""


def check_text(text: object, what: str) -> None:
    """Refuse anything but a string."""
    if not isinstance(text, str):
        raise TypeError(f"{what} must be a string (got {type(text).__name__})")


def without_surrogates(tokenizer: Tokenizer, text: str) -> list[tuple[str, str]]:
    """A text split at lone surrogates, as pairs (part, surrogate). A character tokenizer treats them like other unknown
    characters, but bytes cannot encode them."""
    if tokenizer.characters is not None:
        return [(text, "")]
    return list(zip(_SURROGATE.split(text), [*_SURROGATE.findall(text), ""], strict=True))


def without_returns(tokenizer: Tokenizer, text: str) -> str:
    """A text with \\n instead of \\r\\n, like training data, unless the tokenizer knows \\r."""
    return text if "\r" in (tokenizer.characters or {}) else text.replace("\r\n", "\n")


def encode_text(tokenizer: Tokenizer, text: str) -> EncodedText:
    """Tokens of any text. An unknown character is protected, and encoded as the most similar known one (é as e, a curly
    quote as a straight one), or as the unknown character, a space, or the first token. An unknown \\r before \\n is
    skipped."""
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


def encode_verbatim(tokenizer: Tokenizer, text: str) -> Ids:
    """Tokens [N] of any text that is kept as it is; lone surrogates, which bytes cannot encode, are skipped."""
    return np.concatenate([encode_text(tokenizer, part).ids for part, _ in without_surrogates(tokenizer, text)])


def never_written(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Tokens without text, including the one for unknown characters if it is U+FFFD."""
    table = tokenizer.characters
    unknown = (table[REPLACEMENT],) if table is not None and tokenizer.unknown == REPLACEMENT else ()
    return (*unknown, *tokenizer.silent)


def unknown_share(
    tokenizer: Tokenizer,
    ids: NDArray[np.integer],
    most: float = MAX_UNKNOWN_SHARE,
    unless: str = "; --max-unknown (max_unknown=) allows more",
) -> float:
    """The share of tokens that replace characters outside the alphabet; raises a ValueError above `most`, whose message
    ends with `unless`. All such characters become one token, which is easy to predict, so a perplexity on such a text
    is low but meaningless.
    """
    table = tokenizer.characters
    if table is None or tokenizer.unknown is None or not ids.size:
        return 0.0
    share = float(np.mean(ids == table[tokenizer.unknown]))
    if share > most:
        raise ValueError(
            f"{share:.1%} of the characters are unknown to the tokenizer {tokenizer.name!r} (more than {most:.1%}): "
            f"the figure would describe {tokenizer.unknown!r}, not the text. Use a model of such text"
            f"{unless}"
        )
    return share


def before_first(text: str, ends: Iterable[str]) -> str:
    """The text up to the first occurrence of any of `ends`; empty ones are ignored."""
    return text[: min((place for end in ends if end and (place := text.find(end)) >= 0), default=len(text))]
