"""Error messages and exit codes of commands."""

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


def test_unknown_network_entry_suggests_newer_version(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
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
def test_invalid_input_gives_one_line_error(words: str, said: str, capsys: pytest.CaptureFixture[str]):
    assert said in last_line(words.split(), capsys)


@pytest.mark.parametrize(
    ("variable", "data"), [("CEDD_CACHE", "python-manual"), ("CEDD_DATA", "wikitext2")], ids=["cache", "data"]
)
def test_unknown_home_in_environment_variable_gives_one_line_error(
    variable: str, data: str, run: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(variable, "~nosuchuser/x")
    line = last_line(["evaluate", run, "--data", data], capsys)
    assert line == "cedd: error: ~nosuchuser/x names the home folder of an unknown user"


def test_named_pipe_as_data_is_rejected(run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert "is not a regular file" in last_line(["evaluate", run, "--data", str(pipe)], capsys)


def test_torch_device_is_accepted_and_prompt_must_be_a_string(run: str):
    model = cedd.load(run, device=torch.device("cpu"))  # pyright: ignore[reportArgumentType]
    assert pick_device(torch.device("cpu")) == torch.device("cpu")
    with pytest.raises(ValueError, match="prompt must be a string \\(got 5"):
        model.generate(prompt=5)  # pyright: ignore[reportArgumentType]


def test_report_without_training_data_gives_clear_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch
):
    folder = save_random(tmp_path / "run")
    config = replace(PRESETS["tiny"][1], data="book.txt", out=Path("run"))
    (folder / "train.json").write_text(json.dumps(to_json(config)))
    monkeypatch.chdir(folder)
    line = last_line(["report", str(folder)], capsys)
    assert line.endswith("was trained on book.txt, which was not found here; run this in the folder of the training")


# ----------------------------------------------------------------------------------------------------------------
# The machine


def test_out_of_memory_exits_with_code_1(run: str, capsys: pytest.CaptureFixture[str], monkeypatch):
    def fill(*args: object, **options: object) -> None:
        torch.empty(2**60)

    monkeypatch.setattr("cedd.cli.sample.template_of", fill)
    assert "out of memory" in last_line(["sample", run], capsys, code=1)


def test_missing_torch_is_reported(capsys: pytest.CaptureFixture[str], monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert run_command("cedd", lambda: importlib.import_module("torch") and 0) == 1
    assert "pip install torch" in capsys.readouterr().err


def test_internal_error_shows_traceback(run: str, monkeypatch):
    monkeypatch.setattr("cedd.cli.sample.template_of", lambda *_: {}["key"])
    with pytest.raises(KeyError):
        main(["sample", run])


def test_environment_variable_enables_tracebacks(monkeypatch, capsys: pytest.CaptureFixture[str]):
    assert last_line(["sample", "nowhere"], capsys).startswith("cedd: error: no run or model at nowhere")
    monkeypatch.setenv("CEDD_TRACEBACK", "1")
    with pytest.raises(ValueError, match="no run or model at nowhere"):
        main(["sample", "nowhere"])


def test_unwritable_output_is_reported_before_computing(run: str, tmp_path: Path, capsys, monkeypatch):
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


def test_table_is_printed_before_plot_is_drawn(run: str, tmp_path: Path, capsys, monkeypatch):
    (tmp_path / "book.txt").write_text("it was a dark and stormy night. " * 40)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device", "x.png")

    monkeypatch.setattr("cedd.evaluation.evaluate.EvaluationResult.save_plot", fail)
    words = ["evaluate", run, "--data", str(tmp_path / "book.txt"), "--draws", "1", "--plot", str(tmp_path / "x.png")]
    assert main([*words, "--max-sequences", "2"]) == 1
    assert "perplexity per token" in capsys.readouterr().out


def test_imports_are_frozen_for_gc_only_in_own_process(capsys: pytest.CaptureFixture[str]):
    """Frozen objects are never collected, so `main` must not freeze those of a program that calls it."""
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
def test_interrupt_during_import_exits_with_130(delay: float, tmp_path: Path):
    """At several moments; while Python itself starts, it ends the process by the signal."""
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
def test_closed_output_pipe_is_not_an_error(command: str, tmp_path: Path):
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
def test_closed_stdin_or_stderr_is_not_an_error(closed: str, words: list[str], said: str, tmp_path: Path):
    """No file that is opened later takes its place, so no message is written into that file."""
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
def test_closed_stdout_is_an_error(closed: str, words: list[str], said: str, tmp_path: Path):
    """As in other programs: echo >&- fails too."""
    command = ["bash", "-c", f'"$@" {closed}', "-", sys.executable, "-m", "cedd", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", said)


def test_closed_stdin_means_empty_text(tmp_path: Path):
    script = f"{sys.executable} -m cedd correct <&-"
    done = subprocess.run(["bash", "-c", script], capture_output=True, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_unencodable_characters_are_escaped(monkeypatch: pytest.MonkeyPatch):
    """In tables and names; texts are always written in UTF-8."""
    kept = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(kept, encoding="ascii"))
    assert run_command("cedd", lambda: sys.stdout.write("0.5 ≤ 1 \udcff\n") and 0) == 0
    assert kept.getvalue() == b"0.5 \\u2264 1 \\udcff\n"


def test_removed_current_folder_gives_one_line_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert run_command("cedd", lambda: len(Path.cwd().parts)) == 2
    assert capsys.readouterr().err == "cedd: error: the current folder does not exist any more; change to another one\n"


# ----------------------------------------------------------------------------------------------------------------
# Terminals


def test_control_characters_are_escaped():
    assert printable(ESCAPE) == "\\x1b[31mred\\x1b]0;title\\x07"
    assert printable("línea\n\ttwo ▒ 日本") == "línea\n\ttwo ▒ 日本"
    assert printable("a\u202eb\u2066c\u200e") == "a\\u202eb\\u2066c\u200e"  # those that reverse the order


@pytest.mark.parametrize("columns", ["0", "20"])
def test_table_numbers_are_never_truncated(columns: str, monkeypatch: pytest.MonkeyPatch, capsys):
    """However narrow the terminal is; only long words in the first column, which names the rows, are broken."""
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


def test_escape_sequences_in_messages_are_escaped(capsys: pytest.CaptureFixture[str]):
    assert "\\x1b[31mred" in last_line(["sample", ESCAPE], capsys)


def test_suggested_file_names_are_escaped(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("book\x1b[31m.txt").write_text("x")
    line = last_line(["train", "tiny", "--out", "o", "--data", "book.txt"], capsys)
    assert "did you mean book\\x1b[31m.txt?" in line


def test_console_prints_markup_literally(capsys: pytest.CaptureFixture[str]):
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
def test_texts_are_escaped_only_on_terminals(run: str, capfdbinary):
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


def test_judge_is_loaded_only_from_safetensors(monkeypatch, tmp_path):
    """With a stand-in for the library, which must be called for safetensors only."""
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
