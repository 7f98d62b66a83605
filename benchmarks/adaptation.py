"""Bits per byte of an autoregressive model adapted to diffusion, in several ways.

    python benchmarks/adaptation.py --model SmolLM2-135M.gguf --data FOLDER --cells blocks-4 --seconds 240
    python benchmarks/adaptation.py --model runs/ar --data FOLDER --results own.json --runs runs/own
    python benchmarks/adaptation.py --table benchmarks/results/adaptation.json

All cells (CELLS) start from the same model, train on the same text for the same time with the preset `adapt`, and are
measured on the same held-out blocks. `parent` is the model before any training, and `ar` the model after further
autoregressive training: the baselines of the adapted models. Bits per byte are the exact likelihood for `parent` and
`ar`, and the bound `tight` for the others, with the exact likelihood for blocks of at most 4 tokens.

A record has the milliseconds per step, memory, the learning curve (bits per byte of some held-out blocks, by number of
tokens), and bits per byte with standard errors over blocks, on the held-out text and on the test sets in --data.
Every result is saved when it is measured, and the same command continues with the missing ones. Training time excludes
compilation, the first 20 steps and evaluations, about 90 s per cell.

FOLDER has corpus/ and eval/. The package gguf has to be installed.
"""

from __future__ import annotations

import gc
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from command_line import command
from language_text import ENDINGS, SETS, Documents, stem
from rich.console import Console

import cedd
from cedd.data.evaluation_sets import load_evaluation_set
from cedd.data.packing import pack
from cedd.data.tokenizers import Tokenizer, load_tokenizer
from cedd.data.training_data import TrainingData
from cedd.device import model_device, pick_device
from cedd.methods import Method
from cedd.models.backbone import Backbone
from cedd.models.locate import is_model
from cedd.process import TokenProcess
from cedd.storage import write_json
from cedd.training.config import PRESETS, AdaptConfig, ProcessConfig, TrainConfig, starting_from, unused_settings
from cedd.training.distributed import joined_ranks
from cedd.training.loop import Hooks, Trainer
from cedd.training.time_limit import TimeLimit

LENGTH = 128
HELD_OUT = "held-out"
HOLDOUT = 0.004
"""The share of the documents that is held out."""
CELLS: Mapping[str, Mapping[str, Any]] = {
    "parent": {},
    "ar": {"method": "ar"},
    "blocks-2": {"block": 2},
    "blocks-4": {"block": 4},
    "blocks-16": {"block": 16},
    "blocks-16-grown": {"block": 16, "adapt": {"first_block": 1}},
    "blocks-4-next-token": {"block": 4, "adapt": {"next_token_weight": 0.3}},
    "blocks-16-next-token": {"block": 16, "adapt": {"next_token_weight": 0.3}},
    "blocks-4-no-shift": {"block": 4, "adapt": {"shift": False}},
    "blocks-16-no-shift": {"block": 16, "adapt": {"shift": False}},
    "blocks-4-block-past": {"block": 4, "adapt": {"causal_past": False}},
    "full": {},
    "full-annealed": {"adapt": {"anneal": 0.3}},
    "full-no-shift": {"adapt": {"shift": False}},
}
"""What differs from the preset `adapt`, by the names of cells."""
EXACT_BLOCK = 4
"""The largest block whose exact likelihood is computed: 2^b - 1 evaluations."""
FASTEST = 0.04
"""Seconds of the fastest step to expect: a time limit plans for as many steps, and the speed then lowers their
number. (A learning rate that decays can end earlier, but not later.)"""


@dataclass(frozen=True)
class Arguments:
    """example: python benchmarks/adaptation.py --model SmolLM2.gguf --data /tmp/data --seconds 300

    Bits per byte against tokens, for every way to adapt an autoregressive model to diffusion.
    """

    model: Path | None = None
    """An autoregressive model: a GGUF file, a folder to import, or a model folder."""
    data: Path | None = None
    """The folder of corpus/ (text files) and perhaps eval/ (test sets)."""
    cells: tuple[str, ...] = ("parent", "ar", "blocks-4", "blocks-16", "full")
    """The cells to train, in this order."""
    seconds: float = 300.0
    """Training time per cell, in seconds."""
    steps: int | None = None
    """Take this number of steps instead."""
    batch: int = 256
    """Sequences of 128 tokens per step; with complementary masks, each text is in the batch twice."""
    rate: float | None = None
    """The highest learning rate, by default the preset's."""
    points: tuple[float, ...] = (0.0, 0.0625, 0.125, 0.25, 0.5)
    """Shares of the training after which a point of the learning curve is measured, on an eighth of --blocks."""
    blocks: int = 1024
    """Held-out blocks that are measured at the end; a quarter as many of each test set."""
    sets: tuple[str, ...] = ("wikitext2", "ptb", "lambada", "wikitext103", "lm1b")
    """Test sets that are measured at the end, where --data has eval/."""
    results: Path = Path("benchmarks/results/adaptation.json")
    """The results file."""
    runs: Path = Path("runs/adaptation")
    """Folder of the trained models."""
    workers: int = 8
    """Processes that tokenize."""
    device: str = "auto"
    """auto, cpu or cuda."""
    table: Path | None = None
    """Print the table of a results file, and do nothing else."""


def prepared_parent(arguments: Arguments) -> Path:
    """The model as a folder of ours."""
    assert arguments.model is not None
    if arguments.model.is_dir() and is_model(arguments.model) and (arguments.model / "cedd_tokenizer.json").is_file():
        return arguments.model
    folder = arguments.runs / "model"
    if not is_model(folder):
        cedd.import_model(arguments.model, device="cpu").save_pretrained(folder)
    return folder


def configuration(arguments: Arguments, cell: str, parent: Path) -> TrainConfig:
    """The run of a cell."""
    assert arguments.data is not None
    changes = dict(CELLS[cell])
    preset = PRESETS["adapt"][1]
    start = starting_from(replace(preset, length=LENGTH), str(parent))
    optimizer = preset.optimizer if arguments.rate is None else replace(preset.optimizer, rate=arguments.rate)
    is_ar = changes.get("method") == "ar"
    return replace(
        start,
        data=str(arguments.data / "corpus"),
        out=arguments.runs / cell,
        method=changes.get("method", preset.method),
        process=ProcessConfig("absorb"),
        block=changes.get("block"),
        adapt=AdaptConfig(**changes.get("adapt", {})),
        length=LENGTH,
        text=replace(start.text, workers=arguments.workers),
        optimizer=optimizer,
        batch=replace(preset.batch, size=arguments.batch, complementary=not is_ar),
        evaluation=replace(preset.evaluation, every=0, samples=0),
        steps=arguments.steps or int(arguments.seconds / FASTEST),
        checkpoint_every=10**9,
        device=arguments.device,
    )


@dataclass
class Curve(Hooks):
    """The learning curve, and the speed.

    Args:
        texts: what is measured, blocks [N, L].
        shares: of the training after which it is measured, ascending.
    """

    texts: torch.Tensor
    shares: tuple[float, ...]
    points: list[dict[str, Any]] = field(init=False, default_factory=list[dict[str, Any]])
    milliseconds: list[float] = field(init=False, default_factory=list[float])
    last: tuple[int, float] | None = field(init=False, default=None)

    def progress(self, trainer: Trainer) -> float:
        """The share of the training that is done."""
        return trainer.state.step / trainer.config.steps

    def before_step(self, trainer: Trainer) -> None:
        if len(self.points) < sum(share <= self.progress(trainer) for share in self.shares):
            trainer.evaluate()
            trainer.meter.pause()

    def evaluate(self, trainer: Trainer, model: Backbone) -> float:
        self.last = None
        with torch.no_grad(), trainer.validation.precision.autocast():
            found = measured(model, trainer.process, trainer.method, trainer.data.tokenizer, self.texts)
        self.points.append({"tokens": tokens_of(trainer.config, trainer.state.step), **found})
        print(json.dumps({"step": trainer.state.step, **self.points[-1]}), flush=True)
        return found["bits_per_byte"]

    def on_log(self, record: Mapping[str, Any]) -> None:
        if record["kind"] == "train":
            now = (record["step"], time.perf_counter())
            if self.last is not None and record["step"] > 100:
                self.milliseconds.append(1000 * (now[1] - self.last[1]) / (now[0] - self.last[0]))
            self.last = now


@dataclass
class TimedCurve(TimeLimit, Curve):
    """The same within a time limit, of training without evaluations."""

    def progress(self, trainer: Trainer) -> float:
        return 0.0 if self.began is None else (time.monotonic() - self.began.time) / self.seconds

    def before_step(self, trainer: Trainer) -> None:
        TimeLimit.before_step(self, trainer)
        Curve.before_step(self, trainer)

    def evaluate(self, trainer: Trainer, model: Backbone) -> float:
        before = self.evaluating
        found = super().evaluate(trainer, model)
        if self.began is not None:
            self.seconds += self.evaluating - before
        return found


def tokens_of(config: TrainConfig, steps: int) -> int:
    """The number of tokens that this number of steps reads."""
    return steps * config.batch.size * LENGTH


def texts(arguments: Arguments, tokenizer: Tokenizer) -> TrainingData:
    """The corpus without its held-out documents, and those of its first file that is called wikipedia, or first."""
    assert arguments.data is not None
    files = sorted(file for file in (arguments.data / "corpus").iterdir() if file.name.endswith(ENDINGS))
    if not files:
        raise ValueError(f"{arguments.data / 'corpus'} has no text files ({', '.join(ENDINGS)})")
    first = next((file for file in files if stem(file) == "wikipedia"), files[0])
    options: dict[str, Any] = {"workers": arguments.workers, "cache": arguments.runs / "tokens"}
    kept = pack(Documents(files, HOLDOUT, held_out=False), tokenizer, LENGTH, **options)
    held = pack(Documents([first], HOLDOUT, held_out=True), tokenizer, LENGTH, **options)
    return TrainingData(tokenizer, kept, held)


def trained(
    arguments: Arguments, cell: str, parent: Path, data: TrainingData, held_out: torch.Tensor
) -> dict[str, Any]:
    """Train a cell; how it went."""
    config = configuration(arguments, cell, parent)
    some = held_out[:: max(1, len(held_out) // max(1, arguments.blocks // 8))], arguments.points
    # The first steps compile the network, or none where it is not compiled.
    first = 20 if pick_device(config.device).type == "cuda" else 1
    curve = Curve(*some) if arguments.steps else TimedCurve(*some, seconds=arguments.seconds, first=first)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    with joined_ranks(config.device) as ranks:
        result = Trainer(config, ranks, Console(stderr=True), curve, data).run()
    if not result.finished:  # interrupted: it gets no record
        raise SystemExit(result.exit_code)
    each = sorted(curve.milliseconds)
    return {
        "steps": result.step,
        "tokens": tokens_of(config, result.step),
        "seconds": round(time.perf_counter() - started, 1),
        "milliseconds_per_step": round(each[len(each) // 2], 2) if each else None,
        "gibibytes": round(torch.cuda.max_memory_allocated() / 2**30, 2) if torch.cuda.is_available() else None,
        "curve": curve.points,
    }


def measured(
    model: Backbone, process: TokenProcess, method: Method, tokenizer: Tokenizer, data: torch.Tensor, exact: bool = True
) -> dict[str, Any]:
    """Bits per byte on blocks [N, L]: the bound, and with `exact` the likelihood where blocks are small."""
    bytes_ = sum(len(tokenizer.decode(row).encode("utf-8", "replace")) for row in data.numpy())
    scale, blocks = data.numel() / bytes_ / math.log(2), data.to(model_device(model))
    how: dict[str, Any] = {"method": method, "generator": torch.Generator().manual_seed(0)}
    found = cedd.estimate_bound(model, process, blocks, draws=16, batch=128, **how)
    record = {"bits_per_byte": found.nats_per_token * scale, "stderr": found.stderr * scale, "blocks": len(data)}
    if exact and method.block is not None and method.block <= EXACT_BLOCK:
        parts = [
            cedd.exact_likelihood(model, process, part, range(data.shape[1]), method=method)
            for part in blocks.split(128)
        ]
        record |= {"exact_bits_per_byte": float(torch.cat(parts).mean()) / data.shape[1] * scale}
    return record


def test_sets(arguments: Arguments, tokenizer: Tokenizer) -> dict[str, torch.Tensor]:
    """Blocks of the test sets that are there."""
    assert arguments.data is not None
    found: dict[str, torch.Tensor] = {}
    for name in arguments.sets if (arguments.data / "eval").is_dir() else ():
        packed = load_evaluation_set(name, tokenizer, LENGTH, root=arguments.data, workers=arguments.workers).packed
        found[name] = torch.from_numpy(packed.evenly_spaced(max(1, arguments.blocks // 4)))
    return found


def run(arguments: Arguments) -> int:
    """Train and measure the cells that are not in the results file yet."""
    if arguments.table is not None:
        records = json.loads(arguments.table.read_text())
        print(table(records), curves(records), sep="\n\n")
        return 0
    if arguments.model is None or arguments.data is None:
        raise ValueError("name the model and the folder of the data: --model FILE --data FOLDER")
    if unknown := [cell for cell in arguments.cells if cell not in CELLS]:
        raise ValueError(f"--cells: invalid choice: {unknown[0]!r}; use {', '.join(CELLS)}")
    parent = prepared_parent(arguments)
    for cell in arguments.cells:
        check_cell(arguments, cell, parent)
    data = texts(arguments, load_tokenizer(parent))
    held_out = torch.from_numpy(data.validation.evenly_spaced(arguments.blocks))
    measured_on = {HELD_OUT: held_out, **test_sets(arguments, data.tokenizer)}
    records = json.loads(arguments.results.read_text()) if arguments.results.is_file() else {}
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    for cell in arguments.cells:
        record = records.setdefault(cell, {"bits_per_byte": {}})
        missing = [name for name in measured_on if name not in record["bits_per_byte"]]
        folder = parent if cell == "parent" else arguments.runs / cell
        if missing and (cell != "parent" and ("steps" not in record or not is_model(folder))):
            record |= trained(arguments, cell, parent, data, held_out)
            write_json(arguments.results, records, indent=2)
            gc.collect()
            torch.compiler.reset()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        model = cedd.load(folder, device=arguments.device) if missing else None
        for name in missing:
            assert model is not None
            one = (model.model, model.process, model.method, model.tokenizer)
            with torch.autocast(model.device.type, torch.bfloat16, enabled=model.device.type == "cuda"):
                record["bits_per_byte"][name] = measured(*one, measured_on[name], exact=name == HELD_OUT)
            write_json(arguments.results, records, indent=2)
            print(json.dumps({cell: {name: record["bits_per_byte"][name]}}), flush=True)
    print(table(records), curves(records), sep="\n\n")
    return 0


def check_cell(arguments: Arguments, cell: str, parent: Path) -> None:
    """Refuse cells that differ in a setting which has no effect on this model."""
    adapt, unused = CELLS[cell].get("adapt", {}), unused_settings(configuration(arguments, cell, parent))
    for name in adapt:
        if why := unused.get(f"adapt.{name}"):
            raise ValueError(f"--cells: {cell} differs in adapt.{name}, which has no effect {why}; leave it out")


def table(records: Mapping[str, Any], shown: Sequence[str] = ()) -> str:
    """Bits per byte of these texts (default: all) in Markdown, ± half of the 95% interval over sequences."""
    texts = list(dict.fromkeys(name for record in records.values() for name in record["bits_per_byte"]))
    texts = [name for name in texts if name in shown or not shown]
    titles = {HELD_OUT: "held-out Wikipedia", **SETS}
    bounds = [f"{titles.get(name, name)}, at most" for name in texts]
    head = ["row", "tokens, million", f"{titles[HELD_OUT]}, exact", *bounds]
    lines = [head, ["---", *["--:"] * (len(head) - 1)]]
    for cell, record in records.items():
        found = record["bits_per_byte"]
        figures = [
            f"{found[name]['bits_per_byte']:.3f} ± {1.96 * found[name]['stderr']:.3f}" if name in found else ""
            for name in texts
        ]
        exact = found.get(HELD_OUT, {}).get("exact_bits_per_byte")
        tokens = f"{record['tokens'] / 1e6:.0f}" if "tokens" in record else "0"
        lines.append([cell, tokens, "" if exact is None else f"{exact:.3f}", *figures])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def curves(records: Mapping[str, Any]) -> str:
    """The learning curves as a table in Markdown: bits per byte of some held-out blocks by millions of tokens."""
    lines = [["cell", "bits per byte after millions of tokens"], ["---", "---"]]
    for cell, record in records.items():
        if points := record.get("curve"):
            shown = [
                f"{point['tokens'] / 1e6:.1f}: {point['bits_per_byte']:.3f}"
                + (f" (exact {point['exact_bits_per_byte']:.3f})" if "exact_bits_per_byte" in point else "")
                for point in points
            ]
            lines.append([cell, ", ".join(shown)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    raise SystemExit(command(__file__, Arguments, run))
