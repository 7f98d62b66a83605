"""What a command says, and with which code it ends, when something is not as it should be."""

import gc
import importlib
import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.table import Table

import cedd
from cedd.cli import main, run_command
from cedd.cli.console import PlainConsole
from cedd.device import pick_device
from cedd.names import printable
from cedd.training.config import PRESETS, to_json
from tests.tasks.models import save_random
from tests.training.processes import command_on_terminal, start_server, wait

ESCAPE = "\x1b[31mred\x1b]0;title\x07"


def last_line(words: list[str], capsys: pytest.CaptureFixture[str], code: int = 2) -> str:
    """The one line on stderr of a command that fails."""
    assert main(words) == code
    *before, line = capsys.readouterr().err.splitlines()
    assert before == []
    return line


# ----------------------------------------------------------------------------------------------------------------
# Input


def test_a_newer_network_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = save_random(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["network"]["qk_norm"] = True
    (folder / "config.json").write_text(json.dumps(config))
    line = last_line(["sample", str(folder)], capsys)
    unknown = "network has the unknown entry 'qk_norm'; was it written by a newer version of cedd?"
    assert line == f"cedd: error: {folder}/config.json: {unknown}"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("sample --device meta", "invalid device: 'meta'; use auto, cpu, cuda or mps"),
        ("evaluate english-char --data ~nosuchuser/x", "~nosuchuser/x names the home folder of an unknown user"),
        (
            "evaluate english-char --plot ~nosuchuser/x.png",
            "~nosuchuser/x.png names the home folder of an unknown user",
        ),
        ("import ~nosuchuser/x --out model", "~nosuchuser/x names the home folder of an unknown user"),
        ("serve --port 0 ~nosuchuser/x", "~nosuchuser/x names the home folder of an unknown user"),
        ("sample [/red]", "no run or model at [/red]"),
        (
            "evaluate english-char --data /dev/stdin",
            "/dev/stdin is not a regular file, and the data is read more than once",
        ),
        ("genppl english-char --out /dev/null", "/dev/null cannot be written: it is not a regular file"),
        ("sample --html .", ". is a folder"),
    ],
)
def test_what_cannot_be_meant_is_one_line(words: str, said: str, capsys: pytest.CaptureFixture[str]):
    assert said in last_line(words.split(), capsys)


@pytest.mark.parametrize(
    ("variable", "data"), [("CEDD_CACHE", "python-manual"), ("CEDD_DATA", "wikitext2")], ids=["cache", "data"]
)
def test_a_folder_of_the_environment_in_an_unknown_home_is_one_line(
    variable: str, data: str, run: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(variable, "~nosuchuser/x")
    line = last_line(["evaluate", run, "--data", data], capsys)
    assert line == "cedd: error: ~nosuchuser/x names the home folder of an unknown user"


def test_a_named_pipe_is_refused_at_once(run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert "is not a regular file" in last_line(["evaluate", run, "--data", str(pipe)], capsys)


def test_a_device_may_be_torchs_own_and_a_prompt_must_be_a_text(run: str):
    model = cedd.load(run, device=torch.device("cpu"))  # pyright: ignore[reportArgumentType]
    assert pick_device(torch.device("cpu")) == torch.device("cpu")
    with pytest.raises(ValueError, match="prompt must be a string \\(got 5"):
        model.generate(prompt=5)  # pyright: ignore[reportArgumentType]


def test_a_report_away_from_the_runs_data_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch):
    folder = save_random(tmp_path / "run")
    config = replace(PRESETS["tiny"][1], data="book.txt", out=Path("run"))
    (folder / "train.json").write_text(json.dumps(to_json(config)))
    monkeypatch.chdir(folder)
    line = last_line(["report", str(folder)], capsys)
    assert line.endswith("was trained on book.txt, which was not found here; run this in the folder of the training")


# ----------------------------------------------------------------------------------------------------------------
# The machine


def test_too_little_memory_is_the_machines(run: str, capsys: pytest.CaptureFixture[str], monkeypatch):
    def fill(*args: object, **options: object) -> None:
        torch.empty(2**60)

    monkeypatch.setattr("cedd.cli.sample.template_of", fill)
    assert "out of memory" in last_line(["sample", run], capsys, code=1)


def test_a_command_that_needs_torch_names_it(capsys: pytest.CaptureFixture[str], monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert run_command("cedd", lambda: importlib.import_module("torch") and 0) == 1
    assert "pip install torch" in capsys.readouterr().err


def test_a_mistake_of_ours_shows_its_traceback(run: str, monkeypatch):
    monkeypatch.setattr("cedd.cli.sample.template_of", lambda *_: {}["key"])
    with pytest.raises(KeyError):
        main(["sample", run])


def test_the_environment_can_ask_for_the_traceback_of_any_error(monkeypatch, capsys: pytest.CaptureFixture[str]):
    assert last_line(["sample", "nowhere"], capsys).startswith("cedd: error: no run or model at nowhere")
    monkeypatch.setenv("CEDD_TRACEBACK", "1")
    with pytest.raises(ValueError, match="no run or model at nowhere"):
        main(["sample", "nowhere"])


def test_an_unwritable_file_is_found_before_anything_is_computed(run: str, tmp_path: Path, capsys, monkeypatch):
    (tmp_path / "book.txt").write_text("It was a dark and stormy night. " * 40)
    monkeypatch.setattr(
        "cedd.storage._claimed", lambda *_: (_ for _ in ()).throw(PermissionError(13, "Permission denied"))
    )
    for words in (
        ["evaluate", run, "--data", str(tmp_path / "book.txt"), "--plot", str(tmp_path / "x.png")],
        ["spelling", run, "--data", str(tmp_path / "book.txt"), "--plot", str(tmp_path / "x.png")],
        ["sample", run, "--html", str(tmp_path / "x.html")],
        ["report", run, "--out", str(tmp_path / "x.html")],
        ["genppl", run, "--out", str(tmp_path / "x.jsonl")],
    ):
        name = Path(words[-1]).name
        assert last_line(words, capsys).endswith(f"{tmp_path}/{name} cannot be written: Permission denied")


def test_the_table_is_printed_before_the_picture_is_drawn(run: str, tmp_path: Path, capsys, monkeypatch):
    (tmp_path / "book.txt").write_text("it was a dark and stormy night. " * 40)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device", "x.png")

    monkeypatch.setattr("cedd.evaluation.evaluate.EvaluationResult.save_plot", fail)
    words = ["evaluate", run, "--data", str(tmp_path / "book.txt"), "--draws", "1", "--plot", str(tmp_path / "x.png")]
    assert main([*words, "--max-sequences", "2"]) == 1
    assert "perplexity per token" in capsys.readouterr().out


def test_what_is_imported_is_kept_from_the_collector_in_a_process_of_its_own_only(capsys: pytest.CaptureFixture[str]):
    """Frozen objects are never collected: a program that calls `main` keeps its own."""
    before, words = gc.get_freeze_count(), ["correct", "--file", "/no/such/file"]
    assert main(words) == 2
    capsys.readouterr()
    assert gc.get_freeze_count() <= before  # some may have ended meanwhile
    assert gc.isenabled()
    program = "import gc, sys; from cedd.cli import main; main(); print(gc.get_freeze_count(), gc.isenabled())"
    ended = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=True)
    count, enabled = ended.stdout.splitlines()[-1].split()
    assert int(count) > 1000
    assert enabled == "True"


@pytest.mark.parametrize("delay", [0.8, *(pytest.param(delay, marks=pytest.mark.slow) for delay in (0.2, 1.4))])
def test_an_interrupt_while_modules_are_imported_is_130(delay: float, tmp_path: Path):
    """At several moments: while Python itself starts, it is Python that ends the process, by the signal."""
    command, pipe = [sys.executable, "-m", "cedd", "correct"], subprocess.PIPE
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a child of tests that ignore it would too
    try:
        child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe)
    finally:
        signal.signal(signal.SIGINT, before)
    time.sleep(delay)
    child.send_signal(signal.SIGINT)
    _, said = child.communicate(timeout=60)
    started = child.returncode == 130
    assert started or delay < 0.5
    assert not started or said.decode() == "cedd: interrupted\n"


@pytest.mark.parametrize(
    "command", ["train tiny --help", pytest.param("theory --vocab 2 --length 1", marks=pytest.mark.slow)]
)
def test_a_reader_that_has_seen_enough_is_no_failure(command: str, tmp_path: Path):
    script = f"{sys.executable} -m cedd {command} 2>errors | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout.splitlines()[-1] in ("141", "0")
    assert (tmp_path / "errors").read_text().strip() == ""


@pytest.mark.parametrize(
    ("closed", "words", "said"),
    [
        ("2>&-", ["--version"], f"cedd {cedd.__version__}\n"),
        ("<&- 2>&-", ["correct", "Teh cat"], "The cat\n"),  # which opens a lexicon
    ],
)
def test_a_closed_standard_stream_is_no_failure(closed: str, words: list[str], said: str, tmp_path: Path):
    """No file that is opened takes its place, and what is said to it is not written there."""
    program = f"import sys; from cedd.cli import main; code = main({words}); file = open('kept', 'wb'); "
    program += "ended = f'{code} {file.fileno() > 2}'; file.write(ended.encode()); sys.exit(code)"
    script = f'"$1" -c "$2" {closed}'
    done = subprocess.run(["bash", "-c", script, "-", sys.executable, program], capture_output=True, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, said.encode(), b"")
    assert (tmp_path / "kept").read_text() == "0 True"


@pytest.mark.parametrize(
    ("closed", "words", "said"),
    [
        (">&-", ["correct", "Teh cat"], "cedd: error: standard output is closed\n"),
        (">&-", ["theory", "--help"], "cedd: error: standard output is closed\n"),
        ("<&- >&- 2>&-", ["--version"], ""),
    ],
)
def test_output_that_nobody_gets_is_a_failure(closed: str, words: list[str], said: str, tmp_path: Path):
    """As by other programs: echo >&- fails too."""
    command = ["bash", "-c", f'"$@" {closed}', "-", sys.executable, "-m", "cedd", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", said)


def test_without_standard_input_there_is_no_text(tmp_path: Path):
    script = f"{sys.executable} -m cedd correct <&-"
    done = subprocess.run(["bash", "-c", script], capture_output=True, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_signs_that_the_output_has_not_are_written_out(monkeypatch: pytest.MonkeyPatch):
    """Of a table or a name; texts are written in UTF-8 whatever it is."""
    kept = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(kept, encoding="ascii"))
    assert run_command("cedd", lambda: sys.stdout.write("0.5 ≤ 1 \udcff\n") and 0) == 0
    assert kept.getvalue() == b"0.5 \\u2264 1 \\udcff\n"


def test_a_folder_that_was_removed_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert run_command("cedd", lambda: len(Path.cwd().parts)) == 2
    assert capsys.readouterr().err == "cedd: error: the current folder does not exist any more; change to another one\n"


# ----------------------------------------------------------------------------------------------------------------
# Terminals


def test_control_characters_are_written_out():
    assert printable(ESCAPE) == "\\x1b[31mred\\x1b]0;title\\x07"
    assert printable("línea\n\ttwo ▒ 日本") == "línea\n\ttwo ▒ 日本"
    assert printable("a\u202eb\u2066c\u200e") == "a\\u202eb\\u2066c\u200e"  # those that reverse the order


@pytest.mark.parametrize("columns", ["0", "20"])
def test_no_number_of_a_table_is_cut_off(columns: str, monkeypatch: pytest.MonkeyPatch, capsys):
    """However narrow the terminal is. Only a long word of the first column, which names rows, is broken."""
    monkeypatch.setenv("COLUMNS", columns)
    table = Table()
    for title in ("", "perplexity per token", "bits"):
        table.add_column(title, justify="right", no_wrap=title == "bits")
    table.add_row("runs/" + "long" * 30, "23456.25\n[4.92, 45672.72]", "1.2345 [1.2, 1.3]")
    PlainConsole().print(table)
    said = capsys.readouterr().out
    assert "…" not in said
    cells = {cell.strip() for cell in re.split("[│┃\n]", said)}
    assert {"perplexity", "23456.25", "1.2345 [1.2, 1.3]"} <= cells | set(said.split())
    assert "45672.72]" in said
    assert said.count("long") >= 25


def test_messages_show_escape_sequences(capsys: pytest.CaptureFixture[str]):
    assert "\\x1b[31mred" in last_line(["sample", ESCAPE], capsys)


def test_neighbours_that_are_suggested_are_shown_escaped(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("book\x1b[31m.txt").write_text("x")
    line = last_line(["train", "tiny", "--out", "o", "--data", "book.txt"], capsys)
    assert "did you mean book\\x1b[31m.txt?" in line


def test_a_console_prints_what_it_is_given(capsys: pytest.CaptureFixture[str]):
    from rich.table import Table

    table = Table(title="[/red] [nan, nan]")
    table.add_column(ESCAPE)
    table.add_row("[nan, nan]")
    console = PlainConsole(width=60)
    console.print(table)
    console.print("[nan, nan] :smile:")
    shown = capsys.readouterr().out
    assert shown.count("[nan, nan]") == 3
    assert "[/red]" in shown
    assert ":smile:" in shown
    assert "\x1b" not in shown


@pytest.mark.slow
def test_texts_are_shown_escaped_on_a_terminal_only(run: str, capfdbinary):
    assert main(["infill", run, f"{ESCAPE}____", "--steps", "2"]) == 0
    assert capfdbinary.readouterr().out.startswith(ESCAPE.encode())
    start_server()  # a process forked while threads run may deadlock
    terminal, its = pty.openpty()
    child = command_on_terminal(["infill", run, f"{ESCAPE}____", "--steps", "2"], os.ttyname(its))
    shown = b""
    while select.select([terminal], [], [], 0.05)[0] or child.is_alive():
        shown += os.read(terminal, 4096) if select.select([terminal], [], [], 0)[0] else b""
    assert wait(child) == 0
    os.close(terminal)
    os.close(its)
    assert printable(ESCAPE).encode() in shown
    assert b"\x1b[31m" not in shown


# ----------------------------------------------------------------------------------------------------------------
# The judge


def test_a_judge_is_never_unpickled(monkeypatch, tmp_path):
    """A stand-in for the library, which must be called with safetensors only."""
    from cedd.evaluation.generative import HubJudge

    asked: list[dict[str, object]] = []

    class Loader:
        @staticmethod
        def from_pretrained(name: str, **options: object) -> object:
            asked.append(options)
            if len(asked) in (2, 3):
                raise OSError("no file named model.safetensors")
            return object()

    logging = SimpleNamespace(disable_progress_bar=lambda: None)
    library = SimpleNamespace(AutoTokenizer=Loader, AutoModelForCausalLM=Loader, utils=SimpleNamespace(logging=logging))
    monkeypatch.setitem(sys.modules, "transformers", library)
    with pytest.raises(ValueError, match="could not be loaded: no file named"):
        HubJudge("owner/judge")
    assert asked[1] == {"use_safetensors": True}
    (tmp_path / "judge.gguf").write_bytes(b"no GGUF")
    with pytest.raises(ValueError, match=r"the judge '.*judge\.gguf' could not be loaded: no file named"):
        HubJudge(str(tmp_path / "judge.gguf"))
