"""Bad options of the benchmarks end in one line, by the parser of the package's commands."""

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.benchmarks.scripts import BENCHMARKS, definitions, run

NAMES = ("english", "infilling", "language", "profile_sampling", "profile_training", "sample_seconds", "spelling")
NAMES += ("window_batches",)


@pytest.mark.parametrize("name", NAMES)
def test_a_bad_option_is_one_line(name: str):
    definitions("command_line")  # skips where there are no benchmarks
    code, said = run(BENCHMARKS / f"{name}.py", "--no-such-option")
    assert code == 2
    assert said == f"{name}: there is no option --no-such-option ({name}.py --help tells more)\n"


@pytest.mark.parametrize("shape", ["512", "0x128", "512x128x3", "ax2"])
def test_a_shape_that_is_none_is_one_line(shape: str):
    definitions("command_line")
    code, said = run(BENCHMARKS / "profile_training.py", "--shape", shape)
    why = (
        "needs at least one sequence and one position" if shape == "0x128" else "is SEQUENCESxPOSITIONS, such as 32x128"
    )
    assert (code, said.splitlines()) == (2, [f"profile_training: a shape {why}; got {shape!r}"])


@pytest.mark.parametrize("name", ["profile_sampling", "profile_training"])
def test_a_missing_device_is_one_line(name: str, monkeypatch: pytest.MonkeyPatch):
    definitions("command_line")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: False)
    said = f"{name}: there is no CUDA device here, only cpu\n"
    assert run(BENCHMARKS / f"{name}.py") == (2, said)


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
