"""`cedd.train` and `cedd.TrainConfig`: training from Python."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import cedd
from cedd.models.architectures import ARCHITECTURES

QUIET = Console(quiet=True)
NAME = "docs.examples.add_architecture:Convolutions"


class Records(cedd.Hooks):
    def __init__(self) -> None:
        self.records: list[Mapping[str, Any]] = []

    def on_log(self, record: Mapping[str, Any]) -> None:
        self.records.append(record)


def test_train_returns_trained_model(config: Callable[..., cedd.TrainConfig]) -> None:
    wanted, hooks = config("run", {"steps": 3}), Records()
    before = torch.get_rng_state()
    model = cedd.train(wanted, hooks=hooks, console=QUIET)
    assert torch.equal(torch.get_rng_state(), before)  # the caller's random state is unchanged
    assert isinstance(model, cedd.LanguageModel)
    assert model.training_result is not None
    assert (model.training_result.step, model.training_result.finished) == (3, True)
    assert [record["loss"] for record in hooks.records if record["kind"] == "train"][-1] == model.training_result.loss
    x_t, sigma = torch.zeros(2, 12, dtype=torch.int64), torch.full((2,), 0.5)
    assert torch.equal(model.model(x_t, sigma), cedd.load(wanted.out, "cpu").model(x_t, sigma))
    assert len(model.generate(2, length=12, steps=2, seed=0)) == 2
    extended = cedd.train(config("run", {"steps": 5}), console=QUIET)
    assert extended.training_result is not None
    assert extended.training_result.step == 5


def test_custom_architecture_is_imported(
    config: Callable[..., cedd.TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ARCHITECTURES, NAME, object)  # so that it is removed afterwards
    del ARCHITECTURES[NAME]
    changes = {"architecture": NAME, "architecture_arguments": {"width": 8, "depth": 1}, "steps": 2}
    mine = cedd.train(config("mine", changes), console=QUIET)
    assert mine.model.architecture == NAME
    del ARCHITECTURES[NAME]
    with pytest.raises(ValueError, match="add --architecture"):  # it may come from the start model's folder
        cedd.train(config("next", {**changes, "start": str(mine.folder.path)}), console=QUIET)


def test_invalid_arguments_give_helpful_errors(config: Callable[..., cedd.TrainConfig]) -> None:
    wrong: Any = "tiny"
    with pytest.raises(TypeError, match=r"needs a TrainConfig, such as TrainConfig.preset\("):
        cedd.train(wrong)
    given: Any = torch.nn.Linear
    with pytest.raises(TypeError, match=r"architecture must be a name, here 'torch\.nn\.modules\.linear:Linear'"):
        cedd.train(replace(config("run", {}), architecture=given))


def test_preset_with_changed_settings() -> None:
    config = cedd.TrainConfig.preset("tiny", data="book.txt", out=Path("runs/book"), steps=7, method="mdlm")
    assert (config.data, config.steps, config.length, config.process.name) == ("book.txt", 7, 32, "absorb")
    with pytest.raises(ValueError, match="invalid preset: 'tinny'; did you mean 'tiny'"):
        cedd.TrainConfig.preset("tinny")
