"""What a network does between its matrix products, fused where that pays: the head with its loss in chunks of rows,
adding a branch and norming the sum, attention with its rotations. Each kernel is written in plain torch as well."""

from __future__ import annotations

import torch
from torch import Tensor

from cedd.models.transformer_config import EPSILON as EPSILON


def dropout_scale(dropped: int) -> float:
    """What the entries that dropout leaves are multiplied by, if it drops ``dropped`` of 256."""
    return 256 / (256 - dropped)


def at_least_float32(x: Tensor) -> Tensor:
    """Float32, or float64 where the whole network is."""
    return x if x.dtype == torch.float64 else x.float()
