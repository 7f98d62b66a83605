"""Selecting rows of a batch and writing them back, for a head or a layer that runs at some positions only.

Shapes: N rows, D width, R chosen rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _GatherRows(torch.autograd.Function):
    """features[index] for distinct indices: the backward pass copies, where indexing would sort and add."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shape = features.shape
        return features.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (index,) = ctx.saved_tensors
        return gradient.new_zeros(ctx.shape).index_copy_(0, index, gradient), None


def gather_rows(features: Tensor, index: Tensor) -> Tensor:
    """features [N, D] at the *distinct* rows ``index`` [R]."""
    gathered = _GatherRows.apply(features, index)
    assert isinstance(gathered, Tensor)
    return gathered


def scatter_rows(rows: Tensor, index: Tensor, count: int) -> Tensor:
    """[count, D] with rows [R, D] at the *distinct* places ``index`` [R], and 0 elsewhere."""
    return rows.new_zeros(count, rows.shape[1]).index_copy(0, index, rows)
