"""Constraints: callables x -> x that are applied to the start and after every step of a sampler.

Shapes: B batch, L positions; M masks, of which C are drawn.

    any callable        changes x after every step; the host then has to read x after every step
    Fixed               holds tokens, as prompts and infilling need. Which positions it holds is known in advance, so
                        that nothing is computed for them
    JointConstraint     also decides how tokens are drawn: jointly, from the network's laws of all masks of a sequence

A `JointConstraint` is for languages: a regular expression, or a choice of texts. The network gives a law per position;
which combinations are allowed is a property of the whole sequence. Every sampler draws tokens from probabilities in one
place, `SamplingRun.draw_tokens`, which passes the laws of all masks of a sequence, and the positions to be drawn now,
to the constraint's `draw`. Samplers that draw tokens in any other way refuse a `JointConstraint`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, Self

import torch
from torch import Tensor

from cedd.constraints import Language
from cedd.network import AllowedTokens
from cedd.samplers.choice import Sharpening

Constraint = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Fixed:
    """A constraint that fixes `tokens` where `where` is true; both [L], or [B, L] with a row per sequence."""

    tokens: Tensor
    where: Tensor
    only: AllowedTokens | None = None
    """Where, of the same shape, only some tokens may be drawn: they share the probability of the others."""

    def __post_init__(self) -> None:
        if self.tokens.shape != self.where.shape or self.tokens.dim() not in (1, 2):
            raise ValueError(
                f"fixed tokens and their positions must both be [L] or [B, L] (got {tuple(self.tokens.shape)} and "
                f"{tuple(self.where.shape)})"
            )
        if self.where.dtype != torch.bool:
            raise ValueError(f"the positions to fix must be a Boolean mask (got {self.where.dtype})")

    def __call__(self, x: Tensor) -> Tensor:
        return torch.where(self.where.to(x.device), self.tokens.to(x), x)

    def check(self, shape: tuple[int, int], vocab_size: int) -> None:
        """Raise a ValueError if the tokens do not fit the samples."""
        if self.where.shape not in (torch.Size(shape), torch.Size(shape[1:])):
            raise ValueError(f"the fixed tokens are {tuple(self.where.shape)}, but the samples are {shape}")
        held = self.tokens[self.where]
        if held.numel() and (int(held.min()) < 0 or int(held.max()) >= vocab_size):
            raise ValueError(f"fixed tokens must be in 0..{vocab_size - 1} (got {int(held.min())}..{int(held.max())})")
        if (only := self.only) is not None and not (
            only.where.shape == self.where.shape and only.tokens.shape == (vocab_size,) and only.tokens.any()
        ):
            raise ValueError(f"what alone may be drawn must leave one of the {vocab_size} tokens, and be of this shape")

    def part(self, start: int, stop: int) -> Self:
        """The constraint of sequences start..stop-1."""
        if self.where.dim() == 1:
            return self
        part = slice(start, stop)
        return replace(self, tokens=self.tokens[part], where=self.where[part], only=self.only and self.only.of(part))

    def holding(self, other: Fixed) -> Self:
        """Both constraints in one: the positions of either are held."""
        if self.only is not None and other.only is not None:
            raise ValueError("only one of two constraints may limit which tokens are drawn")
        tokens = torch.where(other.where, other.tokens, self.tokens)
        where = self.where | other.where
        only = self.only or other.only
        only = only and replace(only, where=only.where.expand(where.shape))
        return replace(self, tokens=tokens, where=where, only=only)


Draw = Callable[[Tensor, Tensor], Tensor]
"""(outputs [M, V], uniform numbers [C]) -> tokens [C]."""


class WholeDraw(Protocol):
    """`JointConstraint.draw` as a function of tensors, which a GPU can record. Equal functions do the same."""

    @property
    def constants(self) -> tuple[Tensor, ...]:
        """What it takes besides, which is the same in all calls of a run."""
        ...

    def __call__(self, outputs: Tensor, x: Tensor, numbers: Tensor, *constants: Tensor) -> tuple[Tensor, Tensor]:
        """The states [B, L] after the draws, and a number [] that is not finite if nothing can be drawn for a sequence.

        Args:
            outputs: of the network at all masks in their order, [M, V], and any others.
            x: the states, [B, L].
            numbers: uniform numbers [B, L] for the masks that are drawn, and -1 elsewhere.
            constants: those of the property.
        """
        ...

    def error(self) -> ValueError:
        """The error for a number that is not finite."""
        ...


@dataclass(frozen=True)
class JointConstraint(Fixed, ABC):
    """Base class of constraints that draw the tokens of a sequence together.

    `Fixed.part` and `Fixed.holding` keep the fields of a subclass. A subclass with a field per sequence (such as the
    state of an automaton) overrides `part`.
    """

    @abstractmethod
    def draw(
        self, x: Tensor, rows: Tensor, outputs: Tensor, sharpening: Sharpening, chosen: Tensor, v: Tensor
    ) -> Tensor:
        """Tokens [C] at the positions that a sampler draws in one network call.

        Args:
            x: the states [B, L], with V at masks.
            rows: all masks of some of the sequences, as ascending positions [M] of the flattened batch, on the CPU.
                With `next-token` it is the next position of each sequence.
            outputs: the network's logits at these positions, [M, V].
            sharpening: temperature, top-p and excluded tokens; `sharpening.log_probs(outputs)` applies them.
            chosen: the masks to draw now, as indices [C] into rows, on the CPU.
            v: uniform numbers [C] in [0, 1), one per token; no other random numbers may be used.
        """

    def prepared(self, x: Tensor, rows: Tensor, sharpening: Sharpening, chosen: Tensor) -> Draw:
        """`draw` as a function of outputs and v. It is called before the network runs on the GPU, so work that waits
        for the device is best done here."""
        return lambda outputs, v: self.draw(x, rows, outputs, sharpening, chosen, v)

    def whole_draw(self, sharpening: Sharpening, device: torch.device) -> WholeDraw | None:
        """`draw` as a function that a GPU can record; None if there is none."""
        del sharpening, device
        return None

    def log_marginals(self, x: Tensor, rows: Tensor, outputs: Tensor, sharpening: Sharpening) -> Tensor:
        """Log-probabilities at the masks, [M, V], from which confidence orders rank them; by default without the
        constraint. Arguments as in `draw`."""
        del x, rows
        return sharpening.log_probs(outputs)


def prompt(tokens: Tensor, length: int) -> Fixed:
    """The sequence begins with `tokens` [P]."""
    if len(tokens) > length:
        raise ValueError(f"the prompt has {len(tokens)} tokens, but the samples only {length}; shorten it")
    held = torch.zeros(length, dtype=torch.int64)
    held[: len(tokens)] = tokens.cpu()
    return Fixed(held, torch.arange(length) < len(tokens))


def combined(first: Fixed | None, second: Constraint | None) -> Constraint | None:
    """Both constraints as one; what `first` holds is held whatever the second does."""
    if first is None or second is None:
        return second if first is None else first
    if isinstance(second, Fixed):
        return second.holding(first)
    check_callable(second)
    return lambda x: first(second(x))


def check_callable(constraint: object) -> None:
    """Refuse a constraint that is not a callable, such as a regular expression as text."""
    if isinstance(constraint, Language):
        raise TypeError(
            "cedd.sample draws tokens: pass cedd.data.token_languages.language_constraint(language, tokenizer, length) "
            f"instead of {constraint!r}"
        )
    if not callable(constraint):
        raise TypeError(
            "a constraint must be a language, such as cedd.constraints.regex('[a-z]+'), or a callable x -> x on tokens "
            f"(got {constraint!r})"
        )


def held_positions(constraint: Constraint | None, shape: tuple[int, ...]) -> Tensor:
    """Which positions never change, [B, L] bool on the host."""
    if isinstance(constraint, Fixed):
        return constraint.where.cpu().expand(shape)
    return torch.zeros(shape, dtype=torch.bool)
