"""Fused operations between matrix products: the head with its loss in chunks of rows, adding a branch and normalizing
the sum, attention with its rotations. Each kernel also has an implementation in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from cedd.models.transformer_config import EPSILON as EPSILON


def dropout_scale(dropped: int) -> float:
    """The scale of the entries that dropout keeps, if it drops ``dropped`` of 256."""
    return 256 / (256 - dropped)


def at_least_float32(x: Tensor) -> Tensor:
    """Float32, or float64 for a network in float64."""
    return x if x.dtype == torch.float64 else x.float()
