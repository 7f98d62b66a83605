"""Text with its mistakes corrected; `cedd.spelling` has how that is done."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

from cedd.models.folder import load_folder, read_description
from cedd.models.loaded import LoadedModel
from cedd.spelling.correct import Change, Corrected, correct_words, corrections, lexicon_file, words_folder
from cedd.spelling.options import CorrectionOptions, correction_options
from cedd.spelling.rewrite import Reader
from cedd.spelling.scores import Watch

OF_WORDS = {"change", "threshold"}
"""The options of `CorrectionOptions` that also a correction word by word has."""


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
        t = correction_options(judge, {"t": options.get("t")}).t if judge.process.can_shuffle else None
        given = {"threshold": options["threshold"]} if options.get("threshold") is not None else {}
        ignored = frozenset(word.lower().replace("’", "'") for word in ignored_words)
        return correct_words(judge, text, t=t, ignored=ignored, watch=watch, reader=reader, **given)
    asked = correction_options(loaded, options)
    if ignored_words:
        raise ValueError("only a correction word by word can ignore words (change='words')")
    (corrected,) = corrections(loaded, text, [asked], seed, watch)
    return corrected


def by_words(loaded: LoadedModel, options: Mapping[str, Any]) -> bool:
    """Whether a text is corrected word by word."""
    return may_be_by_words(options) and (options.get("change") == "words" or lexicon_file(loaded) is not None)


def may_be_by_words(options: Mapping[str, Any]) -> bool:
    """Whether no option asks for a correction token by token."""
    given = {name for name, value in options.items() if value is not None}
    return options["change"] == "words" if "change" in given else not given - OF_WORDS


def corrector_folder(folder: Path, options: Mapping[str, Any]) -> Path:
    """The folder of the model that corrects a text so, for the one in this folder: the only one that need be loaded."""
    return words_folder(folder, read_description(folder)) if may_be_by_words(options) else folder


def judge_of_words(loaded: LoadedModel) -> LoadedModel:
    """The model that is asked which word was meant: this one, or the package's that its folder names."""
    folder = words_folder(loaded.folder.path, loaded.folder.config)
    return loaded if folder == loaded.folder.path else _judge(folder, str(loaded.device))


@lru_cache(maxsize=1)
def _judge(folder: Path, device: str) -> LoadedModel:
    return LoadedModel(load_folder(folder, device), device)


def correction_record(corrected: Corrected, suggest: int | None = None) -> dict[str, Any]:
    """A correction as JSON; with suggestions, so many candidates for each change, and also the doubts."""

    def shown(change: Change) -> dict[str, Any]:
        record = {**asdict(change), "span": change.span, "corrected_span": change.corrected_span}
        candidates = [{"text": text, "probability": p} for text, p in record.pop("candidates")[:suggest]]
        return {**record, "candidates": candidates} if suggest else record

    result: dict[str, Any] = {"text": corrected.text, "original": corrected.original}
    result["changes"] = [shown(change) for change in corrected.changes]
    return {**result, "doubts": [shown(change) for change in corrected.doubts]} if suggest else result
