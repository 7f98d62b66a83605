"""What a network does between its matrix products, fused where that pays: the head with its loss in chunks of rows,
adding a branch and norming the sum, attention with its rotations. Each kernel is written in plain torch as well."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from cedd.models.options import EPSILON as EPSILON

_TRITON = find_spec("triton") is not None


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


def dropout_scale(dropped: int) -> float:
    """What the entries that dropout leaves are multiplied by, if it drops ``dropped`` of 256."""
    return 256 / (256 - dropped)


def at_least_float32(x: Tensor) -> Tensor:
    """Float32, or float64 where the whole network is."""
    return x if x.dtype == torch.float64 else x.float()
