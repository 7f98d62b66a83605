"""Matrix products of few rows on a CPU, with weights in the order in which MKL reads them.

The product of a weight with a few rows takes as long as reading the weight. Without packing, MKL copies the weight into
this order in every call, which takes nearly as long as the product itself.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cedd.models.kernels.matmul import has_bf16_matmul
from cedd.models.kernels.rotation import linear

MOST_ROWS = 32
"""Largest number of rows for which weights are packed."""
LEAST_ENTRIES = 1 << 16
"""Weights with fewer entries stay in the cache of a core."""


class PackedWeights:
    """Weights packed for products with the same number of rows. They must not change."""

    def __init__(self) -> None:
        self._rows, self._packed = 0, dict[Tensor, Tensor]()

    @staticmethod
    def helps(weight: Tensor) -> bool:
        """Whether products with this weight can be packed."""
        plain = weight.device.type == "cpu" and weight.dtype == torch.float32 and not has_bf16_matmul()
        return plain and torch.backends.mkl.is_available() and hasattr(torch.ops.mkl, "_mkl_linear")

    def product(self, x: Tensor, layer: nn.Linear, order: Tensor | None = None) -> Tensor:
        """layer(x), with its entries in this order, which is the same in all calls. Weights are packed again when the
        number of rows of x changes."""
        weight, rows = layer.weight, x.shape[:-1].numel()
        traced = torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling()
        fits = 1 < rows <= MOST_ROWS and weight.numel() >= LEAST_ENTRIES and type(layer) is nn.Linear
        if traced or not fits:
            return linear(x, layer, order)
        if rows != self._rows:
            self._rows = rows
            self._packed.clear()
        if weight not in self._packed:
            ordered = weight if order is None else weight.index_select(0, order)
            self._packed[weight] = torch.ops.mkl._mkl_reorder_linear_weight(ordered, rows)
        bias = layer.bias if order is None or layer.bias is None else layer.bias.index_select(0, order)
        return torch.ops.mkl._mkl_linear(x, self._packed[weight], weight, bias, rows)
