"""Correction word by word: which words of a text are doubtful, what may have been meant, and what is written instead.

Shapes: T tokens of the text, O options of a doubt, F features.

A doubtful word is one that the lexicon does not have, or that does not fit its neighbours. Its options are itself, near
words, two words, and itself joined with a neighbour. Each has features: the noise of people log p(written | option),
the counts of words in a row, and what is known of its form. Their weights were fitted on real misspellings:

    p(option) = softmax over options of (weights . features)

Where this leaves a doubt, a network has the last word: the leave-one-out log-likelihood of the text around each of the
likeliest options (`likelihood`) is one more feature, with weights of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cedd.spelling.candidates import Neighbours
from cedd.spelling.lexicon import UNKNOWN, Floats, Integers, Lexicon
from cedd.spelling.words import Token, acronyms, like, tokens_of, without_capitals

FEATURES = (
    "channel",
    "context",
    "split",
    "split unsupported",
    "join",
    "join capital",
    "named",
    "kept",
    "kept unknown",
    "kept rare",
    "kept rare capital",
    "kept rare letters",
    "kept common capital",
    "kept uncommon",
    "kept name without capital",
    "kept acronym",
    "network",
)
FRAME = 3
"""Tokens on each side of a doubt whose probability it changes."""
RARE, COMMON = 3.5, 8.0
"""Logarithms of counts. Rare words are names, and mistakes that were made several times in the corpus."""
SURPRISE = {"rare": 14.0, "common": 18.0}
"""A known word is doubted if -log p of it and of the next word together exceed this."""
MORE_OFTEN_JOINED = 20.0
"""Two words are doubted if the word that they make when joined is so many times as frequent as they are in a row."""
LEAST_JOINED = 40.0
WORD_THRESHOLD = 0.6
NO_DOUBT = 0.9
"""A word that is right with at least this probability is no doubt to tell of."""
CLEAR, SURE, UNLIKELY, ASKED = 0.1, 0.8, 0.05, 3
"""A decision is clear where own / (own + best) is below CLEAR times the threshold or above 1 - CLEAR; an option is sure
from a probability of SURE on. A network is asked about at most ASKED options, none UNLIKELY beside the best."""
LANGUAGE_REACH, LANGUAGE_SHARE = 12, 0.5
"""Of neighbouring known words within reach, so many pairs must be known, or the text is in another language."""


@dataclass(frozen=True)
class Option:
    """Tokens first..last-1 of the text, written as these words."""

    first: int
    last: int
    words: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class Doubt:
    """A token and what may have been meant; the first option leaves it as it is."""

    place: int
    options: tuple[Option, ...]
    features: Floats
    """[O, F]"""

    def probabilities(self, weights: Floats) -> Floats:
        """[O]"""
        scores = self.features @ weights
        scores = np.exp(scores - scores.max())
        return scores / scores.sum()

    def only(self, places: Sequence[int]) -> Doubt:
        """With some of the options."""
        return replace(self, options=tuple(self.options[i] for i in places), features=self.features[list(places)])


def weight_vector(weights: Mapping[str, float]) -> Floats:
    """Weights by the names of their features, as a vector [F]."""
    return np.array([weights.get(name, 0.0) for name in FEATURES])


class Reader:
    """Finds the doubts of a text.

    Args:
        lexicon: of the text's language.
    """

    def __init__(self, lexicon: Lexicon) -> None:
        self.lexicon, self.neighbours = lexicon, Neighbours(lexicon)
        self.alone, self.informed = (weight_vector(lexicon.weights.get(name, {})) for name in ("alone", "network"))

    def doubts(self, text: str, tokens: Sequence[Token], ignored: Collection[str] = ()) -> list[Doubt]:
        """The doubts of a text in order; `ignored` words (lower case) are right."""
        if not tokens:
            return []
        keys = ["."] * FRAME + [token.key for token in tokens] + ["."] * FRAME
        numbers = self.lexicon.numbers(keys)
        places = (place for place in self.doubtful(tokens, numbers) if tokens[place].key not in ignored)
        short = acronyms(tokens)
        made = (self.doubt(text, tokens, keys, place, short[place]) for place in places)
        return [doubt for doubt in made if len(doubt.options) > 1]

    def doubtful(self, tokens: Sequence[Token], numbers: Integers) -> list[int]:
        """The tokens that may be wrong, at first sight."""
        lexicon = self.lexicon
        pairs = lexicon.gram_counts(np.stack([numbers[:-1], numbers[1:]], -1))
        own = numbers[FRAME:-FRAME]
        surprise = -lexicon.log_probabilities(numbers[None])[0]  # of numbers[2:]
        both = surprise[FRAME - 2 : FRAME - 2 + len(own)] + surprise[FRAME - 1 : FRAME - 1 + len(own)]
        count = np.where(own >= 0, lexicon.log_counts[own], 0.0)
        strange = both > np.where(count < COMMON, SURPRISE["rare"], SURPRISE["common"])
        strange |= self.joinable(tokens, pairs[FRAME : FRAME + len(own)])
        free = np.array([token.free for token in tokens])
        wrong = free & ((own == UNKNOWN) | strange) & self.native(numbers, pairs > 0)
        return np.flatnonzero(wrong).tolist()

    def joinable(self, tokens: Sequence[Token], counts: Floats) -> NDArray[np.bool_]:
        """Whether each token and the next, in a row so often, are far more often one word, [T]."""
        flags = np.zeros(len(tokens), np.bool_)
        for place, (first, second) in enumerate(pairwise(tokens)):
            number = self.lexicon.index.get(first.key + second.key)
            if number is not None and second.start == first.stop + 1:
                joined = np.exp(self.lexicon.log_counts[number])
                flags[place] = joined > max(LEAST_JOINED, MORE_OFTEN_JOINED * counts[place])
        return flags

    def native(self, numbers: Integers, support: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Whether the text around each token is in the lexicon's language, [T]: known words stand together as there."""
        known = (numbers[:-1] >= 0) & (numbers[1:] >= 0)
        known[: FRAME - 1] = known[1 - FRAME :] = False  # the stops around the text
        width = np.ones(2 * LANGUAGE_REACH + 1)

        def around(flags: NDArray[np.bool_]) -> Floats:
            sums = np.convolve(flags.astype(np.float64), width)
            return sums[LANGUAGE_REACH : LANGUAGE_REACH + len(flags)]

        share = (around(support & known) + 3) / (around(known) + 3)
        return share[FRAME - 1 : -FRAME] >= LANGUAGE_SHARE

    def doubt(self, text: str, tokens: Sequence[Token], keys: Sequence[str], place: int, acronym: bool) -> Doubt:
        """A token with its options and their features but the network's."""
        token, lexicon = tokens[place], self.lexicon
        number = lexicon.index.get(token.key)
        known = number is not None and bool(lexicon.log_counts[number] >= RARE)
        options = [Option(place, place + 1, (token.key,), token.text)]
        channel = [0.0]
        for candidate in self.neighbours.near(token.key, known):
            options.append(Option(place, place + 1, candidate.words, like(token.text, candidate.words[0])))
            channel.append(candidate.log_channel)
        for candidate in () if known else self.neighbours.splits(token.key):
            options.append(Option(place, place + 1, candidate.words, like(token.text, " ".join(candidate.words))))
            channel.append(candidate.log_channel)
        for first in (place - 1, place):
            if 0 <= first < len(tokens) - 1 and (word := self.joined(text, tokens[first], tokens[first + 1])):
                options.append(Option(first, first + 2, (word,), like(tokens[first].text, word)))
                channel.append(0.0)
        features = self.features(token, keys, place + FRAME, options, np.array(channel), acronym)
        return Doubt(place, tuple(options), features)

    def joined(self, text: str, first: Token, second: Token) -> str | None:
        """Two tokens as one word, if they are words with a space between and the lexicon has it."""
        word = first.key + second.key
        fits = first.key.isalpha() and second.key.isalpha() and text[first.stop : second.start] == " "
        number = self.lexicon.index.get(word) if fits else None
        return None if number is None or self.lexicon.log_counts[number] < 3 else word

    def features(
        self, token: Token, keys: Sequence[str], centre: int, options: Sequence[Option], channel: Floats, acronym: bool
    ) -> Floats:
        """[O, F]; `centre` is the token's place among the keys."""
        lexicon, columns = self.lexicon, dict[str, NDArray[Any]]()
        context = self.contexts(keys, centre, options)
        number = lexicon.index.get(token.key)
        unknown, log_count = number is None, 0.0 if number is None else lexicon.log_counts[number]
        rare = log_count < RARE
        capital = token.text[0].isupper() and not token.text.isupper()
        name = capital and not token.opens
        kept = np.arange(len(options)) == 0
        sizes = np.array([len(option.words) - (option.last - option.first) for option in options])
        named = [
            option.words[0] in lexicon.index and lexicon.named[lexicon.index[option.words[0]]] for option in options
        ]
        pairs = [lexicon.numbers(option.words[:2] if len(option.words) > 1 else (".", ".")) for option in options]
        columns["channel"] = channel
        columns["context"] = context - context[0]
        columns["split"], columns["join"] = sizes > 0, sizes < 0
        columns["split unsupported"] = (sizes > 0) & (lexicon.gram_counts(np.stack(pairs)) == 0)
        columns["join capital"] = (sizes < 0) & name
        columns["named"] = np.array(named) & ~kept & (not capital)
        columns["kept"] = kept
        columns["kept unknown"] = kept & unknown
        columns["kept rare"] = kept & rare
        columns["kept rare capital"] = kept & rare & name
        columns["kept rare letters"] = kept * rare * min(len(token.key), 12) / 10
        columns["kept common capital"] = kept & (not rare) & name
        columns["kept uncommon"] = kept * max(0.0, COMMON - log_count) * (not rare) / 4
        columns["kept name without capital"] = kept & (not unknown and bool(lexicon.named[number])) & (not capital)
        columns["kept acronym"] = kept & acronym
        columns["network"] = np.zeros(len(options))
        return np.stack([columns[name] for name in FEATURES], -1).astype(np.float64)

    def contexts(self, keys: Sequence[str], centre: int, options: Sequence[Option]) -> Floats:
        """log p of the tokens around a doubt with each option in its place, [O]."""
        result = np.zeros(len(options))
        groups: dict[int, list[int]] = defaultdict(list)
        sequences: list[Integers] = []
        offset = centre - options[0].first  # of keys against tokens
        for number, option in enumerate(options):
            before = keys[centre - FRAME : option.first + offset]
            after = keys[option.last + offset : centre + FRAME + 1]
            sequence = self.lexicon.numbers([*before, *option.words, *after])
            groups[len(sequence)].append(number)
            sequences.append(sequence)
        for members in groups.values():
            batch = np.stack([sequences[number] for number in members])
            result[members] = self.lexicon.log_probabilities(batch).sum(-1)
        return result


@dataclass(frozen=True)
class Rewriting:
    """The best option for text[start:stop], its probability and that of the text as it is, and whether it is made."""

    start: int
    stop: int
    text: str
    confidence: float
    own: float
    made: bool
    candidates: tuple[tuple[str, float], ...]
    """Options with their probabilities, the likeliest first."""


Scores = Callable[[str, Sequence[tuple[int, int, str]]], Floats]
"""(text, [(start, stop, replacement)]) -> the log-likelihood of the text with each replacement."""
Judged = tuple[Doubt, Floats]
"""A doubt and the probabilities of its options."""


def rewritings(
    reader: Reader, text: str, threshold: float, likelihoods: Scores | None = None, ignored: Collection[str] = ()
) -> list[Rewriting]:
    """What may be written instead, in order; what is made does not overlap.

    A change is made where own / (own + best) is below the threshold.
    """
    tokens = tokens_of(text)
    judged = [(doubt, doubt.probabilities(reader.alone)) for doubt in reader.doubts(text, tokens, ignored)]
    if likelihoods is not None:
        judged = ask(text, tokens, judged, reader.informed, likelihoods, threshold)
    return chosen(text, tokens, judged, threshold)


def share_of_own(p: Floats) -> float:
    """own / (own + best)."""
    return float(p[0] / max(p[0] + p[1:].max(), 1e-300))


def is_open(p: Floats, threshold: float) -> bool:
    """Whether a network is worth its time: the decision is not clear, or not between which options."""
    own = share_of_own(p)
    return CLEAR * threshold < own < 1 - CLEAR or (own < threshold and p[1:].max() < SURE)


def asked_options(p: Floats) -> list[int]:
    """The options that a network is asked about: the first, and the likeliest others."""
    best = (1 + np.argsort(-p[1:], kind="stable")[: ASKED - 1]).tolist()
    return [0, *(i for i in best if p[i] > UNLIKELY * p[1:].max())]


def with_network(text: str, tokens: Sequence[Token], doubts: Sequence[Doubt], scores: Scores) -> list[Doubt]:
    """The doubts with what a network says of all their options."""
    spans = [
        (
            tokens[option.first].start,
            tokens[option.last - 1].stop,
            option.text.lower() if tokens[doubt.place].capitals else option.text,
        )
        for doubt in doubts
        for option in doubt.options
    ]
    values, at, made = scores(without_capitals(text, tokens), spans) if spans else np.zeros(0), 0, list[Doubt]()
    for doubt in doubts:
        said = values[at : at + len(doubt.options)]
        at += len(said)
        features = doubt.features.copy()
        features[:, FEATURES.index("network")] = said - said[0]
        made.append(replace(doubt, features=features))
    return made


def ask(
    text: str, tokens: Sequence[Token], judged: Sequence[Judged], weights: Floats, scores: Scores, threshold: float
) -> list[Judged]:
    """The doubts, the open ones judged by what a network says of their likeliest options."""
    result, asked = list(judged), [number for number, (_, p) in enumerate(judged) if is_open(p, threshold)]
    doubts = [judged[number][0].only(asked_options(judged[number][1])) for number in asked]
    for number, doubt in zip(asked, with_network(text, tokens, doubts, scores), strict=True):
        result[number] = doubt, doubt.probabilities(weights)
    return result


def chosen(text: str, tokens: Sequence[Token], judged: Sequence[Judged], threshold: float) -> list[Rewriting]:
    """The best option of each doubt; of two that overlap the more probable is made."""
    taken, found = set[int](), list[Rewriting]()
    by_confidence = sorted(judged, key=lambda one: -one[1][1:].max())
    for made in (True, False):
        for doubt, p in by_confidence:
            best = int(1 + p[1:].argmax())
            option = doubt.options[best if made else 0]
            span = set(range(option.first, option.last))
            if span & taken or (share_of_own(p) >= threshold if made else p[0] > NO_DOUBT):
                continue
            taken |= span
            start, stop = tokens[option.first].start, tokens[option.last - 1].stop
            shown = {text[start:stop]: float(p[0])}
            shown |= {
                o.text: float(q)
                for o, q in zip(doubt.options, p, strict=True)
                if {o.first, o.last - 1} <= span and len(span) == o.last - o.first
            }
            ranked = tuple(sorted(shown.items(), key=lambda one: -one[1]))
            found.append(Rewriting(start, stop, option.text, float(p[best]), float(p[0]), made, ranked))
    return sorted(found, key=lambda one: one.start)
