"""What the tests of the commands share: one run of `cedd quickstart --fast`, and folders of untrained models."""

import contextlib
import io
import json
from pathlib import Path

import pytest

from cedd.cli import main
from tests.tasks.models import save_random


def quickstart(out: Path) -> dict:
    """The record that `cedd quickstart --fast --json` prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(["quickstart", "--fast", "--out", str(out), "--device", "cpu", "--json"]) == 0
    return json.loads(printed.getvalue())


@pytest.fixture(scope="session")
def fast_run(tmp_path_factory) -> Path:
    """The folder of a run that is made once a session."""
    out = tmp_path_factory.mktemp("runs") / "quickstart"
    quickstart(out)
    return out


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> str:
    """A folder with random weights, on roulette."""
    return str(save_random(tmp_path_factory.mktemp("run") / "roulette"))


@pytest.fixture(scope="module")
def absorb(tmp_path_factory) -> str:
    """The same on absorb, which cannot correct."""
    return str(save_random(tmp_path_factory.mktemp("run") / "absorb", "absorb", "cedd"))
