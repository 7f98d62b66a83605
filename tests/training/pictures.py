"""Loss plots are off in small runs, where plotting takes longer than training, except in tests that request them."""

from collections.abc import Iterator

import pytest

from cedd.training import loop
from cedd.training.run_log import plot_log


@pytest.fixture(scope="package", autouse=True)
def no_pictures() -> Iterator[None]:
    """Turn off loss plots in every test folder whose conftest imports this."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "plot_log", lambda folder: None)
        yield


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn loss plots on again."""
    monkeypatch.setattr(loop, "plot_log", plot_log)
