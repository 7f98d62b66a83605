"""Options of evaluation. This module does not import torch, so that --help appears at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from cedd.names import check_at_least_one, check_positive, suggestion

Wrap = Literal["none", "bos-eos", "trained"]
DRAWS = 16
BoundName = Literal["tight", "j1", "j2", "all", "importance", "exact"]


@dataclass(frozen=True)
class EvaluationOptions:
    """Bound, data and estimator."""

    bound: BoundName = "tight"
    """tight: a valid upper bound. j1, j2: the paper's estimates, truncated at t = 1e-4. all: these three. importance: a
    tighter bound on the first-hitting sampler, from --orders random orders per sequence (absorb only). exact: the
    likelihood of that sampler, for blocks or sequences (--length) of at most 12 tokens."""
    orders: int | None = None
    """With --bound importance: orders per sequence (default: 64); each takes one network evaluation per token. With
    --tolerance or --seconds, which start at 2 orders and double them: the largest number (default: 4096)."""
    seconds: float | None = None
    """With --bound importance: double the orders while the next round is expected to end within this time, in
    seconds."""
    checkpoint: Path | None = None
    """With --bound importance: save the weights of orders to this .npz file after each batch, at most every half
    minute. The same command resumes from it, also with more --orders. A smaller --batch saves more often."""
    order: Literal["probability", "margin", "entropy"] | None = None
    """Also compute the exact likelihood of the sampler that reveals the most confident tokens first (absorb only)."""
    steps: int | None = None
    """Steps of the sampler of --order (default: that of cedd sample)."""
    temperature: float | None = None
    """Temperature of the sampler of --order (default: that of cedd sample)."""
    top_p: float | None = None
    """Top-p of the sampler of --order (default: that of cedd sample). A text with tokens outside the nucleus has
    infinite perplexity."""
    draws: int = DRAWS
    """Noise draws per sequence (per round, with --tolerance)."""
    fixed_set: bool = False
    """Let the interval cover only the randomness of times and noise, not the choice of the sequences."""
    sampling: Literal["stratified", "independent"] | None = None
    """Sampling of times: stratified has a smaller error and an interval; independent is the paper's procedure (default:
    stratified)."""
    time_floor: float | None = None
    """Smallest time: tight adds the cost of one last step from there, j1 and j2 end there (default: the model's own for
    tight, 1e-4 for j1 and j2)."""
    corrector: float | None = None
    """Strength of the flow-matching corrector (dfm only; 1 in the paper)."""
    length: int | None = None
    """Tokens per sequence (default: the model's context length)."""
    max_sequences: int | None = None
    """Evaluate at most this many sequences, evenly spaced over the data."""
    wrap: Wrap = "none"
    """Put each sequence between the tokens that begin and end a document: for all models (bos-eos), or only for
    imported networks that were trained this way (trained: MDLM, DUO)."""
    max_unknown: float = 0.01
    """Largest share of characters unknown to the tokenizer; a text with more is an error."""
    label: str | int | None = None
    """Condition all sequences on this label, for models trained with --labels."""
    labels: str | None = None
    """Condition each document of the .jsonl on the label in this field. Documents with the same label are joined, as in
    training with cedd train --labels."""
    split: str = "test"
    """Split of an evaluation set."""
    data_root: Path | None = None
    """Folder of the evaluation sets' files (default: $CEDD_DATA, then the hub)."""
    workers: int = 1
    """Processes for tokenization."""
    batch: int | None = None
    """Noisy sequences per batch (default: 32; for importance by the device's memory)."""
    seed: int = 0
    """Seed of times, noise and orders."""

    def check(self) -> None:
        """Refuse invalid values, and options that have no effect together with the others."""
        if self.bound not in get_args(BoundName):
            raise ValueError(f"unknown bound {self.bound!r}{suggestion(self.bound, get_args(BoundName))}")
        for option in ("batch", "length", "max_sequences", "orders"):
            check_at_least_one(f"--{option.replace('_', '-')}", getattr(self, option))
        if not 0 <= self.seed < 2**63:  # every generator of random numbers takes these
            raise ValueError(f"--seed must be between 0 and 2^63 - 1 (got {self.seed})")
        for option, why in self._without_effect():
            if getattr(self, option) != getattr(type(self), option):
                raise ValueError(f"--{option.replace('_', '-')} has no effect {why}")
        check_positive("--seconds", self.seconds)
        if self.label is not None and self.labels is not None:
            raise ValueError("give --label or --labels, not both")
        if self.order is not None and (self.label is not None or self.labels is not None):
            raise ValueError("--order cannot be used with labels")

    def _without_effect(self) -> Iterator[tuple[str, str]]:
        """The options that have no effect together with the others, and why."""
        if self.bound != "importance":
            yield from ((option, "without --bound importance") for option in ("orders", "seconds", "checkpoint"))
        if self.bound in ("importance", "exact"):
            unused = ("draws", "sampling", "time_floor", "corrector")
            yield from ((option, f"with --bound {self.bound}") for option in unused)
        if self.order is None:
            yield from ((option, "without --order") for option in ("steps", "temperature", "top_p"))
