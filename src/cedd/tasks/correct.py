"""Text with its mistakes corrected; `cedd.spelling` has how that is done."""

from __future__ import annotations

from typing import Any

from cedd.models.loaded import Setting
from cedd.spelling.correct import Corrected, correction_options, corrections
from cedd.spelling.scores import Watch


def correct(
    setting: Setting, text: str, *, seed: int | None = None, watch: Watch | None = None, **options: Any
) -> Corrected:
    """The text with its mistakes put right; options are the fields of `CorrectionOptions`.

    What the caller does not give (or gives as None), the model's folder may say, and else the class does. Text of any
    length is read in overlapping windows. Characters the tokenizer does not know are left as they are. `watch` is told
    how far the network has read (see `Readings`).
    """
    (corrected,) = corrections(setting, text, [correction_options(setting, options)], seed, watch)
    return corrected
