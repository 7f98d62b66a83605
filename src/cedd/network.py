"""What the mathematics asks of a network: to be called; and, if it can, to be run in two halves.

    model(x_t [B, L] int64, sigma [B] float32) -> outputs [B, L, V]              any callable will do
    model.features(x_t, sigma) -> [B, L, D],   model.head([N, D]) -> [N, V]      a network in two halves

With two halves the vocabulary head runs on the rows that matter only. Whether a model has them is asked of the object
itself: since Python 3.12 `isinstance` with a run-time protocol looks at the class and misses a module's submodules.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from copy import deepcopy
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from typing_extensions import TypeIs

Model = Callable[[Tensor, Tensor], Tensor]
Module = TypeVar("Module", bound=nn.Module)


class HasHead(Protocol):
    """A network in two halves."""

    @property
    def head(self) -> Callable[[Tensor], Tensor]:
        """[N, D] -> [N, V]."""
        ...

    def features(self, x_t: Tensor, sigma: Tensor) -> Tensor:
        """[B, L] tokens -> [B, L, D], just before the vocabulary head."""
        ...


def has_head(model: object) -> TypeIs[HasHead]:
    """Whether a network can be run in two halves."""
    return callable(getattr(model, "features", None)) and callable(getattr(model, "head", None))


class ScoreRows(NamedTuple):
    """What the score entropy of a row of outputs o comes down to, [N] each:

        sum s_y - common sum log s_y - extra log s_target,        log s_y = o_y + shift,

    with sums over all tokens y but `skip` (one of V or more: over all). `extra` is 0 where `skip` is the target.
    """

    target: Tensor
    skip: Tensor
    shift: Tensor
    common: Tensor
    extra: Tensor


def with_rounded(model: Module, names: Collection[str], dtype: torch.dtype) -> Module:
    """The same network with copies in `dtype` of the parameters that are named, and its own parameters otherwise.

    Autocast would round each of them at every use, and widen its gradient again: two sweeps over all weights, in
    kernels of some microseconds each.
    """
    kept = {
        id(parameter): nn.Parameter(parameter.detach().to(dtype)) if name in names else parameter
        for name, parameter in model.named_parameters()
    }
    return deepcopy(model, kept)  # which takes from there what it finds there
