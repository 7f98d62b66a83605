"""The update after a step's gradients: their norm, clipping, the optimizer steps and the moving average."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from cedd.device import has_triton
from cedd.models.backbone import Backbone
from cedd.models.ema import EMA
from cedd.training.config import OptimizerConfig
from cedd.training.distributed import gather_full
from cedd.training.muon import Muon
from cedd.training.optimizer import AdamW, Optimizer, excess_of, reachable


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trained parameters, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def make_optimizers(model: Backbone, config: OptimizerConfig) -> list[Optimizer]:
    """AdamW, a further AdamW for each parameter group with its own rate, and Muon for the matrices if configured."""
    rest, groups, optimizers = trained(model), model.parameter_groups(), list[Optimizer]()

    def chosen(group: Mapping[str, nn.Parameter], option: str) -> dict[str, nn.Parameter]:
        if not (own := {name: parameter for name, parameter in rest.items() if name in group}):
            raise ValueError(f"{option} needs parameters that {model.architecture} does not have (parameter_groups)")
        return own

    if config.matrices == "muon":
        optimizers.append(Muon(chosen(groups.matrices, "optimizer.matrices muon"), config))
    for option, group, rate in (
        ("optimizer.embedding_rate", groups.embeddings, config.embedding_rate),
        ("optimizer.head_rate", groups.head, config.head_rate),
    ):
        if rate is not None:
            optimizers.append(AdamW(chosen(group, option), config, rate / config.rate))
    taken = {name for optimizer in optimizers for name in optimizer.parameters}
    rest = {name: parameter for name, parameter in rest.items() if name not in taken}
    return [AdamW(rest, config), *optimizers]


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The norm of all gradients, on the device."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return gather_full(nn.utils.get_total_norm(gradients, foreach=True))


class Update:
    """The update of all parameters by their optimizers, then of their moving average.

    `run` is the network that the gradients belong to: the model itself, or a copy with rounded weights, which is kept
    up to date.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        ema: EMA,
        config: OptimizerConfig,
        run: nn.Module | None = None,
    ) -> None:
        self.model, self.optimizers, self.ema, self.clip = model, optimizers, ema, config.clip
        self.parameters, self.sources = trained(model), trained(model if run is None else run)
        self.copies = {
            name: None if source is self.parameters[name] else source.detach() for name, source in self.sources.items()
        }
        self.swept = False
        """Whether kernels take the present step."""
        if has_triton() and self._all_reachable():
            for optimizer in optimizers:
                names = list(optimizer.parameters)
                optimizer.use_kernels([ema.shadow[name] for name in names], [self.copies[name] for name in names])

    def _all_reachable(self) -> bool:
        moments = [tensor for optimizer in self.optimizers for tensor in optimizer.tensors().values()]
        averages = [self.ema.shadow[name] for name in self.parameters]
        wide = all(map(reachable, (*self.parameters.values(), *averages, *moments)))
        return wide and all(reachable(copy, torch.bfloat16) for copy in self.copies.values() if copy is not None)

    def norm(self) -> Tensor:
        """The norm of all gradients, []."""
        self.swept = self._find_gradients()
        if self.swept:
            return functools.reduce(torch.hypot, [optimizer.table.norm() for optimizer in self.optimizers])
        for name, copy in self.copies.items():
            if copy is not None:
                parameter, gradient = self.parameters[name], self.sources[name].grad
                parameter.grad = None if gradient is None else gradient.to(parameter.dtype)
        return gradient_norm(self.parameters.values())

    def apply(self, rate: float, norm: Tensor, finite: Tensor) -> None:
        """One step with the gradients of the last `norm`. If finite [] is false, only the average is updated."""
        if self.swept:
            excess, good, pace = excess_of(norm, self.clip), finite.float(), self.ema.advance()
            for optimizer in self.optimizers:
                optimizer.sweep(rate, excess, good, pace)
            return
        for optimizer in self.optimizers:
            optimizer.step(rate, norm, self.clip, finite)
        self.ema.update(self.model)
        self.refresh()

    def refresh(self) -> None:
        """Refresh the rounded copies after the parameters were changed elsewhere."""
        copies = {name: copy for name, copy in self.copies.items() if copy is not None}
        if copies:
            values = [self.parameters[name].detach() for name in copies]
            torch._foreach_copy_(list(copies.values()), values)  # type: ignore[attr-defined]

    def forget_gradients(self) -> None:
        """Set all gradients to None, before the next step."""
        for parameter in (*self.parameters.values(), *self.sources.values()):
            parameter.grad = None

    def _find_gradients(self) -> bool:
        """Put the gradients into the optimizers' tables, if kernels can address all of them."""
        gradients = {name: source.grad for name, source in self.sources.items() if source.grad is not None}
        if any(optimizer.table is None for optimizer in self.optimizers) or len(gradients) != len(self.sources):
            return False
        if not all(reachable(gradient, self.sources[name].dtype) for name, gradient in gradients.items()):
            return False
        for optimizer in self.optimizers:
            optimizer.table.find([gradients[name] for name in optimizer.parameters])
        return True
