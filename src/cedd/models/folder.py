"""A model folder: config.json, model.safetensors and the tokenizer's files. Nothing in it is ever unpickled or run.

The folder of a training run is a model folder too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from cedd.data.tokenizers import Tokenizer
from cedd.methods import Method, get_method, method_from_config
from cedd.models.architectures import Architecture, build_network, get_architecture
from cedd.models.backbone import Backbone, ModuleBackbone, stored_tensors
from cedd.models.description import CONFIG_SHA256, FORMAT, fingerprint, own_tokenizer, stored_form
from cedd.models.description import DESCRIPTION_KEYS as DESCRIPTION_KEYS
from cedd.models.description import read_description as read_description
from cedd.models.locate import CONFIG_FILE, TRAIN_FILE, WEIGHTS_FILE, is_model, locate, pretrained_root
from cedd.models.numpy_weights import CHECKSUM
from cedd.models.transformer_config import wrap_of
from cedd.models.weights import SkipInitialization, get_form, load_weights, save_weights
from cedd.network import AnyModel
from cedd.process import TokenProcess, process_from_config
from cedd.storage import (
    JSONMapping,
    JSONObject,
    atomic_files,
    expanded,
    is_temporary,
    json_sha256,
    locked,
    reading,
    write_json,
)


@dataclass(frozen=True)
class ModelFolder:
    """A trained network with its process, method and tokenizer."""

    model: Backbone
    process: TokenProcess
    method: Method
    tokenizer: Tokenizer
    length: int
    config: JSONMapping = field(default_factory=JSONObject)
    """The content of config.json, for a model that was loaded."""
    path: Path = Path()
    original_outputs: Callable[..., Tensor] | None = None
    """(ids [B, L], **inputs) -> what the original network of an imported model returns, where that is not the
    network's own `original_logits`."""

    @property
    def name(self) -> str:
        """The path of the folder; for models in the package, the name of the folder."""
        return self.path.name if self.path.parent == pretrained_root() else str(self.path)

    def original(self, ids: Tensor, **inputs: Any) -> Tensor:
        """What the original network of an imported model returns for its own ids [B, L]."""
        # In Llama-type networks the mask is one of the V rows; in the others it is an additional row.
        rows = self.process.vocab_size if self.original_outputs is None else self.process.num_states
        if ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"ids must be integers [B, L] (got {ids.dtype} of shape {list(ids.shape)})")
        if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < rows):
            raise ValueError(f"ids must be 0 to {rows - 1} (got {int(ids.min())} to {int(ids.max())})")
        return (self.original_outputs or self.model.original_logits)(ids, **inputs)

    @property
    def wrap(self) -> str:
        """The tokens around each block in training (see `wrap_of`)."""
        return wrap_of(self.config)

    @property
    def weights(self) -> str:
        """The form its weights are stored in; float32 by default, as in a run."""
        return self.config.get("weights", "float32")


USUAL_LENGTH = 1024
"""Default length for a network without a maximum length."""


def folder_of_network(
    network: nn.Module | AnyModel,
    process: TokenProcess,
    method: str | Method,
    tokenizer: Tokenizer,
    length: int | None = None,
) -> ModelFolder:
    """A network in memory as the content of a model folder."""
    if isinstance(network, Backbone):
        model = network
    else:
        model = ModuleBackbone(cast(nn.Module, network), process.vocab_size, process.has_mask)
    chosen = get_method(method)
    chosen.check(process)
    size = length or model.capabilities.max_length or USUAL_LENGTH
    _check_sizes(model, process, tokenizer, size)
    return ModelFolder(model.eval(), process, chosen, tokenizer, size)


def description_of(model: ModelFolder, extra: JSONMapping | None = None) -> JSONObject:
    """The content of a model's config.json."""
    tokenizer = model.tokenizer
    return {
        "format": FORMAT,
        "method": model.method.config(),
        "process": model.process.config(),
        "architecture": model.model.architecture,
        "network": model.model.config(),
        "length": model.length,
        "tokenizer": {"name": tokenizer.name, "fingerprint": tokenizer.fingerprint},
        **(extra or {}),
    }


def save_description(path: str | Path, model: ModelFolder, extra: JSONMapping | None = None) -> JSONObject:
    """Write a model folder without its weights; returns the content of config.json."""
    folder, config = Path(path), description_of(model, extra)
    folder.mkdir(parents=True, exist_ok=True)
    model.tokenizer.save(folder)
    write_json(folder / CONFIG_FILE, config, indent=2)
    return config


def save_folder(
    path: str | Path, model: ModelFolder, weights: str = "float32", extra: JSONMapping | None = None
) -> None:
    """Write a model folder, with its weights in one of `models.weights.FORMS`; the files of an earlier model are
    replaced when all new ones are complete.

    The metadata of the weights file has its form and the fingerprint of its config.json. If the process is killed
    between two renames, the folder loads (if the models differ in the form of their weights only) or is refused.
    """
    get_form(weights)
    with atomic_files(Path(path), last=WEIGHTS_FILE) as folder:
        config = save_description(folder, model, {**(extra or {}), "weights": weights})
        metadata = {"form": weights, CONFIG_SHA256: fingerprint(config)}
        save_weights(folder / WEIGHTS_FILE, stored_tensors(model.model), form=weights, metadata=metadata)


@contextmanager
def replaced_model(path: str | Path, own: Path | None, force: bool = False) -> Iterator[Path]:
    """Yield a temporary folder for the files of a model, which then replace those at `path`.

    own: the folder that the model was loaded from, if any. A model may replace itself, or an earlier copy of it; other
    files only with `force`. The folder of a run is no longer a run afterwards, because its weights are not the trained
    ones.
    """
    folder = expanded(path)
    refuse_occupied(folder, own, force)
    with ExitStack() as stack:
        if folder.is_dir() and stack.enter_context(locked(folder, wait=False)) is False:
            raise ValueError(f"another process is training in {folder}; wait for it, or choose another folder")
        yield stack.enter_context(atomic_files(folder, last=WEIGHTS_FILE))
        (folder / TRAIN_FILE).unlink(missing_ok=True)


def origin_of(path: Path) -> str:
    """A hash of the path of the folder that a model was loaded from; copies of the model store it in config.json
    instead of the path."""
    return json_sha256(str(path.resolve()))


def refuse_occupied(folder: Path, own: Path | None, force: bool) -> None:
    """Refuse a folder with other files, unless `force`, and the folder of a run in any case."""
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
    what = "another run" if is_run else "another model" if is_model(folder) else "files that are not a model"
    raise ValueError(f"{folder} holds {what}; choose another folder, or write over it with --force (force=True)")


def load_folder(
    path_or_name: str | Path,
    device: str | torch.device = "cpu",
    architecture: Architecture | None = None,
    **download: Any,
) -> ModelFolder:
    """The model in a folder, in evaluation mode; see `locate` for other names of models.

    architecture: the class of its network, or package:Class, where that is not one of the package; without it no code
    outside the package is imported.
    """
    folder = locate(path_or_name, **download)
    config, weights = read_description(folder), folder / WEIGHTS_FILE
    tokenizer = own_tokenizer(folder, config)
    with reading(folder / CONFIG_FILE):
        method, process = method_from_config(config["method"]), process_from_config(config["process"])
        network, length = config["network"], config["length"]
        get_form(config.get("weights", "float32"))
        kind = get_architecture(config["architecture"], architecture)
        least = kind.least_parameters(network) if issubclass(kind, Backbone) else 0
        if least > (stored := weights.stat().st_size):  # a weight takes at least a byte
            raise ValueError(f"the network has at least {least:,} parameters, but the weights only {stored:,} bytes")
        _check_vocabulary(network["vocab_size"], process, tokenizer)
    form = stored_form(folder, config)  # before anything is allocated
    with reading(folder / CONFIG_FILE):
        # Code outside the package may initialize more than what the file overwrites. Its random numbers are not those
        # of the caller.
        with SkipInitialization() if kind.__module__.startswith("cedd.") else torch.random.fork_rng([]):
            model = build_network(config["architecture"], network, architecture)
        _check_sizes(model, process, tokenizer, length)
        for section in ("sampling", "correction"):
            if not isinstance(config.get(section, {}), dict):
                raise ValueError(f"{section} must be an object of options (got {config[section]!r})")
    load_weights(model, weights, form=form, checksum=config.get(CHECKSUM))
    model = model.to(device).eval().requires_grad_(False)
    return ModelFolder(model, process, method, tokenizer, length, {**config, "weights": form}, folder)


def _check_sizes(network: Backbone, process: TokenProcess, tokenizer: Tokenizer, length: object) -> None:
    """Raise a ValueError if the parts of a model do not match."""
    _check_vocabulary(network.vocab_size, process, tokenizer)
    if process.has_mask and not network.has_mask:
        raise ValueError("the process masks tokens, but the network has no mask token")
    longest = network.capabilities.max_length
    if not isinstance(length, int) or not 1 <= length <= (longest or length):
        raise ValueError(f"length must be an integer from 1 to {longest}, the network's (got {length!r})")


def _check_vocabulary(vocab_size: object, process: TokenProcess, tokenizer: Tokenizer) -> None:
    """Refuse a network of this many tokens if the process or the tokenizer has another number."""
    if not vocab_size == process.vocab_size == tokenizer.vocab_size:
        sizes = f"{vocab_size}, {process.vocab_size} and {tokenizer.vocab_size} tokens"
        raise ValueError(f"network, process and tokenizer have {sizes}")
