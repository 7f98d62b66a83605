"""Constraints: callables x -> x that are applied to the start and after every step of a sampler.

Shapes: B batch, L positions.

Any callable will do. `Fixed` is the one that prompts and infilling need; because it says which positions it holds,
samplers need not ask the device for them, and never spend anything on those positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cedd.network import Only

Constraint = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Fixed:
    """Holds `tokens` at the positions where `where` is true; both [L], or [B, L] for each sequence its own."""

    tokens: Tensor
    where: Tensor
    only: Only | None = None
    """Where, of the same shape, some tokens alone may be drawn: they share the probability of the others."""

    def __post_init__(self) -> None:
        if self.tokens.shape != self.where.shape or self.tokens.dim() not in (1, 2):
            raise ValueError(
                f"fixed tokens and their positions must both be [L] or [B, L]; got {tuple(self.tokens.shape)} and "
                f"{tuple(self.where.shape)}"
            )
        if self.where.dtype != torch.bool:
            raise ValueError(f"the positions to fix are a Boolean mask; got {self.where.dtype}")

    def __call__(self, x: Tensor) -> Tensor:
        return torch.where(self.where.to(x.device), self.tokens.to(x), x)

    def check(self, shape: tuple[int, int], vocab_size: int) -> None:
        """Refuse what does not fit the samples."""
        if self.where.shape not in (torch.Size(shape), torch.Size(shape[1:])):
            raise ValueError(f"the fixed tokens are {tuple(self.where.shape)}, but the samples are {shape}")
        held = self.tokens[self.where]
        if held.numel() and (int(held.min()) < 0 or int(held.max()) >= vocab_size):
            raise ValueError(f"fixed tokens must lie in 0..{vocab_size - 1}; got {int(held.min())}..{int(held.max())}")
        if (only := self.only) is not None and not (
            only.where.shape == self.where.shape and only.tokens.shape == (vocab_size,) and only.tokens.any()
        ):
            raise ValueError(f"what alone may be drawn must leave one of the {vocab_size} tokens, and be of this shape")

    def part(self, start: int, stop: int) -> Fixed:
        """The constraint of sequences start..stop-1."""
        if self.where.dim() == 1:
            return self
        part = slice(start, stop)
        return Fixed(self.tokens[part], self.where[part], self.only and self.only.of(part))


def prompt(tokens: Tensor, length: int) -> Fixed:
    """The sequence begins with `tokens` [P]."""
    if len(tokens) > length:
        raise ValueError(f"the prompt has {len(tokens)} tokens, but the samples only {length}; shorten it")
    held = torch.zeros(length, dtype=torch.int64)
    held[: len(tokens)] = tokens.cpu()
    return Fixed(held, torch.arange(length) < len(tokens))
