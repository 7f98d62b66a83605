"""Simulated resource limits: a full disk, and little memory."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

STATISTICS = Path("/proc/self/statm")
"""The memory of this process in pages, on Linux."""


@contextmanager
def limited_file_size(size: int) -> Iterator[None]:
    """Make writes beyond this file size fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def limited_memory(more: int) -> Iterator[None]:
    """Limit the process to this number of bytes beyond what it uses now."""
    if not STATISTICS.is_file():
        yield
        return
    pages = int(STATISTICS.read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
