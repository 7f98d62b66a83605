"""Files and folders are complete or absent, and only leftovers of dead processes are removed."""

import errno
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch

from cedd.apps.correct.lexicon import load_lexicon
from cedd.cli.correct import rewrite_file
from cedd.cli.inputs import TextSource
from cedd.models.numpy_weights import read_metadata
from cedd.models.published import open_checkpoint
from cedd.models.weights import read_weights, save_weights
from cedd.spelling.correct import Change, Corrected
from cedd.storage import (
    atomic_file,
    atomic_files,
    atomic_folder,
    atomic_write,
    check_writable,
    expanded,
    is_temporary,
    locked,
    remove_leftovers,
)

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
    """Fail as a write to a full disk does."""
    path.touch()
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), *([str(path)] if named else []))


@pytest.mark.parametrize("name", ["\u3042" * 80, "two\nlines"], ids=["long", "lines"])
def test_unusual_file_names_are_supported(tmp_path: Path, name: str) -> None:
    """Leftovers of a killed process are found, too."""
    path = tmp_path / name
    with atomic_file(path) as new:
        new.write_text("whole")
        left = new.parent.name[:-36] + "0" * 32 + ".tmp"
    (tmp_path / left).mkdir()
    assert is_temporary(tmp_path / left)
    atomic_write(path, b"again")
    assert names(tmp_path) == [name]
    assert path.read_text() == "again"


@pytest.mark.parametrize("mode", [0o600, 0o460])
def test_replacement_of_private_file_is_private_while_being_written(tmp_path: Path, mode: int) -> None:
    """It is writable by its owner even if the mode of the replaced file does not allow that."""
    path = tmp_path / "letter"
    path.touch()
    path.chmod(mode)
    with atomic_file(path, like=path) as new:
        assert new.stat().st_mode & 0o777 == mode | 0o600
        new.write_text("Dear")
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("Dear", mode)


@pytest.mark.parametrize("named", [True, False])
def test_write_error_names_requested_file(tmp_path: Path, named: bool) -> None:
    """In temporary folders of any depth; an error without a file name is attributed to the innermost file."""
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


def test_file_is_replaced_or_left_unchanged(tmp_path: Path):
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


def test_symbolic_link_is_kept_and_its_target_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    link, target = Path("link.html"), tmp_path / "target.html"
    link.symlink_to("target.html")
    for content in (b"first", b"second"):  # a new target, then an existing one
        check_writable(link, (".html",))
        atomic_write(link, content)
        assert target.read_bytes() == content
    folder = Path("folder")
    folder.symlink_to("made")
    with atomic_files(folder, "last") as made:
        (made / "last").touch()
    assert names(tmp_path) == ["folder", "link.html", "made", "target.html"]
    assert link.is_symlink()
    assert names(folder) == ["last"]


def test_broken_link_error_names_missing_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("link").symlink_to("no/such/file.html")
    with pytest.raises(ValueError, match=rf"folder not found: {tmp_path}/no/such \(to write file.html\)"):
        check_writable(Path("link"))
    assert expanded("link") == tmp_path / "no" / "such" / "file.html"
    Path("round").symlink_to("round")
    for use in (check_writable, expanded):
        with pytest.raises(ValueError, match=r"^round is a symbolic link to itself$"):
            use(Path("round"))
    assert names(tmp_path) == ["link", "round"]


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary current folder, as an unprivileged user: file modes do not restrict root."""
    if not hasattr(os, "setresuid"):
        pytest.skip("this system cannot change the user of a process")
    root = os.getuid() == 0
    with tempfile.TemporaryDirectory() as name:  # other users cannot enter pytest's folders
        monkeypatch.chdir(name)
        try:
            if root:
                os.chown(name, 65534, -1)
                os.setresuid(65534, 65534, 0)
        except OSError as error:
            pytest.skip(f"root cannot become nobody here: {error.strerror}")
        try:
            yield Path(name)
        finally:
            if root:
                os.setresuid(0, 0, 0)


def test_write_protected_files_are_left_unchanged(nobody: Path):
    folder, letter = Path("protected"), Path("letter.txt")
    folder.mkdir()
    letter.write_text("a speling mistake\n")
    letter.chmod(0o444)
    folder.chmod(0o555)
    with pytest.raises(ValueError, match=r"^letter.txt cannot be written: it is write-protected$"):
        check_writable(letter)
    with pytest.raises(ValueError, match=r"^protected/page.html cannot be written: Permission denied$"):
        check_writable(folder / "page.html")
    for write in (lambda: atomic_write(folder / "new", b""), lambda: atomic_files(folder / "new", "x").__enter__()):
        with pytest.raises(PermissionError) as refused:
            write()
        assert refused.value.filename == "protected/new"
    change = Change(2, "speling", "spelling", confidence=1, error_probability=1)
    with pytest.raises(ValueError, match=r"letter.txt cannot be written: it is write-protected$"):
        rewrite_file(
            TextSource("letter", path=letter), [Corrected("a spelling mistake\n", "a speling mistake\n", [change])]
        )
    assert letter.read_text() == "a speling mistake\n"
    assert names(nobody) == ["letter.txt", "protected"]
    assert names(folder) == []


def test_unreadable_file_is_named_in_error(nobody: Path):
    """safetensors reports every file that it cannot open as missing."""
    file, lexicon = Path("model.safetensors"), Path("words.safetensors")
    save_weights(file, {"w": torch.zeros(2)})
    lexicon.write_bytes(b"")
    for path in (file, lexicon):
        path.chmod(0)
    for read in (read_weights, read_metadata, lambda path: open_checkpoint(path.parent).__enter__()):
        with pytest.raises(PermissionError) as refused:
            read(file)
        assert refused.value.filename == str(file)
    with pytest.raises(ValueError, match=r"words.safetensors is not a lexicon, or is damaged: .*Permission denied"):
        load_lexicon(lexicon)


def test_atomic_folder_keeps_existing_folder(tmp_path: Path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "theirs").touch()
    with pytest.raises(FileExistsError, match="folder"), atomic_folder(tmp_path / "folder") as temporary:
        (temporary / "ours").touch()
    assert names(tmp_path / "folder") == ["theirs"]
    assert names(tmp_path) == ["folder"]


def test_only_leftovers_of_dead_processes_are_removed(tmp_path: Path):
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
        with atomic_folder(tmp_path / "name") as ours:  # writing a name removes leftovers of that name
            left = [path.name for path in tmp_path.iterdir() if is_temporary(path) and path != ours]
            assert sorted(name[:6] for name in left) == [".name.", ".other"]
        remove_leftovers(tmp_path)
        left = [path for path in tmp_path.iterdir() if is_temporary(path)]
        assert [path.name[:6] for path in left] == [".name."]
        assert (left[0] / "half").exists()
        living.kill()
    remove_leftovers(tmp_path)
    assert names(tmp_path) == [".editor.tmp", "name"]


def test_temporary_folder_removed_as_leftover_is_recreated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
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


def test_lock_is_released_when_process_dies(tmp_path: Path):
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
