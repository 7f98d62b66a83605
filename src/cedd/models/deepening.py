"""Weights of a transformer for one with a multiple of its blocks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

EMBEDDING = "backbone.embedding.weight"
_BLOCKS, _MODULATION = "backbone.blocks.", "backbone.conditioning.modulation."


def deepened(weights: Mapping[str, Tensor], fewer: int, depth: int) -> dict[str, Tensor]:
    """The weights of a network of `fewer` blocks as those of one of `depth`, with each block repeated n times.

    A branch that added gate * f(x) to the residual stream becomes n branches, each of which adds

        (gate / n) * f(x)

    to a stream that differs only by the branches before it: the deeper network starts with nearly the same outputs.
    Without gates, the last linear map of f is divided by n.
    """
    times, made = depth // fewer, dict[str, Tensor]()
    has_gates = f"{_MODULATION}weight" in weights
    for name, value in weights.items():
        if name.startswith(_BLOCKS):
            block, _, rest = name.removeprefix(_BLOCKS).partition(".")
            part = value if has_gates or ".output." not in rest else value / times
            made |= {f"{_BLOCKS}{times * int(block) + copy}.{rest}": part for copy in range(times)}
        elif name.startswith(_MODULATION):  # shift, scale and gate of two branches per block, and two of the last norm
            parts = value.unflatten(0, (6 * fewer + 2, -1))
            blocks = parts[:-2].unflatten(0, (fewer, 6)).repeat_interleave(times, 0)
            blocks[:, 2::3] /= times
            made[name] = torch.cat([blocks.flatten(0, 1), parts[-2:]]).flatten(0, 1)
        else:
            made[name] = value
    return made
