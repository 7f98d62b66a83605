"""Kills, a full disk, damage: what is complete stays, what is not is found, and a run ends with the same bits."""

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cedd.data.packing import open_packed
from cedd.training.config import TrainConfig
from tests.training.faults import (
    PARTS,
    Campaign,
    damage,
    exchanges,
    full_disk,
    kill,
    kills_in_export,
    kills_in_packing,
    two_at_once,
)
from tests.training.processes import PATIENCE, POINTS, start_training, wait
from tests.training.runs import assert_same_run, checkpoint_steps, run, tiny_config

Make = Callable[..., TrainConfig]
pytestmark = pytest.mark.usefixtures("server")
SETTINGS = {"checkpoint_every": 3, "keep": 2}  # saves at 3, 6, 9 and 12; from the third on, an old one goes


@pytest.fixture(scope="module")
def never_killed(corpus: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("never") / "run"
    run(tiny_config(corpus, cache, out, SETTINGS))
    return out


QUICK = ("within the shards", "while an old one is dropped", "before the model's file")


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


@pytest.mark.slow
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


@pytest.fixture
def campaign(tmp_path: Path) -> Campaign:
    return Campaign(tmp_path, size=2)


SMALL = (kills_in_packing, kills_in_export, full_disk, damage, exchanges, two_at_once)


@pytest.mark.parametrize(
    "part",
    [pytest.param(part, marks=pytest.mark.slow if part is kills_in_packing else ()) for part in SMALL],
    ids=lambda part: part.__name__,
)
def test_a_few_faults_of_every_kind(campaign: Campaign, part: Callable[[Campaign], None]):
    part(campaign)
    assert campaign.counts
    assert not campaign.lost


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
def test_a_campaign_of_faults(tmp_path: Path, part: Callable[[Campaign], None]):
    """As many as the environment's CEDD_FAULTS says."""
    campaign = Campaign(tmp_path, size=int(os.environ.get("CEDD_FAULTS", "20")))
    part(campaign)
    print(campaign.table())  # noqa: T201
    assert sum(campaign.counts.values()) >= campaign.size // 2
    assert not campaign.lost


@pytest.mark.slow
def test_a_fault_that_is_not_found_is_counted_as_lost(campaign: Campaign, monkeypatch: pytest.MonkeyPatch):
    """So the campaign can fail."""
    monkeypatch.setattr("tests.training.faults.open_packed", lambda folder: open_packed(folder, verify=False))
    campaign.size = 10
    damage(campaign)
    assert [names[0] for names in campaign.lost] == ["packed set"]
