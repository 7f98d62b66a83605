"""The options of the engine `letters`: the caller's take precedence over the model folder's, and these over the
defaults."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Literal, TypedDict

from cedd.names import changed
from cedd.storage import JSONMapping

if TYPE_CHECKING:  # imports torch
    from cedd.models.loaded_model import LoadedModel


@dataclass(frozen=True)
class CorrectionOptions:
    """How to correct. A model's folder may have its own defaults ("correction" in its config.json)."""

    rate: float = 0.05
    """Expected share of wrong tokens in the text."""
    t: float | None = None
    """Time at which the network reads the text; by default the one at which its process has this rate
    (`time_of_rate`)."""
    threshold: float = 0.5
    """A token is replaced if p_keep / (p_keep + p_best) is below this, where p_keep is its probability and p_best that
    of the likeliest other token; 0.5 and more mean the argmax. No token with a probability of at least this is
    replaced. For a transposition p_keep is the probability of the given order (`transpositions`). Among all rules that
    break equally many correct tokens this one fixes the most: a change adds p_best to the expected number of fixed
    tokens and p_keep to that of broken ones, and those with the highest ratio are made."""
    change: Literal["letters", "all"] | None = None
    """letters: a plain letter may become another of its script and case, and nothing else changes: no space, digit,
    punctuation, capital or accent (`letters.plain_letter`), and no letter of an address, a name with digits or another
    string that is not a word (`letters.non_words`). all: any token may become any other. By default letters if tokens
    are characters or bytes."""
    passes: int = 3
    """Maximum number of passes over the text; later passes see earlier changes."""
    reach: int = 3
    """Among changes within this many tokens a pass makes only the strongest; 0 makes all at once."""
    max_surprise: float | None = None
    """Changes are undone if the mean surprise of the surrounding text exceeds this, in nats per letter
    (`mean_surprise`): the model does not know this language or kind of text. None: no limit."""
    swaps: float = 0.002
    """Expected share of transposed neighbouring letters (`transpositions`); 0 looks for none, and neither does
    correction in several steps."""
    steps: int = 1
    """1 takes the likeliest token; more sample the reverse process from t."""
    temperature: float = 0.0
    """With several steps: 0 takes the likeliest token."""

    def changed(self, given: JSONMapping, source: str = "the options of correction") -> CorrectionOptions:
        """A copy with the given options that are not None."""
        return changed(self, given, source)

    @property
    def first_scores(self) -> tuple[float | None, float, str | None]:
        """The options that determine the first scores of a text; corrections that agree in them share these scores."""
        return self.t, self.rate, self.change

    def check(self) -> None:
        """Refuse invalid values."""
        limit = self.max_surprise
        for name, meant, said in (
            *self._of_time(),
            ("rate", 0 < self.rate < 1, "must be in (0, 1)"),
            ("threshold", 0 <= self.threshold <= 1, "must be in [0, 1]"),
            ("swaps", 0 <= self.swaps < 1, "must be in [0, 1)"),
            ("max_surprise", limit is None or limit >= 0, "must be at least 0 (nats per letter)"),
            ("temperature", 0 <= self.temperature < math.inf, "must be at least 0 and finite"),
            ("change", self.change in (None, "letters", "all"), "must be letters or all"),
            ("passes", self.passes >= 1, "must be at least 1"),
            ("reach", self.reach >= 0, "must be at least 0"),
            ("steps", self.steps >= 1, "must be at least 1"),
        ):
            if not meant:
                got = getattr(self, name)
                raise ValueError(f"{name} {said} (got {f'{got:g}' if isinstance(got, float) else repr(got)})")

    def _of_time(self) -> tuple[tuple[str, bool, str], ...]:
        if self.t is None:
            return ()
        from cedd.samplers.grids import LAST_TIME

        return (("t", LAST_TIME < self.t <= 1, f"must be in ({LAST_TIME:g}, 1]"),)


class CorrectionSettings(TypedDict, total=False):
    """The fields of `CorrectionOptions` and the options of the engine `words`, as keyword arguments."""

    rate: float
    t: float | None
    threshold: float
    change: Literal["letters", "all"] | None
    passes: int
    reach: int
    max_surprise: float | None
    swaps: float
    steps: int
    temperature: float
    ignored_words: Collection[str]


LETTER_OPTIONS = frozenset(field.name for field in fields(CorrectionOptions))
"""Options of the engine `letters`."""
WORD_OPTIONS = frozenset({"threshold", "ignored_words"})
"""Options of the engine `words`."""


def correction_options(loaded: LoadedModel, given: JSONMapping) -> CorrectionOptions:
    """The options for a model, checked, and with a time: the caller's, the folder's, or the defaults."""
    from cedd.spelling.scores import time_of_rate

    usual = CorrectionOptions().changed(
        loaded.folder.config.get("correction", {}), "the correction options of the model's folder"
    )
    asked = usual.changed(given)
    asked.check()  # before checks of the model, so that unknown options are reported first
    if not loaded.method.dynamics.noisy:
        raise ValueError(f"{loaded.method.name} is autoregressive and cannot correct; train on uniform or roulette")
    loaded.method.check_whole("correction")
    if not loaded.process.can_shuffle:
        raise ValueError(
            "this model's process only masks (absorb), so it takes every visible token as correct and cannot correct "
            "letters; use english-char, or train a model on uniform or roulette"
        )
    return asked if asked.t is not None else replace(asked, t=time_of_rate(loaded.process, asked.rate))
