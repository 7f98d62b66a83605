"""AdamW with warm-up, and the one step that it takes: clip, update, average; never on a gradient that is not finite."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from cedd.training.config import OptimizerConfig
from cedd.training.distributed import whole


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """The rate of step 0, 1, ...: a linear warm-up, then constant, or a cosine down to `final_share` of it."""
    warm = min(1.0, (step + 1) / max(config.warmup, 1))
    if config.schedule == "constant":
        return config.rate * warm
    progress = min(max(step - config.warmup, 0) / max(steps - config.warmup, 1), 1.0)
    share = config.final_share + (1 - config.final_share) * (1 + math.cos(math.pi * progress)) / 2
    return config.rate * warm * share


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> AdamW:
    """AdamW whose moments exist from the start, so that a checkpoint can be read into them."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    on_mps = any(parameter.device.type == "mps" for parameter in parameters)
    optimizer = AdamW(
        parameters,
        lr=config.rate,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=not on_mps,
    )
    for parameter in parameters:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device="cpu" if on_mps else parameter.device),
            "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        }
    return optimizer


def clip_gradients(parameters: Iterable[Tensor], limit: float) -> Tensor:
    """Scale the gradients to a norm of at most `limit` (0: leave them) and return the norm they had, on the device."""
    norm = nn.utils.clip_grad_norm_(parameters, limit if limit > 0 else math.inf, foreach=True)
    return whole(norm)


def apply_gradients(optimizer: AdamW, rate: float, finite: Tensor) -> None:
    """One step, unless `finite` [] is false: weights and moments then stay as they are.

    On CUDA the decision is left to the kernel, which skips its update; nobody waits for the device.
    """
    for group in optimizer.param_groups:
        group["lr"] = rate
    sharded = any(hasattr(parameter, "full_tensor") for parameter in optimizer.param_groups[0]["params"][:1])
    if finite.is_cuda and not sharded:
        optimizer.found_inf = (~finite).float()  # pyright: ignore[reportAttributeAccessIssue]
    elif not bool(finite):
        return
    optimizer.step()
