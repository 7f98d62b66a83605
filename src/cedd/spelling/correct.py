"""Correction by the engine `letters`: read the text as noisy data at a small t, and remove the noise.

Only a process that can shuffle assigns visible tokens a probability of being wrong, so absorb is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np

from cedd.data.text import check_text, encode_text, without_surrogates
from cedd.models.loaded_model import LoadedModel
from cedd.spelling.changes import Change, Corrected
from cedd.spelling.letter_engine import revise
from cedd.spelling.options import CorrectionOptions
from cedd.spelling.scores import TokenScores, Watch, score_tokens
from cedd.spelling.token_groups import protected_tokens, token_groups
from cedd.spelling.transpositions import READINGS


def corrections(
    loaded: LoadedModel,
    text: str,
    ways: Iterable[CorrectionOptions],
    seed: int | None = None,
    watch: Watch | None = None,
) -> Iterator[Corrected]:
    """The text corrected in one way after another, each independently; the first scores are shared."""
    check_text(text, "the text to correct")
    parts = [(Draft(loaded, part), mark) for part, mark in without_surrogates(loaded.tokenizer, text)]
    for options in ways:
        done: list[str] = []
        changes: list[Change] = []
        offset = 0
        for draft, mark in parts:
            fixed, changed = draft.corrected(options, seed, watch)
            done += [fixed, mark]
            changes += [change.moved(offset) for change in changed]
            offset += len(draft.text) + len(mark)
        yield Corrected("".join(done), text, changes)


# ----------------------------------------------------------------------------------------------------------------
# Token by token


@dataclass(frozen=True)
class Draft:
    """A text to be corrected, possibly in several ways, which share its first scores if they can."""

    loaded: LoadedModel
    text: str
    first: dict[Any, TokenScores] = field(default_factory=dict[Any, TokenScores])
    """By `CorrectionOptions.first_scores`."""

    def corrected(
        self, options: CorrectionOptions, seed: int | None, watch: Watch | None = None
    ) -> tuple[str, list[Change]]:
        """The corrected text, and the changes."""
        loaded, tokenizer, key = self.loaded, self.loaded.tokenizer, options.first_scores
        encoded, groups = encode_text(tokenizer, self.text), token_groups(tokenizer, options.change)
        protected = protected_tokens(encoded, groups, options.change)
        if protected.all():
            return self.text, []
        if key not in self.first:
            assert options.t is not None
            self.first[key] = score_tokens(loaded, encoded.ids, groups, options.t, options.rate, watch=watch)
        now, scores = revise(loaded, encoded.ids, protected, groups, options, seed, first=self.first[key], watch=watch)
        places = np.flatnonzero(now != encoded.ids)
        if not len(places):
            return self.text, []
        changes = [
            Change(
                position=start,
                before=tokenizer.decode(encoded.ids[i : i + 1]),
                after=tokenizer.decode(now[i : i + 1]),
                confidence=float(scores.confidence[i]),
                error_probability=float(1 - scores.own[i]),
            )
            for i, start in zip(places.tolist(), encoded.starts_of(places), strict=True)
        ]
        return encoded.written(now), changes


# ----------------------------------------------------------------------------------------------------------------
# How far it is


def readings(options: CorrectionOptions) -> int:
    """Approximate number of times that the network reads a text to correct it, after its first scores."""
    if options.steps > 1:
        return options.steps + 1
    return options.passes - 1 + (options.max_surprise is not None) + READINGS * (options.swaps > 0)


class CorrectionProgress:
    """Counts how often the network has read the text, relative to the planned maximum."""

    def __init__(self, ways: Sequence[CorrectionOptions], progress: Callable[[float, float], None]) -> None:
        keys = [options.first_scores for options in ways]
        new = [key not in keys[:number] for number, key in enumerate(keys)]
        self.ends = list(accumulate(readings(options) + first for options, first in zip(ways, new, strict=True)))
        self.done, self.finished, self.progress = 0.0, 0, progress

    def read(self, texts: float) -> None:
        """Add to the count; a way never exceeds its planned number."""
        self.done = min(self.done + texts, self.ends[self.finished])
        self.progress(self.done, self.ends[-1])

    def finish(self) -> None:
        """A way is done, whether or not it needed its planned number."""
        self.done, self.finished = self.ends[self.finished], self.finished + 1
        self.progress(self.done, self.ends[-1])
