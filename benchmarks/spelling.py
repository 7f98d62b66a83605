"""The paper's spelling tables, and ours beside them: train on War and Peace, test on two other novels.

    python benchmarks/spelling.py --data novels --out runs/spelling --results runs/spelling.json
    python benchmarks/spelling.py --only bayes-star/roulette cedd-star/uniform --minutes 9 ...
    python benchmarks/spelling.py --table runs/spelling.json --plot curves.png
    python benchmarks/spelling.py --table runs/spelling.json runs/seed1.json runs/seed2.json

A cell is METHOD/PROCESS, with /TIME to train at times up to TIME only (the test is at 0.05), and +RECIPE for settings
that go together (RECIPES) and stand above those of the command line. Each is trained in a process of its own by the
package's trainer, without its evaluations and with a checkpoint every 30,000 steps only, and tested by the paper's
protocol (`cedd spelling --protocol paper`) on the two test books every --every steps. They take turns: while one has
the device, the next one starts and is compiled. What is learnt goes into one small file, rewritten after every test.
The same command goes on where it was: cells that are done are passed over, one that --minutes has stopped resumes from
its checkpoint.
The rate is constant after its warm-up (unless --schedule or a recipe says otherwise), so a run of 50,000 steps passes
through that of 25,000: its curve has both.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import BytesIO
from itertools import combinations, cycle
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import tyro
from rich.console import Console

from cedd.bench.train import machine
from cedd.bounds.estimate import mean_and_stderr, student_quantile
from cedd.data.corpora import open_corpus
from cedd.data.folders import data_folder
from cedd.data.packing import pack
from cedd.data.tokenizers import CharAsGPT2, GPT2Tokenizer, load_gpt2
from cedd.methods import get_method
from cedd.models.ema import EMA
from cedd.models.transformer import Transformer
from cedd.spelling.paper_protocol import restore
from cedd.storage import atomic_write, write_json
from cedd.training.config import (
    BatchConfig,
    DataConfig,
    EvaluationConfig,
    OptimizerConfig,
    ProcessConfig,
    TrainConfig,
    flat,
    from_json,
    model_of_size,
    same_run,
    to_json,
)
from cedd.training.distributed import joined_ranks
from cedd.training.loop import Hooks, Trainer, TrainResult, share_the_interpreter
from cedd.training.records import LOG_FILE, read_log
from cedd.training.run_folder import folder_lock

METHODS = ("sedd", "sedds", "cedd", "cedd-star", "bayes", "bayes-star")
PROCESSES: tuple[str, ...] = ("uniform", "roulette")
TRAINING_BOOK = "war_and_peace"
TEST_BOOKS = {"pap": "pride_and_prejudice", "cap": "crime_and_punishment"}
CHECKPOINT = 30_000
"""Steps between checkpoints: gigabytes that a run of 25,000 does without, a longer one not."""
WARM_UP = 8
"""Steps that a worker makes before its turn: after them all is compiled and recorded."""
SEEN = "wap"
SEEN_BLOCKS = 1000
"""The training book is tested on too, so many of its blocks: how much of a score is memory."""

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
}
"""Settings of a cell by the name after its +."""
OURS = "bayes-star/roulette/0.45+long"
STYLES = ("--", ":", "-.", (0, (1, 3)), (0, (6, 2, 1, 2, 1, 2)))
"""Of a method's curves beside that with the paper's settings."""


@dataclass(frozen=True)
class Arguments:
    """example: python benchmarks/spelling.py --only cedd-star/uniform --size tiny --steps 20 --every 10 --warmup 5

    Train and test the cells METHOD/PROCESS[/TIME][+RECIPE] of the paper's spelling tables, and of ours.
    """

    only: tuple[str, ...] = (
        OURS,
        "bayes-star/roulette/0.45+fast",
        *(f"{method}/{process}" for process in PROCESSES for method in reversed(METHODS)),
        "sedds/roulette+half",
        "sedd/roulette+half",
    )
    """The cells to run, in this order. After a +, a recipe's settings count, whatever the options below say. Ours are
    fast (Muon, rate 1e-3 by a cosine after 1,000 steps, EMA 0.999, clip 128, no dropout, cut anew, --last-time 0.1)
    and long (fast with 50,000 steps and dropout 0.1). The others are faster (fast at 2e-3), muon (an earlier one:
    dropout 0.05, one range of times), twice, half and quarter (6e-4, 1.5e-4 and 7.5e-5), crlf (--form) and float32
    (--float32-residual)."""
    data: Path | None = None
    """Folder of the novels (default: CEDD_DATA/novels)."""
    gpt2: Path | None = None
    """Folder with GPT-2's vocab.json and merges.txt (default: gpt2-bpe beside the novels)."""
    form: Literal["clean", "gutenberg", "crlf"] = "gutenberg"
    """gutenberg: the books as shipped, with header and licence (the paper's), a line's end read as one character; crlf:
    the same with a line's end of two, as it is in the files; clean: their bare text."""
    vocabulary: int | None = None
    """Write the characters as the first tokens of so many, not as GPT-2's: for two cores, with --size tiny."""
    size: Literal["tiny", "char", "small", "medium"] = "small"
    length: int = 128
    batch: int = 32
    steps: int = 25_000
    """Of a cell whose recipe has no number of its own."""
    every: int = 5000
    """Steps between tests."""
    blocks: int | None = None
    """Test on the first so many blocks of each book only."""
    matrices: Literal["adamw", "muon"] = "adamw"
    """What steps the matrices of the blocks."""
    rate: float = 3e-4
    warmup: int = 2500
    schedule: Literal["constant", "cosine"] = "constant"
    clip: float = 1.0
    """The largest norm of the gradient of a *sequence's* loss, the sum over its positions, as in the code that the
    paper builds on: nearly every gradient is longer, and so is scaled to this length."""
    ema: float = 0.9999
    ema_warmup: bool = True
    """The average's decay is at most (1+step)/(10+step), as in the code that the paper builds on; a plain one of 0.9999
    still holds 8% of the initial weights after 25,000 steps."""
    dropout: float = 0.1
    weight_decay: float = 0.0
    cut: Literal["once", "anew"] = "once"
    """Where the book is cut into sequences: at the same places in every epoch, or at others."""
    times: Literal["stratified", "independent"] = "stratified"
    """How the times of a batch are drawn."""
    last_time: float | None = None
    """What a cell's TIME has become by the last step."""
    float32_residual: bool = False
    """Keep the sum of all branches in float32, as the code that the paper builds on."""
    p_m: float = 0.95
    sigma_floor: float = 0.003
    seed: int = 0
    device: str = "auto"
    minutes: float | None = None
    """Stop before so many minutes have passed, so that the same command can go on."""
    save_seconds: float = 40.0
    """Time kept back for writing the checkpoint of a run that --minutes stops."""
    start_seconds: float = 90.0
    """A cell that would have less than this, which the compiler needs, is not begun."""
    out: Path = Path("runs/spelling")
    """Folder of the runs."""
    results: Path = Path("runs/spelling.json")
    table: tuple[Path, ...] | None = None
    """Print the tables of this results file and do nothing else; of several, what the cells that all of them have come
    to over their seeds."""
    plot: Path | None = None
    """Draw the curves into this file too (.png, .svg, .pdf)."""
    worker: bool = False
    """Train the one cell of --only in this process and print what happens as JSON, a line an event."""
    until: float | None = None
    """Of a worker: when --minutes are over, in seconds since the epoch."""

    def check(self) -> None:
        for cell in self.only:
            read_cell(cell)
        if self.steps < 1 or self.every < 1:
            raise ValueError("--steps and --every must be at least 1")
        if self.plot is not None and self.plot.suffix not in (".png", ".svg", ".pdf"):
            raise ValueError(f"--plot makes a .png, .svg or .pdf; got {self.plot}")
        if self.table == ():
            raise ValueError("--table needs a results file")
        if self.plot is not None and self.table is not None and len(self.table) > 1:
            raise ValueError("--plot draws the curves of one results file")


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
    raise ValueError(f"a cell is one of {kinds}, with /TIME for training times up to TIME, {recipes}; got {text!r}")


# ----------------------------------------------------------------------------------------------------------------
# The books, a character at a time, as GPT-2's tokens

_PRIVATE = 0xF0000
"""Where Unicode has room for 65,534 characters of one's own: the stand-in of token i is character _PRIVATE + i."""


def spelt(text: str, gpt2: GPT2Tokenizer, characters: dict[str, int]) -> str:
    """The text in characters that are one token each, which `characters` is extended to know.

    GPT-2 writes a curly quote, and a few accented letters, as two tokens: these become two stand-ins, one for each. So
    does a carriage return become one, for in a file of text it would not survive.
    """
    stand_ins: dict[int, str] = {}
    for character in set(text) - (set(characters) - {"\r"}):
        tokens = [int(token) for token in gpt2.encode(character)]
        characters.update({chr(_PRIVATE + token): token for token in tokens})
        stand_ins[ord(character)] = "".join(chr(_PRIVATE + token) for token in tokens)
    return text.translate(stand_ins)


def renumbered(characters: Mapping[str, int], size: int) -> dict[str, int]:
    """The characters as the first of `size` tokens, in their old order."""
    numbers = {token: number for number, token in enumerate(sorted(set(characters.values())))}
    if size < len(numbers):
        raise ValueError(f"--vocabulary must be at least {len(numbers)}, one for each character; got {size}")
    return {character: numbers[token] for character, token in characters.items()}


def prepare(arguments: Arguments) -> None:
    """Write the tokenizer and the books of one form, as its cells read them, beside the runs."""
    novels = data_folder("novels", arguments.data)
    gpt2 = load_gpt2(arguments.gpt2 or novels.parent / "gpt2-bpe")
    characters = dict(CharAsGPT2.from_gpt2(gpt2).characters)
    ending = ".txt" if arguments.form == "clean" else ".gutenberg.txt"
    for name in (TRAINING_BOOK, *TEST_BOOKS.values()):
        source = novels / f"{name}{ending}"
        text = as_shipped(source) if arguments.form == "crlf" else "".join(open_corpus(source).documents())
        atomic_write(book(arguments, name), spelt(text, gpt2, characters).encode())
    if arguments.vocabulary is None:
        tokenizer = CharAsGPT2(characters, gpt2.vocab_size)
    else:
        tokenizer = CharAsGPT2(renumbered(characters, arguments.vocabulary), arguments.vocabulary)
    tokenizer.save(tokenizer_folder(arguments))
    for name in (TRAINING_BOOK, *TEST_BOOKS.values()):
        pack(open_corpus(book(arguments, name)), tokenizer, arguments.length)  # so that no cell has to


def as_shipped(source: Path) -> str:
    """A text with its line ends of two characters, which a corpus reads as one."""
    text = "".join(open_corpus(source).documents())
    if b"\r\n" not in source.read_bytes():
        raise ValueError(f"{source} has no line ends of two characters: take the file as Gutenberg ships it")
    return text.replace("\n", "\r\n")


def book(arguments: Arguments, name: str) -> Path:
    """Where a book lies as the cells read it."""
    return arguments.out / "books" / arguments.form / f"{name}.txt"


def tokenizer_folder(arguments: Arguments) -> Path:
    """Where the tokenizer of these books lies; one of another form or size is another."""
    form = "" if arguments.form == Arguments.form else f"-{arguments.form}"
    size = "" if arguments.vocabulary is None else f"-{arguments.vocabulary}"
    return arguments.out / f"tokenizer{form}{size}"


def settings(arguments: Arguments, cell: str) -> Arguments:
    """What a cell is run with: its recipe stands above the command line."""
    return replace(arguments, **read_cell(cell).recipe)


def configuration(arguments: Arguments, cell: str) -> TrainConfig:
    """The run of one cell: the paper's settings, no evaluations of the trainer's own, hardly a checkpoint."""
    method, process, highest_time, _ = read_cell(cell)
    arguments = settings(arguments, cell)
    return TrainConfig(
        data=str(book(arguments, TRAINING_BOOK)),
        out=arguments.out / named(cell).replace("/", "-"),
        method=method,
        process=ProcessConfig(
            "uniform" if process == "uniform" else "roulette", p_m=arguments.p_m, sigma_floor=arguments.sigma_floor
        ),
        model=model_of_size(arguments.size, dropout=arguments.dropout, float32_residual=arguments.float32_residual),
        length=arguments.length,
        # A book of its own to validate on: all of War and Peace is trained on.
        text=DataConfig(str(tokenizer_folder(arguments)), validation=str(book(arguments, TEST_BOOKS["pap"]))),
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


# ----------------------------------------------------------------------------------------------------------------
# One cell, in a process of its own


def tell(event: str, **values: Any) -> None:
    """A line of JSON to the process that started this one."""
    print(json.dumps({"event": event, **values}), flush=True)


class Turn:
    """The right to use the device: of all processes with one folder one has it, until it gives it back or ends."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: contextlib.ExitStack | None = None

    @property
    def is_mine(self) -> bool:
        return self._held is not None

    def take(self, give_up: Callable[[], bool] = lambda: False) -> None:
        """Wait for it, until it is there or hope is given up."""
        while not give_up():
            held = contextlib.ExitStack()
            try:
                held.enter_context(folder_lock(self._folder))
            except ValueError:  # another has it
                time.sleep(0.05)
            else:
                self._held = held
                return

    def give_back(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None


@dataclass
class SpellingHooks(Hooks):
    """Test a run on the books instead of bounding it, and stop it in time."""

    turn: Turn
    """To be waited for when the first steps are made, and so all is compiled."""
    stop_at: float | None = None
    """When to stop, by time.time()."""
    books: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    tested: int = field(init=False, default=-1)
    started: float = field(init=False, default=0.0)
    warmed_up: int = field(init=False, default=0)

    def on_start(self, trainer: Trainer) -> None:
        config, self.started = trainer.config, time.perf_counter()
        tell("begin", step=trainer.state.step, config=to_json(config), machine=machine(config.device), time=time.time())
        if self.stop_at is not None:
            seconds = max(0.0, self.stop_at - time.time())
            timer = threading.Timer(seconds, setattr, (trainer.stop, "requested", True))
            timer.daemon = True
            timer.start()

    def before_step(self, trainer: Trainer) -> None:
        if not self.turn.is_mine and self.warmed_up >= WARM_UP:
            if trainer.ranks.device.type == "cuda":
                torch.cuda.synchronize()
            self.turn.take(lambda: trainer.stop.requested)
            self.started = time.perf_counter()
            if self.turn.is_mine:
                tell("turn", step=trainer.state.step)
        self.warmed_up += 1

    def evaluate(self, trainer: Trainer, model: Transformer) -> float:
        """A point of the curve, by the averaged weights."""
        started = time.perf_counter()
        books = self._test(trainer, model)
        self.tested = trainer.state.step
        tell("point", step=self.tested, books=books, seconds=round(time.perf_counter() - started, 2))
        return sum(1 - books[name]["all"]["share"] for name in TEST_BOOKS) / len(TEST_BOOKS)

    def wants_checkpoint(self, trainer: Trainer) -> bool:
        """A finished run needs its weights only, not the gigabytes of a checkpoint; nor do the steps before a turn."""
        return trainer.state.step < trainer.config.steps and self.turn.is_mine

    def on_end(self, trainer: Trainer, result: TrainResult) -> None:
        if result.finished:
            if self.tested != result.step:
                trainer.evaluate()
            raw = replace(trainer.state, ema=EMA(trainer.state.model, 0.0)).averaged_model()
            tell("raw", step=result.step, books=self._test(trainer, raw))
        tell(
            "end",
            step=result.step,
            finished=result.finished,
            loss=result.loss,
            seconds=round(time.perf_counter() - self.started, 2),
            seconds_per_step=_seconds_per_step(trainer.config),
        )
        self.turn.give_back()

    def _test(self, trainer: Trainer, model: Transformer) -> dict[str, Any]:
        """The paper's protocol; every cell of a process sees the same mistakes."""
        return {
            name: restore(model, trainer.process, trainer.method, blocks, seed=0).record()
            for name, blocks in self.books.items()
        }


def _seconds_per_step(config: TrainConfig) -> float | None:
    """The median over the run, which neither the compiler nor the tests are part of."""
    speeds = [r["tokens_per_second"] for r in read_log(config.out / LOG_FILE) if "tokens_per_second" in r]
    return round(config.batch.size * config.length / statistics.median(speeds), 6) if speeds else None


def work(arguments: Arguments) -> None:
    """Train and test the one cell of --only."""
    (cell,) = arguments.only
    config, arguments = configuration(arguments, cell), settings(arguments, cell)
    config.check()
    config.out.mkdir(parents=True, exist_ok=True)
    share_the_interpreter()
    stop_at = None if arguments.until is None else arguments.until - arguments.save_seconds
    with joined_ranks(config.device) as ranks, (config.out / "console.txt").open("a") as console:
        hooks = SpellingHooks(Turn(arguments.out), stop_at)
        trainer = Trainer(config, ranks, Console(file=console), hooks)
        tokenizer = trainer.data.tokenizer
        for name, title in {**TEST_BOOKS, SEEN: TRAINING_BOOK}.items():
            packed = pack(open_corpus(book(arguments, title)), tokenizer, config.length)
            spread = slice(0, None, max(1, len(packed) // SEEN_BLOCKS)) if name == SEEN else slice(None)
            hooks.books[name] = torch.from_numpy(packed[spread][: arguments.blocks])
        trainer.run()


# ----------------------------------------------------------------------------------------------------------------
# All cells, and the file of results


class Results:
    """The results file: what every cell has told, rewritten as a whole by this one process."""

    def __init__(self, path: Path, arguments: Arguments) -> None:
        self.path, self._lock = path, threading.Lock()
        self.blocks = arguments.blocks
        self.content: dict[str, Any] = read_results(path) if path.is_file() else {"format": 1, "cells": {}}

    def is_done(self, cell: str, arguments: Arguments) -> bool:
        """Whether it was trained and tested as it would be now: to the last step or, at a constant rate, beyond it."""
        record, config = self.content["cells"].get(cell, {}), configuration(arguments, cell)
        if not record or not record["finished"] or record.get("blocks") != arguments.blocks:
            return False
        reached = any(point["step"] == config.steps for point in record["curve"])
        passed = record["step"] == config.steps or (config.optimizer.schedule == "constant" and reached)
        return passed and not same_run(from_json(TrainConfig, record["config"]), config)

    def take(self, cell: str, event: dict[str, Any]) -> None:
        """Enter one event of a cell: begin, turn, point, raw or end."""
        kind = event.pop("event")
        with self._lock:
            cells = self.content["cells"]
            if kind == "begin":
                kept = [p for p in cells.get(cell, {}).get("curve", []) if 0 < p["step"] <= event["step"]]
                begun = {"seed": event["config"]["seed"], "finished": False, "curve": kept, "parts": []}
                begun["parts"] = cells.get(cell, {}).get("parts", []) if event["step"] else []
                begun |= {} if self.blocks is None else {"blocks": self.blocks}
                cells[cell] = {**event, **begun}
            elif kind == "turn":
                return
            elif kind == "point":
                cells[cell]["curve"].append(event)
                cells[cell]["step"] = event["step"]
            elif kind == "raw":
                cells[cell]["raw"] = event
            else:
                cells[cell]["parts"].append({name: event[name] for name in ("step", "seconds", "seconds_per_step")})
                cells[cell].update(event)
            write_json(self.path, self.content)


def read_results(path: Path) -> dict[str, Any]:
    """A results file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        whole = content["format"] == 1 and all(
            point["step"] >= 0 and point["books"].keys() >= TEST_BOOKS.keys()
            for record in content["cells"].values()
            for point in record["curve"]
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        content, whole = {}, False
    if not whole:
        raise ValueError(f"{path} is no results file of this benchmark, or a damaged one")
    return content


def say(cell: str, event: Mapping[str, Any]) -> None:
    """What an event means, in one line."""
    scores = "  ".join(f"{name} {100 * record['all']['share']:.2f}" for name, record in event.get("books", {}).items())
    step = f"step {event['step']}"
    text = {
        "begin": f"from {step} on {event.get('machine')}",
        "turn": f"its turn at {step}",
        "point": f"{step}: {scores}  ({event.get('seconds')} s)",
        "raw": f"{step}, weights without averaging: {scores}",
        "end": f"{step}, {'done' if event.get('finished') else 'stopped'} after {event.get('seconds')} s, "
        f"{1000 * (event.get('seconds_per_step') or 0):.2f} ms a step, loss {event.get('loss')}",
    }
    print(f"{cell}: {text[event['event']]}", flush=True)


def follow(cell: str, process: subprocess.Popen[str], results: Results, told: set[tuple[str, str]]) -> None:
    """Enter what a worker tells until it ends; `told` gets the cell with the name of every event."""
    assert process.stdout is not None
    for line in process.stdout:
        if not line.startswith('{"event"'):
            print(f"{cell}: {line}", end="", flush=True)
            continue
        event = json.loads(line)
        say(cell, event)
        told.add((cell, event["event"]))
        results.take(cell, event)


def start(cell: str, until: float | None) -> subprocess.Popen[str]:
    """A worker for one cell: this very command line, whose last word on a setting counts."""
    command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--only", cell, "--worker"]
    command += [] if until is None else ["--until", f"{until:.1f}"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def run(arguments: Arguments) -> int:
    """All cells that are left, one after the other; the exit code is the number of cells that failed."""
    until = None if arguments.minutes is None else time.time() + 60 * arguments.minutes
    results = Results(arguments.results, arguments)
    cells = dict.fromkeys(map(named, arguments.only))
    waiting = [cell for cell in cells if not results.is_done(cell, arguments)]
    asked = [settings(arguments, cell) for cell in waiting]
    for given in {(one.form, one.vocabulary, one.length): one for one in asked}.values():
        prepare(given)
    for cell in cells:
        if cell not in waiting:
            print(f"{cell}: done before", flush=True)
    running: dict[str, tuple[subprocess.Popen[str], threading.Thread]] = {}
    told: set[tuple[str, str]] = set()
    failed = 0

    def is_late() -> bool:
        return until is not None and time.time() + arguments.start_seconds + arguments.save_seconds > until

    try:
        while running or (waiting and not is_late()):
            if waiting and not is_late() and all((cell, "turn") in told for cell in running):
                cell = waiting.pop(0)
                worker = start(cell, until)
                thread = threading.Thread(target=follow, args=(cell, worker, results, told))
                thread.start()
                running[cell] = (worker, thread)
            for cell, (worker, thread) in list(running.items()):
                if worker.poll() is not None:
                    thread.join()
                    del running[cell]
                    if (cell, "end") not in told:
                        failed += 1
                        print(f"{cell}: failed; see {configuration(arguments, cell).out / 'console.txt'}", flush=True)
            time.sleep(0.1)
    finally:
        for worker, thread in running.values():
            worker.terminate()  # upon which it saves
            worker.wait()
            thread.join()
    if waiting:
        print(f"no time for {', '.join(waiting)}: the same command goes on", flush=True)
    show(arguments, results.content)
    return failed


# ----------------------------------------------------------------------------------------------------------------
# Tables and curves


def show(arguments: Arguments, content: Mapping[str, Any]) -> None:
    """Print the tables, and draw the curves if that is asked for."""
    print(tables(content))
    if arguments.plot is not None and tested(content):
        draw(content, arguments.plot)
        print(f"the curves: {arguments.plot}", file=sys.stderr)
    elif arguments.plot is not None:
        print("there is no curve to draw yet", file=sys.stderr)


def tested(content: Mapping[str, Any]) -> list[str]:
    """The cells with results, in the paper's order, ours at the end."""
    order = [(process, method) for process in PROCESSES for method in METHODS]

    def place(name: str) -> tuple[bool, int, str]:
        cell = read_cell(name)
        return cell.highest_time < 1, order.index((cell.process, cell.method)), name

    return sorted((cell for cell, record in content["cells"].items() if record.get("curve")), key=place)


def draw(content: Mapping[str, Any], path: Path) -> None:
    """Restored in the first test book over steps, a panel for each process; crosses are the paper's."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = dict(zip(PROCESSES, figure.subplots(1, len(PROCESSES), sharey=True), strict=True))
    colours = {method: f"C{number}" for number, method in enumerate(METHODS)}
    others = {f"{method}/{process}": cycle(STYLES) for process in PROCESSES for method in METHODS}
    for cell in tested(content):
        curve = content["cells"][cell]["curve"]
        method, process, _, _ = read_cell(cell)
        thousands = [point["step"] / 1000 for point in curve]
        shares = [100 * point["books"]["pap"]["all"]["share"] for point in curve]
        plain = f"{method}/{process}"
        style = "-" if cell == plain else next(others[plain])
        line = {"linestyle": style, "marker": "o", "markersize": 3, "linewidth": 1.2}
        panels[process].plot(thousands, shares, color=colours[method], label=cell.replace(f"/{process}", ""), **line)
        for step in PAPER:
            if step <= curve[-1]["step"] and (papers := of_the_paper(cell, content["cells"][cell], step)):
                panels[process].plot(step / 1000, papers[0], "x", color=colours[method])
    for process, axes in panels.items():
        axes.set_title(process)
        axes.set_xlabel("thousand steps")
        axes.grid(alpha=0.3)
        if axes.lines:
            below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.12), "ncols": 2}
            axes.legend(frameon=False, fontsize=8, handlelength=4, **below)
    panels[PROCESSES[0]].set_ylabel("restored in Pride and Prejudice, %  (×: the paper's)")
    buffer = BytesIO()
    figure.savefig(buffer, format=path.suffix[1:], dpi=120)
    atomic_write(path, buffer.getvalue())


def of_the_paper(cell: str, record: Mapping[str, Any], step: int) -> tuple[float, float] | None:
    """Its figures for this method and process after so many steps, if the run may be compared there: not in the middle
    of a falling rate."""
    config = from_json(TrainConfig, record["config"])
    done = step == config.steps or config.optimizer.schedule == "constant"
    return PAPER[step].get(cell.partition("+")[0]) if done and step in PAPER else None


def tables(content: Mapping[str, Any]) -> str:
    """The measured shares beside the paper's, and the curves, in Markdown."""
    cells: Mapping[str, Any] = content["cells"]
    found = tested(content)
    lines = [
        "| method | process | steps | PAP, % | paper | CAP, % | paper | masked, shuffled (PAP) | seen | ms a step |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    lines += [_row(cell, cells[cell]) for cell in found]
    if not found:
        return "nothing was tested yet"
    steps = sorted({point["step"] for cell in found for point in cells[cell]["curve"]})
    lines += ["", f"| PAP / CAP / seen, % at step | {' | '.join(f'{step:,}' for step in steps)} | without averaging |"]
    lines += [f"|---|{'--:|' * (len(steps) + 1)}"]
    for cell in found:
        points = by_step(cells[cell])
        shown = [_scores(points.get(step)) for step in steps] + [_scores(cells[cell].get("raw", {}).get("books"))]
        lines.append(f"| {cell} | {' | '.join(shown)} |")
    return "\n".join(lines)


def by_step(record: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """The tests of a run, book by book."""
    return {point["step"]: point["books"] for point in record["curve"]}


def over_seeds(contents: Sequence[Mapping[str, Any]]) -> str:
    """The cells that all of these have, a run each, after the last step at which all were tested; and how far one is
    ahead of another on the same process, in the mean over seeds with a 95% interval by Student's t; in Markdown."""
    shared = [cell for cell in tested(contents[0]) if all(cell in tested(content) for content in contents[1:])]
    records = {cell: [content["cells"][cell] for content in contents] for cell in shared}
    curves = {cell: [by_step(record) for record in runs] for cell, runs in records.items()}
    steps = [set(curve) for runs in curves.values() for curve in runs]
    step = max(set.intersection(*steps), default=None) if steps else None
    if step is None:
        raise ValueError("these results files share no cell that was tested at the same step")
    seeds = _different_seeds(records)
    scores = {
        cell: 100
        * torch.tensor(
            [[curve[step][name]["all"]["share"] for name in TEST_BOOKS] for curve in runs], dtype=torch.float64
        )
        for cell, runs in curves.items()
    }  # [seeds, books]
    heads = " | ".join((*(f"seed {seed}" for seed in seeds), "mean"))
    lines = [f"| PAP / CAP, % after {step:,} steps | {heads} |", f"|---|{'--:|' * (len(seeds) + 1)}"]
    lines += [f"| {cell} | {' | '.join(map(_both, (*found, found.mean(0))))} |" for cell, found in scores.items()]
    for first, second in combinations(shared, 2):
        if read_cell(first).process == read_cell(second).process:
            ahead = scores[second] - scores[first]
            means = " / ".join(map(_mean_with_interval, ahead.T))
            lines.append(f"| {second} less {first} | {' | '.join(map(_both, ahead))} | {means} |")
    return "\n".join(lines)


def _different_seeds(records: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[int]:
    """Those of the files, of which every cell has one record each, alike in all other settings."""
    found: list[int] = []
    for cell, runs in records.items():
        settings = [own_settings(cell, record) for record in runs]
        seeds = [own.pop("seed", Arguments.seed) for own in settings]
        if any(own != settings[0] for own in settings):
            raise ValueError(f"{cell} was trained with other settings in one of these files than in another")
        if len(set(seeds)) < len(seeds) or seeds != (found or seeds):
            raise ValueError(f"each file must have a seed of its own, in all of its cells; {cell} has {seeds}")
        found = seeds
    return found


def _both(values: torch.Tensor) -> str:
    return " / ".join(f"{value:.2f}" for value in values.tolist())


def _mean_with_interval(values: torch.Tensor) -> str:
    mean, error = mean_and_stderr(values)
    half = student_quantile(len(values) - 1) * error
    return f"{mean:.2f} ({mean - half:.2f} to {mean + half:.2f})"


def _scores(books: Mapping[str, Any] | None) -> str:
    """The shares of a test, book by book; earlier ones were without the training book."""
    found = [books[name]["all"]["share"] for name in (*TEST_BOOKS, SEEN) if name in books] if books else []
    return " / ".join(f"{100 * share:.1f}" for share in found)


def _row(cell: str, record: Mapping[str, Any]) -> str:
    """One cell at its last test, with 95% intervals, beside the paper's of that method after as many steps."""
    last = record["curve"][-1]
    paper = of_the_paper(cell, record, last["step"]) or ("", "")
    steps = f"{last['step']:,}" + ("" if record["finished"] else f" of {record['config']['steps']:,}")
    scores = [_with_interval(last["books"][name]["all"]) for name in TEST_BOOKS]
    kinds = [last["books"]["pap"][kind]["share"] for kind in ("masked", "shuffled")]
    parts = ", ".join("–" if share is None else f"{100 * share:.1f}" for share in kinds)
    method, process, highest_time, _ = read_cell(cell)
    process += f", t ≤ {highest_time:g}" if highest_time < 1 else ""
    process += "".join(f"; {name} {value}" for name, value in own_settings(cell, record).items())
    speed = record.get("seconds_per_step")
    seen = f"{100 * last['books'][SEEN]['all']['share']:.1f}" if SEEN in last["books"] else ""
    return (
        f"| {method} | {process} | {steps} | {scores[0]} | {paper[0]} | {scores[1]} | {paper[1]} "
        f"| {parts} | {seen} | {'' if speed is None else f'{1000 * speed:.1f}'} |"
    )


def own_settings(cell: str, record: Mapping[str, Any]) -> dict[str, Any]:
    """What a cell was trained with otherwise than by default, by the settings' names."""
    config = from_json(TrainConfig, record["config"])
    different = same_run(config, configuration(Arguments(), cell.partition("+")[0]))
    training = [n for n in different if n.startswith(("model.", "optimizer.", "batch.", "process.", "length"))]
    own = {name.rpartition(".")[2]: flat(config)[name] for name in training}
    vocabulary, form = Path(config.text.tokenizer).name.rpartition("-")[2], Path(config.data).parent.name
    own |= {"vocabulary": vocabulary} if vocabulary.isdigit() else {}
    own |= {} if form == Arguments.form else {"form": form}
    return own | ({} if config.seed == Arguments.seed else {"seed": config.seed})


def _with_interval(share: Mapping[str, Any]) -> str:
    half = 50 * (share["high"] - share["low"])
    return f"{100 * share['share']:.1f} ± {half:.1f}"


def main() -> int:
    """Run what the command line asks for; bad input ends in one line."""
    arguments = tyro.cli(Arguments, description=Arguments.__doc__)
    try:
        arguments.check()
        if arguments.table is not None:
            contents = [read_results(path) for path in arguments.table]
            if len(contents) > 1:
                print(over_seeds(contents))
            else:
                show(arguments, contents[0])
            return 0
        if arguments.worker:
            work(arguments)
            return 0
        return run(arguments)
    except (ValueError, OSError) as error:
        print(f"spelling: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
