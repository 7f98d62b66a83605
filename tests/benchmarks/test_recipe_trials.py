"""A whole series of trials on a tiny text: a change is kept or not, one that fails stops nothing, a final ends it."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "recipe_trials.py"


@pytest.mark.slow
def test_a_series(tmp_path: Path):
    generator = np.random.default_rng(0)
    for name, blocks in (("train", 40), ("more", 40), ("held_out", 12)):
        generator.integers(20, size=32 * blocks).astype("<u2").tofile(tmp_path / f"{name}.bin")
    settings = {"length": 32, "model.width": 16, "model.depth": 1, "model.heads": 2, "batch.size": 8}
    texts = {"data": [str(tmp_path / "train.bin")], "held_out": str(tmp_path / "held_out.bin"), "vocab_size": 20}
    causal = {"method": "ar", "model.time_conditioning": False}
    entries = [
        {"name": "start", "expected": 3.0},
        {"name": "impossible", "settings": {"model.heads": 3}},
        {"name": "worse", "settings": {"optimizer.rate": 10.0}},
        {"name": "after-causal", "keep": False, "first": {"share": 0.5, "settings": causal}},
        {"name": "after-more", "keep": False, "first": {"share": 0.5, "data": [str(tmp_path / "more.bin")]}},
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
    assert [line["name"] for line in lines] == ["start", "impossible", "worse", "after-causal", "after-more", "final"]
    start, impossible, worse, *after, final = lines
    assert "does not divide into 3 heads" in impossible["failed"]
    assert (start["kept"], worse["kept"], final["kept"]) == (True, False, False)
    assert worse["against_best"][0] > 0
    assert [[stage["steps"] for stage in line["first"]] for line in after] == [[4], [4]]
    assert len({line["average"]["bound"] for line in (start, *after)}) == 3
    assert final["spec"]["settings"] == settings
    assert final["steps"] == 4
    assert final["others"]["again"] == final["average"]
