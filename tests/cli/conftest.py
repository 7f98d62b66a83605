"""Fixtures shared by the command tests: folders of untrained models."""

import pytest

from tests.tasks.models import save_random
from tests.training.pictures import no_pictures, pictures  # noqa: F401


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> str:
    """A folder with random weights, on roulette."""
    return str(save_random(tmp_path_factory.mktemp("run") / "roulette"))


@pytest.fixture(scope="module")
def absorb(tmp_path_factory) -> str:
    """The same on absorb, which cannot correct."""
    return str(save_random(tmp_path_factory.mktemp("run") / "absorb", "absorb", "cedd"))
