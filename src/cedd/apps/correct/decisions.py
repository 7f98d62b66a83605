"""Decides which words of a text are changed, with the lexicon and, if that is undecided, a network.

The network scores the text with each of the most probable options (`likelihood`). Its log-likelihood and the number of
tokens are two more features, with weights of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cedd.apps.correct.lexicon import Floats, Integers
from cedd.apps.correct.reader import Reader
from cedd.apps.correct.suspects import (
    NETWORK_FEATURES,
    Option,
    ScoredSuspect,
    Suspect,
    best_option,
    best_share,
    is_accepted,
    keep_ratio,
)
from cedd.apps.correct.words import Token, tokens_of, without_capitals

CERTAIN = 0.9
"""A suspicious word that is right with at least this probability is not reported."""
UNDECIDED, CLEAR = (0.1, 0.97), 0.75
"""A decision is undecided if p_keep / (p_keep + p_best) lies between these, or if it is lower and the best change has
less than the share CLEAR of the probability of all changes."""
MAX_NETWORK_OPTIONS, UNLIKELY = 8, 0.05
"""The network scores at most this many options of a word, and none whose probability is below UNLIKELY p_best."""
MIN_CONTEXT = 4
"""Words of a text that the network scores. In a shorter one, such as "reuqest timeout", the lexicon alone is better."""
NETWORK_WORDS, CHARACTERS_PER_NETWORK_WORD = 8, 128
"""The network scores at most this many words, and one more per 128 characters of the text, the least certain ones. A
paragraph in which every eighth word is misspelled has fewer undecided words."""
Scores = Callable[[str, Sequence[tuple[int, int, str]]], Floats]
"""(text, [(start, stop, replacement)]) -> the log-likelihood of the text with each replacement, and the number of
tokens over which it is summed, [N, 2]."""


@dataclass(frozen=True)
class Decision:
    """What to write for text[start:stop]: the best change if it is accepted, otherwise the text itself."""

    start: int
    stop: int
    text: str
    confidence: float
    """p_best"""
    p_keep: float
    accepted: bool
    candidates: tuple[tuple[str, float], ...]
    """Options with their probabilities, the most probable first."""


def decide(
    reader: Reader, text: str, threshold: float, likelihoods: Scores | None = None, ignored: Collection[str] = ()
) -> list[Decision]:
    """The decisions about a text's suspicious words, in order; accepted changes do not overlap.

    A change is accepted if p_keep / (p_keep + p_best) is below the threshold and one change stands out among the
    others.
    """
    tokens = tokens_of(text)
    scored = reader.scored(text, tokens, threshold, ignored)
    if likelihoods is not None and sum(token.key[0].isalpha() for token in tokens) >= MIN_CONTEXT:
        scored = rescore_undecided(text, tokens, scored, reader.informed, likelihoods, threshold)
    return all_decisions(text, tokens, scored, threshold)


def is_undecided(p: Floats) -> bool:
    """Whether the network scores the options."""
    ratio = keep_ratio(p)
    return ratio < UNDECIDED[1] and (ratio > UNDECIDED[0] or best_share(p) < CLEAR)


def is_clear(p: Floats) -> bool:
    """Whether one change is more probable than keeping the text and stands out among the changes."""
    return keep_ratio(p) < 0.5 and best_share(p) >= CLEAR


def network_options(p: Floats) -> list[int]:
    """The options that the network scores: the first, and the most probable others."""
    best = (1 + np.argsort(-p[1:], kind="stable")[: MAX_NETWORK_OPTIONS - 1]).tolist()
    return [0, *(i for i in best if p[i] > UNLIKELY * p[1:].max())]


# ----------------------------------------------------------------------------------------------------------------
# The network


def with_options(text: str, tokens: Sequence[Token], options: Sequence[Option]) -> tuple[str, Integers]:
    """The text as the network reads it, with some options applied and capitals in lower case, and the shift of each
    token and of the end, [T + 1]."""
    text, parts, end, shift = without_capitals(text, tokens), list[str](), 0, np.zeros(len(tokens) + 1, np.int64)
    for option in sorted(options, key=lambda option: option.first):
        start, stop, word = as_read(tokens, option)
        parts += [text[end:start], word]
        end = stop
        shift[option.last :] += len(word) - (stop - start)
    return "".join([*parts, text[end:]]), shift


def as_read(tokens: Sequence[Token], option: Option) -> tuple[int, int, str]:
    """The span of an option in the text, and what the network reads there."""
    first, last = tokens[option.first], tokens[option.last - 1]
    return first.start, last.stop, option.text.lower() if first.capitals else option.text


def with_network_scores(
    text: str, tokens: Sequence[Token], suspects: Sequence[Suspect], scores: Scores, applied: Sequence[Option] = ()
) -> list[Suspect]:
    """The suspects with the network's features for all their options, in the text with the `applied` options, each of
    which lies inside an option or apart from it."""
    read, shift = with_options(text, tokens, applied)
    spans = [
        (start + int(shift[option.first]), stop + int(shift[option.last]), word)
        for suspect in suspects
        for option in suspect.options
        for start, stop, word in [as_read(tokens, option)]
    ]
    values, at, result = scores(read, spans) if spans else np.zeros((0, 2)), 0, list[Suspect]()
    for suspect in suspects:
        rows = values[at : at + len(suspect.options)]
        at += len(rows)
        features = suspect.features.copy()
        features[:, NETWORK_FEATURES] = rows - rows[0]
        result.append(replace(suspect, features=features))
    return result


def rescore_undecided(
    text: str,
    tokens: Sequence[Token],
    scored: Sequence[ScoredSuspect],
    weights: Floats,
    scores: Scores,
    threshold: float,
) -> list[ScoredSuspect]:
    """The suspects, where the network redistributes the probability of the most probable options of undecided ones.

    The network reads the text with accepted changes applied, since an error makes the words around it improbable. If a
    word is undecided in several places, its clear changes are applied too: the network finds probable what it has seen.
    """
    result = list(scored)
    undecided = least_certain(scored, NETWORK_WORDS + len(text) // CHARACTERS_PER_NETWORK_WORD)
    options = [network_options(scored[number][1]) for number in undecided]
    suspects = [scored[number][0].only(kept) for number, kept in zip(undecided, options, strict=True)]
    read = {place for suspect in suspects for option in suspect.options for place in option.places}
    counts, applied = Counter(tokens[suspect.place].key for suspect in suspects), list[Option]()
    for suspect, p in (scored[number] for number in accepted(scored, threshold)) if suspects else ():
        option = best_option(suspect, p)
        repeated = counts[tokens[suspect.place].key] > 1 and is_clear(p) and len(option.places) == 1
        if repeated or read.isdisjoint(option.places):
            applied.append(option)
    informed = with_network_scores(text, tokens, suspects, scores, applied)
    for number, kept, suspect in zip(undecided, options, informed, strict=True):
        whole, p = scored[number]
        shared = p.copy()
        shared[kept] = p[kept].sum() * suspect.probabilities(weights)
        result[number] = whole, shared
    return result


def least_certain(scored: Sequence[ScoredSuspect], most: int) -> list[int]:
    """The indices of undecided words in order; at most `most`, those with p_keep / (p_keep + p_best) nearest to 0.5."""
    found = [number for number, (_, p) in enumerate(scored) if is_undecided(p)]
    return sorted(sorted(found, key=lambda number: abs(keep_ratio(scored[number][1]) - 0.5))[:most])


# ----------------------------------------------------------------------------------------------------------------
# Decisions


def accepted(scored: Sequence[ScoredSuspect], threshold: float) -> list[int]:
    """The indices of accepted changes, the most confident first; of two that overlap, the more probable."""
    occupied, found = set[int](), list[int]()
    for number in by_confidence(scored):
        places = best_option(*scored[number]).places
        if is_accepted(*scored[number], threshold) and occupied.isdisjoint(places):
            occupied.update(places)
            found.append(number)
    return found


def by_confidence(scored: Sequence[ScoredSuspect]) -> list[int]:
    """All indices, those with the most probable change first."""
    return sorted(range(len(scored)), key=lambda number: -scored[number][1][1:].max())


def all_decisions(
    text: str, tokens: Sequence[Token], scored: Sequence[ScoredSuspect], threshold: float
) -> list[Decision]:
    """The accepted changes, and the other suspicious words that do not overlap them."""
    changed = dict.fromkeys(accepted(scored, threshold))
    taken, found = set[int](), list[Decision]()
    for number in [*changed, *(number for number in by_confidence(scored) if number not in changed)]:
        suspect, p = scored[number]
        option = best_option(suspect, p) if number in changed else suspect.options[0]
        if number not in changed and (p[0] > CERTAIN or not taken.isdisjoint(option.places)):
            continue
        taken.update(option.places)
        start, stop = tokens[option.first].start, tokens[option.last - 1].stop
        shown = {text[start:stop]: float(p[0])}
        shown |= {o.text: float(q) for o, q in zip(suspect.options, p, strict=True) if o.places == option.places}
        ranked = tuple(sorted(shown.items(), key=lambda one: -one[1]))
        found.append(Decision(start, stop, option.text, float(p[1:].max()), float(p[0]), number in changed, ranked))
    return sorted(found, key=lambda one: one.start)
