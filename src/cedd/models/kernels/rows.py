"""Choosing the rows that go through the vocabulary head, with shapes that do not depend on the data.

Shapes: N rows, D width, R chosen rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class Selection:
    """Which rows were chosen, and how many there were to choose."""

    index: Tensor
    """[R] int64, all different: the rows where the mask holds, in order, then others to fill up."""
    valid: Tensor
    """[R] bool: whether the mask holds there."""
    count: Tensor
    """[] int64: in how many rows the mask holds; more than R means that count - R rows were left out."""


def select_rows(mask: Tensor, capacity: int) -> Selection:
    """The first ``capacity`` rows where ``mask`` [N] holds, without waiting for the device.

    Rows that fill up are distinct as well, so that a gradient can be copied back instead of added up.
    """
    capacity = min(capacity, mask.numel())
    count = mask.sum()
    index = torch.argsort(mask.logical_not().to(torch.uint8), stable=True)[:capacity]
    valid = torch.arange(capacity, device=mask.device) < count
    return Selection(index, valid, count)


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


@dataclass(frozen=True)
class Rows:
    """The positions of a batch that take part in a loss: all of them, or a selection."""

    shape: torch.Size
    """The positions' own shape, [B, L] usually."""
    selection: Selection | None

    @staticmethod
    def choose(features: Tensor, active: Tensor | None, capacity: int | None) -> Rows:
        shape = features.shape[:-1]
        if active is None:
            return Rows(shape, None)
        mask = active.expand(shape).reshape(-1)
        if capacity is not None:
            return Rows(shape, select_rows(mask, capacity))
        index = mask.nonzero().squeeze(1)
        valid = torch.ones_like(index, dtype=torch.bool)
        return Rows(shape, Selection(index, valid, valid.sum()))

    def gather_features(self, features: Tensor) -> Tensor:
        flat = features.flatten(0, -2)
        return flat if self.selection is None else gather_rows(flat, self.selection.index)

    def gather(self, values: Tensor) -> Tensor:
        flat = values.expand(self.shape).reshape(-1)
        return flat if self.selection is None else flat[self.selection.index]

    def gather_weights(self, weights: Tensor | None) -> Tensor | None:
        """The chosen rows' weights, 0 for those that only fill up; None if all are 1."""
        if self.selection is None:
            return None if weights is None else self.gather(weights)
        valid = self.selection.valid
        return valid.float() if weights is None else torch.where(valid, self.gather(weights), 0.0)

    def scatter(self, losses: Tensor) -> Tensor:
        """Row losses back at their positions, 0 elsewhere."""
        if self.selection is None:
            return losses.view(self.shape)
        return losses.new_zeros(self.shape.numel()).index_copy_(0, self.selection.index, losses).view(self.shape)

    @property
    def left_out(self) -> Tensor | None:
        if self.selection is None:
            return None
        return (self.selection.count - self.selection.index.numel()).clamp(min=0)
