"""Correction word by word: by the lexicon beside a model, and by the model where that leaves a doubt open.

No torch. Where no doubt is open, or none yet, no network is needed (`AskedLater`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from cedd.apps.correct.lexicon import LEXICON_FILE, Floats
from cedd.apps.correct.rewrite import WORD_THRESHOLD, Reader, Scores, reader_of, rewritings
from cedd.apps.correct.words import tokens_of
from cedd.data.text import check_text
from cedd.models.locate import packaged, pretrained_names
from cedd.spelling.changes import Change, Corrected


def words_folder(folder: Path, config: Mapping[str, Any]) -> Path:
    """The folder of the model that corrects words for this one: itself, or the package's that its config.json names."""
    if (name := config.get("words")) is None:
        return folder
    if name not in pretrained_names():
        raise ValueError(f"{folder} has its words corrected by {name!r}, which does not come with this package")
    return packaged(name)


def lexicon_in(folder: Path) -> Path | None:
    """The lexicon in a model's folder, if there is one."""
    file = folder / LEXICON_FILE
    return file if file.is_file() else None


def reader_in(folder: Path) -> Reader:
    """The reader with that lexicon."""
    file = lexicon_in(folder)
    if file is None:
        raise ValueError(f"words are corrected with a lexicon, and {folder} has no {LEXICON_FILE}")
    return reader_of(file, file.stat().st_mtime_ns)


class AskedLater:
    """What a network says, which is made when it is first asked: a few lines may have no doubt that is open.

    Args:
        make: makes it.
    """

    def __init__(self, make: Callable[[], Scores]) -> None:
        self.make = make
        self.made: Scores | None = None

    def __call__(self, text: str, replacements: Sequence[tuple[int, int, str]]) -> Floats:
        """As what is made."""
        if self.made is None:
            self.made = self.make()
        return self.made(text, replacements)


def word_by_word(
    reader: Reader,
    text: str,
    scores: Scores | None,
    *,
    threshold: float | None = None,
    ignored: Collection[str] = (),
) -> Corrected:
    """The text corrected (`rewrite`); who scores is asked about open doubts. `ignored` words are right, and so
    are the parts of one with a hyphen."""
    check_text(text, "what is corrected")
    if isinstance(ignored, str):
        raise TypeError("words to be ignored are a list of texts: a single text would be taken for its letters")
    threshold = WORD_THRESHOLD if threshold is None else threshold
    keys = frozenset(token.key for word in ignored for token in tokens_of(word) if token.key[0].isalpha())
    parts, end, changes, doubts = list[str](), 0, list[Change](), list[Change]()
    for one in rewritings(reader, text, threshold, scores, keys):
        before, after = text[one.start : one.stop], one.text
        change = Change(one.start, before, after, one.confidence, 1 - one.own, candidates=one.candidates)
        (changes if one.made else doubts).append(change)
        if one.made:
            parts += [text[end : one.start], after]
            end = one.stop
    return Corrected("".join([*parts, text[end:]]), text, changes, doubts)
