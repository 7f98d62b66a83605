"""Finds the suspicious words of a text and options for each.

Shapes: T tokens of the text, O options of a suspicious word, F features.

A word is suspicious if the lexicon does not have it, if it is rare and does not fit its neighbours, or if it is common
and a similar word fits far better. Its options are the word itself, similar words, two words, and the word joined with
a neighbour.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from cedd.apps.correct.candidates import CONFUSED, Candidate, Neighbours
from cedd.apps.correct.forms import FORMS, contraction, is_derived, is_ise_form, is_possessive, same_word
from cedd.apps.correct.known_words import KINDS
from cedd.apps.correct.languages import FOREIGN
from cedd.apps.correct.lexicon import UNKNOWN, Floats, Integers, Lexicon, load_lexicon
from cedd.apps.correct.suspects import (
    COLUMN,
    FEATURES,
    Option,
    ScoredSuspect,
    Suspect,
    best_option,
    is_accepted,
    mean_log_odds,
    weight_vector,
)
from cedd.apps.correct.words import Token, acronyms, like

WITH_PARTICLE = re.compile(
    r"(?:(?:opt|log|sign|check|clock|dial|tun|giv|gav)\w{0,4} into"
    r"|(?:log|sign|hold|held|hang|hung|mov|go|went|carr|pass)\w{0,4} onto)\Z"
)
"""Verbs whose particle "in" or "on" is not joined with "to": opt in to, move on to."""
FRAME = 3
"""Tokens on each side of a suspicious word whose probability it affects."""
AT_ONCE = 256
"""Suspicious words whose features are computed at once; each takes up to 100 kB."""
LONG_TEXT = 100
"""Tokens of a text in which a repeated unknown word is probably intended; a shorter text may repeat the same slip."""
REPEAT_LOG_ODDS = 0.75
"""A repeated word is a repeated misspelling if one other word is more probable by this many nats, on average over all
its places. (One and the same, not two: "builtin" is intended.)"""
RARE, COMMON = 3.5, 8.0
"""Logarithms of counts. Rare words are names, and errors that the corpus contains several times."""
MAX_SURPRISE = {"rare": 14.0, "common": 10.0}
"""A known word may be suspicious if -log p of it and of the next word together exceed this. A common one is suspicious
only if a word that is easily confused with it makes the text more probable by MIN_GAIN nats."""
MIN_GAIN = 4.0
SMALL_WORDS = 60
"""The most frequent words, which are not parts of compounds. Words joined by mistake usually contain one of them."""
FUNCTION_WORDS = frozenset(
    (
        *("each", "every", "much", "such", "many", "these", "those", "could", "would", "should", "might", "must"),
        *("shall", "both", "either", "though", "because", "until", "where", "whose", "whom", "your", "their", "our"),
        *("its", "them", "also", "only", "even", "than", "very", "about", "between"),
    )
)
"""Less frequent words that are not parts of compounds, either."""
MAX_COMPOUND_LENGTH, MAX_COMPOUND_PAIR_COUNT = 12, 200
"""Letters of an unknown compound; how often its two words may occur in a row."""
FAR_CHANNEL = 10.0
"""-log p(written | meant) from which on the feature has another slope."""
MIN_JOINED_RATIO, MIN_JOINED_COUNT = 12.0, 40.0
"""Two words are suspicious if the word that they form when joined is this many times as frequent as they are in a row,
and has at least this count."""
LANGUAGE_REACH, LETTER, END, JOINED = 12, 2.85, 3.0, 5.0
"""Words on each side of a word whose language is considered; -log p of a letter, and of a word's end, in any language,
and of two words written as one."""
EVIDENCE, KNOWN_EVIDENCE, PRIOR_EVIDENCE = (-8.0, 12.0), 4.0, 8.0
"""Limits of a word's evidence for English: the upper one is that of frequent small words (the, which); a misspelling
has at most the absolute value of the lower one. The evidence of a known word (`known_words`), and the prior evidence
for English, which decides for short texts."""
ENGLISH = {"rare": 3.5, "common": 4.2}
"""The mean evidence for English that is required around a rare or unknown word, and around a common one, before it is
suspicious: error-free English has 7, lists of misspellings 6, other languages 0."""


T = TypeVar("T")


@dataclass(frozen=True)
class TokenizedText:
    """A text and its tokens, some of which are replaced by other words.

    Args:
        text: the text.
        tokens: its tokens.
        replaced: words by the index of the token that they replace.
    """

    text: str
    tokens: Sequence[Token]
    replaced: Mapping[int, str] = field(default_factory=dict[int, str])

    @cached_property
    def keys(self) -> list[str]:
        """The keys of the tokens, padded with stops."""
        keys = [self.replaced.get(place, token.key) for place, token in enumerate(self.tokens)]
        return ["."] * FRAME + keys + ["."] * FRAME

    @cached_property
    def counts(self) -> Counter[str]:
        return Counter(token.key for token in self.tokens)

    @cached_property
    def acronyms(self) -> list[bool]:
        return acronyms(self.tokens)


class WordOptions(NamedTuple):
    """A suspicious token, by its index, its options, and log p(written | option) of each [O]."""

    place: int
    options: tuple[Option, ...]
    channel: Floats


class Reader:
    """Finds the suspicious words of a text.

    Args:
        lexicon: the lexicon of the text's language.
    """

    def __init__(self, lexicon: Lexicon) -> None:
        self.lexicon, self.neighbours = lexicon, Neighbours(lexicon)
        self.alone, self.informed = (weight_vector(lexicon.weights.get(name, {})) for name in ("alone", "network"))

    def suspects(self, text: str, tokens: Sequence[Token], ignored: Collection[str] = ()) -> list[Suspect]:
        """The suspicious words of a text in order. Words whose keys are `ignored` are correct, also with 's, and
        are not joined."""
        if not tokens:
            return []
        source = TokenizedText(text, tokens)
        found = self.suspicious(tokens, self.lexicon.numbers(source.keys))
        correct = {i for i, one in enumerate(tokens) if one.key in ignored or one.key.removesuffix("'s") in ignored}
        found = {place: near for place, near in found.items() if place not in correct}
        suspects = chain.from_iterable(
            self.suspects_at(source, {place: found[place] for place in part}) for part in parts(list(found))
        )
        if correct:
            suspects = (suspect.without(correct) for suspect in suspects)
        return self.with_repeats(tokens, [suspect for suspect in suspects if len(suspect.options) > 1])

    def suspects_at(self, source: TokenizedText, found: Mapping[int, Sequence[int] | None]) -> list[Suspect]:
        """The suspects at these indices, from the numbers of the words that may be meant; None if not known yet."""
        unclear = [place for place, near in found.items() if near is None]
        near_words = iter(self.near_words(source, unclear))
        options = [
            self.options(
                source,
                place,
                next(near_words) if near is None else self.neighbours.these(source.tokens[place].key, near),
            )
            for place, near in found.items()
        ]
        return self.with_features(source, options)

    def with_repeats(self, tokens: Sequence[Token], suspects: Sequence[Suspect]) -> list[Suspect]:
        """The suspects; repetition does not count in favour of a word if the same other word fits better at all its
        places, unless it is a name: capitalized in the middle of a sentence."""
        places: dict[str, list[int]] = defaultdict(list)
        names = {tokens[one.place].key for one in suspects if one.features[0, COLUMN["kept rare capital"]]}
        for number, suspect in enumerate(suspects):
            repeated = suspect.features[0, COLUMN["kept repeated"]] and tokens[suspect.place].key not in names
            if suspect.rare and repeated:
                places[tokens[suspect.place].key].append(number)
        result = list(suspects)
        for numbers in places.values():
            equal = [suspects[number].with_feature("kept repeated", 0.0) for number in numbers]
            if max(mean_log_odds(equal, self.alone).values(), default=-math.inf) > REPEAT_LOG_ODDS:
                for number, suspect in zip(numbers, equal, strict=True):
                    result[number] = suspect
        return result

    def scored(
        self, text: str, tokens: Sequence[Token], threshold: float, ignored: Collection[str] = ()
    ) -> list[ScoredSuspect]:
        """The suspicious words of a text with the probabilities of their options, without a network."""
        first = [(suspect, suspect.probabilities(self.alone)) for suspect in self.suspects(text, tokens, ignored)]
        return self.rescored(text, tokens, first, threshold)

    def rescored(
        self, text: str, tokens: Sequence[Token], scored: Sequence[ScoredSuspect], threshold: float
    ) -> list[ScoredSuspect]:
        """The suspects; those near an accepted change are scored again with this change applied."""
        accepted = [
            (suspect.place, best_option(suspect, p)) for suspect, p in scored if is_accepted(suspect, p, threshold)
        ]
        replaced = {place: o.words[0] for place, o in accepted if len(o.words) == 1 and o.last - o.first == 1}
        source, result = TokenizedText(text, tokens, replaced), list(scored)
        around = {place + distance for place in replaced for distance in range(-FRAME, FRAME + 1) if distance}
        near = [number for number, (suspect, _) in enumerate(scored) if suspect.place in around]
        before = [scored[number][0] for number in near]
        again = [
            WordOptions(suspect.place, suspect.options, suspect.features[:, COLUMN["channel"]]) for suspect in before
        ]
        fresh = chain.from_iterable(self.with_features(source, part) for part in parts(again))
        for number, old, new in zip(near, before, fresh, strict=True):
            new = new.with_feature("kept repeated", old.features[0, COLUMN["kept repeated"]])
            result[number] = new, new.probabilities(self.alone)
        return result

    def suspicious(self, tokens: Sequence[Token], numbers: Integers) -> dict[int, Sequence[int] | None]:
        """The indices of suspicious tokens, and the numbers of the words that may be meant; None if these are not
        known yet."""
        lexicon = self.lexicon
        pairs = lexicon.gram_counts(np.stack([numbers[:-1], numbers[1:]], -1))
        own = numbers[FRAME:-FRAME]
        surprise = -lexicon.log_probabilities(numbers[None])[0]  # of numbers[2:]
        both = surprise[FRAME - 2 : FRAME - 2 + len(own)] + surprise[FRAME - 1 : FRAME - 1 + len(own)]
        free, english = np.array([token.free for token in tokens]), self.english(tokens, own)
        common = (own >= 0) & (own < CONFUSED)
        free &= english >= np.where(common, ENGLISH["common"], ENGLISH["rare"])
        strange = np.flatnonzero(free & ((own == UNKNOWN) | (~common & (both > MAX_SURPRISE["rare"])))).tolist()
        found: dict[int, Sequence[int] | None] = dict.fromkeys(
            place
            for place in strange
            if not is_possessive(lexicon, tokens[place].key) and not is_ise_form(lexicon, tokens[place].key)
        )
        better = self.better_words(numbers, np.flatnonzero(free & common & (both > MAX_SURPRISE["common"])))
        joinable = self.joinable(tokens, pairs[FRAME : FRAME + len(own)]) & (english >= ENGLISH["rare"])
        for place, token in enumerate(tokens):
            number = lexicon.index.get(contraction(token) or "")
            if number is not None and free[place]:
                found.pop(place, None)
                better[place] = [number]
        others = {*better, *np.flatnonzero(joinable).tolist()} - found.keys()
        found |= {place: better.get(place, ()) for place in others}
        return dict(sorted(found.items()))

    def better_words(self, numbers: Integers, places: Integers) -> dict[int, Sequence[int]]:
        """The words easily confused with the common words at these places that fit far better there."""
        if not len(places):
            return {}  # without computing the table of confused words
        first, other = self.neighbours.confused
        own = numbers[places + FRAME]
        sizes = first[own + 1] - first[own]
        at = np.repeat(places, sizes)
        start = np.repeat(first[own] - np.cumsum(sizes) + sizes, sizes)
        words = other[start + np.arange(len(at))]
        frames = numbers[at[:, None] + FRAME + np.arange(-2, 3)]
        before = np.repeat(self.around(numbers[places[:, None] + FRAME + np.arange(-2, 3)]), sizes)
        frames[:, 2] = words
        gains = np.flatnonzero(self.around(frames) - before > MIN_GAIN)
        found: dict[int, list[int]] = defaultdict(list)
        for place, word in zip(at[gains].tolist(), words[gains].tolist(), strict=True):
            found[place].append(word)
        return dict(found)

    def around(self, frames: Integers) -> Floats:
        """log p of the last three words of each sequence [N, 5], [N]."""
        return self.lexicon.log_probabilities(frames).sum(-1)

    def joinable(self, tokens: Sequence[Token], counts: Floats) -> NDArray[np.bool_]:
        """Whether each token and the next, which occur in a row `counts` times, are far more often one word, [T]."""
        flags = np.zeros(len(tokens), np.bool_)
        for place, (first, second) in enumerate(pairwise(tokens)):
            number = self.lexicon.index.get(first.key + second.key)
            if number is not None and second.start == first.stop + 1 and (first.free or second.free):
                joined = np.exp(self.lexicon.log_counts[number])
                flags[place] = joined > max(MIN_JOINED_COUNT, MIN_JOINED_RATIO * counts[place])
        return flags

    def english(self, tokens: Sequence[Token], own: Integers) -> Floats:
        """Evidence per word that the text around each token is English rather than another language, [T]."""
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
        """log p of a word as English, perhaps misspelled, minus log p of its letters in any language, clipped."""
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
        if log_p < RARE:  # the corpus contains misspellings
            near, rough = self.neighbours.near(word)
            log_p = float((rough + lexicon.log_counts[near]).max(initial=log_p))
            for two in self.neighbours.splits(word):
                both = sum(float(lexicon.log_counts[lexicon.index[one]]) for one in two.words)
                log_p = max(log_p, both - math.log(lexicon.total) - JOINED)
        most = -EVIDENCE[0] if number == UNKNOWN else EVIDENCE[1]
        return min(max(log_p - math.log(lexicon.total) + LETTER * len(word) + END, EVIDENCE[0]), most)

    def options(self, source: TokenizedText, place: int, found: Sequence[Candidate]) -> WordOptions:
        """A token with its options: similar words that were found, two words, and the word joined with a neighbour."""
        text, tokens = source.text, source.tokens
        token, lexicon = tokens[place], self.lexicon
        number = lexicon.index.get(token.key)
        known = number is not None and bool(lexicon.log_counts[number] >= RARE)
        options = [Option(place, place + 1, (token.key,), token.text)]
        channel = [0.0]
        for candidate in found:
            if same_word(token.key, candidate.words[0], known=number is not None):
                continue  # correct in another country's spelling
            options.append(Option(place, place + 1, candidate.words, like(token.text, candidate.words[0])))
            channel.append(candidate.log_channel)
        for candidate in () if known or contraction(token) else self.neighbours.splits(token.key):
            if self.is_compound(candidate.words):
                continue
            options.append(Option(place, place + 1, candidate.words, like(token.text, " ".join(candidate.words))))
            channel.append(candidate.log_channel)
        for first in (place - 1, place):
            before = tokens[first - 1].key if first > 0 else ""
            if 0 <= first < len(tokens) - 1 and (
                word := self.joined_word(text, tokens[first], tokens[first + 1], before)
            ):
                options.append(Option(first, first + 2, (word,), like(tokens[first].text, word)))
                channel.append(0.0)
        return WordOptions(place, tuple(options), np.array(channel))

    def with_features(self, source: TokenizedText, words: Sequence[WordOptions]) -> list[Suspect]:
        """The suspects with all features except the network's."""
        contexts = self.contexts(source.keys, words)
        return [
            Suspect(word.place, word.options, self.features(source, word, context))
            for word, context in zip(words, contexts, strict=True)
        ]

    def is_compound(self, words: Sequence[str]) -> bool:
        """Whether two words in one are a compound (stylesheet, hostname) rather than two words without their space:
        neither is among the most frequent words, they are rarely seen in a row, and they are short together."""
        first, second = (self.lexicon.index[word] for word in words)
        if (
            min(first, second) < SMALL_WORDS
            or not FUNCTION_WORDS.isdisjoint(words)
            or sum(map(len, words)) > MAX_COMPOUND_LENGTH
        ):
            return False
        return bool(self.lexicon.gram_counts(np.array([[first, second]]))[0] < MAX_COMPOUND_PAIR_COUNT)

    def near_words(self, source: TokenizedText, places: Sequence[int]) -> list[list[Candidate]]:
        """The words similar to each token that fit its context best."""
        if not places:
            return []
        written = [source.tokens[place].key for place in places]
        near, numbers = [self.neighbours.near(word) for word in written], self.lexicon.numbers(source.keys)
        sizes = [len(words) for words, _ in near]
        frames = numbers[np.repeat(np.array(places, np.int64), sizes)[:, None] + FRAME + np.arange(-2, 3)]
        frames[:, 2] = np.concatenate([words for words, _ in near])
        contexts = np.split(self.around(frames), np.cumsum(sizes)[:-1])
        return [self.neighbours.meant(*one) for one in zip(written, near, contexts, strict=True)]

    def joined_word(self, text: str, first: Token, second: Token, before: str = "") -> str | None:
        """Two tokens as one word, if they are words separated by a space, neither is part of a hyphenated word, the
        second is not capitalized, and the lexicon has the joined word. "Can not" is never joined, nor is "in to" or
        "on to" if the word before it takes the particle (`WITH_PARTICLE`)."""
        word = first.key + second.key
        if (
            word == "cannot"
            or WITH_PARTICLE.match(f"{before} {word}")
            or "-" in (text[first.start - 1 : first.start], text[second.stop : second.stop + 1])
        ):
            return None
        fits = first.key.isalpha() and second.key.isalpha() and text[first.stop : second.start] == " "
        fits = fits and (second.text.islower() or first.text.isupper())
        number = self.lexicon.index.get(word) if fits else None
        return None if number is None or self.lexicon.log_counts[number] < 3 else word

    def features(self, source: TokenizedText, word: WordOptions, context: Floats) -> Floats:
        """[O, F], from log p of the words around with each option [O]."""
        place, options, channel = word
        token, lexicon = source.tokens[place], self.lexicon
        number = lexicon.index.get(token.key)
        unknown, log_count = number is None, 0.0 if number is None else lexicon.log_counts[number]
        named = number is not None and bool(lexicon.named[number])
        rare = log_count < RARE
        uncommon = max(0.0, COMMON - log_count) * (not rare) / 4
        capital = token.text[0].isupper() and not token.text.isupper()
        name = capital and not token.opens
        derived, kind = rare and is_derived(lexicon, token.key), lexicon.kind(token.key)
        numbers = [[lexicon.index.get(word, UNKNOWN) for word in option.words] for option in options]
        sizes = np.array([len(option.words) - (option.last - option.first) for option in options])
        others = np.arange(len(options)) > 0
        frequency = np.array([0.0, *(min(lexicon.log_counts[some]) - 8.0 for some in numbers[1:])])
        columns: dict[str, NDArray[np.generic]] = {
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
            features[:, COLUMN[column]] = values
        for split in np.flatnonzero(sizes > 0).tolist():
            unsupported = lexicon.gram_counts(np.array([numbers[split][:2]]))[0] == 0
            features[split, COLUMN["split unsupported"]] = unsupported
            features[split, COLUMN["split derived"]] = derived or min(numbers[split]) >= SMALL_WORDS
        kept = {
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
            **{f"kept {one}": kind == one for one in KINDS},
            "kept rare letters": rare * min(len(token.key), 12) / 10,
            "kept common capital": not rare and name,
            "kept uncommon": uncommon,
            "kept uncommon opening": uncommon * (token.opens and not named),
            "kept frequent": max(0.0, log_count - COMMON) / 4,
            "kept name without capital": named and not capital,
            "kept contraction": contraction(token) is not None,
            "kept acronym": source.acronyms[place],
            "kept repeated": self.repeated(source, token.key, name),
        }
        for feature, value in kept.items():
            features[0, COLUMN[feature]] = value
        return features

    def repeated(self, source: TokenizedText, key: str, name: bool) -> float:
        """In a long text: the logarithm of the ratio of a word's count to its expected count, if above 1; 0 for a
        misspelling that the lexicon remembers, unless it is used as a name."""
        number = self.lexicon.index.get(key, UNKNOWN)
        if not name and key in self.lexicon.memory and math.log(self.lexicon.counts[number]) < RARE:
            return 0.0
        expected = len(source.keys) * self.lexicon.counts[number] / self.lexicon.total
        return max(0.0, math.log(source.counts[key] / max(1.0, expected))) if len(source.tokens) >= LONG_TEXT else 0.0

    def contexts(self, keys: Sequence[str], words: Sequence[WordOptions]) -> list[Floats]:
        """log p of the tokens around each suspicious word with each option in its place, [O] for each."""
        numbers, get = self.lexicon.numbers(keys).tolist(), self.lexicon.index.get
        groups: dict[int, list[tuple[int, list[int]]]] = defaultdict(list)
        ends = list(accumulate(len(word.options) for word in words))
        for one, end in zip(words, ends, strict=True):
            first, last = one.place, one.place + 2 * FRAME + 1  # of the keys around it
            for row, option in enumerate(one.options, end - len(one.options)):
                before, after = numbers[first : option.first + FRAME], numbers[option.last + FRAME : last]
                sequence = [*before, *(get(word, UNKNOWN) for word in option.words), *after]
                groups[len(sequence)].append((row, sequence))
        result = np.zeros(ends[-1] if ends else 0)
        for members in groups.values():
            rows, sequences = zip(*members, strict=True)
            result[list(rows)] = self.lexicon.log_probabilities(np.array(sequences)).sum(-1)
        return np.split(result, ends[:-1]) if ends else []


def parts(sequence: Sequence[T]) -> Iterator[Sequence[T]]:
    """Parts of a sequence that are processed at once."""
    return (sequence[start : start + AT_ONCE] for start in range(0, len(sequence), AT_ONCE))


@lru_cache(maxsize=2)
def reader_of(file: Path, modified: int) -> Reader:
    """The reader with the lexicon in a file, which has this modification time."""
    del modified
    return Reader(load_lexicon(file))
