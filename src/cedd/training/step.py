"""One training step on one rank: the gradient of each micro-batch, clipping, the optimizer's update, the average.

The host never waits for the device: a step's figures are read when the next step is under way, and a gradient that is
not finite is skipped on the device itself. Dropout follows from (seed, step, rank).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cedd.losses import NoisyBatch
from cedd.methods import Method
from cedd.models.ema import EMA
from cedd.models.folder import ModelFolder
from cedd.models.transformer import Transformer
from cedd.network import with_rounded
from cedd.process import TokenProcess
from cedd.training.captured import CapturedGradient, Gradient
from cedd.training.config import TrainConfig
from cedd.training.distributed import LossModule, Ranks, choose_strategy, distribute, without_sync
from cedd.training.noising import StepBatch
from cedd.training.optimizer import learning_rate
from cedd.training.precision import Precision
from cedd.training.start import take_over
from cedd.training.state import DROPOUT, TrainingState, derived_seed
from cedd.training.update import Update, make_optimizers


@dataclass
class StepFigures:
    """What one step leaves to read: loss, gradient norm, whether both are finite, whether a stop was requested."""

    step: int
    values: Tensor
    ready: torch.cuda.Event | None

    @classmethod
    def copied(cls, step: int, values: Tensor) -> StepFigures:
        """Figures [4], copied to the host without waiting."""
        if values.device.type != "cuda":
            return cls(step, values.detach().cpu(), None)
        # Pinned, or the copy would wait for the device.
        copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        copy.copy_(values.detach(), non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return cls(step, copy, event)

    def read(self) -> tuple[float, float, bool, bool]:
        if self.ready is not None:
            self.ready.synchronize()
        loss, norm, broken, stop = self.values.tolist()
        return loss, norm, broken == 0.0, stop > 0.0


class Stepper:
    """The network of a run with its gradient, optimizer and average; `state` is all that a step changes."""

    def __init__(
        self,
        config: TrainConfig,
        ranks: Ranks,
        method: Method,
        process: TokenProcess,
        source: ModelFolder | None = None,
    ) -> None:
        self.config, self.ranks = config, ranks
        mode = {"auto": "graphs" if ranks.device.type == "cuda" else "off"}.get(config.compile, config.compile)
        compiled = mode in ("on", "graphs")
        self.precision = Precision.choose(config.precision, ranks.device.type, compiled)
        strategy = choose_strategy(config, ranks)
        torch.manual_seed(config.seed)
        network = config.model.build(process, config.length, causal=not method.dynamics.noisy)
        model = Transformer(network)
        if source is not None:
            take_over(model, source)
        model = model.to(ranks.device).train()
        at_once = strategy == "single" and config.batch.accumulate == 1  # one backward pass makes a step's gradient
        run = model
        if at_once and self.precision.autocasts:  # sums of rounded gradients would lose digits
            run = with_rounded(model, model.rounded_parameters(), torch.bfloat16)
        if compiled:
            # With several ranks the compiler's own graphs, of each pass; with sharding none: parameters come and go.
            run.compile(mode="reduce-overhead" if mode == "graphs" and strategy == "ddp" else "default")
        self.module = distribute(LossModule(run, method), strategy)
        self.gradient: Gradient = self._both_passes
        if mode in ("graphs", "record") and at_once and ranks.device.type == "cuda":
            self.gradient = CapturedGradient(self._both_passes, list(run.parameters()))
        optimizer = config.optimizer.of_mean(config.length)
        ema = EMA(model, optimizer.ema, optimizer.ema_warmup, optimizer.steps_of_average(config.steps))
        self.state = TrainingState(model, ema, make_optimizers(model, optimizer))
        self.update = Update(model, self.state.optimizers, ema, optimizer, run)

    def rate(self, step: int) -> float:
        """The learning rate of step 0, 1, ..."""
        return learning_rate(self.config.optimizer, step, self.config.steps)

    def step(self, batch: StepBatch, stop: bool = False) -> StepFigures:
        """Take one step; `stop` is shared with all ranks through the figures."""
        state, device = self.state, self.ranks.device
        # torch.manual_seed is for all devices, and writes down where it was called from for those that are not there.
        seed_all = torch.default_generator.manual_seed if device.type == "cpu" else torch.manual_seed
        seed_all(derived_seed(self.config.seed, state.step, DROPOUT, self.ranks.rank))
        *parts, last = batch.parts
        total = torch.zeros((), device=device)
        for part in parts:
            with without_sync(self.module, last=False):
                total += self._both_passes(part, len(batch.parts))
        with without_sync(self.module, last=True):
            total += self.gradient(last) if not parts else self._both_passes(last, len(batch.parts))
        norm = self.update.norm()
        broken = (~(torch.isfinite(total) & torch.isfinite(norm))).float()
        summed = self.ranks.sum(torch.stack([total, broken, torch.full_like(total, float(stop))]))
        self.update.apply(self.rate(state.step), norm, summed[1] == 0)
        if not isinstance(self.gradient, CapturedGradient):  # whose gradients stay where they are
            self.update.forget_gradients()
        state.step += 1
        values = torch.stack([summed[0] / self.ranks.world_size, norm.float(), summed[1], summed[2]])
        return StepFigures.copied(state.step, values)

    def _both_passes(self, part: NoisyBatch, parts: int = 1) -> Tensor:
        """The loss of one of a step's `parts` micro-batches, its share of the step's; gradients are added up."""
        with self.precision.both_passes():
            with self.precision.autocast():
                loss = self.module(part) / parts
            loss.backward()
        return loss.detach()
