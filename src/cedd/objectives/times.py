"""The times of a training batch.

Stratified times cover [low, high] evenly: the batch is cut into as many strata as it has sequences and one time is
drawn in each. They are strata of the *global* batch: every rank draws the same list and takes its own part, so that
the number of ranks changes nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor


def draw_times(
    count: int,
    generator: torch.Generator | None = None,
    *,
    stratified: bool = True,
    low: float = 1e-3,
    high: float = 1.0,
) -> Tensor:
    """`count` times in [low, high], float64 on the CPU; one in each stratum, in random order, or independent."""
    if count < 1:
        raise ValueError(f"a batch needs at least one sequence; got {count}")
    if not 0.0 <= low < high <= 1.0:
        raise ValueError(f"training times must lie in [0, 1], the lowest below the highest; got {low!r} and {high!r}")
    u = torch.rand(count, generator=generator, dtype=torch.float64)
    if stratified:
        u = (torch.randperm(count, generator=generator) + u) / count
    return low + (high - low) * u


def shift_right(x0: Tensor, start: int) -> Tensor:
    """The input of a causal network that predicts x0: a start symbol, then all tokens but the last."""
    return torch.cat([torch.full_like(x0[:, :1], start), x0[:, :-1]], 1)
