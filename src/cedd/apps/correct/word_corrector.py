"""A corrector of English words that does not import torch."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from pathlib import Path

from cedd.apps.correct.left_to_right import load_left_to_right, reads_without_torch
from cedd.apps.correct.word_by_word import LazyScores, lexicon_in, reader_in, word_by_word, words_folder
from cedd.data.text import check_text
from cedd.models.description import read_description
from cedd.models.locate import locate
from cedd.spelling.changes import Corrected

DEFAULT = "english"


class WordCorrector:
    """Corrects English words with a lexicon and, if that is undecided, a network in NumPy.

    It starts in a fraction of the time and the memory of `cedd.load(...).correct`, with the same results. The network
    is loaded when it is first needed.

    Args:
        model: a packaged model, or the folder (or owner/name on the hub) of a masked transformer with a lexicon.
    """

    def __init__(self, model: str | Path = DEFAULT) -> None:
        folder = locate(model)
        folder = words_folder(folder, read_description(folder))
        if not can_correct(folder):
            raise ValueError(f"{model} is not a masked transformer with a lexicon; use cedd.load(model).correct")
        self.reader, self.scores = reader_in(folder), LazyScores(partial(load_left_to_right, folder))

    def correct(
        self,
        text: str,
        *,
        threshold: float | None = None,
        ignored_words: Collection[str] = (),
        syntax: str | None = None,
    ) -> Corrected:
        """Correct a text.

        Args:
            text: the text.
            threshold: a word is replaced if p_keep / (p_keep + p_best) is below this.
            ignored_words: words that are never changed.
            syntax: markup or programming language, such as markdown or python (`prose.syntax_of`); only the prose is
                corrected. None is plain text.
        """
        check_text(text, "the text to correct")
        correct = partial(word_by_word, self.reader, scores=self.scores, threshold=threshold)
        if syntax is None and "cedd: ignore" not in text:
            return correct(text, ignored=ignored_words)
        from cedd.apps.correct.prose import identifiers, mask, mask_ignored, restored  # compiles 30 patterns

        masked = mask(text, syntax)
        names = frozenset[str]() if syntax is None else identifiers(text, masked)
        return restored(text, correct(mask_ignored(masked, text), ignored=names.union(ignored_words)), syntax)


def can_correct(folder: Path) -> bool:
    """Whether the model in a folder has a lexicon and a network that NumPy reads."""
    return lexicon_in(folder) is not None and reads_without_torch(read_description(folder))
