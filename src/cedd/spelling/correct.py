"""Correction: read the user's text as if it were noisy data at a small t, and remove the noise.

Only a process that can shuffle gives the tokens that it sees a chance of being wrong, so token by token absorb is
refused. Word by word a model of any process judges which word fits best among the others (`likelihood`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from cedd.data.text import encode_text, without_surrogates
from cedd.models.loaded import LoadedModel
from cedd.models.locate import packaged, pretrained_names
from cedd.spelling.decide import revise
from cedd.spelling.letters import protected_tokens, token_groups
from cedd.spelling.lexicon import LEXICON_FILE
from cedd.spelling.likelihood import likelihoods
from cedd.spelling.options import CorrectionOptions
from cedd.spelling.rewrite import WORD_THRESHOLD, Reader, reader_of, rewritings
from cedd.spelling.scores import TokenScores, Watch, score_tokens
from cedd.spelling.transpositions import READINGS


@dataclass(frozen=True)
class Change:
    """One token, or one word or two, that was replaced."""

    position: int
    """Where it begins in the given text, in characters."""
    before: str
    after: str
    confidence: float
    """p(x_0 = the new token), given the text as it was (one step) or as it became (several)."""
    doubt: float
    """1 - p(x_0 = the old token)."""
    corrected_position: int = 0
    """Where the new one begins in the corrected text."""
    candidates: tuple[tuple[str, float], ...] = ()
    """Of words: what may have been meant, with probabilities, the likeliest first; the old text is among it."""

    def moved(self, offset: int) -> Change:
        """The same in a text that has so much more before it."""
        return replace(self, position=self.position + offset)

    @property
    def span(self) -> tuple[int, int]:
        """From where to where it was, in the given text."""
        return self.position, self.position + len(self.before)

    @property
    def corrected_span(self) -> tuple[int, int]:
        """From where to where it is now, in the corrected text."""
        return self.corrected_position, self.corrected_position + len(self.after)


class Corrected(str):
    """The corrected text, with what was changed, in order.

    Args:
        text: the corrected text.
        original: the text as it was given.
        changes: what was replaced; where it stands in the corrected text is found here.
        doubts: what was not replaced, though something else may have been meant: `after` is what it was.
    """

    original: str
    changes: tuple[Change, ...]
    doubts: tuple[Change, ...]

    def __new__(cls, text: str, original: str, changes: Sequence[Change], doubts: Sequence[Change] = ()) -> Corrected:
        made = super().__new__(cls, text)
        made.original = original
        both = list(_placed(sorted([*changes, *doubts], key=lambda change: change.position)))
        made.changes = tuple(change for change in both if change.before != change.after)
        made.doubts = tuple(change for change in both if change.before == change.after)
        return made

    @property
    def text(self) -> str:
        return str(self)


def _placed(changes: Iterable[Change]) -> Iterator[Change]:
    """The changes with their places in the corrected text; of a character's bytes several may change."""
    end = shift = 0
    for change in changes:
        start = max(end, change.position + shift)
        end, shift = start + len(change.after), shift + len(change.after) - len(change.before)
        yield replace(change, corrected_position=start)


def corrections(
    loaded: LoadedModel,
    text: str,
    ways: Iterable[CorrectionOptions],
    seed: int | None = None,
    watch: Watch | None = None,
) -> Iterator[Corrected]:
    """The text corrected in one way after another, each as if alone; the first scores are shared."""
    if not isinstance(text, str):
        raise TypeError(f"what is corrected is a text (str), not {type(text).__name__}")
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


def words_folder(folder: Path, config: Mapping[str, Any]) -> Path:
    """The folder of the model that corrects words for this one: itself, or the package's that its config.json names."""
    if (name := config.get("words")) is None:
        return folder
    if name not in pretrained_names():
        raise ValueError(f"{folder} has its words corrected by {name!r}, which does not come with this package")
    return packaged(name)


def lexicon_file(loaded: LoadedModel) -> Path | None:
    """The lexicon beside the model that corrects words, if there is one."""
    file = words_folder(loaded.folder.path, loaded.folder.config) / LEXICON_FILE
    return file if file.is_file() else None


def reader_beside(loaded: LoadedModel) -> Reader:
    """The reader with that lexicon."""
    file = lexicon_file(loaded)
    if file is None:
        raise ValueError(f"words are corrected with a lexicon, and {loaded.folder.path} has no {LEXICON_FILE}")
    return reader_of(file, file.stat().st_mtime_ns)


def correct_words(
    loaded: LoadedModel,
    text: str,
    *,
    t: float | None,
    threshold: float = WORD_THRESHOLD,
    ignored: frozenset[str] = frozenset(),
    watch: Watch | None = None,
    reader: Reader | None = None,
) -> Corrected:
    """The text corrected word by word (`rewrite`) with the lexicon beside the model, which is asked about open doubts.

    t: what a model of a process that shuffles is told.
    reader: finds the doubts; by default one with that lexicon.
    """
    if not isinstance(text, str):
        raise TypeError(f"what is corrected is a text (str), not {type(text).__name__}")
    found = rewritings(reader or reader_beside(loaded), text, threshold, likelihoods(loaded, t, watch), ignored)
    parts, end, changes, doubts = list[str](), 0, list[Change](), list[Change]()
    for one in found:
        before, after = text[one.start : one.stop], one.text
        change = Change(one.start, before, after, one.confidence, 1 - one.own, candidates=one.candidates)
        (changes if one.made else doubts).append(change)
        if one.made:
            parts += [text[end : one.start], after]
            end = one.stop
    return Corrected("".join([*parts, text[end:]]), text, changes, doubts)


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
