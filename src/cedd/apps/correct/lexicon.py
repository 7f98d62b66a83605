"""Words of a language with their counts, and the counts of two and three words in a row, in a few megabytes.

Shapes: V words, N sequences of words, L words of each.

The words are sorted by falling count. Counts of n-grams are stored in a table of buckets with 8 slots each; a
16-bit slot has 11 bits of the n-gram's hash and 5 of the logarithm of its count. An n-gram that is not in the table is
mistaken for another one with a probability of at most 8/2^11, less where the count exceeds those of its parts. A full
bucket keeps the most frequent n-grams.

    p(w | u) = (c(u w) - d) / c(u) + left(u) p(w),      left(u) = 1 - sum over stored u w of (c(u w) - d) / c(u)
    p(w | t u) = h c(t u w) / c(t u) + (1 - h) p(w | u),      h = 0.6 c(t u) / (c(t u) + 4)
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from cedd.apps.correct.channel import Channel
from cedd.apps.correct.known_words import KNOWN_WORDS_FILE, load_known_words
from cedd.models.locate import LEXICON_FILE as LEXICON_FILE
from cedd.models.locate import LEXICON_WEIGHTS_FILE as LEXICON_WEIGHTS_FILE
from cedd.splitmix import GAMMA, mix
from cedd.storage import atomic_write, read_json, write_json

CHECKSUM = "crc32"
"""The key of the lexicon file's checksum in the file of weights."""
SLOTS, FINGERPRINT, VALUE = 8, 11, 5
STEPS_PER_DOUBLING = 1.5
"""Resolution of the stored logarithms of n-gram counts."""
ROUNDED = 1.4
"""Ratio by which a stored count may exceed an upper bound, since both are rounded."""
DISCOUNT = 0.5
UNKNOWN = -1
Integers = NDArray[np.int64]
Floats = NDArray[np.float64]
_COUNTS = np.append(0.0, np.exp2(np.arange(1, 1 << VALUE) / STEPS_PER_DOUBLING))
"""Counts by the value of a slot; 0 means none."""


def hashes(words: Integers) -> NDArray[np.uint64]:
    """64-bit hashes (splitmix) of sequences of two or three words [N, L]."""
    h = np.full(len(words), words.shape[1], np.uint64)
    for column in words.T.astype(np.uint64):
        h = mix((h ^ column) * np.uint64(GAMMA))
    return h


def _address(h: NDArray[np.uint64], buckets: int) -> tuple[NDArray[np.intp], NDArray[np.uint16]]:
    fingerprint = (h & np.uint64((1 << FINGERPRINT) - 1)).astype(np.uint16)
    return ((h >> np.uint64(FINGERPRINT)) % np.uint64(buckets)).astype(np.intp), fingerprint << np.uint16(VALUE)


def gram_table(h: NDArray[np.uint64], counts: Integers, buckets: int) -> NDArray[np.uint16]:
    """The table of n-grams with these hashes and counts, [buckets, SLOTS]."""
    bucket, fingerprint = _address(h, buckets)
    value = np.clip(np.round(STEPS_PER_DOUBLING * np.log2(counts)), 1, (1 << VALUE) - 1).astype(np.uint16)
    order = np.lexsort((-counts, bucket))
    bucket, slot = bucket[order], (fingerprint | value)[order]
    first = np.flatnonzero(np.diff(bucket, prepend=-1))
    place = np.arange(len(bucket)) - np.repeat(first, np.diff(np.append(first, len(bucket))))
    table, kept = np.zeros((buckets, SLOTS), np.uint16), place < SLOTS
    table[bucket[kept], place[kept]] = slot[kept]
    return table


@dataclass(frozen=True)
class Lexicon:
    """The words and their statistics, [V] each."""

    words: list[str]
    log_counts: Floats
    named: NDArray[np.bool_]
    """Whether a word is mostly capitalized."""
    left: Floats
    """The probability that a word is followed by one that is not in the table with it."""
    table: NDArray[np.uint16]
    channel: Channel
    weights: Mapping[str, Mapping[str, float]]
    """Weights of the features (`suspects.FEATURES`): "alone", and with those of the "network"."""
    memory: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """Misspellings of the training lists, and the intended words."""
    known: Mapping[str, str] = field(default_factory=dict[str, str])
    """Correct words that are rare or missing in the lexicon, and their kind (`known_words`)."""
    confused: Integers | None = None
    """`Neighbours.confused_pairs`, if the file has them."""

    def kind(self, word: str) -> str | None:
        """The kind of a known word, also with 's."""
        return self.known.get(word) or self.known.get(word.removesuffix("'s"))

    @cached_property
    def index(self) -> dict[str, int]:
        return dict(zip(self.words, range(len(self.words)), strict=True))

    @cached_property
    def counts(self) -> Floats:
        return np.append(np.exp(self.log_counts), 0.5)  # UNKNOWN is the last index

    @cached_property
    def total(self) -> float:
        return float(self.counts.sum())

    def numbers(self, words: Sequence[str]) -> Integers:
        get = self.index.get
        return np.array([get(word, UNKNOWN) for word in words], np.int64)

    def gram_counts(self, words: Integers) -> Floats:
        """The counts of sequences of two or three words, [N, 2 or 3]; 0 for rare sequences and unknown words, and where
        the count exceeds that of one of its words, which means a hash collision."""
        bucket, fingerprint = _address(hashes(words), len(self.table))
        rows = self.table[bucket] ^ fingerprint[:, None]  # a slot with this fingerprint leaves its value
        rows[rows >= 1 << VALUE] = 0
        found = _COUNTS[rows.max(-1)]
        return np.where((words >= 0).all(-1) & (found <= ROUNDED * self.counts[words].min(-1)), found, 0.0)

    def log_probabilities(self, words: Integers) -> Floats:
        """log p of each word except the first two of sequences [N, L], given the two before it, [N, L - 2]."""
        N, L = words.shape
        pairs = np.stack([words[:, :-1], words[:, 1:]], -1).reshape(-1, 2)
        triples = np.stack([words[:, :-2], words[:, 1:-1], words[:, 2:]], -1).reshape(-1, 3)
        c2 = self.gram_counts(pairs).reshape(N, L - 1)
        c3 = self.gram_counts(triples).reshape(N, L - 2)
        c3[c3 > ROUNDED * c2[:, 1:]] = 0.0
        c1, before = self.counts[words[:, 2:]], words[:, 1:-1]
        left = np.where(before >= 0, self.left[before], 1.0)
        p2 = np.maximum(c2[:, 1:] - DISCOUNT, 0) / self.counts[before] + left * c1 / self.total
        h = 0.6 * c2[:, :-1] / (c2[:, :-1] + 4)
        p3 = h * np.minimum(c3 / np.maximum(c2[:, :-1], 1), 1.0) + (1 - h) * np.minimum(p2, 1.0)
        return np.log(p3)


# ----------------------------------------------------------------------------------------------------------------
# Files


def _packed(content: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(zlib.compress(content, 9), np.uint8)


def _unpacked(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.frombuffer(zlib.decompress(packed.tobytes()), np.uint8)


def _packed_lines(lines: Sequence[str]) -> NDArray[np.uint8]:
    return _packed("\n".join(lines).encode())


def _unpacked_lines(packed: NDArray[np.uint8]) -> list[str]:
    return _unpacked(packed).tobytes().decode().split("\n")


def _packed_ascending(numbers: Integers) -> NDArray[np.uint8]:
    """Differences of fewer than 2^32, all lowest bytes first, which compress best."""
    differences = np.diff(numbers, prepend=0).astype("<u4")
    return _packed(differences.view(np.uint8).reshape(-1, 4).T.tobytes())


def _unpacked_ascending(packed: NDArray[np.uint8]) -> Integers:
    bytes_of_each = np.ascontiguousarray(_unpacked(packed).reshape(4, -1).T)
    return np.cumsum(bytes_of_each.view("<u4")[:, 0], dtype=np.int64)


def save_lexicon(path: Path, lexicon: Lexicon) -> None:
    """Write the file, and its weights next to it."""
    tensors: dict[str, NDArray[np.generic]] = {
        "words": _packed_lines(lexicon.words),
        "counts": _packed(np.clip(np.round(10 * lexicon.log_counts), 0, 255).astype(np.uint8).tobytes()),
        "named": np.packbits(lexicon.named),
        "left": _packed(np.round(255 * lexicon.left).astype(np.uint8).tobytes()),
        "table": lexicon.table,
        "edits": _packed_lines([f"{meant}>{written}" for meant, written in lexicon.channel.edits]),
        "edit_costs": np.array([-value for value in lexicon.channel.edits.values()], np.float16),
    }
    if lexicon.memory:
        tensors["memory"] = _packed_lines([">".join([written, *meant]) for written, meant in lexicon.memory.items()])
    if lexicon.confused is not None:
        tensors["confused"] = _packed_ascending(lexicon.confused)
    atomic_write(path, save(tensors))
    save_weights(path, lexicon.weights)


def save_weights(path: Path, weights: Mapping[str, Mapping[str, float]]) -> None:
    """Write the weights next to a lexicon's file, with its CRC-32."""
    write_json(path.with_name(LEXICON_WEIGHTS_FILE), {**weights, CHECKSUM: _checksum(path.read_bytes())})


def _checksum(content: bytes) -> str:
    return f"{zlib.crc32(content):08x}"


def load_lexicon(path: Path) -> Lexicon:
    """Read the file. A damaged file raises a ValueError."""
    try:
        content, weights = path.read_bytes(), read_json(path.with_name(LEXICON_WEIGHTS_FILE))
        if weights.pop(CHECKSUM, found := _checksum(content)) != found:
            raise ValueError(f"it does not match its checksum in {LEXICON_WEIGHTS_FILE}")
        tensors = load(content)
        words = _unpacked_lines(tensors["words"])
        edits = (tuple(line.split(">")) for line in _unpacked_lines(tensors["edits"]))
        remembered = (
            (tuple(line.split(">")) for line in _unpacked_lines(tensors["memory"])) if "memory" in tensors else ()
        )
        costs = tensors["edit_costs"].astype(np.float64).tolist()
        lexicon = Lexicon(
            words,
            _unpacked(tensors["counts"]).astype(np.float64) / 10,
            np.unpackbits(tensors["named"])[: len(words)].astype(np.bool_),
            _unpacked(tensors["left"]).astype(np.float64) / 255,
            tensors["table"],
            Channel({(meant, written): -cost for (meant, written), cost in zip(edits, costs, strict=True)}),
            weights,
            {line[0]: line[1:] for line in remembered},
            load_known_words(path.with_name(KNOWN_WORDS_FILE)),
            _unpacked_ascending(tensors["confused"]) if "confused" in tensors else None,
        )
    except (SafetensorError, KeyError, ValueError, zlib.error, OSError) as error:
        raise ValueError(f"{path} is not a lexicon, or is damaged: {error}") from error
    if not len(words) == len(lexicon.log_counts) == len(lexicon.named) == len(lexicon.left):
        raise ValueError(f"{path} is damaged: its columns differ in length")
    return lexicon
