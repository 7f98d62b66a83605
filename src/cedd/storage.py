"""Files that are either complete or absent: written under a temporary name, flushed to disk, then renamed."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def canonical_json(value: Any) -> bytes:
    """One byte string per JSON value (sorted keys, no spaces), so that equal values have equal hashes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode("ascii")


def json_sha256(value: Any) -> str:
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


def check_writable(path: Path | None, suffixes: Sequence[str] = ()) -> None:
    """Refuse a file that could not be written, or whose name says another kind, before an hour is spent on it."""
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a file in it")
    if suffixes and path.suffix not in suffixes:
        raise ValueError(f"{path.name} must end in {' or '.join(suffixes)}")
    if not path.expanduser().resolve().parent.is_dir():
        raise ValueError(f"there is no folder {path.parent} to write {path.name} to")


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


def _temporary(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary file that replaces `path` when the block ends well, and vanishes when it does not.

    A reader, or a crash, sees the old file or the new one. The mode is that of any new file, even where a library
    writes private ones.
    """
    temporary = _temporary(path)
    try:
        temporary.touch()
        mode = temporary.stat().st_mode
        yield temporary
        temporary.chmod(mode)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    flush_folder(path.parent)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `path` when the block ends well, and vanishes when it does not.

    If another process has made `path` meanwhile, its folder stays and ours is dropped: both were made from the
    same key, hence have the same content.
    """
    temporary = _temporary(path)
    temporary.mkdir()
    try:
        yield temporary
        flush_folder(temporary)
        try:
            temporary.rename(path)
        except OSError:
            if not path.is_dir():
                raise
        flush_folder(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def atomic_write(path: Path, content: bytes) -> None:
    """Replace `path` by `content`."""
    with atomic_file(path) as temporary:
        temporary.write_bytes(content)


def write_json(path: Path, value: Any, indent: int = 1) -> None:
    """Replace `path` by a JSON value."""
    atomic_write(path, json.dumps(value, indent=indent).encode() + b"\n")
