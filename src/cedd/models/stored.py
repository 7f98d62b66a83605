"""Weights files as arrays, without torch: what is stored, and what is read back of it (see `weights`)."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file

Arrays = Mapping[str, NDArray[Any]]
STEP = ".step"
"""The suffix that names a matrix's steps [R]."""
CHECKSUM = "crc32"
"""What the checksum of the stored tensors is called in a file's metadata."""
FORMS = ("float32", "int8", "deflated")
"""Those that are read as arrays: numpy has no bfloat16."""


def read_arrays(path: Path, *, form: str, checksum: str | None = None) -> dict[str, NDArray[Any]]:
    """The named arrays of a file that was stored in one of the ``FORMS``; see `weights.read_weights`."""
    with reading_tensors(path):
        stored = load_file(path)
    contents = {name: np.ascontiguousarray(array).reshape(-1).view(np.uint8) for name, array in stored.items()}
    check_sum(path, contents, checksum)
    with unpacking(path, form):
        return dict(stored) if form == "float32" else from_integers(stored)


def read_metadata(path: str | Path) -> dict[str, str]:
    """What a weights file says of itself; nothing, if it says nothing."""
    with reading_tensors(path), safe_open(path, framework="np") as file:
        return file.metadata() or {}


@contextmanager
def reading_tensors(path: str | Path) -> Iterator[None]:
    """Around code that reads a safetensors file: what is wrong with it, in a line.

    safetensors calls every file that it cannot open one that is not there, so that it is opened here before.
    """
    Path(path).open("rb").close()
    try:
        yield
    except SafetensorError as error:
        raise ValueError(f"{path} is not a complete safetensors file: {error}") from error


@contextmanager
def unpacking(path: Path, form: str) -> Iterator[None]:
    """Around code that reads back what was stored in a form: what is wrong with it, in a line."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path} is not stored as {form}: {error}") from None


def check_sum(path: Path, contents: Mapping[str, NDArray[np.uint8]], otherwise: str | None) -> None:
    """Refuse contents that do not match the checksum that the file says, or else another one, if there is one."""
    said = read_metadata(path).get(CHECKSUM, otherwise)
    if said is not None and said != checksum_of(contents):
        raise ValueError(f"{path} is damaged: its numbers do not match their checksum")


def checksum_of(contents: Mapping[str, NDArray[np.uint8]]) -> str:
    """Of names and bytes."""
    checksum = 0
    for name in sorted(contents):
        checksum = zlib.crc32(contents[name].data, zlib.crc32(name.encode(), checksum))
    return f"{checksum:08x}"


def from_integers(stored: Arrays) -> dict[str, NDArray[Any]]:
    """The matrices again, in float32, of integers and steps; all else as it is."""
    steps = {name + STEP: stored.get(name + STEP) for name in stored}
    with ThreadPoolExecutor() as pool:  # zlib and numpy let other threads run
        unpacked = pool.map(_unpacked, stored, stored.values(), steps.values())
        return {name: array for name, array in zip(stored, unpacked, strict=True) if name not in steps}


def _unpacked(name: str, array: NDArray[Any], step: NDArray[Any] | None) -> NDArray[Any]:
    """What was stored under a name, with the steps of its rows if there are any."""
    if array.ndim == 2 and array.dtype.kind == "f":
        raise ValueError(f"the matrix {name} is {array.dtype}")
    if array.dtype == np.uint8 and array.ndim == 1 and step is not None:
        try:
            array = _inflated(array, len(step))
        except (ValueError, zlib.error) as error:
            raise ValueError(f"{name} is damaged ({error})") from None
    if array.dtype != np.int8:
        return array
    if step is None or step.shape != array.shape[:1]:
        raise ValueError(f"{name} has no steps, one a row")
    matrix = array.astype(np.float32)
    matrix *= step[:, None]
    return matrix


def _inflated(coded: NDArray[np.uint8], rows: int) -> NDArray[np.int8]:
    """The integers of so many rows."""
    decoder = zlib.decompressobj(-zlib.MAX_WBITS)
    plain = decoder.decompress(coded.data, 8 * len(coded) + 1)  # no code has less than a bit
    if not decoder.eof or not rows or len(plain) % rows:
        raise ValueError(f"{len(plain)} bytes for {rows} rows")
    return np.frombuffer(plain, np.int8).reshape(rows, -1)
