"""Which tokens of a text may be changed, and into which others: letters of words, each within its script and case.

Shapes: N tokens of the text, V vocabulary.
"""

from __future__ import annotations

import re
import unicodedata
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from cedd.data.text import EncodedText, Flags
from cedd.data.tokenizers import Tokenizer
from cedd.spelling.code import code_spans

_SHOWS_NO_WORD = r"[\d@/\\]|(?<=\w)_(?=\w)|(?<=[^\W\d_])\.(?=[^\W\d_])"
_NON_WORD = re.compile(rf"(?<!\S)\S*?(?:{_SHOWS_NO_WORD})\S*|[^\W\d_](?=[\u0300-\u036f])")
"""Tried once a word, from its beginning: the time is linear in the text, also where it has no blanks."""


def non_words(text: str) -> Flags:
    """The characters of a text that belong to no word of a language, though letters may be among them.

    What stands between blanks is no word if it has a digit, one of @ / \\, an underscore within (an emphasis in
    _underscores_ is a word), or a point between letters: k8s, me@home, http://x, snake_case, tinyurl.com. Neither is a
    letter plain if its accent follows it as a character of its own, nor are words those of code (`code_spans`).
    """
    flags = np.zeros(len(text), dtype=np.bool_)
    for start, stop in chain((match.span() for match in _NON_WORD.finditer(text)), code_spans(text)):
        flags[start:stop] = True
    return flags


def protected_tokens(encoded: EncodedText, groups: NDArray[np.int64], change: str | None) -> Flags:
    """The tokens that are read but never changed, [N]: unknown ones, those in no group, and, unless all may change,
    those of `non_words`."""
    never = encoded.protected | (groups[encoded.ids] < 0)
    return never if change == "all" or encoded.starts is None else never | non_words(encoded.text)[encoded.starts]


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

    For letters the groups are plain letters of one script and case (`plain_letter`), and -1 is all else: an é was meant
    by its writer, and a model that has seen few of them would write an e. For all there is one group, and -1 is what
    stands for no text: a vocabulary may have tokens that are no characters.
    """
    V = tokenizer.vocab_size
    table = tokenizer.characters if change == "all" else tokenizer.single_characters
    if table is None and change == "letters":
        raise ValueError("letters can be told apart only where tokens are characters or bytes; use change='all'")
    if table is None:
        return np.zeros(V, dtype=np.int64)
    groups, numbers = np.full(V, -1, dtype=np.int64), dict[tuple[str, int], int]()
    for character, token in table.items():
        if change == "all":
            groups[token] = -int(character == tokenizer.unknown)
        elif (kind := plain_letter(character)) is not None:
            groups[token] = numbers.setdefault(kind, len(numbers))
    return groups
