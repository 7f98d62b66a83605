"""Kills, a full disk, damage: complete files survive, incomplete ones are detected, and runs end bit-identical."""

import os
import signal
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
    kills_in_export,
    two_repairs_at_once,
)
from tests.training.processes import POINTS, start_training, wait
from tests.training.runs import assert_same_run, checkpoint_steps, run, tiny_config

Make = Callable[..., TrainConfig]
pytestmark = pytest.mark.usefixtures("server")
SETTINGS = {"checkpoint_every": 3, "keep": 2}  # saves at 3, 6, 9 and 12; from the third on, an old one is deleted


@pytest.fixture(scope="module")
def never_killed(corpus: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("never") / "run"
    run(tiny_config(corpus, cache, out, SETTINGS))
    return out


QUICK = ("within the shards", "while an old one is dropped", "before the model's file")


@pytest.mark.parametrize("point", [p if p in QUICK else pytest.param(p, marks=pytest.mark.slow) for p in POINTS])
def test_run_killed_during_save_resumes_exactly(config: Make, never_killed: Path, point: str):
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


@pytest.fixture
def campaign(tmp_path: Path) -> Campaign:
    return Campaign(tmp_path, size=2)


FAST = (kills_in_export, full_disk, damage, exchanges, two_repairs_at_once)


@pytest.mark.parametrize(
    ("part", "size"),
    [
        *((part, 2) for part in FAST),
        *(pytest.param(part, int(os.environ.get("CEDD_FAULTS", "20")), marks=pytest.mark.slow) for part in PARTS),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_full_fault_campaign(campaign: Campaign, part: Callable[[Campaign], None], size: int):
    """A few faults by default; the slow tests make CEDD_FAULTS of each kind."""
    campaign.size = size
    part(campaign)
    print(campaign.table())  # noqa: T201
    assert sum(campaign.counts.values()) >= campaign.size // 2
    assert not campaign.lost


@pytest.mark.slow
def test_undetected_damage_is_counted_as_lost(campaign: Campaign, monkeypatch: pytest.MonkeyPatch):
    """Shows that the campaign can fail."""
    monkeypatch.setattr("tests.training.faults.open_packed", lambda folder: open_packed(folder, verify=False))
    campaign.size = 10
    damage(campaign)
    assert [names[0] for names in campaign.lost] == ["packed set"]
