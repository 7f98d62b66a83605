"""What the tests of the commands share: folders of untrained models."""

from collections.abc import Iterator

import pytest

from cedd.training import loop
from cedd.training.records import plot_log
from tests.tasks.models import save_random


@pytest.fixture(scope="package", autouse=True)
def no_pictures() -> Iterator[None]:
    """No picture of a run's loss, which takes longer than a small run's steps, but for tests that ask for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "plot_log", lambda folder: None)
        yield


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures of the loss."""
    monkeypatch.setattr(loop, "plot_log", plot_log)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> str:
    """A folder with random weights, on roulette."""
    return str(save_random(tmp_path_factory.mktemp("run") / "roulette"))


@pytest.fixture(scope="module")
def absorb(tmp_path_factory) -> str:
    """The same on absorb, which cannot correct."""
    return str(save_random(tmp_path_factory.mktemp("run") / "absorb", "absorb", "cedd"))
