"""Kill -9 at any moment, also inside a checkpoint's write: the run goes on, and ends with the same bits."""

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cedd.training.config import TrainConfig
from tests.training.processes import POINTS, start_server, start_training, wait
from tests.training.runs import assert_same_run, changed, checkpoint_steps, run, tiny_config

Make = Callable[..., TrainConfig]
SETTINGS = {"checkpoint_every": 3, "keep": 2}  # saves at 3, 6, 9 and 12; from the third on, an old one goes


@pytest.fixture(scope="module", autouse=True)
def server() -> None:
    start_server()


@pytest.fixture(autouse=True)
def no_plot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cedd.training.loop.plot_log", lambda folder: None)


@pytest.fixture(scope="module")
def never_killed(corpus: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("never") / "run"
    run(tiny_config(corpus, cache, out, SETTINGS))
    return out


@pytest.mark.parametrize("point", POINTS)
def test_killed_inside_a_save(config: Make, never_killed: Path, point: str):
    settings = config("killed", SETTINGS)
    at_save = 1 if "old one" in point else 3
    assert wait(start_training(settings, point, at_save)) == -signal.SIGKILL
    published = {"after it is published", "before an old one is dropped", "while an old one is dropped"}
    saved = 9 if point in published or "model's" in point else 6
    assert checkpoint_steps(settings.out)[-1] == saved
    run(settings)
    assert_same_run(never_killed, settings.out)
    hidden = [path for path in settings.out.rglob("*") if path.name.startswith(".")]
    assert not hidden


def kill_at_random(settings: TrainConfig, kills: int, longest: float, chance: random.Random) -> int:
    """Start the run and kill it after a random delay, `kills` times; how many times it was still running."""
    landed = 0
    for _ in range(kills):
        child = start_training(settings)
        time.sleep(chance.uniform(0.0, longest))
        assert child.pid is not None
        if child.exitcode is None:
            os.kill(child.pid, signal.SIGKILL)
        landed += wait(child) == -signal.SIGKILL
    return landed


def test_killed_at_random_moments(config: Make, never_killed: Path):
    settings = config("killed", SETTINGS)
    assert kill_at_random(settings, 3, 0.5, random.Random(0)) > 0
    run(settings)
    assert_same_run(never_killed, settings.out)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_killed_again_and_again(config: Make, seed: int):
    """Sixty steps with a checkpoint after every other one: most of the time is spent in saves."""
    often = {"steps": 60, "checkpoint_every": 2, "keep": 1 + seed}
    run(config("whole", {**often, "checkpoint_every": 60}))
    settings = config("killed", often)
    assert kill_at_random(settings, 12, 1.5, random.Random(seed)) > 3
    run(changed(settings, {"checkpoint_every": 7}))
    assert_same_run(config("whole").out, settings.out)
