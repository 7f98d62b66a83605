"""A run that ends at a given time: its number of steps follows the speed of the machine."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from cedd.models.transformer import Transformer
from cedd.training.config import TrainConfig
from cedd.training.loop import Hooks, Trainer
from cedd.training.optimizer import share_left

NEAR = 0.05
"""While the rate falls, another end is chosen only where the steps left would change by more than this share."""


def of_steps(config: TrainConfig, steps: int) -> TrainConfig:
    """The same run with so many steps."""
    return replace(config, steps=steps)


def as_begun(config: TrainConfig, begun: TrainConfig) -> TrainConfig:
    """A run that goes on: with the end that it had chosen."""
    optimizer = replace(config.optimizer, decay_share=begun.optimizer.decay_share)
    return replace(config, steps=begun.steps, optimizer=optimizer)


@dataclass
class InTime(Hooks):
    """As many steps as fit the seconds, at the speed of the last ones.

    Until the rate falls, their number follows the speed. From then on it does where the end would move by more than
    NEAR (another program came, or went): a linear rate then falls faster or slower, from what it is. A cosine falls
    from the beginning, for as many steps as the run had then, which it keeps.

    seconds: of the run, from step `first` on.
    first: the steps before it are not timed, since compilation slows them down.
    every: the number of all steps is chosen anew after so many.
    kept_back: the time of so many steps is left over, for evaluations and for what comes after the run.
    most: more steps than these are never chosen.
    of_steps: the run with another number of steps, before its rate falls.
    evaluated: the evaluations so far took as long as so many steps.
    """

    seconds: float
    first: int = 20
    every: int = 100
    kept_back: int = 0
    most: int | None = None
    of_steps: Callable[[TrainConfig, int], TrainConfig] = of_steps
    end: float | None = None
    evaluated: float = 0.0

    def before_step(self, trainer: Trainer) -> None:
        config, step, now = trainer.config, trainer.state.step, time.monotonic()
        if self.end is None:
            if step >= self.first:
                self.end = now + self.seconds
                trainer.meter.pause()
            return
        each = trainer.meter.seconds_per_step
        if each is None or step % self.every or not config.optimizer.warmup <= step < config.steps - self.every:
            return
        fitting = (self.end - now) / each - max(0.0, self.kept_back - self.evaluated)
        chosen = step + max(self.every, int(fitting))
        if self.most is not None:
            chosen = min(chosen, self.most)
        if step >= falls_from(config) - self.every:
            if config.optimizer.schedule != "linear":
                return
            chosen = min(chosen, latest_end(config, step))
            if abs(chosen - config.steps) > NEAR * (config.steps - step):
                trainer.change(falling_to(config, step, chosen))
            return
        trainer.change(self.of_steps(config, chosen))

    def evaluate(self, trainer: Trainer, model: Transformer) -> float:
        started, each = time.monotonic(), trainer.meter.seconds_per_step
        bound = super().evaluate(trainer, model)
        self.evaluated += 0.0 if each is None else (time.monotonic() - started) / each
        return bound


# ----------------------------------------------------------------------------------------------------------------
# A rate that falls


def falls_from(config: TrainConfig) -> float:
    """The step from which the rate depends on the number of all steps."""
    optimizer = config.optimizer
    share = {"constant": 0.0, "linear": optimizer.decay_share, "cosine": 1.0}[optimizer.schedule]
    return (1 - share) * config.steps


def latest_end(config: TrainConfig, step: int) -> int:
    """The most steps that the rate can fall for, linearly, from what it is: the fall would have begun at step 0."""
    gone = 1 - share_left(config.optimizer, step, config.steps)
    return sys.maxsize if gone == 0 else int(step / gone)


def falling_to(config: TrainConfig, step: int, steps: int) -> TrainConfig:
    """The run of so many steps whose rate falls, linearly, from what it is at this step. It is evaluated and saved as
    before: at other steps it would be so again and again."""
    share = min(1.0, (steps - step) / (share_left(config.optimizer, step, config.steps) * steps))
    return replace(config, steps=steps, optimizer=replace(config.optimizer, decay_share=share))
