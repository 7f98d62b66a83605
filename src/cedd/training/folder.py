"""A model folder: config.json, model.safetensors and the tokenizer's files. Nothing in it is ever unpickled or run.

A run's folder is one too, so that whatever takes a model takes a run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from cedd.data.storage import atomic_write
from cedd.data.tokenizers import Tokenizer, load_tokenizer
from cedd.models.transformer import Transformer, TransformerConfig
from cedd.models.weights import load_weights, save_weights
from cedd.objectives.methods import Method, get_method
from cedd.process import TokenProcess, process_from_config

FORMAT = 1
CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"


@dataclass(frozen=True)
class ModelFolder:
    """A trained network with all that gives its output a meaning."""

    model: Transformer
    process: TokenProcess
    method: Method
    tokenizer: Tokenizer
    length: int
    config: Mapping[str, Any]
    path: Path


def save_description(
    path: str | Path,
    *,
    network: TransformerConfig,
    process: TokenProcess,
    method: Method,
    tokenizer: Tokenizer,
    length: int,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Everything of a model folder but its weights."""
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(folder)
    config = {
        "format": FORMAT,
        "method": method.name,
        "process": process.config(),
        "network": asdict(network),
        "length": length,
        "tokenizer": {"name": tokenizer.name, "fingerprint": tokenizer.fingerprint},
        **(extra or {}),
    }
    atomic_write(folder / CONFIG_FILE, json.dumps(config, indent=2).encode() + b"\n")


def save_folder(
    path: str | Path,
    *,
    model: Transformer,
    process: TokenProcess,
    method: Method,
    tokenizer: Tokenizer,
    length: int,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write a model folder; its weights last, since a folder without weights is refused when loaded."""
    save_description(
        path,
        network=model.config,
        process=process,
        method=method,
        tokenizer=tokenizer,
        length=length,
        extra=extra,
    )
    save_weights(Path(path) / WEIGHTS_FILE, model.state_dict())


def read_description(path: str | Path) -> dict[str, Any]:
    """config.json of a model folder, with one-line errors."""
    folder = Path(path)
    file = folder / CONFIG_FILE
    if not file.is_file():
        near = _nearby_folders(folder)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"no run at {folder}{hint}")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise ValueError(f"{file} does not describe a model of format {FORMAT}")
    return config


def _nearby_folders(folder: Path) -> list[Path]:
    import difflib

    parent = folder.parent if folder.parent.is_dir() else Path()
    runs = {p.name: p for p in parent.iterdir() if (p / CONFIG_FILE).is_file()}
    return [runs[name] for name in difflib.get_close_matches(folder.name, runs, n=1, cutoff=0.5)]


def load_folder(path: str | Path, device: str | torch.device = "cpu") -> ModelFolder:
    """The model in a folder, in evaluation mode."""
    folder = Path(path)
    config = read_description(folder)
    weights = folder / WEIGHTS_FILE
    if not weights.is_file():
        raise ValueError(f"{folder} has no weights yet ({WEIGHTS_FILE}); train it first")
    tokenizer = load_tokenizer(folder)
    if tokenizer.fingerprint != config["tokenizer"]["fingerprint"]:
        raise ValueError(f"the tokenizer in {folder} is not the one the model was trained with")
    process = process_from_config(config["process"])
    model = Transformer(TransformerConfig(**config["network"]))
    load_weights(model, weights)
    model = model.to(device).eval().requires_grad_(False)
    return ModelFolder(model, process, get_method(config["method"]), tokenizer, config["length"], config, folder)
