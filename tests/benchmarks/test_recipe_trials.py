"""A whole series of trials on a tiny text: a change is kept or not, one that fails stops nothing, a final ends it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.benchmarks.scripts import definitions

PARTS = ("base", "entries", "finals", "overhead", "final_start")
SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "recipe_trials.py"


@pytest.mark.parametrize(
    ("plan", "folder", "message"),
    [
        (None, "out", r"No such file or directory: '.*plan\.json'"),
        ("start: 5", "out", r"plan\.json is damaged: it is not JSON"),
        ('{"base": {}, "finals": []}', "out", r"plan\.json is no plan: it lacks entries, overhead, final_start"),
        (json.dumps({part: {} for part in PARTS}), "plan.json", "exists"),
        (json.dumps({part: {} for part in PARTS}), "before", "before has the trials of another series: name another"),
    ],
)
def test_a_bad_command_line_is_one_line(plan, folder, message, tmp_path, monkeypatch, capsys):
    if plan is not None:
        (tmp_path / "plan.json").write_text(plan)
    (tmp_path / "before").mkdir()
    (tmp_path / "before" / "trials.jsonl").write_text("")
    monkeypatch.setattr(sys, "argv", ["recipe_trials.py", str(tmp_path / "plan.json"), str(tmp_path / folder)])
    with pytest.raises(SystemExit, match="2"):
        definitions("recipe_trials").main()
    assert re.search(message, capsys.readouterr().err.splitlines()[-1])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["optimizer.matricez", "optimiser.matrices"])
def test_a_setting_that_there_is_not_is_named(name, tmp_path):
    with pytest.raises(ValueError, match=f"cedd train has no setting {name}"):
        definitions("recipe_trials").config_of({"device": "cpu", "settings": {name: "muon"}}, tmp_path)


@pytest.mark.slow
def test_a_series(tmp_path: Path):
    generator = np.random.default_rng(0)
    for name, blocks in (("train", 40), ("more", 40), ("held_out", 12)):
        generator.integers(20, size=32 * blocks).astype("<u2").tofile(tmp_path / f"{name}.bin")
    settings = {"length": 32, "model.width": 16, "model.depth": 2, "model.heads": 2, "batch.size": 8}
    texts = {"data": [str(tmp_path / "train.bin")], "held_out": str(tmp_path / "held_out.bin"), "vocab_size": 20}
    causal = {"method": "ar", "model.time_conditioning": False}
    entries = [
        {"name": "start", "expected": 3.0},
        {"name": "impossible", "settings": {"model.heads": 3}},
        {"name": "worse", "settings": {"optimizer.rate": 1.0}},
        {"name": "broken", "settings": {"optimizer.rate": 1e30}},
        {"name": "after-causal", "keep": False, "first": {"share": 0.5, "settings": causal}},
        {"name": "after-more", "keep": False, "first": {"share": 0.5, "data": [str(tmp_path / "more.bin")]}},
        {"name": "after-half", "keep": False, "first": [{"share": 0.2, "settings": {"model.depth": 1}}] * 2},
    ]
    plan = {
        "base": {"settings": settings, "steps": 4, "sequences": 12, "device": "cpu", **texts},
        "entries": entries,
        "finals": [{"name": "final", "keep": False, "others": {"again": texts["held_out"]}}],
        "overhead": 1,
        "final_start": 1e12,
    }
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    subprocess.run([sys.executable, str(SCRIPT), str(tmp_path / "plan.json"), str(tmp_path / "out")], check=True)
    lines = [json.loads(line) for line in (tmp_path / "out" / "trials.jsonl").read_text().splitlines()]
    assert [line["name"] for line in lines] == [*(entry["name"] for entry in entries), "final"]
    start, impossible, worse, broken, *after, final = lines
    assert "does not divide into 3 heads" in impossible["failed"]
    assert "the loss is not finite near step" in broken["failed"]
    assert (start["kept"], worse["kept"], final["kept"]) == (True, False, False)
    assert worse["against_best"][0] > 0
    assert [[stage["steps"] for stage in line["first"]] for line in after] == [[4], [4], [4, 4]]
    assert len({line["average"]["bound"] for line in (start, *after)}) == 4
    assert final["spec"]["settings"] == settings
    assert final["steps"] == 4
    assert final["others"]["again"] == final["average"]
