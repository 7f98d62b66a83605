"""Untrained models for the tests of tasks: one that corrects known letters, and small random transformers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import cedd
from cedd.data.tokenizers import CharTokenizer, Tokenizer
from cedd.models.folder import ModelFolder, save_folder
from cedd.models.loaded_model import LoadedModel
from cedd.models.transformer import Transformer, config_from_preset
from cedd.network import Capabilities

ALPHABET = "abcdefghijklmnopqrstuvwxyz .,T"


class LetterFixer(nn.Module):
    """Predicts a for q (0.9), y for z (0.6, otherwise z), and all other letters unchanged."""

    capabilities = Capabilities(features=True)
    has_mask = True

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        V = tokenizer.vocab_size
        table = torch.eye(V) * 0.98 + 0.02 / V

        def predict(token: str, predictions: dict[str, float]) -> None:
            row = int(tokenizer.encode(token)[0])
            table[row] = (1 - sum(predictions.values())) / V
            for letter, probability in predictions.items():
                table[row, int(tokenizer.encode(letter)[0])] += probability

        predict("q", {"a": 0.9})
        predict("z", {"y": 0.6, "z": 0.39})
        self.register_buffer("table", table.log())

    def features(self, x_t: Tensor, sigma: Tensor) -> Tensor:
        return x_t[..., None].float()

    def head(self, features: Tensor) -> Tensor:
        return self.get_buffer("table")[features[..., 0].long().clamp_max(len(self.get_buffer("table")) - 1)]


def fixer(process: str = "uniform", length: int = 16, tokenizer: Tokenizer | None = None) -> LoadedModel:
    chosen = tokenizer or CharTokenizer(ALPHABET)
    made = getattr(cedd, process)(chosen.vocab_size)
    model = LetterFixer(chosen)
    folder = ModelFolder(model, made, cedd.get_method("cedd"), chosen, length, {}, Path())  # pyright: ignore
    return LoadedModel(folder, torch.device("cpu"))


def save_random(
    path: Path,
    process: str = "roulette",
    method: str = "bayes",
    extra: Mapping[str, Any] | None = None,
    tokenizer: Tokenizer | None = None,
    **options: Any,
) -> Path:
    """A folder with a transformer of one layer whose outputs are random but not uniform."""
    chosen = tokenizer or CharTokenizer(ALPHABET)
    causal = method == "ar"
    torch.manual_seed(0)
    made = getattr(cedd, process)(chosen.vocab_size)
    config = config_from_preset(
        "tiny",
        vocab_size=chosen.vocab_size,
        has_mask=made.has_mask,
        dropout=0.0,
        causal=causal,
        time_conditioning=not causal,
        **{"depth": 1, **options},
    )
    model = Transformer(config)
    nn.init.normal_(model.head.weight, std=0.3)
    save_folder(path, ModelFolder(model, made, cedd.get_method(method), chosen, config.length), extra=extra)
    return path
