"""Precision of matrix products in training: float32, or bfloat16 with float32 accumulation.

On CUDA and MPS bfloat16 is torch's autocast. On a CPU tensors stay in float32, and only the factors of a product are
rounded, inside oneDNN: with hardware support (AMX) products are four times as fast, and no other operation runs in
bfloat16, which is slow on CPUs. Without hardware support products are in float32.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from cedd.models.kernels.matmul import bf16_matmul, has_bf16_matmul
from cedd.training.config import PrecisionName


@dataclass(frozen=True)
class Precision:
    """Precision of products on a device: bfloat16 if `low`."""

    device_type: str
    low: bool

    @classmethod
    def choose(cls, wanted: PrecisionName, device_type: str, compiled: bool = False) -> Precision:
        """auto: bfloat16 on CUDA, and on a CPU with AMX.

        A compiled network on a CPU stays in float32, since attention cannot be excluded there (see `float32_matmul`).
        """
        has_units = device_type == "cuda" or (device_type == "cpu" and not compiled and has_bf16_matmul())
        return cls(device_type, wanted == "bf16" or (wanted == "auto" and has_units))

    @property
    def autocasts(self) -> bool:
        """Whether the forward pass runs under autocast."""
        return self.low and self.device_type != "cpu"

    def autocast(self) -> torch.autocast:
        """The context of a forward pass, also in evaluations."""
        return torch.autocast(self.device_type, dtype=torch.bfloat16, enabled=self.autocasts)

    def both_passes(self) -> AbstractContextManager[None]:
        """The context of a forward pass and its backward pass."""
        return bf16_matmul() if self.low and self.device_type == "cpu" else nullcontext()
