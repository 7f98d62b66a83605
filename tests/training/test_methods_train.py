"""Every method learns on every process it supports; the default tests cover each method and each process once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rich.console import Console

from cedd.data.batches import BatchSampler
from cedd.losses import batch_loss
from cedd.training.config import BatchConfig, TrainConfig
from cedd.training.loop import Trainer
from cedd.training.noising import NoisingSampler, StepBatch
from cedd.training.validation import Validation
from tests.training.runs import ALONE

DIFFUSION = ("sedd", "sedds", "cedd", "cedd-star", "ceddt", "bayes", "bayes-star")
PROCESSES = ("absorb", "uniform", "roulette", "eroulette", "hybrid")
PAIRS: list[tuple[str, dict[str, Any]]] = [
    *((method, {"process.name": process}) for method in DIFFUSION for process in PROCESSES),
    ("dfm", {"process.name": "absorb"}),
    ("dfm", {"process.name": "absorb", "process.schedule.name": "polynomial", "process.schedule.power": 2.0}),
    ("ar", {"process.name": "absorb"}),
]


def cases() -> list[Any]:
    """All pairs; the default tests run every method on roulette or its only process, and bayes on hybrid."""
    others = {("bayes", "hybrid"), *((method, "absorb") for method in ("dfm", "ar"))}
    usual = [(m, p) for m, p in PAIRS if p["process.name"] == "roulette" or (m, *p.values()) in others]
    return [
        pytest.param(
            *pair, id="-".join([pair[0], *map(str, pair[1].values())]), marks=[] if pair in usual else pytest.mark.slow
        )
        for pair in PAIRS
    ]


def fixed_batch(trainer: Trainer) -> StepBatch:
    """512 noisy sequences of the training text, because there are too few held-out blocks."""
    sampler = BatchSampler(trainer.data.train, 512, seed=1)
    return NoisingSampler(sampler, trainer.method, trainer.process, BatchConfig(size=512)).batch(0)


def fixed_loss(trainer: Trainer, batch: StepBatch | None = None) -> float:
    """The loss of the raw (not averaged) weights on `batch`, by default the fixed batch."""
    model = trainer.state.model.eval()
    with torch.no_grad():
        loss = sum(float(batch_loss(trainer.method, model, part)) for part in (batch or fixed_batch(trainer)).parts)
    model.train()
    return loss


@pytest.mark.parametrize(("method", "process"), cases())
def test_fifteen_steps_lower_the_loss(
    method: str, process: dict[str, Any], config: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Validation, "stopped", lambda self, model: self.method)  # it computes ten bounds
    changes = {"method": method, **process, "steps": 15, "checkpoint_every": 15, "log_every": 15, "batch.size": 16}
    trainer = Trainer(config("run", changes), ALONE, Console(quiet=True))
    batch = fixed_batch(trainer)
    before = fixed_loss(trainer, batch)
    trainer.run()
    assert fixed_loss(trainer, batch) < before - 0.05
