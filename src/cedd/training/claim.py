"""One folder, one writer: a run that a live process is training is refused to a second one."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Hold the folder's lock. The system lets go of it with the process, however that ends; there is no lock file."""
    if sys.platform == "win32":  # which opens no folders
        yield
        return
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another process is training in {folder}; wait for it, or choose another --out") from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(descriptor)
