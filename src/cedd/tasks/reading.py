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


def without_returns(tokenizer: Tokenizer, text: str) -> str:
    """A text whose lines end in \\n alone, as the network was taught, where tokens are characters and \\r is none."""
    table = _characters(tokenizer)
    return text if table is None or "\r" in table else text.replace("\r\n", "\n")


def read_text(tokenizer: Tokenizer, text: str) -> Reading:
    """Tokens of any text. An unknown character is protected, and read as the known one that is most like it (é as e,
    a curly quote as a straight one), else as what stands for unknown ones, else as a space, else as the first token;
    of an unknown \\r before \\n nothing is read."""
    table = _characters(tokenizer)
    if table is None:
        ids, starts = tokenizer.encode(text), None
        if isinstance(tokenizer, ByteTokenizer):
            starts = np.repeat(np.arange(len(text)), [len(character.encode()) for character in text])
        return Reading(ids, np.zeros(len(ids), dtype=np.bool_), starts)
    shown = without_returns(tokenizer, text)
    hidden = [] if shown == text else [match.start() for match in re.finditer("\r\n", text)]
    unknown = {character for character in set(shown) if character not in table}
    filler = table.get(_stand_in(tokenizer) or " ", next(iter(table.values())))
    read_as = table | {
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
    stand_in, table = _stand_in(tokenizer), _characters(tokenizer)
    return (table[stand_in],) if table is not None and stand_in == REPLACEMENT else ()


_SHOWS_NO_WORD = r"[\d@/\\]|(?<=\w)_(?=\w)|(?<=[^\W\d_])\.(?=[^\W\d_])"
_LEFT_ALONE = re.compile(rf"(?<!\S)\S*?(?:{_SHOWS_NO_WORD})\S*|[^\W\d_](?=[\u0300-\u036f])")
"""Tried once a word, from its beginning: the time is linear in the text, also where it has no blanks."""


def left_alone(text: str) -> Flags:
    """The characters of a text that are no words of a language, though letters may be among them.

    What stands between blanks is visibly no word if it has a digit, one of @ / \\, an underscore within (an emphasis
    in _underscores_ is a word), or a point between letters: k8s, me@home, http://x, snake_case, tinyurl.com. Neither is
    a letter plain if its accent follows it as a character of its own.
    """
    flags = np.zeros(len(text), dtype=np.bool_)
    for match in _LEFT_ALONE.finditer(text):
        flags[match.start() : match.end()] = True
    return flags


def held(text: str, reading: Reading, groups: NDArray[np.int64], change: str | None) -> Flags:
    """The tokens that are read but never changed, [N]: unknown ones, those in no group, and, unless all may change,
    those of what is no word."""
    never = reading.protected | (groups[reading.ids] < 0)
    return never if change == "all" or reading.starts is None else never | left_alone(text)[reading.starts]


def plain_letter(character: str) -> tuple[str, int] | None:
    """The script and the case of a plain letter, else None: of Latin letters those of ASCII are plain, of others those
    that Unicode does not compose of a letter and an accent. The script is the first word of the character's name."""
    if not character.isalpha() or unicodedata.decomposition(character):
        return None
    script = unicodedata.name(character, "").partition(" ")[0]
    if script == "LATIN" and not character.isascii():
        return None
    return script, int(character.islower()) + 2 * int(character.isupper())


def token_groups(tokenizer: Tokenizer, change: str | None) -> NDArray[np.int64]:
    """The group of each token, [V]: a token may become another of its group, and one of group -1 never changes.

    For letters the groups are plain letters of one script and case (`plain_letter`); -1 is all else: é is what the
    writer made it, and a model that has seen few of them would write an e. For all there is one group, and -1 is what
    stands for no text: a vocabulary may have tokens that are no characters.
    """
    V = tokenizer.vocab_size
    table = _characters(tokenizer)
    if table is None and isinstance(tokenizer, ByteTokenizer):
        table = {chr(byte): byte for byte in range(128 if change != "all" else 256)}
    if table is None and change == "letters":
        raise ValueError("letters can be told apart only where tokens are characters or bytes; use change='all'")
    if table is None:
        return np.zeros(V, dtype=np.int64)
    groups, numbers = np.full(V, -1, dtype=np.int64), dict[tuple[str, int], int]()
    for character, token in table.items():
        if change == "all":
            groups[token] = -int(character == _stand_in(tokenizer))
        elif (kind := plain_letter(character)) is not None:
            groups[token] = numbers.setdefault(kind, len(numbers))
    return groups


def starts_of(tokenizer: Tokenizer, reading: Reading, places: NDArray[np.intp]) -> list[int]:
    """Where the tokens at these places begin in the text, in characters."""
    if reading.starts is not None:
        return reading.starts[places].tolist()
    between = zip([0, *places[:-1].tolist()], places.tolist(), strict=True)
    return np.cumsum([len(tokenizer.decode(reading.ids[i:j])) for i, j in between]).tolist()


def write_text(tokenizer: Tokenizer, text: str, reading: Reading, ids: Ids, places: NDArray[np.intp]) -> str:
    """The text with other tokens at these places; where tokens are characters all else stays as it was written."""
    if _characters(tokenizer) is None:
        return tokenizer.decode(ids)
    letters = list(text)
    for start, i in zip(starts_of(tokenizer, reading, places), places.tolist(), strict=True):
        letters[start] = tokenizer.decode(ids[i : i + 1])
    return "".join(letters)
