"""Correction of English words with a lexicon, a model of misspellings and a network.

Importing this package registers the engine `words` of `LanguageModel.correct`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cedd.spelling.changes import Corrected
from cedd.spelling.engines import ENGINES

if TYPE_CHECKING:
    from cedd.models.loaded_model import LoadedModel


def correct_words(loaded: LoadedModel, text: str, **options: Any) -> Corrected:
    """The engine `words`; see `cedd.apps.correct.engine.correct_words`."""
    from cedd.apps.correct import engine  # imports torch, which a short text does without

    return engine.correct_words(loaded, text, **options)


ENGINES["words"] = correct_words
