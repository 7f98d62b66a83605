"""Kill -9 at any moment, also inside a checkpoint's write: the run goes on, and ends with the same bits."""

import os
import random
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from cedd.training.config import TrainConfig
from tests.training.processes import PATIENCE, POINTS, start_training, wait
from tests.training.runs import assert_same_run, changed, checkpoint_steps, run, tiny_config

Make = Callable[..., TrainConfig]
pytestmark = pytest.mark.usefixtures("server", "no_plot")
SETTINGS = {"checkpoint_every": 3, "keep": 2}  # saves at 3, 6, 9 and 12; from the third on, an old one goes


@pytest.fixture(scope="module")
def never_killed(corpus: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("never") / "run"
    run(tiny_config(corpus, cache, out, SETTINGS))
    return out


QUICK = ("within the shards", "within state.json", "before it is published", "while an old one is dropped")
QUICK += ("before the model's file",)


@pytest.mark.parametrize("point", [p if p in QUICK else pytest.param(p, marks=pytest.mark.slow) for p in POINTS])
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


def kill(child: BaseProcess) -> bool:
    """Kill -9; whether the child was still running."""
    assert child.pid is not None
    if child.exitcode is None:
        os.kill(child.pid, signal.SIGKILL)
    return wait(child) == -signal.SIGKILL


def test_killed_at_random_moments(config: Make, never_killed: Path):
    """Somewhere after the steps 2, 5 and 8 were logged: mostly in a step, or in the save after 3, 6 or 9."""
    settings, chance = config("killed", SETTINGS), random.Random(0)
    log = settings.out / "log.jsonl"
    landed = 0
    for step in (2, 5, 8):
        child = start_training(settings)
        deadline = time.monotonic() + PATIENCE
        while not (log.is_file() and f'{{"step": {step},' in log.read_text()):
            assert child.exitcode is None
            assert time.monotonic() < deadline
            time.sleep(0.001)
        time.sleep(chance.uniform(0.0, 0.03))
        landed += kill(child)
    assert landed > 0
    run(settings)
    assert_same_run(never_killed, settings.out)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_killed_again_and_again(config: Make, seed: int):
    """A checkpoint after every other step: most of the time is spent in saves."""
    often = {"steps": 300, "checkpoint_every": 2, "keep": 1 + seed, "log_every": 10}
    run(config("whole", {**often, "checkpoint_every": 300}))
    settings, chance = config("killed", often), random.Random(seed)
    landed = 0
    for _ in range(12):
        child = start_training(settings)
        time.sleep(chance.uniform(0.0, 1.5))
        landed += kill(child)
    assert landed > 3
    run(changed(settings, {"checkpoint_every": 70}))
    assert_same_run(config("whole").out, settings.out)
