"""What holds for all tests: no property fails because the machine was busy, and data comes from one place."""

from pathlib import Path

import pytest
from hypothesis import settings

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
