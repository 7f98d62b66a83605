"""Correction: read the user's text as if it were noisy data at a small t, and remove the noise.

Only a process that can shuffle gives the tokens that it sees a chance of being wrong, so token by token absorb is
refused. Word by word a model of any process judges which word fits best among the others (`likelihood`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from cedd.data.text import check_text, encode_text, without_surrogates
from cedd.models.loaded import LoadedModel
from cedd.spelling.changes import Change, Corrected
from cedd.spelling.decide import revise
from cedd.spelling.letters import protected_tokens, token_groups
from cedd.spelling.options import CorrectionOptions
from cedd.spelling.rewrite import Reader
from cedd.spelling.scores import TokenScores, Watch, score_tokens
from cedd.spelling.transpositions import READINGS
from cedd.spelling.word_by_word import lexicon_in, reader_in, words_folder


def corrections(
    loaded: LoadedModel,
    text: str,
    ways: Iterable[CorrectionOptions],
    seed: int | None = None,
    watch: Watch | None = None,
) -> Iterator[Corrected]:
    """The text corrected in one way after another, each as if alone; the first scores are shared."""
    check_text(text, "what is corrected")
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
# Word by word


def lexicon_file(loaded: LoadedModel) -> Path | None:
    """The lexicon beside the model that corrects words, if there is one."""
    return lexicon_in(words_folder(loaded.folder.path, loaded.folder.config))


def reader_beside(loaded: LoadedModel) -> Reader:
    """The reader with that lexicon."""
    return reader_in(words_folder(loaded.folder.path, loaded.folder.config))


# ----------------------------------------------------------------------------------------------------------------
# Token by token


@dataclass(frozen=True)
class Draft:
    """A text to be corrected, perhaps in several ways, which share its first scores where they can."""

    loaded: LoadedModel
    text: str
    first: dict[Any, TokenScores] = field(default_factory=dict[Any, TokenScores])
    """By `CorrectionOptions.first_scores`."""

    def corrected(
        self, options: CorrectionOptions, seed: int | None, watch: Watch | None = None
    ) -> tuple[str, list[Change]]:
        """The corrected text, and what was changed."""
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
                doubt=float(1 - scores.own[i]),
            )
            for i, start in zip(places.tolist(), encoded.starts_of(places), strict=True)
        ]
        return encoded.written(now), changes


# ----------------------------------------------------------------------------------------------------------------
# How far it is


def readings(options: CorrectionOptions) -> int:
    """About how often the network reads a text to correct it so, after its first scores."""
    if options.steps > 1:
        return options.steps + 1
    return options.passes - 1 + (options.max_surprise is not None) + READINGS * (options.swaps > 0)


class CorrectionProgress:
    """How often the network has read the text, of as often as it may have to."""

    def __init__(self, ways: Sequence[CorrectionOptions], progress: Callable[[float, float], None]) -> None:
        keys = [options.first_scores for options in ways]
        new = [key not in keys[:number] for number, key in enumerate(keys)]
        self.ends = list(accumulate(readings(options) + first for options, first in zip(ways, new, strict=True)))
        self.done, self.finished, self.progress = 0.0, 0, progress

    def read(self, texts: float) -> None:
        """So much more was read; a way never takes more than was planned for it."""
        self.done = min(self.done + texts, self.ends[self.finished])
        self.progress(self.done, self.ends[-1])

    def finish(self) -> None:
        """The way is done, whether or not it needed all of its readings."""
        self.done, self.finished = self.ends[self.finished], self.finished + 1
        self.progress(self.done, self.ends[-1])
