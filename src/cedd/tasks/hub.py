"""The hub's side of a language model: huggingface_hub's mixin, imported only where the hub is asked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import ModelHubMixin

if TYPE_CHECKING:
    from cedd.tasks.language_model import LanguageModel


class HubModel(ModelHubMixin, library_name="cedd"):
    """A language model as the hub's own code wants it: something that can be saved into a folder.

    The folder is ours, config.json, safetensors and card included, so that the mixin adds nothing of its own.
    """

    def __init__(self, model: LanguageModel) -> None:
        self.model = model

    def _save_pretrained(self, save_directory: Path) -> None:
        self.model.save_pretrained(save_directory)
