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


def test_consecutive_blocks_can_be_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setenv("CEDD_CACHE", str(tmp_path / "cache"))
    run, out = save_random(tmp_path / "run", "absorb", "cedd"), tmp_path / "out.json"
    folder = how_tight.load_folder(run, "cpu")
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    blocks = how_tight.load_data(str(text), folder.tokenizer, folder.length).blocks(how_tight.np.arange(1, 3))
    words = ["--set", str(text), "--blocks", "2", "--orders", "2", "--draws", "2", "--device", "cpu"]

    def measured(*more: str) -> int:
        monkeypatch.setattr(sys, "argv", ["how_tight.py", str(run), *words, *more, "--out", str(out)])
        return how_tight.command("how_tight.py", how_tight.Arguments, how_tight.run)

    assert measured("--start", "1") == 0
    record = json.loads(out.read_text())
    options = how_tight.EvaluationOptions(bound="tight", draws=2, seed=0)
    expected = how_tight.measure(folder, how_tight.torch.from_numpy(blocks), {}, options).main
    assert record["tight"]["nats_per_token"] == pytest.approx(expected.nats_per_token)
    assert record["start"] == 1
    capsys.readouterr()
    assert measured("--start", "100000") == 2
    assert "--start 100000 with --blocks 2: the set has" in capsys.readouterr().err
