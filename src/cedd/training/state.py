"""The state of a training run: weights, their average, the optimizers' moments, and the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cedd.models.ema import EMA
from cedd.models.transformer import Transformer
from cedd.training.distributed import gather_full
from cedd.training.optimizer import Optimizer

NOISE, DROPOUT, EVALUATION = 1, 2, 3  # separate uses of a seed


@dataclass
class TrainingState:
    """All that changes during training; `step` counts the steps taken."""

    model: Transformer
    ema: EMA
    optimizers: Sequence[Optimizer]
    step: int = 0

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name; not copies, so that loading fills them in place."""
        tensors = {f"model/{name}": parameter.detach() for name, parameter in self.model.named_parameters()}
        tensors |= {f"average/{name}": average for name, average in self.ema.shadow.items()}
        for optimizer in self.optimizers:
            tensors |= optimizer.tensors()
        return tensors

    def values(self) -> dict[str, Any]:
        """The counters, which are no tensors."""
        return {"averaged": self.ema.updates, "updates": self.optimizers[0].updates}

    def restore(self, step: int, values: dict[str, Any]) -> None:
        """Set the counters, after the tensors were filled."""
        self.step = step
        self.ema.updates = values["averaged"]
        for optimizer in self.optimizers:
            optimizer.restore(values["updates"])

    def averaged_model(self) -> Transformer:
        """The network with the averaged weights, in evaluation mode and never compiled.

        It reads the average itself, not a copy (unless that is sharded): use it before the next step.
        """
        with torch.device("meta"):
            model = Transformer(self.model.config)
        averages = {name: gather_full(average) for name, average in self.ema.shadow.items()}
        model.load_state_dict(averages, assign=True)
        # Buffers (the rotary tables) are constants that no state holds.
        for name, buffer in self.model.named_buffers():
            owner, _, leaf = name.rpartition(".")
            model.get_submodule(owner).register_buffer(leaf, buffer, persistent=False)
        return model.eval().requires_grad_(False)


def derived_seed(*parts: int) -> int:
    """A seed for one purpose at one step, a function of its parts: no random number generator has to be saved."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> np.uint64(1))
