"""The engines of correction, by name, and a model's default engine.

`letters` (`cedd.tasks.correct`) replaces tokens by the model's posterior. Applications register others: importing
`cedd.apps.correct` adds `words`. This module does not import torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from cedd.models.locate import LEXICON_FILE
from cedd.names import suggestion
from cedd.spelling.changes import Corrected, Watch
from cedd.storage import JSONMapping

if TYPE_CHECKING:
    from cedd.models.loaded_model import LoadedModel

ENGINE_NAMES = ("words", "letters")


class Engine(Protocol):
    """Corrects a text with a model."""

    def __call__(
        self, loaded: LoadedModel, text: str, *, seed: int | None = None, watch: Watch | None = None, **options: Any
    ) -> Corrected:
        """The corrected text. Options that are None have their defaults; unknown options raise a ValueError."""
        ...


ENGINES: dict[str, Engine] = {}


def default_engine(folder: Path, config: JSONMapping) -> str:
    """`words` for a model folder that has a lexicon, or whose config.json names the packaged model that has one;
    otherwise `letters`."""
    return "words" if config.get("words") is not None or (folder / LEXICON_FILE).is_file() else "letters"


def get_engine(name: str) -> Engine:
    """An engine by name."""
    if name in ENGINES:
        return ENGINES[name]
    if name in ENGINE_NAMES:
        raise ValueError(f"the engine {name!r} is not registered; import cedd or cedd.apps.correct")
    raise ValueError(
        f"invalid engine: {name!r} (choose from {', '.join(ENGINE_NAMES)}){suggestion(name, ENGINE_NAMES)}"
    )


def check_options(engine: str, given: JSONMapping, known: frozenset[str], other: frozenset[str]) -> None:
    """Refuse options of the other engine by name."""
    (other_engine,) = (name for name in ENGINE_NAMES if name != engine)
    for name, value in given.items():
        if value is not None and name in other - known:
            raise ValueError(f"{name} is an option of the engine {other_engine!r}; use engine={other_engine!r}")
