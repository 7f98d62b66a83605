"""What commands are given: a model (by default the one that comes with the package), a text, and common options."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cedd.cli import UserError
from cedd.models.locate import is_model, locate, packaged, pretrained_names

WRITER, CORRECTOR = "english", "english-char"
"""The models that write and that correct where a command names none: the package's (`packaged`), not folders of these
names where the user happens to be."""


def model_and_text(words: Sequence[str], usual: str) -> tuple[str | Path, str | None]:
    """The model and the text of a command line that says [RUN] TEXT; the package's `usual` one where none is named.

    Of two words the first is the model. A single word is the text, unless it is a model's: then the text is missing.
    An empty one is an empty text, not the folder that one is in.
    """
    if len(words) > 2:
        raise UserError(f"put the text in quotes: got {len(words)} words, which are more than a RUN and a text")
    if len(words) == 2:
        try:
            return locate(words[0]), words[1]
        except ValueError as error:
            raise UserError(f"{error} (a text of several words is put in quotes)") from None
    if words and words[0] and (words[0] in pretrained_names() or is_model(words[0])):
        return words[0], None
    return packaged(usual), (words[0] if words else None)
