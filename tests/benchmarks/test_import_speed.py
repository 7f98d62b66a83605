"""The memory of an import at a small size; benchmarks/import_speed.py measures it for the sizes of released models."""

from pathlib import Path

import pytest
import torch

import cedd
from tests.benchmarks.scripts import definitions


@pytest.mark.slow
def test_import_needs_less_memory_than_three_times_the_file(tmp_path: Path) -> None:
    script = definitions("import_speed")
    for family, width in (("sedd", 24), ("gidd", 192)):
        folder = script.write_folder(tmp_path / family, family, width=width, depth=1)
        model = cedd.import_model(folder, "none", device="cpu")
        assert model.folder.config["imported"]["family"].lower() == family
        assert torch.isfinite(model.model(torch.zeros(1, 4, dtype=torch.int64), torch.ones(1))).all()
    size = (folder / "model.safetensors").stat().st_size
    found = script.measured(script.IN_PYTHON, str(folder))
    assert size > 7e7
    assert found["peak"] - found["before"] < 3 * size
