"""Runs with a time limit."""

import io
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from cedd import absorb
from cedd.models.transformer import Transformer
from cedd.training.config import OptimizerConfig, TrainConfig, read_config
from cedd.training.loop import Hooks, Trainer, TrainResult, run_training
from cedd.training.optimizer import learning_rate
from cedd.training.run_folder import TRAIN_FILE
from cedd.training.speed import Meter
from cedd.training.state import Counters
from cedd.training.time_limit import ResumedTimeLimit, TimeLimit, as_begun, falling_to
from tests.combinations import covering
from tests.training.runs import ALONE, tiny_config, write_corpus

FALLS_LATE = OptimizerConfig(schedule="linear", decay_share=0.7, warmup=10)


def rate_of(config: TrainConfig, step: int) -> float:
    return learning_rate(config.optimizer, step, config.steps)


class Clock:
    """A simulated clock and trainer: a step takes `seconds(step)`, an evaluation as long as `pause` steps."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, config: TrainConfig, seconds: Callable[[int], float], pause: int = 0
    ) -> None:
        self.now, self.chosen, self.rates = 0.0, list[int](), list[float]()
        # Only in these modules: a server in this process must keep the real clock.
        clock = SimpleNamespace(monotonic=lambda: self.now, perf_counter=lambda: self.now)
        monkeypatch.setattr("cedd.training.time_limit.time", clock)
        monkeypatch.setattr("cedd.training.speed.time", clock)
        self.model = Transformer(config.model.build(absorb(5), config.length, causal=False))
        self.seconds, self.pause, self.meter = seconds, pause, Meter(config, self.model, ALONE)
        self.config, self.state, self.log, self.ranks = config, SimpleNamespace(step=0), None, ALONE
        self.validation, self.evaluations = self, 0

    def measure(self, *_: object) -> float:
        self.evaluations += 1
        self.now += self.pause * self.seconds(self.state.step)
        return 0.0

    def change(self, config: TrainConfig) -> None:
        config.check()
        self.config = config
        self.chosen.append(self.state.step)

    def run(self, hooks: TimeLimit) -> None:
        trainer: Any = self
        while self.state.step < self.config.steps:
            hooks.before_step(trainer)
            self.rates.append(rate_of(self.config, self.state.step))
            self.now += self.seconds(self.state.step)
            self.state.step += 1
            self.meter.tick(self.state.step)
            if self.pause and self.state.step % self.config.evaluation.every == 0:
                hooks.evaluate(trainer, self.model)
                self.meter.pause()


def in_fifths(config: TrainConfig, steps: int) -> TrainConfig:
    """The run with this number of steps, evaluated five times."""
    return replace(config, steps=steps, evaluation=replace(config.evaluation, every=max(1, steps // 5)))


LONG = in_fifths(TrainConfig("text", Path("run"), optimizer=replace(FALLS_LATE, warmup=30)), 10_000)


@pytest.mark.parametrize(("before", "after"), [(0.04, 0.08), (0.08, 0.04), (0.3, 0.05)])
@pytest.mark.parametrize("pause", [0, 60])
def test_step_count_fits_time_limit(monkeypatch: pytest.MonkeyPatch, before: float, after: float, pause: int):
    """The step count follows the speed; evaluation pauses do not count as slow steps. If the machine became faster
    early, the count is not changed while the rate decays."""
    clock = Clock(monkeypatch, LONG, lambda step: 10.0 if step < 3 else before if step < 60 else after, pause)
    clock.run(TimeLimit(400.0, first=3, every=20, reserved_steps=5 * pause, with_steps=in_fifths))
    assert clock.chosen[0] == 40
    if after < before:
        assert clock.chosen[-1] < 0.3 * clock.config.steps
        assert clock.config.optimizer == LONG.optimizer
    assert 390 <= clock.now - 30.0 < 404  # excluding the first, slow steps


@pytest.mark.parametrize(
    ("when", "pause", "factor"),
    covering(
        (*row, factor)
        for factor in (0.3, 0.8, 1.3, 4.0)
        for row in ((40, 0), (80, 30), (160, 0), (240, 30), (320, 0), (320, 30))
    ),
)
def test_speed_change_during_decay_keeps_limit_and_smooth_rate(
    monkeypatch: pytest.MonkeyPatch, factor: float, when: int, pause: int
):
    """The run still ends in time, or earlier where the rate would have to rise; the rate never jumps."""
    clock = Clock(monkeypatch, LONG, lambda _: 0.1 * (factor if clock.now > when else 1.0), pause)
    clock.run(TimeLimit(400.0, first=3, every=20, reserved_steps=5 * pause, with_steps=in_fifths))
    spared = max(0, 5 - clock.evaluations) * pause * 0.1 * factor  # of the time reserved for evaluations
    assert (300 if factor < 1 else 384) - spared < clock.now < 416
    rates = clock.rates[LONG.optimizer.warmup :]
    falls = [before - after for before, after in pairwise(rates)]
    assert all(0 <= fall < 0.02 * LONG.optimizer.rate for fall in falls)
    assert rates[-1] < 0.06 * LONG.optimizer.rate
    assert clock.evaluations <= (0 if not pause else 12 if factor < 1 else 5)  # more only where there are more steps


@pytest.mark.parametrize(("factor", "begin", "end"), [(5, 20, 40), (5, 60, 80), (5, 100, 120), (3, 130, 150)])
def test_temporary_slowdown_does_not_end_run(monkeypatch: pytest.MonkeyPatch, factor: float, begin: int, end: int):
    """Twenty slow seconds of two hundred cost little more than their own steps."""
    clock = Clock(monkeypatch, LONG, lambda _: 0.16 * (factor if begin < clock.now < end else 1.0), 8)
    clock.run(TimeLimit(200.0, first=0, every=10, reserved_steps=120, with_steps=in_fifths))
    assert clock.now > 160
    assert clock.state.step > 850  # of 1,130 without the slowdown
    rates = clock.rates[LONG.optimizer.warmup :]
    assert all(0 <= before - after < 0.02 * LONG.optimizer.rate for before, after in pairwise(rates))


def test_limit_of_few_steps_is_respected(monkeypatch: pytest.MonkeyPatch):
    """Steps so slow that fewer fit than lie between two updates of the step count, or than the warm-up has."""
    config = replace(LONG, steps=5000, optimizer=OptimizerConfig(schedule="linear", warmup=100))
    clock = Clock(monkeypatch, config, lambda _: 3.0)
    clock.run(TimeLimit(120.0, first=1))
    assert 34 <= clock.state.step <= 42
    assert clock.now <= 126
    end = rate_of(clock.config, clock.state.step)
    assert end < rate_of(clock.config, clock.state.step - 1) < 0.1 * config.optimizer.rate
    assert end == 0


def test_cosine_schedule_keeps_its_step_count(monkeypatch: pytest.MonkeyPatch):
    """Every rate of a cosine schedule depends on the step count; a constant rate does not."""
    for schedule, steps in (("cosine", 1000), ("constant", 2000)):
        config = replace(LONG, steps=1000, optimizer=replace(LONG.optimizer, schedule=schedule))
        clock = Clock(monkeypatch, config, lambda _: 0.1)
        clock.run(TimeLimit(200.0, first=3, every=20))
        assert abs(clock.config.steps - steps) <= 5


def test_timed_run_ends_in_time_and_reports_its_steps(tmp_path: Path):
    """The checkpoint interval follows the step count until the rate decays; the folder stores both for resumption."""
    config = tiny_config(write_corpus(tmp_path / "text.txt"), tmp_path / "cache", tmp_path / "run")
    config = replace(config, steps=1_000_000, optimizer=replace(FALLS_LATE, warmup=5), checkpoint_every=1_000_000)

    def with_checkpoints(config: TrainConfig, steps: int) -> TrainConfig:
        return replace(config, steps=steps, checkpoint_every=max(1, steps // 2))

    hooks = TimeLimit(0.5, first=2, every=5, with_steps=with_checkpoints)
    said = io.StringIO()
    result = run_training(config, Console(file=said, width=200), hooks)
    left = read_config(config.out / TRAIN_FILE)
    assert result.finished
    assert result.step == left.steps < 100_000
    line = f"{result.step} steps instead of 1000000, following the speed of the machine"
    assert said.getvalue().splitlines().count(line) == 1
    messages = list[str]()
    trainer: Any = SimpleNamespace(config=replace(config, steps=1000), log=SimpleNamespace(say=messages.append))
    for announced, step, finished in ((None, 1000, True), (990, 990, True), (990, 700, False), (990, 700, True)):
        hooks = TimeLimit(0.5, planned=announced)
        hooks.on_start(trainer)
        hooks.on_end(trainer, TrainResult(step, None, None, finished, ""))
    assert messages == ["700 steps instead of 990, following the speed of the machine"]
    assert left.checkpoint_every < 100_000
    assert len(list((config.out / "checkpoints").iterdir())) >= 1
    again = run_training(left, Console(quiet=True))
    assert (again.finished, again.step) == (True, result.step)


def test_killed_run_decays_from_rate_of_its_checkpoint(tmp_path: Path):
    """A line to an end chosen later would lie above that rate; a second kill gives the same rates."""
    config = tiny_config(write_corpus(tmp_path / "text.txt"), tmp_path / "cache", tmp_path / "run")
    optimizer = OptimizerConfig(schedule="linear", decay_share=0.7, warmup=2)
    config = replace(config, steps=40, optimizer=optimizer, checkpoint_every=10, log_every=1)

    class Killed(Exception):
        """As kill -9: no checkpoint is written."""

    class First(Hooks):
        def before_step(self, trainer: Trainer) -> None:
            if trainer.state.step == 15:
                trainer.change(falling_to(trainer.config, 15, 24))
            if trainer.state.step == 17:
                raise Killed

    class Again(ResumedTimeLimit):
        def __init__(self, last: int) -> None:
            self.rates, self.last = dict[int, float](), last

        def before_step(self, trainer: Trainer) -> None:
            step = trainer.state.step
            if step == self.last:
                raise Killed
            self.rates[step] = trainer.train_step.rate(step)

    with pytest.raises(Killed):
        run_training(config, Console(quiet=True), First())
    begun = as_begun(config, read_config(config.out / TRAIN_FILE))
    assert begun.steps == 24
    assert rate_of(begun, 14) > rate_of(config, 14)  # which falls from step 12 on
    again = Again(13)
    with pytest.raises(Killed):
        run_training(begun, Console(quiet=True), again)
    begun = as_begun(config, read_config(config.out / TRAIN_FILE))
    last = Again(24)
    assert run_training(begun, Console(quiet=True), last).finished
    falling = replace(config, steps=24, optimizer=replace(optimizer, decay_share=0.5))  # from step 12 on
    assert last.rates == pytest.approx({step: rate_of(falling, step) for step in range(10, 24)}, rel=1e-9)
    assert again.rates == {step: last.rates[step] for step in range(10, 13)}
    assert all(rate <= rate_of(config, step) for step, rate in last.rates.items())
    assert read_config(config.out / TRAIN_FILE).steps == 24


def counters(steps: int, decay_share: float) -> Counters:
    return Counters(averaged=16, updates=16, best=None, stale=0, steps=steps, decay_share=decay_share)


def test_end_before_rate_decay_of_checkpoint_is_kept():
    """The run keeps the end it chose: a checkpoint of the first steps has an outdated schedule. After the decay of the
    checkpoint began, the rate decays from that of the checkpoint."""
    line = OptimizerConfig(schedule="linear", decay_share=0.7, warmup=2)
    config, changes = replace(LONG, steps=40, optimizer=replace(line, decay_share=0.25)), list[TrainConfig]()
    decaying = counters(steps=30, decay_share=0.7)  # from step 9 on
    for saved in (counters(steps=167, decay_share=0.7), counters(steps=40, decay_share=0.25), None, decaying):
        state = SimpleNamespace(step=16)
        trainer: Any = SimpleNamespace(config=config, state=state, restored=saved, change=changes.append)
        ResumedTimeLimit().on_start(trainer)
    (changed,) = changes
    assert changed.steps == 40
    assert rate_of(changed, 16) == pytest.approx(rate_of(replace(config, steps=30, optimizer=line), 16))
