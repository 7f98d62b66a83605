"""Where to compute: the device a user names, where a model's parameters are, and which devices have no float64."""

from __future__ import annotations

import torch
from torch import nn


def pick_device(name: str, local_rank: int = 0) -> torch.device:
    """The device a user names: auto (CUDA, else MPS, else the CPU), cpu, cuda or mps."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        torch.device(name)
    except RuntimeError:
        raise ValueError(f"there is no device {name!r}; use auto, cpu, cuda or mps") from None
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError("there is no CUDA device here; use --device cpu")
    return torch.device(name, local_rank) if name == "cuda" else torch.device(name)


def model_device(model: object, otherwise: torch.device | str = "cpu") -> torch.device:
    """Where the model's parameters are; `otherwise` for a plain function."""
    if isinstance(model, nn.Module):
        for parameter in model.parameters():
            return parameter.device
    device = getattr(model, "device", None)
    return torch.device(device if isinstance(device, str | torch.device) else otherwise)


def has_float64(device: torch.device | str) -> bool:
    """Whether the device has float64: MPS has not."""
    return torch.device(device).type != "mps"
