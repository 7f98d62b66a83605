"""Suspicious words, the options for each, and the rule that accepts a change.

Shapes: O options of a suspicious word, F features.

Each option has features: the log-probability of the misspelling log p(written | option), the log-probability of the
word sequences, and indicators of its form. With weights that were fitted on human misspellings,

    p(option) = softmax over options of (weights · features).

The first option keeps the text. Let p_keep be its probability and p_best that of the best other option.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cedd.apps.correct.forms import FORMS
from cedd.apps.correct.lexicon import Floats

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
    "kept technical",
    "kept common capital",
    "kept uncommon",
    "kept uncommon opening",
    "kept frequent",
    "kept name without capital",
    "kept contraction",
    "kept acronym",
    "kept repeated",
    "network",
    "network tokens",
)
"""Features whose names begin with "kept" belong to the first option, which keeps the text."""
COLUMN = {name: column for column, name in enumerate(FEATURES)}
NETWORK_FEATURES = [COLUMN[name] for name in ("network", "network tokens")]
"""The log-likelihood of the text with an option, and the number of tokens over which it is summed."""
WORD_THRESHOLD = 0.9
"""The default threshold on p_keep / (p_keep + p_best)."""
MIN_BEST_SHARE = 0.45
"""Nothing is changed unless the best option has this share of the probability of all changes."""
COMMON_WORD_FACTOR = 2.0
"""p_keep of a common word is multiplied by this: the training examples contain far more misused common words than
ordinary text does."""


@dataclass(frozen=True)
class Option:
    """Tokens first..last-1 of the text, written as these words."""

    first: int
    last: int
    words: tuple[str, ...]
    text: str

    @property
    def places(self) -> range:
        """The indices of its tokens."""
        return range(self.first, self.last)


@dataclass(frozen=True)
class Suspect:
    """A suspicious token, by its index, and its options; the first option keeps the text."""

    place: int
    options: tuple[Option, ...]
    features: Floats
    """[O, F]"""

    @property
    def rare(self) -> bool:
        """Whether the token is rare or not in the lexicon."""
        return bool(self.features[0, COLUMN["kept rare"]])

    def probabilities(self, weights: Floats) -> Floats:
        """[O]"""
        scores = self.features @ weights
        scores = np.exp(scores - scores.max())
        return scores / scores.sum()

    def with_feature(self, name: str, value: float) -> Suspect:
        """A copy with another value of a feature of the first option."""
        features = self.features.copy()
        features[0, COLUMN[name]] = value
        return replace(self, features=features)

    def only(self, numbers: Sequence[int]) -> Suspect:
        """A copy with some of the options."""
        return replace(self, options=tuple(self.options[i] for i in numbers), features=self.features[list(numbers)])

    def without(self, tokens: Collection[int]) -> Suspect:
        """A copy without the options that contain one of these tokens."""
        return self.only([i for i, option in enumerate(self.options) if not any(at in tokens for at in option.places)])


ScoredSuspect = tuple[Suspect, Floats]
"""A suspicious word and the probabilities of its options."""


def weight_vector(weights: Mapping[str, float]) -> Floats:
    """Weights by feature name, as a vector [F]."""
    return np.array([weights.get(name, 0.0) for name in FEATURES])


def keep_ratio(p: Floats) -> float:
    """p_keep / (p_keep + p_best)."""
    return float(p[0] / max(p[0] + p[1:].max(), 1e-300))


def best_share(p: Floats) -> float:
    """p_best / (1 - p_keep)."""
    return float(p[1:].max() / max(p[1:].sum(), 1e-300))


def best_option(suspect: Suspect, p: Floats) -> Option:
    """The most probable change."""
    return suspect.options[1 + int(p[1:].argmax())]


def is_accepted(suspect: Suspect, p: Floats, threshold: float) -> bool:
    """Whether the best change is made, unless it overlaps another."""
    scaled = np.append(p[:1] * (1.0 if suspect.rare else COMMON_WORD_FACTOR), p[1:])
    return keep_ratio(scaled) < threshold and best_share(p) >= MIN_BEST_SHARE


def mean_log_odds(suspects: Sequence[Suspect], weights: Floats) -> dict[str, float]:
    """For each single word that is an option of all suspects: the mean of log p(word) - log p_keep."""
    found: dict[str, list[float]] = defaultdict(list)
    for suspect in suspects:
        scores = suspect.features @ weights
        for option, score in zip(suspect.options[1:], (scores[1:] - scores[0]).tolist(), strict=True):
            if len(option.words) == len(option.places) == 1:
                found[option.words[0]].append(score)
    return {word: sum(odds) / len(odds) for word, odds in found.items() if len(odds) == len(suspects)}
