"""Correction word by word: which words of a text are doubtful, what may have been meant, and what is written instead.

Shapes: T tokens of the text, O options of a doubt, F features.

A doubtful word is one that the lexicon does not have, a rare one that does not fit its neighbours, or a common one in
whose place another, easily confused with it, fits far better. Its options are itself, near words, two words, and itself
joined with a neighbour. Each has features: the noise of people log p(written | option), the counts of words in a row,
and what is known of its form. Their weights were fitted on real misspellings:

    p(option) = softmax over options of (weights . features)

Where this leaves a doubt, a network has the last word: the log-likelihood of the text with each of the likeliest
options (`likelihood`), and of how many tokens it is, are two more features, with weights of their own.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cedd.apps.correct.candidates import CONFUSED, Candidate, Neighbours
from cedd.apps.correct.forms import FORMS, is_derived, is_possessive, same_word
from cedd.apps.correct.known_words import DICTIONARY, LARGE, TECHNICAL
from cedd.apps.correct.languages import FOREIGN
from cedd.apps.correct.lexicon import UNKNOWN, Floats, Integers, Lexicon, load_lexicon
from cedd.apps.correct.words import Token, acronyms, like, tokens_of, without_capitals

FEATURES = (
    "channel",
    "far",
    "context",
    "frequency",
    "frequency opening",
    "split",
    "split unsupported",
    "split derived",
    "join",
    "join capital",
    "named",
    *FORMS,
    "kept",
    "kept unknown",
    "kept rare",
    "kept rare count",
    "kept rare capital",
    "kept rare opening",
    "kept rare letters",
    "kept rare strange",
    "kept rare derived",
    "kept rare elided",
    "kept rare remembered",
    "kept dictionary",
    "kept large dictionary",
    "kept common capital",
    "kept uncommon",
    "kept frequent",
    "kept name without capital",
    "kept acronym",
    "kept repeated",
    "network",
    "network tokens",
)
PLACE = {name: place for place, name in enumerate(FEATURES)}
SAID = [PLACE[name] for name in ("network", "network tokens")]
"""What a network says of an option: the log-likelihood of the text with it, and of how many tokens that is the sum."""
LONG = 100
"""Tokens of a text in which a word that is there again is meant; in a sentence it may be the same slip twice."""
AGREED = 0.75
"""Unless one other word is by so many nats more probable, on average over all places where it stands: people who
misspell a word do so each time. (One other, not two: who writes "builtin" again and again means it.)"""
FRAME = 3
"""Tokens on each side of a doubt whose probability it changes."""
RARE, COMMON = 3.5, 8.0
"""Logarithms of counts. Rare words are names, and mistakes that were made several times in the corpus."""
SURPRISE = {"rare": 14.0, "common": 10.0}
"""A known word may be doubted if -log p of it and of the next word together exceed this: a rare one is, a common one if
one that is easily confused with it makes the text more probable by GAIN nats."""
GAIN = 4.0
SMALL_WORDS = 60
"""The most frequent words, which no compound is made of: what was joined by mistake has one of them, as a rule."""
LONGEST_COMPOUND, OFTEN_IN_A_ROW = 12, 200
"""Letters that an unknown compound has at most, and how often its two words are seen in a row if they are none."""
FAR_CHANNEL = 10.0
"""-log p(written | meant) from which on its feature is a line of another slope."""
MORE_OFTEN_JOINED = 12.0
"""Two words are doubted if the word that they make when joined is so many times as frequent as they are in a row."""
LEAST_JOINED = 40.0
WORD_THRESHOLD = 0.9
LEAST_SHARE = 0.45
"""Of what else may have been meant, the best must have this share of the probability, or nothing is changed."""
TRUST = 2.0
"""A common word is right so many times as probably as the weights say: the examples that they were fitted on have far
more of them wrong than texts have."""
NO_DOUBT = 0.9
"""A word that is right with at least this probability is no doubt to tell of."""
OPEN, CLEAR, UNLIKELY, ASKED = (0.1, 0.97), 0.75, 0.05, 8
"""A decision is open where own / (own + best) lies between these, or is less while the best has not this share of all
but own. A network is asked about at most ASKED options, none UNLIKELY beside the best."""
ASKED_AT_LEAST, CHARACTERS_PER_ASKED = 64, 128
"""The network judges at most one word per 128 characters of a text (64 in a short one), the least certain ones."""
LANGUAGE_REACH, LETTER, END, JOINED = 12, 2.85, 3.0, 5.0
"""Words on each side of a word whose language is considered; -log p of a letter, and of a word's end, in any language,
and of two words written as one."""
EVIDENCE, KNOWN_EVIDENCE, PRIOR_EVIDENCE = (-8.0, 12.0), 4.0, 8.0
"""Limits of a word's evidence for English: the upper one is that of frequent small words (the, which), a misspelling
has at most as much as a foreign word has against it. The evidence of a known word (`known_words`), and that for English
before any word is read, which decides short texts."""
ENGLISH = {"rare": 3.5, "common": 4.2}
"""The mean evidence for English that a text has around a rare or unknown word that is suspicious, and around a common
one: error-free English has 7, lists of misspellings 6, other languages 0."""


@dataclass(frozen=True)
class Option:
    """Tokens first..last-1 of the text, written as these words."""

    first: int
    last: int
    words: tuple[str, ...]
    text: str

    @property
    def places(self) -> range:
        return range(self.first, self.last)


@dataclass(frozen=True)
class Doubt:
    """A token and what may have been meant; the first option leaves it as it is."""

    place: int
    options: tuple[Option, ...]
    features: Floats
    """[O, F]"""

    @property
    def rare(self) -> bool:
        """Whether the token is a rare word, or none."""
        return bool(self.features[0, PLACE["kept rare"]])

    def probabilities(self, weights: Floats) -> Floats:
        """[O]"""
        scores = self.features @ weights
        scores = np.exp(scores - scores.max())
        return scores / scores.sum()

    def with_feature(self, name: str, value: float) -> Doubt:
        """With another value of a feature of the option that leaves all as it is."""
        features = self.features.copy()
        features[0, PLACE[name]] = value
        return replace(self, features=features)

    def only(self, places: Sequence[int]) -> Doubt:
        """With some of the options."""
        return replace(self, options=tuple(self.options[i] for i in places), features=self.features[list(places)])

    def without(self, tokens: Collection[int]) -> Doubt:
        """With the options that leave these tokens alone."""
        return self.only([i for i, option in enumerate(self.options) if not any(at in tokens for at in option.places)])


Judged = tuple[Doubt, Floats]
"""A doubt and the probabilities of its options."""


@dataclass(frozen=True)
class Page:
    """A text and its tokens, some of which are read as other words."""

    text: str
    tokens: Sequence[Token]
    mended: Mapping[int, str] = field(default_factory=dict[int, str])

    @cached_property
    def keys(self) -> list[str]:
        """Of the tokens, with stops around them."""
        keys = [self.mended.get(place, token.key) for place, token in enumerate(self.tokens)]
        return ["."] * FRAME + keys + ["."] * FRAME

    @cached_property
    def counts(self) -> Counter[str]:
        return Counter(token.key for token in self.tokens)

    @cached_property
    def acronyms(self) -> list[bool]:
        return acronyms(self.tokens)


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
        """The doubts of a text in order; `ignored` words (their keys) are right, also with 's, and not to be joined."""
        if not tokens:
            return []
        page = Page(text, tokens)
        found = self.doubtful(tokens, self.lexicon.numbers(page.keys))
        right = {i for i, one in enumerate(tokens) if one.key in ignored or one.key.removesuffix("'s") in ignored}
        made = (self.doubt(page, place, near) for place, near in found.items() if place not in right)
        if right:
            made = (doubt.without(right) for doubt in made)
        return self.agreed(tokens, [doubt for doubt in made if len(doubt.options) > 1])

    def agreed(self, tokens: Sequence[Token], doubts: Sequence[Doubt]) -> list[Doubt]:
        """The doubts; a word is no more a word for being repeated where one other is meant at all its places."""
        places: dict[str, list[int]] = defaultdict(list)
        for number, doubt in enumerate(doubts):
            if doubt.rare and doubt.features[0, PLACE["kept repeated"]]:
                places[tokens[doubt.place].key].append(number)
        result = list(doubts)
        for numbers in places.values():
            alike = [doubts[number].with_feature("kept repeated", 0.0) for number in numbers]
            if max(mean_log_odds(alike, self.alone).values(), default=-math.inf) > AGREED:
                for number, doubt in zip(numbers, alike, strict=True):
                    result[number] = doubt
        return result

    def judged(
        self, text: str, tokens: Sequence[Token], threshold: float, ignored: Collection[str] = ()
    ) -> list[Judged]:
        """The doubts of a text with the probabilities of their options, before a network is asked."""
        first = [(doubt, doubt.probabilities(self.alone)) for doubt in self.doubts(text, tokens, ignored)]
        return self.again(text, tokens, first, threshold)

    def again(self, text: str, tokens: Sequence[Token], judged: Sequence[Judged], threshold: float) -> list[Judged]:
        """The doubts, judged anew beside words that are to be changed, with these in their place."""
        due = [(doubt.place, best_option(doubt, p)) for doubt, p in judged if is_due(doubt, p, threshold)]
        mended = {place: o.words[0] for place, o in due if len(o.words) == 1 and o.last - o.first == 1}
        page, result = Page(text, tokens, mended), list(judged)
        for number, (doubt, _) in enumerate(judged):
            if any(abs(doubt.place - place) in range(1, FRAME + 1) for place in mended):
                channel, repeated = doubt.features[:, PLACE["channel"]], doubt.features[0, PLACE["kept repeated"]]
                new = replace(doubt, features=self.features(page, doubt.place, doubt.options, channel))
                new = new.with_feature("kept repeated", repeated)
                result[number] = new, new.probabilities(self.alone)
        return result

    def doubtful(self, tokens: Sequence[Token], numbers: Integers) -> dict[int, Sequence[int] | None]:
        """The tokens that may be wrong at first sight, and the words that may be meant; None: these are to be found."""
        lexicon = self.lexicon
        pairs = lexicon.gram_counts(np.stack([numbers[:-1], numbers[1:]], -1))
        own = numbers[FRAME:-FRAME]
        surprise = -lexicon.log_probabilities(numbers[None])[0]  # of numbers[2:]
        both = surprise[FRAME - 2 : FRAME - 2 + len(own)] + surprise[FRAME - 1 : FRAME - 1 + len(own)]
        free, english = np.array([token.free for token in tokens]), self.english(tokens, own)
        common = (own >= 0) & (own < CONFUSED)
        free &= english >= np.where(common, ENGLISH["common"], ENGLISH["rare"])
        strange = np.flatnonzero(free & ((own == UNKNOWN) | (~common & (both > SURPRISE["rare"])))).tolist()
        found: dict[int, Sequence[int] | None] = dict.fromkeys(
            place
            for place in strange
            if not is_possessive(lexicon, tokens[place].key) and lexicon.kind(tokens[place].key) != TECHNICAL
        )
        fits_better = self.fitting(numbers, np.flatnonzero(free & common & (both > SURPRISE["common"])))
        joinable = self.joinable(tokens, pairs[FRAME : FRAME + len(own)]) & (english >= ENGLISH["rare"])
        others = {*fits_better, *np.flatnonzero(joinable).tolist()} - found.keys()
        found |= {place: fits_better.get(place, ()) for place in others}
        return dict(sorted(found.items()))

    def fitting(self, numbers: Integers, places: Integers) -> dict[int, Sequence[int]]:
        """The words easily confused with the common words at these places that fit far better there."""
        if not len(places):
            return {}  # and all that are easily confused need not be known
        first, other = self.neighbours.confused
        own = numbers[places + FRAME]
        sizes = first[own + 1] - first[own]
        at = np.repeat(places, sizes)
        start = np.repeat(first[own] - np.cumsum(sizes) + sizes, sizes)
        words = other[start + np.arange(len(at))]
        frames = numbers[at[:, None] + FRAME + np.arange(-2, 3)]
        before = np.repeat(self.around(numbers[places[:, None] + FRAME + np.arange(-2, 3)]), sizes)
        frames[:, 2] = words
        better = np.flatnonzero(self.around(frames) - before > GAIN)
        found: dict[int, list[int]] = defaultdict(list)
        for place, word in zip(at[better].tolist(), words[better].tolist(), strict=True):
            found[place].append(word)
        return dict(found)

    def around(self, frames: Integers) -> Floats:
        """log p of the last three words of sequences [N, 5], [N]."""
        return self.lexicon.log_probabilities(frames).sum(-1)

    def joinable(self, tokens: Sequence[Token], counts: Floats) -> NDArray[np.bool_]:
        """Whether each token and the next, in a row so often, are far more often one word, [T]."""
        flags = np.zeros(len(tokens), np.bool_)
        for place, (first, second) in enumerate(pairwise(tokens)):
            number = self.lexicon.index.get(first.key + second.key)
            if number is not None and second.start == first.stop + 1 and (first.free or second.free):
                joined = np.exp(self.lexicon.log_counts[number])
                flags[place] = joined > max(LEAST_JOINED, MORE_OFTEN_JOINED * counts[place])
        return flags

    def english(self, tokens: Sequence[Token], own: Integers) -> Floats:
        """Evidence that the text around each token is English rather than another language, per word, [T]."""
        seen: dict[str, float] = {}
        evidence, words = np.zeros(len(tokens)), np.zeros(len(tokens))
        for place, (token, number) in enumerate(zip(tokens, own.tolist(), strict=True)):
            name = number == UNKNOWN and token.text[:1].isupper() and not token.opens
            letter = len(token.key) == 1 and token.key not in FOREIGN
            if token.key[0].isalpha() and not (token.code or name or letter):
                if token.key not in seen:
                    seen[token.key] = self.word_evidence(token, number)
                evidence[place], words[place] = seen[token.key], 1.0
        width = np.ones(2 * LANGUAGE_REACH + 1)

        def around(values: Floats) -> Floats:
            return np.convolve(values, width)[LANGUAGE_REACH : LANGUAGE_REACH + len(values)]

        return (around(evidence) + PRIOR_EVIDENCE) / np.maximum(around(words), 1.0)

    def word_evidence(self, token: Token, number: int) -> float:
        """log p of a word as English, perhaps misspelt, less log p of its letters in any language, within limits."""
        word, lexicon, log_p = token.key, self.lexicon, -math.inf
        if word in FOREIGN:
            return EVIDENCE[0]
        if number != UNKNOWN:
            if number < SMALL_WORDS and len(word) > 2:
                return EVIDENCE[1]
            log_p = float(lexicon.log_counts[number])
        elif lexicon.kind(word):
            return KNOWN_EVIDENCE
        elif not token.plain:
            return EVIDENCE[0]
        if log_p < RARE:  # the corpus has misspellings, too
            near, rough = self.neighbours.near(word)
            log_p = float((rough + lexicon.log_counts[near]).max(initial=log_p))
            for two in self.neighbours.splits(word):
                both = sum(float(lexicon.log_counts[lexicon.index[one]]) for one in two.words)
                log_p = max(log_p, both - math.log(lexicon.total) - JOINED)
        most = -EVIDENCE[0] if number == UNKNOWN else EVIDENCE[1]
        return min(max(log_p - math.log(lexicon.total) + LETTER * len(word) + END, EVIDENCE[0]), most)

    def doubt(self, page: Page, place: int, near: Sequence[int] | None) -> Doubt:
        """A token with its options and their features but the network's."""
        text, tokens = page.text, page.tokens
        token, lexicon = tokens[place], self.lexicon
        number = lexicon.index.get(token.key)
        known = number is not None and bool(lexicon.log_counts[number] >= RARE)
        options = [Option(place, place + 1, (token.key,), token.text)]
        channel = [0.0]
        neighbours = self.neighbours
        found = self.meant(page, place) if near is None else neighbours.these(token.key, near)
        for candidate in found:
            if same_word(token.key, candidate.words[0], known=number is not None):
                continue  # right as another country spells it
            options.append(Option(place, place + 1, candidate.words, like(token.text, candidate.words[0])))
            channel.append(candidate.log_channel)
        for candidate in () if known else neighbours.splits(token.key):
            if self.is_compound(candidate.words):
                continue
            options.append(Option(place, place + 1, candidate.words, like(token.text, " ".join(candidate.words))))
            channel.append(candidate.log_channel)
        for first in (place - 1, place):
            if 0 <= first < len(tokens) - 1 and (word := self.joined(text, tokens[first], tokens[first + 1])):
                options.append(Option(first, first + 2, (word,), like(tokens[first].text, word)))
                channel.append(0.0)
        return Doubt(place, tuple(options), self.features(page, place, options, np.array(channel)))

    def is_compound(self, words: Sequence[str]) -> bool:
        """Whether two words in one are a compound (stylesheet, hostname) rather than two words without their space:
        neither is among the most frequent words, they are rarely seen in a row, and they are short together."""
        first, second = (self.lexicon.index[word] for word in words)
        if min(first, second) < SMALL_WORDS or sum(map(len, words)) > LONGEST_COMPOUND:
            return False
        return bool(self.lexicon.gram_counts(np.array([[first, second]]))[0] < OFTEN_IN_A_ROW)

    def meant(self, page: Page, place: int) -> list[Candidate]:
        """The words near a token that fit best where it stands."""
        frame = self.lexicon.numbers(page.keys[place + FRAME - 2 : place + FRAME + 3])

        def context(words: Integers) -> Floats:
            frames = np.tile(frame, (len(words), 1))
            frames[:, 2] = words
            return self.around(frames)

        return self.neighbours.meant(page.tokens[place].key, context)

    def joined(self, text: str, first: Token, second: Token) -> str | None:
        """Two tokens as one word, if they are words with a space between, neither is part of a word with a hyphen, the
        second has no capital of its own, and the lexicon has the word. "Can not" is right as it is."""
        word = first.key + second.key
        if word == "cannot" or "-" in (text[first.start - 1 : first.start], text[second.stop : second.stop + 1]):
            return None
        fits = first.key.isalpha() and second.key.isalpha() and text[first.stop : second.start] == " "
        fits = fits and (second.text.islower() or first.text.isupper())
        number = self.lexicon.index.get(word) if fits else None
        return None if number is None or self.lexicon.log_counts[number] < 3 else word

    def features(self, page: Page, place: int, options: Sequence[Option], channel: Floats) -> Floats:
        """[O, F]"""
        token, lexicon = page.tokens[place], self.lexicon
        context = self.contexts(page.keys, place + FRAME, options)
        number = lexicon.index.get(token.key)
        unknown, log_count = number is None, 0.0 if number is None else lexicon.log_counts[number]
        rare = log_count < RARE
        capital = token.text[0].isupper() and not token.text.isupper()
        name = capital and not token.opens
        derived, kind = rare and is_derived(lexicon, token.key), lexicon.kind(token.key)
        numbers = [[lexicon.index.get(word, UNKNOWN) for word in option.words] for option in options]
        sizes = np.array([len(option.words) - (option.last - option.first) for option in options])
        others = np.arange(len(options)) > 0
        frequency = np.array([0.0, *(min(lexicon.log_counts[some]) - 8.0 for some in numbers[1:])])
        columns: dict[str, NDArray[Any]] = {
            "channel": channel,
            "far": np.minimum(channel + FAR_CHANNEL, 0.0),
            "context": context - context[0],
            "frequency": frequency,
            "frequency opening": (rare and capital and token.opens) * np.maximum(frequency, 0.0),
            "split": sizes > 0,
            "join": sizes < 0,
            "join capital": (sizes < 0) & name,
            "named": np.array([some[0] >= 0 and lexicon.named[some[0]] for some in numbers]) & others & (not capital),
        }
        for form, same in FORMS.items():
            columns[form] = np.array([same(token.key, option.words[0]) for option in options]) & (sizes == 0) & others
        features = np.zeros((len(options), len(FEATURES)))
        for column, values in columns.items():
            features[:, PLACE[column]] = values
        for split in np.flatnonzero(sizes > 0).tolist():
            unsupported = lexicon.gram_counts(np.array([numbers[split][:2]]))[0] == 0
            features[split, PLACE["split unsupported"]] = unsupported
            features[split, PLACE["split derived"]] = derived or min(numbers[split]) >= SMALL_WORDS
        own = {
            "kept": True,
            "kept unknown": unknown,
            "kept rare": rare,
            "kept rare count": rare * log_count / RARE,
            "kept rare capital": rare and name,
            "kept rare opening": rare and capital and token.opens,
            "kept rare strange": self.neighbours.strangeness(token.key) - 2.5 if rare else 0.0,
            "kept rare derived": derived,
            "kept rare elided": rare and token.elided,
            "kept rare remembered": rare and token.key in lexicon.memory,
            "kept dictionary": kind == DICTIONARY,
            "kept large dictionary": kind == LARGE,
            "kept rare letters": rare * min(len(token.key), 12) / 10,
            "kept common capital": not rare and name,
            "kept uncommon": max(0.0, COMMON - log_count) * (not rare) / 4,
            "kept frequent": max(0.0, log_count - COMMON) / 4,
            "kept name without capital": number is not None and bool(lexicon.named[number]) and not capital,
            "kept acronym": page.acronyms[place],
            "kept repeated": self.repeated(page, token.key),
        }
        for feature, value in own.items():
            features[0, PLACE[feature]] = value
        return features

    def repeated(self, page: Page, key: str) -> float:
        """log of how much more often a long text has a word than one of its length would, if more than once. A
        misspelling that people are known to make is no word for being made again."""
        number = self.lexicon.index.get(key, UNKNOWN)
        if key in self.lexicon.memory and math.log(self.lexicon.counts[number]) < RARE:
            return 0.0
        expected = len(page.keys) * self.lexicon.counts[number] / self.lexicon.total
        return max(0.0, math.log(page.counts[key] / max(1.0, expected))) if len(page.tokens) >= LONG else 0.0

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


def mean_log_odds(doubts: Sequence[Doubt], weights: Floats) -> dict[str, float]:
    """log p of the single words that are options of all doubts, less that of leaving all as it is, on average."""
    found: dict[str, list[float]] = defaultdict(list)
    for doubt in doubts:
        scores = doubt.features @ weights
        for option, score in zip(doubt.options[1:], (scores[1:] - scores[0]).tolist(), strict=True):
            if len(option.words) == len(option.places) == 1:
                found[option.words[0]].append(score)
    return {word: sum(odds) / len(odds) for word, odds in found.items() if len(odds) == len(doubts)}


@lru_cache(maxsize=2)
def reader_of(file: Path, changed: int) -> Reader:
    """The reader with the lexicon of a file, which was changed at this time."""
    del changed
    return Reader(load_lexicon(file))


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
"""(text, [(start, stop, replacement)]) -> the log-likelihood of the text with each replacement, and of how many tokens,
[N, 2]."""


def rewritings(
    reader: Reader, text: str, threshold: float, likelihoods: Scores | None = None, ignored: Collection[str] = ()
) -> list[Rewriting]:
    """What may be written instead, in order; what is made does not overlap.

    A change is made where own / (own + best) is below the threshold, and one option stands out among the others.
    """
    tokens = tokens_of(text)
    judged = reader.judged(text, tokens, threshold, ignored)
    if likelihoods is not None:
        judged = ask(text, tokens, judged, reader.informed, likelihoods, threshold)
    return chosen(text, tokens, judged, threshold)


def share_of_own(p: Floats) -> float:
    """own / (own + best)."""
    return float(p[0] / max(p[0] + p[1:].max(), 1e-300))


def share_of_best(p: Floats) -> float:
    """The best's share of all but own."""
    return float(p[1:].max() / max(p[1:].sum(), 1e-300))


def is_due(doubt: Doubt, p: Floats, threshold: float) -> bool:
    """Whether a change is made."""
    trusted = np.append(p[:1] * (1.0 if doubt.rare else TRUST), p[1:])
    return share_of_own(trusted) < threshold and share_of_best(p) >= LEAST_SHARE


def is_open(p: Floats) -> bool:
    """Whether a network is worth its time."""
    own = share_of_own(p)
    return own < OPEN[1] and (own > OPEN[0] or share_of_best(p) < CLEAR)


def is_clear(p: Floats) -> bool:
    """Whether one option is likelier than the first, and stands out among the others."""
    return share_of_own(p) < 0.5 and share_of_best(p) >= CLEAR


def asked_options(p: Floats) -> list[int]:
    """The options that a network is asked about: the first, and the likeliest others."""
    best = (1 + np.argsort(-p[1:], kind="stable")[: ASKED - 1]).tolist()
    return [0, *(i for i in best if p[i] > UNLIKELY * p[1:].max())]


def best_option(doubt: Doubt, p: Floats) -> Option:
    """The likeliest but the first, which leaves all as it is."""
    return doubt.options[1 + int(p[1:].argmax())]


def with_options(text: str, tokens: Sequence[Token], options: Sequence[Option]) -> tuple[str, Integers]:
    """The text as a network reads it, without capitals, with some options in their places, and how far each token and
    the end have moved, [T + 1]."""
    text, parts, end, moved = without_capitals(text, tokens), list[str](), 0, np.zeros(len(tokens) + 1, np.int64)
    for option in sorted(options, key=lambda option: option.first):
        start, stop, word = as_read(tokens, option)
        parts += [text[end:start], word]
        end = stop
        moved[option.last :] += len(word) - (stop - start)
    return "".join([*parts, text[end:]]), moved


def as_read(tokens: Sequence[Token], option: Option) -> tuple[int, int, str]:
    """The place of an option in the text, and what a network reads there."""
    first, last = tokens[option.first], tokens[option.last - 1]
    return first.start, last.stop, option.text.lower() if first.capitals else option.text


def with_network(
    text: str, tokens: Sequence[Token], doubts: Sequence[Doubt], scores: Scores, made: Sequence[Option] = ()
) -> list[Doubt]:
    """The doubts with what a network says of all their options, in the text with those that are `made` elsewhere, none
    of which overlaps an option without lying in it."""
    read, moved = with_options(text, tokens, made)
    spans = [
        (start + int(moved[option.first]), stop + int(moved[option.last]), word)
        for doubt in doubts
        for option in doubt.options
        for start, stop, word in [as_read(tokens, option)]
    ]
    values, at, told = scores(read, spans) if spans else np.zeros((0, 2)), 0, list[Doubt]()
    for doubt in doubts:
        said = values[at : at + len(doubt.options)]
        at += len(said)
        features = doubt.features.copy()
        features[:, SAID] = said - said[0]
        told.append(replace(doubt, features=features))
    return told


def ask(
    text: str, tokens: Sequence[Token], judged: Sequence[Judged], weights: Floats, scores: Scores, threshold: float
) -> list[Judged]:
    """The doubts; in open ones a network says how the probability of the likeliest options is shared. It reads
    the text with the changes made that are due and not open: a mistake makes the words around it improbable. Of a word
    that is open in several places those that are clear are made too: what a network has seen it finds probable."""
    result, asked = list(judged), least_certain(judged, max(ASKED_AT_LEAST, len(text) // CHARACTERS_PER_ASKED))
    options = [asked_options(judged[number][1]) for number in asked]
    doubts = [judged[number][0].only(kept) for number, kept in zip(asked, options, strict=True)]
    taken = {place for doubt in doubts for option in doubt.options for place in option.places}
    counts, made = Counter(tokens[doubt.place].key for doubt in doubts), list[Option]()
    for doubt, p in (judged[number] for number in due(judged, threshold)) if doubts else ():
        option = best_option(doubt, p)
        again = counts[tokens[doubt.place].key] > 1 and is_clear(p) and len(option.places) == 1
        if again or taken.isdisjoint(option.places):
            made.append(option)
    for number, kept, doubt in zip(asked, options, with_network(text, tokens, doubts, scores, made), strict=True):
        whole, p = judged[number]
        shared = p.copy()
        shared[kept] = p[kept].sum() * doubt.probabilities(weights)
        result[number] = whole, shared
    return result


def least_certain(judged: Sequence[Judged], most: int) -> list[int]:
    """The numbers of open decisions in order. If there are more than `most`: those with own / (own + best) nearest to
    0.5."""
    found = [number for number, (_, p) in enumerate(judged) if is_open(p)]
    return sorted(sorted(found, key=lambda number: abs(share_of_own(judged[number][1]) - 0.5))[:most])


def due(judged: Sequence[Judged], threshold: float) -> list[int]:
    """Which doubts are to be changed, the surest first: of two whose best options overlap the more probable."""
    occupied, found = set[int](), list[int]()
    for number in by_confidence(judged):
        places = best_option(*judged[number]).places
        if is_due(*judged[number], threshold) and occupied.isdisjoint(places):
            occupied.update(places)
            found.append(number)
    return found


def by_confidence(judged: Sequence[Judged]) -> list[int]:
    """The numbers of all doubts, those with the most probable change first."""
    return sorted(range(len(judged)), key=lambda number: -judged[number][1][1:].max())


def chosen(text: str, tokens: Sequence[Token], judged: Sequence[Judged], threshold: float) -> list[Rewriting]:
    """The changes that are made, and apart from these the doubts to tell of."""
    made = due(judged, threshold)
    taken, found = set[int](), list[Rewriting]()
    for number in [*made, *(number for number in by_confidence(judged) if number not in made)]:
        doubt, p = judged[number]
        option = best_option(doubt, p) if number in made else doubt.options[0]
        if number not in made and (p[0] > NO_DOUBT or not taken.isdisjoint(option.places)):
            continue
        taken.update(option.places)
        start, stop = tokens[option.first].start, tokens[option.last - 1].stop
        shown = {text[start:stop]: float(p[0])}
        shown |= {o.text: float(q) for o, q in zip(doubt.options, p, strict=True) if o.places == option.places}
        ranked = tuple(sorted(shown.items(), key=lambda one: -one[1]))
        found.append(Rewriting(start, stop, option.text, float(p[1:].max()), float(p[0]), number in made, ranked))
    return sorted(found, key=lambda one: one.start)
