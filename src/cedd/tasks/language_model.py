"""`cedd.load(path_or_name)`: a trained model as an object with verbs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from cedd.bounds.estimator import estimate_bound
from cedd.objectives import Method
from cedd.process import TokenProcess
from cedd.tasks.correct import Corrected, correct
from cedd.tasks.generate import generate
from cedd.tasks.infill import infill
from cedd.tasks.setting import Setting, Settings, chosen_device
from cedd.training.folder import CONFIG_FILE, ModelFolder, load_folder


class Perplexity(float):
    """A perplexity with what is known of its error: exp of nats_per_token, the estimate of an upper bound (exact for
    autoregressive models)."""

    nats_per_token: float
    stderr: float
    ci95: tuple[float, float]
    tokens: int

    def __new__(cls, nats: float, stderr: float, ci95: tuple[float, float], tokens: int) -> Perplexity:
        made = super().__new__(cls, math.exp(nats))
        made.nats_per_token, made.stderr, made.ci95, made.tokens = nats, stderr, ci95, tokens
        return made


class LanguageModel:
    """A trained network with its process, method and tokenizer."""

    def __init__(self, folder: ModelFolder, device: torch.device | str = "cpu") -> None:
        self.setting = Setting(folder, torch.device(device))

    @property
    def folder(self) -> ModelFolder:
        return self.setting.folder

    @property
    def model(self) -> torch.nn.Module:
        return self.folder.model

    @property
    def process(self) -> TokenProcess:
        return self.folder.process

    @property
    def method(self) -> Method:
        return self.folder.method

    @property
    def tokenizer(self) -> Any:
        return self.folder.tokenizer

    @property
    def length(self) -> int:
        return self.folder.length

    def generate(self, n: int = 1, *, length: int | None = None, prompt: str = "", **settings: Any) -> list[str]:
        """n texts; settings are those of `Settings`: sampler, steps, temperature, top_p, seed, ..."""
        return generate(self.setting, n, length=length, prompt=prompt, settings=Settings(**settings))

    def infill(self, text: str, **settings: Any) -> str:
        """The text with its blanks (____ or ____{12}) filled."""
        return infill(self.setting, text, 1, settings=Settings(**settings))[0]

    def correct(self, text: str, **options: Any) -> Corrected:
        """The text with its mistakes put right; `.changes` says which. Options are those of `cedd.tasks.correct`: t,
        threshold, steps, temperature, seed."""
        return correct(self.setting, text, **options)

    def perplexity(self, text: str, *, draws: int = 64, seed: int = 0) -> Perplexity:
        """The perplexity of a text in tokens: the tight bound's estimate, with its Monte Carlo error.

        draws: noisy versions of each block of the text that the network is shown.
        """
        ids = torch.from_numpy(self.tokenizer.encode(text))
        if not len(ids):
            raise ValueError("an empty text has no perplexity")
        whole = len(ids) // self.length * self.length
        pieces = [part for part in (ids[:whole].view(-1, self.length), ids[whole:][None]) if part.numel()]
        nats = variance = 0.0
        for part in pieces:
            estimate = estimate_bound(
                self.model,
                self.process,
                part.to(self.setting.device),
                method=self.method,
                draws=draws,
                generator=torch.Generator().manual_seed(seed),
            )
            share = part.numel() / len(ids)
            nats += share * float(estimate.nats_per_token)
            variance += (share * float(estimate.stderr)) ** 2
        error = variance**0.5
        return Perplexity(nats, error, (math.exp(nats - 1.96 * error), math.exp(nats + 1.96 * error)), len(ids))

    @property
    def name(self) -> str:
        """Its method and process."""
        return f"{self.method.name} on {(self.process.spec or {}).get('name', 'a process')}"

    def __repr__(self) -> str:
        return f"LanguageModel({self.name}, V={self.process.vocab_size}, length={self.length})"


def load(path_or_name: str | Path, device: str = "auto") -> LanguageModel:
    """A model from a run's folder, or by its name on the hub (owner/name)."""
    place = chosen_device(device)
    return LanguageModel(load_folder(model_path(path_or_name), place), place)


def model_path(path_or_name: str | Path) -> Path:
    """The folder meant: a local one, or a copy of the hub's."""
    path = Path(path_or_name).expanduser()
    name = str(path_or_name)
    if path.exists() or name.count("/") != 1 or name.startswith((".", "~", "/")) or path.parent.exists():
        return path
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, allow_patterns=[CONFIG_FILE, "*.safetensors", "*.json", "merges.txt"]))
    except Exception as error:  # noqa: BLE001 - no network, no such name: each is another exception
        raise ValueError(f"there is no folder {name}, and the hub does not have it ({type(error).__name__})") from None
