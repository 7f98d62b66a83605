"""In which numbers a training step multiplies matrices: float32, or bfloat16 with sums in float32.

On CUDA and MPS bfloat16 is torch's autocast. On a CPU the tensors stay in float32, and only the factors of a product
are rounded, as oneDNN reads them: chips with units for that (AMX) multiply four times as fast, and no other operation
has to work in numbers that a CPU is slow in. A chip without such units multiplies in float32, as if it had not been
asked.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch

from cedd.models.kernels.matmul import bf16_matmul, has_bf16_matmul

Wanted = Literal["auto", "bf16", "float32"]


@dataclass(frozen=True)
class Precision:
    """What a device multiplies in: bfloat16 if `low`."""

    device_type: str
    low: bool

    @classmethod
    def choose(cls, wanted: Wanted, device_type: str, compiled: bool = False) -> Precision:
        """auto: bfloat16 where the chip has units for it, as far as we can tell: on CUDA, and on a CPU with AMX.

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
