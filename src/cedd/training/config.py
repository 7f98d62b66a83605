"""The configuration of a run: typed, complete, saved with it. A preset is a full configuration, not a patch."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from cedd.models.locate import CONFIG_FILE, TRAIN_FILE, locate
from cedd.models.options import SIZES, NetworkOptions, TransformerConfig, wrap_of
from cedd.names import suggestion
from cedd.storage import expanded, from_json, read_json, reading

if TYPE_CHECKING:  # torch is imported when a run is checked or built, so that its settings can be shown without
    from cedd.process import TokenProcess
    from cedd.schedules import Schedule

Wanted = Literal["auto", "bf16", "float32"]
"""The precision of matrix products that is asked for."""


@dataclass(frozen=True)
class ScheduleConfig:
    """How noise grows with time."""

    name: str = "log-linear"
    """log-linear, polynomial, cosine, geometric, or one that you added to SCHEDULES."""
    eps: float = 1e-3
    """The share of tokens that is not noised at t = 1 (all but geometric)."""
    power: float = 2.0
    """The power of polynomial: kappa = t^power for dfm."""
    sigma_min: float = 1e-4
    """Geometric: sigma where noise begins."""
    sigma_max: float = 20.0
    """Geometric: sigma at t = 1."""
    settings: dict[str, float] = field(default_factory=dict)
    """Numbers by name, for a schedule that you added to SCHEDULES."""

    def build(self) -> Schedule:
        from cedd.schedules import SCHEDULES, schedule_from_config

        known = {"eps": self.eps, "power": self.power, "sigma_min": self.sigma_min, "sigma_max": self.sigma_max}
        return schedule_from_config({"name": self.name, **arguments_of(SCHEDULES, self.name, known, self.settings)})


@dataclass(frozen=True)
class ProcessConfig:
    """The noise process."""

    name: str = "absorb"
    """absorb, uniform, roulette, eroulette, hybrid, or one that you added to PROCESSES."""
    p_m: float = 0.95
    """Roulette: the share of masking among all events."""
    p_u: float = 0.1
    """Hybrid: the share of shuffled tokens at t = 1/2."""
    share_start: float = 0.0
    """Eroulette: the share of masking at t = 0."""
    share_stop: float = 1.0
    """Eroulette: the share of masking at t = 1."""
    share_power: float = 1.0
    """Eroulette: the instantaneous share of masking, start + (stop - start) t^power."""
    sigma_floor: float = 0.0015
    """Without a mask: the smallest sigma in a denoiser's ratios (0.003 in the paper's spelling experiments)."""
    settings: dict[str, float] = field(default_factory=dict)
    """Numbers by name: rise, fall and eps of hybrid, or those of a process that you added to PROCESSES."""
    schedule: ScheduleConfig = ScheduleConfig()

    def build(self, vocab_size: int) -> TokenProcess:
        from cedd.process import PROCESSES, process_from_config

        share = {"start": self.share_start, "stop": self.share_stop, "power": self.share_power}
        known = {"p_m": self.p_m, "p_u": self.p_u, "mask_share": share, "schedule": self.schedule.build().config()}
        chosen = arguments_of(PROCESSES, self.name, known, self.settings)
        if "mask_share" in chosen:  # a share of masking that depends on time replaces the constant one
            chosen.pop("p_m", None)
        return process_from_config({"name": self.name, "vocab_size": vocab_size, **chosen})


def arguments_of(
    table: Mapping[str, Callable[..., Any]], name: str, known: Mapping[str, Any], settings: Mapping[str, float]
) -> dict[str, Any]:
    """The arguments of the table's entry `name`: the `known` settings that it takes, and its own `settings`."""
    if name not in table:
        raise ValueError(f"there is no {name!r}{suggestion(name, table)}")
    takes = list(inspect.signature(table[name]).parameters)
    own = [argument for argument in takes if argument not in (*known, "vocab_size")]
    if unknown := sorted(set(settings) - set(own)):
        raise ValueError(f"{name} has no setting {unknown[0]!r} of its own; it has {', '.join(own) or 'none'}")
    return {key: value for key, value in known.items() if key in takes} | dict(settings)


@dataclass(frozen=True)
class ModelConfig(NetworkOptions):
    """The network's size and options."""

    def build(self, process: TokenProcess, length: int, causal: bool) -> TransformerConfig:
        options: dict[str, Any] = dataclasses.asdict(self) | {
            "time_conditioning": self.time_conditioning and not causal
        }
        has_mask = process.has_mask or causal
        return TransformerConfig(
            vocab_size=process.vocab_size, has_mask=has_mask, length=length, causal=causal, **options
        )


@dataclass(frozen=True)
class DataConfig:
    """What is read, and how it becomes blocks of tokens."""

    tokenizer: str = "char"
    """char, char:SIZE, byte, gpt2, gpt2-char, bpe:SIZE, or a folder with a saved tokenizer."""
    gpt2_files: Path | None = None
    """A folder with GPT-2's vocab.json and merges.txt, so that nothing is downloaded."""
    validation: str | None = None
    """A corpus of its own; without one, `holdout` of the data is held out."""
    holdout: float = 0.05
    """The share of the data that is not trained on, and measured on."""
    holdout_by: Literal["tail", "documents"] = "tail"
    """Which part that is: the last blocks (tail), or documents that are evenly spread."""
    field: str = "text"
    """The field of a jsonl or of a hub data set."""
    wrap: Literal["none", "bos-eos"] = "none"
    """bos-eos: each sequence stands between the tokens that begin and end a document, as MDLM's and DUO's do. A run
    that starts --from such a network keeps it."""
    workers: int = 1
    """Processes that tokenize; they do not change a token."""
    cache: Path | None = None
    """Folder in which the tokens are kept. None: CEDD_CACHE, or ~/.cache/cedd."""


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, as in the paper, or Muon for the matrices of the blocks."""

    matrices: Literal["adamw", "muon"] = "adamw"
    """The optimizer of the blocks' matrices; all other parameters are AdamW's. muon may learn more per step at the same
    rate, and its steps take longer."""
    momentum: float = 0.95
    """Muon's momentum."""
    matrix_rate: float | None = None
    """Muon's highest rate, by default `rate`; it warms up and falls as `rate` does."""
    rate: float = 3e-4
    """AdamW's highest rate."""
    embedding_rate: float | None = None
    """AdamW's highest rate for the embedding of the tokens, by default `rate`."""
    head_rate: float | None = None
    """AdamW's highest rate for the vocabulary head, by default `rate`."""
    beta1: float = 0.9
    """AdamW's decay of the mean of the gradients."""
    beta2: float = 0.999
    """AdamW's decay of the mean of their squares."""
    eps: float = 1e-8
    """AdamW's, added to the root of that mean."""
    weight_decay: float = 0.0
    """Of all parameters, times the rate."""
    warmup: int = 2500
    """Steps in which the rate rises to its highest."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """What the rate does after that: stay, or fall like half a cosine or a line."""
    final_share: float = 0.0
    """Cosine and linear: what the rate falls to, one step after the last, as a share of `rate`."""
    decay_share: float = 1.0
    """Linear: the share of all steps, the last ones, in which the rate falls."""
    clip: float = 1.0
    """The largest norm of the gradient; 0 for no clipping."""
    loss: Literal["mean", "sum"] = "mean"
    """The loss that clip and eps refer to: the mean over a sequence's positions, or their sum. The code that the paper
    builds on has the sum; nearly all of its gradients have a norm above 1, and so are clipped."""
    ema: float = 0.9999
    """The decay of the average of the weights, which is what is measured and saved."""
    ema_warmup: bool = False
    """A smaller decay in the beginning: min(ema, (1+step)/(10+step))."""
    ema_every: int | None = None
    """Steps between updates of the average; by default 1% of 1/(1-ema), or of all steps if these are fewer, but at
    most 8."""

    def steps_of_average(self, steps: int) -> int:
        """`ema_every`, or its default in a run of so many steps; an update of the average costs 3% of a short step."""
        if self.ema_every is not None:
            return self.ema_every
        remembered = round(1 / (1 - self.ema))
        return min(8, max(1, min(remembered, steps) // 100))

    def of_mean(self, length: int) -> OptimizerConfig:
        """The same for the mean loss over a sequence, which is trained on: clip and eps of a sum are divided."""
        parts = length if self.loss == "sum" else 1
        return dataclasses.replace(self, loss="mean", clip=self.clip / parts, eps=self.eps / parts)


@dataclass(frozen=True)
class BatchConfig:
    """One step's data."""

    size: int = 512
    """Sequences in a step, over all ranks and micro-batches."""
    accumulate: int = 1
    """Micro-batches that a rank's share is cut into."""
    times: Literal["stratified", "independent"] = "stratified"
    """How the times of a batch are drawn: each from a part of its own of their range, or each from all of it."""
    complementary: bool = False
    """Put every sequence into the batch twice, at times t and lowest + highest - t: what is masked in one is not in the
    other (exactly so where the two times add up to 1 and the schedule is log-linear)."""
    lowest_time: float = 1e-3
    """Where the range of the times begins."""
    highest_time: float = 1.0
    """Where it ends. Below 1 the strongest noise is never seen: a corrector needs none, a model that generates must
    extrapolate."""
    last_highest_time: float | None = None
    """The highest time of the last step, approached linearly: training starts with strong noise, from which a network
    learns faster, and ends with the weak noise of the task."""
    cut: Literal["once", "anew"] = "once"
    """Where the text is cut into sequences: at the same places in every epoch, or at others in each epoch after the
    first, so that tokens at an edge get context on both sides."""


@dataclass(frozen=True)
class EvaluationConfig:
    """What is measured while training; 0 turns a measurement off."""

    every: int = 1000
    """Steps between estimates of the bound on the validation blocks, by the averaged weights."""
    sequences: int = 256
    """Validation blocks of an estimate."""
    draws: int = 4
    """Noisy versions of each."""
    samples: int = 2
    """Texts sampled at each evaluation."""
    sample_steps: int = 64
    """Steps in which they are sampled."""
    patience: int = 0
    """Stop when the bound has not improved for this many evaluations."""


@dataclass(frozen=True)
class TrainConfig:
    """A training run, from the first byte of data to the last step."""

    data: str
    """A text file, a folder of them, a jsonl, hf:NAME, or python-manual."""
    out: Path
    """The run's folder."""
    method: str = "cedd-star"
    """sedd, sedds, cedd, cedd-star, ceddt, bayes, bayes-star, dfm, ar, or one that you added to METHODS."""
    process: ProcessConfig = ProcessConfig()
    model: ModelConfig = field(default_factory=lambda: model_of_size("char"))
    length: int = 128
    """Tokens of a sequence."""
    text: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    batch: BatchConfig = BatchConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    steps: int = 10_000
    """Training steps."""
    seed: int = 0
    """Of everything random."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:1."""
    precision: Wanted = "auto"
    """The precision of matrix products: bf16 by autocast, on a CPU only if it has units for it (AMX). auto: bf16 on
    CUDA and on such a CPU, float32 elsewhere."""
    compile: Literal["auto", "off", "on", "graphs", "record"] = "auto"
    """torch.compile (on), with the step as a CUDA graph (graphs), or that graph alone, which needs no compiler and
    starts at once (record). auto: graphs on CUDA, off elsewhere."""
    checkpoint_every: int = 1000
    """Steps between checkpoints."""
    keep: int = 3
    """Checkpoints that are kept."""
    log_every: int = 10
    """Steps between lines of the log."""
    resume: Literal["auto", "never", "must"] = "auto"
    """auto: go on if the folder holds a run of the same configuration, else start."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What to do when the loss or the gradient is not finite: stop the run, or skip the step."""
    strategy: Literal["auto", "ddp", "fsdp"] = "auto"
    """With several ranks: replicate the network (ddp) or shard it (fsdp)."""
    tensorboard: bool = False
    """Write the log for TensorBoard, too."""
    start: Annotated[str | None, tyro.conf.arg(name="from", metavar="RUN")] = None
    """Start from the weights of this run or model, with a new optimizer. Its network, tokenizer, length, method and
    process are then the defaults, and the preset's are not. The network may be deeper, by a multiple of its blocks."""

    def check(self) -> None:
        """Refuse settings that would fail later, in one sentence."""
        from cedd.methods import get_method
        from cedd.process import PROCESSES
        from cedd.schedules import SCHEDULES

        get_method(self.method)
        process = self.process
        for name, given, table in (
            ("process.name", process.name, PROCESSES),
            ("process.schedule.name", process.schedule.name, SCHEDULES),
        ):
            if given not in table:
                raise ValueError(f"{name} has no choice {given!r}{suggestion(given, table)}")
        values = flat(self)
        for names, words, holds in _LIMITS:
            for name in names.split():
                if values[name] is not None and not holds(values[name]):
                    raise ValueError(f"{name} must {words}; got {values[name]}")
        if self.evaluation.patience > 0 and self.evaluation.every < 1:
            raise ValueError("evaluation.patience needs evaluations: set evaluation.every too")
        low, high, last = self.batch.lowest_time, self.batch.highest_time, self.batch.last_highest_time
        for name, time in {"highest_time": high, "last_highest_time": high if last is None else last}.items():
            if not 0.0 <= low < time <= 1.0:
                raise ValueError(
                    f"batch.lowest_time must lie in [0, 1), below batch.{name}, at most 1; got {(low, time)}"
                )
        if self.optimizer.steps_of_average(self.steps) > self.steps:
            raise ValueError(
                f"optimizer.ema_every is {self.optimizer.ema_every}, but the run has {self.steps} steps: the average, "
                "which is what is saved, would never be updated"
            )
        if self.batch.complementary and self.batch.size % 2:
            raise ValueError(f"batch.complementary needs pairs: batch.size must be even; got {self.batch.size}")
        if self.batch.size % self.batch.accumulate:
            raise ValueError(
                f"batch.size {self.batch.size} cannot be cut into {self.batch.accumulate} micro-batches: use a "
                f"multiple of {self.batch.accumulate}, or another batch.accumulate"
            )

    def check_shares(self, ranks: int) -> None:
        """Refuse a batch that so many ranks cannot share."""
        batch = self.batch
        needed = ranks * math.lcm(1 + batch.complementary, batch.accumulate)
        if batch.size % needed:
            pairs = ", in pairs of complementary masks" if batch.complementary else ""
            parts = f", in {batch.accumulate} micro-batches each" if batch.accumulate > 1 else ""
            whole = f"batch.size {batch.size} cannot be shared by {ranks} rank{'s' * (ranks > 1)}"
            raise ValueError(f"{whole}{pairs}{parts}: use a multiple of {needed}")


_LIMITS: tuple[tuple[str, str, Callable[[float], bool]], ...] = (
    ("steps length checkpoint_every keep log_every batch.size batch.accumulate", "be at least 1", lambda x: x >= 1),
    ("evaluation.sequences evaluation.draws evaluation.sample_steps", "be at least 1", lambda x: x >= 1),
    ("evaluation.every evaluation.samples evaluation.patience", "be at least 0, which turns it off", lambda x: x >= 0),
    ("seed", "be a whole number from 0 up, below 2^63", lambda x: 0 <= x < 2**63),
    ("optimizer.warmup", "be a number of steps from 0 up", lambda x: x >= 0),
    ("optimizer.ema_every", "be at least 1, if given", lambda x: x >= 1),
    ("optimizer.rate optimizer.eps", "be positive and finite", lambda x: 0.0 < x < math.inf),
    (
        "optimizer.matrix_rate optimizer.embedding_rate optimizer.head_rate",
        "be positive and finite, if given",
        lambda x: 0.0 < x < math.inf,
    ),
    ("optimizer.beta1 optimizer.beta2 optimizer.ema optimizer.momentum", "lie in [0, 1)", lambda x: 0.0 <= x < 1.0),
    ("optimizer.weight_decay", "be finite, and 0 (none) or more", lambda x: 0.0 <= x < math.inf),
    ("optimizer.clip", "be a norm, or 0 for no clipping", lambda x: x >= 0.0),
    ("optimizer.final_share", "lie in [0, 1]", lambda x: 0.0 <= x <= 1.0),
    ("optimizer.decay_share", "lie in (0, 1]", lambda x: 0.0 < x <= 1.0),
)
"""Limits of a run's numbers, by their names; NaN is within none of them."""


def model_of_size(name: str, **changes: Any) -> ModelConfig:
    """A network of one of the sizes that presets are named after."""
    shape = {key: value for key, value in SIZES[name].items() if key != "length"}
    return ModelConfig(**{**shape, **changes})


def _preset(
    size: str, summary: str, *, dropout: float = 0.0, largest_score: float | None = None, **settings: Any
) -> tuple[str, TrainConfig]:
    model, length = model_of_size(size, dropout=dropout, largest_score=largest_score), SIZES[size]["length"]
    return summary, TrainConfig(out=Path("(give --out)"), model=model, length=length, **settings)


_CHARACTERS: dict[str, Any] = {"data": "python-manual", "method": "bayes-star", "process": ProcessConfig("roulette")}
_LANGUAGE: dict[str, Any] = {
    "data": "hf:Skylion007/openwebtext",
    "dropout": 0.1,
    "text": DataConfig(tokenizer="gpt2"),
    "optimizer": OptimizerConfig(loss="sum"),
    "steps": 400_000,
    "checkpoint_every": 5000,
    "evaluation": EvaluationConfig(every=5000),
}

PRESETS: Mapping[str, tuple[str, TrainConfig]] = {
    "tiny": _preset(
        "tiny",
        "a network for tests: seconds on one core",
        **_CHARACTERS,
        optimizer=OptimizerConfig(rate=3e-3, warmup=20, ema=0.98),
        batch=BatchConfig(size=32),
        evaluation=EvaluationConfig(every=100, sequences=64, samples=1, sample_steps=16),
        steps=200,
        checkpoint_every=100,
    ),
    "char": _preset(
        "char",
        "characters, for a laptop: minutes on two cores",
        **_CHARACTERS,
        optimizer=OptimizerConfig(rate=1e-3, warmup=100, ema=0.995, schedule="cosine"),
        batch=BatchConfig(size=16),
        evaluation=EvaluationConfig(every=250, sequences=32),
        steps=1000,
        checkpoint_every=250,
    ),
    "english-char": _preset(
        "english-char",
        "the network in the box: English in characters, to correct, infill and sample; minutes on one GPU",
        data="corpus",
        method="bayes-star",
        # As many characters replaced as masked: to believe that what is there may be wrong is the job.
        # With half the power a share 1-t of the text is left as it was at t, on average a half of it; with a whole
        # one (1-t)^2, a third.
        process=ProcessConfig("roulette", p_m=0.5, schedule=ScheduleConfig("polynomial", power=0.5)),
        text=DataConfig(tokenizer="char:96", holdout=0.004, workers=8),
        optimizer=OptimizerConfig(rate=1e-3, warmup=500, ema=0.999, schedule="cosine", final_share=0.01),
        batch=BatchConfig(size=256),
        evaluation=EvaluationConfig(every=3000, sequences=512, draws=4, samples=2, sample_steps=256),
        steps=12_000,
        checkpoint_every=6000,
        keep=1,
    ),
    "small": _preset("small", "the paper's network and protocol: 12 blocks of width 768 on GPT-2 tokens", **_LANGUAGE),
    # What was tried is in the lab notes ("Language models in minutes").
    "small-fast": _preset(
        "small",
        "the network of small, trained for the lowest bound after six minutes on one GPU",
        data="corpus",
        largest_score=12.0,
        text=DataConfig(tokenizer="gpt2", workers=8),
        optimizer=OptimizerConfig(
            matrices="muon",
            matrix_rate=2e-3,
            rate=7e-4,
            embedding_rate=2.8e-3,
            head_rate=1.4e-3,
            warmup=200,
            schedule="linear",
            decay_share=0.7,
            loss="sum",
            ema=0.993,
        ),
        batch=BatchConfig(size=256, complementary=True, lowest_time=0.2, highest_time=0.8),
        evaluation=EvaluationConfig(every=2000),
        steps=6500,
        checkpoint_every=2000,
        keep=1,
    ),
    "medium": _preset("medium", "24 blocks of width 1024, sequences of 1024 GPT-2 tokens", **_LANGUAGE),
}
"""Complete runs, each with a line about it; every size of SIZES has one of its name."""

# ----------------------------------------------------------------------------------------------------------------
# From another model


def starting_from(config: TrainConfig, start: str, out: str | None = None) -> TrainConfig:
    """The configuration with the network, tokenizer, length, method and process of a run or model in their places; of
    the run in the folder `out`, if that is what is gone on with and the model that it started from is gone."""
    try:
        folder = locate(start)
    except ValueError:
        own = _begun_from(start, out)
        if own is None:
            raise
        text = dataclasses.replace(config.text, tokenizer=own.text.tokenizer, wrap=own.text.wrap)
        taken = {name: getattr(own, name) for name in ("start", "method", "process", "model", "length")}
        return dataclasses.replace(config, **taken, text=text)
    with reading(folder / CONFIG_FILE):
        record = read_json(folder / CONFIG_FILE)
        network, method = record["network"], record["method"]
        method = {"name": method} if isinstance(method, str) else method
        floor = {name: value for name, value in method.items() if name == "sigma_floor"}  # which is among the process's
        options = {part.name: network[part.name] for part in dataclasses.fields(ModelConfig) if part.name in network}
        return dataclasses.replace(
            config,
            start=start,
            method=method["name"],
            process=_process_of_record({**record["process"], **floor}),
            model=ModelConfig(**options),
            length=record["length"],
            text=dataclasses.replace(config.text, tokenizer=str(folder), wrap=wrap_of(record)),
        )


def _begun_from(start: str, out: str | None) -> TrainConfig | None:
    """The configuration of the run in a folder, if it began from this model."""
    saved = None if out is None else expanded(out) / TRAIN_FILE
    own = None if saved is None or not saved.is_file() else read_config(saved)
    return own if own is not None and own.start == start else None


def _process_of_record(record: Mapping[str, Any]) -> ProcessConfig:
    """The settings of a process that was saved."""
    own = {name: value for name, value in record.items() if name not in ("vocab_size", "schedule", "mask_share")}
    share = record.get("mask_share", {})
    share = share if isinstance(share, Mapping) else {"start": share, "stop": share}
    known = {part.name for part in dataclasses.fields(ProcessConfig)}
    schedule = dict(record.get("schedule", {}))
    usual = {part.name for part in dataclasses.fields(ScheduleConfig)}
    return ProcessConfig(
        **{name: value for name, value in own.items() if name in known},
        **{f"share_{name}": value for name, value in share.items()},
        settings={name: value for name, value in own.items() if name not in known},
        schedule=ScheduleConfig(
            **{name: value for name, value in schedule.items() if name in usual},
            settings={name: value for name, value in schedule.items() if name not in usual},
        ),
    )


# ----------------------------------------------------------------------------------------------------------------
# JSON


def to_json(config: Any) -> Any:
    """Dataclasses and paths as plain JSON values."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {f.name: to_json(getattr(config, f.name)) for f in dataclasses.fields(config)}
    return str(config) if isinstance(config, Path) else config


def read_config(path: Path) -> TrainConfig:
    """The configuration that a run saved."""
    with reading(path):
        return from_json(TrainConfig, read_json(path))


_MAY_DIFFER = (
    *("out", "device", "steps", "evaluation", "checkpoint_every", "keep", "log_every", "resume", "strategy", "compile"),
    *("tensorboard", "on_nonfinite", "text.cache", "text.workers", "text.gpt2_files", "model.checkpoint_blocks"),
    "optimizer.ema_every",
)
"""Settings that a resumed run may change without becoming another run."""
MAY_CHANGE = ("optimizer.decay_share",)
"""Settings that a run may change on its way (training/in_time.py): its checkpoints may have others."""


def settings_of_run(config: TrainConfig) -> dict[str, Any]:
    """The settings, by names such as optimizer.rate, that make a run this one and no other."""
    return {
        name: value
        for name, value in flat(config).items()
        if not any(f"{name}.".startswith(f"{free}.") for free in _MAY_DIFFER)
    }


def same_run(first: TrainConfig, second: TrainConfig) -> list[str]:
    """The names of settings, such as optimizer.rate, that make two configurations different runs."""
    a, b = settings_of_run(first), settings_of_run(second)
    return [name for name in a if a[name] != b[name]]


def flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """A configuration's settings as JSON values, by names with dots such as optimizer.rate."""
    settings: dict[str, Any] = {}
    for part in dataclasses.fields(config):
        value = getattr(config, part.name)
        nested = dataclasses.is_dataclass(value)
        settings |= flat(value, f"{prefix}{part.name}.") if nested else {f"{prefix}{part.name}": to_json(value)}
    return settings
