"""Baselines for bits per character: the same text by models that need little or no training.

Shapes: N sequences, L positions, V vocabulary.

An n-gram model with Witten-Bell interpolation, from contexts h of n-1 tokens down to none and then 1/V:

    p(c | h) = (C(hc) + T(h) p(c | h')) / (C(h) + T(h)),        h' = h without its oldest token,

where C are counts in the training text and T(h) is the number of distinct tokens that followed h there. An unseen h has
T = C = 0 and uses p(c | h'). Each step is a mixture of two distributions, so every p(. | h) sums to one. Sequences are
scored separately, as the network reads them: the first token of each has no context.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Floats = NDArray[np.float64]


def _xz(content: bytes) -> bytes:
    """Best compression, with a window no longer than the content, since the default of 64 MB takes a tenth of a second
    to set up."""
    window = min(max(len(content), 4096), 2**26)
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": window}]
    return lzma.compress(content, filters=filters)


COMPRESSORS: Mapping[str, Callable[[bytes], bytes]] = {
    "gzip": lambda content: gzip.compress(content, 9, mtime=0),
    "bz2": lambda content: bz2.compress(content, 9),
    "xz": _xz,
}


@dataclass(frozen=True)
class _Counts:
    """n-grams of one length, as sorted numbers, with their counts; and the same for their contexts."""

    grams: Ids
    gram_counts: Ids
    contexts: Ids
    context_counts: Ids
    followers: Ids
    """T(h): the number of distinct tokens seen after each context."""


class NGram:
    """An n-gram model of token ids 0..V-1, fitted to one text."""

    def __init__(self, tokens: Ids, vocab_size: int, order: int) -> None:
        if order < 1:
            raise ValueError(f"an n-gram model has an order of at least 1 (got {order})")
        if vocab_size**order >= 2**63:
            raise ValueError(f"{order}-grams over {vocab_size} tokens cannot be numbered; use a smaller order")
        text = np.asarray(tokens, dtype=np.int64).ravel()
        self.vocab_size, self.order = vocab_size, order
        lengths = range(1, order + 1)
        self._counts = [_count(_grams(text[None], length, vocab_size).ravel(), vocab_size) for length in lengths]

    def probabilities(self, blocks: Ids) -> Floats:
        """p(token | the tokens before it in its own sequence), [N, L]."""
        return self._by_order(blocks)[-1]

    def bits(self, blocks: Ids) -> list[Floats]:
        """-log2 of the probabilities [N, L] under the models of order 1, 2, ..., n that this one contains."""
        return [-np.log2(p) for p in self._by_order(blocks)]

    def _by_order(self, blocks: Ids) -> list[Floats]:
        texts = np.atleast_2d(np.asarray(blocks, dtype=np.int64))
        p = np.full(texts.shape, 1.0 / self.vocab_size)
        found: list[Floats] = []
        for length, counts in enumerate(self._counts, 1):
            p = p.copy()
            if length <= texts.shape[1]:  # positions with too short a past keep the shorter model's answer
                grams = _grams(texts, length, self.vocab_size)
                p[:, length - 1 :] = _mix(counts, grams, p[:, length - 1 :], self.vocab_size)
            found.append(p)
        return found


def _grams(texts: Ids, length: int, vocab_size: int) -> Ids:
    """The n-grams of each row as numbers in base V, with the newest token last: [N, L - length + 1]."""
    stop = texts.shape[1] - length + 1
    number = np.zeros((len(texts), max(stop, 0)), dtype=np.int64)
    for offset in range(length if stop > 0 else 0):
        number = number * vocab_size + texts[:, offset : offset + stop]
    return number


def _count(grams: Ids, vocab_size: int) -> _Counts:
    unique, counts = np.unique(grams, return_counts=True)
    contexts, starts, followers = np.unique(unique // vocab_size, return_index=True, return_counts=True)
    totals = np.add.reduceat(counts, starts) if len(counts) else counts
    return _Counts(unique, counts, contexts, totals, followers)


def _look_up(keys: Ids, table: Ids, values: Ids) -> Ids:
    """values[i] where table[i] is the key, 0 for a key that is not in the (sorted) table."""
    if not len(table):
        return np.zeros_like(keys)
    place = np.searchsorted(table, keys).clip(max=len(table) - 1)
    return np.where(table[place] == keys, values[place], 0)


def _mix(counts: _Counts, grams: Ids, shorter: Floats, vocab_size: int) -> Floats:
    """(C(hc) + T(h) p(c | h')) / (C(h) + T(h))."""
    contexts = grams // vocab_size
    seen = _look_up(grams, counts.grams, counts.gram_counts)
    total = _look_up(contexts, counts.contexts, counts.context_counts)
    followers = _look_up(contexts, counts.contexts, counts.followers)
    mixed = (seen + followers * shorter) / np.maximum(total + followers, 1)
    return np.where(total > 0, mixed, shorter)


def compressed_bits(name: str, text: str, given: str = "") -> int:
    """Bits of `text` compressed as UTF-8, optionally after `given`: size(both) - size(given)."""
    compress = COMPRESSORS[name]
    before = len(compress(given.encode())) if given else 0
    return 8 * (len(compress((given + text).encode())) - before)


# ----------------------------------------------------------------------------------------------------------------
# The table


@dataclass(frozen=True)
class Baseline:
    """A simple model's bits per character on the held-out text."""

    name: str
    bits_per_character: float
    stderr: float | None
    """Over sequences; None for a compressor, which has no value per sequence."""
    detail: str


def measure_baselines(
    train: Ids | None,
    held_out: Ids,
    *,
    vocab_size: int,
    decode: Callable[[Ids], str],
    characters: float | None = None,
    orders: Sequence[int] = (2, 3, 4, 5, 6, 7, 8),
    most_tokens: int = 20_000_000,
) -> list[Baseline]:
    """Unigram, n-gram and compressors on held-out blocks [N, L], with the n-gram order that is best on these blocks.

    Choosing the order on the held-out text favours the baseline, not the network. Only the last `most_tokens` of a long
    training text are used. Without a training text each half of the blocks is scored by models of the other half; a
    single block has compressors only.

    Args:
        train: token ids of the training text, of any shape.
        held_out: the blocks.
        vocab_size: V.
        decode: the text of token ids.
        characters: number of characters in the blocks; by default of their decoded text.
        orders: n-gram orders to try.
        most_tokens: tokens of the training text to use.
    """
    text = decode(held_out.ravel())
    count = max(1, len(text)) if characters is None else characters
    middle, folds = len(held_out) // 2, list[tuple[Ids, Ids]]()
    if train is not None:
        folds = [(train.ravel()[-most_tokens:], held_out)]
    elif middle:
        folds = [(held_out[middle:].ravel(), held_out[:middle]), (held_out[:middle].ravel(), held_out[middle:])]
    learnt = "the other half of the text" if train is None else "the training text"
    made = _n_grams(folds, vocab_size, held_out.size / count, orders, learnt) if folds else []
    made += [Baseline(name, compressed_bits(name, text) / count, None, "no training text") for name in COMPRESSORS]
    if folds:
        primed = sum(compressed_bits("xz", decode(blocks.ravel()), decode(tokens)) for tokens, blocks in folds)
        made.append(Baseline("primed xz", primed / count, None, f"compressed after {learnt}"))
    return made


def _n_grams(
    folds: Sequence[tuple[Ids, Ids]], vocab_size: int, per_character: float, orders: Sequence[int], learnt: str
) -> list[Baseline]:
    """Unigram and n-gram models of the first part of each pair, scored on the blocks of the second."""
    possible = [order for order in orders if vocab_size**order < 2**63]
    found = [NGram(tokens, vocab_size, max([1, *possible])).bits(blocks) for tokens, blocks in folds]
    means = [np.concatenate([bits.mean(1) for bits in alike]) * per_character for alike in zip(*found, strict=True)]
    made = [_of_sequences("unigram", means[0], f"token frequencies in {learnt}")]
    if possible:
        best = min(possible, key=lambda order: float(means[order - 1].mean()))
        orders_tried = f"trained on {learnt}; the best of orders {possible[0]} to {possible[-1]}"
        made.append(_of_sequences(f"{best}-gram", means[best - 1], orders_tried))
    return made


def _of_sequences(name: str, values: Floats, detail: str) -> Baseline:
    error = float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None
    return Baseline(name, float(values.mean()), error, detail)
