"""The seconds of `cedd sample`: that both versions are run, and what is said of them."""

import contextlib
import io
import json
import time
from pathlib import Path
from typing import Any

import pytest

from cedd.cli import main
from tests.benchmarks.scripts import definitions
from tests.tasks.models import save_random

seconds = definitions("sample_seconds")


def test_two_versions_take_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """The first run is a process; the others, which would only import everything again, are in this one."""
    run = save_random(tmp_path / "run", "absorb", "cedd", time_input="none", length=16)
    timed, ran = seconds.timed, list[tuple[Path, list[str]]]()

    def here(checkout: Path, words: list[str]) -> Any:
        ran.append((checkout, words))
        if len(ran) == 1:
            return timed(checkout, words)
        began, used = time.perf_counter(), time.process_time()
        with contextlib.redirect_stdout(io.StringIO()):
            assert main(words) == 0
        return seconds.Seconds(time.perf_counter() - began, time.process_time() - used, None)

    monkeypatch.setitem(seconds.main.__globals__, "timed", here)
    assert seconds.main(seconds.Arguments(str(run), other=tmp_path, turns=1, seeds=(1,))) == 0
    said = json.loads(capsys.readouterr().out)
    assert [checkout for checkout, _ in ran] == [seconds.HERE] * 2 + [tmp_path.resolve()] * 2
    for version in ("here", "other"):
        assert len(said[version]["sample"]["all_seconds"]) == 1
        assert len(said[version]["start"]["all_seconds"]) == 1
        assert said[version]["sample"]["cpu_seconds"] > 0
    assert 1 <= said["call"]["calls"] <= 16
    assert said["call"]["of_products"] > 0


def test_a_version_that_fails_is_not_timed():
    with pytest.raises(seconds.subprocess.CalledProcessError):
        seconds.timed(seconds.HERE, ["sample", "--no-such-option"])
