"""A run that ends at a given time: its number of steps follows the speed of the machine."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from cedd.models.transformer import Transformer
from cedd.training.config import TrainConfig, read_config
from cedd.training.loop import Hooks, Trainer, TrainResult
from cedd.training.optimizer import share_left
from cedd.training.run_folder import TRAIN_FILE

NEAR = 0.05
"""While the rate falls, another end is chosen only where the steps left would change by more than this share."""


def of_steps(config: TrainConfig, steps: int) -> TrainConfig:
    """The same run with so many steps."""
    return replace(config, steps=steps)


def as_begun(config: TrainConfig, begun: TrainConfig) -> TrainConfig:
    """A run that goes on: with the end that it had chosen, and the line by which its rate falls to it."""
    optimizer = replace(config.optimizer, decay_share=begun.optimizer.decay_share)
    return replace(config, steps=begun.steps, optimizer=optimizer)


def begun(config: TrainConfig, unchosen: int) -> TrainConfig | None:
    """The run as its folder has it, to go on; None where there is none, or one that was stopped before it chose another
    number of steps than the `unchosen`, which it begins with."""
    file = config.out / TRAIN_FILE
    found = read_config(file) if file.is_file() else None
    return None if found is None or found.steps == unchosen else as_begun(config, found)


class Mark(NamedTuple):
    """A moment of a run, and the seconds that evaluations had taken by then."""

    step: int
    time: float
    evaluating: float

    def seconds_per_step(self, since: Mark) -> float:
        """The mean since another moment, without evaluations."""
        return (self.time - since.time - (self.evaluating - since.evaluating)) / (self.step - since.step)


@dataclass
class InTime(Hooks):
    """As many steps as fit the seconds.

    Until the rate falls, their number follows the speed: that of the last steps or the mean, whichever is higher. From
    then on it follows the mean since then where the end would move by more than NEAR, and a linear rate falls faster or
    slower, from what it is. A cosine falls from the beginning, for as many steps as the run had then, which it keeps.

    seconds: of the run, from step `first` on.
    first: the steps before it are not timed, since compilation slows them down.
    every: the number of all steps is chosen anew after so many.
    kept_back: the time of so many steps is left over, for evaluations and for what comes after the run.
    most: more steps than these are never chosen.
    of_steps: the run with another number of steps, before its rate falls.
    announced: the number of steps that was told; that which the run starts with, unless given. If it becomes another,
        the end of the run says so.
    """

    seconds: float
    first: int = 20
    every: int = 100
    kept_back: int = 0
    most: int | None = None
    of_steps: Callable[[TrainConfig, int], TrainConfig] = of_steps
    announced: int | None = None
    began: Mark | None = field(init=False, default=None)
    fell: Mark | None = field(init=False, default=None)
    evaluating: float = field(init=False, default=0.0)

    def on_start(self, trainer: Trainer) -> None:
        if self.announced is None:
            self.announced = trainer.config.steps

    def before_step(self, trainer: Trainer) -> None:
        config, step = trainer.config, trainer.state.step
        here = Mark(step, time.monotonic(), self.evaluating)
        if self.began is None:
            if step >= self.first:
                self.began = here
                trainer.meter.pause()
            return
        recent = trainer.meter.seconds_per_step
        if recent is None or step % self.every or not config.optimizer.warmup <= step < config.steps - self.every:
            return
        if step < falls_from(config) - self.every:
            each = min(recent, here.seconds_per_step(self.began))  # trouble passes; if not, the fall will be faster
            chosen = self._fitting(trainer, self.began, here, each)
            changed = self.of_steps(config, chosen)
            if falls_from(changed) < step:  # it would have begun to fall by now
                changed = replace(changed, optimizer=falling_to(config, step, chosen).optimizer)
            trainer.change(changed)
        elif self.fell is None:
            self.fell = here
        elif config.optimizer.schedule == "linear":
            each = here.seconds_per_step(self.fell)
            chosen = min(self._fitting(trainer, self.began, here, each), latest_end(config, step))
            if abs(chosen - config.steps) > max(self.every, NEAR * (config.steps - step)):
                trainer.change(falling_to(config, step, chosen))

    def _fitting(self, trainer: Trainer, began: Mark, here: Mark, each: float) -> int:
        """How many steps the run can have if those to come take so long each, by the clock of the first rank: the
        others' differ, and so would their numbers of steps."""
        kept = max(0.0, self.kept_back * each - self.evaluating)
        left = began.time + self.seconds - here.time - kept
        steps = here.step + max(self.every, int(left / each))
        return int(trainer.ranks.from_first(lambda: steps if self.most is None else min(steps, self.most)))

    def evaluate(self, trainer: Trainer, model: Transformer) -> float:
        started = time.monotonic()
        bound = super().evaluate(trainer, model)
        self.evaluating += time.monotonic() - started
        return bound

    def on_end(self, trainer: Trainer, result: TrainResult) -> None:
        if result.finished and result.step != self.announced:
            trainer.records.say(f"{result.step} steps, not {self.announced}: their number followed the machine's speed")


class GoesOn(Hooks):
    """A run in time that goes on from its checkpoint, to the end that it had chosen last.

    If that was after the checkpoint, while the rate fell, the line to it begins at the step of that choice, and may be
    higher before: the rate falls to it from what the checkpoint's line has, instead.
    """

    def on_start(self, trainer: Trainer) -> None:
        config, saved = trainer.config, trainer.restored
        share = saved.get("decay_share", config.optimizer.decay_share)  # an earlier version's checkpoint has none
        if share == config.optimizer.decay_share:
            return
        line = replace(config, steps=saved["steps"], optimizer=replace(config.optimizer, decay_share=share))
        step = max(trainer.state.step, int(falls_from(line)))
        if step < config.steps:
            trainer.change(falling_to(line, step, config.steps))


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
