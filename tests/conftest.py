"""Fixtures and settings for all tests: no Hypothesis deadlines, reproducible random numbers, shared data and one
shared run."""

import contextlib
import functools
import gc
import io
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from cedd.cli import main
from cedd.data.folders import data_root
from tests.browser import CHROMIUM

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")


def pytest_collection_finish() -> None:
    """Make garbage collection cheaper: freeze the objects that exist before the tests (mostly modules), and collect
    new objects less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


@pytest.fixture(scope="session", autouse=True)
def cached_compression() -> Iterator[None]:
    """Cache xz compression: many reports compress the same training text."""
    from cedd.evaluation import baselines

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(baselines.COMPRESSORS, "xz", functools.cache(baselines.COMPRESSORS["xz"]))
        yield


@pytest.fixture(scope="session", autouse=True)
def no_fsync() -> Iterator[None]:
    """Skip `os.fsync`, which takes 10 ms per file on some disks, for thousands of files. A killed process loses nothing
    without it. The substitute, `os.fstat`, fails for the same descriptors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)
        yield


@pytest.fixture(autouse=True)
def seeded_torch() -> None:
    """Seed torch's default generator, so that a test's draws do not depend on the tests before it."""
    import torch  # imported here, so that the process that only distributes tests does not load it

    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:  # torch.manual_seed would record a stack trace for devices initialized later, which takes a millisecond
        torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True)
def restored_server_log() -> Iterator[None]:
    """Restore the server's logger, so that no handler with a closed stream remains after a test."""
    log = logging.getLogger("cedd.apps.serve")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("handlers", "propagate", "level"):
            patch.setattr(log, name, getattr(log, name))
        yield


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of development data, which is not part of the repository."""
    folder = data_root()
    if folder is None or not folder.is_dir():
        pytest.skip("needs the development data: set CEDD_DATA to its folder")
    return folder


@pytest.fixture(scope="session")
def fast_run(tmp_path_factory) -> Path:
    """The folder of a `cedd quickstart --fast` run, created once per session."""
    out = tmp_path_factory.mktemp("runs") / "quickstart"
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(["quickstart", "--fast", "--out", str(out), "--device", "cpu"]) == 0
    return out


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A running Chromium without pages; see tests/browser.py."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install playwright"
    )
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()
