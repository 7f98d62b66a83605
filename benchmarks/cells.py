"""The cells of a benchmark: trained and tested one by one, each in a process of its own, into one results file.

A subclass of `Benchmark` defines the names of its cells, their training, their measurements and tables; this module
schedules them. Cells take turns: while one is trained and measured, the next one starts and is compiled. (Measuring a
cell during the training of the next one saves no time, because the two compete for the GPU.) A worker prints events as
JSON, one per line. The scheduler that started it rewrites the results file after every test; several schedulers can
share the file if their cells differ. The same command resumes: finished cells are skipped, a cell that --minutes
stopped continues from its checkpoint, and a cell that was trained but not measured is measured.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from command_line import command
from pages import with_tables, write_page
from rich.console import Console

import cedd
from cedd.apps.bench.options import machine
from cedd.bounds.estimate import mean_and_stderr, student_quantile
from cedd.data.training_data import TrainingData
from cedd.models.backbone import Backbone
from cedd.models.ema import EMA
from cedd.storage import atomic_file, check_writable, locked, remove_folder, write_json
from cedd.training.config import TrainConfig, differing_settings, from_json, to_json
from cedd.training.distributed import joined_ranks
from cedd.training.loop import Hooks, Trainer, TrainResult, switch_threads_often
from cedd.training.run_folder import folder_lock
from cedd.training.run_log import LOG_FILE, read_log

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WARM_UP = 8
"""Steps that a worker makes before its turn, after which everything is compiled and recorded."""
PLOT_SUFFIXES = (".png", ".svg", ".pdf")


@dataclass(frozen=True, kw_only=True)
class CellArguments:
    """Options of every benchmark of cells."""

    only: tuple[str, ...]
    """The cells to run, in this order."""
    out: Path
    """Folder of the runs."""
    results: Path
    """The results file."""
    seed: int = 0
    """The random seed."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:1."""
    minutes: float | None = None
    """Stop before this number of minutes has passed; the same command resumes."""
    budget: float | None = None
    """Like --minutes, in seconds, but a cell that would not finish in time is not started."""
    save_seconds: float = 40.0
    """Seconds reserved for the checkpoint of a run that --minutes stops."""
    start_seconds: float = 90.0
    """Seconds that compilation takes; a cell with less time than this is not started."""
    table: tuple[Path, ...] | None = None
    """Only print the tables of this results file; for several files, compare the cells in all of them by seed."""
    plot: Path | None = None
    """Plot the curves to this file too (.png, .svg, .pdf)."""
    page: Path | None = None
    """Write the tables into this page too, between its markers."""
    worker: bool = False
    """Train the one cell of --only in this process and print events as JSON, one per line."""
    until: float | None = None
    """For a worker: when --minutes are over, in seconds since the epoch."""

    def check(self) -> None:
        """Raise ValueError for invalid combinations of options."""
        if self.plot is not None and self.plot.suffix not in PLOT_SUFFIXES:
            raise ValueError(f"--plot makes a .png, .svg or .pdf (got {self.plot})")
        if self.table == ():
            raise ValueError("--table needs a results file")
        if min(self.minutes or 1, self.budget or 1) < 0:
            raise ValueError("--minutes and --budget must not be negative")
        if self.minutes is not None and self.budget is not None:
            raise ValueError(
                "give either --minutes, after which a cell is stopped, or --budget, within which it is done"
            )
        if self.plot is not None and self.table is not None and len(self.table) > 1:
            raise ValueError("--plot draws the curves of one results file")
        if self.page is not None and self.table is not None and len(self.table) > 1:
            raise ValueError("--page has the tables of one results file")


class Benchmark(ABC):
    """The interface between the scheduler and a benchmark."""

    name: ClassVar[str]
    script: ClassVar[Path]
    """The file that runs it: `main(kind)`."""
    Arguments: ClassVar[type[CellArguments]]

    def __init__(self, arguments: Any) -> None:
        self.arguments = arguments

    @abstractmethod
    def named(self, cell: str) -> str:
        """The canonical name of a cell."""

    @abstractmethod
    def configuration(self, cell: str) -> TrainConfig:
        """The training configuration of a cell."""

    def as_recorded(self, cell: str) -> TrainConfig:
        """The configuration of a cell in the default folder, because paths are not part of a result."""
        usual = replace(self.arguments, out=type(self.arguments).out)
        return type(self)(usual).configuration(cell)

    @abstractmethod
    def prepare(self, cells: Sequence[str]) -> None:
        """Write the files that these cells read, before any of them starts."""

    def data(self, cell: str) -> TrainingData | None:
        """The training data of a cell, if its configuration does not name it."""
        return None

    @abstractmethod
    def hooks(self, cell: str, turn: Turn, stop_at: float | None) -> CellHooks:
        """The hooks that test a cell during training."""

    @property
    def protocol(self) -> Mapping[str, Any] | None:
        """The settings that all cells of a results file share; files with other settings are rejected."""
        return None

    def as_now(self, protocol: Mapping[str, Any]) -> Mapping[str, Any]:
        """A protocol from a file, with defaults for settings that the file lacks."""
        return protocol

    def check_rows(self, content: Mapping[str, Any]) -> None:  # noqa: B027 - the protocol covers most
        """Raise a ValueError if new rows could not be compared with those of a results file."""

    def seconds(self, cell: str, content: Mapping[str, Any]) -> float:
        """The expected time of a cell from start to end: the median of the finished cells."""
        done = [record["seconds"] for record in content["cells"].values() if record["finished"]]
        return (statistics.median(done) if done else 0.0) + self.arguments.start_seconds

    def complete(self, results: Results) -> None:  # noqa: B027 - most have nothing to do
        """Further work after a cell has ended, and after the last one. Nothing else changes the results meanwhile."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """Facts about the tests that a record stores; a record with other facts does not count as finished."""
        return {}

    def is_measured(self, record: Mapping[str, Any]) -> bool:
        """Whether the record of a finished run has all final measurements."""
        return True

    @abstractmethod
    def is_point(self, point: Mapping[str, Any]) -> bool:
        """Whether this is a test of this benchmark."""

    @abstractmethod
    def is_whole(self, content: Mapping[str, Any]) -> bool:
        """Whether tables can be made from a results file; raising an error means no."""

    @abstractmethod
    def scores(self, event: Mapping[str, Any]) -> str:
        """The figures of a test in a few words."""

    @abstractmethod
    def tables(self, content: Mapping[str, Any]) -> Mapping[str, str]:
        """The results in Markdown, each table by the name of its marker in a page."""

    @abstractmethod
    def over_seeds(self, contents: Sequence[Mapping[str, Any]], paths: Sequence[Path]) -> str:
        """The results of several files, each of another seed, in Markdown."""

    @abstractmethod
    def curves(self, content: Mapping[str, Any]) -> Figure:
        """The figure of the curves."""


# ----------------------------------------------------------------------------------------------------------------
# One cell, in a process of its own


def tell(event: str, **values: Any) -> None:
    """Print an event as a line of JSON for the scheduler."""
    print(json.dumps({"event": event, **values}), flush=True)


class Turn:
    """The right to train, held by one of the processes with this folder until it gives it back or ends."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: contextlib.ExitStack | None = None

    @property
    def is_mine(self) -> bool:
        return self._held is not None

    def take(self, give_up: Callable[[], bool] = lambda: False) -> None:
        """Wait for the turn, or until `give_up` returns True."""
        while not give_up():
            held = contextlib.ExitStack()
            try:
                held.enter_context(folder_lock(self._folder))
            except ValueError:  # held by another process
                time.sleep(0.05)
            else:
                self._held = held
                return

    def give_back(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None


@dataclass
class CellHooks(Hooks, ABC):
    """Evaluate a run with the tests of the benchmark instead of a bound, and stop it in time."""

    turn: Turn
    """Waited for after the first steps, when everything is compiled."""
    stop_at: float | None = None
    """When to stop, by time.time()."""
    tested: int = field(init=False, default=-1)
    started: float = field(init=False, default=0.0)
    warmed_up: int = field(init=False, default=0)

    @abstractmethod
    def prepare(self, trainer: Trainer) -> None:
        """Read the test data."""

    @abstractmethod
    def test(self, trainer: Trainer, model: Backbone) -> dict[str, Any]:
        """The test figures of a network, in the form of a record."""

    @abstractmethod
    def cost(self, figures: Mapping[str, Any]) -> float:
        """The figures as one number; lower is better."""

    def finish(self, trainer: Trainer, model: Backbone) -> dict[str, Any] | None:
        """Final measurements, with the averaged weights of a finished run."""
        return None

    def on_start(self, trainer: Trainer) -> None:
        config, self.started = trainer.config, time.perf_counter()
        where = {"machine": machine(config.device), "code": code()}
        tell("begin", step=trainer.state.step, config=to_json(config), **where, time=time.time())
        if self.stop_at is not None:
            seconds = max(0.0, self.stop_at - time.time())
            timer = threading.Timer(seconds, setattr, (trainer.stop, "requested", True))
            timer.daemon = True
            timer.start()

    def before_step(self, trainer: Trainer) -> None:
        if self.warmed_up >= WARM_UP:
            self.take_turn(trainer)
        self.warmed_up += 1

    def take_turn(self, trainer: Trainer) -> None:
        """Wait for the turn, unless this process has it."""
        if self.turn.is_mine:
            return
        if trainer.ranks.device.type == "cuda":
            torch.cuda.synchronize()
        self.turn.take(lambda: trainer.stop.requested)
        self.started = time.perf_counter()
        if self.turn.is_mine:
            tell("turn", step=trainer.state.step)

    def evaluate(self, trainer: Trainer, model: Backbone) -> float:
        """Add a point to the curve, with the averaged weights."""
        started = time.perf_counter()
        figures = self.test(trainer, model)
        self.tested = trainer.state.step
        tell("point", step=self.tested, **figures, seconds=round(time.perf_counter() - started, 2))
        return self.cost(figures)

    def wants_checkpoint(self, trainer: Trainer) -> bool:
        """No checkpoints before the turn; the last one is kept until the run is measured."""
        return self.turn.is_mine

    def on_end(self, trainer: Trainer, result: TrainResult) -> None:
        if result.finished:
            self.take_turn(trainer)
            if self.tested != result.step:
                trainer.evaluate()
            raw = replace(trainer.state, ema=EMA(trainer.state.model, 0.0)).averaged_model()
            tell("raw", step=result.step, **self.test(trainer, raw))
            final = self.finish(trainer, trainer.state.averaged_model())
            if final is not None:
                tell("final", step=result.step, **final)
        tell(
            "end",
            step=result.step,
            finished=result.finished,
            loss=next(reversed(_logged(trainer.config, "loss")), None) if result.loss is None else result.loss,
            seconds=round(time.perf_counter() - self.started, 2),
            seconds_per_step=_seconds_per_step(trainer.config),
        )
        if result.finished:  # a finished run needs only its weights, not the gigabytes of a checkpoint
            for step in trainer.checkpoints.steps():
                remove_folder(trainer.checkpoints.path(step))
        self.turn.give_back()


def _logged(config: TrainConfig, name: str) -> list[float]:
    """The values of a training figure in the log of a run."""
    return [r[name] for r in read_log(config.out / LOG_FILE) if r["kind"] == "train" and name in r]


def _seconds_per_step(config: TrainConfig) -> float | None:
    """The median over the run, which excludes compilation and tests."""
    speeds = _logged(config, "tokens_per_second")
    return round(config.batch.size * config.length / statistics.median(speeds), 6) if speeds else None


def code() -> dict[str, Any]:
    """The version of the package and, in a git checkout, its commit and whether the package or the benchmarks have
    uncommitted changes."""
    package, here = Path(cedd.__file__).resolve(), Path(__file__).resolve().parent
    found = {"version": cedd.__version__}
    with contextlib.suppress(OSError, subprocess.CalledProcessError):  # no git, or not a checkout
        git(package.parent, "ls-files", "--error-unmatch", package.name)
        commit = git(package.parent, "rev-parse", "HEAD")
        changed = git(package.parent, "status", "--porcelain", "--", ".", f":(glob){here}/*.py")
        return {**found, "commit": commit, "changed": bool(changed)}
    return found


def git(folder: Path, *words: str) -> str:
    """The output of git for the checkout of a folder; GIT_* variables are ignored."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "--no-optional-locks", "-C", str(folder), *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()


def console_file(config: TrainConfig) -> Path:
    """The console output of a cell, next to its folder, which must be empty when the run starts."""
    return config.out.with_name(f"{config.out.name}.console.txt")


def work(benchmark: Benchmark) -> None:
    """Train and test the one cell of --only."""
    arguments = benchmark.arguments
    (cell,) = arguments.only
    config = benchmark.configuration(cell)
    config.check()
    config.out.parent.mkdir(parents=True, exist_ok=True)
    switch_threads_often()
    stop_at = None if arguments.until is None else arguments.until - arguments.save_seconds
    with joined_ranks(config.device) as ranks, console_file(config).open("a") as console:
        hooks = benchmark.hooks(cell, Turn(arguments.out), stop_at)
        trainer = Trainer(config, ranks, Console(file=console), hooks, benchmark.data(cell))
        hooks.prepare(trainer)
        trainer.run()


# ----------------------------------------------------------------------------------------------------------------
# The results file


class Results:
    """The events of all cells. Another process may write to the same file; each changes only its own cells."""

    def __init__(self, path: Path, benchmark: Benchmark) -> None:
        self.path, self.benchmark, self.facts, self.lock = path, benchmark, benchmark.facts, threading.RLock()
        self.content = read_results(path, benchmark) if path.is_file() else {"format": 1, "cells": {}}
        protocol = benchmark.protocol
        if protocol is not None:
            refuse_other_protocol(path, benchmark.as_now(self.content.setdefault("protocol", protocol)), protocol)
        if benchmark.arguments.only:
            refuse_other_seed(path, self.content, benchmark.arguments.seed)
            benchmark.check_rows(self.content)
        self.written = as_written(self.content)
        """The content of the file when it was last read or written."""

    def is_done(self, cell: str, benchmark: Benchmark) -> bool:
        """Whether the cell was trained and tested with these settings, at least up to the last step. A longer run
        counts if its learning rate was constant."""
        record, config = self.content["cells"].get(cell, {}), benchmark.as_recorded(cell)
        if not record or not record["finished"] or not benchmark.is_measured(record):
            return False
        if any(record.get(name) != fact for name, fact in benchmark.facts.items()):
            return False
        reached = any(point["step"] == config.steps for point in record["curve"])
        passed = record["step"] == config.steps or (config.optimizer.schedule == "constant" and reached)
        return passed and not differing_settings(from_json(TrainConfig, record["config"]), config)

    def take(self, cell: str, event: dict[str, Any]) -> None:
        """Enter one event of a cell: begin, turn, point, raw, final or end."""
        kind = event.pop("event")
        with self.lock:
            cells = self.content["cells"]
            if kind == "begin":
                said = to_json(self.benchmark.as_recorded(cell))
                event["config"] |= {name: said[name] for name in ("data", "out", "text")}
                kept = [p for p in cells.get(cell, {}).get("curve", []) if 0 < p["step"] <= event["step"]]
                begun = {"seed": event["config"]["seed"], "finished": False, "curve": kept, "parts": []}
                begun["parts"] = cells.get(cell, {}).get("parts", []) if event["step"] else []
                facts = {name: fact for name, fact in self.facts.items() if fact is not None}
                cells[cell] = {**event, **begun, **facts}
            elif kind == "turn":
                return
            elif kind == "point":
                others = [point for point in cells[cell]["curve"] if point["step"] != event["step"]]
                cells[cell]["curve"] = [*others, event]
                cells[cell]["step"] = event["step"]
            elif kind in ("raw", "final"):
                cells[cell][kind] = event
            else:
                part = {name: event[name] for name in ("step", "seconds", "seconds_per_step")}
                part |= {"code": cells[cell]["code"]} if "code" in cells[cell] else {}  # the next part's may be another
                cells[cell]["parts"].append(part)
                cells[cell].update(event)
            self.save()

    def save(self) -> None:
        """Write the cells that changed here since the last read or write; keep the others as they are in the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.lock, locked(self.path.parent):
            now, cells = as_written(self.content), self.content["cells"]
            there = read_results(self.path, self.benchmark, tables=False) if self.path.is_file() else {"cells": {}}
            others = {cell for cell in there["cells"] if now.get(cell) == self.written.get(cell)}
            cells |= {cell: there["cells"][cell] for cell in others}
            for name, known in there.items():
                if name != "cells" and isinstance(known, Mapping):
                    self.content[name] = merged(known, self.content.get(name, {}))
            write_json(self.path, self.content)
            self.written = as_written(self.content)

    def save_rest(self) -> None:
        """Save events that could not be saved when they arrived."""
        with self.lock:
            if as_written(self.content) != self.written:
                self.save()


def merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested mappings; the second one wins."""
    both = {
        name: merged(first[name], second[name])
        for name in first.keys() & second.keys()
        if isinstance(first[name], Mapping) and isinstance(second[name], Mapping)
    }
    return {**first, **second, **both}


def as_written(content: Mapping[str, Any]) -> dict[str, str]:
    """Every cell's record as text, for comparison; all other entries under an empty name."""
    beside = {name: value for name, value in content.items() if name != "cells"}
    return {"": json.dumps(beside)} | {cell: json.dumps(record) for cell, record in content["cells"].items()}


def read_results(path: Path, benchmark: Benchmark, tables: bool = True) -> dict[str, Any]:
    """The content of a results file. With `tables`, check that tables can be made from it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        records = content["cells"].values()
        whole = (
            content["format"] == 1
            and all(record.keys() >= {"config", "curve", "finished", "seed", "step"} for record in records)
            and all("seconds" in record for record in records if record["finished"])
            and all(point["step"] >= 0 and benchmark.is_point(point) for record in records for point in record["curve"])
            and (not tables or benchmark.is_whole(content))
        )
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError):
        content, whole = {}, False
    if not whole:
        raise ValueError(f"{path} is no results file of this benchmark, or a damaged one")
    return content


def make_writable(path: Path) -> None:
    """Make the folder of an output file; raise an error before training if the file cannot be written."""
    with contextlib.suppress(FileExistsError, NotADirectoryError):  # the next line raises a clearer error
        path.parent.mkdir(parents=True, exist_ok=True)
    check_writable(path)


def refuse_other_protocol(path: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Reject rows with different protocols in one table."""
    different = sorted(name for name in {*found, *wanted} if found.get(name) != wanted.get(name))
    if different:
        what = ", ".join(different)
        raise ValueError(f"{path} has results of another protocol ({what} differ); name another file by --results")


def refuse_other_seed(path: Path, content: Mapping[str, Any], seed: int) -> None:
    """Reject rows of another seed, which would replace those in the file."""
    seeds = {record.get("seed", CellArguments.seed) for record in content["cells"].values()}
    if other := sorted(seeds - {seed}):
        raise ValueError(f"{path} has results of --seed {other[0]}; name another file for --seed {seed} by --results")


# ----------------------------------------------------------------------------------------------------------------
# All cells


def say(cell: str, event: Mapping[str, Any], scores: str) -> None:
    """A description of an event in one line."""
    step = f"step {event['step']}"
    speed = event.get("seconds_per_step")
    text = {
        "begin": f"from {step} on {event.get('machine')}",
        "turn": f"its turn at {step}",
        "point": f"{step}: {scores}  ({event.get('seconds')} s)",
        "raw": f"{step}, weights without averaging: {scores}",
        "final": f"{step}, in the end: {scores}  ({event.get('seconds')} s)",
        "end": f"{step}, {'done' if event.get('finished') else 'stopped'} after {event.get('seconds')} s, "
        f"{'' if speed is None else f'{1000 * speed:.2f} ms per step, '}loss {event.get('loss')}",
    }
    print(f"{cell}: {text[event['event']]}", flush=True)


class Workers:
    """The worker processes and their latest events."""

    def __init__(self, benchmark: Benchmark, results: Results, until: float | None) -> None:
        self.benchmark, self.results, self.until = benchmark, results, until
        self.running: dict[str, tuple[subprocess.Popen[str], threading.Thread]] = {}
        self.told: dict[tuple[str, str], float] = {}
        """The time.time() of the latest event, by cell and name of the event."""

    @property
    def have_had_their_turn(self) -> bool:
        return all((cell, "turn") in self.told for cell in self.running)

    def start(self, cell: str) -> None:
        """Start a worker for one cell: this command line with more options at the end, which take precedence. Errors go
        to the console file."""
        command = [sys.executable, str(self.benchmark.script), *sys.argv[1:], "--only", cell, "--worker"]
        command += [] if self.until is None else ["--until", f"{self.until:.1f}"]
        file = console_file(self.benchmark.configuration(cell))
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as console:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=console, text=True)
        thread = threading.Thread(target=self.follow, args=(cell, process))
        thread.start()
        self.running[cell] = (process, thread)

    def expected_end(self, cell: str) -> float:
        """When a cell that is started now would end, as time.time(); its turn comes after the running cells."""
        return time.time() + sum(map(self.left, self.running)) + self.benchmark.seconds(cell, self.results.content)

    def left(self, cell: str) -> float:
        """The expected seconds until a running cell ends; compilation is over when its turn begins."""
        whole, turn = self.benchmark.seconds(cell, self.results.content), self.told.get((cell, "turn"))
        if turn is None:
            return whole
        return max(0.0, turn + whole - self.benchmark.arguments.start_seconds - time.time())

    def follow(self, cell: str, process: subprocess.Popen[str]) -> None:
        """Record the events of a worker until it ends. If saving fails, it is tried again after the next event."""
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                if not line.startswith('{"event"'):
                    print(f"{cell}: {line}", end="", flush=True)
                    continue
                event = json.loads(line)
                say(cell, event, self.benchmark.scores(event))
                self.told[cell, event["event"]] = time.time()
                try:
                    self.results.take(cell, event)
                except (OSError, ValueError) as error:  # such as a full disk or a damaged file
                    print(f"{cell}: not saved yet: {error}", file=sys.stderr, flush=True)

    def ended(self) -> dict[str, int]:
        """Remove the workers that have ended and return their cells with exit codes."""
        codes = {cell: process.poll() for cell, (process, _) in self.running.items()}
        ended = {cell: code for cell, code in codes.items() if code is not None}
        for cell in ended:
            self.running.pop(cell)[1].join()
        return ended

    def stop(self) -> None:
        """Signal all workers to save and end."""
        for process, thread in self.running.values():
            process.terminate()
            process.wait()
            thread.join()


@contextlib.contextmanager
def as_ctrl_c(number: signal.Signals) -> Iterator[None]:
    """Treat a signal like Ctrl-C, once: `timeout` sends it twice, and the second would interrupt saving."""

    def interrupt(*_: object) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt(number)

    before = signal.signal(number, interrupt)
    try:
        yield
    finally:
        signal.signal(number, before)


def complete_early(benchmark: Benchmark, results: Results) -> None:
    """Do the remaining work of finished cells while others run, because the machine may not be available later."""
    try:
        with results.lock:
            benchmark.complete(results)
    except (ValueError, RuntimeError, OSError) as error:  # such as too little memory while a cell is trained
        print(f"put off until the cells are done: {error}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def saving(workers: Workers, results: Results) -> Iterator[None]:
    """On exit, stop the workers and save what is not saved yet. If saving fails after an interruption or another error,
    print a line and raise the original error."""
    try:
        yield
    except BaseException:
        try:
            workers.stop()
        finally:
            try:
                results.save_rest()
            except (OSError, ValueError) as error:
                print(f"not saved: {error}", file=sys.stderr, flush=True)
        raise
    results.save_rest()


def check_outputs(benchmark: Benchmark, content: Mapping[str, Any]) -> None:
    """Raise an error before training if the plot or the page cannot be written."""
    arguments = benchmark.arguments
    check_writable(arguments.plot)
    check_writable(arguments.page)
    if arguments.page is not None:
        with_tables(arguments.page, benchmark.tables(content))


def run(benchmark: Benchmark) -> int:
    """Run all unfinished cells, one after the other; the exit code is 1 if any of them failed."""
    arguments = benchmark.arguments
    seconds = arguments.budget if arguments.minutes is None else 60 * arguments.minutes
    until = None if seconds is None else time.time() + seconds
    results = Results(arguments.results, benchmark)
    cells = dict.fromkeys(map(benchmark.named, arguments.only))
    waiting = [cell for cell in cells if not results.is_done(cell, benchmark)]
    if waiting:
        make_writable(arguments.results)
    check_outputs(benchmark, results.content)
    benchmark.prepare(waiting)
    for cell in cells:
        if cell not in waiting:
            print(f"{cell}: done before", flush=True)
    workers, failed = Workers(benchmark, results, until), False

    def fits(cell: str) -> bool:
        """Whether there is time to start the cell or, with --budget, to finish it."""
        if until is None:
            return True
        if arguments.budget is not None:
            return workers.expected_end(cell) <= until
        return time.time() + arguments.start_seconds + arguments.save_seconds <= until

    with saving(workers, results):
        while workers.running or (waiting and fits(waiting[0])):
            if waiting and fits(waiting[0]) and workers.have_had_their_turn:
                workers.start(waiting.pop(0))
            for cell, code in workers.ended().items():
                if (cell, "end") in workers.told:
                    complete_early(benchmark, results)
                else:
                    failed = True
                    file = console_file(benchmark.configuration(cell))
                    last = file.read_text(errors="replace").rstrip().rpartition("\n")[2]
                    how = f"ended by {signal.Signals(-code).name}" if code < 0 else "failed"
                    print(f"{cell}: {how}; {file} ends in: {last}", flush=True)
            time.sleep(0.1)
        results.save_rest()  # before what may take minutes
        if waiting:
            print(f"no time for {', '.join(waiting)}: the same command goes on", flush=True)
        benchmark.complete(results)
    show(benchmark, results.content)
    return int(failed)


def show(benchmark: Benchmark, content: Mapping[str, Any]) -> None:
    """Print the tables; with --page and --plot, write them into a page and plot the curves."""
    made = benchmark.tables(content)
    print("\n\n".join(made.values()))
    if benchmark.arguments.page is not None:
        write_page(benchmark.arguments.page, made)
    plot = benchmark.arguments.plot
    if plot is not None and with_curves(content):
        with atomic_file(plot) as file:
            benchmark.curves(content).savefig(file, format=plot.suffix[1:], dpi=110)
        print(f"the curves: {plot}", file=sys.stderr)
    elif plot is not None:
        print("there is no curve to draw yet", file=sys.stderr)


def main(kind: type[Benchmark]) -> int:
    """Run the command line; invalid input ends with one line on standard error."""

    def asked(arguments: CellArguments) -> int:
        try:
            return answer(kind, arguments)
        except KeyboardInterrupt as stop:
            print(f"{kind.name}: stopped; the same command goes on", file=sys.stderr)
            return 128 + (stop.args or (signal.SIGINT,))[0]

    return command(kind.script, kind.Arguments, asked)


def answer(kind: type[Benchmark], arguments: CellArguments) -> int:
    """Show tables, train one cell as a worker, or run all unfinished cells."""
    arguments.check()
    benchmark = kind(arguments)
    if arguments.table is not None:
        shown = [kind(replace(arguments, results=path)) for path in arguments.table]  # with what lies beside it
        contents = [read_results(one.arguments.results, one) for one in shown]
        if len(contents) > 1:
            print(benchmark.over_seeds(contents, arguments.table))
        else:
            check_outputs(shown[0], contents[0])
            show(shown[0], contents[0])
        return 0
    if arguments.worker:
        work(benchmark)
        return 0
    with as_ctrl_c(signal.SIGTERM):
        return run(benchmark)


# ----------------------------------------------------------------------------------------------------------------
# Functions shared by the tables


def with_curves(content: Mapping[str, Any]) -> list[str]:
    """The cells with results."""
    return [cell for cell, record in content["cells"].items() if record.get("curve")]


def last_shared_step(records: Mapping[str, Sequence[Mapping[str, Any]]]) -> int:
    """The last step at which all runs of all cells were tested."""
    steps = [{point["step"] for point in record["curve"]} for runs in records.values() for record in runs]
    shared = set.intersection(*steps) if steps else set[int]()
    if not shared:
        raise ValueError("these results files share no cell that was tested at the same step")
    return max(shared)


def different_seeds(
    records: Mapping[str, Sequence[Mapping[str, Any]]], settings_of: Callable[[str, Mapping[str, Any]], dict[str, Any]]
) -> list[int]:
    """The seeds of the files; all settings but the seed must agree within each cell."""
    found: list[int] = []
    for cell, runs in records.items():
        settings = [settings_of(cell, record) for record in runs]
        seeds = [own.pop("seed", CellArguments.seed) for own in settings]
        if any(own != settings[0] for own in settings):
            raise ValueError(f"{cell} was trained with other settings in one of these files than in another")
        if len(set(seeds)) < len(seeds) or seeds != (found or seeds):
            raise ValueError(f"each file must have a seed of its own, in all of its cells; {cell} has {seeds}")
        found = seeds
    return found


def mean_with_interval(values: torch.Tensor) -> str:
    """The mean of a few runs with a 95% interval by Student's t."""
    mean, error = mean_and_stderr(values)
    half = student_quantile(len(values) - 1) * error
    return f"{mean:.2f} ({mean - half:.2f} to {mean + half:.2f})"
