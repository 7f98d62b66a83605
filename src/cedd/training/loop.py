"""The training loop: one process a device, nothing lost but the steps since the last checkpoint.

Order of a step: the batch (made ahead, on the CPU), the gradient of each micro-batch, clipping, AdamW, the average.
No step waits for the device: the figures of a step are read when the next one is under way, and a gradient that is
not finite is skipped on the device itself. Everything random follows from (seed, step, rank).
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from cedd.bounds.estimator import estimate_bound
from cedd.data import Prefetcher, TrainingData, prepare_training_data
from cedd.data.batches import BatchSampler
from cedd.data.tokenizers import Tokenizer
from cedd.models.ema import EMA
from cedd.models.folder import WEIGHTS_FILE, read_description, save_description
from cedd.models.transformer import Transformer
from cedd.models.weights import save_weights
from cedd.network import with_rounded
from cedd.objectives.loss import NoisyBatch
from cedd.objectives.methods import Method, get_method
from cedd.process import TokenProcess
from cedd.samplers.loop import sample
from cedd.storage import write_json
from cedd.training.captured import CapturedGradient, Gradient
from cedd.training.checkpoints import Checkpoints
from cedd.training.claim import claimed
from cedd.training.config import TrainConfig, read_config, same_run, to_json
from cedd.training.distributed import (
    LossModule,
    Ranks,
    choose_strategy,
    distribute,
    joined_ranks,
    whole,
    without_sync,
)
from cedd.training.noising import NoisingSampler, StepBatch
from cedd.training.optimizer import Update, learning_rate, make_optimizer
from cedd.training.precision import Precision
from cedd.training.records import Records, plot_log
from cedd.training.speed import peak_flops
from cedd.training.state import TrainingState, derived_seed

TRAIN_FILE = "train.json"
_DROPOUT, _EVALUATION = 2, 3  # separate uses of the seed


class NonFiniteLoss(ValueError):
    """The loss or its gradient was not a number; the weights were not touched by it."""


@dataclass
class TrainResult:
    """How a run ended."""

    step: int
    loss: float | None
    """Of the last step, if one was taken."""
    bound: float | None
    finished: bool
    reason: str


@dataclass
class StepFigures:
    """What one step leaves to read: loss, gradient norm, whether both are finite, whether a stop was asked for."""

    step: int
    values: Tensor
    ready: torch.cuda.Event | None

    def read(self) -> tuple[float, float, bool, bool]:
        if self.ready is not None:
            self.ready.synchronize()
        loss, norm, broken, stop = self.values.tolist()
        return loss, norm, broken == 0.0, stop > 0.0


@contextmanager
def graceful_signals() -> Iterator[dict[str, bool]]:
    """SIGTERM and SIGINT ask for a stop at the end of a step; a second SIGINT interrupts at once."""
    asked = {"stop": False}

    def on_signal(number: int, _: FrameType | None) -> None:
        if asked["stop"] and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked["stop"] = True

    try:
        old = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    except ValueError:  # not in the main thread: signals are somebody else's
        yield asked
        return
    try:
        yield asked
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def share_the_interpreter() -> None:
    """Let the prefetcher's thread hold the interpreter for 0.2 ms at a time, not 5: a step is only a few long."""
    sys.setswitchinterval(2e-4)


def train(config: TrainConfig, console: Console | None = None) -> TrainResult:
    """Run, or resume, the training that a configuration describes."""
    config.check()
    console = console or Console(stderr=True)
    share_the_interpreter()
    with joined_ranks(config.device) as ranks:
        return Trainer(config, ranks, console if ranks.is_first else Console(quiet=True)).run()


def data_of_run(config: TrainConfig, tokenizer: Tokenizer | None = None) -> TrainingData:
    """The blocks that a configuration trains on and holds out, by the run's own tokenizer once there is one."""
    text = config.text
    return prepare_training_data(
        config.data,
        length=config.length,
        tokenizer=tokenizer or text.tokenizer,
        validation=text.validation,
        holdout=text.holdout,
        holdout_by=text.holdout_by,
        field=text.field,
        gpt2_files=text.gpt2_files,
        cache=text.cache,
        workers=text.workers,
    )


@dataclass
class Trainer:
    """One rank of one run."""

    config: TrainConfig
    ranks: Ranks
    console: Console
    method: Method = field(init=False)
    precision: Precision = field(init=False)
    process: TokenProcess = field(init=False)
    data: TrainingData = field(init=False)
    state: TrainingState = field(init=False)
    update: Update = field(init=False)
    gradient: Gradient = field(init=False)
    """Both passes over the last micro-batch of a step."""
    module: nn.Module = field(init=False)
    checkpoints: Checkpoints = field(init=False)
    saved: int = field(init=False, default=-1)
    """The step of the newest checkpoint."""
    best: float = field(init=False, default=float("inf"))
    stale: int = field(init=False, default=0)
    """Evaluations since the best one."""

    # Set-up

    def __post_init__(self) -> None:
        config, ranks = self.config, self.ranks
        self.method = get_method(config.method)
        mode = {"auto": "graphs" if ranks.device.type == "cuda" else "off"}.get(config.compile, config.compile)
        compiled = mode in ("on", "graphs")
        self.precision = Precision.choose(config.precision, ranks.device.type, compiled)
        strategy = choose_strategy(config.strategy, ranks)
        if strategy == "fsdp" and config.optimizer.matrices == "muon":
            raise ValueError("muon needs whole matrices, which sharding has not; use --strategy ddp, or adamw")
        self._refuse_other_run()
        self.data = self._prepare_data()
        self._refuse_other_data()
        self.process = config.process.build(self.data.tokenizer.vocab_size)
        self.method.check(self.process)
        torch.manual_seed(config.seed)
        network = config.model.build(self.process, config.length, self.method.causal)
        model = Transformer(network).to(ranks.device).train()
        at_once = strategy == "single" and config.batch.accumulate == 1  # one backward pass makes a step's gradient
        run = model
        if at_once and self.precision.autocasts:  # sums of rounded gradients would lose digits
            run = with_rounded(model, model.rounded_parameters(), torch.bfloat16)
        if compiled:
            # With several ranks the compiler's own graphs, of each pass; with sharding none: parameters come and go.
            run.compile(mode="reduce-overhead" if mode == "graphs" and strategy == "ddp" else "default")
        self.module = distribute(LossModule(run, self.method), strategy)
        self.gradient = self._both_passes
        if mode in ("graphs", "record") and at_once and ranks.device.type == "cuda":
            self.gradient = CapturedGradient(self._both_passes, list(run.parameters()))
        optimizer = config.optimizer.of_mean(config.length)
        ema = EMA(model, optimizer.ema, optimizer.ema_warmup, optimizer.steps_of_average(config.steps))
        self.state = TrainingState(model, ema, make_optimizer(model, optimizer))
        self.update = Update(model, self.state.optimizer, ema, optimizer, run)
        self.checkpoints = Checkpoints(config.out / "checkpoints", config.keep, ranks, self._say)

    def _refuse_other_run(self) -> None:
        """A folder that holds another run, or something else, is left alone."""
        out, path = self.config.out, self.config.out / TRAIN_FILE
        if out.exists() and not out.is_dir():
            raise ValueError(f"{out} is a file; choose another --out")
        if not path.is_file():
            if self.config.resume == "must":
                raise ValueError(f"there is no run to resume in {out}; check --out, or use --resume auto")
            if (out / WEIGHTS_FILE).exists():
                raise ValueError(f"{out} holds a model that is no run of this command; choose another --out")
            return
        if self.config.resume == "never":
            raise ValueError(f"{out} holds a run already; choose another --out, or --resume auto")
        different = same_run(read_config(path), self.config)
        if different:
            what = f"{', '.join(different)} differ{'s' * (len(different) == 1)}"
            raise ValueError(f"{out} holds another run ({what}); choose another --out")

    def _refuse_other_data(self) -> None:
        """A run goes on with the blocks and the tokenizer that it began with, or not at all."""
        if not (self.config.out / TRAIN_FILE).is_file():
            return
        before, now = read_description(self.config.out)["data"]["train"], self.data.train.report()
        if any(before[name] != now[name] for name in ("tokens_sha256", "tokenizer_fingerprint", "blocks")):
            raise ValueError(
                f"the data ({self.config.data}) has changed since the run in {self.config.out} began; "
                "restore it, or choose another --out"
            )

    def _prepare_data(self) -> TrainingData:
        with self.ranks.first_goes_first():
            return data_of_run(self.config)

    def _say(self, message: str) -> None:
        self.console.print(message, highlight=False, markup=False, soft_wrap=True)

    def _write_description(self) -> None:
        config = self.config
        save_description(
            config.out,
            network=self.state.model.config,
            process=self.process,
            method=self.method,
            tokenizer=self.data.tokenizer,
            length=config.length,
            extra={"data": {"train": self.data.train.report(), "validation": self.data.validation.report()}},
        )
        write_json(config.out / TRAIN_FILE, to_json(config))

    # The run

    def run(self) -> TrainResult:
        """All steps that are left."""
        config = self.config
        with self._sole_writer():
            self._begin()
            with (
                graceful_signals() as asked,
                self._records() as records,
                Prefetcher(self.noising(), self.ranks.device) as batches,
            ):
                result = self._steps(batches, records, asked)
            if self.ranks.is_first:
                plot_log(config.out)
        self._say(f"step {result.step}: {result.reason}; model in {config.out}")
        return result

    def _sole_writer(self) -> AbstractContextManager[None]:
        if not self.ranks.is_first:
            return nullcontext()
        self.config.out.mkdir(parents=True, exist_ok=True)
        return claimed(self.config.out)

    def _begin(self) -> None:
        """Describe the run in its folder, sweep what a kill left there, and take over the newest checkpoint."""
        config, state = self.config, self.state
        going_on = (config.out / TRAIN_FILE).is_file()
        if self.ranks.is_first:
            for left in config.out.glob(".*.tmp"):
                left.unlink()
            self.checkpoints.sweep()
            self._write_description()
        found = self.checkpoints.load_latest(state.tensors())
        if found is not None:
            state.restore(*found)
            self.update.refresh()
            self._restore_patience(found[1])
            self.saved = state.step
            self._say(f"resuming {config.out} at step {state.step}")
        elif config.resume == "must":
            raise ValueError(f"{config.out} has no whole checkpoint to resume from; use --resume auto to start again")
        elif going_on:
            self._say(f"{config.out} has no whole checkpoint: starting from the first step")

    def _records(self) -> Records:
        config = self.config
        folder = config.out if self.ranks.is_first else None
        return Records(folder, config.steps, self.state.step, self.console, config.tensorboard)

    def noising(self) -> NoisingSampler:
        """This rank's batches, from the next step on."""
        config, ranks = self.config, self.ranks
        sampler = BatchSampler(
            self.data.train,
            config.batch.size,
            seed=config.seed,
            rank=ranks.rank,
            world_size=ranks.world_size,
            position=self.state.step,
            cut_anew=config.batch.cut == "anew",
        )
        return NoisingSampler(sampler, self.method, self.process, config.batch, config.steps)

    def _steps(self, batches: Prefetcher[StepBatch], records: Records, asked: dict[str, bool]) -> TrainResult:
        config, state = self.config, self.state
        meter = Meter(self)
        pending: StepFigures | None = None
        loss, bound, reason = None, None, "finished"
        while state.step < config.steps:
            if self._is_stale():  # also where a run that had stopped early is started again
                reason = "stopped early: the bound no longer improves"
                break
            figures = self.step(next(batches), asked["stop"])
            stop = asked["stop"] and self.ranks.world_size == 1  # several ranks agree on it through their figures
            if pending is not None:
                loss, agreed = self._account(pending, meter, records)
                stop = stop or agreed
            pending = figures
            if config.evaluation.every > 0 and state.step % config.evaluation.every == 0:
                bound = self._evaluate(records)
                meter.pause()
            if stop and state.step < config.steps:
                reason = "stopped"
                break
            if state.step % config.checkpoint_every == 0 and state.step < config.steps:
                loss, _ = self._account(pending, meter, records)
                pending = None
                self._save()
                meter.pause()
        if pending is not None:
            loss, _ = self._account(pending, meter, records)
        self._save()
        return TrainResult(state.step, loss, bound, state.step >= config.steps, reason)

    def _is_stale(self) -> bool:
        patience = self.config.evaluation.patience
        return patience > 0 and self.stale >= patience

    def step(self, batch: StepBatch, stop: bool = False) -> StepFigures:
        """Gradient, clipping, update, average; returns figures that may still be on their way."""
        config, state, device = self.config, self.state, self.ranks.device
        torch.manual_seed(derived_seed(config.seed, state.step, _DROPOUT, self.ranks.rank))
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
        finite = summed[1] == 0
        rate = learning_rate(config.optimizer, state.step, config.steps)
        self.update.apply(rate, norm, finite)
        if not isinstance(self.gradient, CapturedGradient):  # whose gradients stay where they are
            self.update.forget_gradients()
        state.step += 1
        values = torch.stack([summed[0] / self.ranks.world_size, norm.float(), summed[1], summed[2]])
        return self._later(state.step, values)

    def _both_passes(self, part: NoisyBatch, parts: int = 1) -> Tensor:
        """The loss of one of a step's `parts` micro-batches, its share of the step's; gradients are added up."""
        with self.precision.both_passes():
            with self.precision.autocast():
                loss = self.module(part) / parts
            loss.backward()
        return loss.detach()

    def _later(self, step: int, values: Tensor) -> StepFigures:
        if values.device.type != "cuda":
            return StepFigures(step, values.detach().cpu(), None)
        # Pinned, or the copy would wait for the device.
        copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        copy.copy_(values.detach(), non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return StepFigures(step, copy, event)

    def _account(self, figures: StepFigures, meter: Meter, records: Records) -> tuple[float, bool]:
        """Read a step's figures: log them, and act on what is not finite or on a wish to stop."""
        loss, norm, finite, stop = figures.read()
        step = figures.step
        if not finite:
            self._on_nonfinite(step, loss, norm, records)
        meter.tick(step)
        if finite and step % self.config.log_every == 0:
            rate = learning_rate(self.config.optimizer, step - 1, self.config.steps)
            records.write(step, "train", {"loss": loss, "norm": norm, "rate": rate, **meter.figures()})
        records.advance(step, f"loss {loss:.4f}{meter.bound_text}  {meter.text()}")
        return loss, stop

    def _on_nonfinite(self, step: int, loss: float, norm: float, records: Records) -> None:
        whole_steps = self.checkpoints.steps()
        last = self.checkpoints.path(whole_steps[-1]) if whole_steps else None
        good = f"the last good checkpoint is {last}" if last else "there is no checkpoint yet"
        message = f"step {step} (batch {step - 1}): the loss is {loss}, the gradient norm {norm}; {good}"
        records.write(step, "nonfinite", {"loss": str(loss), "norm": str(norm), "batch": step - 1})
        if self.config.on_nonfinite == "stop":
            raise NonFiniteLoss(message)
        records.say(f"{message}; skipped")

    # Now and then

    def _evaluate(self, records: Records) -> float:
        """The bound by the averaged weights: measured by the first rank, the same number on all."""
        model = self.state.averaged_model()  # all ranks are needed to gather a sharded average
        bound = self.ranks.from_first(self._measure(model, records) if self.ranks.is_first else 0.0)
        self.stale = 0 if bound < self.best else self.stale + 1
        self.best = min(self.best, bound)
        return bound

    def _measure(self, model: Transformer, records: Records) -> float:
        """The bound on validation blocks, and some samples, written to the records."""
        config, step = self.config, self.state.step
        seed = derived_seed(config.seed, _EVALUATION)
        count = min(config.evaluation.sequences, len(self.data.validation))
        blocks = torch.from_numpy(self.data.validation[:count]).to(self.ranks.device)
        with torch.no_grad(), self.precision.autocast():
            estimate = estimate_bound(
                model,
                self.process,
                blocks,
                method=self.method,
                draws=config.evaluation.draws,
                generator=torch.Generator().manual_seed(seed),
            )
            texts = self._samples(model, seed)
        values: dict[str, Any] = {
            "nats_per_token": estimate.nats_per_token,
            "stderr": estimate.stderr,
            "perplexity": estimate.perplexity,
        }
        records.write(step, "bound", values)
        for text in texts:
            records.write(step, "sample", {"text": text})
        low, high = (round(x, 4) for x in estimate.ci95)
        records.say(
            f"step {step}: bound {estimate.nats_per_token:.4f} nats per token "
            f"[{low}, {high}], perplexity {estimate.perplexity:.2f}"
        )
        return estimate.nats_per_token

    def _samples(self, model: Transformer, seed: int) -> list[str]:
        config = self.config
        if config.evaluation.samples < 1:
            return []
        tokens = sample(
            model,
            self.process,
            (config.evaluation.samples, config.length),
            method=self.method,
            steps=config.evaluation.sample_steps,
            generator=torch.Generator().manual_seed(seed),
            device=self.ranks.device,
        )
        return [self.data.tokenizer.decode(row) for row in tokens.cpu().numpy()]

    def _restore_patience(self, values: dict[str, Any]) -> None:
        self.best, self.stale = values["best"] if values["best"] is not None else float("inf"), values["stale"]

    def _save(self) -> None:
        """A checkpoint, then the averaged weights as the run's model."""
        state = self.state
        if state.step != self.saved:
            patience = {"best": None if self.best == float("inf") else self.best, "stale": self.stale}
            self.checkpoints.save(state.step, state.tensors(), {**state.values(), **patience})
            self.saved = state.step
        averages = {name: whole(average) for name, average in state.ema.shadow.items()}
        if self.ranks.is_first:
            save_weights(self.config.out / WEIGHTS_FILE, averages)
        self.ranks.barrier()


class Meter:
    """Speed over the last stretch of steps, without the pauses for evaluations and checkpoints."""

    def __init__(self, trainer: Trainer) -> None:
        config, model = trainer.config, trainer.state.model
        self._tokens_per_step = config.batch.size * config.length
        self._flops_per_token = model.flops_per_token(config.length)
        self._peak = peak_flops(trainer.ranks.device)
        self._world = trainer.ranks.world_size
        self._trainer = trainer
        self._rate: float | None = None
        self._since: tuple[int, float] | None = None

    @property
    def bound_text(self) -> str:
        best = self._trainer.best
        return "" if best == float("inf") else f"  bound {best:.4f}"

    def pause(self) -> None:
        """The time until the next step does not count."""
        self._since = None

    def tick(self, step: int) -> None:
        now = time.perf_counter()
        if self._since is None or step <= self._since[0]:
            self._since = (step, now)
            return
        steps, seconds = step - self._since[0], now - self._since[1]
        if seconds > 0:
            self._rate = self._tokens_per_step * steps / seconds
        if seconds > 10:  # let old speeds go
            self._since = (step, now)

    def figures(self) -> dict[str, float]:
        if self._rate is None:
            return {}
        figures = {"tokens_per_second": round(self._rate, 1)}
        if self._peak is not None:
            share = self._rate * self._flops_per_token / (self._peak * self._world)
            figures["share_of_peak"] = round(share, 4)
        return figures

    def text(self) -> str:
        figures = self.figures()
        parts = [f"{figures['tokens_per_second']:,.0f} tokens/s"] if figures else []
        if "share_of_peak" in figures:
            parts.append(f"{figures['share_of_peak']:.0%} of peak")
        return "  ".join(parts)
