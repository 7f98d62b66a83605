"""Products of integers: a network for a CPU that multiplies int8 faster than float32."""

from __future__ import annotations

from copy import deepcopy
from functools import cache

import torch
from torch import Tensor, nn

from cedd.models.weights import eight_bits
from cedd.network import Module

_LEAST_UNIT = 1e-30
"""Of a row of zeros."""


class IntegerLinear(nn.Module):
    """A linear map whose factors are rounded to int8: x Wᵀ with each row of x, and of W, in multiples of a 127th of its
    largest entry. The sums of products are exact, and no row of x depends on the others.

    Args:
        linear: the map in float32.
    """

    weight: Tensor
    step: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight, step = eight_bits(linear.weight.detach())
        self.register_buffer("weight", weight, persistent=False)
        self.register_buffer("step", step, persistent=False)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        # As `eight_bits`, by the operations that take least time (docs/lab-notes.md): it is part of every product.
        rows = x.flatten(0, -2)
        unit = torch.maximum(rows.amax(1, True), -rows.amin(1, True)).clamp_min_(_LEAST_UNIT).div_(127)
        sums = torch.ops.aten._int_mm(rows.mul(unit.reciprocal()).round_().to(torch.int8), self.weight.T)
        made = sums.float().mul_(unit).mul_(self.step)
        if self.bias is not None:
            made += self.bias
        return made.unflatten(0, x.shape[:-1])


@cache
def has_integer_products() -> bool:
    """Whether this CPU has units that multiply int8 (VNNI), which torch's product of such matrices uses: elsewhere that
    is slower than float32, or sums of two products overflow."""
    supported = getattr(torch.cpu, "_is_vnni_supported", None)
    return supported is not None and bool(supported())


def with_integers(model: Module) -> Module:
    """The same network, the linear maps of whose blocks multiply in int8, and its own parameters otherwise. For forward
    passes on a CPU."""
    kept = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    made = deepcopy(model, kept)
    for name, module in list(made.named_modules()):
        if isinstance(module, nn.Linear) and ".blocks." in f".{name}":
            parent, _, leaf = name.rpartition(".")
            setattr(made.get_submodule(parent), leaf, IntegerLinear(module))
    return made
