"""What a model folder says of its model, without torch: config.json, and what belongs to it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cedd.data.tokenizers import Tokenizer, load_tokenizer
from cedd.models.locate import CONFIG_FILE, WEIGHTS_FILE
from cedd.models.stored import CHECKSUM, read_metadata
from cedd.storage import json_sha256, read_json, reading

FORMAT = 1
FINGERPRINTED = ("format", "method", "process", "network", "length", "tokenizer")
DESCRIPTION_KEYS = (*FINGERPRINTED, "weights", CHECKSUM)
"""The keys of config.json that describe the model and its file; all others are kept when the model is saved again."""


def read_description(path: str | Path) -> dict[str, Any]:
    """config.json of a model folder, with one-line errors."""
    file = Path(path) / CONFIG_FILE
    if not file.is_file():
        raise ValueError(f"there is no run at {path}: it has no {CONFIG_FILE}")
    config = read_json(file)
    if config.get("format") != FORMAT:
        raise ValueError(f"{file} does not describe a model of format {FORMAT}")
    return config


def fingerprint(config: Mapping[str, Any]) -> str:
    """Of the description by which weights are read, whatever their form."""
    return json_sha256({name: config[name] for name in FINGERPRINTED})


def own_tokenizer(folder: Path, config: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer in a folder that has weights, which must be the one that the model was trained with."""
    if not (folder / WEIGHTS_FILE).is_file():
        raise ValueError(f"{folder} has no weights yet ({WEIGHTS_FILE}); train it first")
    tokenizer = load_tokenizer(folder)
    with reading(folder / CONFIG_FILE):
        if tokenizer.fingerprint != config["tokenizer"]["fingerprint"]:
            raise ValueError(f"the tokenizer in {folder} is not the one the model was trained with")
    return tokenizer


def stored_form(folder: Path, config: Mapping[str, Any]) -> str:
    """The form in which the weights in a folder are stored, which must be those of this description."""
    weights = folder / WEIGHTS_FILE
    said = read_metadata(weights)
    if said.get("description", of_config := fingerprint(config)) != of_config:
        raise ValueError(f"{weights} are the weights of another model than {CONFIG_FILE} describes; write it again")
    return str(said.get("form", config.get("weights", "float32")))
