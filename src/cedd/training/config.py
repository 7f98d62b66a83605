"""The configuration of a training run: typed, complete, and saved with the run. A preset is a full configuration."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cedd.data.data_config import DataConfig
from cedd.models.locate import CONFIG_FILE, TRAIN_FILE, locate
from cedd.models.transformer_config import SIZES, NetworkOptions, TransformerConfig, wrap_of
from cedd.names import ALIASES, suggestion
from cedd.storage import JSONMapping, JSONObject, expanded, from_json, read_json, reading

if TYPE_CHECKING:  # torch is imported when a run is checked or built, so that its settings can be shown without
    from cedd.process import TokenProcess

PrecisionName = Literal["auto", "bf16", "float32"]
"""Precision of matrix products."""


@dataclass(frozen=True)
class ProcessConfig:
    """The noise process."""

    name: str = field(default="absorb", metadata={"option": "process"})
    """absorb, uniform, roulette, eroulette, hybrid, or one that you added to PROCESSES, with its default arguments. Set
    others by --process.NAME VALUE: p-m (roulette: the share of masking among all events, 0.95), p-u (hybrid: the share
    of shuffled tokens at t = 1/2, 0.1), mask-share.start, .stop and .power (eroulette: the share of masks at t is start
    + (stop - start) t^power; 0, 1, 1), and schedule (all but hybrid): log-linear, polynomial, cosine, geometric, or one
    that you added to SCHEDULES, with --process.schedule.eps, .power, .sigma-min and .sigma-max."""
    arguments: dict[str, Any] = field(default_factory=dict, metadata={"hidden": True})
    """Arguments by name, as JSON values; a schedule is a name with its own arguments."""

    def build(self, vocab_size: int) -> TokenProcess:
        """The process over a vocabulary; unknown arguments are refused."""
        from cedd.clocks import PowerShare
        from cedd.process import PROCESSES, process_from_config
        from cedd.schedules import SCHEDULES

        arguments = dict(self.arguments)
        if self.name == "clocks":  # a process that a model's folder describes by its clocks
            return process_from_config({"name": self.name, "vocab_size": vocab_size, **arguments})
        if self.name == "eroulette" and not arguments.keys() & {"p_m", "mask_share"}:
            arguments["mask_share"] = {}
        check_arguments("process", PROCESSES, self.name, arguments)
        for name in ("p_m", "mask_share"):
            if isinstance(share := arguments.get(name), dict):
                check_arguments(f"process.{name}", {name: PowerShare}, name, share)
        if "schedule" in arguments:
            schedule = {"name": "log-linear", **arguments["schedule"]}
            check_arguments("process.schedule", SCHEDULES, schedule["name"], _without("name", schedule))
            arguments["schedule"] = {**_SCHEDULE_DEFAULTS.get(schedule["name"], {}), **schedule}
        try:
            return process_from_config({"name": self.name, "vocab_size": vocab_size, **arguments})
        except ValueError as error:  # named as on the command line
            name, _, rest = str(error).partition(" ")
            option = next((key for key in dotted(arguments, "process.") if key.endswith(f".{name}")), None)
            if option is None or not rest.startswith("must "):
                raise
            raise ValueError(f"--{option.replace('_', '-')} {rest}") from None

    def replaced(self, path: Sequence[str], value: object) -> ProcessConfig:
        """A copy with another value of an argument, or of a nested one (schedule, eps)."""
        arguments = copy.deepcopy(self.arguments)
        place = arguments
        for name in path[:-1]:
            place[name] = inner = place[name] if isinstance(place.get(name), dict) else {}
            place = inner
        place[path[-1]] = value
        return ProcessConfig(self.name, arguments)

    def settings(self) -> JSONObject:
        """Its name and all arguments, including defaults, by dotted names: equal for equal processes."""
        return dotted(_without("vocab_size", self.build(2).config()), "process.")


_SCHEDULE_DEFAULTS: Mapping[str, Mapping[str, float]] = {"geometric": {"sigma_min": 1e-4, "sigma_max": 20.0}}
"""Arguments of schedules that have no default of their own."""


def _without(name: str, record: JSONMapping) -> JSONObject:
    return {key: value for key, value in record.items() if key != name}


def dotted(record: JSONMapping, prefix: str = "") -> JSONObject:
    """The values of nested mappings by dotted names."""
    found: JSONObject = {}
    for name, value in record.items():
        found |= dotted(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


def check_arguments(
    option: str, table: Mapping[str, Callable[..., Any]], name: str, arguments: Mapping[str, Any]
) -> None:
    """Refuse a name that is not in the table, and arguments that its entry does not take.

    `option` is the entry's name on the command line, such as process.
    """
    if name not in table:
        raise ValueError(f"--{option}: invalid choice: {name!r}{suggestion(name, table)}")
    takes = _parameters(table[name])
    for key, value in arguments.items():
        written = f"--{option}.{key.replace('_', '-')}"
        if key not in takes:
            others = [other for other in table if key in _parameters(table[other])]
            whose = f" ({key} is an argument of {' and '.join(others)})" if others else ""
            known = ", ".join(takes) or "none"
            raise ValueError(f"unexpected argument {written}: {name} takes {known}{whose}")
        if isinstance(value, str) and takes[key] in ("float", "int", float, int):
            raise ValueError(f"{written} must be a number (got {value!r})")


def _parameters(made: Callable[..., Any]) -> dict[str, Any]:
    """The arguments of a process or a schedule, without the vocabulary, and their types."""
    parameters = inspect.signature(made).parameters
    return {name: one.annotation for name, one in parameters.items() if name != "vocab_size"}


TRANSFORMER = "transformer"


@dataclass(frozen=True)
class ModelConfig(NetworkOptions):
    """Size and options of the transformer."""

    def build(self, process: TokenProcess, length: int, causal: bool) -> TransformerConfig:
        options: dict[str, Any] = dataclasses.asdict(self) | {
            "time_conditioning": self.time_conditioning and not causal
        }
        has_mask = process.has_mask or causal
        return TransformerConfig(
            vocab_size=process.vocab_size, has_mask=has_mask, length=length, causal=causal, **options
        )


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, as in the paper, optionally with Muon for the matrices of the blocks."""

    matrices: Literal["adamw", "muon"] = "adamw"
    """Optimizer of the blocks' matrices; all other parameters use AdamW. muon may learn more per step at the same
    learning rate, but its steps take longer."""
    momentum: float = 0.95
    """Muon's momentum."""
    matrix_rate: float | None = None
    """Muon's peak learning rate, by default `rate`, with the same warm-up and decay."""
    rate: float = 3e-4
    """AdamW's peak learning rate."""
    embedding_rate: float | None = None
    """AdamW's peak learning rate for the token embedding, by default `rate`."""
    head_rate: float | None = None
    """AdamW's peak learning rate for the vocabulary head, by default `rate`."""
    beta1: float = 0.9
    """AdamW's decay of the mean of the gradients."""
    beta2: float = 0.999
    """AdamW's decay of the mean of their squares."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.0
    """Weight decay of all parameters, multiplied by the learning rate."""
    warmup: int = 2500
    """Steps of linear warm-up."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Learning rate after warm-up: constant, or decaying by a cosine or linearly."""
    final_share: float = 0.0
    """Cosine and linear: final learning rate, one step after the last, as a share of `rate`."""
    decay_share: float = 1.0
    """Linear: share of all steps in which the learning rate decays, at the end."""
    clip: float = 1.0
    """Maximum norm of the gradient; 0 for no clipping."""
    loss: Literal["mean", "sum"] = "mean"
    """The loss that clip and eps refer to: the mean over a sequence's positions, or their sum. The code that the paper
    builds on uses the sum; nearly all of its gradients have a norm above 1 and are clipped."""
    ema: float = 0.9999
    """Decay of the moving average of the weights, which is evaluated and saved."""
    ema_warmup: bool = False
    """Use a smaller decay in the beginning: min(ema, (1+step)/(10+step))."""
    ema_every: int | None = None
    """Steps between updates of the average; by default 1% of 1/(1-ema), or of all steps if these are fewer, but at most
    8."""

    def steps_of_average(self, steps: int) -> int:
        """`ema_every`, or its default in a run of this many steps. (An update of the average costs 3% of a short
        step.)"""
        if self.ema_every is not None:
            return self.ema_every
        remembered = round(1 / (1 - self.ema))
        return min(8, max(1, min(remembered, steps) // 100))

    def of_mean(self, length: int) -> OptimizerConfig:
        """The equivalent options for the mean loss over a sequence, which is trained: clip and eps of a sum are
        divided."""
        parts = length if self.loss == "sum" else 1
        return dataclasses.replace(self, loss="mean", clip=self.clip / parts, eps=self.eps / parts)


@dataclass(frozen=True)
class BatchConfig:
    """Training batches."""

    size: int = 512
    """Sequences per step, over all ranks and micro-batches."""
    accumulate: int = 1
    """Micro-batches per rank and step (gradient accumulation)."""
    times: Literal["stratified", "independent"] = "stratified"
    """How the times of a batch are drawn: one from each of equal parts of their range, or independently."""
    complementary: bool = False
    """Put every sequence into the batch twice, at times t and lowest + highest - t and with complementary masks
    (exactly complementary if the two times add up to 1 and the schedule is log-linear)."""
    lowest_time: float = 1e-3
    """Lowest time."""
    highest_time: float = 1.0
    """Highest time. Below 1, the network is never trained on the strongest noise: correction does not need it, but
    sampling then extrapolates."""
    last_highest_time: float | None = None
    """Highest time at the last step, approached linearly: training starts with strong noise, from which a network
    learns faster, and ends with the weak noise of the task."""
    cut: Literal["once", "anew"] = "once"
    """How the text is split into sequences: at the same positions in every epoch (once), or at new positions in each
    epoch after the first (anew), so that tokens at the ends of sequences also get context on both sides."""


@dataclass(frozen=True)
class EvaluationConfig:
    """Evaluation during training (0 turns a measurement off)."""

    every: int = 1000
    """Steps between estimates of the bound on the validation sequences, with the averaged weights."""
    sequences: int = 256
    """Validation sequences per estimate."""
    draws: int = 4
    """Noise draws per sequence."""
    samples: int = 2
    """Texts sampled at each evaluation."""
    sample_steps: int = 64
    """Sampling steps."""
    patience: int = 0
    """Stop when the bound has not improved for this many evaluations."""


@dataclass(frozen=True)
class AdaptConfig:
    """Adaptation of an autoregressive network.

    The first four determine how a Llama-type network is converted, the others how any network is trained.
    """

    shift: bool = True
    """Predict position i from the output at position i - 1, as the autoregressive network did."""
    start: bool | None = None
    """With a shift: put the network's start token before every sequence, and predict position 0 from it (default: on
    with --block, otherwise off). Without it, position 0 is predicted from its own output."""
    causal_past: bool = True
    """With --block: the clean tokens of past blocks attend to earlier positions only, as in the autoregressive network,
    instead of to all of their own block."""
    mask_id: int | None = None
    """Token whose embedding the mask uses; by default the mask gets a new embedding."""
    anneal: float = 0.0
    """Without --block: the share of the steps in which attention goes from causal to full. Attention to
    each later position is allowed with a probability that rises from 0 to 1, drawn once per step for the whole
    batch."""
    first_block: int | None = None
    """With --block: the block size of the first step, which doubles in equal stages up to --block."""
    growth: float = 0.5
    """With --adapt.first-block: the share of the steps in which blocks are smaller than --block."""
    next_token_weight: float = 0.0
    """The weight of the next-token loss on clean text, under causal attention, which is added to the loss."""


@dataclass(frozen=True)
class TrainConfig:
    """A training run."""

    data: str
    """A text file, a folder of text files, a .jsonl, hf:NAME, or python-manual."""
    out: Path
    """The run's folder."""
    method: str = "cedd-star"
    """sedd, sedds, cedd, cedd-star, ceddt, bayes, bayes-star, bayes-elbo, dfm, ar, or one that you added to METHODS.
    mdlm, udlm and gidd are a method on a process: ceddt on absorb, bayes-elbo on uniform and bayes-elbo on hybrid."""
    process: ProcessConfig = field(default_factory=ProcessConfig, metadata={"prefix": ""})
    """The noise process."""
    block: int | None = None
    """Block diffusion: tokens per block, a divisor of the length. Each block is a diffusion of its own, given the
    blocks before it. A run can start --from a model with another block size or without blocks. By default the whole
    sequence is one block."""
    sigma_floor: float = 0.0015
    """cedd, cedd-star and ceddt on a process without a mask: smallest sigma in the ratios (0.003 in the paper's
    spelling experiments)."""
    architecture: str = TRANSFORMER
    """The network: transformer, with the options --model.*; llama or gpt2, the networks of imported models; or
    package:Class of your own. All but transformer take arguments as --architecture.NAME VALUE or
    --architecture-arguments FILE.json."""
    architecture_arguments: dict[str, Any] = field(default_factory=dict, metadata={"hidden": True})
    """Arguments of your own class, besides vocab_size and has_mask."""
    model: ModelConfig = field(default_factory=lambda: model_of_size("char"))
    """The size and options of the transformer."""
    length: int = 128
    """Tokens per sequence."""
    labels: str | None = None
    """Condition the network on a label per document, from this field of the .jsonl."""
    label_dropout: float = 0.1
    """Share of sequences that are trained without their label, for guidance and for texts of any label."""
    text: DataConfig = field(default_factory=DataConfig)
    """The text: tokenizer, held-out part, cache."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer, learning rates and average of the weights."""
    batch: BatchConfig = BatchConfig()
    """Batches and noise times."""
    adapt: AdaptConfig = AdaptConfig()
    """From an autoregressive network to a diffusion model."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Evaluation during training."""
    steps: int = 10_000
    """Training steps."""
    seed: int = 0
    """Random seed."""
    device: str = "auto"
    """auto, cpu, cuda, or one GPU such as cuda:1."""
    precision: PrecisionName = "auto"
    """Precision of matrix products. auto: bf16 on CUDA (autocast) and on a CPU with hardware support (AMX), float32
    elsewhere."""
    compile: Literal["auto", "off", "on", "graphs", "record"] = "auto"
    """torch.compile (on), also with the step as a CUDA graph (graphs), or the CUDA graph alone, which needs no compiler
    and starts at once (record). auto: graphs on CUDA, off elsewhere."""
    checkpoint_every: int = 1000
    """Steps between checkpoints."""
    keep: int = 3
    """Number of checkpoints to keep."""
    log_every: int = 10
    """Steps between lines of the log."""
    resume: Literal["auto", "never", "must"] = "auto"
    """auto: resume if the folder holds a run of the same configuration, otherwise start one."""
    allow_changes: bool = False
    """Resume with other settings of the optimizer, such as the learning rate or its schedule; they take effect from the
    last checkpoint on."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What to do if the loss or the gradient is not finite: stop the run, or skip the step."""
    strategy: Literal["auto", "ddp", "fsdp"] = "auto"
    """With several ranks: replicate the network (ddp) or shard it (fsdp)."""
    tensorboard: bool = False
    """Also write the log for TensorBoard."""
    start: str | None = field(default=None, metadata={"option": "from", "metavar": "MODEL"})
    """Start from the weights of this run or model, with a new optimizer. Its network, tokenizer, length, method and
    process then replace the preset's. An autoregressive model becomes a diffusion model if --method, --block or
    --process asks for one (by default cedd-star on absorb). The network may be deeper, by a multiple of its blocks."""

    @classmethod
    def preset(cls, name: str, **settings: Any) -> TrainConfig:
        """The configuration of a preset with other settings: preset("tiny", data="book.txt", out="runs/book")."""
        if name not in PRESETS:
            raise ValueError(f"invalid preset: {name!r}{suggestion(name, PRESETS)}")
        config = dataclasses.replace(PRESETS[name][1], **settings)
        return config if "process" in settings else with_alias(config)

    def network(self, process: TokenProcess, causal: bool, labels: int = 0) -> tuple[str, JSONObject]:
        """The architecture of the network, and its arguments. Networks of autoregressive methods (`causal`) have a
        start token, which is the mask."""
        if self.architecture == TRANSFORMER:
            options = self.model.build(process, self.length, causal)
            return TRANSFORMER, dataclasses.asdict(dataclasses.replace(options, labels=labels))
        states = {"vocab_size": process.vocab_size, "has_mask": process.has_mask or causal}
        own = self.architecture_arguments
        if not causal and is_autoregressive(own):
            own = adapted(own, self.adapt, self.block)
        return self.architecture, {**own, **states}

    def check(self) -> None:
        """Refuse invalid settings."""
        self._check_names()
        values = flat(self)
        for names, words, holds in _LIMITS:
            for name in names:
                if values[name] is not None and not holds(values[name]):
                    raise ValueError(f"{name} must {words} (got {values[name]})")
        if self.evaluation.patience > 0 and self.evaluation.every < 1:
            raise ValueError("evaluation.patience needs evaluations: set evaluation.every too")
        low, high, last = self.batch.lowest_time, self.batch.highest_time, self.batch.last_highest_time
        for name, time in {"highest_time": high, "last_highest_time": high if last is None else last}.items():
            if not 0.0 <= low < time <= 1.0:
                raise ValueError(
                    f"batch.lowest_time must be in [0, 1) and below batch.{name}, at most 1 (got {low} and {time})"
                )
        check_growth(self.adapt, self.block)
        self._check_labels()
        if self.optimizer.steps_of_average(self.steps) > self.steps:
            raise ValueError(
                f"optimizer.ema_every must be at most the number of steps, {self.steps}, or the saved average "
                f"is never updated (got {self.optimizer.ema_every})"
            )
        if self.batch.complementary and self.batch.size % 2:
            raise ValueError(f"batch.complementary needs an even batch.size (got {self.batch.size})")
        if self.batch.size % self.batch.accumulate:
            raise ValueError(
                f"batch.size must be a multiple of batch.accumulate = {self.batch.accumulate} (got {self.batch.size})"
            )

    def _check_labels(self) -> None:
        """Refuse labels that the network cannot be conditioned on."""
        if self.labels is None:
            return
        from cedd.methods import get_method

        if self.architecture != TRANSFORMER or not get_method(self.method).dynamics.noisy:
            raise ValueError("labels need the architecture transformer and a diffusion method, not ar")
        if not self.model.time_conditioning:
            raise ValueError("labels are an input of the time conditioning; remove --no-model.time-conditioning")

    def _check_names(self) -> None:
        """Refuse unknown methods, processes and schedules."""
        from cedd.methods import get_method

        get_method(self.method).in_blocks(self.block).blocks_of(self.length)
        process, alias = self.process, ALIASES.get(self.method.lower())
        if alias is not None and process.name != alias.process:
            raise ValueError(
                f"{self.method} is {alias.method} on {alias.process}: leave the process out, or use {alias.method} on "
                f"{process.name}"
            )
        process.build(2)

    def check_shares(self, ranks: int) -> None:
        """Refuse a batch size that this number of ranks cannot share."""
        batch = self.batch
        needed = ranks * math.lcm(1 + batch.complementary, batch.accumulate)
        if batch.size % needed:
            pairs = ", in pairs of complementary masks" if batch.complementary else ""
            parts = f", in {batch.accumulate} micro-batches each" if batch.accumulate > 1 else ""
            whole = f"batch.size {batch.size} cannot be shared by {ranks} rank{'s' * (ranks > 1)}"
            raise ValueError(f"{whole}{pairs}{parts}: use a multiple of {needed}")


_LIMITS: tuple[tuple[tuple[str, ...], str, Callable[[float], bool]], ...] = (
    (
        ("steps", "length", "checkpoint_every", "keep", "log_every", "batch.size", "batch.accumulate"),
        "be at least 1",
        lambda x: x >= 1,
    ),
    (("evaluation.sequences", "evaluation.draws", "evaluation.sample_steps"), "be at least 1", lambda x: x >= 1),
    (
        ("evaluation.every", "evaluation.samples", "evaluation.patience"),
        "be at least 0, which turns it off",
        lambda x: x >= 0,
    ),
    (("seed",), "be between 0 and 2^63 - 1", lambda x: 0 <= x < 2**63),
    (("optimizer.warmup",), "be at least 0", lambda x: x >= 0),
    (("optimizer.ema_every", "adapt.first_block"), "be at least 1, if given", lambda x: x >= 1),
    (("optimizer.rate", "optimizer.eps"), "be positive and finite", lambda x: 0.0 < x < math.inf),
    (
        ("optimizer.matrix_rate", "optimizer.embedding_rate", "optimizer.head_rate"),
        "be positive and finite, if given",
        lambda x: 0.0 < x < math.inf,
    ),
    (
        ("optimizer.beta1", "optimizer.beta2", "optimizer.ema", "optimizer.momentum"),
        "be in [0, 1)",
        lambda x: 0.0 <= x < 1.0,
    ),
    (
        ("optimizer.weight_decay", "adapt.next_token_weight"),
        "be finite, and 0 (none) or more",
        lambda x: 0.0 <= x < math.inf,
    ),
    (("optimizer.clip",), "be a norm, or 0 for no clipping", lambda x: x >= 0.0),
    (("optimizer.decay_share",), "be in (0, 1]", lambda x: 0.0 < x <= 1.0),
    (
        ("optimizer.final_share", "label_dropout", "adapt.anneal", "adapt.growth"),
        "be in [0, 1]",
        lambda x: 0.0 <= x <= 1.0,
    ),
)
"""Limits of numeric settings, by name; NaN is always refused."""


def with_alias(config: TrainConfig) -> TrainConfig:
    """The configuration with the process that a published name of a method, such as mdlm, implies."""
    alias = ALIASES.get(config.method.lower())
    return config if alias is None else dataclasses.replace(config, process=ProcessConfig(alias.process))


def model_of_size(name: str, **changes: Any) -> ModelConfig:
    """A network of one of the sizes that presets are named after."""
    shape = {key: value for key, value in SIZES[name].items() if key != "length"}
    return ModelConfig(**{**shape, **changes})


def _preset(
    size: str, summary: str, *, dropout: float = 0.0, largest_score: float | None = None, **settings: Any
) -> tuple[str, TrainConfig]:
    model, length = model_of_size(size, dropout=dropout, largest_score=largest_score), SIZES[size]["length"]
    return summary, TrainConfig(out=Path("(give --out)"), model=model, length=length, **settings)


_CHARACTERS: JSONObject = {"data": "python-manual", "method": "bayes-star", "process": ProcessConfig("roulette")}
_LANGUAGE: JSONObject = {
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
        "a tiny network for tests: seconds on one core",
        **_CHARACTERS,
        optimizer=OptimizerConfig(rate=3e-3, warmup=20, ema=0.98),
        batch=BatchConfig(size=32),
        evaluation=EvaluationConfig(every=100, sequences=64, samples=1, sample_steps=16),
        steps=200,
        checkpoint_every=100,
    ),
    "char": _preset(
        "char",
        "a character-level model for a laptop: minutes on two cores",
        **_CHARACTERS,
        optimizer=OptimizerConfig(rate=1e-3, warmup=100, ema=0.995, schedule="cosine"),
        batch=BatchConfig(size=16),
        evaluation=EvaluationConfig(every=250, sequences=32),
        steps=1000,
        checkpoint_every=250,
    ),
    "english-char": _preset(
        "english-char",
        "a model like the packaged english-char (correction, infilling, sampling): minutes on one GPU",
        data="corpus",
        method="bayes-star",
        # Half of the noise replaces characters, since a corrector must learn that visible characters may be wrong.
        # With power 0.5 a share 1-t of the text is unchanged at time t, a half on average; with power 1 it would be
        # (1-t)^2, a third on average.
        process=ProcessConfig("roulette", {"p_m": 0.5, "schedule": {"name": "polynomial", "power": 0.5}}),
        text=DataConfig(tokenizer="char:96", holdout=0.004, workers=8),
        optimizer=OptimizerConfig(rate=1e-3, warmup=500, ema=0.999, schedule="cosine", final_share=0.01),
        batch=BatchConfig(size=256),
        evaluation=EvaluationConfig(every=3000, sequences=512, draws=4, samples=2, sample_steps=256),
        steps=12_000,
        checkpoint_every=6000,
        keep=1,
    ),
    "small": _preset("small", "the paper's network and protocol: 12 blocks of width 768 on GPT-2 tokens", **_LANGUAGE),
    # Tuning: dev/lab-notes.md ("Language models in minutes").
    "small-fast": _preset(
        "small",
        "the network of small, tuned for the lowest bound after six minutes on one GPU",
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
    "adapt": _preset(
        "small",
        "an autoregressive network (--from) further, as a diffusion model, in minutes on one GPU",
        data="corpus",
        text=DataConfig(workers=8),
        optimizer=OptimizerConfig(rate=8e-4, warmup=100, schedule="linear", loss="sum", ema=0.993),
        batch=BatchConfig(size=256, complementary=True, lowest_time=0.2, highest_time=0.8),
        evaluation=EvaluationConfig(every=1000, samples=0),
        steps=6000,
        checkpoint_every=2000,
        keep=1,
    ),
    "medium": _preset("medium", "24 blocks of width 1024, sequences of 1024 GPT-2 tokens", **_LANGUAGE),
}
"""Complete configurations, with a summary; there is one for every size in SIZES."""

# ----------------------------------------------------------------------------------------------------------------
# From another model


def starting_from(config: TrainConfig, start: str, out: str | None = None) -> TrainConfig:
    """The configuration with the network, tokenizer, length, method and process of another model; of the run in the
    folder `out`, if that is being resumed and the model has been removed."""
    try:
        folder = locate(start)
    except ValueError:
        own = begun_from(start, out)
        if own is None:
            raise
        text = dataclasses.replace(config.text, tokenizer=own.text.tokenizer, wrap=own.text.wrap)
        names = ("start", "method", "block", "sigma_floor", "process", "model", "length")
        taken = {name: getattr(own, name) for name in (*names, "architecture", "architecture_arguments")}
        return dataclasses.replace(config, **taken, text=text)
    from cedd.models.description import read_description  # imports numpy, which `cedd --help` does not need

    record = read_description(folder)
    with reading(folder / CONFIG_FILE):
        network, called = record["network"], record["method"]
        method: JSONObject = {"name": called} if isinstance(called, str) else called
        meaning = method.get("parameterization", {})
        process = dict(record["process"])
        return dataclasses.replace(
            config,
            start=start,
            method=method["name"],
            block=method.get("block"),
            sigma_floor=meaning.get("sigma_floor", config.sigma_floor),
            process=ProcessConfig(process.pop("name"), _without("vocab_size", process)),
            **_network_of_record(config, record["architecture"], network),
            # An imported network reads what its context holds, and was trained on other lengths.
            length=min(config.length, record["length"]) if "imported" in record else record["length"],
            text=dataclasses.replace(config.text, tokenizer=str(folder), wrap=wrap_of(record)),
        )


def _network_of_record(config: TrainConfig, architecture: str, network: JSONMapping) -> JSONObject:
    """The settings of a saved network."""
    if architecture == TRANSFORMER:
        options = {part.name: network[part.name] for part in dataclasses.fields(ModelConfig) if part.name in network}
        return {"architecture": TRANSFORMER, "architecture_arguments": {}, "model": ModelConfig(**options)}
    own = {name: value for name, value in network.items() if name not in ("vocab_size", "has_mask")}
    if "weights_dtype" in own:
        own["weights_dtype"] = "float32"  # to learn in
    return {"architecture": architecture, "architecture_arguments": own, "model": config.model}


def is_autoregressive(arguments: JSONMapping) -> bool:
    """Whether the arguments of a Llama-type architecture are those of an autoregressive network."""
    return arguments.get("attention") == "causal"


def adapted(arguments: JSONMapping, adapt: AdaptConfig, block: int | None) -> JSONObject:
    """The arguments of an autoregressive network's architecture as those of a diffusion model with its weights."""
    start = arguments.get("mask_row")  # what an autoregressive network reads its start token from
    starts = adapt.start if adapt.start is not None else block is not None and start is not None
    if adapt.shift and starts and start is None:
        raise ValueError("adapt.start needs a network with a start token of its vocabulary; use --no-adapt.start")
    return {
        **arguments,
        "attention": "full" if block is None else "block-causal",
        "block": block or 1,
        "causal_past": block is not None and adapt.causal_past,
        "shift": adapt.shift,
        "start_row": start if adapt.shift and starts else None,
        "optional_start": False,
        "mask_row": adapt.mask_id,
    }


def block_sizes(adapt: AdaptConfig, block: int) -> list[int]:
    """The block sizes of a run, from the first to its own."""
    sizes = [adapt.first_block or block]
    while sizes[-1] < block:
        sizes.append(2 * sizes[-1])
    return sizes


def check_growth(adapt: AdaptConfig, block: int | None) -> None:
    """Refuse a first block that does not double up to the run's."""
    if adapt.first_block is None:
        return
    if block is None:
        raise ValueError(f"adapt.first_block needs a block to grow to (got {adapt.first_block}); add --block")
    if adapt.first_block > block or block_sizes(adapt, block)[-1] != block:
        raise ValueError(f"adapt.first_block must be block {block} divided by a power of two (got {adapt.first_block})")


def begun_from(start: str, out: str | None) -> TrainConfig | None:
    """The configuration of the run in a folder, if it started from this model."""
    saved = None if out is None else expanded(out) / TRAIN_FILE
    own = None if saved is None or not saved.is_file() else read_config(saved)
    return own if own is not None and own.start == start else None


# ----------------------------------------------------------------------------------------------------------------
# JSON


def to_json(config: Any) -> Any:
    """Dataclasses and paths as JSON values."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {f.name: to_json(getattr(config, f.name)) for f in dataclasses.fields(config)}
    return str(config) if isinstance(config, Path) else config


def read_config(path: Path) -> TrainConfig:
    """The configuration saved by a run."""
    with reading(path):
        return from_json(TrainConfig, read_json(path))


_MAY_DIFFER = (
    *("out", "device", "steps", "evaluation", "checkpoint_every", "keep", "log_every", "resume", "strategy", "compile"),
    *("tensorboard", "on_nonfinite", "text.cache", "text.workers", "text.gpt2_files", "model.checkpoint_blocks"),
    *("optimizer.ema_every", "allow_changes"),
)
"""Settings that may differ when a run is resumed."""
MAY_CHANGE = ("optimizer.decay_share",)
"""Settings that a run may change by itself (`time_limit`), so that its checkpoints may have other values."""


def may_be_changed(name: str) -> bool:
    """Whether a setting may differ on a resume with `allow_changes`. The optimizer of the matrices may not, since its
    state is in the checkpoints."""
    return name.startswith("optimizer.") and name != "optimizer.matrices"


NAMES_OF_FILES = ("data", "text.validation", "text.tokenizer", "start")
"""Settings that name files. A resume may use other names for the same content."""


def settings_of_run(config: TrainConfig) -> JSONObject:
    """The settings that identify a run, by dotted names such as optimizer.rate."""
    settings = {**flat(config), **config.process.settings()}
    del settings["process.arguments"]
    return {
        name: value
        for name, value in settings.items()
        if not any(f"{name}.".startswith(f"{free}.") for free in _MAY_DIFFER)
    }


def differing_settings(first: TrainConfig, second: TrainConfig) -> list[str]:
    """The names of settings in which two configurations are different runs."""
    a, b = settings_of_run(first), settings_of_run(second)
    return [name for name in {**a, **b} if a.get(name) != b.get(name)]


def unused_settings(config: TrainConfig) -> dict[str, str]:
    """Settings that have no effect together with the others, by name, and why."""
    from cedd.methods import get_method

    found = dict[str, str]()

    def unless(used: bool, why: str, *names: str) -> None:
        if not used:
            found.update(dict.fromkeys(names, why))

    optimizer, text = config.optimizer, config.text
    times = ("batch.times", "batch.lowest_time", "batch.highest_time", "batch.last_highest_time")
    unless(get_method(config.method).dynamics.noisy, f"with the method {config.method}", *times)
    muon = ("optimizer.momentum", "optimizer.matrix_rate")
    unless(optimizer.matrices == "muon", "without optimizer.matrices muon", *muon)
    unless(optimizer.schedule != "constant", "on a constant optimizer.schedule", "optimizer.final_share")
    unless(optimizer.schedule == "linear", "unless optimizer.schedule is linear", "optimizer.decay_share")
    unless(text.validation is None, "with text.validation", "text.holdout", "text.holdout_by")
    unless(config.labels is None, "with labels, where documents of each label are held out", "text.holdout_by")
    unless(config.labels is not None, "without labels", "label_dropout")
    unless(text.tokenizer.startswith("gpt2"), f"with the tokenizer {text.tokenizer}", "text.gpt2_files")
    measured = ("evaluation.sequences", "evaluation.draws", "evaluation.samples", "evaluation.sample_steps")
    unless(config.evaluation.samples > 0, "without evaluation.samples", "evaluation.sample_steps")
    unless(config.evaluation.every > 0, "without evaluation.every", *measured)
    adapting = config.architecture != TRANSFORMER and is_autoregressive(config.architecture_arguments)
    adapting = adapting and get_method(config.method).dynamics.noisy
    names = ("adapt.shift", "adapt.start", "adapt.causal_past", "adapt.mask_id")
    unless(adapting, "unless a diffusion method starts --from an autoregressive Llama-type network", *names)
    unless(config.adapt.shift, "without adapt.shift", "adapt.start")
    unless(config.block is not None, "without block", "adapt.causal_past", "adapt.first_block", "adapt.growth")
    unless(config.block is None, "with block", "adapt.anneal")
    unless(config.adapt.first_block is not None, "without adapt.first_block", "adapt.growth")
    network = (f"model.{part.name}" for part in dataclasses.fields(config.model))
    unless(config.architecture == TRANSFORMER, f"on the architecture {config.architecture}", *network)
    return found


def flat(config: Any, prefix: str = "") -> JSONObject:
    """All settings as JSON values, by dotted names such as optimizer.rate."""
    settings: JSONObject = {}
    for part in dataclasses.fields(config):
        value = getattr(config, part.name)
        nested = dataclasses.is_dataclass(value)
        settings |= flat(value, f"{prefix}{part.name}.") if nested else {f"{prefix}{part.name}": to_json(value)}
    return settings
