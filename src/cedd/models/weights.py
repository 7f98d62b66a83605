"""Weights as safetensors files: written whole or not at all, read strictly, never unpickled."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


def save_weights(
    path: str | Path,
    tensors: Mapping[str, Tensor],
    *,
    dtype: torch.dtype | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write named tensors to ``path``, floating ones in ``dtype`` if given (bfloat16 halves the file).

    The bytes are on the disk under a temporary name before they get their own: whoever looks, even after a
    crash, finds the old file or the new one.
    """
    path = Path(path)
    ready = {name: _storable(tensor, dtype) for name, tensor in tensors.items()}
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        save_file(ready, temporary, metadata=dict(metadata or {}))
        temporary.chmod(0o666 & ~_umask())  # the library makes private files; a run may be shared
        _flush(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    _flush(path.parent)


def read_weights(path: str | Path, device: str | torch.device = "cpu") -> dict[str, Tensor]:
    """The named tensors of a file."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"there is no weights file {path}")
    try:
        return load_file(path, device=str(device))
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from error


def load_weights(model: nn.Module, path: str | Path) -> None:
    """Fill the model with a file's weights, which must be exactly its own names and shapes.

    Types may differ: a file stored in bfloat16 loads into float32 parameters.
    """
    path, state = Path(path), model.state_dict()
    tensors = read_weights(path)
    if missing := sorted(state.keys() - tensors.keys()):
        raise ValueError(f"{path} lacks {len(missing)} of the model's tensors, first {missing[0]}")
    if unknown := sorted(tensors.keys() - state.keys()):
        raise ValueError(f"{path} holds {len(unknown)} tensors that the model has not, first {unknown[0]}")
    for name, tensor in tensors.items():
        if tensor.shape != state[name].shape:
            raise ValueError(f"{path}: {name} is {list(tensor.shape)}, but the model's is {list(state[name].shape)}")
    model.load_state_dict(tensors)


def _storable(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    tensor = tensor.detach().cpu()
    if dtype is not None and tensor.is_floating_point():
        tensor = tensor.to(dtype)
    return tensor.contiguous()


def _umask() -> int:
    """What the user takes from a new file's mode; it can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _flush(path: Path) -> None:
    """Force a file's bytes, or a folder's names, to the disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows opens no folders
    descriptor = os.open(path, os.O_RDWR if path.is_file() else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
