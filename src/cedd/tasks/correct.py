"""Text with its mistakes corrected; `cedd.spelling` has how that is done."""

from __future__ import annotations

from typing import Any

from cedd.models.loaded import LoadedModel
from cedd.spelling.correct import Corrected, corrections
from cedd.spelling.options import correction_options
from cedd.spelling.scores import Watch


def correct(
    loaded: LoadedModel, text: str, *, seed: int | None = None, watch: Watch | None = None, **options: Any
) -> Corrected:
    """The text with its mistakes corrected; options are the fields of `CorrectionOptions`.

    What the caller does not give (or gives as None), the model's folder may say, and else the class does. Text of any
    length is read in overlapping windows. Characters that the tokenizer does not know are left as they are. `watch` is
    called with how much the network has read.
    """
    (corrected,) = corrections(loaded, text, [correction_options(loaded, options)], seed, watch)
    return corrected
