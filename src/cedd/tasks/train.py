"""`cedd.train`: a training run, and its model."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from cedd.models.architectures import ARCHITECTURES, import_architecture
from cedd.storage import expanded
from cedd.tasks.language_model import LanguageModel, load
from cedd.training.config import TrainConfig
from cedd.training.loop import Hooks, run_training

if TYPE_CHECKING:
    from rich.console import Console


def train(config: TrainConfig, *, hooks: Hooks | None = None, console: Console | None = None) -> LanguageModel:
    """Start or resume a training run. Returns the model with its averaged weights, as `load` does, and with
    `training_result`.

    Args:
        config: the configuration, such as `TrainConfig.preset("tiny", data="book.txt", out="runs/book")`. An
            architecture package:Class is imported, unless the run starts from another model, which may have named it.
        hooks: an object whose methods are called during training.
        console: where messages are printed; standard error by default.
    """
    if not isinstance(config, TrainConfig):
        raise TypeError('a training run needs a TrainConfig, such as TrainConfig.preset("tiny", data=..., out=...)')
    if isinstance(config.architecture, type):
        own = config.architecture
        raise TypeError(f"architecture must be a name, here '{own.__module__}:{own.__qualname__}' (got the class)")
    if ":" in config.architecture and config.architecture not in ARCHITECTURES and config.start is None:
        import_architecture(config.architecture)
    result = run_training(config, console, hooks)
    alone = int(os.environ.get("WORLD_SIZE", "1")) == 1  # a sharded network may not fit on one device
    model = load(expanded(config.out), config.device if alone else "cpu")
    model.training_result = result
    return model
