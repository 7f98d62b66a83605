"""Text with its mistakes corrected; `cedd.spelling` has how that is done."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from cedd.models.folder import load_folder, read_description
from cedd.models.loaded import LoadedModel
from cedd.spelling.changes import Corrected
from cedd.spelling.changes import correction_record as correction_record
from cedd.spelling.correct import corrections, lexicon_file, reader_beside
from cedd.spelling.likelihood import likelihoods
from cedd.spelling.options import CorrectionOptions, correction_options, may_be_by_words
from cedd.spelling.rewrite import Reader, Scores
from cedd.spelling.scores import Watch
from cedd.spelling.word_by_word import word_by_word, words_folder


def correct(
    loaded: LoadedModel,
    text: str,
    *,
    ignored_words: Collection[str] = (),
    seed: int | None = None,
    watch: Watch | None = None,
    reader: Reader | None = None,
    **options: Any,
) -> Corrected:
    """The text with its mistakes corrected; options are the fields of `CorrectionOptions`.

    What the caller does not give (or gives as None), the model's folder may say, and else the class does. A model with
    a lexicon beside it, or whose folder names one that has it, corrects word by word, unless an option of the
    correction token by token is given. Text of any length is read in overlapping windows. Characters that the
    tokenizer does not know are left as they are. `watch` is called with how much the network has read. `ignored_words`
    are never changed. `reader` finds the doubtful words, in the place of one with the model's lexicon.
    """
    if by_words(loaded, options):
        CorrectionOptions().changed(options).check()
        judge = judge_of_words(loaded)
        scores = word_scores(judge, options.get("t"), watch)
        return word_by_word(
            reader or reader_beside(judge), text, scores, threshold=options.get("threshold"), ignored=ignored_words
        )
    asked = correction_options(loaded, options)
    if ignored_words:
        raise ValueError("only a correction word by word can ignore words (change='words')")
    (corrected,) = corrections(loaded, text, [asked], seed, watch)
    return corrected


def by_words(loaded: LoadedModel, options: Mapping[str, Any]) -> bool:
    """Whether a text is corrected word by word."""
    return may_be_by_words(options) and (options.get("change") == "words" or lexicon_file(loaded) is not None)


def corrector_folder(folder: Path, options: Mapping[str, Any]) -> Path:
    """The folder of the model that corrects a text so, for the one in this folder: the only one that need be loaded."""
    return words_folder(folder, read_description(folder)) if may_be_by_words(options) else folder


def word_scores(judge: LoadedModel, t: float | None = None, watch: Watch | None = None) -> Scores:
    """What a model says of words; t is what one of a process that shuffles is told, by default as its folder says."""
    told = correction_options(judge, {"t": t}).t if judge.process.can_shuffle else None
    return likelihoods(judge, told, watch)


def judge_of_words(loaded: LoadedModel) -> LoadedModel:
    """The model that is asked which word was meant: this one, or the package's that its folder names."""
    folder = words_folder(loaded.folder.path, loaded.folder.config)
    return loaded if folder == loaded.folder.path else _judge(folder, str(loaded.device))


@lru_cache(maxsize=1)
def _judge(folder: Path, device: str) -> LoadedModel:
    return LoadedModel(load_folder(folder, device), device)
