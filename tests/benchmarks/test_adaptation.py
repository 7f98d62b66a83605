"""The benchmarks of adapted models and of large models, with tiny models."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import cedd
from cedd.data.tokenizers import ByteTokenizer
from cedd.models.architectures import build_network
from cedd.models.folder import ModelFolder, save_folder
from cedd.training.loop import TrainResult
from tests.benchmarks.scripts import definitions
from tests.tasks.models import save_random

NETWORK = {"width": 16, "depth": 1, "heads": 2, "key_heads": 1, "head_width": 8, "mlp_width": 24, "length": 128}


def parent(folder: Path) -> Path:
    """An autoregressive network with random weights."""
    options = {**NETWORK, "attention": "causal", "mask_row": 0, "vocab_size": 256, "has_mask": True}
    made = ModelFolder(build_network("llama", options), cedd.absorb(256), cedd.get_method("ar"), ByteTokenizer(), 128)
    save_folder(folder, made)
    return folder


def test_every_cell_has_valid_configuration(tmp_path: Path) -> None:
    script, start = definitions("adaptation"), parent(tmp_path / "ar")
    arguments = script.Arguments(model=start, data=tmp_path, runs=tmp_path / "runs")
    for cell in script.CELLS:
        config = script.configuration(arguments, cell, start)
        config.check()
        assert config.start == str(start)
        assert (config.method == "ar") == (cell == "ar")


@pytest.mark.slow
def test_cells_are_trained_measured_and_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script, start = definitions("adaptation"), parent(tmp_path / "ar")
    (tmp_path / "corpus").mkdir()
    text = "\n\n\n".join(f"document {number} is about the number {number}. " * 20 for number in range(300))
    (tmp_path / "corpus" / "wikipedia.txt").write_text(text)
    arguments = script.Arguments(
        model=start,
        data=tmp_path,
        cells=("parent", "blocks-4"),
        steps=2,
        batch=4,
        points=(0.0, 0.5),
        blocks=4,
        results=tmp_path / "results.json",
        runs=tmp_path / "runs",
        workers=1,
        device="cpu",
    )
    assert script.run(arguments) == 0
    records = json.loads((tmp_path / "results.json").read_text())
    assert records["blocks-4"]["steps"] == 2
    assert [point["tokens"] for point in records["blocks-4"]["curve"]] == [0, 4 * 128]
    found = records["blocks-4"]["bits_per_byte"]["held-out"]
    for point in (found, *records["blocks-4"]["curve"]):
        assert point["exact_bits_per_byte"] < point["bits_per_byte"] + 3 * point["stderr"]
    capsys.readouterr()
    # Existing results are not measured again; of the missing ones, only those.
    with monkeypatch.context() as patch:
        patch.delattr(sys.modules["adaptation"], "measured")
        assert script.run(arguments) == 0
    out = capsys.readouterr().out
    assert "| parent |" in out
    assert re.search(r"\| blocks-4 \| 0\.0: \d\.\d+ \(exact \d\.\d+\), 0\.0: ", out)
    del records["blocks-4"]["bits_per_byte"]["held-out"]
    (tmp_path / "results.json").write_text(json.dumps(records))
    with monkeypatch.context() as patch:
        patch.delattr(sys.modules["adaptation"], "trained")
        assert script.run(arguments) == 0
    assert json.loads((tmp_path / "results.json").read_text())["blocks-4"]["bits_per_byte"]["held-out"] == found
    monkeypatch.setattr(script.Trainer, "run", lambda _: TrainResult(1, None, None, False, "stopped", 15))
    with pytest.raises(SystemExit, match="143"):
        script.run(replace(arguments, cells=("ar",)))
    assert "ar" not in json.loads((tmp_path / "results.json").read_text())  # interrupted
    monkeypatch.undo()
    monkeypatch.setattr(sys.modules["adaptation"], "FASTEST", 1e-4)  # so that the time limit ends it on any machine
    assert script.run(replace(arguments, cells=("ar",), steps=None, seconds=0.2)) == 0  # it has learned a little
    points = json.loads((tmp_path / "results.json").read_text())["ar"]["curve"]
    assert [point["tokens"] > 0 for point in points] == [False, True]
    assert points[1]["bits_per_byte"] != points[0]["bits_per_byte"]
    with pytest.raises(ValueError, match="--cells: invalid choice: 'block-4'"):
        script.run(replace(arguments, cells=("block-4",)))
    plain = save_random(tmp_path / "transformer", "absorb", "ar", tokenizer=ByteTokenizer(), length=128)
    with pytest.raises(ValueError, match=r"blocks-4-no-shift differs in adapt.shift, which has no effect unless"):
        script.run(replace(arguments, model=plain, cells=("blocks-4-no-shift",)))
    with pytest.raises(ValueError, match="name the model and the folder of the data"):
        script.run(script.Arguments())


def test_large_model_is_imported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = definitions("large_model")
    sizes = {"width": 32, "depth": 2, "heads": 2, "mlp_width": 48, "rows": 300, "length": 16, "steps": 2}
    assert script.run(script.Arguments(folder=tmp_path / "llada", device="cpu", **sizes)) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["parameters"] == 2 * 300 * 32 + 2 * (4 * 32**2 + 3 * 32 * 48 + 2 * 32) + 32
    assert 2 * record["parameters"] < record["bytes"] < 2.3 * record["parameters"] + 4000
    assert {"write", "import", "bound", "sample"} <= record.keys()
