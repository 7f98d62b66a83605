"""A model folder: config.json, model.safetensors and the tokenizer's files. Nothing in it is ever unpickled or run.

A run's folder is one too, so that a run can be given wherever a model is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from cedd.data.tokenizers import Tokenizer
from cedd.methods import Method, method_from_config
from cedd.models.description import DESCRIPTION_KEYS as DESCRIPTION_KEYS
from cedd.models.description import FORMAT, fingerprint, own_tokenizer, stored_form
from cedd.models.description import read_description as read_description
from cedd.models.locate import CONFIG_FILE, TRAIN_FILE, WEIGHTS_FILE, is_model, locate, pretrained_root
from cedd.models.options import wrap_of
from cedd.models.stored import CHECKSUM
from cedd.models.transformer import Transformer, TransformerConfig
from cedd.models.weights import SkipInitialization, get_form, load_weights, save_weights
from cedd.process import TokenProcess, process_from_config
from cedd.storage import (
    atomic_files,
    expanded,
    from_json,
    is_temporary,
    json_sha256,
    locked,
    reading,
    write_json,
)


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
    def wrap(self) -> str:
        """What its blocks stood between when it was trained (see `wrap_of`)."""
        return wrap_of(self.config)

    @property
    def weights(self) -> str:
        """The form its weights are stored in; float32 by default, as in a run."""
        return self.config.get("weights", "float32")


def save_description(path: str | Path, model: ModelFolder, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Everything of a model folder but its weights; what its config.json says."""
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
    return config


def save_folder(
    path: str | Path, model: ModelFolder, weights: str = "float32", extra: Mapping[str, Any] | None = None
) -> None:
    """Write a model folder, its weights in one of `models.weights.FORMS`; an earlier model's files go when all new ones
    are complete.

    The weights say themselves how they are stored and by what description they are to be read. So a kill between two
    renames leaves a folder that loads, where the two models differ in the weights' form alone, or is refused.
    """
    get_form(weights)
    with atomic_files(Path(path), last=WEIGHTS_FILE) as folder:
        config = save_description(folder, model, {**(extra or {}), "weights": weights})
        metadata = {"form": weights, "description": fingerprint(config)}
        save_weights(folder / WEIGHTS_FILE, model.model.state_dict(), form=weights, metadata=metadata)


@contextmanager
def replaced_model(path: str | Path, own: Path | None, force: bool = False) -> Iterator[Path]:
    """Yield a temporary folder for the files of a model, which then replace those at `path`.

    own: the folder that the model was loaded from, if it was. A model is written into a new or an empty folder, over
    itself, or over what was written from the same folder before; over anything else only by `force`. A run's folder
    then is a run no more: its weights are not those it trained.
    """
    folder = expanded(path)
    refuse_occupied(folder, own, force)
    with ExitStack() as stack:
        if folder.is_dir() and stack.enter_context(locked(folder, wait=False)) is False:
            raise ValueError(f"another process is training in {folder}; wait for it, or choose another folder")
        yield stack.enter_context(atomic_files(folder, last=WEIGHTS_FILE))
        (folder / TRAIN_FILE).unlink(missing_ok=True)


def origin_of(path: Path) -> str:
    """The folder that a model was loaded from, as a hash: config.json of what is written from there has it, and tells
    nobody the folder's name."""
    return json_sha256(str(path.resolve()))


def refuse_occupied(folder: Path, own: Path | None, force: bool) -> None:
    """A folder that holds something else is left alone, unless by `force`; a run's own folder always."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file; choose another name")
    is_run = (folder / TRAIN_FILE).is_file()
    if own is not None and folder.samefile(own):
        if is_run:
            raise ValueError(f"{folder} is a run that may still be trained; export it to another folder")
        return
    if force or all(is_temporary(entry) for entry in folder.iterdir()):
        return
    if own is not None and not is_run and is_model(folder) and read_description(folder).get("origin") == origin_of(own):
        return
    what = "another run" if is_run else "another model" if is_model(folder) else "files that are no model"
    raise ValueError(f"{folder} holds {what}; choose another folder, or write over it with --force (force=True)")


def load_folder(path_or_name: str | Path, device: str | torch.device = "cpu", **download: Any) -> ModelFolder:
    """The model in a folder, in evaluation mode; see `locate` for what else may name it."""
    folder = locate(path_or_name, **download)
    config, weights = read_description(folder), folder / WEIGHTS_FILE
    tokenizer = own_tokenizer(folder, config)
    with reading(folder / CONFIG_FILE):
        # The floor of sigma belongs to the method; models of before kept it with their process.
        record = dict(config["process"])
        method = method_from_config(config["method"], record.pop("sigma_floor", None))
        process = process_from_config(record)
        network = from_json(TransformerConfig, config["network"], "network")
        length = config["length"]
        get_form(config.get("weights", "float32"))
        _check_sizes(network, process, tokenizer, length, weights.stat().st_size)
        for kind in ("sampling", "correction"):
            if not isinstance(config.get(kind, {}), dict):
                raise ValueError(f"{kind} must be options with their values; got {config[kind]!r}")
    with SkipInitialization():
        model = Transformer(network)
    form = stored_form(folder, config)
    load_weights(model, weights, form=form, checksum=config.get(CHECKSUM))
    model = model.to(device).eval().requires_grad_(False)
    return ModelFolder(model, process, method, tokenizer, length, {**config, "weights": form}, folder)


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
