"""A run that ends at a given time: its number of steps follows the speed of the machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from cedd.training.config import TrainConfig
from cedd.training.loop import Hooks, Trainer


def of_steps(config: TrainConfig, steps: int) -> TrainConfig:
    """The same run with so many steps."""
    return replace(config, steps=steps)


@dataclass
class InTime(Hooks):
    """As many steps as fit the seconds, at the speed of the last ones; chosen before the rate falls.

    seconds: of the run, from step `first` on.
    first: the steps before it are not timed, since compilation slows them down.
    every: the number of all steps is chosen anew after so many.
    kept_back: the time of so many steps is left over, for evaluations and for what comes after the run.
    most: more steps than these are never chosen.
    of_steps: the run with another number of steps.
    """

    seconds: float
    first: int = 20
    every: int = 100
    kept_back: int = 0
    most: int | None = None
    of_steps: Callable[[TrainConfig, int], TrainConfig] = of_steps
    end: float | None = None

    def before_step(self, trainer: Trainer) -> None:
        config, step, now = trainer.config, trainer.state.step, time.monotonic()
        if self.end is None:
            if step >= self.first:
                self.end = now + self.seconds
                trainer.meter.pause()
            return
        each, falls = trainer.meter.seconds_per_step, (1 - config.optimizer.decay_share) * config.steps
        if each is None or step % self.every or not config.optimizer.warmup <= step < falls - self.every:
            return
        chosen = step + max(self.every, int((self.end - now) / each) - self.kept_back)
        trainer.change(self.of_steps(config, chosen if self.most is None else min(chosen, self.most)))
