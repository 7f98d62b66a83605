"""The cells of the language benchmark: METHOD/PROCESS[/BLOCK][@LENGTH][+RECIPE], and how each is trained."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from cells import CellArguments

from cedd.evaluation.generative import refuse_missing_judge
from cedd.methods import get_method
from cedd.models.transformer import SIZES
from cedd.training.config import PRESETS, DataConfig, EvaluationConfig, ProcessConfig, TrainConfig, flat, from_json

RECIPE = PRESETS["small-fast"][1]
"""The settings that learnt most in minutes (dev/lab-notes.md)."""
RECIPE_PARTS = ("model.", "optimizer.", "batch.")
"""Settings that belong to a recipe, by the beginnings of their names."""
USUAL = flat(TrainConfig("", Path()))
"""Settings by name as they are by default, and so were before the package had them."""
WARM_UP, AVERAGE = 0.03, 0.02
"""The shares of all steps in which the rate rises, and that the average of the weights remembers."""
ALL_TIMES = {"batch.lowest_time": 1e-3, "batch.highest_time": 1.0}
SUITED: Mapping[str, Mapping[str, Any]] = {
    "sedd": ALL_TIMES,
    "sedds": ALL_TIMES,
    "dfm": ALL_TIMES,
    "uniform": ALL_TIMES,
    "roulette": ALL_TIMES,
    "ar": {"batch.complementary": False},
}
"""What suits a method, or a process, instead. The recipe's times were found for cross entropy on absorb; score entropy
is the bound itself and wants all of them, and where tokens are replaced a network must know how few at small times."""
RECIPES: Mapping[str, Mapping[str, Any]] = {
    "paper": {
        "model.dropout": 0.1,
        "model.largest_score": None,
        "optimizer.matrices": "adamw",
        "optimizer.matrix_rate": None,
        "optimizer.embedding_rate": None,
        "optimizer.head_rate": None,
        "optimizer.rate": 3e-4,
        "optimizer.warmup": 2500,
        "optimizer.schedule": "constant",
        "optimizer.decay_share": 1.0,
        "optimizer.loss": "sum",
        "optimizer.ema": 0.9999,
        "optimizer.ema_warmup": True,
        "batch.complementary": False,
        **ALL_TIMES,
    }
}
"""Settings of a cell by the name after its +: the paper's own, at our batch and number of steps."""
PROCESSES: Mapping[str, ProcessConfig] = {
    "absorb": ProcessConfig("absorb"),
    "roulette": ProcessConfig("roulette", {"p_m": 0.95}),
    "uniform": ProcessConfig("uniform"),
    **{f"roulette-{p_m}": ProcessConfig("roulette", {"p_m": p_m}) for p_m in (0.65, 0.35, 0.05)},
    "kappa-t": ProcessConfig("absorb"),
    "kappa-t2": ProcessConfig("absorb", {"schedule": {"name": "polynomial", "power": 2.0}}),
    "": ProcessConfig("absorb"),
}
"""Processes by the name in a cell; flow matching's are its kappa, and ar has none."""
IN_BLOCKS: Mapping[str, Mapping[str, Any]] = {"absorb": {"model.time_input": "none"}}
"""What suits a process in blocks: without a time input, the likelihood of a block is a sum over 2^b contexts."""
CORRECTORS: Mapping[str, Mapping[str, float | None]] = {"dfm": {"": None, "corrector": 1.0}}
"""Methods whose network is measured and sampled in several ways, by the name of each."""

SHORT, LONG = 128, 1024
METHODS = ("sedd", "sedds", "cedd", "cedd-star", "bayes-star", "ceddt", "dfm", "ar")
MAIN = (
    *(f"{method}/{process}" for process in ("absorb", "roulette", "uniform") for method in METHODS[:5]),
    "ceddt/absorb",
    "dfm/kappa-t",
    "dfm/kappa-t2",
    "ar",
)
SHARES = tuple(f"cedd-star/roulette{share}" for share in ("", "-0.65", "-0.35", "-0.05"))
LONG_CELLS = tuple(f"{cell}@{LONG}" for cell in ("sedds/absorb", "cedd-star/absorb", "ceddt/absorb", "ar"))
BLOCK_CELLS = (
    *(f"cedd-star/absorb/{block}" for block in (1, 4, 16, SHORT)),
    "bayes-star/roulette/16",
    f"cedd-star/absorb/16@{LONG}",
)
"""Block diffusion; one block of 128 tokens is full diffusion, without a time input as the others."""
FIRST = ("ar", "cedd-star/absorb", "sedds/absorb", "cedd/absorb", "sedd/absorb")
"""The judge and the paper's order on absorb."""


@dataclass(frozen=True, kw_only=True)
class Arguments(CellArguments):
    """example: python benchmarks/language.py --only ar cedd-star/absorb --budget 560 --cache /tmp/cedd --workers 16

    Train and measure the cells METHOD/PROCESS[/BLOCK][@LENGTH][+RECIPE] of the language tables.
    """

    only: tuple[str, ...] = tuple(dict.fromkeys((*FIRST, *MAIN, *SHARES, *LONG_CELLS, *BLOCK_CELLS)))
    """The cells to run, in this order; none for the judges alone. +paper: the paper's own recipe."""
    data: Path | None = None
    """Folder with corpus/, eval/ and gpt2-bpe/ (default: CEDD_DATA). Without it, only the held-out documents of
    --corpus are measured, and --tokenizer gpt2 is not available."""
    corpus: tuple[Path, ...] = ()
    """Text files to train on, .txt, .txt.xz or .jsonl (default: those of corpus/ in --data)."""
    tokenizer: str = "gpt2"
    """Tokenizer, as in cedd train."""
    cache: Path | None = None
    """Folder for the tokens (default: CEDD_CACHE or ~/.cache/cedd)."""
    workers: int = 1
    """Processes that make tokens."""
    holdout: float = 0.01
    """The share of documents of each file that is held out."""
    size: Literal["tiny", "char", "small", "medium"] = "small"
    """Size of the network: a preset of cedd train."""
    length: int = SHORT
    """Tokens per sequence in cells without @."""
    tokens: int = 256 * SHORT
    """Tokens per step, for any length."""
    steps: int = 5000
    """Training steps per cell."""
    points: int = 8
    """Tests on the way, for the curve."""
    point_blocks: int = 512
    """Blocks of each held-out text in such a test."""
    blocks: int = 4096
    """The most blocks of a text in the final test, evenly spread."""
    draws: int = 4
    """Noisy versions of each block in the final test."""
    orders: int = 0
    """Orders per block of the importance-weighted bound in the final test of models that only mask; 0: none."""
    order_blocks: int = 500
    """Blocks of a text for that bound, evenly spaced among those of the final test."""
    order_texts: tuple[str, ...] = ()
    """Texts for that bound, such as wikitext2 and books (default: all)."""
    sampled_tokens: int = 8192
    """Tokens sampled for each number of steps."""
    sampler_steps: tuple[int, ...] = (32, 128, 1024)
    """Numbers of steps, each for samples of its own. Cells in blocks take one step per token."""
    speed_batches: tuple[int, ...] = (1, 8, 32)
    """Texts drawn at once when the speed of cells in blocks is measured."""
    judge: dict[str, str] = field(default_factory=dict)
    """Judges of samples besides the cell ar, NAME FILE: a .gguf file or a folder for the transformers library."""
    judge_batch: int = 8
    """Samples judged at once."""
    out: Path = Path("runs/language")
    results: Path = Path("benchmarks/results/language.json")

    def check(self) -> None:
        for cell in self.only:
            read_cell(cell)
        counts = ("steps", "points", "point_blocks", "blocks", "draws", "sampled_tokens", "workers", "tokens", "length")
        counts += ("order_blocks",)
        if self.orders < 0:
            raise ValueError(f"--orders must be at least 1, or 0 for none (got {self.orders})")
        for name in counts:
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1 (got {getattr(self, name)})")
        if not 0 < self.holdout < 1:
            raise ValueError(f"--holdout is a share of the documents between 0 and 1 (got {self.holdout})")
        if not self.sampler_steps or min(self.sampler_steps) < 1:
            raise ValueError("--sampler-steps must be at least 1 each")
        if any(batch < 1 for batch in self.speed_batches):
            raise ValueError("--speed-batches must be at least 1 each")
        if "ar" in self.judge:
            raise ValueError("--judge ar: the judge ar is the cell of that name; give yours another")
        for judge in self.judge.values():
            refuse_missing_judge(judge)
        for cell in self.only:
            length = read_cell(cell).length or self.length
            if self.tokens % length or self.tokens < 2 * length:
                raise ValueError(
                    f"--tokens must be a multiple of {length} ({cell}), twice it at least (got {self.tokens})"
                )
            configuration(self, cell).check()
        super().check()

    def extras(self, cell: str) -> Path:
        """The file with the arrays of a cell: the bound of every block and the sampled tokens."""
        return self.results.with_suffix("") / f"{file_name(cell)}.npz"


class Cell(NamedTuple):
    """One model of the tables."""

    method: str
    process: str
    length: int | None
    recipe: str
    block: int | None = None

    @property
    def name(self) -> str:
        made = "/".join(str(part) for part in (self.method, self.process, self.block) if part)
        return made + (f"@{self.length}" if self.length else "") + (f"+{self.recipe}" if self.recipe else "")


def read_cell(text: str) -> Cell:
    """METHOD/PROCESS[/BLOCK][@LENGTH][+RECIPE]; ar and ar@LENGTH have no process and no blocks."""
    words, plus, recipe = text.partition("+")
    words, at, length = words.partition("@")
    method, _, process = words.partition("/")
    process, slash, block = process.partition("/")
    with contextlib.suppress(ValueError):
        cell = Cell(
            get_method(method).name, process, int(length) if at else None, recipe, int(block) if slash else None
        )
        fits = cell.method in METHODS and process in PROCESSES and (recipe in RECIPES or not plus)
        has_kappa, has_none = process.startswith("kappa"), not process
        fits &= has_kappa == (cell.method == "dfm") and has_none == (cell.method == "ar")
        if fits and cell.length != 0 and cell.block != 0 and not (slash and has_none):
            return cell
    processes = ", ".join(filter(None, PROCESSES))
    raise ValueError(
        f"a cell is METHOD/PROCESS of {', '.join(METHODS)} and {processes} (kappa for dfm, none for ar), with /BLOCK, "
        f"@LENGTH, and +{', +'.join(RECIPES)} (got {text!r})"
    )


def file_name(cell: str) -> str:
    """A cell as the name of a file or folder."""
    return read_cell(cell).name.replace("/", "-")


def changed(config: TrainConfig, settings: Mapping[str, Any]) -> TrainConfig:
    """A configuration with settings by their names with dots in their place."""
    for name, value in settings.items():
        part, _, leaf = name.partition(".")
        config = replace(config, **{part: replace(getattr(config, part), **{leaf: value})})
    return config


def recipe(arguments: Arguments, length: int) -> TrainConfig:
    """The configuration shared by all cells, with sequences of `length` tokens."""
    steps = arguments.steps
    shape = {name: value for name, value in SIZES[arguments.size].items() if name != "length"}
    average = max(0.0, 1 - 1 / max(1.0, AVERAGE * steps))
    return replace(
        RECIPE,
        model=replace(RECIPE.model, **shape),
        length=length,
        steps=steps,
        optimizer=replace(RECIPE.optimizer, warmup=max(1, round(WARM_UP * steps)), ema=average),
        batch=replace(RECIPE.batch, size=arguments.tokens // length),
    )


def configuration(arguments: Arguments, cell: str) -> TrainConfig:
    """The run of one cell; its text is given to the trainer, so that no folder of a machine is part of it."""
    method, process, length, own, block = read_cell(cell)
    chosen = PROCESSES[process]
    base = recipe(arguments, length or arguments.length)
    blocks = {} if block is None else IN_BLOCKS.get(chosen.name, {})
    for settings in (SUITED.get(method, {}), SUITED.get(chosen.name, {}), blocks, RECIPES.get(own, {})):
        base = changed(base, settings)
    return replace(
        base,
        data="the benchmark's corpus",
        out=arguments.out / file_name(cell),
        method=method,
        process=chosen,
        block=block,
        text=DataConfig(arguments.tokenizer, holdout=arguments.holdout, holdout_by="documents"),
        evaluation=EvaluationConfig(every=max(1, -(-base.steps // arguments.points)), samples=0),
        checkpoint_every=base.steps,
        keep=1,
        log_every=min(50, max(1, base.steps // 10)),
        seed=arguments.seed,
        device=arguments.device,
    )


def own_settings(record: Mapping[str, Any], plain: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a row that are not the recipe's, by name."""
    config = from_json(TrainConfig, record["config"])
    own = flat(config)
    names = [name for name in own if name.startswith(RECIPE_PARTS) and name != "batch.size"]
    return {name.partition(".")[2]: own[name] for name in names if own[name] != plain.get(name, USUAL[name])}


def common_settings(arguments: Arguments) -> dict[str, Any]:
    """The recipe's settings, by name, as the protocol has them."""
    values = flat(recipe(arguments, arguments.length))
    return {name: value for name, value in values.items() if name.startswith(RECIPE_PARTS)}
