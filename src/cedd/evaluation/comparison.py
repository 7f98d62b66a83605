"""The text units by which several models, with any tokenizers, are compared on the same text.

Shapes: N blocks that a model reads, K units of text shared by all models.

Models with the same tokenizer and length read the same blocks, and are paired by block. Others cut the text into
different blocks. They are paired over segments of the text: at most 64, each of at least eight blocks of the model
whose blocks are longest. The nats of a block are spread evenly over its bytes, and a segment gets its share of each
block,

    nats(segment) = sum over blocks of nats(block) |block and segment| / |block|,

so that nothing is lost or counted twice. Two segments share the block at their edge; with eight blocks per segment,
this makes the standard error of a mean over segments at most 3% too small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cedd.data.evaluation_sets import EvaluationData
from cedd.data.packing import evenly_spaced
from cedd.data.tokenizers import Tokenizer

BLOCKS_PER_SEGMENT = 8
MAX_SEGMENTS = 64


@dataclass(frozen=True)
class TextUnits:
    """The units over which models are paired: sequences that all of them read, or segments of the text.

    Args:
        name: "sequences" or "segments".
        bytes: mean size of a unit.
        bytes_per_word: mean size of a word in the text.
        blocks: the blocks that each model evaluates.
        shares: the share of each of these blocks [N] in each unit [K]; None if a unit is a block.
    """

    name: str
    bytes: float
    bytes_per_word: float
    blocks: Sequence[NDArray[np.integer]]
    shares: Sequence[NDArray[np.float64]] | None

    def nats_per_byte(self, model: int, nats_per_token: Tensor, length: int) -> Tensor:
        """Values of units [K] from the values of a model's blocks [N]."""
        nats = nats_per_token * length
        if self.shares is not None:
            shares = torch.from_numpy(self.shares[model])
            nats = torch.where(shares > 0, shares * nats, 0.0).sum(1)  # a block may have infinite cost
        return nats / self.bytes


def common_units(
    data: Sequence[EvaluationData], tokenizers: Sequence[Tokenizer], max_sequences: int | None
) -> TextUnits:
    """The units shared by all models: `max_sequences` sequences (None: all), or segments with about as much text."""
    first = data[0]
    report = first.packed.report()
    per_word = report["utf8_bytes"] / max(1, report["words"])
    if all(same_blocks(first, other) for other in data):
        chosen = evenly_spaced(len(first.packed), max_sequences)
        size = float(first.byte_counts(tokenizers[0], first.blocks(chosen)).mean())
        return TextUnits("sequences", size, per_word, [chosen] * len(data), None)
    edges = [block_edges(*pair) for pair in zip(data, tokenizers, strict=True)]
    starts, size = _segments(edges, max_sequences)
    blocks, shares = zip(*(_overlaps(one, starts, size) for one in edges), strict=True)
    return TextUnits("segments", size, per_word, blocks, shares)


def same_blocks(first: EvaluationData, second: EvaluationData) -> bool:
    """Whether both are the same blocks of the same tokens."""
    names = ("tokenizer_fingerprint", "length", "protocol_sha256")
    return all(first.protocol[name] == second.protocol[name] for name in names)


def block_edges(data: EvaluationData, tokenizer: Tokenizer) -> NDArray[np.float64]:
    """Bytes of text before each block, and before the end of the last one: [blocks + 1]."""
    sizes = data.byte_counts(tokenizer, data.packed.blocks)
    return np.concatenate([[0.0], np.cumsum(sizes.clip(1e-6))])  # a block of end tokens has no bytes


def _segments(edges: Sequence[NDArray[np.float64]], most: int | None) -> tuple[NDArray[np.float64], float]:
    """Where segments of the text begin [K], and the bytes of each."""
    common = min(float(ends[-1]) for ends in edges)
    longest = max(float(ends[-1]) / (len(ends) - 1) for ends in edges)
    all_blocks = max(1, int(common / longest))
    wanted = all_blocks if most is None else min(most, all_blocks)
    count = min(MAX_SEGMENTS, max(min(2, wanted), wanted // BLOCKS_PER_SEGMENT))
    size = min(wanted * longest, common) / count
    if wanted == all_blocks:
        size = common / count
    return np.linspace(0, common - size, count), size


def _overlaps(
    edges: NDArray[np.float64], starts: NDArray[np.float64], size: float
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The blocks that overlap with any segment [N], and the share of each that is in each segment [K, N]."""
    low, high = np.maximum(edges[:-1], starts[:, None]), np.minimum(edges[1:], starts[:, None] + size)
    shares = (high - low).clip(0) / np.diff(edges)
    met = np.flatnonzero(shares.any(0))
    return met, shares[:, met]
