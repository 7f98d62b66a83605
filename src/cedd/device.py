"""Where to compute: the device a user names, where a model's parameters are, which devices have no float64, which
take kernels of ours, and how a CUDA device records what it is to repeat."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

KINDS = ("cpu", "cuda", "mps")
_TRITON = find_spec("triton") is not None


def pick_device(device: str | torch.device, local_rank: int = 0) -> torch.device:
    """The device a user names: auto (CUDA, else MPS, else the CPU), cpu, cuda, cuda:1 or mps."""
    name = str(device)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        found = torch.device(name)
    except RuntimeError:
        found = None
    if found is None or found.type not in KINDS:  # torch has more kinds, which are not tested
        raise ValueError(f"invalid device: {name!r}; use auto, cpu, cuda or mps")
    count = _count(found.type)
    if not count:
        there = " and ".join(kind for kind in KINDS if _count(kind))
        raise ValueError(f"no {found.type.upper()} device found, only {there}")
    chosen = torch.device(name, local_rank) if name == "cuda" else found
    if (chosen.index or 0) >= count:
        raise ValueError(f"device not found: {chosen} (the last one is {found.type}:{count - 1})")
    return chosen


def _count(kind: str) -> int:
    """The number of devices of a kind."""
    if kind == "cuda":
        return torch.cuda.device_count() if torch.cuda.is_available() else 0
    return int(kind == "cpu" or torch.backends.mps.is_available())


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


def has_triton() -> bool:
    """Whether kernels can be built here."""
    return _TRITON


def takes_kernels(tensor: Tensor) -> bool:
    """Whether a tensor is one for kernels: on a CUDA device, where they can be built, and not in float64."""
    return tensor.is_cuda and tensor.dtype != torch.float64 and has_triton()


def runs_alone() -> bool:
    """Whether neither autograd nor a compiler follows what is done, so that it may be one kernel of a library's or of
    ours that has no gradient."""
    return not (torch.is_grad_enabled() or torch.compiler.is_compiling())


@contextmanager
def recorded_graph(**options: Any) -> Iterator[torch.cuda.CUDAGraph]:
    """A graph of what is launched inside, with torch.cuda.graph's options.

    No garbage is collected meanwhile: another graph may be in it, and destroying one ends a recording.
    """
    graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, **options):
            yield graph
    finally:
        if collects:
            gc.enable()
