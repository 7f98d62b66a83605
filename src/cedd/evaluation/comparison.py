"""Several runs on the same text, whatever their tokenizers: bits a byte, perplexity a word, paired differences.

Shapes: N blocks that a run reads, K units of text that all runs are paired over.

Runs with one tokenizer and length read the same blocks, and are paired by block. Others cut the same text into other
blocks. What they have in common are stretches of the text: at most 64, each of at least eight blocks of the run whose
blocks are longest. The nats of a block are spread evenly over its bytes, and a stretch is given what falls into it,

    nats(stretch) = sum over blocks of nats(block) |block and stretch| / |block|,

so that nothing is lost or counted twice. Two stretches share the block at their edge; with eight blocks in a stretch,
that makes the error of a mean over stretches at most 3% too small.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cedd.bounds.estimate import Interval, exp_or_inf, mean_and_stderr, mean_interval
from cedd.data.evaluation_sets import EvaluationData
from cedd.data.packing import evenly_spaced
from cedd.evaluation.perplexity import Measurement
from cedd.models.folder import ModelFolder
from cedd.storage import finite

BLOCKS_PER_STRETCH = 8
MOST_STRETCHES = 64


# ----------------------------------------------------------------------------------------------------------------
# What the runs have in common


@dataclass(frozen=True)
class Reading:
    """A run, and the blocks that it cuts a text into."""

    folder: ModelFolder
    data: EvaluationData

    @cached_property
    def edges(self) -> NDArray[np.float64]:
        """How many bytes of the text come before each block, and before the end of the last, [blocks + 1]."""
        blocks, report = self.data.packed.blocks, self.data.packed.report()
        ends = np.cumsum(self.folder.tokenizer.widths[blocks].sum(1))
        covered = report["utf8_bytes"] * blocks.size / report["tokens"]
        return np.concatenate([[0.0], ends]) * (covered / ends[-1])

    def reads_as(self, other: Reading) -> bool:
        """Whether both read the same blocks."""
        same = ("tokenizer_fingerprint", "length", "protocol_sha256")
        return all(self.data.protocol[name] == other.data.protocol[name] for name in same)


@dataclass(frozen=True)
class Units:
    """What runs are paired over: sequences that all of them read, or stretches of the text.

    Args:
        name: which of the two.
        bytes: of one unit.
        bytes_per_word: of the text.
        blocks: which blocks each run evaluates.
        shares: how much of each of them [N] is in each unit [K]; None where a unit is a block.
    """

    name: str
    bytes: float
    bytes_per_word: float
    blocks: Sequence[NDArray[np.integer]]
    shares: Sequence[NDArray[np.float64]] | None

    def nats_per_byte(self, run: int, nats_per_token: Tensor, length: int) -> Tensor:
        """The values of a run's blocks [N] as those of units [K]."""
        nats = nats_per_token * length
        if self.shares is not None:
            shares = torch.from_numpy(self.shares[run])
            nats = torch.where(shares > 0, shares * nats, 0.0).sum(1)  # a block may cost infinitely much
        return nats / self.bytes


def units_of(readings: Sequence[Reading], most: int | None) -> Units:
    """The units that all runs share; with `most`, so many sequences of each, or stretches of about as much text."""
    if most is not None and most < 1:
        raise ValueError(f"an evaluation needs at least one sequence; got {most}")
    report = readings[0].data.packed.report()
    per_word = report["utf8_bytes"] / max(1, report["words"])
    if all(reading.reads_as(readings[0]) for reading in readings):
        chosen = evenly_spaced(len(readings[0].data.packed), most)
        each = report["utf8_bytes"] * readings[0].data.packed.length / report["tokens"]
        return Units("sequences", each, per_word, [chosen] * len(readings), None)
    starts, size = _stretches([reading.edges for reading in readings], most)
    blocks, shares = zip(*(_overlaps(reading.edges, starts, size) for reading in readings), strict=True)
    return Units("stretches", size, per_word, blocks, shares)


def _stretches(edges: Sequence[NDArray[np.float64]], most: int | None) -> tuple[NDArray[np.float64], float]:
    """Where stretches of the text begin [K], and how many bytes each has."""
    common = min(float(ends[-1]) for ends in edges)
    longest = max(float(ends[-1]) / (len(ends) - 1) for ends in edges)
    all_blocks = max(1, int(common / longest))
    wanted = all_blocks if most is None else min(most, all_blocks)
    count = min(MOST_STRETCHES, max(min(2, wanted), wanted // BLOCKS_PER_STRETCH))
    size = min(wanted * longest, common) / count
    if wanted == all_blocks:
        size = common / count
    return np.linspace(0, common - size, count), size


def _overlaps(
    edges: NDArray[np.float64], starts: NDArray[np.float64], size: float
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The blocks that any stretch meets [N], and the share of each that is in each stretch [K, N]."""
    low, high = np.maximum(edges[:-1], starts[:, None]), np.minimum(edges[1:], starts[:, None] + size)
    shares = (high - low).clip(0) / np.diff(edges)
    met = np.flatnonzero(shares.any(0))
    return met, shares[:, met]


# ----------------------------------------------------------------------------------------------------------------
# Figures


@dataclass(frozen=True)
class Figure:
    """A mean over units in nats per byte, with its error; `bytes_per_word` turns it into a perplexity."""

    nats_per_byte: float
    stderr: float
    ends: Interval
    bytes_per_word: float

    @property
    def bits_per_byte(self) -> float:
        return self.nats_per_byte / math.log(2)

    @property
    def ci95(self) -> Interval:
        """Of the bits per byte."""
        return self.ends[0] / math.log(2), self.ends[1] / math.log(2)

    @property
    def per_word(self) -> float:
        """exp of the nats of a word: a perplexity, or the ratio of two."""
        return exp_or_inf(self.nats_per_byte * self.bytes_per_word)

    @property
    def per_word_ci95(self) -> Interval:
        return exp_or_inf(self.ends[0] * self.bytes_per_word), exp_or_inf(self.ends[1] * self.bytes_per_word)


@dataclass(frozen=True)
class Scored:
    """A run's bounds in units that it has in common with others: values [K] of each bound, in nats per byte."""

    measurement: Measurement
    units: Units
    values: dict[str, Tensor]

    def figure(self, bound: str) -> Figure:
        """The bound itself; for a fixed set, with the error of its draws alone."""
        values, estimate = self.values[bound], self.measurement.bounds[bound]
        if not estimate.fixed_set and not estimate.heavy_tailed:
            return _figure(values, self.units)
        mean, per_byte = float(values.mean()), float(values.mean()) / estimate.nats_per_token
        low, high = (mean + (end - estimate.nats_per_token) * per_byte for end in estimate.ci95)
        return Figure(mean, estimate.stderr * per_byte, (low, high), self.units.bytes_per_word)

    def less(self, other: Scored, bound: str) -> Figure | None:
        """This run less another, unit by unit; None where the other has no such bound."""
        if bound not in other.values:
            return None
        figure = _figure(self.values[bound] - other.values[bound], self.units)
        if any(run.measurement.bounds[bound].heavy_tailed for run in (self, other)):
            return Figure(figure.nats_per_byte, figure.stderr, (math.nan, math.nan), figure.bytes_per_word)
        return figure


def scored(units: Units, run: int, measurement: Measurement) -> Scored:
    """What was measured on the blocks of `units`, as values of units."""
    values = {
        bound: units.nats_per_byte(run, estimate.per_sequence, estimate.length)
        for bound, estimate in measurement.bounds.items()
    }
    return Scored(measurement, units, values)


def _figure(values: Tensor, units: Units) -> Figure:
    mean, stderr = mean_and_stderr(values)
    return Figure(mean, stderr, mean_interval(values), units.bytes_per_word)


# ----------------------------------------------------------------------------------------------------------------
# Records


def figures_record(run: Scored) -> dict[str, Any]:
    """A run's bounds on the text in common, as JSON."""
    return {
        bound: finite(
            {
                "bits_per_byte": figure.bits_per_byte,
                "bits_per_byte_ci95": figure.ci95,
                "perplexity_per_word": figure.per_word,
                "perplexity_per_word_ci95": figure.per_word_ci95,
            }
        )
        for bound in run.values
        for figure in (run.figure(bound),)
    }


def differences_record(run: Scored, first: Scored) -> dict[str, Any]:
    """A run less the first one, as JSON."""
    found = {bound: run.less(first, bound) for bound in run.values}
    return {
        "run": run.measurement.folder.name,
        "less": first.measurement.folder.name,
        "paired_over": run.units.name,
        "pairs": len(next(iter(run.values.values()))),
        "bytes_per_unit": run.units.bytes,
        "bounds": {
            bound: finite(
                {
                    "bits_per_byte": figure.bits_per_byte,
                    "stderr": figure.stderr / math.log(2),
                    "bits_per_byte_ci95": figure.ci95,
                    "perplexity_per_word_ratio": figure.per_word,
                    "perplexity_per_word_ratio_ci95": figure.per_word_ci95,
                }
            )
            for bound, figure in found.items()
            if figure is not None
        },
    }
