"""The seconds of `cedd sample`: that both versions are run, and what is said of them."""

import json
from pathlib import Path

import pytest

from tests.benchmarks.scripts import definitions
from tests.tasks.models import save_random

seconds = definitions("sample_seconds")


def test_two_versions_take_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = save_random(tmp_path / "run", "absorb", "cedd", told="nothing", length=16)
    assert seconds.main(seconds.Arguments(str(run), other=seconds.HERE, turns=1, seeds=(1,))) == 0
    said = json.loads(capsys.readouterr().out)
    for version in ("here", "other"):
        assert len(said[version]["sample"]["all_seconds"]) == 1
        assert len(said[version]["start"]["all_seconds"]) == 1
        assert said[version]["sample"]["cpu_seconds"] > 0
    assert 1 <= said["call"]["calls"] <= 16
    assert said["call"]["of_products"] > 0


def test_a_version_that_fails_is_not_timed(tmp_path: Path):
    with pytest.raises(seconds.subprocess.CalledProcessError):
        seconds.timed(seconds.HERE, ["sample", str(tmp_path / "nothing")])
