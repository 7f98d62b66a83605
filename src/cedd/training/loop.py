"""The training loop, one process per device. A kill loses only the steps since the last checkpoint.

All random numbers depend on (seed, step, rank) only, so that a resumed run is bit-identical to an uninterrupted one.
`Hooks` are for what a caller adds to a run.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace

import torch
from rich.console import Console

from cedd.data.batches import BatchSampler, Prefetcher
from cedd.data.tokenizers import Tokenizer, load_tokenizer
from cedd.data.training_data import TrainingData, prepare_training_data
from cedd.methods import Method, get_method
from cedd.models.backbone import Backbone
from cedd.models.description import CONFIG_SHA256, fingerprint
from cedd.models.folder import ModelFolder, description_of, load_folder, save_description
from cedd.models.locate import TRAIN_FILE, WEIGHTS_FILE
from cedd.models.weights import save_weights
from cedd.objectives.score_entropy import ScoreEntropy
from cedd.storage import JSONMapping, JSONObject, expanded, from_json, reading, write_json
from cedd.training.checkpoints import STATE_FILE, Checkpoints, RunIdentity
from cedd.training.config import (
    MAY_CHANGE,
    NAMES_OF_FILES,
    BatchConfig,
    TrainConfig,
    may_be_changed,
    settings_of_run,
    to_json,
)
from cedd.training.distributed import Ranks, joined_ranks
from cedd.training.noising import NoisingSampler, StepBatch
from cedd.training.run_folder import changed_settings, folder_lock, has_begun, refuse_other_data, refuse_other_run
from cedd.training.run_log import LOG_FILE, RunLog, plot_log, read_log
from cedd.training.signals import StopRequest
from cedd.training.speed import Meter
from cedd.training.state import Counters
from cedd.training.step import StepMetrics, TrainStep
from cedd.training.validation import Patience, Validation
from cedd.training.warm_start import check_start


class NonFiniteLoss(ValueError):
    """The loss or its gradient was not finite; the weights have not been changed by it."""


@dataclass
class TrainResult:
    """The outcome of a run."""

    step: int
    loss: float | None
    """Loss of the last step, if any."""
    bound: float | None
    finished: bool
    reason: str
    signal: int | None = None
    """Number of the signal that stopped the run; SIGTERM if another rank or a hook requested the stop."""

    @property
    def exit_code(self) -> int:
        """As in a shell: 128 plus the signal's number after a signal, otherwise 0."""
        return 0 if self.signal is None else 128 + self.signal


class Hooks:
    """Methods that the training loop calls. Override what you need, and pass an instance to `cedd.train`."""

    def on_start(self, trainer: Trainer) -> None:
        """Before the first step, after a checkpoint has been loaded."""

    def before_step(self, trainer: Trainer) -> None:
        """Before every step. `trainer.state.step` steps have been taken; `trainer.change` may change their total
        number."""

    def evaluate(self, trainer: Trainer, model: Backbone) -> float:
        """Measure the averaged weights, on the first rank. Lower is better; patience refers to this value."""
        return trainer.validation.measure(model, trainer.state.step, trainer.log)

    def on_log(self, record: JSONMapping) -> None:
        """After each record of log.jsonl, on the first rank. A record has a step, a kind ("train", "bound", "sample",
        "change" or "nonfinite") and metrics, such as loss and rate, or nats_per_token and perplexity."""

    def wants_checkpoint(self, trainer: Trainer) -> bool:
        """Whether to write a checkpoint that is due. The model's weights file is always written."""
        return True

    def on_end(self, trainer: Trainer, result: TrainResult) -> None:
        """After the last step and its checkpoint."""


def switch_threads_often() -> None:
    """Switch threads of this process every 0.2 ms instead of 5 ms: a step may take only a few milliseconds, and the
    prefetcher's thread would hold the interpreter for 5. For programs that only train."""
    sys.setswitchinterval(2e-4)


def run_training(config: TrainConfig, console: Console | None = None, hooks: Hooks | None = None) -> TrainResult:
    """Run, or resume, the training of a configuration, without loading its model (`cedd.train` does).

    The caller's random number generators of torch are left as they were.
    """
    config = replace(config, out=expanded(config.out))
    config.check()
    config = replace(config, method=get_method(config.method).name)
    console = console or Console(stderr=True)
    with joined_ranks(config.device) as ranks, torch.random.fork_rng([ranks.device] * (ranks.device.type == "cuda")):
        return Trainer(config, ranks, console if ranks.is_first else Console(quiet=True), hooks).run()


def data_of_run(config: TrainConfig, tokenizer: Tokenizer | None = None) -> TrainingData:
    """The training and held-out blocks of a configuration, by the run's own tokenizer if it has one."""
    return prepare_training_data(config.data, config.length, config.text, tokenizer, config.labels)


class Trainer:
    """One rank of one run.

    Args:
        config: the configuration.
        ranks: the ranks of the run.
        console: where messages are printed.
        hooks: called at fixed points.
        data: the data, if not that of the configuration.
    """

    records: RunLog
    change_end: Callable[[int], None]
    """Sets the total number of steps of batches that are not drawn yet."""

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
        self.method = get_method(config.method).with_sigma_floor(config.sigma_floor).in_blocks(config.block)
        refuse_other_run(config)
        with ranks.first_goes_first():
            self.data = data_of_run(config, self._taken_over()) if data is None else data
        refuse_other_data(config, self.data)
        self.process = config.process.build(self.data.tokenizer.vocab_size)
        self.method.check(self.process)
        source, labels = self._source(), self.data.train.labels
        if source is not None:
            check_start(source, self.data.tokenizer, self.method, self.process, labels)
        self.start_is_gone = config.start is not None and source is None
        self.train_step = TrainStep(config, ranks, self.method, self.process, source, len(labels))
        self.state = self.train_step.state
        self.validation = Validation(
            config, self.method, self.process, self.data, self.train_step.precision, ranks.device
        )
        self.patience = Patience(config.evaluation.patience)
        self.checkpoints = Checkpoints(config.out / "checkpoints", config.keep, ranks, self._identity(), self._say)
        self.meter = Meter(config, self.state.model, ranks)
        self.stop = StopRequest()
        self.saved = -1
        """The step of the newest checkpoint."""
        self.changed: Mapping[str, tuple[object, object]] = {}
        """Settings that a resume changes, with the values before and now."""
        self.restored: Counters | None = None
        """The counters of the checkpoint that the run was resumed from."""

    def _identity(self) -> RunIdentity:
        """The settings of the run, with hashes of its data and tokenizer in place of the names of their files."""
        changing = (*MAY_CHANGE, *NAMES_OF_FILES)
        settings = {name: value for name, value in settings_of_run(self.config).items() if name not in changing}
        hashes = {
            "data_sha256": self.data.train.header.get("tokens_sha256"),
            "tokenizer_sha256": self.data.tokenizer.fingerprint,
        }
        changeable = [name for name in settings if self.config.allow_changes and may_be_changed(name)]
        return RunIdentity(settings | hashes, changeable)

    def _taken_over(self) -> Tokenizer | None:
        """The tokenizer in the run's own folder, if the run started from another model."""
        config = self.config
        return None if config.start is None or not has_begun(config.out) else load_tokenizer(config.out)

    def _source(self) -> ModelFolder | None:
        """The model that the run starts from. None without one, or if it has been removed since the run began
        (checkpoints have their own weights)."""
        if self.config.start is None:
            return None
        try:
            return load_folder(self.config.start)
        except (ValueError, OSError):
            if not has_begun(self.config.out):
                raise
            return None

    def run(self) -> TrainResult:
        """Take all remaining steps."""
        config = self.config
        with self._only_writer():
            self._resume()
            for warning in self._warnings():
                self._say(warning)
            noising = self.noising()
            with (
                self.stop.on_signals(),
                self._open_records() as self.log,
                Prefetcher(noising, self.ranks.device) as batches,
            ):
                self.change_end = lambda steps: noising.end_at(batches.first_not_drawn, steps)
                self._log_changes()
                self.hooks.on_start(self)
                result = self._steps(batches)
                self.hooks.on_end(self, result)
            if self.ranks.is_first:
                plot_log(config.out)
        self._say(f"step {result.step}: {result.reason}; model in {config.out}")
        return result

    def _log_changes(self) -> None:
        """Record the settings that this resume has changed."""
        for name, (before, now) in self.changed.items():
            self._say(f"{name} is {now} from step {self.state.step} on (it was {before})")
        if self.changed:
            self.log.write(self.state.step, "change", {name: list(pair) for name, pair in self.changed.items()})

    def _open_records(self) -> RunLog:
        """The log of the run; ranks other than the first keep none."""
        config = self.config
        folder, on_log = (config.out, self.hooks.on_log) if self.ranks.is_first else (None, None)
        return RunLog(folder, config.steps, self.state.step, self.console, config.tensorboard, on_log)

    def _warnings(self) -> Iterator[str]:
        """Warnings about settings that are valid but probably unintended."""
        batch, usual = self.config.batch, BatchConfig()
        blocks, size = len(self.data.train), self._blocks_of_a_batch
        if blocks < size:
            length = self.config.length
            yield f"the text has only {blocks} blocks of {length} tokens, so a batch of {size} repeats them"
        name = self.method.name
        if batch.complementary and not self.method.dynamics.noisy:
            yield f"{name} has no masks: complementary batches repeat each sequence; add --no-batch.complementary"
        few = batch.lowest_time > usual.lowest_time or batch.highest_time < usual.highest_time
        if few and isinstance(self.method.objective, ScoreEntropy):
            times = f"[{batch.lowest_time}, {batch.highest_time}]"
            add = f"--batch.lowest-time {usual.lowest_time} --batch.highest-time {usual.highest_time}"
            yield f"{name} is trained at times {times} only, but score entropy needs all times: add {add}"

    @property
    def _blocks_of_a_batch(self) -> int:
        """Distinct blocks per batch; with complementary masks each appears twice."""
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
        return NoisingSampler(
            sampler, self.method, self.process, config.batch, config.steps, config.adapt, config.label_dropout
        )

    def change(self, config: TrainConfig) -> None:
        """Change the number of steps, the decay of the learning rate, or the steps of evaluations and checkpoints.
        Nothing else may change, and the learning rate must be continuous."""
        if config.steps != self.config.steps:
            self.change_end(config.steps)
        self.config = self.train_step.config = config
        self.log.expect(config.steps)
        if self.ranks.is_first:
            write_json(config.out / TRAIN_FILE, to_json(config), indent=2)

    # The loop

    def _steps(self, batches: Prefetcher[StepBatch]) -> TrainResult:
        state = self.state
        pending: StepMetrics | None = None
        loss, bound, reason, number, stop = None, None, "finished", None, False
        while state.step < self.config.steps:
            if self.patience.is_over:  # also when a run that stopped early is resumed
                reason = "stopped early: the bound no longer improves"
                break
            self.hooks.before_step(self)
            config = self.config
            figures = self.train_step.step(next(batches), self.stop.requested)
            stop = stop or (
                self.stop.requested and self.ranks.world_size == 1
            )  # several ranks agree through their metrics
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

    def _account(self, figures: StepMetrics) -> tuple[float, bool]:
        """Read and log the metrics of a step, and handle values that are not finite. Returns the loss, and whether a
        stop was requested."""
        loss, norm, finite, stop = figures.read()
        step = figures.step
        if not finite:
            self._on_nonfinite(step, loss, norm)
        self.meter.tick(step)
        if finite and (step % self.config.log_every == 0 or step == self.config.steps):
            metrics = {"loss": loss, "norm": norm, "rate": self.train_step.rate(step - 1)}
            self.log.write(step, "train", {**metrics, **self.meter.figures()})
        best = self.patience.best
        bound = "" if best == float("inf") else f"  bound {best:.4f}"
        self.log.advance(step, f"loss {loss:.4f}{bound}  {self.meter.text()}")
        return loss, stop

    def _on_nonfinite(self, step: int, loss: float, norm: float) -> None:
        steps = self.checkpoints.steps()
        good = (
            f"the last good checkpoint is {self.checkpoints.path(steps[-1])}" if steps else "there is no checkpoint yet"
        )
        message = f"step {step} (batch {step - 1}): the loss is {loss}, the gradient norm {norm}; {good}"
        self.log.write(step, "nonfinite", {"loss": str(loss), "norm": str(norm), "batch": step - 1})
        if self.config.on_nonfinite == "stop":
            raise NonFiniteLoss(message)
        self.log.say(f"{message}; skipped")

    def evaluate(self) -> float:
        """Evaluate the averaged weights on the first rank; the same number on all ranks."""
        model = self.state.averaged_model()  # all ranks are needed to gather a sharded average
        bound = self.ranks.from_first(lambda: self.hooks.evaluate(self, model))
        self.patience.note(bound)
        return bound

    # The run's folder

    @contextmanager
    def _only_writer(self) -> Iterator[None]:
        """Hold the lock of the run's folder, on the first rank. The folder is checked again, since another run may have
        used it."""
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
        """Describe the run in its folder, remove leftovers of a killed one, and load the newest checkpoint."""
        config, state = self.config, self.state
        started_before = (config.out / TRAIN_FILE).is_file()

        def begin() -> None:
            self.checkpoints.sweep()
            self.changed = changed_settings(config) if started_before else {}
            write_json(
                config.out / TRAIN_FILE, to_json(config), indent=2
            )  # from here on the folder belongs to this run
            self._describe(self.method)

        self.ranks.from_first(begin)
        found = self.checkpoints.load_latest(state.tensors())
        if found is not None:
            step, values = found
            with reading(self.checkpoints.path(step) / STATE_FILE):
                counters = from_json(Counters, values, "values")
                counters.check(step)
            self.restored = counters
            state.restore(step, counters)
            self.train_step.update.refresh()
            self.patience = Patience.restored(self.patience.limit, counters.best, counters.stale)
            self.saved = state.step
            self._say(f"resuming {config.out} at step {state.step}")
        elif config.resume == "must":
            raise ValueError(f"{config.out} has no complete checkpoint to resume from; use --resume auto to restart")
        elif self.start_is_gone:
            raise ValueError(
                f"{config.out} has no complete checkpoint, and {config.start}, where it started, is missing"
            )
        elif started_before:
            self._say(f"{config.out} has no complete checkpoint: starting from the first step")

    def _model_folder(self, method: Method) -> ModelFolder:
        """The run's model, without the averaged weights."""
        return ModelFolder(self.state.model, self.process, method, self.data.tokenizer, self.config.length)

    @property
    def _entries(self) -> JSONObject:
        """The entries of config.json for tokens around each block and for labels, if any."""
        wrap = {} if self.config.text.wrap == "none" else {"wrap": self.config.text.wrap}
        return wrap | ({"labels": labels} if (labels := self.data.train.labels) else {})

    def _describe(self, method: Method, results: JSONMapping | None = None) -> None:
        """Write all files of the run's model but its weights, and the results measured so far."""
        reports = {"train": self.data.train.report(), "validation": self.data.validation.report()}
        save_description(
            self.config.out, self._model_folder(method), {"data": reports, **self._entries, **(results or {})}
        )

    def _describe_end(self) -> None:
        """Add the last bound on held-out text to config.json, and for a method that ends before t = 0 its stopping
        time."""
        method = self.method
        if method.stops_short(self.process):
            model = self.state.averaged_model()  # all ranks are needed to gather a sharded average
            method = method.with_stop(self.ranks.from_first(lambda: self.validation.stopped(model).dynamics.stop))
            self._save_model(method)

        def describe() -> None:
            bounds = [record for record in read_log(self.config.out / LOG_FILE) if record["kind"] == "bound"]
            self._describe(method, {"training": {"bound": bounds[-1]}} if bounds else {})

        self.ranks.from_first(describe)

    def _save(self) -> None:
        """Write a checkpoint, then the run's model."""
        state = self.state
        if state.step != self.saved and self.hooks.wants_checkpoint(self):
            self.checkpoints.save(state.step, state.tensors(), asdict(self._counters()))
            self.saved = state.step
        self._save_model()

    def _counters(self) -> Counters:
        best = None if self.patience.best == math.inf else self.patience.best
        return Counters(
            averaged=self.state.ema.updates,
            updates=self.state.optimizers[0].updates,
            best=best,
            stale=self.patience.stale,
            steps=self.config.steps,
            decay_share=self.config.optimizer.decay_share,
        )

    def _save_model(self, *others: Method) -> None:
        """Write the averaged weights, tied to the run's config.json, and to the config.json with one of the `others`.

        The final config.json differs in its method from that of an unfinished run. With both listed, a kill between two
        writes, or a resume, leaves a folder that loads.
        """
        weights = self.state.averaged_weights()
        configs = [description_of(self._model_folder(method), self._entries) for method in (self.method, *others)]
        metadata = {CONFIG_SHA256: " ".join(dict.fromkeys(map(fingerprint, configs)))}
        self.ranks.from_first(lambda: save_weights(self.config.out / WEIGHTS_FILE, weights, metadata=metadata))

    def _say(self, message: str) -> None:
        self.console.print(message, highlight=False, markup=False, soft_wrap=True)
