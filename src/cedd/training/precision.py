"""The precision of matrix products in a training step: float32, or bfloat16 with sums in float32.

On CUDA and MPS bfloat16 is torch's autocast. On a CPU the tensors stay in float32, and only the factors of a product
are rounded, inside oneDNN: chips with units for that (AMX) multiply four times as fast, and no other operation has to
use bfloat16, in which a CPU is slow. A chip without such units multiplies in float32.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from cedd.models.kernels.matmul import bf16_matmul, has_bf16_matmul
from cedd.training.config import Wanted


@dataclass(frozen=True)
class Precision:
    """The precision of products on a device: bfloat16 if `low`."""

    device_type: str
    low: bool

    @classmethod
    def choose(cls, wanted: Wanted, device_type: str, compiled: bool = False) -> Precision:
        """auto: bfloat16 on CUDA, and on a CPU with AMX.

        Not in a compiled network on a CPU, where attention could not be kept from it (see `float32_matmul`).
        """
        has_units = device_type == "cuda" or (device_type == "cpu" and not compiled and has_bf16_matmul())
        return cls(device_type, wanted == "bf16" or (wanted == "auto" and has_units))

    @property
    def autocasts(self) -> bool:
        """Whether the forward pass runs under autocast."""
        return self.low and self.device_type != "cpu"

    def autocast(self) -> torch.autocast:
        """For the forward pass, and for evaluations."""
        return torch.autocast(self.device_type, dtype=torch.bfloat16, enabled=self.autocasts)

    def both_passes(self) -> AbstractContextManager[None]:
        """For a forward pass and its backward pass."""
        return bf16_matmul() if self.low and self.device_type == "cpu" else nullcontext()
