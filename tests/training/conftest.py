"""A small corpus, packed once for all training tests."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cedd.training.config import TrainConfig
from tests.training.pictures import no_pictures, pictures  # noqa: F401
from tests.training.runs import tiny_config, write_corpus


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Networks this small are slower on two threads, and child processes compute with one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "words.txt")


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def config(corpus: Path, cache: Path, tmp_path: Path) -> Callable[..., TrainConfig]:
    """config("name", {"optimizer.rate": 1e-3}): a tiny run in the folder `name`."""

    def make(name: str = "run", changes: dict[str, Any] | None = None) -> TrainConfig:
        return tiny_config(corpus, cache, tmp_path / name, changes)

    return make


@pytest.fixture(scope="session")
def server() -> None:
    """The fork server that starts training child processes."""
    from tests.training.processes import start_server  # imports the compiler: slow

    start_server()
