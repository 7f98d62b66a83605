"""Correction of a text with a lexicon and, if that is undecided, a network. This module does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from cedd.apps.correct.decisions import Scores, decide
from cedd.apps.correct.lexicon import LEXICON_FILE, Floats
from cedd.apps.correct.reader import Reader, reader_of
from cedd.apps.correct.suspects import WORD_THRESHOLD
from cedd.apps.correct.words import tokens_of
from cedd.data.text import check_text
from cedd.models.locate import packaged, pretrained_names
from cedd.spelling.changes import Change, Corrected


def words_folder(folder: Path, config: Mapping[str, Any]) -> Path:
    """The folder of the model that corrects words for this one: itself, or the packaged model that its config.json
    names."""
    if (name := config.get("words")) is None:
        return folder
    if name not in pretrained_names():
        raise ValueError(f"{folder} names {name!r} as its corrector of words, which is not a packaged model")
    return packaged(name)


def lexicon_in(folder: Path) -> Path | None:
    """The lexicon in a model's folder, if there is one."""
    file = folder / LEXICON_FILE
    return file if file.is_file() else None


def reader_in(folder: Path) -> Reader:
    """The reader with that lexicon."""
    file = lexicon_in(folder)
    if file is None:
        raise ValueError(f"the engine 'words' needs a lexicon: there is no {LEXICON_FILE} in {folder}")
    return reader_of(file, file.stat().st_mtime_ns)


class LazyScores:
    """Scores by a network that is loaded at the first call: a short text may not need it.

    Args:
        make: loads it.
    """

    def __init__(self, make: Callable[[], Scores]) -> None:
        self.make = make
        self._scores: Scores | None = None

    def __call__(self, text: str, replacements: Sequence[tuple[int, int, str]]) -> Floats:
        if self._scores is None:
            self._scores = self.make()
        return self._scores(text, replacements)


def word_by_word(
    reader: Reader,
    text: str,
    scores: Scores | None,
    *,
    threshold: float | None = None,
    ignored: Collection[str] = (),
) -> Corrected:
    """Correct a text.

    Args:
        reader: finds suspicious words.
        text: the text.
        scores: the network's log-likelihoods for undecided words; None decides without a network.
        threshold: a change is made if p_keep / (p_keep + p_best) is below this.
        ignored: words that are correct; so are the parts of those with a hyphen.
    """
    check_text(text, "the text to correct")
    if isinstance(ignored, str):
        raise TypeError("ignored words must be a list of texts, not a single text")
    threshold = WORD_THRESHOLD if threshold is None else threshold
    if not 0 <= threshold <= 1:
        raise ValueError(f"threshold must be in [0, 1] (got {threshold:g})")
    keys = frozenset(token.key for word in ignored for token in tokens_of(word) if token.key[0].isalpha())
    parts, end, changes, suspicious = list[str](), 0, list[Change](), list[Change]()
    for one in decide(reader, text, threshold, scores, keys):
        before, after = text[one.start : one.stop], one.text
        change = Change(one.start, before, after, one.confidence, 1 - one.p_keep, candidates=one.candidates)
        (changes if one.accepted else suspicious).append(change)
        if one.accepted:
            parts += [text[end : one.start], after]
            end = one.stop
    return Corrected("".join([*parts, text[end:]]), text, changes, suspicious)
