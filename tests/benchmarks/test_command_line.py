"""Every script of benchmarks/ has a help text, and handles invalid input like the commands of the package."""

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.benchmarks.scripts import BENCHMARKS, definitions, run


def test_every_script_has_help_on_any_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
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


def test_input_errors_give_one_line_and_exit_codes_are_kept(monkeypatch: pytest.MonkeyPatch, capsys):
    command = definitions("command_line").command
    monkeypatch.setattr(sys, "argv", ["x.py"])

    def no_file(arguments: object) -> None:
        Path("/no/such/file").read_text()

    assert command("benchmarks/x.py", Nothing, lambda arguments: None) == 0
    assert command("benchmarks/x.py", Nothing, lambda arguments: 3) == 3
    assert command("benchmarks/x.py", Nothing, no_file) == 2
    assert capsys.readouterr().err == "x: error: file not found: /no/such/file\n"
    with pytest.raises(RuntimeError, match="a fault of ours"):
        command("benchmarks/x.py", Nothing, lambda arguments: fail())
    monkeypatch.setenv("CEDD_TRACEBACK", "1")
    with pytest.raises(FileNotFoundError):
        command("benchmarks/x.py", Nothing, no_file)


def fail() -> None:
    raise RuntimeError("a fault of ours")
