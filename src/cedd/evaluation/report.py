"""What the report of a run holds: figures and texts that were measured by those who call this; `pages` shows them.

Shapes: L positions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from cedd.bounds.estimate import BoundEstimate
from cedd.data.tokenizers import MASK_CHARACTER, Tokenizer
from cedd.evaluation.baselines import Baseline
from cedd.process import TokenProcess


@dataclass(frozen=True)
class BoundFigures:
    """The bound on the held-out text in the units of the page."""

    bits_per_character: float
    ci95: tuple[float, float]
    stderr: float
    perplexity: float
    """Per token."""
    nats_per_token: float
    sequences: int
    characters: int
    draws: int
    exact: bool
    """A likelihood (autoregressive), not a bound."""
    running: Sequence[tuple[int, float, float]] = field(default=(), repr=False)
    """(sequences so far, bits per character, half-width of the 95% band)."""


@dataclass(frozen=True)
class NoiseDrawing:
    """A text on its way to noise: for each time its pieces with what has happened to them (kept, shuffled, masked)."""

    process: str
    rows: Sequence[tuple[float, Sequence[tuple[str, str]]]]


@dataclass(frozen=True)
class Infilling:
    """A held-out text with blanks, what stood there, and what the model wrote."""

    template: str
    original: str
    fills: Sequence[str]


@dataclass(frozen=True)
class CorrectedText:
    """A held-out text, the same with wrong letters, and what the model made of it."""

    original: str
    corrupted: str
    corrected: str


@dataclass(frozen=True)
class Correction:
    """How many wrong letters were put right, and how many right ones were not left alone."""

    rate: float
    """The share of letters that were replaced, which the model was told."""
    threshold: float
    wrong: int
    fixed: int
    untouched: int
    """Wrong letters that were left as they were."""
    right: int
    broken: int
    examples: Sequence[CorrectedText]


@dataclass(frozen=True)
class RunReport:
    """All that a run's page shows."""

    run: str
    method: str
    process: str
    facts: Mapping[str, str]
    losses: Sequence[tuple[int, float]]
    bounds: Sequence[tuple[int, float, float]]
    """(step, bits per character, half-width) while training, on a part of the held-out text."""
    bound: BoundFigures
    baselines: Sequence[Baseline]
    noise: Sequence[NoiseDrawing]
    samples: Sequence[str]
    animation: str
    """The page of a denoised sample."""
    infilling: Infilling | None
    correction: Correction | None
    commands: Mapping[str, str]
    notes: Mapping[str, str]
    """Why a part is missing, by its name."""

    def record(self) -> dict[str, Any]:
        """The figures and texts as JSON values; numbers that are not finite are null."""
        values = asdict(self)
        for name in ("animation", "noise"):
            del values[name]
        return plain(values)


def plain(value: Any) -> Any:
    """The value with null where a number is not finite, which JSON cannot write."""
    if isinstance(value, Mapping):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def bound_figures(estimate: BoundEstimate, characters: int, exact: bool) -> BoundFigures:
    """An estimate in bits per character of the text it was made on."""
    tokens = len(estimate.per_sequence) * estimate.length
    scale = tokens / characters / math.log(2)
    low, high = estimate.ci95
    running: list[tuple[int, float, float]] = []
    if len(estimate.per_sequence) > 2 and math.isfinite(estimate.nats_per_token):
        means, halves = estimate.running()
        running = [
            (i + 2, float(means[i]) * scale, float(halves[i]) * scale)
            for i in np.unique(np.linspace(1, len(means) - 1, 160).astype(int)).tolist()
        ]
    return BoundFigures(
        bits_per_character=estimate.nats_per_token * scale,
        ci95=(low * scale, high * scale),
        stderr=estimate.stderr * scale,
        perplexity=estimate.perplexity,
        nats_per_token=estimate.nats_per_token,
        sequences=len(estimate.per_sequence),
        characters=characters,
        draws=estimate.draws,
        exact=exact,
        running=running,
    )


def draw_noise(
    process: TokenProcess, name: str, tokenizer: Tokenizer, ids: np.ndarray, times: Sequence[float], seed: int
) -> NoiseDrawing:
    """One path of the process from a text [L], looked at at the given times."""
    generator = torch.Generator().manual_seed(seed)
    clean = torch.from_numpy(np.asarray(ids, dtype=np.int64))[None]
    x, before = clean, 0.0
    rows: list[tuple[float, list[tuple[str, str]]]] = []
    for t in times:
        x = process.kernel(t, before).sample(x, generator=generator)
        before = t
        pieces = [tokenizer.decode([int(token)], mask=MASK_CHARACTER) for token in x[0]]
        kinds = [
            "masked" if int(now) == process.mask_id else "kept" if now == was else "shuffled"
            for now, was in zip(x[0], clean[0], strict=True)
        ]
        rows.append((t, list(zip(pieces, kinds, strict=True))))
    return NoiseDrawing(name, rows)


@dataclass(frozen=True)
class ComparedRun:
    """A run's line in a comparison."""

    run: str
    method: str
    process: str
    parameters: int
    step: int
    bounds: Sequence[tuple[int, float, float]]
    bound: BoundFigures
    difference: tuple[float, float, float] | None
    """Bits per character more than the first run, with its 95% interval, paired by sequence; None for the first run
    and where the held-out texts are not the same."""
