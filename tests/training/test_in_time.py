"""A run that ends at a given time."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from cedd import absorb
from cedd.models.transformer import Transformer
from cedd.training.config import OptimizerConfig, TrainConfig, read_config
from cedd.training.in_time import InTime
from cedd.training.loop import train
from cedd.training.run_folder import TRAIN_FILE
from cedd.training.speed import Meter
from tests.training.runs import ALONE, tiny_config, write_corpus

FALLS_LATE = OptimizerConfig(schedule="linear", decay_share=0.7, warmup=10)


@pytest.mark.parametrize(("before", "after"), [(0.04, 0.08), (0.08, 0.04), (0.3, 0.05)])
@pytest.mark.parametrize("pause", [0.0, 3.0])
def test_as_many_steps_as_fit_the_time(monkeypatch: pytest.MonkeyPatch, before: float, after: float, pause: float):
    """The number follows the speed, but no longer once the rate falls; a pause for an evaluation is no slower step."""
    now = 0.0
    # Of these modules alone: a server in this process would sleep by it.
    clock = SimpleNamespace(monotonic=lambda: now, perf_counter=lambda: now)
    monkeypatch.setattr("cedd.training.in_time.time", clock)
    monkeypatch.setattr("cedd.training.speed.time", clock)
    config = TrainConfig("text", Path("run"), steps=10_000, optimizer=replace(FALLS_LATE, warmup=30))
    meter = Meter(config, Transformer(config.model.build(absorb(5), config.length, causal=False)), ALONE)
    chosen = list[int]()
    trainer: Any = SimpleNamespace(config=config, state=SimpleNamespace(step=0), meter=meter)

    def change(config: TrainConfig) -> None:
        trainer.config = config
        chosen.append(trainer.state.step)

    trainer.change = change
    hooks = InTime(400.0, first=3, every=20, kept_back=round(5 * pause / after))
    while trainer.state.step < trainer.config.steps:
        hooks.before_step(trainer)
        now += 10.0 if trainer.state.step < 3 else before if trainer.state.step < 60 else after
        trainer.state.step += 1
        trainer.meter.tick(trainer.state.step)
        if pause and trainer.state.step % max(1, trainer.config.steps // 5) == 0:
            now += pause
            trainer.meter.pause()
    assert chosen[0] == 40
    assert chosen[-1] < 0.3 * trainer.config.steps
    assert 390 <= now - 30.0 < 404  # but for the first steps, which were slow


def test_a_run_ends_in_time_and_says_how_long_it_was(tmp_path: Path):
    """Evaluations and checkpoints follow the number of steps; the run's folder has it, so that it can go on."""
    config = tiny_config(write_corpus(tmp_path / "text.txt"), tmp_path / "cache", tmp_path / "run")
    config = replace(config, steps=1_000_000, optimizer=replace(FALLS_LATE, warmup=5), checkpoint_every=1_000_000)

    def with_checkpoints(config: TrainConfig, steps: int) -> TrainConfig:
        return replace(config, steps=steps, checkpoint_every=max(1, steps // 2))

    hooks = InTime(0.5, first=2, every=5, of_steps=with_checkpoints)
    result = train(config, Console(quiet=True), hooks)
    left = read_config(config.out / TRAIN_FILE)
    assert result.finished
    assert result.step == left.steps < 100_000
    assert left.checkpoint_every == left.steps // 2
    assert len(list((config.out / "checkpoints").iterdir())) >= 2
    again = train(left, Console(quiet=True))
    assert (again.finished, again.step) == (True, result.step)
