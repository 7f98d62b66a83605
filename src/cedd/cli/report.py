"""`cedd report`: a run as one self-contained page, or several runs compared."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import tyro

from cedd.bounds.estimate import BoundEstimate
from cedd.bounds.estimator import estimate_bound
from cedd.cli.opened_run import OpenedRun, open_run, prose_lines
from cedd.cli.sampling import PAGE_SUFFIXES
from cedd.cli.stages import Stages, showing_stages
from cedd.data import corrupt_letters
from cedd.evaluation.baselines import Baseline, measure_baselines
from cedd.evaluation.pages import comparison_page, run_page
from cedd.evaluation.perplexity import compare
from cedd.evaluation.report import (
    BoundFigures,
    ComparedRun,
    CorrectedText,
    Correction,
    Infilling,
    NoiseDrawing,
    RunReport,
    bound_figures,
    draw_noise,
    plain,
)
from cedd.evaluation.spelling import outcomes
from cedd.process import absorb, roulette, uniform
from cedd.storage import atomic_write, check_writable, write_json
from cedd.tasks import Trajectory
from cedd.tasks.correct import correction_options, corrections
from cedd.tasks.generate import generate
from cedd.tasks.infill import infill
from cedd.tasks.setting import Settings
from cedd.training.config import PRESETS, TrainConfig, flat
from cedd.training.records import LOG_FILE, read_log

PAGE_FILE, RECORD_FILE, HELD_OUT_FILE = "report.html", "report.json", "held-out.txt"
_TIMES = tuple(k / 10 for k in range(1, 11))
_WRONG = 0.05  # the share of letters that are replaced
_THRESHOLDS = (0.5, 0.3, 0.1, 0.03)
_LINE = 72

Say = Callable[[str], Any]


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    sequences: int = 1000
    """At most so many held-out sequences, evenly spaced."""
    draws: int = 4
    """Noise levels for each."""
    samples: int = 4
    """Texts that are sampled."""

    def check(self) -> None:
        """Refuse what cannot be measured."""
        for name, least in {"sequences": 1, "draws": 1, "samples": 0}.items():
            if getattr(self, name) < least:
                raise ValueError(f"--{name} must be at least {least}; got {getattr(self, name)}")


@dataclass(frozen=True)
class Arguments:
    """example: cedd report runs/quickstart

    Write a run's curves, its bound beside simple models, samples and corrections as one page, RUN/report.html (the
    example: after cedd quickstart).
    Of several runs, a comparison with paired intervals: cedd report runs/first runs/second --out comparison.html
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]")]
    """Folders of cedd train or cedd quickstart."""
    out: Path | None = None
    """The page; by default report.html (beside it the figures, report.json), or comparison.html, in the (first) run's
    folder."""
    effort: Annotated[Effort, tyro.conf.arg(name="")] = Effort()
    seed: int = 0
    """Of everything random."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:1."""
    json: bool = False
    """Print all figures and texts as JSON."""


def run(arguments: Arguments) -> int:
    """Write the page and say where it is."""
    if not arguments.runs:
        raise ValueError("name at least one run: cedd report runs/first")
    arguments.effort.check()
    check_writable(arguments.out, PAGE_SUFFIXES)
    with showing_stages() as stages:
        if len(arguments.runs) == 1:
            opened = open_run(arguments.runs[0], arguments.device)
            report = describe_run(opened, arguments.effort, arguments.seed, stages)
            path = arguments.out or opened.path / PAGE_FILE
            write_report(report, path)
            record = report.record()
        else:
            path = arguments.out or arguments.runs[0] / "comparison.html"
            record = compare_runs(arguments, path, stages)
    print(json.dumps(record) if arguments.json else f"open {path}")
    return 0


# ----------------------------------------------------------------------------------------------------------------
# One run


def describe_run(
    opened: OpenedRun, effort: Effort, seed: int, stages: Stages, facts: Mapping[str, str] | None = None
) -> RunReport:
    """Measure all that the page of a run shows."""
    notes: dict[str, str] = {}
    blocks = opened.held_out(effort.sequences)
    text = opened.text(blocks)
    stages.begin(f"measuring the bound on {len(blocks)} held-out sequences")
    estimate = measure_bound(opened, blocks, effort.draws, seed, stages)
    figures = bound_figures(estimate, len(text), opened.model.method.causal)
    stages.begin("unigram, n-gram, gzip, bz2 and xz on the same text")
    baselines = run_baselines(opened, blocks)
    lines = prose_lines(opened.text(opened.data.validation[:2000]), 8, min(_LINE, opened.model.length))
    stages.begin("writing, filling in, correcting")
    trajectory = Trajectory(opened.model.tokenizer)
    samples: list[str] = []
    with noted(notes, "samples"):
        if not effort.samples:
            raise ValueError("no samples were asked for (--samples 0)")
        samples = generate(opened.model.setting, effort.samples, settings=Settings(seed=seed), callback=trajectory)
    animation = trajectory.page("from noise to text") if len(trajectory.frames) > 1 else ""
    filling = correction = None
    with noted(notes, "infilling"):
        filling = fill_in(opened, lines, seed)
    with noted(notes, "correction"):
        correction = correct_text(opened, lines, seed)
    return RunReport(
        run=str(opened.path),
        method=opened.model.method.name,
        process=opened.process,
        facts={**run_facts(opened), **(facts or {})},
        losses=read_losses(opened.path),
        bounds=read_bounds(opened, figures),
        bound=figures,
        baselines=baselines,
        noise=draw_processes(opened, lines[0], seed),
        samples=samples,
        animation=animation,
        infilling=filling,
        correction=correction,
        commands=run_commands(opened, effort, seed, blocks, filling, correction),
        notes=notes,
    )


@contextmanager
def noted(notes: dict[str, str], name: str) -> Generator[None]:
    """What a model cannot do is left out, and its page says why."""
    try:
        yield
    except ValueError as error:
        notes[name] = str(error)


def write_report(report: RunReport, path: Path) -> None:
    """The page, and beside a report.html its figures: beside another name, the .json of that name may be the user's."""
    atomic_write(path, run_page(report).encode("utf-8", "replace"))
    if path.name == PAGE_FILE:
        write_json(path.with_name(RECORD_FILE), report.record())


def measure_bound(opened: OpenedRun, blocks: np.ndarray, draws: int, seed: int, stages: Stages) -> BoundEstimate:
    """The tight bound (an autoregressive model's likelihood) on blocks [N, L]."""
    model = opened.model
    with torch.no_grad():
        return estimate_bound(
            model.folder.model,
            model.process,
            torch.from_numpy(blocks),
            method=model.method,
            draws=draws,
            generator=torch.Generator().manual_seed(seed),
            device=model.setting.device,
            progress=stages.move,
        )


def run_baselines(opened: OpenedRun, blocks: np.ndarray) -> list[Baseline]:
    """Simple models of the run's training text on the same blocks."""
    tokenizer = opened.model.tokenizer
    train = np.asarray(opened.data.train.blocks[-200_000:], dtype=np.int64)
    return measure_baselines(train, blocks, vocab_size=tokenizer.vocab_size, decode=tokenizer.decode)


def run_facts(opened: OpenedRun) -> dict[str, str]:
    """What was trained, in words."""
    config, tokenizer = opened.config, opened.model.tokenizer
    steps = max((record["step"] for record in read_log(opened.path / LOG_FILE)), default=0)
    return {
        "data": config.data,
        "tokens": f"{tokenizer.name}, {tokenizer.vocab_size:,} of them",
        "sequences": f"{config.length} tokens, {config.batch.size} a step",
        "steps": f"{steps:,}",
        "parameters": f"{opened.parameters:,}",
    }


def read_losses(path: Path, most: int = 800) -> list[tuple[int, float]]:
    """(step, loss) of the log; neighbours are averaged where there are too many to draw."""
    points = [
        (r["step"], r["loss"]) for r in read_log(path / LOG_FILE) if r["kind"] == "train" and r["loss"] is not None
    ]
    size = math.ceil(len(points) / most) or 1
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return [(group[-1][0], sum(loss for _, loss in group) / len(group)) for group in groups]


def read_bounds(opened: OpenedRun, figures: BoundFigures) -> list[tuple[int, float, float]]:
    """(step, bits per character, half-width of the 95% interval) of the evaluations while training."""
    scale = figures.sequences * opened.model.length / figures.characters / math.log(2)
    records = [r for r in read_log(opened.path / LOG_FILE) if r["kind"] == "bound" and r["nats_per_token"] is not None]
    return [(r["step"], r["nats_per_token"] * scale, 1.96 * (r["stderr"] or 0.0) * scale) for r in records]


def draw_processes(opened: OpenedRun, line: str, seed: int) -> list[NoiseDrawing]:
    """The same line under absorb, uniform and roulette, and under the run's own process where it is none of these."""
    tokenizer = opened.model.tokenizer
    ids, size = tokenizer.encode(line), tokenizer.vocab_size
    own = opened.model.process
    drawn = {"absorb": absorb(size), "uniform": uniform(size), "roulette (p_m = 0.95)": roulette(size)}
    if not opened.model.method.causal and opened.process not in drawn:
        drawn[f"{opened.process}: this run's"] = own
    return [draw_noise(process, name, tokenizer, ids, _TIMES, seed) for name, process in drawn.items()]


def fill_in(opened: OpenedRun, lines: Sequence[str], seed: int, n: int = 3) -> Infilling:
    """The two longest words of a line, blanked and written anew."""
    line = lines[min(1, len(lines) - 1)]
    words = sorted(re.finditer(r"[A-Za-z]+", line[1:]), key=lambda word: -len(word[0]))[:2]
    template = line
    for word in sorted(words, key=lambda word: -word.start()):
        width = len(opened.model.tokenizer.encode(word[0]))
        template = f"{template[: word.start() + 1]}____{{{width}}}{template[word.end() + 1 :]}"
    return Infilling(template, line, infill(opened.model.setting, template, n, settings=Settings(seed=seed)))


def correct_text(opened: OpenedRun, lines: Sequence[str], seed: int) -> Correction:
    """Put wrong letters right: counted on a stretch of held-out text, shown on some lines of it."""
    tokenizer, model = opened.model.tokenizer, opened.model
    if getattr(tokenizer, "characters", None) is None:
        raise ValueError("letters are replaced where tokens are characters; this run's are not: try cedd correct")

    def corrected(text: str, thresholds: Sequence[float], seed: int) -> list[CorrectedText]:
        given = corrupt_letters(text, _WRONG, seed).text
        ways = [correction_options(model.setting, {"rate": _WRONG, "threshold": one}) for one in thresholds]
        return [CorrectedText(text, given, str(now)) for now in corrections(model.setting, given, ways)]

    def gain(text: CorrectedText) -> int:
        _, fixed, _, _, broken = count_letters(text)
        return fixed - broken

    practice = opened.text(opened.data.train[: min(48, len(opened.data.train))])
    gains = map(gain, corrected(practice, _THRESHOLDS, seed))
    best = max(zip(_THRESHOLDS, gains, strict=True), key=lambda pair: pair[1])[0]
    (held_out,) = corrected(opened.text(opened.data.validation[:128]), [best], seed)
    counts = count_letters(held_out)
    examples = [text for i, line in enumerate(lines[:6]) for text in corrected(line, [best], seed + i)]
    return Correction(_WRONG, best, *counts, examples)


def count_letters(text: CorrectedText) -> tuple[int, int, int, int, int]:
    """Wrong letters, those of them put right and those left, right characters, and those of them broken."""
    seen = outcomes(text.original, text.corrupted, text.corrected)
    right = seen.broken + seen.broken_others
    return seen.fixed.total, seen.fixed.count, seen.missed.count, right.total, right.count


# ----------------------------------------------------------------------------------------------------------------
# Commands that do it again


def run_commands(
    opened: OpenedRun,
    effort: Effort,
    seed: int,
    blocks: np.ndarray,
    filling: Infilling | None,
    correction: Correction | None,
) -> dict[str, str]:
    """Each step of the page as a command."""
    run = str(opened.path)
    commands = {"train": train_command(opened.config)}
    if (file := save_held_out(opened, blocks)) is not None:
        words = ["evaluate", run, "--data", str(file), "--draws", str(effort.draws), "--seed", str(seed)]
        commands["evaluate"] = command(*words)
    if effort.samples:
        commands["sample"] = command("sample", run, "-n", str(effort.samples), "--seed", str(seed))
    if filling is not None:
        commands["infill"] = command("infill", run, filling.template, "-n", "3", "--seed", str(seed))
    if correction is not None:
        words = ["correct", run, correction.examples[0].corrupted, "--rate", f"{correction.rate:g}"]
        commands["correct"] = command(*words, "--threshold", f"{correction.threshold:g}")
    words = ["report", run, "--draws", str(effort.draws), "--seed", str(seed)]
    commands["this page"] = command(*words, "--sequences", str(effort.sequences), "--samples", str(effort.samples))
    return commands


def command(*words: str) -> str:
    """A line for the shell."""
    return f"cedd {shlex.join(words)}"


def save_held_out(opened: OpenedRun, blocks: np.ndarray) -> Path | None:
    """The held-out text as a file that reads back as the same blocks; None where no text does."""
    tokenizer, text = opened.model.tokenizer, opened.text(blocks)
    if "\r" in text or not np.array_equal(tokenizer.encode(text), blocks.ravel()):
        return None
    path = opened.path / HELD_OUT_FILE
    atomic_write(path, text.encode())
    return path


def train_command(config: TrainConfig) -> str:
    """`cedd train` with the preset that is nearest and what differs from it."""
    asked = flat(config)
    changes: dict[str, dict[str, Any]] = {}
    for name, (_, preset) in PRESETS.items():
        usual = flat(preset)
        changes[name] = {key: value for key, value in asked.items() if value != usual[key]}
    nearest = min(changes, key=lambda name: len(changes[name]))
    words = ["train", nearest]
    for key, value in changes[nearest].items():
        values = [part for pair in value.items() for part in pair] if isinstance(value, dict) else [value]
        words += [f"--{key.replace('_', '-')}", *map(str, values)]
    return command(*words)


# ----------------------------------------------------------------------------------------------------------------
# Several runs


def compare_runs(arguments: Arguments, path: Path, stages: Stages) -> dict[str, Any]:
    """Bounds of all runs on their held-out text, differences paired with the first where it is the same text."""
    effort, seed = arguments.effort, arguments.seed
    opened = [open_run(run, arguments.device) for run in arguments.runs]
    made: list[ComparedRun] = []
    first: tuple[np.ndarray, BoundEstimate] | None = None
    for one in opened:
        blocks = one.held_out(effort.sequences)
        characters = len(one.text(blocks))
        stages.begin(f"measuring the bound of {one.path}")
        estimate = measure_bound(one, blocks, effort.draws, seed, stages)
        figures = bound_figures(estimate, characters, one.model.method.causal)
        difference = None
        if first is not None and is_same_text(opened[0], first[0], one, blocks):
            scale = blocks.size / characters / math.log(2)
            paired = compare(first[1], estimate)
            difference = (paired.difference * scale, paired.ci95[0] * scale, paired.ci95[1] * scale)
        first = first or (blocks, estimate)
        steps = max((record["step"] for record in read_log(one.path / LOG_FILE)), default=0)
        bounds = read_bounds(one, figures)
        made.append(
            ComparedRun(
                str(one.path), one.model.method.name, one.process, one.parameters, steps, bounds, figures, difference
            )
        )
    baselines: list[Baseline] = []
    if all(one.difference is not None for one in made[1:]):  # of one text they say nothing about another
        stages.begin("baselines on the same text")
        baselines = run_baselines(opened[0], opened[0].held_out(effort.sequences))
    again = command(
        *("report", *map(str, arguments.runs), "--out", str(path)),
        *("--sequences", str(effort.sequences), "--draws", str(effort.draws), "--seed", str(seed)),
    )
    atomic_write(path, comparison_page(made, baselines, again).encode("utf-8", "replace"))
    return plain(
        {"runs": [vars(one) | {"bound": vars(one.bound)} for one in made], "baselines": [vars(b) for b in baselines]}
    )


def is_same_text(first: OpenedRun, first_blocks: np.ndarray, other: OpenedRun, blocks: np.ndarray) -> bool:
    """Whether both runs read the same sequences."""
    same_tokens = first.model.tokenizer.fingerprint == other.model.tokenizer.fingerprint
    return same_tokens and np.array_equal(first_blocks, blocks)
