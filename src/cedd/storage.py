"""Files and folders that are either complete or absent: written in a temporary folder, flushed to disk, then renamed.

The temporary folder is in the same folder as the target NAME and is called .NAME.(32 hex digits).tmp, with a hash in
place of a NAME that is too long. The writing process holds a lock on it, which the system releases when the process
ends. The next process that writes NAME removes the temporary folders of NAME that are not locked, so that leftovers of
killed processes disappear and those of running processes stay.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import hashlib
import json
import math
import os
import re
import shutil
import stat
import sys
import types
import typing
import uuid
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar, cast

JSONObject = dict[str, Any]
"""A JSON object."""
JSONMapping = Mapping[str, Any]
"""A JSON object that is only read."""

Record = TypeVar("Record")
_TEMPORARY = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{32}\.tmp", re.DOTALL)
_LONGEST = 200
"""Largest number of bytes of a name in the name of a temporary folder."""


def canonical_json(value: object) -> bytes:
    """One byte string per JSON value (sorted keys, no spaces), so that equal values have equal hashes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode("ascii")


def json_sha256(value: object) -> str:
    """The hash of a JSON value, whatever the order of its keys."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def finite(value: Any) -> Any:
    """The value with null where a number is not finite, which JSON cannot write."""
    if isinstance(value, Mapping):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def file_sha256(path: Path) -> str:
    """The hash of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def expanded(path: str | Path) -> Path:
    """The path with ~ replaced by the home folder. For a dangling link, the path that it points to."""
    try:
        whole = Path(path).expanduser()
    except RuntimeError:
        raise ValueError(f"{path} names the home folder of an unknown user") from None
    return whole if os.path.exists(whole) else _followed(whole)  # noqa: PTH110 - which minds no name, however long


def _followed(path: Path) -> Path:
    """The target of a link, whether it exists or not; other paths are returned unchanged."""
    if not os.path.islink(path):  # noqa: PTH114 - as above
        return path
    target = Path(os.path.realpath(path))
    if target.is_symlink():
        raise ValueError(f"{path} is a symbolic link to itself")
    return target


def check_writable(path: Path | None, suffixes: Sequence[str] = ()) -> None:
    """Raise an error early if a file cannot be written later, or has another suffix. To find out, a temporary file is
    written in the same folder and removed."""
    if path is None:
        return
    path = _followed(path)
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a file in it")
    if suffixes and path.suffix not in suffixes:
        raise ValueError(f"{path.name} must end in {' or '.join(suffixes)}")
    if not path.parent.is_dir():
        raise ValueError(f"folder not found: {path.parent} (to write {path.name})")
    if path.exists() and not (path.is_file() and os.access(path, os.W_OK)):  # a device would be replaced by a file
        raise ValueError(
            f"{path} cannot be written: it is {'write-protected' if path.is_file() else 'not a regular file'}"
        )
    try:
        with _temporary(path, path.parent) as folder:
            (folder / path.name).touch()
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}") from None


def flush_folder(folder: Path) -> None:
    """Make a rename inside the folder durable, where the system can (it cannot on Windows)."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError:
        pass
    finally:
        os.close(descriptor)


def write_durably(path: Path, content: bytes) -> None:
    """Write and fsync, without a rename: for files inside a folder that is itself renamed into place."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


# ----------------------------------------------------------------------------------------------------------------
# Records with a checksum


def sealed(record: JSONMapping) -> JSONObject:
    """The record with its own checksum, for `read_sealed`."""
    return {**record, "sha256": json_sha256(record)}


def read_sealed(path: Path) -> JSONObject:
    """A sealed record from a JSON file; raises a ValueError if the file is invalid."""
    if path.exists() and not path.is_file():  # reading a named pipe would wait for a writer
        raise ValueError(f"{path.name} is not a regular file")
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        raise ValueError(f"{path.name} is missing or truncated") from None
    if not isinstance(record, dict) or "sha256" not in record:
        raise ValueError(f"{path.name} has no checksum")
    if record.pop("sha256") != json_sha256(record):
        raise ValueError(f"{path.name} does not match its checksum")
    return record


# ----------------------------------------------------------------------------------------------------------------
# Temporary folders


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[bool | None]:
    """Hold the lock of a folder or file; yields True. Yields False, without waiting, if another process holds it, and
    None if the file system has no locks.

    The system releases the lock when the process ends; there is no lock file.
    """
    if sys.platform == "win32":  # which opens no folders
        yield None
        return
    import fcntl

    descriptor = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = True
        except BlockingIOError:
            held = False
        except OSError:
            held = None
        yield held
    finally:
        os.close(descriptor)


def _temporary_name(path: Path) -> Path:
    return path.with_name(f".{_named(path.name)}.{uuid.uuid4().hex}.tmp")


def _named(name: str) -> str:
    """The name in the name of its temporary folder, shortened by a hash if it is too long for 255 bytes."""
    content = os.fsencode(name)
    return name if len(content) <= _LONGEST else hashlib.sha256(content).hexdigest()


@contextmanager
def _temporary(path: Path, becomes: Path) -> Iterator[Path]:
    """A locked temporary folder next to `path`, removed at the end together with those of killed processes.

    Operating-system errors name the final file in the folder `becomes` instead of the temporary one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(path.parent, path.name)
    with ExitStack() as lock:
        folder = _claimed(path, lock)
        try:
            yield folder
        except OSError as error:
            if error.filename is None and error.errno is not None:  # errors of write() do not name a file
                error.filename = str(path)
            elif isinstance(error.filename, str) and Path(error.filename).is_relative_to(folder):
                error.filename = str(becomes / Path(error.filename).relative_to(folder))
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _claimed(path: Path, lock: ExitStack) -> Path:
    """A new locked temporary folder; created again if another process removes it before it is locked."""
    while True:
        folder = _temporary_name(path)
        try:
            folder.mkdir()
        except OSError as error:
            error.filename = str(path)
            raise
        with suppress(FileNotFoundError):
            lock.enter_context(locked(folder))
            if folder.is_dir():
                return folder


def is_temporary(path: Path) -> bool:
    """Whether the name is that of a temporary file or folder."""
    return _TEMPORARY.fullmatch(path.name) is not None


def remove_leftovers(folder: Path, name: str | None = None) -> None:
    """Remove temporary files of killed processes for `name` (by default for all names) from the folder."""
    for entry in list(folder.iterdir()):
        match = _TEMPORARY.fullmatch(entry.name)
        if match is None or (name is not None and match["name"] != _named(name)):
            continue
        with suppress(OSError), locked(entry, wait=False) as held:
            if held:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def remove_folder(path: Path) -> None:
    """Rename a folder to a temporary name and delete it, so that a partly deleted folder never looks complete."""
    doomed = _temporary_name(path)
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


# ----------------------------------------------------------------------------------------------------------------
# Complete or absent


@contextmanager
def atomic_file(path: Path, like: Path | None = None) -> Iterator[Path]:
    """Yield a temporary file that replaces `path` if the block succeeds, and is removed otherwise.

    Readers see the old file or the new one, also after a crash. The mode is that of any new file or that of the file
    `like`, and is never more permissive in between. If `path` is a link, its target is replaced.
    """
    path = _followed(expanded(path))
    with _temporary(path, path.parent) as folder:
        temporary = folder / path.name
        temporary.touch()
        mode = (like or temporary).stat().st_mode
        temporary.chmod(mode | stat.S_IRUSR | stat.S_IWUSR)
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.chmod(mode)
        temporary.replace(path)
    flush_folder(path.parent)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `path` if the block succeeds, and is removed otherwise.

    Raises a FileExistsError if another process has created `path` meanwhile; that folder stays.
    """
    path = expanded(path)
    with _temporary(path, path) as temporary:
        yield temporary
        flush_folder(temporary)
        try:
            temporary.rename(path)
        except OSError as error:
            if not path.exists():
                raise
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from error
    flush_folder(path.parent)


@contextmanager
def atomic_files(folder: Path, last: str) -> Iterator[Path]:
    """Yield a temporary folder whose files replace those of the same names in `folder` if the block succeeds.

    A new folder appears with all its files at once. In an existing folder, nothing changes until all new files are
    complete; then each is replaced by a rename, the file `last` at the end. Other files stay.
    """
    folder = expanded(folder)
    if not folder.is_dir():
        with atomic_folder(folder) as temporary:
            yield temporary
        return
    with _temporary(folder / last, folder) as temporary:
        yield temporary
        for file in sorted(temporary.iterdir(), key=lambda file: (file.name == last, file.name)):
            file.replace(folder / file.name)
    flush_folder(folder)


def atomic_write(path: Path, content: bytes) -> None:
    """Replace `path` by `content`."""
    with atomic_file(path) as temporary:
        temporary.write_bytes(content)


def write_json(path: Path, value: object, indent: int = 1) -> None:
    """Replace `path` by a JSON value."""
    atomic_write(path, json.dumps(value, indent=indent).encode() + b"\n")


# ----------------------------------------------------------------------------------------------------------------
# Reading files that may be damaged, or of another version


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, with or without a byte order mark."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text: convert it to UTF-8 first") from None


@contextmanager
def reading(source: Path | str) -> Iterator[None]:
    """Context for code that interprets a file: errors become a ValueError of one line that names the file."""
    try:
        yield
    except KeyError as error:
        raise ValueError(f"{source} is damaged, or made by another version of cedd: it has no {error}") from error
    except (TypeError, AttributeError, IndexError, OverflowError, RecursionError, EOFError, zlib.error) as error:
        said = " ".join(str(error).split())
        raise ValueError(f"{source} is damaged, or made by another version of cedd: {said}") from error
    except ValueError as error:
        if str(source) in str(error):
            raise
        raise ValueError(f"{source}: {error}") from error


def read_json(path: Path) -> JSONObject:
    """The JSON object in a file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise ValueError(f"{path} is damaged: it is not JSON ({why})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} is damaged: it does not contain a JSON object")
    return value


def from_json(kind: type[Record], values: object, name: str = "") -> Record:
    """The dataclass `kind` from the JSON object `values`; unknown keys and values of a wrong type are errors.

    name: the name of the values in messages.
    """
    where = name or kind.__name__
    if not isinstance(values, Mapping):
        raise ValueError(f"{where} must be a JSON object (got {values!r})")
    hints = _hints(kind)
    if unknown := sorted(set(values) - set(hints)):
        raise ValueError(f"{where} has the unknown entry {unknown[0]!r}; was it written by a newer version of cedd?")
    for part in dataclasses.fields(cast(Any, kind)):
        needed = part.default is part.default_factory is dataclasses.MISSING
        if needed and part.name not in values:
            raise ValueError(f"{where}.{part.name} is missing")
    return kind(**{key: _restored(hints[key], value, f"{where}.{key}") for key, value in values.items()})


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    """The types of a dataclass's fields, cached because finding them is slow."""
    return typing.get_type_hints(kind)


def _restored(hint: Any, value: Any, name: str) -> object:
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return from_json(hint, value, name)
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if not any(_fits(option, value) for option in options):
        raise ValueError(f"{name} cannot be {value!r}")
    return Path(value) if Path in options and value is not None else value


def _fits(kind: object, value: object) -> bool:
    """Whether a JSON value has the type of a configuration field."""
    if typing.get_origin(kind) is typing.Literal:
        return value in typing.get_args(kind)
    if isinstance(value, bool) or kind is bool:
        return isinstance(value, bool) and kind is bool
    taken = {float: (int, float), Path: str, tuple: list}
    plain = typing.get_origin(kind) or kind
    return isinstance(value, taken.get(plain, plain))
