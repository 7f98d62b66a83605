"""The description of a model folder, config.json, and checks of the files that must match it. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from cedd.data.tokenizers import Tokenizer, load_tokenizer
from cedd.models.locate import CONFIG_FILE, WEIGHTS_FILE
from cedd.models.numpy_weights import CHECKSUM, read_metadata
from cedd.models.transformer_config import wrap_of
from cedd.storage import JSONMapping, JSONObject, json_sha256, read_json, reading

FORMAT = 1
CONFIG_SHA256 = "config_sha256"
"""The key, in the metadata of a weights file or in config.json, of the fingerprints of descriptions that match the
weights."""
FINGERPRINTED = ("format", "method", "process", "architecture", "network", "length", "tokenizer")
DESCRIPTION_KEYS = (*FINGERPRINTED, "weights", CHECKSUM, CONFIG_SHA256)
"""The keys of config.json that describe the model and its file; all others are kept when the model is saved again."""


def read_description(path: str | Path) -> JSONObject:
    """config.json of a model folder, with one-line errors."""
    file = Path(path) / CONFIG_FILE
    if not file.is_file():
        raise ValueError(f"no run at {path}: it has no {CONFIG_FILE}")
    config = read_json(file)
    if "format" not in config and {"model_type", "architectures", "graph"} & config.keys():
        raise ValueError(f"{file} describes a published network; import it with cedd import")
    if config.get("format") != FORMAT:
        raise ValueError(f"{file} does not describe a model of format {FORMAT}")
    return config


def fingerprint(config: JSONMapping) -> str:
    """The hash of the parts of config.json that determine what the weights compute."""
    return json_sha256({**{name: config[name] for name in FINGERPRINTED}, "wrap": wrap_of(config)})


def own_tokenizer(folder: Path, config: JSONMapping) -> Tokenizer:
    """The tokenizer in a folder that has weights, which must be the one that the model was trained with."""
    if not (folder / WEIGHTS_FILE).is_file():
        raise ValueError(f"{folder} has no weights yet ({WEIGHTS_FILE}); train it first")
    tokenizer = load_tokenizer(folder)
    with reading(folder / CONFIG_FILE):
        if tokenizer.fingerprint != config["tokenizer"]["fingerprint"]:
            raise ValueError(f"the tokenizer in {folder} is not the one the model was trained with")
    return tokenizer


def stored_form(folder: Path, config: JSONMapping) -> str:
    """The form in which the weights in a folder are stored; raises a ValueError if config.json does not match the
    weights. The fingerprints of matching descriptions are in the metadata of the weights file, or in config.json
    itself. Weights written by other programs have no fingerprints and are not checked.
    """
    weights = folder / WEIGHTS_FILE
    metadata = read_metadata(weights)
    recorded = config.get(CONFIG_SHA256, metadata.get(CONFIG_SHA256))
    with reading(folder / CONFIG_FILE):
        found = fingerprint(config)
    if recorded is not None and found not in str(recorded).split():
        raise ValueError(
            f"{folder / CONFIG_FILE} does not describe the model in {WEIGHTS_FILE}: it was edited, or belongs to "
            "another model; restore it, or write the model again (cedd export; for a run, resume cedd train)"
        )
    return str(metadata.get("form", config.get("weights", "float32")))
