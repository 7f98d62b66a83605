"""What holds for all tests: no property fails because the machine was busy or by the tests before it, data comes from
one place, and one run is enough."""

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
    """What exists when the tests begin stays, modules above all: the collector skips it, and looks at new objects less
    often than usual."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


@pytest.fixture(scope="session", autouse=True)
def texts_are_compressed_once() -> Iterator[None]:
    """Reports compress the training text of their run, which is the same for many, as well as xz can."""
    from cedd.evaluation import baselines

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(baselines.COMPRESSORS, "xz", functools.cache(baselines.COMPRESSORS["xz"]))
        yield


@pytest.fixture(scope="session", autouse=True)
def files_are_not_flushed_to_disk() -> Iterator[None]:
    """`os.fsync` takes ten milliseconds per file on some disks, and there are thousands of files. A process that is
    killed loses nothing without it. `os.fstat` fails for the same descriptors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)
        yield


@pytest.fixture(autouse=True)
def torch_begins_alike() -> None:
    """What a test draws with torch's own generator does not depend on the tests before it."""
    import torch  # here, since the process that only hands out tests need not wait for it

    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:  # for devices that may come later it would write down where it was called from, which takes a millisecond
        torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True)
def own_log() -> Iterator[None]:
    """A `cedd serve` that runs in this process leaves no log behind, to a stream that is closed by then."""
    log = logging.getLogger("cedd.apps.serve")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("handlers", "propagate", "level"):
            patch.setattr(log, name, getattr(log, name))
        yield


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


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A Chromium without a page; see tests/browser.py."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install playwright"
    )
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()
