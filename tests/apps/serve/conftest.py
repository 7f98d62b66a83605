"""Shared fixtures of the server tests: two small models, and a server for them."""

from collections.abc import Iterator
from typing import Any

import pytest

from cedd.apps.serve.registry import ModelRegistry
from cedd.tasks import load
from tests.tasks.models import save_random


@pytest.fixture(scope="session")
def registry(tmp_path_factory: pytest.TempPathFactory) -> ModelRegistry:
    """A model on roulette, which can do everything, and one on absorb, which cannot correct."""
    folder = tmp_path_factory.mktemp("served")
    made = {"small": save_random(folder / "small"), "masks": save_random(folder / "masks", "absorb", "cedd")}
    return ModelRegistry({name: load(path, "cpu") for name, path in made.items()})


@pytest.fixture(scope="session")
def server(registry: ModelRegistry) -> Iterator[tuple[str, Any]]:
    """The address and the scheduler of a server."""
    from tests.apps.serve.servers import served

    with served(registry) as made:
        yield made


@pytest.fixture
def client(server: tuple[str, Any]) -> Iterator[Any]:
    from tests.apps.serve.servers import LOCAL_CLIENT, httpx

    with httpx.Client(base_url=server[0], timeout=30, **LOCAL_CLIENT) as made:
        yield made
