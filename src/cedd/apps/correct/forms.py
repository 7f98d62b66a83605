"""Forms of words: derived words, which are probably correct, words that sound the same, and spelling variants."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from cedd.apps.correct.lexicon import Lexicon
from cedd.apps.correct.words import Token

BOUND = frozenset(
    (
        *("un", "re", "non", "anti", "mis", "dis", "pre", "sub", "inter", "semi", "multi", "co", "micro", "auto"),
        *("meta", "hyper", "pseudo", "tele", "bio", "geo", "neuro", "thermo", "hydro"),
    )
)
"""Prefixes that are not words, even if the lexicon has them."""
PREFIXES = (*sorted(BOUND), "over", "under", "out", "super", "counter", "self", "in", "fore", "up", "down")
ENDINGS = ("s", "'s", "ness", "less", "like", "er", "ers", "ism", "ist", "ists", "able", "ish", "wise", "ward")
"""Without -ed, -ing and -ly, before which letters are often doubled or dropped by mistake."""
AFTER_Y = ("ness", "est")
"""Endings before which y becomes i: clunky, clunkiness."""
_CONTRACTIONS = """
i'm i've you're you've you'll you'd he's she's it'll we've they're they've they'll they'd
that's that'll there's here's what's where's who's how's
don't doesn't didn't isn't aren't wasn't weren't hasn't haven't hadn't couldn't shouldn't wouldn't mustn't ain't
"""
_CONTRACTED = {word.replace("'", ""): word for word in _CONTRACTIONS.split()}
"""Contractions by what remains without the apostrophe, where that is not an English word (unlike its, ill and wont)."""
SHORTEST = 4
"""Minimum number of letters of a word from which others are derived."""
FORMS_KEPT = 8_192
"""Number of words whose sound and variant are cached."""
LEAST, LEAST_OF_TWO, LEAST_WITH_S = 3.5, 6.0, 6.0
"""Minimum log count of such a word, of each part of a compound, and of a word with 's; misspellings are rarer."""


def is_derived(lexicon: Lexicon, word: str) -> bool:
    """Whether a word is a known one with a prefix or an ending, one whose plural is known, or a compound."""

    def known(part: str, least: float) -> bool:
        if len(part) < SHORTEST:
            return False
        number = lexicon.index.get(part)
        if least < LEAST_OF_TWO and part in lexicon.known:
            return True
        return number is not None and bool(lexicon.log_counts[number] >= least)

    return (
        any(word.startswith(prefix) and known(word[len(prefix) :], LEAST) for prefix in PREFIXES)
        or any(word.endswith(ending) and known(word[: -len(ending)], LEAST) for ending in ENDINGS)
        or any(word.endswith("i" + ending) and known(word[: -len(ending) - 1] + "y", LEAST) for ending in AFTER_Y)
        or known(word + "s", 0.0)
        or any(known(word[:cut], LEAST_OF_TWO) and known(word[cut:], LEAST_OF_TWO) for cut in range(len(word)))
    )


def contraction(token: Token) -> str | None:
    """The contraction that a token is without its apostrophe (im, dont); not of one that may be a name (Ive, IM)."""
    if token.capitals or not (token.opens or token.text.islower()):
        return None
    return _CONTRACTED.get(token.key)


def is_possessive(lexicon: Lexicon, word: str) -> bool:
    """Whether a word is a common one with 's."""
    number = lexicon.index.get(word.removesuffix("'s")) if word.endswith("'s") else None
    return number is not None and bool(lexicon.log_counts[number] >= LEAST_WITH_S)


def is_ise_form(lexicon: Lexicon, word: str) -> bool:
    """Whether a word is the -ise spelling of a known word in -ize, such as theorise."""
    other = _S_OF_ISE.sub("z", word)
    return other != word and lexicon.kind(word) is not None and (other in lexicon.index or other in lexicon.known)


_SOUNDS = tuple(
    (re.compile(pattern, re.MULTILINE), sound)
    for pattern, sound in (
        ("'", ""),
        ("^(?:kn|gn|pn)", "n"),
        ("^wr", "r"),
        ("^ps", "s"),
        ("^wh", "w"),
        ("ght", "t"),
        ("(?<!^)gh", ""),
        ("ph", "f"),
        ("t?ch", "C"),
        ("sh|(?:t|s|c)i(?=on|ous|al|an)", "S"),
        ("th", "T"),
        ("qu", "kw"),
        ("x", "ks"),
        ("c(?=[eiy])", "s"),
        ("ck|c|q", "k"),
        ("dg(?=[eiy])|g(?=[eiy])", "j"),
        ("z", "s"),
        ("mb$", "m"),
        ("^h", ""),
        (r"(.)\1+", r"\1"),
        ("^[aeiouy]", "A"),
        ("(?<!^)[aeiouywh]", ""),
    )
)
_VARIANTS = tuple(
    (re.compile(pattern), other)
    for pattern, other in (
        ("(?<=[a-z]{3}[iy])z(?=[aei])", "s"),
        ("(?<=[a-z]{3})our", "or"),
        ("(?<=[bt])re$", "er"),
        ("(?<=[a-z]{2})(?:ae|oe)(?=[a-z]{3})", "e"),
        ("(?<=[a-z]{2}[aeiou])ll(?=e[dr]|ing)", "l"),
        ("(?<=def|off|lic)ence$", "ense"),
        ("ogue(?=s?$)", "og"),
    )
)
_ISE, _S_OF_ISE = (re.compile(rf"(?<=[a-z]{{3}}[iy]){letter}(?=e[drs]?$|ers$|ing|ation|able)") for letter in ("z", "s"))
"""The z of -ize and its derivatives, and the s of -ise."""


def _rewritten(word: str, rules: tuple[tuple[re.Pattern[str], str], ...]) -> str:
    for pattern, other in rules:
        word = pattern.sub(other, word)
    return word


@lru_cache(maxsize=FORMS_KEPT)
def sound(word: str) -> str:
    """A phonetic key without vowels, equal for words that sound alike."""
    return _rewritten(word, _SOUNDS)


def sounds(words: Sequence[str]) -> list[str]:
    """The phonetic keys of many words, processed as lines of one text, which is three times as fast."""
    return _rewritten("\n".join(words), _SOUNDS).split("\n") if words else []


@lru_cache(maxsize=FORMS_KEPT)
def variant(word: str) -> str:
    """A key that is equal for British and American spellings: colour, color; organise, organize."""
    return _rewritten(word, _VARIANTS)


def same_word(written: str, meant: str, known: bool) -> bool:
    """Whether the written word is a regional spelling of the other. For an unknown word only -ise for -ize counts,
    since other variants may be errors (amortise; but speling, spelling)."""
    return variant(written) == variant(meant) if known else _ISE.sub("s", meant) == written


FORMS: Mapping[str, Callable[[str, str], bool]] = {
    "inflected": lambda one, other: one + "s" == other or other + "s" == one,
    "apostrophe": lambda one, other: one.replace("'", "") == other.replace("'", ""),
    "another first letter": lambda one, other: one[0] != other[0],
    "another last letter": lambda one, other: one[-1] != other[-1],
    "same sound": lambda one, other: sound(one) == sound(other),
    "variant": lambda one, other: variant(one) == variant(other),
}
"""Relations between the written and the intended word."""
