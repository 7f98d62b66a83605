"""A model folder: config.json, model.safetensors and the tokenizer's files. Nothing in it is ever unpickled or run.

A run's folder is one too, so that a run can be given wherever a model is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from cedd.data.tokenizers import Tokenizer, load_tokenizer
from cedd.methods import Method, method_from_config
from cedd.models.locate import CONFIG_FILE, WEIGHTS_FILE, locate, pretrained_root
from cedd.models.transformer import Transformer, TransformerConfig
from cedd.models.weights import SkipInitialization, get_form, load_weights, save_weights
from cedd.process import TokenProcess, process_from_config
from cedd.storage import from_json, read_json, reading, write_json

FORMAT = 1
DESCRIPTION_KEYS = ("format", "method", "process", "network", "length", "tokenizer", "weights")
"""The keys of config.json that describe the model; all others are kept when the model is saved again."""


@dataclass(frozen=True)
class ModelFolder:
    """A trained network with its process, method and tokenizer."""

    model: Transformer
    process: TokenProcess
    method: Method
    tokenizer: Tokenizer
    length: int
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What config.json says, of one that was loaded."""
    path: Path = Path()

    @property
    def name(self) -> str:
        """Its folder; of a model that comes with the package, the folder's name."""
        return self.path.name if self.path.parent == pretrained_root() else str(self.path)

    @property
    def weights(self) -> str:
        """The form its weights are stored in; float32 by default, as in a run."""
        return self.config.get("weights", "float32")


def save_description(path: str | Path, model: ModelFolder, extra: Mapping[str, Any] | None = None) -> None:
    """Everything of a model folder but its weights."""
    folder, tokenizer = Path(path), model.tokenizer
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(folder)
    config = {
        "format": FORMAT,
        "method": model.method.config(),
        "process": model.process.config(),
        "network": asdict(model.model.config),
        "length": model.length,
        "tokenizer": {"name": tokenizer.name, "fingerprint": tokenizer.fingerprint},
        **(extra or {}),
    }
    write_json(folder / CONFIG_FILE, config, indent=2)


def save_folder(
    path: str | Path, model: ModelFolder, weights: str = "float32", extra: Mapping[str, Any] | None = None
) -> None:
    """Write a model folder, its weights in one of `models.weights.FORMS`.

    The weights come last, since a folder without weights is refused when loaded; those of an earlier model go first,
    so that they are never read by this one's description.
    """
    get_form(weights)
    file = Path(path) / WEIGHTS_FILE
    file.unlink(missing_ok=True)
    save_description(path, model, {**(extra or {}), "weights": weights})
    save_weights(file, model.model.state_dict(), form=weights)


def read_description(path: str | Path) -> dict[str, Any]:
    """config.json of a model folder, with one-line errors."""
    file = Path(path) / CONFIG_FILE
    if not file.is_file():
        raise ValueError(f"there is no run at {path}: it has no {CONFIG_FILE}")
    config = read_json(file)
    if config.get("format") != FORMAT:
        raise ValueError(f"{file} does not describe a model of format {FORMAT}")
    return config


def load_folder(path_or_name: str | Path, device: str | torch.device = "cpu", **download: Any) -> ModelFolder:
    """The model in a folder, in evaluation mode; see `locate` for what else may name it."""
    folder = locate(path_or_name, **download)
    config = read_description(folder)
    weights = folder / WEIGHTS_FILE
    if not weights.is_file():
        raise ValueError(f"{folder} has no weights yet ({WEIGHTS_FILE}); train it first")
    tokenizer = load_tokenizer(folder)
    with reading(folder / CONFIG_FILE):
        if tokenizer.fingerprint != config["tokenizer"]["fingerprint"]:
            raise ValueError(f"the tokenizer in {folder} is not the one the model was trained with")
        # The floor of sigma belongs to the method; models of before kept it with their process.
        record = dict(config["process"])
        method = method_from_config(config["method"], record.pop("sigma_floor", None))
        process = process_from_config(record)
        network = from_json(TransformerConfig, config["network"], "network")
        form, length = config.get("weights", "float32"), config["length"]
        get_form(form)
        _check_sizes(network, process, tokenizer, length, weights.stat().st_size)
    with SkipInitialization():
        model = Transformer(network)
    load_weights(model, weights, form=form)
    model = model.to(device).eval().requires_grad_(False)
    return ModelFolder(model, process, method, tokenizer, length, config, folder)


def _check_sizes(
    network: TransformerConfig, process: TokenProcess, tokenizer: Tokenizer, length: Any, stored: int
) -> None:
    """Refuse sizes that do not fit together, before a network of them is built."""
    if not network.vocab_size == process.vocab_size == tokenizer.vocab_size:
        sizes = f"{network.vocab_size}, {process.vocab_size} and {tokenizer.vocab_size} tokens"
        raise ValueError(f"network, process and tokenizer have {sizes}")
    if process.has_mask and not network.has_mask:
        raise ValueError("the process masks, but the network knows no mask")
    if not isinstance(length, int) or not 1 <= length <= network.length:
        raise ValueError(f"length must be a whole number from 1 to {network.length}, the network's; got {length!r}")
    blocks = network.depth * network.width**2 * (4 + 2 * network.mlp_ratio)
    conditioning = network.width * network.conditioning_width if network.time_conditioning else 0
    if blocks + conditioning > stored:  # a weight takes at least a byte
        raise ValueError(f"the weights are {stored:,} bytes, too few for the network that is described")
