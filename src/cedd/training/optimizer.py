"""Optimizers: AdamW here, Muon in `muon`. An optimizer updates some parameters and owns its state, moments and a step
count.

A step clips the gradients and is skipped if they are not finite. It runs in torch (`step`), or in kernels for all
parameters at once if Triton can address them (`sweep`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from cedd.training.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """The learning rate of step 0, 1, ...: linear warm-up, then constant, or decaying to `final_share`: by a cosine, or
    linearly in the last `decay_share` of the steps."""
    warm = min(1.0, (step + 1) / max(config.warmup, 1))
    if config.schedule == "constant":
        return config.rate * warm
    if config.schedule == "linear":
        left = share_left(config, step, steps)
        return config.rate * min(warm, config.final_share + (1 - config.final_share) * left)
    progress = min(max(step - config.warmup, 0) / max(steps - config.warmup, 1), 1.0)
    share = config.final_share + (1 - config.final_share) * (1 + math.cos(math.pi * progress)) / 2
    return config.rate * warm * share


def share_left(config: OptimizerConfig, step: int, steps: int) -> float:
    """The share of the linear decay that remains at a step."""
    return min(max(steps - step, 0) / max(config.decay_share * steps, 1.0), 1.0)


def excess_of(norm: Tensor, clip: float) -> Tensor:
    """The divisor of gradients for clipping, [] float32, equivalent to clip_grad_norm_'s factor min(1, clip / (norm +
    1e-6))."""
    excess = (norm.float() + 1e-6) / clip if clip > 0 else torch.zeros_like(norm, dtype=torch.float32)
    return excess.clamp_min(1.0)


def reachable(tensor: Tensor, dtype: torch.dtype = torch.float32) -> bool:
    """Whether a kernel can access a tensor by address: this type, dense, aligned, not sharded, on the device."""
    plain = tensor.is_cuda and tensor.dtype == dtype and tensor.is_contiguous()
    return plain and not hasattr(tensor, "full_tensor") and tensor.data_ptr() % 16 == 0


class Optimizer(ABC):
    """Updates parameters, given by name, at a rate relative to the run's. Its moments exist from the start, so that a
    checkpoint can be loaded into them."""

    MOMENTS: ClassVar[tuple[str, ...]]
    """Names of the moments in a checkpoint: tensors of a parameter's shape."""
    table: Any = None
    """Addresses for the kernels; None if they cannot be used."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], relative_rate: float = 1.0) -> None:
        self.parameters, self.relative_rate = dict(parameters), relative_rate
        self.moments = {
            moment: {
                name: torch.zeros_like(parameter, memory_format=torch.preserve_format)
                for name, parameter in parameters.items()
            }
            for moment in self.MOMENTS
        }
        self.counts = [
            torch.zeros((), dtype=torch.float32, device="cpu" if parameter.device.type == "mps" else parameter.device)
            for parameter in parameters.values()
        ]

    def tensors(self) -> dict[str, Tensor]:
        """The moments, by their names in a checkpoint."""
        return {
            f"{moment}/{name}": tensor for moment, tensors in self.moments.items() for name, tensor in tensors.items()
        }

    @property
    def updates(self) -> int:
        """Steps taken, without skipped ones."""
        return int(self.counts[0])

    def restore(self, updates: int) -> None:
        """Set the number of steps taken, after the moments were loaded."""
        for count in self.counts:
            count.fill_(updates)

    def count(self, finite: Tensor) -> None:
        """Count a step, if finite []."""
        # A list, one for each: a single tensor would be read by the host, which would wait for the device.
        torch._foreach_add_(self.counts, [finite.to(self.counts[0])] * len(self.counts))  # type: ignore[attr-defined]

    @abstractmethod
    def step(self, rate: float, norm: Tensor, clip: float, finite: Tensor) -> None:
        """One step with gradients clipped to a norm of at most `clip` (0: no clipping); `norm` [] is that of all
        gradients of the network. No step if `finite` [] is false."""

    @abstractmethod
    def use_kernels(self, averages: Sequence[Tensor], copies: Sequence[Tensor | None]) -> None:
        """Make the table for `sweep`, if kernels can be used; its tensors must keep their addresses."""

    @abstractmethod
    def sweep(self, rate: float, excess: Tensor, finite: Tensor, pace: float) -> None:
        """One step with the gradients in the table, divided by excess [], unless finite [] is 0. Averages move by
        `pace`, and copies are updated."""


class AdamW(Optimizer):
    """torch's AdamW."""

    MOMENTS = ("exp_avg", "exp_avg_sq")

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], config: OptimizerConfig, relative_rate: float = 1.0
    ) -> None:
        super().__init__(parameters, relative_rate)
        self.config, values = config, list(parameters.values())
        self._torch = torch.optim.AdamW(
            values,
            lr=config.rate,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=not any(value.device.type == "mps" for value in values),
        )
        for (name, parameter), count in zip(parameters.items(), self.counts, strict=True):
            moments = {moment: tensors[name] for moment, tensors in self.moments.items()}
            self._torch.state[parameter] = {"step": count, **moments}

    def step(self, rate: float, norm: Tensor, clip: float, finite: Tensor) -> None:
        """On CUDA, torch's kernel clips and skips by its scale: no pass over the gradients for clipping, and the host
        does not wait for the device."""
        optimizer, parameters = self._torch, list(self.parameters.values())
        optimizer.param_groups[0]["lr"] = self.relative_rate * rate
        if finite.is_cuda and not hasattr(parameters[0], "full_tensor"):
            optimizer.grad_scale = excess_of(norm, clip)  # pyright: ignore[reportAttributeAccessIssue]
            optimizer.found_inf = (~finite).float()  # pyright: ignore[reportAttributeAccessIssue]
            optimizer.step()
        elif bool(finite):
            if clip > 0:
                nn.utils.clip_grads_with_norm_(parameters, clip, norm, foreach=True)
            optimizer.step()

    def use_kernels(self, averages: Sequence[Tensor], copies: Sequence[Tensor | None]) -> None:
        from cedd.training.update_triton import TensorTable

        values = [parameter.detach() for parameter in self.parameters.values()]
        first, second = (list(tensors.values()) for tensors in self.moments.values())
        self.table = TensorTable(values, first, second, averages, copies)

    def sweep(self, rate: float, excess: Tensor, finite: Tensor, pace: float) -> None:
        betas, epsilon, decay = (self.config.beta1, self.config.beta2), self.config.eps, self.config.weight_decay
        settings = {"rate": self.relative_rate * rate, "betas": betas, "epsilon": epsilon, "decay": decay, "pace": pace}
        self.table.update(self.counts[0], excess, finite, **settings)
        self.count(finite)
