"""The training loop: one process per device; a kill loses only the steps since the last checkpoint.

Everything random follows from (seed, step, rank), so that a resumed run takes the very same steps. `Hooks` is what a
caller can add to a run or change of it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console

from cedd.data.batches import BatchSampler, Prefetcher
from cedd.data.tokenizers import Tokenizer, load_tokenizer
from cedd.data.training_data import TrainingData, prepare_training_data
from cedd.methods import Method, get_method
from cedd.models.folder import ModelFolder, load_folder, save_description
from cedd.models.locate import TRAIN_FILE, WEIGHTS_FILE
from cedd.models.transformer import Transformer
from cedd.models.weights import save_weights
from cedd.objectives.score_entropy import ScoreEntropy
from cedd.storage import expanded, write_json
from cedd.training.checkpoints import Checkpoints, RunIdentity
from cedd.training.config import MAY_CHANGE, BatchConfig, TrainConfig, settings_of_run, to_json
from cedd.training.distributed import Ranks, gather_full, joined_ranks
from cedd.training.noising import NoisingSampler, StepBatch
from cedd.training.records import LOG_FILE, Records, plot_log, read_log
from cedd.training.run_folder import folder_lock, has_begun, refuse_other_data, refuse_other_run
from cedd.training.signals import StopRequest
from cedd.training.speed import Meter
from cedd.training.start import check_start
from cedd.training.step import StepFigures, Stepper
from cedd.training.validation import Patience, Validation


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
    signal: int | None = None
    """The number of the signal that stopped it; SIGTERM where another rank, or a hook, asked for the stop."""

    @property
    def exit_code(self) -> int:
        """As a shell counts: 128 and the signal's number, so that nothing goes on with half a model; else 0."""
        return 0 if self.signal is None else 128 + self.signal


class Hooks:
    """What the loop calls at fixed points. Subclass it, override what you need, and give it to `train`."""

    def on_start(self, trainer: Trainer) -> None:
        """Before the first step, once a checkpoint has been loaded."""

    def before_step(self, trainer: Trainer) -> None:
        """Before every step; `trainer.state.step` have been taken; `trainer.change` gives the run another number."""

    def evaluate(self, trainer: Trainer, model: Transformer) -> float:
        """Measure the averaged weights, on the first rank; lower is better, and patience goes by it."""
        return trainer.validation.measure(model, trainer.state.step, trainer.records)

    def wants_checkpoint(self, trainer: Trainer) -> bool:
        """Whether a checkpoint that is due is written; the model's file always is."""
        return True

    def on_end(self, trainer: Trainer, result: TrainResult) -> None:
        """After the last step and its checkpoint."""


def share_the_interpreter() -> None:
    """Let the prefetcher's thread hold the interpreter for 0.2 ms at a time, not 5: a step is only a few long."""
    sys.setswitchinterval(2e-4)


def train(config: TrainConfig, console: Console | None = None, hooks: Hooks | None = None) -> TrainResult:
    """Run, or resume, the training that a configuration describes."""
    config = replace(config, out=expanded(config.out))
    config.check()
    console = console or Console(stderr=True)
    share_the_interpreter()
    with joined_ranks(config.device) as ranks:
        return Trainer(config, ranks, console if ranks.is_first else Console(quiet=True), hooks).run()


def data_of_run(config: TrainConfig, tokenizer: Tokenizer | None = None) -> TrainingData:
    """The blocks that a configuration trains on and holds out, by the run's own tokenizer once there is one."""
    options: dict[str, Any] = {**vars(config.text), "tokenizer": tokenizer or config.text.tokenizer}
    return prepare_training_data(config.data, length=config.length, **options)


class Trainer:
    """One rank of one run.

    data: what to train on, where it is not what the configuration names.
    """

    records: Records

    def __init__(
        self,
        config: TrainConfig,
        ranks: Ranks,
        console: Console,
        hooks: Hooks | None = None,
        data: TrainingData | None = None,
    ) -> None:
        config.check_shares(ranks.world_size)
        self.config, self.ranks, self.console, self.hooks = config, ranks, console, hooks or Hooks()
        self.method = get_method(config.method).with_sigma_floor(config.process.sigma_floor)
        refuse_other_run(config)
        with ranks.first_goes_first():
            self.data = data_of_run(config, self._taken_over()) if data is None else data
        refuse_other_data(config, self.data)
        self.process = config.process.build(self.data.tokenizer.vocab_size)
        self.method.check(self.process)
        source = self._source()
        if source is not None:
            check_start(source, self.data.tokenizer, self.method, self.process)
        self.start_is_gone = config.start is not None and source is None
        self.stepper = Stepper(config, ranks, self.method, self.process, source)
        self.state = self.stepper.state
        self.validation = Validation(config, self.method, self.process, self.data, self.stepper.precision, ranks.device)
        self.patience = Patience(config.evaluation.patience)
        settings = {name: value for name, value in settings_of_run(config).items() if name not in MAY_CHANGE}
        identity = RunIdentity(settings | {"data_sha256": self.data.train.header.get("tokens_sha256")})
        self.checkpoints = Checkpoints(config.out / "checkpoints", config.keep, ranks, identity, self._say)
        self.meter = Meter(config, self.state.model, ranks)
        self.stop = StopRequest()
        self.saved = -1
        """The step of the newest checkpoint."""
        self.restored: Mapping[str, Any] = {}
        """What the checkpoint that the run goes on from has beside tensors."""

    def _taken_over(self) -> Tokenizer | None:
        """The tokenizer that a run which started from another model has in its own folder since."""
        config = self.config
        return None if config.start is None or not has_begun(config.out) else load_tokenizer(config.out)

    def _source(self) -> ModelFolder | None:
        """The model that the run starts from. None where there is none, or where it is gone since the run began: the
        checkpoints have weights of their own."""
        if self.config.start is None:
            return None
        try:
            return load_folder(self.config.start)
        except (ValueError, OSError):
            if not has_begun(self.config.out):
                raise
            return None

    def run(self) -> TrainResult:
        """All steps that are left."""
        config, kept = self.config, self.config.out if self.ranks.is_first else None
        with self._only_writer():
            self._resume()
            for warning in self._warnings():
                self._say(warning)
            with (
                self.stop.on_signals(),
                Records(kept, config.steps, self.state.step, self.console, config.tensorboard) as self.records,
                Prefetcher(self.noising(), self.ranks.device) as batches,
            ):
                self.hooks.on_start(self)
                result = self._steps(batches)
                self.hooks.on_end(self, result)
            if self.ranks.is_first:
                plot_log(config.out)
        self._say(f"step {result.step}: {result.reason}; model in {config.out}")
        return result

    def _warnings(self) -> Iterator[str]:
        """What is allowed, and perhaps not meant."""
        batch, usual = self.config.batch, BatchConfig()
        blocks, size = len(self.data.train), self._blocks_of_a_batch
        if blocks < size:
            yield f"the text has {blocks} blocks of {self.config.length} tokens: a batch of {size} repeats them"
        name = self.method.name
        if batch.complementary and not self.method.dynamics.noisy:
            yield f"{name} has no masks, and is shown every sequence twice: add --batch.complementary False"
        few = batch.lowest_time > usual.lowest_time or batch.highest_time < usual.highest_time
        if few and isinstance(self.method.objective, ScoreEntropy):
            times = f"[{batch.lowest_time}, {batch.highest_time}]"
            add = f"--batch.lowest-time {usual.lowest_time} --batch.highest-time {usual.highest_time}"
            yield f"{name} has score entropy, which needs all times, and is trained at {times} only: add {add}"

    @property
    def _blocks_of_a_batch(self) -> int:
        """How many blocks a batch shows; once each, or twice with complementary masks."""
        return self.config.batch.size // (1 + self.config.batch.complementary)

    def noising(self) -> NoisingSampler:
        """This rank's batches, from the next step on."""
        config, ranks = self.config, self.ranks
        sampler = BatchSampler(
            self.data.train,
            self._blocks_of_a_batch,
            seed=config.seed,
            rank=ranks.rank,
            world_size=ranks.world_size,
            position=self.state.step,
            cut_anew=config.batch.cut == "anew",
        )
        return NoisingSampler(sampler, self.method, self.process, config.batch, config.steps)

    def change(self, config: TrainConfig) -> None:
        """From now on the run has another number of steps, a rate that falls to its end, or is evaluated and saved at
        other steps; nothing else changes, and the rate must not jump."""
        self.config = self.stepper.config = config
        self.records.expect(config.steps)
        if self.ranks.is_first:
            write_json(config.out / TRAIN_FILE, to_json(config), indent=2)

    # The loop

    def _steps(self, batches: Prefetcher[StepBatch]) -> TrainResult:
        state = self.state
        pending: StepFigures | None = None
        loss, bound, reason, number, stop = None, None, "finished", None, False
        while state.step < self.config.steps:
            if self.patience.is_over:  # also where a run that had stopped early is started again
                reason = "stopped early: the bound no longer improves"
                break
            self.hooks.before_step(self)
            config = self.config
            figures = self.stepper.step(next(batches), self.stop.requested)
            stop = stop or (self.stop.requested and self.ranks.world_size == 1)  # several agree through their figures
            if pending is not None:
                loss, agreed = self._account(pending)
                stop = stop or agreed
            pending = figures
            if config.evaluation.every > 0 and state.step % config.evaluation.every == 0:
                bound = self.evaluate()
                self.meter.pause()
            if stop and state.step < config.steps:
                reason, number = "stopped", int(self.stop.number)
                break
            if state.step % config.checkpoint_every == 0 and state.step < config.steps:
                loss, stop = self._account(pending)
                pending = None
                self._save()
                self.meter.pause()
        if pending is not None:
            loss, _ = self._account(pending)
        self._save()
        self._describe_end()
        return TrainResult(state.step, loss, bound, state.step >= self.config.steps, reason, number)

    def _account(self, figures: StepFigures) -> tuple[float, bool]:
        """Read and log a step's figures, and act on what is not finite; its loss, and whether a stop was requested."""
        loss, norm, finite, stop = figures.read()
        step = figures.step
        if not finite:
            self._on_nonfinite(step, loss, norm)
        self.meter.tick(step)
        if finite and step % self.config.log_every == 0:
            figures_of_step = {"loss": loss, "norm": norm, "rate": self.stepper.rate(step - 1)}
            self.records.write(step, "train", {**figures_of_step, **self.meter.figures()})
        best = self.patience.best
        bound = "" if best == float("inf") else f"  bound {best:.4f}"
        self.records.advance(step, f"loss {loss:.4f}{bound}  {self.meter.text()}")
        return loss, stop

    def _on_nonfinite(self, step: int, loss: float, norm: float) -> None:
        steps = self.checkpoints.steps()
        good = (
            f"the last good checkpoint is {self.checkpoints.path(steps[-1])}" if steps else "there is no checkpoint yet"
        )
        message = f"step {step} (batch {step - 1}): the loss is {loss}, the gradient norm {norm}; {good}"
        self.records.write(step, "nonfinite", {"loss": str(loss), "norm": str(norm), "batch": step - 1})
        if self.config.on_nonfinite == "stop":
            raise NonFiniteLoss(message)
        self.records.say(f"{message}; skipped")

    def evaluate(self) -> float:
        """The averaged weights, measured by the first rank; the same number on all."""
        model = self.state.averaged_model()  # all ranks are needed to gather a sharded average
        bound = self.ranks.from_first(lambda: self.hooks.evaluate(self, model))
        self.patience.note(bound)
        return bound

    # The run's folder

    @contextmanager
    def _only_writer(self) -> Iterator[None]:
        """Hold the lock of the run's folder, on the first rank; another run may have been there since we looked."""
        out = self.config.out
        with ExitStack() as stack:

            def claim() -> None:
                out.mkdir(parents=True, exist_ok=True)
                stack.enter_context(folder_lock(out))
                refuse_other_run(self.config)
                refuse_other_data(self.config, self.data)

            self.ranks.from_first(claim)
            yield

    def _resume(self) -> None:
        """Describe the run in its folder, remove what a killed one left there, and load the newest checkpoint."""
        config, state = self.config, self.state
        started_before = (config.out / TRAIN_FILE).is_file()

        def begin() -> None:
            self.checkpoints.sweep()
            write_json(config.out / TRAIN_FILE, to_json(config), indent=2)  # from now on the folder is this run's
            self._describe(self.method)

        self.ranks.from_first(begin)
        found = self.checkpoints.load_latest(state.tensors())
        if found is not None:
            step, values = found
            self.restored = values
            state.restore(step, values)
            self.stepper.update.refresh()
            self.patience.restore(values)
            self.saved = state.step
            self._say(f"resuming {config.out} at step {state.step}")
        elif config.resume == "must":
            raise ValueError(f"{config.out} has no complete checkpoint to resume from; use --resume auto to restart")
        elif self.start_is_gone:
            raise ValueError(f"{config.out} has no complete checkpoint, and {config.start}, where it started, is gone")
        elif started_before:
            self._say(f"{config.out} has no complete checkpoint: starting from the first step")

    def _describe(self, method: Method, found: Mapping[str, Any] | None = None) -> None:
        """Everything of the run's model but its weights, and what has been found out about them."""
        model = ModelFolder(self.state.model, self.process, method, self.data.tokenizer, self.config.length)
        reports = {"train": self.data.train.report(), "validation": self.data.validation.report()}
        wrap = {} if self.config.text.wrap == "none" else {"wrap": self.config.text.wrap}
        save_description(self.config.out, model, {"data": reports, **wrap, **(found or {})})

    def _describe_end(self) -> None:
        """The last bound on held-out text, and where the final weights' path ends, for a method that has to choose."""
        short = self.method.stops_short(self.process)
        model = self.state.averaged_model() if short else None  # all ranks are needed to gather a sharded average

        def describe() -> None:
            method = self.method if model is None else self.validation.stopped(model)
            bounds = [record for record in read_log(self.config.out / LOG_FILE) if record["kind"] == "bound"]
            self._describe(method, {"training": {"bound": bounds[-1]}} if bounds else {})

        self.ranks.from_first(describe)

    def _save(self) -> None:
        """A checkpoint, then the averaged weights as the run's model."""
        state = self.state
        if state.step != self.saved and self.hooks.wants_checkpoint(self):
            end = {"steps": self.config.steps, "decay_share": self.config.optimizer.decay_share}
            values = {**state.values(), **self.patience.values(), **end}
            self.checkpoints.save(state.step, state.tensors(), values)
            self.saved = state.step
        averages = {name: gather_full(average) for name, average in state.ema.shadow.items()}
        self.ranks.from_first(lambda: save_weights(self.config.out / WEIGHTS_FILE, averages))

    def _say(self, message: str) -> None:
        self.console.print(message, highlight=False, markup=False, soft_wrap=True)
