"""The autoregressive baseline: token by token from left to right, with the keys and values kept where the model can.

Shapes: B batch, L positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor

from cedd.network import has_head
from cedd.objectives.autoregressive import start_symbol
from cedd.process import TokenProcess, uniform_noise
from cedd.samplers.choice import Sharpening, inverse_cdf
from cedd.samplers.constraints import Constraint, Fixed
from cedd.samplers.network import Network


class HasCache(Protocol):
    """A causal network that can continue from the keys and values it has already computed."""

    @property
    def head(self) -> Callable[[Tensor], Tensor]: ...

    def new_cache(self, batch: int, length: int | None = None) -> Any:
        """An empty cache."""
        ...

    def features(self, x_t: Tensor, sigma: Tensor | None = None, cache: Any = None) -> Tensor:
        """[B, n] new tokens -> [B, n, D]."""
        ...


def has_cache(model: object) -> TypeGuard[HasCache]:
    """Whether a network can continue from what it has computed."""
    return has_head(model) and hasattr(model, "new_cache")


def autoregressive(
    model: Network,
    process: TokenProcess,
    shape: tuple[int, int],
    sharpening: Sharpening,
    constraint: Constraint | None,
    generator: torch.Generator | None,
    device: torch.device,
    callback: Callable[[int, float, Tensor], None] | None = None,
) -> Tensor:
    """x_i ~ p(. | x_<i) for i = 0..L-1; positions not yet drawn hold the start symbol while the constraint looks."""
    batch, length = shape
    start = start_symbol(process)
    x = torch.full(shape, start, dtype=torch.int64, device=device)
    x = _constrained(constraint, x)
    known = _known_prefix(constraint, length)
    if callback is not None:
        callback(0, 1.0, x)
    inputs = torch.cat([torch.full_like(x[:, :1], start), x], 1)  # inputs[:, i] precedes token i
    cache = model.new_cache(batch, length) if has_cache(model) else None
    seen = 0
    for i in range(known, length):
        if has_cache(model):
            hidden = model.features(inputs[:, seen : i + 1], cache=cache)[:, -1]
            with torch.autocast(device.type, enabled=False):
                weight = getattr(model.head, "weight", None)
                outputs = model.head(hidden.to(weight.dtype) if isinstance(weight, Tensor) else hidden.float())
            seen = i + 1
        elif has_head(model):
            hidden = model.features(inputs[:, :length], torch.zeros(batch, device=device))[:, i]
            outputs = model.head(hidden)
        else:
            # The network is causal, so what stands to the right of i cannot matter.
            outputs = model(inputs[:, :length], torch.zeros(batch, device=device))[:, i]
        weights = torch.exp(sharpening.log_probs(outputs.double()))
        x[:, i] = inverse_cdf(weights, uniform_noise((batch,), torch.device("cpu"), generator))
        x = _constrained(constraint, x)
        inputs[:, i + 1] = x[:, i]
        if callback is not None:
            callback(i + 1 - known, 1 - (i + 1) / length, x)
    return x


def _constrained(constraint: Constraint | None, x: Tensor) -> Tensor:
    return constraint(x) if constraint is not None else x


def _known_prefix(constraint: Constraint | None, length: int) -> int:
    """How many first positions are given; anything else that is given is refused."""
    if not isinstance(constraint, Fixed):
        return 0
    where = constraint.where.reshape(-1, length)
    count = int(where[0].sum())
    if not bool((where == (torch.arange(length, device=where.device) < count)).all()):
        raise ValueError("an autoregressive model writes left to right: it takes a prompt, not text after a blank")
    return count
