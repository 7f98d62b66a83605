"""Help that begins with an example which works, completion that knows what the help says, errors of one line."""

import contextlib
import dataclasses
import io
import os
import pty
import re
import select
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from cedd.cli import COMMANDS, main
from cedd.cli.arguments import ARGUMENTS, parse
from cedd.cli.completion import fish_script, help_text, read_options, read_usage, zsh_script
from cedd.methods import METHODS
from cedd.models.locate import pretrained_names
from cedd.process import PROCESSES
from cedd.samplers import GRIDS, SAMPLERS
from cedd.schedules import SCHEDULES
from cedd.training.config import PRESETS
from tests.options import undescribed

BASH, FISH, ZSH = map(shutil.which, ("bash", "fish", "zsh"))
NEED_A_MODEL = {"sample", "infill", "correct", "spelling"}  # that comes with the package


def example_of(text: str) -> list[str]:
    """The words of the example that a help begins with."""
    first = text.splitlines()[0]
    assert first.startswith("example: cedd "), first
    return shlex.split(first.removeprefix("example: "))[1:]


@pytest.fixture(scope="module")
def helps() -> dict[str, str]:
    return {name: help_text(name) for name in COMMANDS}


# ----------------------------------------------------------------------------------------------------------------
# Examples


@pytest.mark.parametrize("name", COMMANDS)
def test_the_example_of_a_help_parses(helps: dict[str, str], name: str):
    command, *words = example_of(helps[name])
    assert command == name
    assert parse(name, words)


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "completion"])
def test_every_command_takes_a_seed_a_device_and_json(helps: dict[str, str], name: str):
    for option in ("--seed", "--device", "--json"):
        assert option in helps[name]


def test_the_overview_begins_with_an_example_that_parses(capsys: pytest.CaptureFixture[str]):
    assert main([]) == 0
    command, *words = example_of(capsys.readouterr().out)
    assert parse(command, words).fast


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_a_help_with_an_example(name: str):
    assert example_of(help_text("train", name))[:2] == ["train", name]


@pytest.mark.parametrize(
    ("words", "table"),
    [
        ("sample", SAMPLERS),
        ("genppl", SAMPLERS),
        ("infill", GRIDS),
        ("train char", METHODS),
        ("train char", PROCESSES),
        ("train char", SCHEDULES),
    ],
)
def test_a_help_names_the_rows_of_a_table(words: str, table: Iterable[str]):
    shown = help_text(*words.split())
    assert [name for name in table if not re.search(rf"[ (]{name}[ ,:.]", shown)] == []


@pytest.mark.parametrize("kind", ARGUMENTS.values())
def test_every_option_says_what_it_is(kind: type):
    assert undescribed(kind) == []


def test_an_option_without_a_word_is_noticed():
    @dataclasses.dataclass
    class Options:
        """Of a command."""

        speed: float = 1.0
        places: int = 2
        """Digits."""

    assert undescribed(Options) == ["Options.speed"]


def test_helps_and_mistakes_wait_for_no_torch():
    """In a process of its own, which has imported nothing yet."""
    asked = [f"{name} --help" for name in COMMANDS] + ["train char --help", "sample --temprature 3", "correct --rate x"]
    script = (
        "import sys; from cedd.cli import main\n"
        f"for words in {asked!r}:\n"
        "    try: main(words.split())\n"
        "    except SystemExit: pass\n"
        "heavy = [name for name in ('torch', 'numpy', 'matplotlib') if name in sys.modules]\n"
        "sys.exit(f'{words} imports {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env={**os.environ})
    assert done.returncode == 0, done.stderr


@pytest.fixture
def after_quickstart(fast_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as it is after `cedd quickstart`."""
    shutil.copytree(fast_run, tmp_path / "runs" / "quickstart", ignore=shutil.ignore_patterns("checkpoints"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["evaluate", "export", "report", *sorted(NEED_A_MODEL)])
def test_examples_work_as_they_stand(
    helps: dict[str, str], name: str, after_quickstart: Path, capsys: pytest.CaptureFixture[str]
):
    if name in NEED_A_MODEL and "english-char" not in pretrained_names():
        pytest.skip("no model comes with this copy of the package")
    quick = {
        "evaluate": "--draws 1",
        "infill": "--steps 2",
        "report": "--sequences 16 --draws 1 --samples 1",
        "sample": "--length 32 --steps 2",
        "spelling": "--blocks 1 --passes 1 --thresholds 0.5",
    }
    less = quick.get(name, "").split()
    assert main([*example_of(helps[name]), *less, "--device", "cpu"]) == 0
    assert capsys.readouterr().out.strip()


# ----------------------------------------------------------------------------------------------------------------
# Completion


def script_in(folder: Path, shell: str) -> Path:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(["completion", shell]) == 0
    path = folder / f"cedd.{shell}"
    path.write_text(printed.getvalue())
    return path


@pytest.fixture(scope="module")
def bash_script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return script_in(tmp_path_factory.mktemp("completion"), "bash")


def completed(script: Path, *words: str) -> list[str]:
    """What bash offers for the last of the words."""
    given = " ".join(map(shlex.quote, ("cedd", *words)))
    asking = f"source {shlex.quote(str(script))}; COMP_WORDS=({given}); COMP_CWORD={len(words)}; _cedd; "
    asking += 'printf "%s\\n" "${COMPREPLY[@]}"'
    assert BASH is not None
    done = subprocess.run([BASH, "-c", asking], capture_output=True, text=True, check=True, cwd=script.parent)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.skipif(BASH is None, reason="there is no bash here")
def test_bash_completes_commands_options_choices_and_files(bash_script: Path):
    assert set(COMMANDS) < set(completed(bash_script, ""))
    assert completed(bash_script, "eva") == ["evaluate"]
    assert completed(bash_script, "evaluate", "--bo") == ["--bound"]
    assert completed(bash_script, "evaluate", "--bound", "") == ["tight", "j1", "j2", "all"]
    assert completed(bash_script, "train", "") == list(PRESETS)
    assert completed(bash_script, "train", "char", "--process.na") == ["--process.name"]
    assert completed(bash_script, "train", "char", "--process.name", "r") == ["roulette"]
    assert completed(bash_script, "train", "char", "--method", "bayes-") == ["bayes-star"]
    assert completed(bash_script, "train", "char", "--data", "") == ["python-manual", "cedd.bash"]
    assert completed(bash_script, "evaluate", "") == [*pretrained_names(), "cedd.bash"]
    assert completed(bash_script, "bench", "train", "--pres") == ["--preset"]
    assert completed(bash_script, "evaluate", "runs") == []  # left to the shell: file names
    shown = subprocess.run(
        [str(BASH), "-c", f"source {shlex.quote(str(bash_script))}; complete -p cedd"], capture_output=True, text=True
    )
    assert "-o default" in shown.stdout


def test_completion_knows_the_options_that_a_help_names(helps: dict[str, str]):
    for name, text in helps.items():
        shown = re.findall(r"^│ (?:-\w(?: \w+)?, )?(--[a-z][\w.-]*)", text, re.MULTILINE)
        assert set(shown) <= set(read_usage(name).options), name
    train = read_usage("train")
    assert {"--optimizer.rate", "--text.holdout-by", "--evaluation.every"} < set(train.options)
    assert "--steps" not in train.flags
    assert all("--json" in read_usage(name).flags for name in COMMANDS if name != "completion")  # which is a script


def test_options_are_read_from_boxes_side_by_side():
    line = "│ -n INT, --number INT  so many    ││ --kind {a,b}  which │"
    assert read_options(line) == {"-n": "INT", "--number": "INT", "--kind": "{a,b}"}


def test_scripts_for_the_other_shells():
    usages = [read_usage("evaluate")]
    assert "bashcompinit" in zsh_script(usages)
    assert "-l bound -x -a 'tight j1 j2 all'" in fish_script(usages)


@pytest.mark.skipif(FISH is None, reason="there is no fish here")
def test_fish_completes_commands_options_choices_and_files(tmp_path: Path):
    lines = {
        "cedd ev": ["evaluate"],
        "cedd bench ": ["sample", "train"],
        "cedd bench train --pres": ["--preset"],  # of bench, though a command is called train
        "cedd bench train ": [],
        "cedd evaluate runs --bound ": ["all", "j1", "j2", "tight"],  # and no files
        "cedd evaluate runs --draws ": [],
        "cedd evaluate runs --plot ": ["cedd.fish"],
        "cedd evaluate ": sorted(["cedd.fish", *pretrained_names()]),
        "cedd report runs ": sorted(["cedd.fish", *pretrained_names()]),
        "cedd train char --process.name r": ["roulette"],
        "cedd train char --data ": ["cedd.fish", "python-manual"],
        "cedd train ": sorted(PRESETS),
    }
    script = script_in(tmp_path, "fish")
    asking = f"source {script}; " + "; echo ---; ".join(f"complete -C {shlex.quote(line)}" for line in lines)
    done = subprocess.run(
        [str(FISH), "--no-config", "-c", asking], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stderr == ""
    offered = [[word.split("\t")[0] for word in part.splitlines() if word] for part in done.stdout.split("---\n")]
    assert dict(zip(lines, map(sorted, offered), strict=True)) == lines


@pytest.mark.skipif(ZSH is None, reason="there is no zsh here")
def test_zsh_completes_commands_options_choices_and_files(tmp_path: Path):
    """Typed at a terminal, with a cedd that shows its words."""
    typed = {
        "cedd eva\truns --bo\tti\t": ["evaluate", "runs", "--bound", "tight"],
        "cedd bench tr\t--pres\tti\t": ["bench", "train", "--preset", "tiny"],
        "cedd train english\t--data pyth\t": ["train", "english-char", "--data", "python-manual"],
        "cedd train char --data ced\t": ["train", "char", "--data", "cedd.zsh"],
        "cedd spelling english-\t": ["spelling", "english-char"],
    }
    show = 'cedd() { print -r -- "got $# ${(q)@}" }'
    lines = [f"source {script_in(tmp_path, 'zsh')}", "unsetopt beep", show, *typed, "exit"]
    output = typed_at_a_terminal([str(ZSH), "-f", "-i"], lines, tmp_path)
    shown = [line.split("got ")[1].split() for line in output.splitlines() if re.search(r"got \d", line)]
    assert shown == [[str(len(words)), *words] for words in typed.values()], output


def typed_at_a_terminal(command: list[str], lines: list[str], folder: Path) -> str:
    """All that a program shows that is told these lines one after the other, each when it asks for the next."""
    prompt = "ready>"
    environment = {**os.environ, "HOME": str(folder), "ZDOTDIR": str(folder), "TERM": "dumb", "PS1": prompt}
    child, terminal = pty.fork()
    if not child:
        os.chdir(folder)
        os.execve(command[0], command, environment)
    shown, asked, deadline = "", 0, time.monotonic() + 60
    with contextlib.suppress(OSError):  # the end, on Linux
        while time.monotonic() < deadline:
            if lines and shown.count(prompt, asked):
                asked = len(shown)
                os.write(terminal, lines.pop(0).encode() + b"\r")
            if select.select([terminal], [], [], 1.0)[0]:
                shown += os.read(terminal, 4096).decode(errors="replace")
    os.close(terminal)
    os.waitpid(child, 0)
    return shown


# ----------------------------------------------------------------------------------------------------------------
# Errors

BAD = [
    ("evalute", "did you mean 'evaluate'?"),
    ("train", "name a preset first"),
    ("train chra --out o", "did you mean 'char'?"),
    ("train tiny", "--out FOLDER"),
    ("train tiny --out o --method beyes-star", "did you mean 'bayes-star'?"),
    ("train tiny --out o --process.name absorbb", "did you mean 'absorb'?"),
    ("train tiny --out o --optimzer.rate 1", "did you mean --optimizer.rate"),
    ("train tiny --out o --steps many", "--steps takes a whole number; got 'many'"),
    ("train tiny --out o --optimizer.rate fast", "takes a number; got 'fast'"),
    ("train tiny --out o --data boook.txt", "did you mean book.txt"),
    ("evaluate", "RUN"),
    ("evaluate runs/quickstrat", "did you mean runs/quickstart?"),
    ("evaluate runs/quickstart --data boook.txt", "did you mean book.txt"),
    ("evaluate runs/quickstart --bound tihgt", "did you mean 'tight'?"),
    ("evaluate runs/quickstart --plot nowhere/x.png", "there is no folder nowhere"),
    ("report", "name at least one run"),
    ("report runs/quickstrat", "did you mean runs/quickstart?"),
    ("report runs/quickstart runs/quickstrat", "did you mean runs/quickstart?"),
    ("report runs/quickstart --sequences 0", "--sequences must be at least 1"),
    ("report runs/quickstart --out runs", "runs is a folder"),
    ("genppl runs/quickstrat", "did you mean runs/quickstart?"),
    ("genppl runs/quickstart --sampler eulr", "did you mean 'euler'?"),
    ("genppl --samples nowhere.jsonl", "no samples at nowhere.jsonl"),
    ("sample runs/quickstrat", "did you mean runs/quickstart?"),
    ("sample --seed 99999999999999999999999", "--seed must be a whole number from 0 up, below 2^63; got 99"),
    ("sample --seed -1", "--seed must be a whole number from 0 up"),
    ("sample --temprature 3 --lenth 4", "sample: there is no option --temprature; did you mean --temperature? (cedd"),
    ("sample --device", "--device needs a value (cedd"),
    ("correct --threshold abc x", "correct: --threshold takes a number; got 'abc' (cedd"),
    ("correct --passes 1.5 x", "--passes takes a whole number; got '1.5' (cedd"),
    ("correct --thresold 0.2 teh cat", "correct: there is no option --thresold; did you mean --threshold? (cedd"),
    ("correct --Dash", "there is no option '--Dash'; a text that begins with a dash comes after -- (cedd"),
    ("correct --zzz", "there is no option --zzz (cedd"),
    ("correct --file boook.txt", "there is no file or folder boook.txt; did you mean book.txt?"),
    ("spelling", "RUN and --data must be given (cedd"),
    ("spelling x --data y --thresholds a b", "--thresholds takes numbers; got 'a', 'b' (cedd"),
    ("theory --jsn", "there is no option --jsn; did you mean --json? (cedd"),
    ("theory 5", "there is no place for '5' (cedd"),
    ("bench", "train or sample must be given (cedd"),
    ("bench trian", "did you mean 'train'?"),
    ("bench train --vocab 0", "at least 2"),
    ("bench train --methods cedd/absrob", "did you mean 'absorb'?"),
    ("bench sample --methods ced/absorb", "did you mean 'cedd'?"),
    ("theory --vocab 50", "choose V from 2 to 10"),
    ("completion tcsh", "use one of bash, zsh, fish"),
    ("quickstart --steps 0", "steps must be at least 1"),
    ("quickstart --minutes 0", "--minutes must be above 0 and at most 1440, a day; got 0"),
    ("quickstart --minutes inf", "--minutes must be above 0 and at most 1440, a day; got inf"),
    ("quickstart --minutes 1e9", "--minutes must be above 0 and at most 1440, a day; got 1e+09"),
    ("quickstart --minutes 1 --steps 10", "give either --minutes or --steps"),
    ("quickstart --fast --minutes 1", "give either --minutes or --fast"),
    ("quickstart --fats", "did you mean --fast"),
    ("quickstart --device gpu", "there is no device 'gpu'"),
    ("quickstart --out book.txt", "book.txt is a file"),
]


@pytest.mark.parametrize(("words", "said"), BAD, ids=[words for words, _ in BAD])
def test_bad_input_is_one_line_that_helps(
    words: str, said: str, after_quickstart: Path, capsys: pytest.CaptureFixture[str]
):
    (after_quickstart / "book.txt").write_text("A book. " * 500)
    assert main(words.split()) == 2
    *before, line = capsys.readouterr().err.strip().splitlines()
    assert said in line
    assert [text for text in before if "Traceback" in text or "│" in text] == []
    assert len(before) <= (1 if words.startswith("quickstart") else 0)  # what it was about to do


ON_A_TERMINAL = [
    ("sample --sampler eulr", "sample: --sampler has no choice 'eulr'; did you mean 'euler'?"),
    (
        "sample --temprature 3",
        "sample: there is no option --temprature; did you mean --temperature? (cedd sample --help tells more)",
    ),
    ("spelling --dta x", "spelling: there is no option --dta; did you mean --data? (cedd spelling --help tells more)"),
    ("spelling", "spelling: RUN and --data must be given (cedd spelling --help tells more)"),
    ("correct --passes 1.5 x", "correct: --passes takes a whole number; got '1.5' (cedd correct --help tells more)"),
    ("sample --device", "sample: --device needs a value (cedd sample --help tells more)"),
    ("bench", "bench: train or sample must be given (cedd bench --help tells more)"),
    ("theory 5", "theory: there is no place for '5' (cedd theory --help tells more)"),
]


def test_commands_share_the_cores_unless_told_how_to_wait(monkeypatch):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "to be restored")
        monkeypatch.delenv(name)
    main(["sample", "--no-such-option"])
    assert os.environ["GOMP_SPINCOUNT"] == "1000"
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    main(["sample", "--no-such-option"])
    assert os.environ["GOMP_SPINCOUNT"] == "7"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    main(["sample", "--no-such-option"])
    assert "GOMP_SPINCOUNT" not in os.environ


@pytest.mark.parametrize("columns", [40, 200])
@pytest.mark.parametrize("colours", [True, False])
@pytest.mark.parametrize(("words", "said"), ON_A_TERMINAL, ids=[words for words, _ in ON_A_TERMINAL])
def test_usage_errors_on_a_terminal_are_the_same_line(words: str, said: str, colours: bool, columns: int):
    """The command's own process would import everything again for each of them: a fork has it already."""
    child, terminal = pty.fork()
    if not child:
        os.environ |= {"COLUMNS": str(columns), "TERM": "xterm-256color", **({} if colours else {"NO_COLOR": "1"})}
        sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode) for number, mode in enumerate("rww"))
        code = main(shlex.split(words))
        sys.stderr.flush()
        os._exit(code)
    shown = b""
    with contextlib.suppress(OSError):  # the end, on Linux
        while part := os.read(terminal, 4096):
            shown += part
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    assert shown.decode() == f"cedd {said}\r\n"


@pytest.mark.parametrize(
    ("words", "positions"),
    [("nowhere text", 2), ("nowhere --rate 0.1 text", 2), ("--rate 0.1 nowhere --passes 2 text", 2), ("text", 1)],
)
def test_options_may_stand_between_a_run_and_a_text(words: str, positions: int):
    assert len(parse("correct", words.split()).words) == positions
