"""Runs with a Llama network: learning, resumption, and training of low-rank updates only."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import cedd
from cedd.cli import main
from cedd.models.llama import Llama
from cedd.training.config import TrainConfig, starting_from
from cedd.training.loop import Trainer
from tests.training.runs import ALONE, assert_resumes, changed, run
from tests.training.test_methods_train import fixed_loss

Make = Callable[..., TrainConfig]
NETWORK = {"width": 16, "depth": 2, "heads": 2, "key_heads": 1, "head_width": 8, "mlp_width": 24, "length": 64}
ABSORB = {"process.name": "absorb", "method": "cedd", "architecture": "llama"}


def trainer(config: TrainConfig) -> Trainer:
    return Trainer(config, ALONE, Console(quiet=True))


def llama(config: Make, name: str, changes: dict[str, Any] | None = None, **network: Any) -> TrainConfig:
    return changed(config(name), {**ABSORB, "architecture_arguments": {**NETWORK, **network}, **(changes or {})})


@pytest.mark.parametrize(
    "network", [pytest.param({}, marks=pytest.mark.slow), {"tied": True, "shift": True, "start_row": 1}]
)
def test_run_learns_and_model_generates(config: Make, network: dict[str, Any]) -> None:
    made = llama(config, "run", {"steps": 40, "checkpoint_every": 40, "optimizer.matrices": "muon"}, **network)
    begun = trainer(made)
    before = fixed_loss(begun)
    begun.run()
    assert fixed_loss(begun) < before - 0.05
    model = cedd.load(made.out, device="cpu")
    assert isinstance(model.model, Llama)
    assert model.length == made.length
    assert len(model.generate(1, length=7, seed=0)[0]) == 7


def test_resumed_run_is_bit_identical(config: Make) -> None:
    assert_resumes(partial(llama, config), {})


def test_lora_trains_only_low_rank_weights_and_export_merges_them(
    config: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run changes only the low-rank updates, and cedd export merges them into the weights."""
    first = llama(config, "first", {"steps": 10, "checkpoint_every": 10})
    run(first)
    arguments = {"lora_rank": 2, "weights_dtype": "bfloat16"}
    second = starting_from(config("second"), str(first.out))
    second = changed(second, {"architecture_arguments": {**second.architecture_arguments, **arguments}})
    second = changed(second, {"steps": 30, "checkpoint_every": 10, "optimizer.rate": 0.05})
    begun = trainer(second)
    before = fixed_loss(begun)
    trained = {name for optimizer in begun.state.optimizers for name in optimizer.parameters}
    assert trained
    assert all("lora_" in name or name == "backbone.mask" for name in trained)
    begun.run()
    assert fixed_loss(begun) < before
    known, found = (cedd.load(made.out, device="cpu").model.state_dict() for made in (first, second))
    name = "backbone.layers.0.mlp.down.weight"
    assert found[name].dtype == torch.bfloat16
    assert torch.equal(found[name], known[name].bfloat16())
    assert main(["export", str(second.out), "--out", str(tmp_path / "given"), "--device", "cpu", "--json"]) == 0
    capsys.readouterr()
    record = json.loads((tmp_path / "given" / "config.json").read_text())
    assert record["network"]["lora_rank"] == 0
    ids = torch.arange(24).view(2, 12) % 7
    merged, plain = (cedd.load(path, device="cpu").model for path in (tmp_path / "given", second.out))
    assert float((merged(ids) - plain(ids)).abs().max()) < 0.02  # the sum is rounded to bfloat16
    assert float((merged(ids) - cedd.load(first.out, device="cpu").model(ids)).abs().max()) > 0.02
    assert merged.num_parameters() < plain.num_parameters()
