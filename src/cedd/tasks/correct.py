"""Correction of a text with one of the registered engines, and the engine `letters`."""

from __future__ import annotations

from typing import Any

from cedd.models.loaded_model import LoadedModel
from cedd.spelling.changes import Corrected, Watch
from cedd.spelling.changes import correction_record as correction_record
from cedd.spelling.correct import corrections
from cedd.spelling.engines import ENGINES, check_options, default_engine, get_engine
from cedd.spelling.options import LETTER_OPTIONS, WORD_OPTIONS, correction_options


def correct(
    loaded: LoadedModel,
    text: str,
    *,
    engine: str | None = None,
    seed: int | None = None,
    watch: Watch | None = None,
    **options: Any,
) -> Corrected:
    """Correct a text of any length.

    Args:
        loaded: the model.
        text: the text to correct.
        engine: "words" or "letters"; by default "words" if the model has a lexicon (`default_engine`).
        seed: for sampling in several steps (`letters`).
        watch: called with the share of the text that the network has read.
        options: options of the engine; None means the default. Options of the other engine are refused.
    """
    name = engine or default_engine(loaded.folder.path, loaded.folder.config)
    return get_engine(name)(loaded, text, seed=seed, watch=watch, **options)


def correct_letters(
    loaded: LoadedModel, text: str, *, seed: int | None = None, watch: Watch | None = None, **options: Any
) -> Corrected:
    """The engine `letters`: tokens are replaced by the model's posterior; options are those of `CorrectionOptions`."""
    check_options("letters", options, LETTER_OPTIONS, WORD_OPTIONS)
    (corrected,) = corrections(loaded, text, [correction_options(loaded, options)], seed, watch)
    return corrected


ENGINES["letters"] = correct_letters
