"""What holds for all tests: no property fails because the machine was busy, data comes from one place, and one run is
enough."""

import contextlib
import io
from pathlib import Path

import pytest
from hypothesis import settings

from cedd.cli import main
from cedd.data.folders import data_root

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of development data, which is no part of the repository."""
    folder = data_root()
    if folder is None or not folder.is_dir():
        pytest.skip("needs the development data: set CEDD_DATA to its folder")
    return folder


@pytest.fixture(scope="session")
def fast_run(tmp_path_factory) -> Path:
    """The folder of a run of `cedd quickstart --fast`, which is made once a session."""
    out = tmp_path_factory.mktemp("runs") / "quickstart"
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(["quickstart", "--fast", "--out", str(out), "--device", "cpu"]) == 0
    return out
