"""The benchmark of the bound's tightness: figures, table and picture."""

import json
import sys
from pathlib import Path

import pytest

from tests.benchmarks.scripts import definitions
from tests.tasks.models import save_random

how_tight = definitions("how_tight")
TEXT = "the cat sat on the mat, and the dog ran on and on. " * 40


def test_both_bounds_are_measured_printed_and_plotted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
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
    assert record["importance"]["by_orders"]["4"]["difference"] == pytest.approx(less)
    low, high = record["importance"]["by_orders"]["2"]["difference_ci95"]
    assert low <= record["importance"]["by_orders"]["2"]["difference"] <= high
    assert "`importance`, K = 4" in table
    assert "s per 64 blocks" in table
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


@pytest.mark.slow
def test_finished_rounds_are_written_and_time_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    """A round of k orders takes k seconds on this clock."""
    monkeypatch.setenv("CEDD_CACHE", str(tmp_path / "cache"))
    run, out, text = save_random(tmp_path / "run", "absorb", "cedd"), tmp_path / "out.json", tmp_path / "text.txt"
    text.write_text(TEXT)
    real, known, saved = how_tight.measure, [0], list[list[str]]()

    def timed(work, device):
        found = work()
        orders = getattr(found.main, "orders", 0)
        new, known[0] = orders - known[0], orders
        return found, float(new)

    def measure(folder, blocks, protocol, options):
        if options.bound == "importance":
            saved.append([*json.loads(out.read_text()).get("importance", {}).get("by_orders", {})])
            if options.orders == interrupted_at:
                raise KeyboardInterrupt
        return real(folder, blocks, protocol, options)

    monkeypatch.setitem(how_tight.measured.__globals__, "timed", timed)
    monkeypatch.setitem(how_tight.measured.__globals__, "measure", measure)
    words = ["--set", str(text), "--blocks", "3", "--draws", "2", "--orders", "8", "--device", "cpu"]

    def measured(*more: str) -> dict:
        known[0] = 0
        saved.clear()
        monkeypatch.setattr(sys, "argv", ["how_tight.py", str(run), *words, *more, "--out", str(out)])
        how_tight.command("how_tight.py", how_tight.Arguments, how_tight.run)
        return json.loads(out.read_text())

    interrupted_at = None
    limited = measured("--seconds", "4")
    assert (limited["orders"], limited["importance"]["seconds"]) == (4, 4.0)
    assert saved == [[], ["1", "2"]]
    whole = measured()
    assert [*whole["importance"]["by_orders"]] == ["1", "2", "4", "8"]
    assert whole["importance"]["protocol_sha256"] != limited["importance"]["protocol_sha256"]
    interrupted_at = 8
    measured()
    assert json.loads(out.read_text())["importance"] == limited["importance"]
    interrupted_at = 2
    measured()
    assert "importance" not in json.loads(out.read_text())
    monkeypatch.setattr(sys, "argv", ["how_tight.py", "--saved", str(out)])
    capsys.readouterr()
    assert how_tight.command("how_tight.py", how_tight.Arguments, how_tight.run) == 0
    assert "`tight`, 2 draws" in capsys.readouterr().out
