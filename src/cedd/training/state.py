"""The state of a training run: weights, their moving average, optimizer moments, and the step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from cedd.models.backbone import Backbone, persistent_buffers
from cedd.models.ema import EMA
from cedd.network import with_parameters
from cedd.training.distributed import gather_full
from cedd.training.optimizer import Optimizer

NOISE, DROPOUT, EVALUATION, ATTENTION, LABELS = 1, 2, 3, 4, 5  # separate uses of a seed


@dataclass(frozen=True)
class Counters:
    """The contents of a checkpoint besides tensors."""

    averaged: int
    """Updates of the moving average."""
    updates: int
    """Optimizer steps, without skipped ones."""
    best: float | None
    """The lowest bound on held-out text, if measured."""
    stale: int
    """Evaluations since the lowest bound."""
    steps: int
    """Planned steps of the whole run."""
    decay_share: float
    """Planned share of the steps in which the learning rate decays."""

    def check(self, step: int) -> None:
        """Refuse counts that are impossible after this many steps."""
        for name, value, most in (
            ("averaged", self.averaged, step),
            ("updates", self.updates, step),
            ("stale", self.stale, step),
            ("decay_share", self.decay_share, 1),
        ):
            if not 0 <= value <= most:
                raise ValueError(f"values.{name} must be between 0 and {most} (got {value})")
        if self.best is not None and not math.isfinite(self.best):
            raise ValueError(f"values.best must be finite (got {self.best})")


@dataclass
class TrainingState:
    """All that changes during training; `step` is the number of steps taken."""

    model: Backbone
    skeleton: Backbone
    """The network without weights, as it was before sharding and compilation. It shares the buffers of `model`."""
    ema: EMA
    optimizers: Sequence[Optimizer]
    step: int = 0

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name, without copying, so that a checkpoint can be loaded in place."""
        parameters = dict(self.model.named_parameters())
        tensors = {f"model/{name}": parameter.detach() for name, parameter in parameters.items()}
        averages = self.ema.shadow.items()  # frozen parameters are their own averages
        tensors |= {f"average/{name}": average for name, average in averages if parameters[name].requires_grad}
        tensors |= {f"buffer/{name}": buffer for name, buffer in persistent_buffers(self.skeleton).items()}
        for optimizer in self.optimizers:
            tensors |= optimizer.tensors()
        return tensors

    def restore(self, step: int, counters: Counters) -> None:
        """Set the counts, after the tensors were loaded."""
        self.step = step
        self.ema.updates = counters.averaged
        for optimizer in self.optimizers:
            optimizer.restore(counters.updates)

    def averaged_weights(self) -> dict[str, Tensor]:
        """The tensors of the weights file: averages of the parameters, and buffers."""
        averages = {name: gather_full(average) for name, average in self.ema.shadow.items()}
        return averages | persistent_buffers(self.skeleton)

    def averaged_model(self) -> Backbone:
        """The network with the averaged weights, in evaluation mode and not compiled.

        It shares memory with the average (unless that is sharded): use it before the next step.
        """
        averages = {name: gather_full(average) for name, average in self.ema.shadow.items()}
        return with_parameters(self.skeleton, averages).eval().requires_grad_(False)


def derived_seed(*parts: int) -> int:
    """A seed for one purpose at one step, computed from its parts, so that no random number generator has to be
    saved."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> np.uint64(1))
