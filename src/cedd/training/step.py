"""One training step on one rank: gradients of the micro-batches, clipping, the optimizer's update, the moving average.

The host never waits for the device: the metrics of a step are read while the next step runs, and a step with a gradient
that is not finite is skipped on the device. Dropout depends on (seed, step, rank) only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cedd.losses import NoisyBatch
from cedd.methods import Method
from cedd.models.architectures import build_network
from cedd.models.ema import EMA
from cedd.models.folder import ModelFolder
from cedd.network import with_parameters, with_rounded
from cedd.process import TokenProcess
from cedd.training.captured_gradient import CapturedGradient, Gradient
from cedd.training.config import TrainConfig
from cedd.training.distributed import LossModule, Ranks, choose_strategy, distribute, without_sync
from cedd.training.noising import StepBatch
from cedd.training.optimizer import learning_rate
from cedd.training.precision import Precision
from cedd.training.state import DROPOUT, TrainingState, derived_seed
from cedd.training.update import Update, make_optimizers, trained
from cedd.training.warm_start import check_network, copy_weights


@dataclass
class StepMetrics:
    """Metrics of one step: loss, gradient norm, whether both are finite, whether a stop was requested."""

    step: int
    values: Tensor
    ready: torch.cuda.Event | None

    @classmethod
    def copied(cls, step: int, values: Tensor) -> StepMetrics:
        """Metrics [4], copied to the host without waiting."""
        if values.device.type != "cuda":
            return cls(step, values.detach().cpu(), None)
        # Into pinned memory; otherwise the copy would wait for the device.
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


class TrainStep:
    """The network of a run with its gradient, optimizers and moving average. `state` holds all that a step changes."""

    def __init__(
        self,
        config: TrainConfig,
        ranks: Ranks,
        method: Method,
        process: TokenProcess,
        source: ModelFolder | None = None,
        labels: int = 0,
    ) -> None:
        self.config, self.ranks = config, ranks
        torch.manual_seed(config.seed)
        model = build_network(*config.network(process, causal=not method.dynamics.noisy, labels=labels))
        check_network(model, config, method)
        graphs = ranks.device.type == "cuda" and model.capabilities.cuda_graphs
        mode = {"auto": "graphs" if graphs else "off"}.get(config.compile, config.compile)
        compiled = mode in ("on", "graphs")
        self.precision = Precision.choose(config.precision, ranks.device.type, compiled)
        strategy = choose_strategy(config, ranks)
        if source is not None:
            copy_weights(model, source)
        model = model.to(ranks.device).train()
        skeleton = with_parameters(model, {name: one.to("meta") for name, one in model.named_parameters()})
        at_once = strategy == "single" and config.batch.accumulate == 1  # one backward pass per step
        run = model
        if at_once and self.precision.autocasts and model.rounded_parameters():  # sums of several would lose precision
            run = with_rounded(model, model.rounded_parameters(), torch.bfloat16)
        if compiled:
            # With DDP the compiler's own graphs, one per pass; with FSDP none, since parameters move.
            run.compile(mode="reduce-overhead" if mode == "graphs" and strategy == "ddp" else "default")
        self.module = distribute(LossModule(run, method), strategy)
        self.gradient: Gradient = self._both_passes
        if mode in ("graphs", "record") and at_once and ranks.device.type == "cuda":
            self.gradient = CapturedGradient(self._both_passes, list(trained(run).values()))
        optimizer = config.optimizer.of_mean(config.length)
        ema = EMA(model, optimizer.ema, optimizer.ema_warmup, optimizer.steps_of_average(config.steps))
        self.state = TrainingState(model, skeleton, ema, make_optimizers(model, optimizer))
        self.update = Update(model, self.state.optimizers, ema, optimizer, run)

    def rate(self, step: int) -> float:
        """The learning rate of step 0, 1, ..."""
        return learning_rate(self.config.optimizer, step, self.config.steps)

    def step(self, batch: StepBatch, stop: bool = False) -> StepMetrics:
        """Take one step. `stop` is shared with all ranks through the metrics."""
        state, device = self.state, self.ranks.device
        # torch.manual_seed seeds all devices, and records a stack trace for those that are not initialized.
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
        if not isinstance(self.gradient, CapturedGradient):  # which keeps its gradients in place
            self.update.forget_gradients()
        state.step += 1
        values = torch.stack([summed[0] / self.ranks.world_size, norm.float(), summed[1], summed[2]])
        return StepMetrics.copied(state.step, values)

    def _both_passes(self, part: NoisyBatch, parts: int = 1) -> Tensor:
        """Forward and backward pass of one of `parts` micro-batches: its share of the step's loss. Gradients
        accumulate."""
        with self.precision.both_passes():
            with self.precision.autocast():
                loss = self.module(part) / parts
            loss.backward()
        return loss.detach()
