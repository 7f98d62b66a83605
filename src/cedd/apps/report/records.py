"""The content of a report: `measure` computes it and `pages` shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from cedd.storage import JSONObject, finite

if TYPE_CHECKING:
    from cedd.evaluation.baselines import Baseline
    from cedd.evaluation.tokens import TokenCosts


@dataclass(frozen=True)
class ReportOptions:
    """Size of the measurement."""

    sequences: int = 1000
    """Largest number of sequences of the held-out text (or of --data), evenly spaced."""
    draws: int = 4
    """Noise draws per sequence."""
    samples: int = 4
    """Number of texts to sample."""

    def check(self) -> None:
        """Raise a ValueError for invalid numbers."""
        for name, least in {"sequences": 1, "draws": 1, "samples": 0}.items():
            if getattr(self, name) < least:
                raise ValueError(f"--{name} must be at least {least} (got {getattr(self, name)})")


@dataclass(frozen=True)
class BoundFigures:
    """The bound on the text in the units of the page."""

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
    """Whether it is a likelihood (autoregressive models) instead of a bound."""
    running: Sequence[tuple[int, float, float]] = field(default=(), repr=False)
    """(sequences so far, bits per character, half-width of the 95% band)."""


@dataclass(frozen=True)
class NoiseDrawing:
    """A text under increasing noise: for each time, its pieces and their state (kept, shuffled, masked)."""

    process: str
    rows: Sequence[tuple[float, Sequence[tuple[str, str]]]]


@dataclass(frozen=True)
class Infilling:
    """A text with blanks, the original words, and those that the model wrote."""

    template: str
    original: str
    fills: Sequence[str]


@dataclass(frozen=True)
class CorrectedText:
    """A text, the text with wrong letters, and its correction."""

    original: str
    corrupted: str
    corrected: str


@dataclass(frozen=True)
class CorrectionFigures:
    """Counts of wrong letters that were fixed and correct letters that were broken."""

    rate: float
    """The share of letters that were replaced, which is also the expected rate of the correction."""
    threshold: float
    wrong: int
    fixed: int
    untouched: int
    """Number of wrong letters that were not changed."""
    right: int
    broken: int
    examples: Sequence[CorrectedText]


@dataclass(frozen=True)
class RunReport:
    """The content of the page about a run or a model."""

    run: str
    method: str
    process: str
    text: str
    """The name of the text that was measured."""
    held_out: bool
    """Whether the text was held out from training; unknown for a text that the user names."""
    facts: Mapping[str, str]
    losses: Sequence[tuple[int, float]]
    bounds: Sequence[tuple[int, float, float]]
    """(step, bits per character, half-width) during training."""
    bound_sequences: int
    """Number of sequences of these measurements, evenly spaced."""
    bound: BoundFigures
    baselines: Sequence[Baseline]
    noise: Sequence[NoiseDrawing]
    samples: Sequence[str]
    animation: str
    """The page of a denoised sample."""
    infilling: Infilling | None
    correction: CorrectionFigures | None
    commands: Mapping[str, str]
    notes: Mapping[str, str]
    """Remarks on parts by name, such as why a part is missing."""
    tokens: Sequence[TokenCosts] = ()
    """Texts whose tokens are coloured by cost."""

    def record(self) -> JSONObject:
        """The figures and texts as JSON values; numbers that are not finite are null."""
        values = asdict(self)
        for name in ("animation", "noise", "tokens"):
            del values[name]
        return finite(values)


@dataclass(frozen=True)
class ComparedRun:
    """A run's row in a comparison."""

    run: str
    method: str
    process: str
    parameters: int
    step: int | None
    """None for a model that is not a run."""
    bounds: Sequence[tuple[int, float, float]]
    bound: BoundFigures
    difference: tuple[float, float, float] | None
    """Difference from the first run in bits per character with its 95% interval, paired by sequence; None for the first
    run and if the texts differ."""


@dataclass(frozen=True)
class RunComparison:
    """The content of the page that compares several runs."""

    runs: Sequence[ComparedRun]
    baselines: Sequence[Baseline]
    text: str = "the held-out text"
    held_out: bool = True
    """The name of the text, as in `RunReport`."""

    def record(self) -> JSONObject:
        """The figures as JSON values."""
        return finite(asdict(self))
