"""Help with working examples, completion of every option, one-line errors."""

import contextlib
import dataclasses
import io
import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from cedd.cli import COMMANDS, main
from cedd.cli.arguments import ARGUMENTS, parse
from cedd.cli.completion import script
from cedd.methods import METHODS
from cedd.models.architectures import ARCHITECTURES
from cedd.models.locate import pretrained_names
from cedd.process import PROCESSES
from cedd.samplers import GRIDS, SAMPLERS
from cedd.samplers.registry import named_sampler
from cedd.schedules import SCHEDULES
from cedd.training.config import PRESETS
from tests.cli.helps import help_text
from tests.options import undescribed
from tests.tasks.models import save_random

BASH = shutil.which("bash")
NEED_A_MODEL = {"sample", "infill", "correct", "spelling"}  # that comes with the package


def example_of(text: str) -> list[str]:
    """The words of the first example of a help."""
    first = next(line for line in text.splitlines() if line.startswith("example: cedd "))
    return shlex.split(first.removeprefix("example: "))[1:]


@pytest.fixture(scope="module")
def helps() -> dict[str, str]:
    return {name: help_text(name) for name in COMMANDS}


# ----------------------------------------------------------------------------------------------------------------
# Examples


@pytest.mark.parametrize("name", COMMANDS)
def test_help_example_parses(helps: dict[str, str], name: str, tmp_path: Path):
    command, *words = example_of(helps[name])
    assert command == name
    if name == "adapt":
        parent = save_random(tmp_path / "smollm2", "absorb", "ar")
        words = [str(parent) if word == "smollm2" else word for word in words]
    assert parse(name, words)


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "completion"])
def test_every_command_has_seed_device_and_json_options(helps: dict[str, str], name: str):
    for option in ("--seed", "--device", "--json"):
        assert option in helps[name]


def test_help_describes_all_arguments_in_usage(helps: dict[str, str]):
    for name, shown in helps.items():
        usage, rest = shown.split("\n", 1)
        text = re.sub(r"(?m)^ +-.*$", "", rest).replace("presets:", "PRESET")  # without the names of options
        described = {"OPTIONS", *re.findall(r"\b[A-Z]+\b", text)}
        assert set(re.findall(r"\b[A-Z]+\b", usage)) <= described, name


def test_overview_starts_with_example_that_parses(capsys: pytest.CaptureFixture[str]):
    assert main([]) == 0
    command, *words = example_of(capsys.readouterr().out)
    assert parse(command, words).fast


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_help_has_an_example(name: str):
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
        ("train char", tuple(ARCHITECTURES)),
    ],
)
def test_help_lists_all_registered_names(words: str, table: Iterable[str]):
    shown = help_text(*words.split())
    assert [name for name in table if not re.search(rf"[ (]{name}[ ,:.]", shown)] == []


def options_in(text: str) -> set[str]:
    return set(re.findall(r"^  (--[a-z][\w.-]*)", text, re.MULTILINE))


def test_adapt_help_is_short_and_refers_to_full_help(helps: dict[str, str]):
    listed, every = options_in(helps["adapt"]), options_in(help_text("train", "adapt"))
    assert listed < every
    assert {one for one in every if one.startswith("--adapt.")} < listed
    assert len(listed) <= 20
    assert "cedd train adapt --help" in helps["adapt"]


@pytest.mark.parametrize(("name", "option"), [("import", "--out PATH"), ("spelling", "--data DATA")])
def test_help_marks_required_options(helps: dict[str, str], name: str, option: str):
    assert re.search(rf"^  {option} .*\(required\)$", helps[name], re.MULTILINE)


@pytest.mark.parametrize("kind", ARGUMENTS.values())
def test_every_option_is_described(kind: type):
    assert undescribed(kind) == []


def test_undescribed_option_is_detected():
    @dataclasses.dataclass
    class Options:
        """Of a command."""

        speed: float = 1.0
        places: int = 2
        """Digits."""

    assert undescribed(Options) == ["Options.speed"]


def test_help_and_usage_errors_do_not_import_torch():
    """In a separate process that has imported nothing yet."""
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


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in ("report", "spelling") else ())
        for name in ("evaluate", "export", "report", *sorted(NEED_A_MODEL))
    ],
)
def test_help_examples_run(
    helps: dict[str, str], name: str, after_quickstart: Path, capsys: pytest.CaptureFixture[str]
):
    if name in NEED_A_MODEL and "english-char" not in pretrained_names():
        pytest.skip("no model comes with this copy of the package")
    quick = {
        "evaluate": "--draws 1 --max-sequences 40",
        "infill": "--steps 2",
        "report": "--sequences 4 --draws 1 --samples 1",
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


@pytest.mark.skipif(BASH is None, reason="bash not found")
def test_bash_completes_commands_options_choices_and_files(bash_script: Path):
    assert set(COMMANDS) < set(completed(bash_script, ""))
    assert completed(bash_script, "eva") == ["evaluate"]
    assert completed(bash_script, "evaluate", "--bo") == ["--bound"]
    assert completed(bash_script, "evaluate", "--bound", "") == ["tight", "j1", "j2", "all", "importance", "exact"]
    assert completed(bash_script, "train", "") == list(PRESETS)
    assert completed(bash_script, "train", "char", "--proc") == ["--process"]
    assert completed(bash_script, "train", "char", "--process", "r") == ["roulette"]
    assert completed(bash_script, "train", "char", "--method", "bayes-s") == ["bayes-star"]
    assert completed(bash_script, "train", "char", "--data", "") == ["python-manual"]
    assert completed(bash_script, "evaluate", "") == [*pretrained_names()]
    assert completed(bash_script, "bench", "train", "--pres") == ["--preset"]
    assert completed(bash_script, "evaluate", "runs") == []  # left to the shell: file names
    shown = subprocess.run(
        [str(BASH), "-c", f"source {shlex.quote(str(bash_script))}; complete -p cedd"], capture_output=True, text=True
    )
    assert "-o default" in shown.stdout


def test_completion_includes_every_option(helps: dict[str, str]):
    for name, text in {**helps, "train": help_text("train", "char")}.items():
        words = re.search(rf'^ *"{name}"\) words="(.*)" ;;$', script(), re.MULTILINE)
        assert words is not None
        shown = re.findall(r"^  (?:-\w(?: \w+)?, )?(--[a-z][\w.-]*)", text, re.MULTILINE)
        assert set(shown) <= set(words[1].split()), name


# ----------------------------------------------------------------------------------------------------------------
# Errors

BAD = [
    ("evalute", "did you mean 'evaluate'?"),
    ("train", "the preset is missing"),
    ("train chra --out o", "did you mean 'char'?"),
    ("train enormous", ", ".join(PRESETS)),
    ("train tiny", "--out FOLDER"),
    ("train tiny --out o --method beyes-star", "did you mean 'bayes-star'?"),
    ("train tiny --out o --process absorbb", "did you mean 'absorb'?"),
    ("train tiny --out o --optimzer.rate 1", "did you mean --optimizer.rate"),
    ("train tiny --out o --lr 0.1", "unexpected argument '--lr'; did you mean --optimizer.rate?"),
    ("train tiny --out o --optimizer.lr 0.1", "unexpected argument '--optimizer.lr'; did you mean --optimizer.rate?"),
    ("train tiny --out o --eval-every 5", "did you mean --evaluation.every?"),
    ("train tiny --out o --batch 5", "did you mean --batch.size?"),
    ("train tiny --out o --n-layers 5", "did you mean --model.depth?"),
    ("train tiny --out o --epochs 5", "did you mean --steps?"),
    ("sample --temp 0.5", "unexpected argument '--temp'; did you mean --temperature?"),
    ("train tiny --out o --warmup 10", "unexpected argument '--warmup'; did you mean --optimizer.warmup?"),
    ("train tiny --out o --process.p-m a", "--process.p-m must be a number (got 'a')"),
    ("train tiny --out o --steps many", "--steps must be an integer (got 'many')"),
    ("train tiny --out o --optimizer.rate fast", "must be a number (got 'fast')"),
    ("train tiny --out o --data boook.txt", "did you mean book.txt"),
    ("evaluate", "the following arguments are required: MODEL... (see cedd"),
    ("evaluate runs/quickstrat", "did you mean runs/quickstart?"),
    ("evaluate runs/quickstart --data boook.txt", "did you mean book.txt"),
    ("evaluate runs/quickstart --bound tihgt", "did you mean 'tight'?"),
    ("evaluate runs/quickstart --plot nowhere/x.png", "folder not found: nowhere (to write x.png)"),
    ("report", "the following arguments are required: MODEL... (see cedd"),
    ("report runs/quickstrat", "did you mean runs/quickstart?"),
    ("report runs/quickstart runs/quickstrat", "did you mean runs/quickstart?"),
    ("report runs/quickstart --sequences 0", "--sequences must be at least 1"),
    ("report runs/quickstart --out runs", "runs is a folder"),
    ("genppl runs/quickstrat", "did you mean runs/quickstart?"),
    ("genppl runs/quickstart --sampler eulr", "did you mean 'euler'?"),
    ("genppl --samples nowhere.jsonl", "file not found: nowhere.jsonl"),
    ("sample runs/quickstrat", "did you mean runs/quickstart?"),
    ("sample --seed 99999999999999999999999", "--seed must be between 0 and 2^63 - 1 (got 99"),
    ("sample --seed -1", "--seed must be between 0 and 2^63 - 1"),
    ("sample --temprature 3 --lenth 4", "unexpected argument '--temprature'; did you mean --temperature? (see cedd"),
    ("sample --device", "--device: expected one argument (see cedd"),
    ("correct --threshold abc x", "error: --threshold must be a number (got 'abc') (see cedd"),
    ("correct --threshold 2 x", "--threshold must be in [0, 1] (got 2)"),
    ("correct --passes 1.5 x", "--passes must be an integer (got '1.5') (see cedd"),
    ("correct --thresold 0.2 teh cat", "error: unexpected argument '--thresold'; did you mean --threshold? (see cedd"),
    ("correct --Dash", "unexpected argument '--Dash'; put text that begins with a dash after -- (see cedd"),
    ("correct --zzz", "unexpected argument '--zzz' (see cedd"),
    ("correct --file boook.txt", "file not found: boook.txt; did you mean book.txt?"),
    ("spelling", "the following arguments are required: MODEL, --data (see cedd"),
    ("spelling x --data y --thresholds a b", "--thresholds must be a number (got 'a') (see cedd"),
    ("theory --jsn", "unexpected argument '--jsn'; did you mean --json? (see cedd"),
    ("theory 5", "unexpected argument '5' (see cedd"),
    ("bench", "the following arguments are required: {train,sample} (see cedd"),
    ("bench trian", "did you mean 'train'?"),
    ("bench train --vocab 0", "at least 2"),
    ("bench train --methods cedd/absrob", "did you mean 'absorb'?"),
    ("bench sample --methods ced/absorb", "did you mean 'cedd'?"),
    ("theory --vocab 50", "must be from 2 to 10"),
    ("completion tcsh", "use one of bash, zsh"),
    ("quickstart --steps -3 --out none", "--steps must be at least 1 (got -3)"),
    ("quickstart --minutes 0", "--minutes must be above 0 and at most 1440, a day (got 0"),
    ("quickstart --minutes inf", "--minutes must be above 0 and at most 1440, a day (got inf"),
    ("quickstart --minutes 1e9", "--minutes must be above 0 and at most 1440, a day (got 1e+09"),
    ("quickstart --minutes 1 --steps 10", "give either --minutes or --steps"),
    ("quickstart --fast --minutes 1", "give either --minutes or --fast"),
    ("quickstart --fats", "did you mean --fast"),
    ("quickstart --device gpu", "invalid device: 'gpu'"),
    ("quickstart --out book.txt", "book.txt is a file"),
]


@pytest.mark.parametrize(("words", "said"), BAD, ids=[words for words, _ in BAD])
def test_invalid_input_gives_one_helpful_line(
    words: str, said: str, after_quickstart: Path, capsys: pytest.CaptureFixture[str]
):
    (after_quickstart / "book.txt").write_text("A book. " * 500)
    assert main(words.split()) == 2
    *before, line = capsys.readouterr().err.strip().splitlines()
    assert said in line
    assert [text for text in before if "Traceback" in text or "│" in text] == []
    assert len(before) <= (1 if words.startswith("quickstart") else 0)  # quickstart announces its run


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("sdar", "sdar-static or sdar-dynamic or sdar-sequential"),
        ("LLaDA", "llada"),
        ("low_confidence", "llada"),
        ("maskgit_plus", "dream-maskgit-plus"),
        ("remdm", "remask-capped or remask-rescaled or remask-confidence"),
    ],
)
def test_sampler_names_of_other_projects_suggest_ours(name: str, ours: str):
    with pytest.raises(ValueError, match=f"^unknown sampler '{name}'; use {ours}$"):
        named_sampler(name)


ON_A_TERMINAL = [
    ("sample --sampler eulr", "unknown sampler 'eulr'; did you mean 'euler'?"),
    ("theory --jsn", "unexpected argument '--jsn'; did you mean --json? (see cedd theory --help)"),
    ("bench", "the following arguments are required: {train,sample} (see cedd bench --help)"),
]


def test_openmp_spin_count_is_set_unless_configured(monkeypatch):
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
def test_usage_errors_on_terminal_are_one_plain_line(words: str, said: str, colours: bool, columns: int):
    """A new process would import everything again for each case; a fork has it already."""
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
    assert shown.decode() == f"cedd: error: {said}\r\n"


@pytest.mark.parametrize(
    ("words", "positions"),
    [("nowhere text", 2), ("nowhere --rate 0.1 text", 2), ("--rate 0.1 nowhere --passes 2 text", 2), ("text", 1)],
)
def test_options_may_appear_between_run_and_text(words: str, positions: int):
    assert len(parse("correct", words.split()).words) == positions
