"""The content of a report: `measure` computes it and `pages` shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from cedd.storage import finite

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
        """Refuse what cannot be measured."""
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
    """A text with blanks, what stood there, and what the model wrote."""

    template: str
    original: str
    fills: Sequence[str]


@dataclass(frozen=True)
class CorrectedText:
    """A text, the same with wrong letters, and what the model made of it."""

    original: str
    corrupted: str
    corrected: str


@dataclass(frozen=True)
class CorrectionFigures:
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
    """All that the page of a run, or of a model, shows."""

    run: str
    method: str
    process: str
    text: str
    """What the text is called that it is measured on."""
    held_out: bool
    """Whether training never saw that text; of one that the user names it is not known."""
    facts: Mapping[str, str]
    losses: Sequence[tuple[int, float]]
    bounds: Sequence[tuple[int, float, float]]
    """(step, bits per character, half-width) while training."""
    bound_sequences: int
    """How many sequences that was measured on, evenly spaced."""
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
    """Why a part is missing, or what to know of it, by its name."""
    tokens: Sequence[TokenCosts] = ()
    """Texts whose tokens are coloured by what they cost."""

    def record(self) -> dict[str, Any]:
        """The figures and texts as JSON values; numbers that are not finite are null."""
        values = asdict(self)
        for name in ("animation", "noise", "tokens"):
            del values[name]
        return finite(values)


@dataclass(frozen=True)
class ComparedRun:
    """A run's line in a comparison."""

    run: str
    method: str
    process: str
    parameters: int
    step: int | None
    """None for a model that is no run."""
    bounds: Sequence[tuple[int, float, float]]
    bound: BoundFigures
    difference: tuple[float, float, float] | None
    """Bits per character more than the first run, with its 95% interval, paired by sequence; None for the first run
    and where the texts are not the same."""


@dataclass(frozen=True)
class RunComparison:
    """All that the page of several runs shows."""

    runs: Sequence[ComparedRun]
    baselines: Sequence[Baseline]
    text: str = "the held-out text"
    held_out: bool = True
    """Of the text, as in `RunReport`."""

    def record(self) -> dict[str, Any]:
        """The figures as JSON values."""
        return finite(asdict(self))
