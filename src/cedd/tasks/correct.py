"""Text with its mistakes corrected; `cedd.spelling` has how that is done."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

from cedd.models.loaded import LoadedModel
from cedd.spelling.correct import Change, Corrected, correct_words, corrections, lexicon_file
from cedd.spelling.options import correction_options
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
    a lexicon beside it corrects word by word, unless an option of the correction token by token is given. Text of any
    length is read in overlapping windows. Characters that the tokenizer does not know are left as they are. `watch` is
    called with how much the network has read. `ignored_words` are never changed. `reader` finds the doubtful words, in
    the place of one with the model's lexicon.
    """
    asked = correction_options(loaded, options)
    if by_words(loaded, options):
        given = {"threshold": options["threshold"]} if options.get("threshold") is not None else {}
        assert asked.t is not None
        ignored = frozenset(word.lower().replace("’", "'") for word in ignored_words)
        return correct_words(loaded, text, t=asked.t, ignored=ignored, watch=watch, reader=reader, **given)
    if ignored_words:
        raise ValueError("only a correction word by word can ignore words (change='words')")
    (corrected,) = corrections(loaded, text, [asked], seed, watch)
    return corrected


def by_words(loaded: LoadedModel, options: Mapping[str, Any]) -> bool:
    """Whether a text is corrected word by word."""
    given = {name for name, value in options.items() if value is not None}
    if options.get("change") is not None:
        return options["change"] == "words"
    return not given - OF_WORDS and lexicon_file(loaded) is not None


def correction_record(corrected: Corrected, suggest: int | None = None) -> dict[str, Any]:
    """A correction as JSON; with suggestions, so many candidates for each change, and also the doubts."""

    def shown(change: Change) -> dict[str, Any]:
        record = {**asdict(change), "span": change.span, "corrected_span": change.corrected_span}
        candidates = [{"text": text, "probability": p} for text, p in record.pop("candidates")[:suggest]]
        return {**record, "candidates": candidates} if suggest else record

    result: dict[str, Any] = {"text": corrected.text, "original": corrected.original}
    result["changes"] = [shown(change) for change in corrected.changes]
    return {**result, "doubts": [shown(change) for change in corrected.doubts]} if suggest else result
