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


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The norm of all gradients, on the device."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return whole(nn.utils.get_total_norm(gradients, foreach=True))


def apply_gradients(optimizer: AdamW, rate: float, norm: Tensor, clip: float, finite: Tensor) -> None:
    """One step with the gradients scaled to a norm of at most `clip` (0: as they are), unless `finite` [] is false.

    On CUDA both are left to the optimizer's kernel, which divides by the scale and skips its update: no sweep over the
    gradients for clipping, and nobody waits for the device.
    """
    for group in optimizer.param_groups:
        group["lr"] = rate
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if finite.is_cuda and not hasattr(parameters[0], "full_tensor"):
        # The same as clip_grad_norm_: gradients are multiplied by min(1, clip / (norm + 1e-6)).
        excess = (norm.float() + 1e-6) / clip if clip > 0 else torch.zeros_like(norm, dtype=torch.float32)
        optimizer.grad_scale = excess.clamp_min(1.0)  # pyright: ignore[reportAttributeAccessIssue]
        optimizer.found_inf = (~finite).float()  # pyright: ignore[reportAttributeAccessIssue]
        optimizer.step()
    elif bool(finite):
        if clip > 0:
            nn.utils.clip_grads_with_norm_(parameters, clip, norm, foreach=True)
        optimizer.step()
