"""The benchmark of the bound's tightness: figures, table and picture."""

import json
import sys
from pathlib import Path

import pytest

from tests.benchmarks.scripts import definitions
from tests.tasks.models import save_random

how_tight = definitions("how_tight")
TEXT = "the cat sat on the mat, and the dog ran on and on. " * 40


def test_both_bounds_are_measured_printed_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setenv("CEDD_CACHE", str(tmp_path / "cache"))
    run, ar = save_random(tmp_path / "run", "absorb", "cedd"), save_random(tmp_path / "ar", "absorb", "ar")
    text, out, picture = tmp_path / "text.txt", tmp_path / "out.json", tmp_path / "picture.png"
    text.write_text(TEXT)
    words = ["--set", str(text), "--blocks", "3", "--orders", "4", "--draws", "2", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["how_tight.py", str(run), "--ar", str(ar), *words, "--out", str(out)])
    assert how_tight.command("how_tight.py", how_tight.Arguments, how_tight.run) == 0
    table = capsys.readouterr().out
    record = json.loads(out.read_text())
    assert list(record["importance"]["by_orders"]) == ["1", "2", "4"]
    less = record["importance"]["nats_per_token"] - record["tight"]["nats_per_token"]
    assert record["importance"]["difference"] == pytest.approx(less)
    assert "`importance`, K = 4" in table
    assert "`ar`, exact" in table
    monkeypatch.setattr(sys, "argv", ["how_tight.py", "--saved", str(out), "--plot", str(picture)])
    assert how_tight.command("how_tight.py", how_tight.Arguments, how_tight.run) == 0
    assert capsys.readouterr().out == table
    assert picture.stat().st_size > 1000
    monkeypatch.setattr(sys, "argv", ["how_tight.py", str(run), "--orders", "0"])
    assert how_tight.command("how_tight.py", how_tight.Arguments, how_tight.run) == 2
    assert "--orders must be at least 1 (got 0)" in capsys.readouterr().err
