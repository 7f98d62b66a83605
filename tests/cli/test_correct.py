"""`cedd correct`, `cedd infill` and `cedd sample`: with and without a run, text from any source, bytes preserved."""

import errno
import io
import json
import os
import re
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.style import Style

from cedd.cli import main
from cedd.cli.correct import FIRST_PIECE, PIECE, coloured, corrected_pieces, joined, pieces
from cedd.cli.inputs import file_source, looks_like_path
from cedd.data.corpora import python_manual_documents
from cedd.models import locate
from cedd.names import printable
from cedd.spelling.code import code_spans
from cedd.spelling.correct import Change
from cedd.tasks import Corrected, correct, load
from tests.limits import limited_file_size
from tests.tasks.models import fixer, save_random


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Stand-ins for the packaged models: the corrector has random weights that change some letters."""
    root = tmp_path_factory.mktemp("package") / "pretrained"
    save_random(root / "english-char", depth=2, extra={"correction": {"t": 0.6}})
    save_random(root / "english", "absorb", "cedd", time_input="none")
    return root


@pytest.fixture
def bundled(models, monkeypatch):
    """Use the stand-ins as the packaged models."""
    monkeypatch.setattr(locate, "pretrained_root", lambda: models)
    return models


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return str(save_random(folder / "run", "uniform", extra={"correction": {"threshold": 0.0}}))


def feed(monkeypatch, content: bytes):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


def test_packaged_model_is_used_without_a_run(bundled, run, capsys):
    assert main(["correct", "teh cat sat on teh mat", "--json", "--device", "cpu"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["original"] == "teh cat sat on teh mat"
    assert result["changes"]  # the package's model
    assert main(["correct", run, "teh cat sat on teh mat", "--device", "cpu"]) == 0
    assert capsys.readouterr().out == "teh cat sat on teh mat\n"  # the run's, which trusts every letter
    assert main(["correct", "english-char", "teh cat sat on teh mat", "--device", "cpu"]) == 0
    assert capsys.readouterr().out == result["text"] + "\n"
    assert main(["correct", "teh cat sat on teh mat", "--threshold", "0", "--device", "cpu"]) == 0
    assert capsys.readouterr().out == "teh cat sat on teh mat\n"


def test_packaged_model_is_not_shadowed_by_folder_of_same_name(bundled, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_random(tmp_path / "english-char", "uniform", extra={"correction": {"threshold": 0.0}})
    used = []
    monkeypatch.setattr(locate, "is_model", lambda path, true=locate.is_model: used.append(path) or true(path))
    text = "teh cat sat on teh mat"
    assert main(["correct", text, "--device", "cpu"]) == 0
    assert capsys.readouterr().out != f"{text}\n"  # the package's
    assert main(["correct", "english-char", text, "--device", "cpu"]) == 0
    assert capsys.readouterr().out == f"{text}\n"  # the folder's, which trusts every letter
    used.clear()
    assert main(["sample", "--length", "4", "--device", "cpu"]) == 0
    assert used[0] == bundled / "english"


@pytest.mark.parametrize("text", ["teh cat sat " * 25, "teh cat/sat on " * 300, "~dear reader"])
def test_text_that_cannot_be_a_path_is_not_taken_for_a_model(text, bundled, run, capsys):
    """File names have at most 255 bytes, paths at most 4096; `~dear reader` is not the home of a known user."""
    for words in ([text], [run, text]):
        assert main(["correct", *words, "--threshold", "0", "--device", "cpu"]) == 0
        assert capsys.readouterr().out == f"{text}\n"
    assert main(["correct", text, text, "--device", "cpu"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"cedd: error: no run or model at {text[:10]}")
    assert len(said) < 200


@pytest.mark.parametrize("words", [["correct", "-"], ["correct"], ["correct", "RUN", "-"], ["correct", "RUN"]])
def test_bytes_from_stdin_are_preserved(words, bundled, run, capfdbinary, monkeypatch):
    content = b"teh c\xc3\xa9t\r\n\xff\xfe 12\n\nno end"
    feed(monkeypatch, content)
    named = [run if word == "RUN" else word for word in words]
    assert main([*named, "--threshold", "0", "--device", "cpu"]) == 0
    assert capfdbinary.readouterr().out == content


def test_bytes_from_a_file_are_preserved(bundled, capfdbinary, tmp_path):
    content = "teh cät\r\n".encode("latin-1") * 40
    (tmp_path / "text").write_bytes(content)
    words = ["correct", "--file", str(tmp_path / "text"), "--device", "cpu"]
    assert main([*words, "--threshold", "0"]) == 0
    assert capfdbinary.readouterr().out == content
    assert main(words) == 0
    changed = capfdbinary.readouterr().out
    assert len(changed) == len(content)
    assert changed != content
    assert changed.count(b"\xe4t\r\n") <= 40
    assert changed.count(b"\xe4") == changed.count(b"\r\n") == 40


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_bytes_from_a_named_pipe_are_preserved(bundled, capfdbinary, tmp_path):
    pipe, content = tmp_path / "pipe", b"teh c\xc3\xa9t\r\n"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(content,), daemon=True)
    writer.start()
    assert main(["correct", str(pipe), "--threshold", "0", "--device", "cpu"]) == 0
    assert capfdbinary.readouterr().out == content


def test_invalid_utf8_in_argument_is_printed_unchanged(bundled, capfdbinary):
    assert main(["correct", "teh \udcff cat", "--threshold", "0", "--device", "cpu"]) == 0
    assert capfdbinary.readouterr().out == b"teh \xff cat\n"


GREEN = Style(bold=True, color="green")


@pytest.mark.parametrize("text", ["the cqt", "cqt \udcff\tqz\x07\r\n\x1b[7mq", "no mistake", ""])
def test_coloured_correction_contains_corrected_text(text):
    corrected = correct(fixer(), text)
    shown = coloured(corrected, GREEN)
    assert shown.replace("\x1b[1;32m", "").replace("\x1b[0m", "") == printable(corrected.text)
    assert shown.count("\x1b[1;32m") == len(corrected.changes)
    assert coloured(correct(fixer(), "the cqt"), GREEN) == "the c\x1b[1;32ma\x1b[0mt"


def test_replacements_of_other_lengths_are_coloured_in_place():
    changes = (Change(4, "a", "one", 1.0, 1.0), Change(6, "bad", "x", 1.0, 1.0), Change(6, "y", "z", 1.0, 1.0))
    shown = coloured(Corrected("not one xz.", "not a bady.", changes), Style(bold=True))
    assert shown.replace("\x1b[1m", "").replace("\x1b[0m", "") == "not one xz."
    assert shown.startswith("not \x1b[1mone\x1b[0m \x1b[1mx\x1b[0m")


class Screen(io.TextIOWrapper):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("screen", "environment", "coloured"),
    [
        (Screen, {"TERM": "xterm-256color"}, "\x1b[1;32m"),
        (Screen, {"TERM": "xterm-256color", "NO_COLOR": "1"}, "\x1b[1m"),
        (Screen, {"TERM": "dumb"}, None),
        (Screen, {"TERM": "dumb", "FORCE_COLOR": "1"}, None),
        (io.TextIOWrapper, {"TERM": "xterm-256color", "FORCE_COLOR": "1"}, None),
    ],
)
def test_colours_are_used_only_on_capable_terminals(screen, environment, coloured, bundled, monkeypatch):
    for name in ("FORCE_COLOR", "NO_COLOR", "COLORTERM", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    now = correct(load("english-char", "cpu"), "teh cat sat on teh mat")
    out = screen(io.BytesIO(), "utf-8")
    monkeypatch.setattr(sys, "stdout", out)
    assert main(["correct", "teh cat sat on teh mat", "--device", "cpu"]) == 0
    shown = out.buffer.getvalue().decode()
    assert now.changes
    assert shown.count("\x1b") == (0 if coloured is None else 2 * len(now.changes))
    assert shown.replace(coloured or "-", "").replace("\x1b[0m", "") == now.text + "\n"


def test_empty_text_is_accepted_even_in_a_model_folder(bundled, run, capsys, monkeypatch):
    monkeypatch.chdir(run)
    monkeypatch.setattr(sys, "stdin", object())  # must not be read
    assert main(["correct", "", "--device", "cpu"]) == 0
    assert capsys.readouterr().out == "\n"


def test_infill_and_sample_also_have_packaged_models(bundled, run, capsys):
    assert main(["infill", "a ____{3} cat", "--steps", "4", "--seed", "0", "--device", "cpu"]) == 0
    first = capsys.readouterr().out
    assert first.startswith("a ")
    assert first.endswith(" cat\n")
    assert main(["infill", run, "a ____{3} cat", "--steps", "4", "--seed", "0", "--device", "cpu"]) == 0
    capsys.readouterr()
    assert main(["sample", "--length", "8", "--steps", "4", "--device", "cpu"]) == 0
    assert len(capsys.readouterr().out.rstrip("\n")) >= 1


@pytest.mark.parametrize("way", ["FILE", "--file", "-", ""])
def test_infill_preserves_bytes_of_files_and_stdin(way, bundled, run, capsysbinary, monkeypatch, tmp_path):
    content = b"a \xffcat\r\n____{3}\nsat \xc3\xa9 on ____.\n\n"
    file = tmp_path / "page.txt"
    file.write_bytes(content)
    words = {"FILE": [str(file)], "--file": ["--file", str(file)], "-": ["-"], "": []}[way]
    if not words or words == ["-"]:
        feed(monkeypatch, content)
    assert main(["infill", run, *words, "--steps", "4", "--device", "cpu"]) == 0
    before, between, after = re.split(rb"_{4}(?:{\d+})?", content)
    out, said = capsysbinary.readouterr()
    assert said == b""
    assert out.startswith(before)
    assert out.endswith(after)
    assert between in out[len(before) : -len(after)]
    assert b"____" not in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["correct", "teh", "cat", "sat"], "put a text of several words in quotes"),
        (["correct", "teh", "cat"], "no run or model at teh (put a text of several words in quotes)"),
        (["correct", "english-chra", "cat"], "did you mean english-char?"),
        (["infill", "a ____", "--file", "x"], "not both"),
        (
            ["infill", "--file", "/no/such/file"],
            "file not found: /no/such/file; if it is text, give it on standard input (-)\n",
        ),
        (["infill", "FOLDER/letter.txt"], "the text has no blank to fill"),
        (["correct", "teh", "--file", "x"], "not both"),
        (
            ["correct", "--file", "/no/such/file"],
            "file not found: /no/such/file; if it is text, give it on standard input (-)\n",
        ),
        (["correct", "--file", "FOLDER/lettre.txt"], "FOLDER/lettre.txt; did you mean FOLDER/letter.txt?"),
        (["correct", "--file", "FOLDER"], "FOLDER is a folder; name a file in it, such as FOLDER/letter.txt"),
        (["correct", "nosuch.docx"], "file not found: nosuch.docx; if it is text, give it on standard input (-)"),
        (["infill", "--file", "/dev/zero"], "/dev/zero is longer than 16,777,216 bytes"),
        (["correct", "nosuch.txt"], "file not found: nosuch.txt; if it is text, give it on standard input (-)"),
        (["correct", "RUN", "notes.md"], "file not found: notes.md"),
        (["infill", "my page.HTML"], "file not found: my page.HTML"),
        (["correct", "no/such"], "file not found: no/such"),
        (["correct", "FOLDER/lettre.txt"], "FOLDER/lettre.txt; did you mean FOLDER/letter.txt?"),
        (["correct", "FOLDER"], "FOLDER is a folder"),
        (["correct", "FOLDER/link"], "FOLDER/link is a broken link"),
        (["correct", "teh", "--rate", "0"], "rate must be in (0, 1)"),
        (["correct", "teh", "--reach", "-1"], "reach"),
        (["correct", "teh", "--max-surprise", "nan"], "--max-surprise must be at least 0 (nats per letter) (got nan"),
        (["correct", "teh", "--steps", "2", "--temperature", "nan"], "temperature must be"),
        (["sample", "a", "b"], "b"),
    ],
)
def test_invalid_input_gives_one_line_error(words, message, bundled, run, capsys, tmp_path):
    (tmp_path / "letter.txt").write_text("teh cat")
    (tmp_path / "link").symlink_to("nowhere")
    named = [run if word == "RUN" else word.replace("FOLDER", str(tmp_path)) for word in words]
    assert main([*named, "--device", "cpu"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert message.replace("FOLDER", str(tmp_path)) in said


@pytest.mark.parametrize("text", ["black and/or white", "e.g. a/b c", "teh cat.", "", "one\ntwo.txt", "x" * 5000])
def test_text_is_not_taken_for_a_path(text):
    assert not looks_like_path(text)


@pytest.mark.parametrize(
    ("length", "more", "seen"),
    [
        (1200, [], True),
        (300, [], False),
        (1200, ["--json"], False),
        *(pytest.param(1200, more, True, marks=pytest.mark.slow) for more in (["--in-place"], ["--suggest", "2"])),
    ],
)
def test_long_text_shows_progress_bar(length, more, seen, bundled, capsys, tmp_path, monkeypatch):
    """On a terminal; here the bar is replaced by one that records its updates."""
    told = []

    @contextmanager
    def bar(name, visible):
        yield lambda done, planned: told.append((done, planned)) if visible else None

    monkeypatch.setattr("cedd.cli.correct.progress_bar", bar)
    (tmp_path / "letter.txt").write_text("teh cat sat " * (length // 12))
    assert main(["correct", "--file", str(tmp_path / "letter.txt"), "--device", "cpu", *more]) == ("--diff" in more)
    assert bool(told) == seen
    assert told == sorted(told)
    assert all(0 < done <= planned for done, planned in told)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("words", "example"),
    [
        (["correct"], 'cedd correct "I hav a speling mistke"'),
        (["infill"], 'cedd infill "The ____ sat on the ____."'),
        (["infill", "RUN"], 'cedd infill "The ____ sat on the ____."'),
    ],
)
def test_missing_text_on_terminal_is_reported(words, example, bundled, run, capsys, monkeypatch):
    feed(monkeypatch, b"")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    assert main([*(run if word == "RUN" else word for word in words), "--device", "cpu"]) == 2
    assert f"no text was given: {example}, a FILE, or - to type it" in capsys.readouterr().err


def printed_by(code: str) -> list[str]:
    """The lines printed by a separate process."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()


MISSPELLED = ["I hav a speling mistke", "He walked form the tabel"]
HEAVY = ("matplotlib", "transformers", "huggingface_hub", "torch._dynamo", "torch._inductor", "triton", "PIL")


@pytest.mark.slow
def test_correct_with_a_run_imports_no_heavy_modules(tmp_path):
    """These modules slow down startup and are not needed to correct a line."""
    code = (
        "import sys; from cedd.cli import main\n"
        f"assert main(['correct', {str(save_random(tmp_path / 'run'))!r}, 'teh cat', '--device', 'cpu']) == 0\n"
        f"print('torch' in sys.modules, [name for name in {HEAVY!r} if name in sys.modules])"
    )
    assert printed_by(code)[-1] == "True []"


def test_correct_imports_no_torch_and_starts_no_threads():
    """The output matches that of the loaded model."""
    code = (
        "import os, sys; from cedd.cli import main\n"
        "threads = lambda: len(os.listdir('/proc/self/task')) if os.path.isdir('/proc/self/task') else 1\n"
        f"for text in {MISSPELLED!r}:\n"
        " assert main(['correct', text, '--device', 'cpu']) == 0\n"
        " print('torch' in sys.modules, threads())"
    )
    model = load("english", "cpu")
    assert printed_by(code) == [line for text in MISSPELLED for line in (model.correct(text), "False 1")]


# ---- files ------------------------------------------------------------------------------------------------------


@pytest.fixture
def letter(bundled, tmp_path):
    path = tmp_path / "letter.txt"
    path.write_bytes(b"teh cat sat on teh mat\r\n\xff and teh hat")
    return path


def changed_letter(letter, capfdbinary):
    assert main(["correct", str(letter), "--device", "cpu"]) == 0
    return capfdbinary.readouterr().out


def test_file_is_corrected_in_place_with_backup(letter, capfdbinary, monkeypatch):
    before, after = letter.read_bytes(), changed_letter(letter, capfdbinary)
    letter.chmod(0o640)
    modes, replace_file = list[int](), Path.replace

    def noted(new: Path, target: Path) -> Path:
        modes.append(new.stat().st_mode & 0o777)
        return replace_file(new, target)

    monkeypatch.setattr(Path, "replace", noted)
    assert before != after
    assert main(["correct", str(letter), "--in-place", "--device", "cpu"]) == 0
    assert (letter.read_bytes(), letter.with_name("letter.txt.bak").read_bytes()) == (after, before)
    assert letter.stat().st_mode & 0o777 == 0o640
    assert modes == [0o640, 0o640]  # at no time could others read the text, or its backup
    assert capfdbinary.readouterr().out == b""


def test_file_is_unchanged_if_backup_fails(letter, capsys):
    before = letter.read_bytes()
    letter.with_name("letter.txt.bak").mkdir()
    assert main(["correct", str(letter), "--in-place", "--device", "cpu"]) == 2
    said = capsys.readouterr().err
    assert "cannot be written" in said
    assert said.count("\n") == 1
    assert letter.read_bytes() == before


def torn_copy(source, target):
    target.write_bytes(source.read_bytes()[:3])
    raise OSError(errno.ENOSPC, "No space left on device")


def torn_write(target, content):
    target.write_bytes(content[:3])
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("earlier", [None, b"earlier"])
@pytest.mark.parametrize(
    ("called", "torn", "named"),
    [("shutil.copyfile", torn_copy, "letter.txt.bak"), ("cedd.cli.correct.write_durably", torn_write, "letter.txt")],
)
def test_full_disk_leaves_file_and_backup_unchanged(called, torn, named, earlier, letter, capsys, monkeypatch):
    backup = letter.with_name("letter.txt.bak")
    if earlier is not None:
        backup.write_bytes(earlier)
    before = letter.read_bytes()
    monkeypatch.setattr(called, torn)
    assert main(["correct", str(letter), "--in-place", "--device", "cpu"]) == 2
    said = capsys.readouterr().err
    assert f"{named} cannot be written (No space left on device), so {letter} was left as it is\n" in said
    assert said.count("\n") == 1
    assert letter.read_bytes() == before
    assert (backup.read_bytes() if backup.exists() else None) == earlier
    assert not [path for path in letter.parent.iterdir() if path.suffix == ".tmp"]


def test_file_size_limit_leaves_file_unchanged(letter, capsys):
    """With a real write error."""
    before = letter.read_bytes()
    with limited_file_size(9):
        assert main(["correct", str(letter), "--in-place", "--device", "cpu"]) == 2
    assert "letter.txt cannot be written (File too large)" in capsys.readouterr().err
    assert letter.read_bytes() == before
    assert [path.name for path in letter.parent.iterdir() if path.name.startswith((".", "letter"))] == ["letter.txt"]


def test_backup_is_not_written_through_symlink(letter, capsys):
    other = letter.with_name("other")
    other.write_bytes(b"of somebody else")
    letter.with_name("letter.txt.bak").symlink_to(other)
    before = letter.read_bytes()
    assert main(["correct", str(letter), "--in-place", "--device", "cpu"]) == 2
    assert "is a link" in capsys.readouterr().err
    assert (letter.read_bytes(), other.read_bytes()) == (before, b"of somebody else")


def test_diff_lines_end_only_at_newlines(letter, capfdbinary):
    """As in patch."""
    letter.write_bytes("the mat\r\x0cteh cat\u2028sat\non teh mat\n".encode())
    assert main(["correct", str(letter), "--diff", "--device", "cpu"]) == 1
    lines = capfdbinary.readouterr().out.split(b"\n")[2:]
    assert lines[0] == b"@@ -1,2 +1,2 @@"
    assert sum(line.startswith(b"-") for line in lines) == sum(line.startswith(b"+") for line in lines) == 2


def test_file_changed_during_correction_is_not_overwritten(letter, capsys, monkeypatch):
    from cedd.cli import correct as command

    def overtaken(parts, true=command.joined):
        corrected = true(parts)
        letter.write_bytes(b"new teh")
        return corrected

    monkeypatch.setattr(command, "joined", overtaken)
    assert main(["correct", str(letter), "--in-place", "--device", "cpu"]) == 2
    assert "was changed by another program" in capsys.readouterr().err
    assert letter.read_bytes() == b"new teh"
    assert not letter.with_name("letter.txt.bak").exists()


def test_check_fails_if_something_would_change(letter, capfdbinary):
    assert main(["correct", str(letter), "--check", "--device", "cpu"]) == 1
    lines = capfdbinary.readouterr().out.decode("utf-8", "surrogateescape").splitlines()
    assert lines
    assert all(line.startswith(f"{letter}:") and " -> " in line for line in lines)
    assert main(["correct", str(letter), "--check", "--threshold", "0", "--device", "cpu"]) == 0
    assert capfdbinary.readouterr().out == b""


@pytest.mark.parametrize("check", [[], ["--check"]])
def test_diff_is_in_patch_format(check, letter, capfdbinary):
    assert main(["correct", str(letter), "--diff", *check, "--device", "cpu"]) == 1
    lines = capfdbinary.readouterr().out.split(b"\n")
    assert lines[0] == f"--- {letter}".encode()
    assert b"-teh cat sat on teh mat\r" in lines
    assert lines.count(b"\\ No newline at end of file") in (0, 2)


def test_spans_rebuild_both_texts(letter, capsys):
    assert main(["correct", str(letter), "--json", "--device", "cpu"]) == 0
    result = json.loads(capsys.readouterr().out)
    text, original, changes = result["text"], result["original"], result["changes"]
    assert changes
    built, end = "", 0
    for change in changes:
        (first, last), (start, stop) = change["span"], change["corrected_span"]
        assert (original[first:last], text[start:stop]) == (change["before"], change["after"])
        built += original[end:first] + change["after"]
        end = last
    assert built + original[end:] == text


def test_long_text_is_processed_in_pieces():
    content = ("A line of text.\r\n" * 5000 + "x" * 70_000 + " \xe9 end").encode()
    made = [piece for _, piece in pieces(io.BytesIO(content))]
    assert "".join(made) == content.decode()
    assert len(made) > 5
    assert len(made[0]) <= 2 * FIRST_PIECE  # so that output starts early
    assert max(map(len, made)) <= 2 * PIECE
    assert not any(piece.endswith("\r") for piece in made)


def test_content_from_a_null_byte_on_is_not_corrected(letter, capfdbinary):
    """From that piece on, nothing is corrected: programs, archives and images may contain words."""
    line, after = letter.read_bytes(), changed_letter(letter, capfdbinary)
    letter.write_bytes(b"\x7fELF\0" + line)
    assert changed_letter(letter, capfdbinary) == b"\x7fELF\0" + line
    assert main(["correct", str(letter), "--in-place", "--device", "cpu"]) == 0
    assert not letter.with_name("letter.txt.bak").exists()
    assert main(["correct", str(letter), "--check", "--device", "cpu"]) == 0
    head, tail = (line + b"\n") * (FIRST_PIECE // len(line)), (b"\0" + line + b"\n") * (FIRST_PIECE // len(line))
    letter.write_bytes(head + tail)
    changed = changed_letter(letter, capfdbinary)
    assert changed.startswith(after[:4])
    assert changed.endswith(tail[-len(tail) // 2 :])


def test_short_code_blocks_are_not_split():
    block = "```\n" + "teh code\n" * 200 + "```\n"
    content = ("A line of text.\n" * 90 + block) * 20 + "```\n" + "long code\n" * 9000
    made = [piece for _, piece in pieces(io.BytesIO(content.encode()))]
    assert "".join(made) == content
    assert len(made) > 8
    short = [piece for piece in made if "long" not in piece]
    assert len(short) > 3
    assert all(piece.count("```") % 2 == 0 for piece in short)
    assert max(map(len, made)) <= 3 * PIECE


@pytest.mark.parametrize("fence", ["```", "~~~~"])
def test_long_code_block_is_code_exactly_to_its_end(fence, tmp_path):
    """Although it is read in pieces, of which only the first contains the opening fence."""

    def every_teh(text, names=()):
        code = list(code_spans(text))
        found = [word for word in re.finditer("teh", text) if not any(a <= word.start() < b for a, b in code)]
        changes = [Change(word.start(), "teh", "the", 1.0, 1.0) for word in found]
        made = re.sub("teh", lambda word: "the" if word.start() in {c.position for c in changes} else "teh", text)
        return Corrected(made, text, changes)

    block, text = f"{fence}sh\n" + "teh code\n" * 9000 + f"{fence}\n", "A teh here.\n"
    (tmp_path / "long.md").write_text(text + block + text)
    corrected = joined(corrected_pieces(file_source(tmp_path / "long.md"), every_teh, lambda done, planned: None))
    assert corrected.original == text + block + text
    assert corrected == "A the here.\n" + block + "A the here.\n"
    assert [change.span[0] for change in corrected.changes] == [2, len(text + block) + 2]


@pytest.mark.slow
def test_peak_memory_does_not_grow_with_text(tmp_path):
    """For five times as much of Python's manual it is at most 16 MB higher. (The C library may keep extra memory for
    each thread that unpacks the weights; here all threads share one arena.)"""
    text, peaks = "\n\n".join(python_manual_documents()), list[int]()
    for size in (100_000, 500_000):
        assert len(text) > size
        (tmp_path / "text.txt").write_text(text[:size])
        command = [sys.executable, "-m", "cedd", "correct", str(tmp_path / "text.txt")]
        code = f"import resource, subprocess; subprocess.run({command}, check=True, capture_output=True);"
        code += "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
        done = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "MALLOC_ARENA_MAX": "1"}, capture_output=True, check=True
        )
        peaks.append(int(done.stdout))
    assert peaks[1] - peaks[0] < 16 * 1024, peaks


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--diff", "--in-place", "LETTER"], "--diff and --in-place are different results"),
        (["--check", "--suggest", "2", "LETTER"], "--suggest and --check are different results"),
        (["--format", "sarif", "--diff", "LETTER"], "--format only applies to --check"),
        (["--lsp", "LETTER"], "--lsp takes texts from its client"),
        (["FOLDER"], "is a folder; add --check"),
        (["--in-place", "-"], "--in-place needs files"),
        (["--in-place", "--json", "LETTER"], "prints nothing"),
        (["--suggest", "0", "LETTER"], "must be at least 1"),
        (["--check", "LETTER", "/no/such/file"], "file not found: /no/such/file"),
        (["LETTER", "/no/such/file"], "file not found: /no/such/file"),
        (["LETTER", "--engine", "words", "--ignore-words", "/no/such/words"], "file not found: /no/such/words"),
        (["LETTER", "--ignore-words", "LETTER"], "--ignore-words is an option of --engine words"),
        (["LETTER", "--engine", "words", "--rate", "0.05"], "--rate is an option of --engine letters"),
        (
            ["LETTER", "--engine", "words", "--ignore-words", "/dev/zero"],
            "/dev/zero is longer than 16,777,216 characters",
        ),
    ],
)
def test_invalid_files_or_options_give_one_line_error(words, message, letter, capsys):
    letter.write_text("teh")
    places: dict[str, str] = {"LETTER": str(letter), "FOLDER": str(letter.parent)}
    assert main(["correct", *(places.get(str(word), str(word)) for word in words), "--device", "cpu"]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_model_folder_may_name_packaged_word_corrector(bundled, tmp_path, capsys):
    """It must be a packaged model, not another folder; letters are corrected by the model itself."""
    text = "teh cat sat on teh mat"
    assert (
        main(["export", "english-char", "--out", str(tmp_path / "mine"), "--words", "english", "--device", "cpu"]) == 0
    )
    capsys.readouterr()
    assert main(["correct", str(tmp_path / "mine"), text, "--engine", "words", "--device", "cpu"]) == 2
    assert "the engine 'words' needs a lexicon" in capsys.readouterr().err
    assert main(["correct", str(tmp_path / "mine"), text, "--engine", "letters", "--device", "cpu"]) == 0
    assert capsys.readouterr().out != f"{text}\n"
    save_random(tmp_path / "other", extra={"words": "../run"})
    assert main(["correct", str(tmp_path / "other"), text, "--device", "cpu"]) == 2
    assert "'../run' as its corrector of words, which is not a packaged model" in capsys.readouterr().err


# ---- projects ---------------------------------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with text, source code, ignored files and settings, in which the packaged model corrects."""
    (tmp_path / "docs" / "built").mkdir(parents=True)
    (tmp_path / "docs" / "a.md").write_text("We recieve `definately` letters.\n\n    recieved\n")
    (tmp_path / "docs" / "b.py").write_text('recieve = "recieve"  # definately a name, not to recieve\n')
    (tmp_path / "docs" / "built" / "c.md").write_text("We recieve letters.\n")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".gitignore").write_text("built\n")
    (tmp_path / "pyproject.toml").write_text('[tool.cedd.correct]\nignore-words = ["teh"]\nengine = "words"\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


CHECKED = "docs/a.md:1:4: recieve -> receive\ndocs/b.py:1:24: definately -> definitely\n"


def test_check_of_a_folder(project, capfd):
    assert main(["correct", "docs", "--check"]) == 1
    assert capfd.readouterr().out == CHECKED
    (project / "docs" / "built" / "c.md").write_text("We recieve teh letters. <!-- cedd: ignore -->\nTeh end.\n")
    assert main(["correct", "docs/built", "--check"]) == 0
    assert main(["correct", "docs/built/c.md", "--check"]) == 0


def test_file_given_twice_is_checked_once(project, capfd):
    assert main(["correct", "docs/a.md", "docs", str(project / "docs"), "--check"]) == 1
    assert len(capfd.readouterr().out.splitlines()) == len(CHECKED.splitlines())


def test_folder_is_corrected_in_place(project):
    before = {path: path.read_text() for path in project.rglob("*.*") if path.is_file()}
    assert main(["correct", "docs", "--in-place"]) == 0
    now = {path.relative_to(project).as_posix(): path.read_text() for path in before}
    assert now["docs/a.md"] == "We receive `definately` letters.\n\n    recieved\n"
    assert now["docs/b.py"] == 'recieve = "recieve"  # definitely a name, not to recieve\n'
    assert now["docs/built/c.md"] == "We recieve letters.\n"


def test_github_annotations(project, capfd):
    (project / "docs" / "b.py").unlink()
    assert main(["correct", "docs", "--format", "github"]) == 1
    out = capfd.readouterr().out
    assert out == "::warning file=docs/a.md,line=1,col=4,endColumn=11,title=spelling::'recieve' should be 'receive'\n"


def test_sarif_log_has_locations_and_fixes(project, capfd):
    assert main(["correct", "docs", "--format", "sarif"]) == 1
    log = json.loads(capfd.readouterr().out)
    assert log["version"] == "2.1.0"
    results = log["runs"][0]["results"]
    places = [one["locations"][0]["physicalLocation"] for one in results]
    assert [one["artifactLocation"]["uri"] for one in places] == ["docs/a.md", "docs/b.py"]
    assert places[0]["region"] == {"startLine": 1, "startColumn": 4, "endLine": 1, "endColumn": 11}
    (replacement,) = results[0]["fixes"][0]["artifactChanges"][0]["replacements"]
    assert replacement["insertedContent"]["text"] == "receive"


def test_unreadable_files_are_skipped_with_warning(project, capfd, monkeypatch):
    """The rest of a folder is checked, and the exit code is 2. (Simulated, since root can read all files.)"""
    closed, access = [project / "docs" / "b.py"], os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).resolve() not in closed and access(path, mode))
    assert main(["correct", "docs", "--check"]) == 2
    out, err = capfd.readouterr()
    assert out == CHECKED.splitlines(keepends=True)[0]
    assert err == "cedd: warning: docs/b.py cannot be read; it is skipped\n"
    closed[:] = [project / "docs" / "built"]
    (project / ".gitignore").unlink()
    assert main(["correct", "docs", "--check"]) == 2
    assert capfd.readouterr() == (CHECKED, "cedd: warning: docs/built cannot be read; it is skipped\n")


def test_unusual_file_names_and_encodings(project, capfd):
    """A name with spaces is a URI in SARIF; bytes that are not UTF-8, a byte order mark and CRLF are preserved."""
    file = project / "docs" / "a b%.md"
    file.write_bytes(b"\xef\xbb\xbfWe recieve caf\xe9s.\r\nWe recieve.\r\n")
    assert main(["correct", str(file), "--check"]) == 1
    assert [line.rpartition(".md:")[2] for line in capfd.readouterr().out.splitlines()] == [
        "1:4: recieve -> receive",
        "2:4: recieve -> receive",
    ]
    assert main(["correct", "docs/a b%.md", "--format", "sarif"]) == 1
    assert '"uri": "docs/a%20b%25.md"' in capfd.readouterr().out
    assert main(["correct", str(file), "--in-place"]) == 0
    assert file.read_bytes() == b"\xef\xbb\xbfWe receive caf\xe9s.\r\nWe receive.\r\n"


def test_invalid_project_settings_give_one_line_error(project, capsys):
    (project / "pyproject.toml").write_text("[tool.cedd.correct]\nignored = []\n")
    assert main(["correct", "docs", "--check"]) == 2
    said = capsys.readouterr().err
    assert "unexpected key 'ignored'" in said
    assert said.count("\n") == 1
