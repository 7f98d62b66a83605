"""Where local data and caches are: the environment's CEDD_DATA and CEDD_CACHE, unless a folder is given."""

from __future__ import annotations

import os
from pathlib import Path

from cedd.storage import expanded


def data_root(given: str | Path | None = None) -> Path | None:
    """The folder of local data: the one given, else the environment's CEDD_DATA, else none."""
    root = given if given is not None else os.environ.get("CEDD_DATA")
    return expanded(root) if root else None


def data_folder(name: str, given: str | Path | None = None) -> Path:
    """A folder of local data: the one given, else the one of this name in CEDD_DATA."""
    root = data_root()
    if given is None and root is None:
        raise ValueError(f"name the folder of the {name}, or set CEDD_DATA to a folder with {name}/ in it")
    return expanded(given) if given is not None else Path(str(root)) / name


def cache_root(given: str | Path | None = None) -> Path:
    """The folder of caches: the one given, else the environment's CEDD_CACHE, else ~/.cache/cedd."""
    root = given if given is not None else os.environ.get("CEDD_CACHE")
    return expanded(root or "~/.cache/cedd")
