"""AdamW with warm-up, and the one step that it takes: clip, update, average; never on a gradient that is not finite."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from cedd.models.ema import EMA
from cedd.models.kernels import has_triton
from cedd.training.config import OptimizerConfig
from cedd.training.distributed import whole

if TYPE_CHECKING:
    from cedd.training.update_triton import TensorTable


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


def excess_of(norm: Tensor, clip: float) -> Tensor:
    """What gradients are divided by, [] float32. The same as clip_grad_norm_: times min(1, clip / (norm + 1e-6))."""
    excess = (norm.float() + 1e-6) / clip if clip > 0 else torch.zeros_like(norm, dtype=torch.float32)
    return excess.clamp_min(1.0)


def apply_gradients(optimizer: AdamW, rate: float, norm: Tensor, clip: float, finite: Tensor) -> None:
    """One step with the gradients scaled to a norm of at most `clip` (0: as they are), unless `finite` [] is false.

    On CUDA both are left to the optimizer's kernel, which divides by the scale and skips its update: no sweep over the
    gradients for clipping, and nobody waits for the device.
    """
    for group in optimizer.param_groups:
        group["lr"] = rate
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if finite.is_cuda and not hasattr(parameters[0], "full_tensor"):
        optimizer.grad_scale = excess_of(norm, clip)  # pyright: ignore[reportAttributeAccessIssue]
        optimizer.found_inf = (~finite).float()  # pyright: ignore[reportAttributeAccessIssue]
        optimizer.step()
    elif bool(finite):
        if clip > 0:
            nn.utils.clip_grads_with_norm_(parameters, clip, norm, foreach=True)
        optimizer.step()


class Update:
    """What follows a step's gradients: their norm, then clipping, AdamW and the moving average.

    One kernel for all parameters where Triton can reach them as they lie, else torch's own, in turn. `run` is the
    network that the gradients are of: the model itself, or its copy with rounded weights, which is kept up to date.
    """

    def __init__(self, model: nn.Module, optimizer: AdamW, ema: EMA, clip: float, run: nn.Module | None = None) -> None:
        self.model, self.optimizer, self.ema, self.clip = model, optimizer, ema, clip
        self.parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.states = [optimizer.state[parameter] for parameter in self.parameters]
        source = model if run is None else run
        self.sources = [parameter for parameter in source.parameters() if parameter.requires_grad]
        self.copies = [
            None if source is parameter else source.detach()
            for source, parameter in zip(self.sources, self.parameters, strict=True)
        ]
        self.table = self._table()
        self.found: TensorTable | None = None

    def _table(self) -> TensorTable | None:
        shadow = [self.ema.shadow[name] for name, p in self.model.named_parameters() if p.requires_grad]
        first, second = ([state[name] for state in self.states] for name in ("exp_avg", "exp_avg_sq"))
        wide = (*self.parameters, *shadow, *first, *second)
        low = [copy for copy in self.copies if copy is not None]
        reached = all(map(_reachable, wide)) and all(_reachable(copy, torch.bfloat16) for copy in low)
        if not has_triton() or not reached:
            return None
        from cedd.training.update_triton import TensorTable

        return TensorTable(self.parameters, first, second, shadow, self.copies)

    def norm(self) -> Tensor:
        """The norm of all gradients, []."""
        self.found = self._find_gradients()
        if self.found is not None:
            return self.found.norm()
        for parameter, source, copy in zip(self.parameters, self.sources, self.copies, strict=True):
            if copy is not None:
                parameter.grad = None if source.grad is None else source.grad.to(parameter.dtype)
        return gradient_norm(self.parameters)

    def apply(self, rate: float, norm: Tensor, finite: Tensor) -> None:
        """One step with the gradients whose norm was asked for last; if finite [] is false, of the average alone."""
        if self.found is None:
            apply_gradients(self.optimizer, rate, norm, self.clip, finite)
            self.ema.update(self.model)
            self.refresh()
            return
        group, good = self.optimizer.param_groups[0], finite.float()
        self.found.update(
            self.states[0]["step"],
            excess_of(norm, self.clip),
            good,
            rate=rate,
            betas=group["betas"],
            epsilon=group["eps"],
            decay=group["weight_decay"],
            pace=self.ema.advance(),
        )
        # A list, one for each: a single tensor would be read by the host, which would wait for the device.
        counts = [state["step"] for state in self.states]
        torch._foreach_add_(counts, [good] * len(counts))  # type: ignore[attr-defined]

    def refresh(self) -> None:
        """Make the copies anew, after the parameters were changed by another than this."""
        for parameter, copy in zip(self.parameters, self.copies, strict=True):
            if copy is not None:
                copy.copy_(parameter.detach())

    def forget_gradients(self) -> None:
        """Before the next step's are made."""
        for parameter in (*self.parameters, *self.sources):
            parameter.grad = None

    def _find_gradients(self) -> TensorTable | None:
        """The table with the gradients entered, if all of them can be."""
        gradients = [source.grad for source in self.sources if source.grad is not None]
        if self.table is None or len(gradients) != len(self.sources):
            return None
        if not all(_reachable(g, source.dtype) for g, source in zip(gradients, self.sources, strict=True)):
            return None
        self.table.find(gradients)
        return self.table


def _reachable(tensor: Tensor, dtype: torch.dtype = torch.float32) -> bool:
    """Whether a kernel can take a tensor by its address: of that type, dense, aligned, whole, on the device."""
    plain = tensor.is_cuda and tensor.dtype == dtype and tensor.is_contiguous()
    return plain and not hasattr(tensor, "full_tensor") and tensor.data_ptr() % 16 == 0
