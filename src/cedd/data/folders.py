"""Folders of local data and caches: by default those of the environment variables CEDD_DATA and CEDD_CACHE."""

from __future__ import annotations

import os
from pathlib import Path

from cedd.storage import expanded


def data_root(given: str | Path | None = None) -> Path | None:
    """The folder of local data: the argument, or CEDD_DATA, or None."""
    root = given if given is not None else os.environ.get("CEDD_DATA")
    return expanded(root) if root else None


def data_folder(name: str, given: str | Path | None = None) -> Path:
    """A folder of local data: the argument, or the folder of this name in CEDD_DATA."""
    root = data_root()
    if given is None and root is None:
        raise ValueError(f"name the folder of the {name}, or set CEDD_DATA to a folder with {name}/ in it")
    return expanded(given) if given is not None else Path(str(root)) / name


def cache_root(given: str | Path | None = None) -> Path:
    """The folder of caches: the argument, or CEDD_CACHE, or ~/.cache/cedd."""
    root = given if given is not None else os.environ.get("CEDD_CACHE")
    return expanded(root or "~/.cache/cedd")
