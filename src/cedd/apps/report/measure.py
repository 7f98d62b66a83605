"""Measurements for the page of a run, or of several runs.

Shapes: N sequences, L positions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch

from cedd.apps.report.commands import run_commands
from cedd.apps.report.records import (
    BoundFigures,
    ComparedRun,
    CorrectedText,
    CorrectionFigures,
    Infilling,
    NoiseDrawing,
    ReportOptions,
    RunComparison,
    RunReport,
)
from cedd.apps.report.runs import Opened, prose_lines
from cedd.bounds.estimate import BoundEstimate
from cedd.data.tokenizers import MASK_CHARACTER, Tokenizer
from cedd.evaluation.baselines import Baseline, measure_baselines
from cedd.evaluation.options import EvaluationOptions
from cedd.evaluation.perplexity import compare, lost_text, measure
from cedd.names import printable
from cedd.process import TokenProcess, absorb, roulette, seeded_generator, uniform, uniform_tokens
from cedd.samplers import SamplingOptions
from cedd.spelling.correct import corrections
from cedd.spelling.corruption import corrupt_letters
from cedd.spelling.options import correction_options
from cedd.spelling.user_protocol import outcomes
from cedd.storage import JSONMapping
from cedd.tasks import Trajectory
from cedd.tasks.generate import generate
from cedd.tasks.infill import infill

_TIMES = tuple(k / 10 for k in range(1, 11))
_WRONG = 0.05  # the share of letters that are replaced
_THRESHOLDS = (0.5, 0.3, 0.1, 0.03)
_LINE = 72


class Progress(Protocol):
    """Called with the name of a measurement and its progress."""

    def begin(self, text: str) -> None: ...

    def move(self, done: int, planned: int) -> None: ...


def describe_run(
    opened: Opened, effort: ReportOptions, seed: int, progress: Progress, facts: Mapping[str, str] | None = None
) -> RunReport:
    """Measure the content of the page of a run or a model."""
    lost = lost_text(opened.model.tokenizer)
    notes: dict[str, str] = {} if lost is None else {"bound": lost}
    blocks = opened.held_out(effort.sequences)
    progress.begin(f"measuring the bound on {len(blocks)} sequences of {opened.text_name}")
    _, figures = measure_bound(opened, blocks, effort, seed, progress)
    progress.begin("unigram, n-gram, gzip, bz2 and xz on the same text")
    baselines = run_baselines(opened, blocks)
    lines = prose_lines(opened.text(opened.first(2000)), 8, min(_LINE, opened.model.length))
    progress.begin("sampling, infilling and correcting")
    trajectory = Trajectory(opened.model.tokenizer)
    samples: list[str] = []
    with noted(notes, "samples"):
        if not effort.samples:
            raise ValueError("no samples were requested (--samples 0)")
        samples = generate(opened.model, effort.samples, options=SamplingOptions(seed=seed, callback=trajectory))
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
        text=opened.text_name,
        held_out=opened.is_run,
        facts={**opened.facts(), **(facts or {})},
        losses=opened.losses(),
        bounds=training_bounds(opened, figures),
        bound_sequences=opened.bound_sequences,
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


def compare_runs(opened: Sequence[Opened], effort: ReportOptions, seed: int, progress: Progress) -> RunComparison:
    """Bounds of all runs on their text, with paired differences from the first run if the texts are the same."""
    made: list[ComparedRun] = []
    first: tuple[np.ndarray, BoundEstimate] | None = None
    for one in opened:
        blocks = one.held_out(effort.sequences)
        progress.begin(f"measuring the bound of {one.path}")
        estimate, figures = measure_bound(one, blocks, effort, seed, progress)
        difference = None
        same_tokens = one.model.tokenizer.fingerprint == opened[0].model.tokenizer.fingerprint
        if first is not None and same_tokens and np.array_equal(first[0], blocks):
            paired = compare(first[1], estimate)
            scale = bits_per_character(blocks.size, one.characters(blocks))
            low, high = (math.nan if end is None else end * scale for end in paired.ci95)
            difference = (paired.value * scale, low, high)
        first = first or (blocks, estimate)
        made.append(
            ComparedRun(
                run=str(one.path),
                method=one.model.method.name,
                process=one.process,
                parameters=one.parameters,
                step=one.step,
                bounds=training_bounds(one, figures),
                bound=figures,
                difference=difference,
            )
        )
    baselines: list[Baseline] = []
    if all(one.difference is not None for one in made[1:]):  # of one text they say nothing about another
        progress.begin("baselines on the same text")
        baselines = run_baselines(opened[0], opened[0].held_out(effort.sequences))
    return RunComparison(made, baselines, opened[0].text_name, opened[0].is_run)


@contextmanager
def noted(notes: dict[str, str], name: str) -> Generator[None]:
    """Omit parts that a model does not support; `notes` (in the JSON record) explains why."""
    try:
        yield
    except ValueError as error:
        notes[name] = str(error)


# ----------------------------------------------------------------------------------------------------------------
# Bounds


def bits_per_character(tokens: int, characters: float) -> float:
    """Bits per character of one nat per token."""
    return tokens / characters / math.log(2)


def measure_bound(
    opened: Opened, blocks: np.ndarray, effort: ReportOptions, seed: int, progress: Progress
) -> tuple[BoundEstimate, BoundFigures]:
    """The tight bound (for autoregressive models the likelihood) on blocks [N, L], and the same in the units of the
    page."""
    options = EvaluationOptions(seed=seed, draws=effort.draws)
    estimate = measure(opened.model.folder, torch.from_numpy(blocks), {}, options, progress=progress.move).main
    characters = opened.characters(blocks)
    scale = bits_per_character(blocks.size, characters)
    low, high = estimate.ci95
    running: list[tuple[int, float, float]] = []
    if len(estimate.per_sequence) > 2 and math.isfinite(estimate.nats_per_token):
        means, halves = estimate.running()
        running = [
            (i + 2, float(means[i]) * scale, float(halves[i]) * scale)
            for i in np.unique(np.linspace(1, len(means) - 1, 160).astype(int)).tolist()
        ]
    figures = BoundFigures(
        bits_per_character=estimate.nats_per_token * scale,
        ci95=(low * scale, high * scale),
        stderr=estimate.stderr * scale,
        perplexity=estimate.perplexity,
        nats_per_token=estimate.nats_per_token,
        sequences=len(estimate.per_sequence),
        characters=round(characters),
        draws=estimate.draws,
        exact=not opened.model.method.dynamics.noisy,
        running=running,
    )
    return estimate, figures


def training_bounds(opened: Opened, figures: BoundFigures) -> list[tuple[int, float, float]]:
    """(step, bits per character, half-width of the 95% interval) of the evaluations while training."""
    scale = bits_per_character(figures.sequences * opened.model.length, figures.characters)
    records = [r for r in opened.log if r["kind"] == "bound" and r["nats_per_token"] is not None]
    return [(r["step"], r["nats_per_token"] * scale, _half_width(r) * scale) for r in records]


def _half_width(record: JSONMapping) -> float:
    """Half the width of the 95% interval that an evaluation during training recorded; 0 without one."""
    low, high = record["ci95"]
    return (high - low) / 2 if low is not None and high is not None else 0.0


def run_baselines(opened: Opened, blocks: np.ndarray) -> list[Baseline]:
    """Baselines trained on the training text, if it is known, and measured on the same blocks."""
    return measure_baselines(
        opened.learning(200_000),
        blocks,
        vocab_size=opened.model.tokenizer.vocab_size,
        decode=opened.decode,
        characters=opened.characters(blocks),
    )


# ----------------------------------------------------------------------------------------------------------------
# Texts


def draw_processes(opened: Opened, line: str, seed: int) -> list[NoiseDrawing]:
    """The same line under absorb, uniform and roulette, and under the run's own process if it is different."""
    tokenizer = opened.model.tokenizer
    ids, size = tokenizer.encode(line), tokenizer.vocab_size
    drawn = {"absorb": absorb(size), "uniform": uniform(size), "roulette (p_m = 0.95)": roulette(size)}
    if opened.model.method.dynamics.noisy and opened.process not in drawn:
        drawn[f"{opened.process} (this {'run' if opened.is_run else 'model'})"] = opened.model.process
    return [draw_noise(process, name, tokenizer, ids, _TIMES, seed) for name, process in drawn.items()]


def draw_noise(
    process: TokenProcess, name: str, tokenizer: Tokenizer, ids: np.ndarray, times: Sequence[float], seed: int
) -> NoiseDrawing:
    """A text [L] at the given times of the forward process.

    Token i is kept while u_i < keep(t), then replaced by a random token while u_i < alive(t), then masked
    (`Kernel.move`). The u_i are a random permutation of an even grid on [0, 1], so that the number of changed tokens
    follows t even in a short text. A mask is as wide as the token that it replaces.
    """
    generator = seeded_generator(seed)
    clean = torch.from_numpy(np.asarray(ids, dtype=np.int64))[None]
    u = (torch.randperm(clean.shape[1], generator=generator)[None].double() + 0.5) / clean.shape[1]
    others = uniform_tokens(clean.shape, process.vocab_size, clean.device, generator)
    original = [on_one_line(tokenizer.decode([int(token)])) for token in clean[0]]
    rows: list[tuple[float, list[tuple[str, str]]]] = []
    for t in times:
        row: list[tuple[str, str]] = []
        for now, was, piece in zip(
            process.kernel(t).move(clean, u, others)[0].tolist(), clean[0].tolist(), original, strict=True
        ):
            if now == process.mask_id:
                row.append((MASK_CHARACTER * len(piece), "masked"))
            elif now == was:
                row.append((piece, "kept"))
            else:
                row.append((on_one_line(tokenizer.decode([now])), "shuffled"))
        rows.append((t, row))
    return NoiseDrawing(name, rows)


def on_one_line(text: str) -> str:
    """The text with a sign for each line end and tab, and other control characters written out."""
    return printable(text.replace("\n", "↵").replace("\t", "⇥"))


def fill_in(opened: Opened, lines: Sequence[str], seed: int) -> Infilling:
    """A line whose two longest words (or, without words, strings between spaces) are blanks, and the model's fills."""
    line = lines[min(1, len(lines) - 1)]
    found = [*re.finditer(r"[A-Za-z]+", line[1:])] or [*re.finditer(r"(?<=\s)\S+(?=\s)", line[1:])]
    words = sorted(found, key=lambda word: -len(word[0]))[:2]
    template = line
    tokenizer = opened.model.tokenizer
    for word in sorted(words, key=lambda word: -word.start()):
        its_space = tokenizer.words_begin_with_spaces and line[word.start()] == " "
        width = len(tokenizer.encode(f" {word[0]}" if its_space else word[0]))
        template = f"{template[: word.start() + 1]}____{{{width}}}{template[word.end() + 1 :]}"
    return Infilling(template, line, infill(opened.model, template, 3, options=SamplingOptions(seed=seed)))


def correct_text(opened: Opened, lines: Sequence[str], seed: int) -> CorrectionFigures:
    """Correct letters that were replaced at random: counted on a part of the text, shown on some of its lines."""
    model = opened.model
    correction_options(model, {})  # refuses a model that cannot correct
    if model.tokenizer.characters is None:
        raise ValueError("letter correction needs a character tokenizer; use cedd correct for this model")

    def corrected(text: str, thresholds: Sequence[float], seed: int) -> list[CorrectedText]:
        given = corrupt_letters(text, _WRONG, seed).text
        asked = {"rate": _WRONG, "change": "letters"}
        ways = [correction_options(model, {**asked, "threshold": one}) for one in thresholds]
        return [CorrectedText(text, given, str(now)) for now in corrections(model, given, ways)]

    def gain(text: CorrectedText) -> int:
        _, fixed, _, _, broken = count_letters(text)
        return fixed - broken

    practice, counted = map(opened.text, opened.practice())
    gains = map(gain, corrected(practice, _THRESHOLDS, seed))
    best = max(zip(_THRESHOLDS, gains, strict=True), key=lambda pair: pair[1])[0]
    (held_out,) = corrected(counted, [best], seed)
    examples = [text for i, line in enumerate(lines[:6]) for text in corrected(line, [best], seed + i)]
    return CorrectionFigures(_WRONG, best, *count_letters(held_out), examples)


def count_letters(text: CorrectedText) -> tuple[int, int, int, int, int]:
    """The numbers of wrong letters, fixed ones, unchanged ones, correct characters, and broken ones."""
    seen = outcomes(text.original, text.corrupted, text.corrected)
    right = seen.broken + seen.broken_others
    return seen.fixed.total, seen.fixed.count, seen.missed.count, right.total, right.count
