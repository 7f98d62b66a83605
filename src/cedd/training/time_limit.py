"""Training within a time limit: the number of steps follows the speed of the machine."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from cedd.models.backbone import Backbone
from cedd.training.config import TrainConfig, read_config
from cedd.training.loop import Hooks, Trainer, TrainResult
from cedd.training.optimizer import share_left
from cedd.training.run_folder import TRAIN_FILE

MIN_CHANGE = 0.05
"""While the learning rate decays, the end moves only if the number of remaining steps changes by more than this
share."""
SHARE = 0.05
"""The largest share of the time between two choices of the number of steps."""
SETTLED = 3
"""Steps after the first timed one, until the speed is that of timed steps only."""


def with_steps(config: TrainConfig, steps: int) -> TrainConfig:
    """The same configuration with this number of steps."""
    return replace(config, steps=steps)


def as_begun(config: TrainConfig, begun: TrainConfig) -> TrainConfig:
    """A configuration to resume: with the number of steps, and the decay, that the run has chosen."""
    optimizer = replace(config.optimizer, decay_share=begun.optimizer.decay_share)
    return replace(config, steps=begun.steps, optimizer=optimizer)


def begun(config: TrainConfig, unchosen: int) -> TrainConfig | None:
    """The configuration of the run in this folder, to resume it. None if there is none, or if it was stopped before it
    chose a number of steps other than `unchosen`, its initial one."""
    file = config.out / TRAIN_FILE
    found = read_config(file) if file.is_file() else None
    return None if found is None or found.steps == unchosen else as_begun(config, found)


class Mark(NamedTuple):
    """A moment of a run, with the seconds spent on evaluations until then."""

    step: int
    time: float
    evaluating: float

    def seconds_per_step(self, since: Mark) -> float:
        """The mean since another moment, without evaluations."""
        return (self.time - since.time - (self.evaluating - since.evaluating)) / (self.step - since.step)


@dataclass
class TimeLimit(Hooks):
    """Train as many steps as fit into a number of seconds.

    Before the learning rate decays, the number of steps follows the speed, of the last steps or the mean, whichever is
    higher. During a linear decay it follows the mean speed since the decay began, if the end would move by more than
    MIN_CHANGE, and the decay becomes faster or slower from its present value. A cosine decays from the beginning, with
    the number of steps it has then.

    Args:
        seconds: time limit, from step `first` on.
        first: steps before it are not timed, since compilation slows them down.
        every: steps after which the number of steps is chosen again; fewer if they would take more than SHARE of the
            time.
        reserved_steps: time of this many steps is reserved for evaluations and for what follows the run.
        most: upper limit of the number of steps.
        with_steps: makes the configuration with another number of steps, before the decay.
        planned: the number of steps announced to the user, by default the initial one. If the final number differs, the
            run says so.
    """

    seconds: float
    first: int = 20
    every: int = 100
    reserved_steps: int = 0
    most: int | None = None
    with_steps: Callable[[TrainConfig, int], TrainConfig] = with_steps
    planned: int | None = None
    began: Mark | None = field(init=False, default=None)
    fell: Mark | None = field(init=False, default=None)
    evaluating: float = field(init=False, default=0.0)
    slow: bool | None = field(init=False, default=None)
    """Whether `every` steps take more than SHARE of the time. The end is then chosen during the warm-up, too."""

    def on_start(self, trainer: Trainer) -> None:
        if self.planned is None:
            self.planned = trainer.config.steps

    def before_step(self, trainer: Trainer) -> None:
        config, step = trainer.config, trainer.state.step
        here = Mark(step, time.monotonic(), self.evaluating)
        if self.began is None:
            if step >= self.first:
                self.began = here
                trainer.meter.pause()
            return
        recent = trainer.meter.seconds_per_step
        if recent is None or step < self.began.step + SETTLED:
            return
        if self.slow is None:  # by the clock of the first rank, so that all ranks choose at the same steps
            fitting = int(trainer.ranks.from_first(lambda: max(1.0, SHARE * self.seconds / recent)))
            self.slow, self.every = fitting < self.every, min(fitting, self.every)
        first = 0 if self.slow else config.optimizer.warmup
        if step % self.every or not first <= step < config.steps - self.every:
            return
        if step < falls_from(config) - self.every:
            each = min(
                recent, here.seconds_per_step(self.began)
            )  # a slow spell may pass; if not, the decay is shortened later
            chosen = self._fitting(trainer, self.began, here, each)
            changed = self.with_steps(config, chosen)
            if falls_from(changed) < step:  # the decay would already have begun
                changed = replace(changed, optimizer=falling_to(config, step, chosen).optimizer)
            trainer.change(changed)
        elif self.fell is None:
            self.fell = here
        elif config.optimizer.schedule == "linear":
            each = here.seconds_per_step(self.fell)
            chosen = min(self._fitting(trainer, self.began, here, each), latest_end(config, step))
            if abs(chosen - config.steps) > max(self.every, MIN_CHANGE * (config.steps - step)):
                trainer.change(falling_to(config, step, chosen))

    def _fitting(self, trainer: Trainer, began: Mark, here: Mark, each: float) -> int:
        """The number of steps that fit at this speed, by the clock of the first rank, so that all ranks agree."""
        kept = max(0.0, self.reserved_steps * each - self.evaluating)
        left = began.time + self.seconds - here.time - kept
        steps = here.step + max(self.every, int(left / each))
        return int(trainer.ranks.from_first(lambda: steps if self.most is None else min(steps, self.most)))

    def evaluate(self, trainer: Trainer, model: Backbone) -> float:
        started = time.monotonic()
        bound = super().evaluate(trainer, model)
        self.evaluating += time.monotonic() - started
        return bound

    def on_end(self, trainer: Trainer, result: TrainResult) -> None:
        if result.finished and result.step != self.planned:
            trainer.log.say(f"{result.step} steps instead of {self.planned}, following the speed of the machine")


class ResumedTimeLimit(Hooks):
    """A run with a time limit that resumes from a checkpoint, with the end that it chose last.

    If that choice was made after the checkpoint, during the decay, its line may lie above the checkpoint's learning
    rate. The rate then decays to the chosen end from the checkpoint's value instead.
    """

    def on_start(self, trainer: Trainer) -> None:
        config, saved = trainer.config, trainer.restored
        if saved is None or saved.decay_share == config.optimizer.decay_share:
            return
        optimizer = replace(config.optimizer, decay_share=saved.decay_share)
        line = replace(config, steps=saved.steps, optimizer=optimizer)
        step = max(trainer.state.step, int(falls_from(line)))
        if step < config.steps:
            trainer.change(falling_to(line, step, config.steps))


# ----------------------------------------------------------------------------------------------------------------
# A rate that falls


def falls_from(config: TrainConfig) -> float:
    """The step from which the learning rate depends on the total number of steps."""
    optimizer = config.optimizer
    share = {"constant": 0.0, "linear": optimizer.decay_share, "cosine": 1.0}[optimizer.schedule]
    return (1 - share) * config.steps


def latest_end(config: TrainConfig, step: int) -> int:
    """The largest number of steps to which the rate can decay linearly from its present value: with a decay that began
    at step 0."""
    gone = 1 - share_left(config.optimizer, step, config.steps)
    return sys.maxsize if gone == 0 else int(step / gone)


def falling_to(config: TrainConfig, step: int, steps: int) -> TrainConfig:
    """The configuration with this number of steps, in which the rate decays linearly from its present value.
    Evaluations and checkpoints stay at the same steps."""
    share = min(1.0, (steps - step) / (share_left(config.optimizer, step, config.steps) * steps))
    return replace(config, steps=steps, optimizer=replace(config.optimizer, decay_share=share))
