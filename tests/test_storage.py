"""Files and folders are complete or absent, and nothing is left behind by the dead or taken from the living."""

import errno
import os
import signal
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from cedd.storage import atomic_file, atomic_files, atomic_folder, atomic_write, is_temporary, locked, remove_leftovers

HOLD = """
import sys, time
from pathlib import Path
from cedd.storage import atomic_folder
with atomic_folder(Path(sys.argv[1])) as folder:
    (folder / "half").touch()
    print("writing", flush=True)
    time.sleep(60)
"""


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def failing_write(path: Path, named: bool) -> None:
    """What a full disk does to a file."""
    path.touch()
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), *([str(path)] if named else []))


@pytest.mark.parametrize("named", [True, False])
def test_an_error_names_the_file_that_was_asked_for(tmp_path: Path, named: bool) -> None:
    """However deep the temporary folder it happened in; a write that says no name is that of the innermost file."""
    model, there = tmp_path / "model", tmp_path / "there"
    there.mkdir()

    def write(folder: AbstractContextManager[Path]) -> None:
        with folder as outer, atomic_file(outer / "weights") as inner:
            failing_write(inner, named)

    with pytest.raises(OSError) as failed:
        write(nullcontext(tmp_path))
    assert failed.value.filename == str(tmp_path / "weights")
    for folder, place in ((atomic_folder(model), model), (atomic_files(model, "last"), model)):
        with pytest.raises(OSError) as failed:
            write(folder)
        assert failed.value.filename == str(place / "weights")
    with pytest.raises(OSError) as failed:
        write(atomic_files(there, "last"))
    assert failed.value.filename == str(there / "weights")
    assert names(tmp_path) == ["there"]
    assert names(there) == []


def test_a_file_is_replaced_or_left_as_it_was(tmp_path: Path):
    path = tmp_path / "file.txt"
    atomic_write(path, b"old")

    def fail() -> None:
        with atomic_file(path) as temporary:
            temporary.write_bytes(b"new")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert path.read_bytes() == b"old"
    with atomic_file(path) as temporary:
        temporary.write_bytes(b"new")
    assert path.read_bytes() == b"new"
    assert names(tmp_path) == ["file.txt"]


def test_a_folder_that_is_there_already_stays(tmp_path: Path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "theirs").touch()
    with pytest.raises(FileExistsError, match="folder"), atomic_folder(tmp_path / "folder") as temporary:
        (temporary / "ours").touch()
    assert names(tmp_path / "folder") == ["theirs"]
    assert names(tmp_path) == ["folder"]


def test_what_the_dead_left_is_removed_and_what_the_living_write_is_not(tmp_path: Path):
    def start(name: str) -> "subprocess.Popen[bytes]":
        child = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / name)], stdout=subprocess.PIPE)
        assert child.stdout is not None
        assert child.stdout.readline() == b"writing\n"
        return child

    (tmp_path / ".editor.tmp").touch()
    with start("name") as dead, start("name") as living, start("other") as dead_too:
        dead.kill()
        dead_too.kill()
        dead.wait()
        dead_too.wait()
        assert sum(map(is_temporary, tmp_path.iterdir())) == 3
        with atomic_folder(tmp_path / "name") as ours:  # whoever writes a name removes what is left of that name
            left = [path.name for path in tmp_path.iterdir() if is_temporary(path) and path != ours]
            assert sorted(name[:6] for name in left) == [".name.", ".other"]
        remove_leftovers(tmp_path)
        left = [path for path in tmp_path.iterdir() if is_temporary(path)]
        assert [path.name[:6] for path in left] == [".name."]
        assert (left[0] / "half").exists()
        living.kill()
    remove_leftovers(tmp_path)
    assert names(tmp_path) == [".editor.tmp", "name"]


def test_a_temporary_folder_taken_for_a_leftover_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Between making it and locking it, another process removes it."""
    made = Path.mkdir

    def mkdir(path: Path, *arguments: object, **options: object) -> None:
        made(path, *arguments, **options)  # pyright: ignore[reportArgumentType]
        if is_temporary(path):
            monkeypatch.undo()
            remove_leftovers(tmp_path)
            assert names(tmp_path) == []

    monkeypatch.setattr(Path, "mkdir", mkdir)
    atomic_write(tmp_path / "file.txt", b"complete")
    assert (tmp_path / "file.txt").read_bytes() == b"complete"
    assert names(tmp_path) == ["file.txt"]


def test_a_lock_goes_with_its_process(tmp_path: Path):
    hold = "import sys; from pathlib import Path; from cedd.storage import locked\n"
    hold += "with locked(Path(sys.argv[1])): print(1, flush=True); sys.stdin.read()"
    words = [sys.executable, "-c", hold, str(tmp_path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        with locked(tmp_path, wait=False) as held:
            assert held is False
        os.kill(child.pid, signal.SIGKILL)
        with locked(tmp_path) as held:
            assert held
