"""The engine `words`: a text is corrected with the lexicon of a model, and with the model itself."""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from pathlib import Path
from typing import Any

from cedd.apps.correct.decisions import Scores
from cedd.apps.correct.likelihood import likelihoods
from cedd.apps.correct.reader import Reader
from cedd.apps.correct.word_by_word import lexicon_in, reader_in, word_by_word, words_folder
from cedd.models.folder import load_folder, read_description
from cedd.models.loaded_model import LoadedModel
from cedd.spelling.changes import Corrected, Watch
from cedd.spelling.engines import check_options, default_engine
from cedd.spelling.options import LETTER_OPTIONS, WORD_OPTIONS, correction_options


def correct_words(
    loaded: LoadedModel,
    text: str,
    *,
    threshold: float | None = None,
    ignored_words: Collection[str] = (),
    seed: int | None = None,
    watch: Watch | None = None,
    reader: Reader | None = None,
    scores: Scores | None = None,
    **others: Any,
) -> Corrected:
    """Correct words of a text.

    Args:
        loaded: a model with a lexicon, or whose config.json names the packaged model that has one.
        text: the text.
        threshold: a word is replaced if p_keep / (p_keep + p_best) is below this.
        ignored_words: words that are never changed.
        seed: not used: the result is deterministic.
        watch: called with the share of the candidates that the network has read since the last call.
        reader: finds the suspicious words; by default the one with the model's lexicon.
        scores: scores candidates; by default with the model's network.
        others: options of other engines; they are errors.
    """
    del seed
    check_options("words", others, WORD_OPTIONS, LETTER_OPTIONS)
    if unknown := [name for name in others if name not in LETTER_OPTIONS]:
        raise ValueError(f"unexpected option {unknown[0]!r}; the engine 'words' has {', '.join(sorted(WORD_OPTIONS))}")
    judge = judge_of_words(loaded)
    reader, scores = reader or reader_for(judge), scores or word_scores(judge, watch)
    return word_by_word(reader, text, scores, threshold=threshold, ignored=ignored_words)


def lexicon_file(loaded: LoadedModel) -> Path | None:
    """The lexicon with which a model corrects words, if there is one."""
    return lexicon_in(words_folder(loaded.folder.path, loaded.folder.config))


def reader_for(loaded: LoadedModel) -> Reader:
    """The reader with that lexicon."""
    return reader_in(words_folder(loaded.folder.path, loaded.folder.config))


def corrector_folder(folder: Path, engine: str | None = None) -> Path:
    """The folder of the model that corrects for the one in this folder: the only one that has to be loaded."""
    config = read_description(folder)
    return words_folder(folder, config) if (engine or default_engine(folder, config)) == "words" else folder


def word_scores(judge: LoadedModel, watch: Watch | None = None, **masked: Any) -> Scores:
    """The log-likelihoods that a model gives to candidates, read at the time of its folder's correction options.

    masked: `network` and `known` of `likelihoods`.
    """
    time = correction_options(judge, {}).t if judge.process.can_shuffle else None
    return likelihoods(judge, time, watch, **masked)


def judge_of_words(loaded: LoadedModel) -> LoadedModel:
    """The model that judges candidates: this one, or the packaged one that its folder names."""
    folder = words_folder(loaded.folder.path, loaded.folder.config)
    return loaded if folder == loaded.folder.path else _judge(folder, str(loaded.device))


@lru_cache(maxsize=1)
def _judge(folder: Path, device: str) -> LoadedModel:
    return LoadedModel(load_folder(folder, device), device)
