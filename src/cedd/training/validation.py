"""What is measured while training: the bound on held-out blocks by the averaged weights, and samples."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from cedd.bounds.estimate import shown
from cedd.bounds.estimator import estimate_bound
from cedd.bounds.stop import choose_stop
from cedd.data.training_data import TrainingData
from cedd.methods import Method
from cedd.models.transformer import Transformer
from cedd.process import TokenProcess
from cedd.samplers.loop import sample
from cedd.training.config import TrainConfig
from cedd.training.precision import Precision
from cedd.training.records import Records
from cedd.training.state import EVALUATION, derived_seed

_BLOCKS_FOR_THE_STOP = 32


@dataclass(frozen=True)
class Validation:
    """Measures a network with the same times and noise in every evaluation of a run."""

    config: TrainConfig
    method: Method
    process: TokenProcess
    data: TrainingData
    precision: Precision
    device: torch.device

    def stopped(self, model: Transformer) -> Method:
        """The method with the end of its path that is best on training blocks, where there is one to choose."""
        blocks = torch.from_numpy(self.data.train.evenly_spaced(_BLOCKS_FOR_THE_STOP)).to(self.device)
        with torch.no_grad(), self.precision.autocast():
            return choose_stop(model, self.process, blocks, method=self.method)

    def measure(self, model: Transformer, step: int, records: Records) -> float:
        """The bound on validation blocks in nats per token; it and some samples are written to the records."""
        chosen, seed = self.config.evaluation, derived_seed(self.config.seed, EVALUATION)
        method = self.stopped(model)
        blocks = torch.from_numpy(self.data.validation.evenly_spaced(chosen.sequences)).to(self.device)
        with torch.no_grad(), self.precision.autocast():
            estimate = estimate_bound(
                model,
                self.process,
                blocks,
                method=method,
                draws=chosen.draws,
                generator=torch.Generator().manual_seed(seed),
            )
            texts = self._samples(model, method, seed) if chosen.samples > 0 else []
        names = ("nats_per_token", "stderr", "perplexity", "ci95")
        figures = {name: getattr(estimate, name) for name in names}
        records.write(step, "bound", {**figures, "sequences": len(blocks)})
        for text in texts:
            records.write(step, "sample", {"text": text})
        low, high = (round(x, 4) for x in estimate.ci95)
        records.say(
            f"step {step}: bound {estimate.nats_per_token:.4f} nats per token "
            f"[{low}, {high}], perplexity {shown(estimate.perplexity, 2)}"
        )
        return estimate.nats_per_token

    def _samples(self, model: Transformer, method: Method, seed: int) -> list[str]:
        chosen = self.config.evaluation
        tokens = sample(
            model,
            self.process,
            (chosen.samples, self.config.length),
            method=method,
            steps=chosen.sample_steps,
            generator=torch.Generator().manual_seed(seed),
            device=self.device,
        )
        return [self.data.tokenizer.decode(row) for row in tokens.cpu().numpy()]


@dataclass
class Patience:
    """Whether the bound still improves; `limit` evaluations without a better one end a run (0: never)."""

    limit: int
    best: float = math.inf
    stale: int = 0
    """Evaluations since the best one."""

    @property
    def is_over(self) -> bool:
        return 0 < self.limit <= self.stale

    def note(self, bound: float) -> None:
        self.stale = 0 if bound < self.best else self.stale + 1
        self.best = min(self.best, bound)

    def values(self) -> dict[str, Any]:
        """What a checkpoint holds of it; JSON has no infinity."""
        return {"best": None if self.best == math.inf else self.best, "stale": self.stale}

    def restore(self, values: dict[str, Any]) -> None:
        self.best, self.stale = math.inf if values["best"] is None else values["best"], values["stale"]
