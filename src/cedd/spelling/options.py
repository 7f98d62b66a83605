"""The options of correction: the caller's, before those of the model's folder, before the defaults."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from cedd.names import changed

if TYPE_CHECKING:  # torch: a correction word by word may need none
    from cedd.models.loaded import LoadedModel

OF_WORDS = {"change", "threshold"}
"""The options of `CorrectionOptions` that also a correction word by word has."""
RENAMED = {"strange": "max_surprise"}
"""Options by earlier names, which callers and saved models may use."""


@dataclass(frozen=True)
class CorrectionOptions:
    """How to correct. A model's folder may have defaults of its own ("correction" in its config.json)."""

    rate: float = 0.05
    """The share of wrong tokens that is expected in the text."""
    t: float | None = None
    """The time that the network is told; by default the one at which its process has this rate (`time_of_rate`)."""
    threshold: float = 0.5
    """A token is replaced if own / (own + best) is below this, own being its probability and best that of the likeliest
    other; 0.5 and more mean the argmax. So no token is replaced whose probability is at least this; of a transposition
    own is the probability of the order as it is (`transpositions`).
    Of all rules that break as many right tokens this one fixes most: a change adds best to the expected number of fixed
    tokens and own to that of broken ones, and those with the highest ratio are made."""
    change: Literal["words", "letters", "all"] | None = None
    """words: one word or two become others, of any length, with the lexicon beside the model (`rewrite`); the default
    where there is one. letters: a plain letter may become another of its script and case, and nothing else changes: no
    space, digit, punctuation, capital or accent (`letters.plain_letter`), and no letter of an address, a name with
    digits or another string that is no word (`letters.non_words`). all: any token may become any other. Without a
    lexicon letters, where tokens are characters or bytes."""
    passes: int = 3
    """How often the text is read at most; later passes see the changes of earlier ones."""
    reach: int = 3
    """Of changes within so many tokens of each other a pass makes only the strongest; 0 makes all at once."""
    max_surprise: float | None = None
    """Changes are undone where the surprise of the text around them exceeds this, in nats a letter (`mean_surprise`):
    the model does not know such a language or kind of text. None: no limit."""
    swaps: float = 0.002
    """The share of neighbouring letters that is expected to be transposed (`transpositions`); 0 looks for none, and so
    does a correction in several steps."""
    steps: int = 1
    """1 takes the likeliest token; more sample the reverse process from t."""
    temperature: float = 0.0
    """Of several steps: 0 writes the likeliest token wherever it writes."""

    def changed(self, given: Mapping[str, Any], source: str = "the options of correction") -> CorrectionOptions:
        """These options with those given (not None) in their place."""
        return changed(self, current_names(given), source)

    @property
    def first_scores(self) -> tuple[float | None, float, str | None]:
        """What the first scores of a text depend on: options that agree in it share them."""
        return self.t, self.rate, self.change

    def check(self) -> None:
        """Refuse what cannot be meant."""
        limit = self.max_surprise
        for name, meant, said in (
            *self._of_time(),
            ("rate", 0 < self.rate < 1, "is a share of wrong tokens and must lie in (0, 1)"),
            ("threshold", 0 <= self.threshold <= 1, "is a probability and must lie in [0, 1]"),
            ("swaps", 0 <= self.swaps < 1, "is a share of neighbouring letters and must lie in [0, 1)"),
            ("max_surprise", limit is None or limit >= 0, "is in nats a letter and must be 0 or more"),
            ("temperature", 0 <= self.temperature < math.inf, "must be 0 or more, and finite"),
            (
                "change",
                self.change in (None, "words", "letters", "all"),
                "says what may be changed: words, letters or all",
            ),
            ("passes", self.passes >= 1, "must be at least 1"),
            ("reach", self.reach >= 0, "must be at least 0"),
            ("steps", self.steps >= 1, "must be at least 1"),
        ):
            if not meant:
                got = getattr(self, name)
                raise ValueError(f"{name} {said}; got {f'{got:g}' if isinstance(got, float) else repr(got)}")

    def _of_time(self) -> tuple[tuple[str, bool, str], ...]:
        if self.t is None:
            return ()
        from cedd.samplers.grids import LAST_TIME

        return (("t", LAST_TIME < self.t <= 1, f"says how noisy the text is and must lie in ({LAST_TIME:g}, 1]"),)


def may_be_by_words(options: Mapping[str, Any]) -> bool:
    """Whether no option asks for a correction token by token."""
    given = {name for name, value in options.items() if value is not None}
    return options["change"] == "words" if "change" in given else not given - OF_WORDS


def current_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """Options by the names that they have now."""
    return {RENAMED.get(name, name): value for name, value in given.items()}


def correction_options(loaded: LoadedModel, given: Mapping[str, Any]) -> CorrectionOptions:
    """What holds for this model: the caller's options, before its folder's, before the defaults; checked, and with
    a time."""
    from cedd.spelling.scores import time_of_rate

    for name in RENAMED.keys() & given.keys():
        warnings.warn(f"{name} is now {RENAMED[name]}", DeprecationWarning, stacklevel=4)
    usual = CorrectionOptions().changed(
        loaded.folder.config.get("correction", {}), "the corrections of the model's folder"
    )
    asked = usual.changed(given)
    asked.check()  # before the model: an option that there is not asks for nothing that a model could lack
    if not loaded.method.dynamics.noisy:
        raise ValueError(f"{loaded.method.name} is autoregressive and cannot correct; train on uniform or roulette")
    if not loaded.process.can_shuffle:
        raise ValueError(
            "this model's process only masks (absorb): to it a token that it sees is certainly right, so it cannot "
            "correct; use english-char, or train one on uniform or roulette"
        )
    return asked if asked.t is not None else replace(asked, t=time_of_rate(loaded.process, asked.rate))
