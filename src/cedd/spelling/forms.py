"""What the form of a word says of it: an unknown word that is made of known ones is probably no mistake."""

from __future__ import annotations

from cedd.spelling.lexicon import Lexicon

BOUND = frozenset(("un", "re", "non", "anti", "mis", "dis", "pre", "sub", "inter", "semi", "multi", "co"))
"""Prefixes that are no words, though a lexicon may have them."""
PREFIXES = (*sorted(BOUND), "over", "under", "out", "super", "counter", "self", "in", "fore", "up", "down")
ENDINGS = ("s", "'s", "ness", "less", "like", "er", "ers", "ism", "ist", "ists", "able", "ish", "wise", "ward")
"""Not -ed, -ing and -ly, before which people forget to double a letter, or to drop one."""
SHORTEST = 4
"""Letters of a word that others are made of."""
LEAST, LEAST_OF_TWO = 3.5, 6.0
"""Logarithms of the count of such a word, and of each of two that are joined."""


def is_derived(lexicon: Lexicon, word: str) -> bool:
    """Whether a word is another with a prefix or an ending, one whose plural is known, or two words in one."""

    def known(part: str, least: float) -> bool:
        number = lexicon.index.get(part) if len(part) >= SHORTEST else None
        return number is not None and bool(lexicon.log_counts[number] >= least)

    return (
        any(word.startswith(prefix) and known(word[len(prefix) :], LEAST) for prefix in PREFIXES)
        or any(word.endswith(ending) and known(word[: -len(ending)], LEAST) for ending in ENDINGS)
        or known(word + "s", 0.0)
        or any(known(word[:cut], LEAST_OF_TWO) and known(word[cut:], LEAST_OF_TWO) for cut in range(len(word)))
    )


def is_inflected(one: str, other: str) -> bool:
    """Whether two words differ by an s at the end."""
    return one + "s" == other or other + "s" == one
