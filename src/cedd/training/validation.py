"""Evaluation during training: the bound on held-out blocks with the averaged weights, and samples."""

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
from cedd.models.backbone import Backbone
from cedd.process import TokenProcess
from cedd.samplers import sample
from cedd.training.config import TrainConfig
from cedd.training.precision import Precision
from cedd.training.run_log import RunLog
from cedd.training.state import EVALUATION, derived_seed

_BLOCKS_FOR_THE_STOP = 32


@dataclass(frozen=True)
class Validation:
    """Evaluates a network with the same times and noise throughout a run."""

    config: TrainConfig
    method: Method
    process: TokenProcess
    data: TrainingData
    precision: Precision
    device: torch.device

    def stopped(self, model: Backbone) -> Method:
        """The method with the stopping time that is best on training blocks, if it has one."""
        blocks = torch.from_numpy(self.data.train.evenly_spaced(_BLOCKS_FOR_THE_STOP)).to(self.device)
        with torch.no_grad(), self.precision.autocast():
            return choose_stop(model, self.process, blocks, method=self.method)

    @property
    def labels(self) -> dict[str, Any]:
        """The labels of the validation blocks, as a condition of the network, if there are any."""
        labels = self.data.validation.evenly_spaced_labels(self.config.evaluation.sequences)
        return {} if labels is None else {"label": torch.from_numpy(labels).to(self.device)}

    def measure(self, model: Backbone, step: int, records: RunLog) -> float:
        """The bound on validation blocks in nats per token. The bound and some samples are logged."""
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
                **self.labels,
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

    def _samples(self, model: Backbone, method: Method, seed: int) -> list[str]:
        chosen = self.config.evaluation
        tokens = sample(
            model,
            self.process,
            (chosen.samples, self.config.length),
            method=method,
            steps=-(-chosen.sample_steps // method.blocks_of(self.config.length)),
            generator=torch.Generator().manual_seed(seed),
            device=self.device,
        )
        return [self.data.tokenizer.decode(row) for row in tokens.cpu().numpy()]


@dataclass
class Patience:
    """Early stopping: after `limit` evaluations without a better bound a run ends (0: never)."""

    limit: int
    best: float = math.inf
    stale: int = 0
    """Evaluations since the best one."""

    @property
    def is_over(self) -> bool:
        return 0 < self.limit <= self.stale

    @classmethod
    def restored(cls, limit: int, best: float | None, stale: int) -> Patience:
        """The state in a checkpoint, where JSON has no infinity."""
        return cls(limit, math.inf if best is None else best, stale)

    def note(self, bound: float) -> None:
        self.stale = 0 if bound < self.best else self.stale + 1
        self.best = min(self.best, bound)
