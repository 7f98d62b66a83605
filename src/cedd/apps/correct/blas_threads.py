"""Products of small matrices in one thread. On a busy machine several threads wait for each other and take more time.

NumPy has no setting for this. Its wheels for Linux and Windows include OpenBLAS, whose number of threads can be changed
while a program runs; with another library, such as Accelerate on macOS, nothing is changed.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import numpy as np

VARIABLES = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")
"""Environment variables that set the number of threads; it is not changed if there is one of them."""


class ThreadSetting(NamedTuple):
    """The functions of a library that return and set its number of threads."""

    get: Callable[[], int]
    set: Callable[[int], object]


@cache
def thread_setting() -> ThreadSetting | None:
    """The functions of NumPy's OpenBLAS; None if it has none, or if the environment sets the number of threads."""
    package = Path(np.__file__).parent
    files = [*package.parent.glob("numpy.libs/*openblas*"), *package.glob(".dylibs/*openblas*")]
    if not files or any(name in os.environ for name in VARIABLES):
        return None
    try:
        library = ctypes.CDLL(str(files[0].resolve()))
    except OSError:
        return None
    for before, after in (("scipy_", "64_"), ("scipy_", ""), ("", "64_"), ("", "")):
        names = [f"{before}openblas_{verb}_num_threads{after}" for verb in ("get", "set")]
        if all(hasattr(library, name) for name in names):
            return ThreadSetting(*(getattr(library, name) for name in names))
    return None


_lock = Lock()
_inside, _usual = 0, 0


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Context in which OpenBLAS uses one thread, in the whole process. After the last of several that overlap, the
    number of threads is as before."""
    global _inside, _usual
    if (setting := thread_setting()) is None:
        yield
        return
    with _lock:
        if not _inside:
            _usual = setting.get()
            setting.set(1)
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                setting.set(_usual)
