"""The transitions of an automaton in the order in which kernels read them."""

from __future__ import annotations

from typing import NamedTuple, Self

import torch
from torch import Tensor

MANY = 8
"""Transitions of a state above which kernels add them up in another shape."""


class Edges(NamedTuple):
    """The transitions, states with many first; 32-bit integers."""

    label: Tensor
    target: Tensor
    starts: Tensor
    """Where the transitions of each state in this order begin, and the end, [Q + 1]."""
    state: Tensor
    """The states in this order, [Q]."""
    rank: Tensor
    """The place of each state in this order, [Q]."""
    many: int
    """How many states have more than `MANY` transitions."""
    most: int
    """The largest number of transitions of a state."""

    @classmethod
    def by_count(cls, label: Tensor, target: Tensor, starts: Tensor) -> Self:
        """From transitions sorted by the state that they leave; those of a state are between two of `starts`."""
        counts = torch.diff(starts)
        order = torch.argsort(counts, descending=True, stable=True)
        begins = torch.cat([counts.new_zeros(1), counts[order].cumsum(0)])
        own = torch.repeat_interleave(starts[:-1][order] - begins[:-1], counts[order])
        places = own + torch.arange(len(own), device=own.device)
        rank = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        tables = (table.to(torch.int32) for table in (label[places], target[places], begins, order, rank))
        return cls(*tables, many=int((counts > MANY).sum()), most=int(counts.max()) if len(counts) else 0)
