"""Weights rounded once per step by the update, instead of in every product."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from cedd.losses import NoiseDraws, batch_loss, noisy_batch
from cedd.methods import get_method
from cedd.models.transformer import Transformer, config_from_preset
from cedd.network import with_rounded
from cedd.process import roulette
from cedd.training.config import TrainConfig
from cedd.training.loop import Trainer
from cedd.training.precision import Precision
from tests.training.runs import ALONE, assert_resumes

Make = Callable[..., TrainConfig]
BF16: dict[str, Any] = {"precision": "bf16"}


@pytest.fixture(autouse=True)
def autocast_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autocast as on a GPU; by default a CPU multiplies in bfloat16 without autocast."""
    monkeypatch.setattr(Precision, "autocasts", property(lambda self: self.low))


def network() -> Transformer:
    torch.manual_seed(0)
    model = Transformer(config_from_preset("tiny", vocab_size=7, has_mask=True, dropout=0.0))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model


def test_gradients_match_autocast():
    """Weights that autocast rounds are copies, all others are shared; gradients match autocast up to one rounding."""
    model, method, process = network(), get_method("bayes-star"), roulette(7)
    rounded = with_rounded(model, model.rounded_parameters(), torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    x0 = torch.randint(7, (4, 16), generator=generator)
    draws = NoiseDraws.make((4, 16), 7, x0.device, generator)
    batch = noisy_batch(method, process, x0, torch.linspace(0.1, 0.9, 4).double(), draws)
    found: list[dict[str, torch.Tensor]] = []
    for each in (model, rounded):
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            batch_loss(method, each, batch).backward()
        found.append({name: p.grad.clone() for name, p in each.named_parameters() if p.grad is not None})
    wide, low = found
    assert wide.keys() == low.keys() == dict(model.named_parameters()).keys()
    copies = {name for name, p in rounded.named_parameters() if p is not model.get_parameter(name)}
    assert copies == set(model.rounded_parameters())
    assert not any("embedding" in name or "conditioning.hidden" in name for name in copies)
    for name, gradient in wide.items():
        assert low[name].dtype == (torch.bfloat16 if name in copies else torch.float32)
        torch.testing.assert_close(low[name].float(), gradient, rtol=2**-7, atol=1e-6, msg=name)


def test_copies_follow_the_weights(config: Make):
    trainer = Trainer(config("run", BF16), ALONE, Console(quiet=True))
    trainer.run()
    update = trainer.train_step.update
    pairs = [(update.parameters[name], copy) for name, copy in update.copies.items() if copy is not None]
    assert len(pairs) == len(trainer.state.model.rounded_parameters())
    assert all(torch.equal(copy, parameter.detach().bfloat16()) for parameter, copy in pairs)


def test_resumed_run_is_bit_identical(config: Make):
    """The copies are rebuilt from the checkpoint."""
    assert_resumes(config, BF16)


def test_accumulated_gradients_stay_in_float32(config: Make):
    """Sums of rounded gradients would lose precision, so with micro-batches autocast does the rounding."""
    trainer = Trainer(config("run", {**BF16, "batch.accumulate": 2}), ALONE, Console(quiet=True))
    assert all(copy is None for copy in trainer.train_step.update.copies.values())
