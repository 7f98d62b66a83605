"""Bad options of the benchmarks end in one line, by the parser of the package's commands."""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.benchmarks.scripts import BENCHMARKS, definitions, run
from tests.options import undescribed
from tests.tasks.models import save_random

NAMES = (
    "english",
    "infilling",
    "kernel_times",
    "language",
    "profile_sampling",
    "profile_training",
    "sample_seconds",
    "spelling",
)
NAMES += ("window_batches",)


@pytest.mark.parametrize("name", NAMES)
def test_a_bad_option_is_one_line(name: str):
    definitions("command_line")  # skips where there are no benchmarks
    code, said = run(BENCHMARKS / f"{name}.py", "--no-such-option")
    assert code == 2
    assert said == f"{name}: there is no option --no-such-option ({name}.py --help tells more)\n"


@pytest.mark.parametrize("name", NAMES)
def test_every_option_says_what_it_is(name: str):
    assert undescribed(definitions(name).Arguments) == []


OF_ARGPARSE = ("bound_coverage", "bound_variance", "compare_sampling", "correctors", "english_char", "english_words")
OF_ARGPARSE += ("import_speed", "lm_eval_speed", "recipe_trials", "sampler_quality", "serving")


@pytest.mark.parametrize("name", OF_ARGPARSE)
def test_a_help_has_the_docstring_and_a_word_on_every_option(name: str, monkeypatch, capsys):
    script = definitions(name)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit, match="0"):
        script.main()
    said = capsys.readouterr().out
    assert str(script.__doc__).strip() in said
    heads = re.findall(r"^  (\S.*)\n(?! {20})", said.partition("options:\n")[2], re.MULTILINE)
    assert [head for head in heads if not re.search(r"\S {2,}\S", head)] == []


def test_a_help_names_defaults(capsys: pytest.CaptureFixture[str]):
    parser = definitions("helps").parser_of("A script.")
    parser.add_argument("--seed", type=int, default=0, help="of all")
    parser.add_argument("--rows", nargs="+", default=["a b", "c"], help="of it")
    parser.add_argument("--out", help="a file")
    parser.add_argument("--table", action="store_true", help="print it")
    parser.print_help()
    said = capsys.readouterr().out
    assert re.findall(r"(?<=  )(?:of|a|print) .*", said) == [
        "of all (default: 0)",
        "of it (default: a b, c)",
        "a file",
        "print it",
    ]


@pytest.mark.parametrize("name", ["lm_eval_speed", "sampler_quality"])
def test_a_run_that_is_not_there_is_one_line(name: str):
    definitions("command_line")
    code, said = run(BENCHMARKS / f"{name}.py", "no/such/run")
    assert (code, said.splitlines()) == (2, [f"{name}: no run or model at no/such/run"])


def test_a_sampler_that_makes_no_sense_is_refused_before_a_judge_is_made(tmp_path: Path):
    definitions("command_line")
    path = save_random(tmp_path / "run", "roulette", "bayes")
    code, said = run(BENCHMARKS / "sampler_quality.py", str(path), "--data", "no-such-text")
    assert code == 2
    assert said.startswith("sampler_quality: first-hitting needs tokens that never change once revealed (absorb)")
    assert said.count("\n") == 1


@pytest.mark.parametrize("shape", ["512", "0x128", "512x128x3", "ax2"])
def test_a_shape_that_is_none_is_one_line(shape: str):
    definitions("command_line")
    code, said = run(BENCHMARKS / "profile_training.py", "--shape", shape)
    why = (
        "needs at least one sequence and one position" if shape == "0x128" else "is SEQUENCESxPOSITIONS, such as 32x128"
    )
    assert (code, said.splitlines()) == (2, [f"profile_training: a shape {why}; got {shape!r}"])


@pytest.mark.parametrize("name", ["kernel_times", "profile_sampling", "profile_training"])
def test_a_missing_device_is_one_line(name: str, monkeypatch: pytest.MonkeyPatch):
    definitions("command_line")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: False)
    said = f"{name}: there is no CUDA device here, only cpu\n"
    assert run(BENCHMARKS / f"{name}.py") == (2, said)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "there is no CUDA device here; use --device cpu"),
        (["--shape", "64"], "a shape is SEQUENCESxPOSITIONS, such as 64x128; got '64'"),
    ],
)
def test_what_two_versions_would_fail_at_is_one_line(words: list[str], why: str, monkeypatch: pytest.MonkeyPatch):
    definitions("command_line")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    source, script = str(BENCHMARKS.parent / "src"), BENCHMARKS / "compare_sampling.py"
    assert run(script, source, source, *words) == (2, f"compare_sampling: {why}\n")
    code, said = run(script, source, "no/such/folder", *words)
    assert (code, said) == (
        2,
        "compare_sampling: no/such/folder does not hold the package cedd; name a src folder of it\n",
    )


def test_every_script_has_a_help_anywhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Without a GPU, Triton or data."""
    definitions("command_line")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delenv("CEDD_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    scripts = [path for path in sorted(BENCHMARKS.glob("*.py")) if "__main__" in path.read_text(encoding="utf-8")]
    assert len(scripts) > 15
    assert [script.name for script in scripts if run(script, "--help") != (0, "")] == []


@dataclass
class Nothing:
    """No options."""


def test_bad_input_is_one_line_and_other_ends_are_kept(monkeypatch: pytest.MonkeyPatch, capsys):
    command = definitions("command_line").command
    monkeypatch.setattr(sys, "argv", ["x.py"])

    def no_file(arguments: object) -> None:
        Path("/no/such/file").read_text()

    assert command("benchmarks/x.py", Nothing, lambda arguments: None) == 0
    assert command("benchmarks/x.py", Nothing, lambda arguments: 3) == 3
    assert command("benchmarks/x.py", Nothing, no_file) == 2
    assert capsys.readouterr().err == "x: there is no file or folder /no/such/file\n"
    with pytest.raises(RuntimeError, match="a fault of ours"):
        command("benchmarks/x.py", Nothing, lambda arguments: fail())
    monkeypatch.setenv("CEDD_TRACEBACK", "1")
    with pytest.raises(FileNotFoundError):
        command("benchmarks/x.py", Nothing, no_file)


def fail() -> None:
    raise RuntimeError("a fault of ours")
