"""The cells of the spelling benchmark: METHOD/PROCESS[/TIME][+RECIPE], the paper's figures, and how each is trained."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from cells import CellArguments

from cedd.methods import get_method
from cedd.training.config import (
    BatchConfig,
    DataConfig,
    EvaluationConfig,
    OptimizerConfig,
    ProcessConfig,
    TrainConfig,
    differing_settings,
    from_json,
    model_of_size,
    settings_of_run,
)

METHODS = ("sedd", "sedds", "cedd", "cedd-star", "bayes", "bayes-star")
PROCESSES: tuple[str, ...] = ("uniform", "roulette")
TRAINING_BOOK = "war_and_peace"
TEST_BOOKS = {"pap": "pride_and_prejudice", "cap": "crime_and_punishment"}
CHECKPOINT = 30_000
"""Steps between checkpoints: gigabytes that a run of 25,000 does without, a longer one not."""
PAPER: Mapping[int, Mapping[str, tuple[float, float]]] = {
    25_000: {
        "sedd/uniform": (86.9, 87.5),
        "sedds/uniform": (86.4, 87.1),
        "cedd/uniform": (88.5, 89.2),
        "cedd-star/uniform": (89.5, 89.5),
        "sedd/roulette": (85.1, 85.8),
        "sedds/roulette": (86.5, 87.2),
        "cedd/roulette": (88.9, 89.7),
        "cedd-star/roulette": (89.7, 90.3),
    },
    50_000: {
        "sedd/uniform": (89.9, 90.3),
        "cedd-star/uniform": (90.7, 91.2),
        "sedd/roulette": (87.9, 88.6),
        "cedd-star/roulette": (90.8, 91.3),
    },
}
"""Percent of corrupted positions restored in Pride and Prejudice and in Crime and Punishment, by training steps."""


MUON = {
    "matrices": "muon",
    "rate": 1e-3,
    "schedule": "cosine",
    "ema": 0.999,
    "clip": 128.0,
    "dropout": 0.05,
    "cut": "anew",
}
FAST = MUON | {"warmup": 1000, "dropout": 0.0, "last_time": 0.1}
RECIPES: Mapping[str, Mapping[str, Any]] = {
    "muon": MUON,
    "fast": FAST,
    "faster": FAST | {"rate": 2e-3},
    "long": FAST | {"dropout": 0.1, "steps": 50_000},
    "float32": {"float32_residual": True},
    "twice": {"rate": 6e-4},
    "half": {"rate": 1.5e-4},
    "quarter": {"rate": 7.5e-5},
    "crlf": {"form": "crlf"},
    "50000": {"steps": 50_000},
}
"""Settings of a cell by the name after its +."""
OURS = "bayes-star/roulette/0.45+long"


@dataclass(frozen=True, kw_only=True)
class Arguments(CellArguments):
    """example: python benchmarks/spelling.py --only cedd/uniform --vocabulary 512 --size tiny --steps 20 --blocks 9

    Train and test the cells METHOD/PROCESS[/TIME][+RECIPE] of the paper's spelling tables, and of ours.
    """

    only: tuple[str, ...] = (
        OURS,
        "bayes-star/roulette/0.45+fast",
        *(f"{method}/{process}" for process in PROCESSES for method in reversed(METHODS)),
        "sedds/roulette+half",
        "sedd/roulette+half",
        "cedd-star/uniform+50000",
        "sedd/uniform+50000",
        "cedd-star/roulette+50000",
        "sedd/roulette+50000",
    )
    """The cells to run, in this order. After a +, a recipe's settings count, whatever the options below say. Ours are
    fast (Muon, rate 1e-3 by a cosine after 1,000 steps, EMA 0.999, clip 128, no dropout, cut anew, --last-time 0.1)
    and long (fast with 50,000 steps and dropout 0.1). The others are faster (fast at 2e-3), muon (an earlier one:
    dropout 0.05, one range of times), twice, half and quarter (6e-4, 1.5e-4 and 7.5e-5), crlf (--form), float32
    (--float32-residual) and 50000 (--steps)."""
    data: Path | None = None
    """Folder of the novels (default: CEDD_DATA/novels)."""
    gpt2: Path | None = None
    """Folder with GPT-2's vocab.json and merges.txt (default: gpt2-bpe next to the novels)."""
    form: Literal["clean", "gutenberg", "crlf"] = "gutenberg"
    """gutenberg: the books as shipped, with header and licence (the paper's), a line's end read as one character; crlf:
    the same with a line's end of two, as it is in the files; clean: their bare text."""
    vocabulary: int | None = None
    """Vocabulary size with characters as its first tokens, instead of GPT-2's: for two cores, with --size tiny."""
    size: Literal["tiny", "char", "small", "medium"] = "small"
    """Size of the network: a preset of cedd train."""
    length: int = 128
    """Tokens per sequence."""
    batch: int = 32
    """Sequences per step."""
    steps: int = 25_000
    """Training steps of cells whose recipe does not set them."""
    every: int = 5000
    """Steps between tests."""
    blocks: int | None = None
    """Number of blocks of each book to test on, from its beginning."""
    matrices: Literal["adamw", "muon"] = "adamw"
    """Optimizer of the blocks' matrices."""
    rate: float = 3e-4
    """Peak learning rate."""
    warmup: int = 2500
    """Steps of linear warm-up."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Learning rate after warm-up."""
    clip: float = 1.0
    """The largest norm of the gradient of a *sequence's* loss, the sum over its positions, as in the code that the
    paper builds on: nearly every gradient is longer, and so is scaled to this length."""
    ema: float = 0.9999
    """Decay of the moving average of the weights, which is tested."""
    ema_warmup: bool = True
    """The average's decay is at most (1+step)/(10+step), as in the code that the paper builds on; a plain one of 0.9999
    still holds 8% of the initial weights after 25,000 steps."""
    dropout: float = 0.1
    """Dropout rate of each residual branch."""
    weight_decay: float = 0.0
    """Weight decay of all parameters, multiplied by the learning rate."""
    cut: Literal["once", "anew"] = "once"
    """Split the book into sequences at the same positions in every epoch (once), or at new ones (anew)."""
    times: Literal["stratified", "independent"] = "stratified"
    """How the times of a batch are drawn."""
    last_time: float | None = None
    """Highest time at the last step, approached linearly from the cell's TIME."""
    float32_residual: bool = False
    """Keep the residual stream in float32, as the code that the paper builds on."""
    p_m: float = 0.95
    """Roulette: the share of masking among all events."""
    sigma_floor: float = 0.003
    """Uniform: the smallest sigma in a denoiser's ratios (the paper's)."""
    out: Path = Path("runs/spelling")
    results: Path = Path("runs/spelling.json")

    def check(self) -> None:
        for cell in self.only:
            read_cell(cell)
        if self.steps < 1 or self.every < 1:
            raise ValueError("--steps and --every must be at least 1")
        super().check()

    def book(self, name: str) -> Path:
        """The path of a book in the form that cells read."""
        return self.out / "books" / self.form / f"{name}.txt"

    @property
    def tokenizer_folder(self) -> Path:
        """The folder of the tokenizer for this form and vocabulary size."""
        form = "" if self.form == Arguments.form else f"-{self.form}"
        size = "" if self.vocabulary is None else f"-{self.vocabulary}"
        return self.out / f"tokenizer{form}{size}"


class Cell(NamedTuple):
    """One model of the tables."""

    method: str
    process: str
    highest_time: float
    recipe: Mapping[str, Any]


def named(text: str) -> str:
    """The one name of a cell: "cedd*/uniform" is "cedd-star/uniform"."""
    method, slash, rest = text.partition("/")
    return get_method(method).name + slash + rest


def read_cell(text: str) -> Cell:
    """METHOD/PROCESS[/TIME][+RECIPE]."""
    words, plus, recipe = text.partition("+")
    with contextlib.suppress(KeyError, ValueError):
        method, process, *times = words.split("/")
        (highest_time,) = map(float, times or [1.0])
        cell = Cell(get_method(method).name, process, highest_time, RECIPES[recipe] if plus else {})
        if cell.method in METHODS and cell.process in PROCESSES and 0 < cell.highest_time <= 1:
            return cell
    kinds = f"{{{', '.join(METHODS)}}}/{{{', '.join(PROCESSES)}}}"
    recipes = ", ".join(f"+{name}" for name in RECIPES)
    raise ValueError(f"a cell is one of {kinds}, with /TIME for training times up to TIME, {recipes} (got {text!r})")


def settings(arguments: Arguments, cell: str) -> Arguments:
    """The settings of a cell; its recipe overrides the command line."""
    return replace(arguments, **read_cell(cell).recipe)


def configuration(arguments: Arguments, cell: str) -> TrainConfig:
    """The run of one cell: the paper's settings, no evaluations of the trainer's own, hardly a checkpoint."""
    method, process, highest_time, _ = read_cell(cell)
    arguments = settings(arguments, cell)
    return TrainConfig(
        data=str(arguments.book(TRAINING_BOOK)),
        out=arguments.out / named(cell).replace("/", "-"),
        method=method,
        process=ProcessConfig("uniform") if process == "uniform" else ProcessConfig("roulette", {"p_m": arguments.p_m}),
        sigma_floor=arguments.sigma_floor,
        model=model_of_size(arguments.size, dropout=arguments.dropout, float32_residual=arguments.float32_residual),
        length=arguments.length,
        # A book of its own to validate on: all of War and Peace is trained on.
        text=DataConfig(str(arguments.tokenizer_folder), validation=str(arguments.book(TEST_BOOKS["pap"]))),
        optimizer=OptimizerConfig(
            loss="sum",
            clip=arguments.clip,
            matrices=arguments.matrices,
            rate=arguments.rate,
            weight_decay=arguments.weight_decay,
            warmup=arguments.warmup,
            schedule=arguments.schedule,
            ema=arguments.ema,
            ema_warmup=arguments.ema_warmup,
        ),
        batch=BatchConfig(
            arguments.batch,
            times=arguments.times,
            highest_time=highest_time,
            last_highest_time=arguments.last_time,
            cut=arguments.cut,
        ),
        evaluation=EvaluationConfig(every=arguments.every, samples=0),
        steps=arguments.steps,
        seed=arguments.seed,
        device=arguments.device,
        checkpoint_every=CHECKPOINT,
        keep=1,
        log_every=min(100, max(1, arguments.steps // 10)),
    )


def own_settings(cell: str, record: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a cell that differ from the defaults, by name."""
    config = from_json(TrainConfig, record["config"])
    different = differing_settings(config, configuration(Arguments(), cell.partition("+")[0]))
    training = [n for n in different if n.startswith(("model.", "optimizer.", "batch.", "process.", "length"))]
    used = settings_of_run(config)
    own = {name.rpartition(".")[2]: used[name] for name in training if name in used}
    vocabulary, form = Path(config.text.tokenizer).name.rpartition("-")[2], Path(config.data).parent.name
    own |= {"vocabulary": vocabulary} if vocabulary.isdigit() else {}
    own |= {} if form == Arguments.form else {"form": form}
    return own | ({} if config.seed == Arguments.seed else {"seed": config.seed})
