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
"""Matched once per word, from its beginning, so that the time is linear in the text even without spaces."""


def non_words(text: str) -> Flags:
    """The characters of a text that are not part of words, although they may include letters.

    A string between spaces is not a word if it has a digit, one of @ / \\, an underscore inside (an emphasis in
    _underscores_ is a word), or a point between letters: k8s, me@home, http://x, snake_case, tinyurl.com. Letters
    followed by a combining accent and code (`code_spans`) do not count as words either.
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
    """The script and case of a plain letter, otherwise None. Plain are the ASCII letters among Latin ones, and letters
    of other scripts that Unicode does not decompose into letter and accent. The script is the first word of the
    character's Unicode name."""
    if not character.isalpha() or unicodedata.decomposition(character):
        return None
    script = unicodedata.name(character, "").partition(" ")[0]
    if script == "LATIN" and not character.isascii():
        return None
    return script, int(character.islower()) + 2 * int(character.isupper())


def token_groups(tokenizer: Tokenizer, change: str | None) -> NDArray[np.int64]:
    """The group of each token, [V]. A token may become another one of its group; tokens of group -1 never change.

    With change="letters", groups are plain letters of one script and case (`plain_letter`), and all other tokens are in
    group -1: an é is probably intended, and a model that has seen few of them would replace it by e. With "all" there
    is one group, and only tokens without text are in group -1.
    """
    V = tokenizer.vocab_size
    table = tokenizer.characters if change == "all" else tokenizer.single_characters
    if table is None and change == "letters":
        raise ValueError("change='letters' needs a tokenizer of characters or bytes; use change='all'")
    if table is None:
        return np.zeros(V, dtype=np.int64)
    groups, numbers = np.full(V, -1, dtype=np.int64), dict[tuple[str, int], int]()
    for character, token in table.items():
        if change == "all":
            groups[token] = -int(character == tokenizer.unknown)
        elif (kind := plain_letter(character)) is not None:
            groups[token] = numbers.setdefault(kind, len(numbers))
    return groups
