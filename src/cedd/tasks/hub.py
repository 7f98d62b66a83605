"""Uploading a model to the hub, by huggingface_hub's mixin; that library is slow to import, and only this needs it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from huggingface_hub import ModelHubMixin


class HubModel(ModelHubMixin, library_name="cedd"):
    """A model as the hub's own code wants it: something that can be saved into a folder.

    The folder is ours, config.json, safetensors and card included, so that the mixin adds nothing of its own.

    Args:
        save: writes the model into a folder.
    """

    def __init__(self, save: Callable[[Path], None]) -> None:
        self.save = save

    def _save_pretrained(self, save_directory: Path) -> None:
        self.save(save_directory)


def upload(save: Callable[[Path], None], name: str, **options: Any) -> str:
    """Upload what `save` writes to owner/name; what fails on the way is a `ValueError` that says what to look at."""
    try:
        return HubModel(save).push_to_hub(name, **options)
    except (TypeError, ValueError):  # what was asked is wrong, and they say how
        raise
    except Exception as error:  # no network, no token, no right to: each is another one
        raise ValueError(
            f"{name} could not be sent to the hub ({type(error).__name__}); is there a network, and are you logged "
            "in with a token that may write (hf auth login)?"
        ) from error
