"""The exponential moving average of a model's parameters: the weights that are evaluated and published."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

UPDATES = "ema.updates"
"""The entry of the state that counts the updates; all others are named after parameters."""


class EMA:
    """shadow <- decay · shadow + (1 - decay) · parameter, in float32, after every step.

    With ``warmup`` the decay is min(decay, (1 + updates) / (10 + updates)): a short run is not left with its
    initial weights. With ``every`` = k only each k-th call updates the average, with the k-th power of the decay: its
    memory is as long, and it uses every k-th value of the parameters, which change little in between.
    """

    def __init__(self, model: nn.Module, decay: float = 0.9999, warmup: bool = False, every: int = 1) -> None:
        if not 0.0 <= decay < 1.0:
            raise ValueError(f"the decay of an average must be in [0, 1) (got {decay})")
        if every < 1:
            raise ValueError(f"an average must move every 1, 2, ... updates, not every {every}")
        self.decay, self.warmup, self.every, self.updates = decay, warmup, every, 0
        self._known: tuple[nn.Module, list[nn.Parameter]] | None = None
        self.shadow: dict[str, Tensor] = {
            name: parameter.detach().to(torch.float32, copy=True) if parameter.requires_grad else parameter.detach()
            for name, parameter in model.named_parameters()
        }
        """The average of each parameter; for a frozen parameter, the parameter itself."""

    def current_decay(self) -> float:
        """The decay of the next update."""
        if not self.warmup:
            return self.decay
        return min(self.decay, (1 + self.updates) / (10 + self.updates))

    def advance(self) -> float:
        """Count an update; returns the weight of the parameters in the new average, 0 if the average is not updated."""
        decay = self.current_decay()
        self.updates += 1
        return 0.0 if self.updates % self.every else 1.0 - decay**self.every

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """One step, in place and in few kernels; float32 parameters are read without a copy."""
        pace = self.advance()
        if pace == 0.0:
            return
        pairs = zip(self.shadow.values(), self._parameters(model), strict=True)
        moving = [(average, parameter) for average, parameter in pairs if parameter.requires_grad]
        averages, parameters = [pair[0] for pair in moving], [pair[1].detach().float() for pair in moving]
        torch._foreach_lerp_(averages, parameters, pace)  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, Tensor]:
        """The averages by their parameters' names, and the number of updates: tensors only."""
        return {**self.shadow, UPDATES: torch.tensor(self.updates)}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a ``state_dict``."""
        if different := sorted(state.keys() ^ {*self.shadow, UPDATES}):
            few = ", ".join(different[:3]) + (f" and {len(different) - 3} more" if len(different) > 3 else "")
            raise ValueError(f"these averages are not of this model's parameters: {few} differ")
        for name, average in self.shadow.items():
            if state[name].shape != average.shape:
                raise ValueError(f"the average of {name} is {_shape(state[name])}, not {_shape(average)}")
            average.copy_(state[name])
        self.updates = int(state[UPDATES])

    def _parameters(self, model: nn.Module) -> list[nn.Parameter]:
        """The model's parameters in the shadow's order, looked up once per model: lookup by name is slow."""
        if self._known is None or self._known[0] is not model:
            self._known = (model, [model.get_parameter(name) for name in self.shadow])
        return self._known[1]


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "a scalar"
