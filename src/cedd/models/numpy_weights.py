"""Weights files as NumPy arrays, without torch: stored tensors, and their decoded values (see `weights`)."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file

from cedd.storage import canonical_json

AnyArray = NDArray[Any]
"""An array of any dtype."""
Arrays = Mapping[str, AnyArray]
STEP = ".step"
"""The suffix that names a matrix's steps [R]."""
RECORD = "cedd"
"""The only entry in the metadata of a weights file that the package writes: a JSON object."""
CHECKSUM = "crc32"
"""The key of the checksum in a file's metadata."""
FORMS = ("float32", "int8", "deflated")
"""The forms that are read as arrays: NumPy has no bfloat16."""
ARRAY_DTYPES = ("BOOL", "F64", "F32", "F16", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8")
"""The dtypes that NumPy reads, by their names in a safetensors file."""


class Layout(NamedTuple):
    """The dtype, by its name in a safetensors file, and the shape of a stored tensor."""

    dtype: str
    shape: tuple[int, ...]


class PackedArrays(MutableMapping[str, AnyArray]):
    """The named arrays of a file. Each is read and unpacked when it is accessed, so that with `pop` only one at a time
    takes memory in addition to those that the caller keeps.

    Args:
        path: the file.
        form: how it was stored, one of ``FORMS``; see `weights.read_weights`.
        checksum: of the stored tensors; by default the one in the file's metadata.
    """

    def __init__(self, path: Path, *, form: str, checksum: str | None = None) -> None:
        self.path, self.form, stored = path, form, _stored_arrays(path, checksum)
        self.steps = {} if form == "float32" else {name: stored.pop(name) for name in _step_names(stored)}
        self.changed: dict[str, AnyArray | None] = dict.fromkeys(stored)
        """The arrays by name; None for those in the file."""

    def __getitem__(self, name: str) -> AnyArray:
        array = self._stored(name)
        if self.form == "float32":
            return array
        with unpacking(self.path, self.form):
            return _unpacked(name, array, self.steps.get(name + STEP))

    def _stored(self, name: str) -> AnyArray:
        if (array := self.changed[name]) is not None:
            return array
        with reading_tensors(self.path), safe_open(self.path, framework="np") as file:
            return file.get_tensor(name)

    def rows(self, name: str) -> Callable[[NDArray[np.int64]], AnyArray]:
        """A function that returns rows of a matrix by their indices. The matrix stays in int8 if it is stored so."""
        array, steps = self._stored(name), self.steps.get(name + STEP)
        with unpacking(self.path, self.form):
            array = array if self.form == "float32" else _inflated_or_same(name, array, steps)
        return array.__getitem__ if steps is None else lambda rows: array[rows] * steps[rows, None]

    def __setitem__(self, name: str, array: AnyArray) -> None:
        self.changed[name] = array

    def __delitem__(self, name: str) -> None:
        del self.changed[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.changed)

    def __len__(self) -> int:
        return len(self.changed)


def _step_names(stored: Arrays) -> list[str]:
    return [name + STEP for name in stored if name + STEP in stored]


def _stored_arrays(path: Path, checksum: str | None) -> dict[str, AnyArray]:
    """The tensors of a file as they are stored, after their checksum was compared."""
    layouts = read_layouts(path, ARRAY_DTYPES)
    with reading_tensors(path):
        stored = load_file(path)
    contents = {name: np.ascontiguousarray(array).reshape(-1).view(np.uint8) for name, array in stored.items()}
    check_sum(path, layouts, contents, checksum)
    return stored


def read_metadata(path: str | Path) -> dict[str, str]:
    """The metadata of a weights file; empty if it has none."""
    with reading_tensors(path), safe_open(path, framework="np") as file:
        metadata: dict[str, str] = file.metadata() or {}
    return json.loads(metadata[RECORD]) if RECORD in metadata else metadata


def read_layouts(path: str | Path, dtypes: Collection[str]) -> dict[str, Layout]:
    """The dtype and shape of each tensor in a safetensors file; a dtype that is not among `dtypes` is refused."""
    with reading_tensors(path), safe_open(path, framework="np") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - the file is not a mapping
        layouts = {name: Layout(part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
    for name, layout in layouts.items():
        if layout.dtype not in dtypes:
            raise ValueError(f"{path}: {name} has the unsupported dtype {layout.dtype}; use {', '.join(dtypes)}")
    return layouts


@contextmanager
def reading_tensors(path: str | Path) -> Iterator[None]:
    """Context for reading a safetensors file: errors become a ValueError of one line. The file is opened first, because
    safetensors reports every file that it cannot open as missing.
    """
    Path(path).open("rb").close()
    try:
        yield
    except SafetensorError as error:
        raise ValueError(f"{path} is not a complete safetensors file: {error}") from error


@contextmanager
def unpacking(path: Path, form: str) -> Iterator[None]:
    """Context for decoding stored tensors: errors become a ValueError of one line."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path} is not stored as {form}: {error}") from None


def check_sum(
    path: Path, layouts: Mapping[str, Layout], contents: Mapping[str, NDArray[np.uint8]], expected: str | None
) -> None:
    """Refuse tensors that do not match their checksum: `expected`, or the one in the file's metadata."""
    recorded = expected if expected is not None else read_metadata(path).get(CHECKSUM)
    if recorded is not None and recorded != checksum_of(layouts, contents):
        raise ValueError(f"{path} is damaged: its tensors do not match their checksum")


def checksum_of(layouts: Mapping[str, Layout], contents: Mapping[str, NDArray[np.uint8]]) -> str:
    """The CRC-32 of the tensors' names, dtypes, shapes and bytes, in the order of their names."""
    checksum = 0
    for name in sorted(contents):
        dtype, shape = layouts[name]
        checksum = zlib.crc32(canonical_json([name, dtype, shape]), checksum)
        checksum = zlib.crc32(contents[name].data, checksum)
    return f"{checksum:08x}"


def from_integers(stored: Arrays) -> dict[str, AnyArray]:
    """Matrices in float32, from integers and steps; other tensors are unchanged."""
    from concurrent.futures import ThreadPoolExecutor  # imports logging

    steps = {name + STEP: stored.get(name + STEP) for name in stored}
    with ThreadPoolExecutor() as pool:  # zlib and NumPy release the GIL
        unpacked = pool.map(_unpacked, stored, stored.values(), steps.values())
        return {name: array for name, array in zip(stored, unpacked, strict=True) if name not in steps}


def _unpacked(name: str, array: AnyArray, step: AnyArray | None) -> AnyArray:
    """The decoded tensor of a name, with the steps of its rows if there are any."""
    array = _inflated_or_same(name, array, step)
    if array.dtype != np.int8 or step is None:
        return array
    matrix = array.astype(np.float32)
    matrix *= step[:, None]
    return matrix


def _inflated_or_same(name: str, array: AnyArray, step: AnyArray | None) -> AnyArray:
    """The decoded tensor of a name without steps; raises a ValueError for integers, which must have one step per
    row."""
    if array.ndim == 2 and array.dtype.kind == "f":
        raise ValueError(f"the matrix {name} is {array.dtype}")
    if array.dtype == np.uint8 and array.ndim == 1 and step is not None:
        try:
            array = _inflated(array, len(step))
        except (ValueError, zlib.error) as error:
            raise ValueError(f"{name} is damaged ({error})") from None
    if array.dtype == np.int8 and (step is None or step.shape != array.shape[:1]):
        raise ValueError(f"{name} lacks its steps, one per row")
    return array


def _inflated(coded: NDArray[np.uint8], rows: int) -> NDArray[np.int8]:
    """The integers of a matrix with this number of rows."""
    decoder = zlib.decompressobj(-zlib.MAX_WBITS)
    plain = decoder.decompress(coded.data, 8 * len(coded) + 1)  # a code has at least one bit
    if not decoder.eof or not rows or len(plain) % rows:
        raise ValueError(f"{len(plain)} bytes for {rows} rows")
    return np.frombuffer(plain, np.int8).reshape(rows, -1)
