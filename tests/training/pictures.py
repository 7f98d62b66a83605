"""Small runs draw no picture of their loss, which takes longer than their steps, but for tests that ask for it."""

from collections.abc import Iterator

import pytest

from cedd.training import loop
from cedd.training.run_log import plot_log


@pytest.fixture(scope="package", autouse=True)
def no_pictures() -> Iterator[None]:
    """For the tests of each folder whose conftest has it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "plot_log", lambda folder: None)
        yield


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures after all."""
    monkeypatch.setattr(loop, "plot_log", plot_log)
