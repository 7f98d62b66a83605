"""Uploading a model to the hub by huggingface_hub's mixin, which is slow to import and needed only here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from huggingface_hub import ModelHubMixin


class HubModel(ModelHubMixin, library_name="cedd"):
    """A model in the form that huggingface_hub expects: an object that can be saved to a folder.

    The folder is written by cedd, including config.json, safetensors and card, so that the mixin adds nothing.

    Args:
        save: writes the model into a folder.
    """

    def __init__(self, save: Callable[[Path], None]) -> None:
        self.save = save

    def _save_pretrained(self, save_directory: Path) -> None:
        self.save(save_directory)


def upload(save: Callable[[Path], None], name: str, **options: Any) -> str:
    """Upload what `save` writes to owner/name. Failures of the upload are a `ValueError` with advice."""
    try:
        return HubModel(save).push_to_hub(name, **options)
    except (TypeError, ValueError):  # invalid arguments, with messages that explain them
        raise
    except Exception as error:  # no network, no token or no permission: each raises another error
        raise ValueError(
            f"{name} could not be uploaded to the hub ({type(error).__name__}); check the network "
            "connection and that you are logged in with a token that can write (hf auth login)"
        ) from error
