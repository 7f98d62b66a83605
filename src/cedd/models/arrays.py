"""The network on arrays: a forward pass in numpy, for who cannot wait until torch is imported.

Shapes: S sequences, L tokens of each, P tokens around them, N tokens of all, D width, H heads, W head width, V
vocabulary.

At one noise level the modulations are constants, and the matrices beside them take them up:

    M (norm(x) (1 + scale) + shift) = (M diag(1 + scale)) norm(x) + M shift,        gate (M x) = (diag(gate) M) x.

A sequence is read by itself, or amid a text that was read before: its tokens then see those of the text as they were
to each block (`States`), and these do not see it. So of texts that differ in one place all but that place is read once.
"""

from __future__ import annotations

import math
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from cedd.models.options import BASE, EPSILON, FREQUENCIES, GELU, TransformerConfig

Floats = NDArray[np.floating[Any]]
"""Of float32, as the network is."""
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class States:
    """What texts were to each block: keys, not rotated yet, and values [depth, S, H, P, W], at these places [S, P]."""

    keys: Floats
    values: Floats
    places: Ids

    def of(self, sequences: Sequence[int], tokens: Sequence[int], places: Ids) -> States:
        """Some tokens of some of the texts, moved to other places [S, P]."""
        chosen = np.ix_(range(len(self.keys)), sequences, range(self.keys.shape[2]), tokens)
        return States(self.keys[chosen], self.values[chosen], places)


@dataclass(frozen=True)
class Passage:
    """Sequences of one length that are read together, and where: at these places, amid a text or by themselves."""

    ids: Ids
    """[S, L]"""
    places: Ids
    """[S, L]"""
    wanted: Ids
    """[S], the token of each at which something is asked."""
    around: States | None = None

    @property
    def wanted_rows(self) -> Ids:
        """[S], where those stand among all tokens of the passage."""
        return np.arange(len(self.ids)) * self.ids.shape[1] + self.wanted

    @property
    def wanted_places(self) -> Ids:
        """[S, 1]"""
        return np.take_along_axis(self.places, self.wanted[:, None], 1)


class ReadsPassages(Protocol):
    """What reads passages."""

    def read(self, passages: Sequence[Passage]) -> list[tuple[Floats, States]]:
        """Of each passage log p of all tokens where something is asked, [S, V], and what it was to each block."""
        ...


class Affine(NamedTuple):
    """x -> x matrix + bias."""

    matrix: Floats
    """[in, out]"""
    bias: Floats

    def __call__(self, x: Floats) -> Floats:
        made = x @ self.matrix
        made += self.bias
        return made

    def after(self, scale: Floats, shift: Floats) -> Affine:
        """Of x scale + shift."""
        return Affine(self.matrix * scale[:, None], self.bias + shift @ self.matrix)

    def times(self, gate: Floats) -> Affine:
        """With its output times the gate; its rows are contiguous, which is faster if there are many inputs."""
        return Affine(np.multiply(self.matrix, gate, order="C"), self.bias * gate)

    def only(self, outputs: Ids) -> Affine:
        """With some of its outputs."""
        return Affine(self.matrix.T[outputs].T, self.bias[outputs])


@dataclass(frozen=True)
class Block:
    """The maps of one block."""

    queries: Affine
    keys_and_values: Affine
    attended: Affine
    hidden: Affine
    output: Affine


class ArrayNetwork:
    """The forward pass of a `Transformer` that is not causal, in float32.

    Args:
        config: its sizes.
        tensors: its parameters by name, each taken out as it is used: of most a changed copy is kept.
        told: what it is told of the noise.
    """

    def __init__(self, config: TransformerConfig, tensors: MutableMapping[str, Floats], told: float = 0.0) -> None:
        if config.causal:
            raise ValueError("a causal network does not read what comes after a word")
        self.config, self._tensors = config, tensors
        self.embedding = tensors["backbone.embedding.weight"]
        modulations = self._modulations(told)
        self.blocks = [self._block(i, modulations[6 * i : 6 * i + 6]) for i in range(config.depth)]
        shift, scale = modulations[-2:]
        self.head = self._affine("head").after(self._scale("backbone.norm", scale), shift)
        del self._tensors
        width = config.width // config.heads
        angles = np.arange(config.length)[:, None] * BASE ** -(np.arange(0, width, 2) / width)
        self.rotations = np.exp(1j * angles).astype(np.complex64)
        """Of each place and pair of numbers."""
        score = 1 / math.sqrt(width) if config.largest_score is None else config.largest_score / width
        self.score = score
        """What a product of a query and a key is multiplied by."""

    def _modulations(self, told: float) -> Floats:
        """shift, scale and gate of each branch, and shift and scale of the last norm, [6 depth + 2, D]."""
        if not self.config.time_conditioning:
            still = np.zeros((6 * self.config.depth + 2, self.config.width), np.float32)
            still[2:-2:3] = 1.0
            return still
        angles = told * np.exp(-math.log(BASE) * np.arange(FREQUENCIES, dtype=np.float32) / FREQUENCIES)
        vector = np.concatenate([np.cos(angles), np.sin(angles)]).astype(np.float32)
        for name in ("hidden", "output"):
            vector = self._affine(f"backbone.conditioning.{name}")(vector)
            vector = vector / (1 + np.exp(-vector))
        return self._affine("backbone.conditioning.modulation")(vector).reshape(-1, self.config.width)

    def _affine(self, name: str) -> Affine:
        weight = self._tensors.pop(f"{name}.weight")
        bias = self._tensors.pop(f"{name}.bias", None)
        return Affine(weight.T, np.zeros(len(weight), np.float32) if bias is None else bias)

    def _scale(self, norm: str, scale: Floats) -> Floats:
        """What a norm's output is multiplied by: its own weight, where nothing modulates it."""
        return self._tensors.pop(f"{norm}.weight", 1 + scale)

    def _block(self, number: int, modulations: Floats) -> Block:
        name = f"backbone.blocks.{number}"
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = modulations
        qkv = self._affine(f"{name}.attention.qkv").after(self._scale(f"{name}.attention_norm", scale), shift)
        of_heads = np.arange(3 * self.config.width).reshape(3, self.config.heads, 2, -1)
        queries, keys = of_heads[:2].swapaxes(-1, -2)  # the two numbers that are rotated together side by side
        return Block(
            qkv.only(queries.ravel()),
            qkv.only(np.concatenate([keys.ravel(), of_heads[2].ravel()])),
            self._affine(f"{name}.attention.output").times(gate),
            self._affine(f"{name}.mlp.hidden").after(self._scale(f"{name}.mlp_norm", mlp_scale), mlp_shift),
            self._affine(f"{name}.mlp.output").times(mlp_gate),
        )

    def read(self, passages: Sequence[Passage]) -> list[tuple[Floats, States]]:
        """Of each passage log p of all tokens where something is asked, [S, V], and what it was to each block.

        Outputs at a mask are logits of what was there, by all parameterizations of a process that only masks.
        """
        x = self.embedding[np.concatenate([passage.ids.ravel() for passage in passages])]
        rows = [passage.ids.size for passage in passages]
        states: list[list[tuple[Floats, Floats]]] = [[] for _ in passages]
        for number, block in enumerate(self.blocks):
            normed, last = norm(x), number == len(self.blocks) - 1
            keys_and_values = split(block.keys_and_values(normed), rows)
            if last:  # of the other rows nothing is made that is asked for
                wanted = np.concatenate(
                    [start + p.wanted_rows for start, p in zip(starts(rows), passages, strict=True)]
                )
                x, normed, rows = x[wanted], normed[wanted], [len(passage.ids) for passage in passages]
            queries = split(block.queries(normed), rows)
            attended = list[Floats]()
            for i, passage in enumerate(passages):
                keys, values = self._heads(keys_and_values[i], len(passage.ids), 2)
                (asking,) = self._heads(queries[i], len(passage.ids), 1)
                if self.config.largest_score is not None:
                    keys, asking = rms_norm(keys), rms_norm(asking)
                states[i].append((keys, values))
                attended.append(self._attend(asking, keys, values, passage, number, last))
            x = x + block.attended(np.concatenate(attended))
            x += block.output(gelu(block.hidden(norm(x))))
        said = split(log_softmax(self.head(norm(x))), rows)
        found = list[tuple[Floats, States]]()
        for passage, rows_said, of_blocks in zip(passages, said, states, strict=True):
            keys, values = (np.stack(part) for part in zip(*of_blocks, strict=True))
            found.append((rows_said, States(keys, values, passage.places)))
        return found

    def _heads(self, rows: Floats, sequences: int, parts: int) -> Floats:
        """[N, parts D] -> [parts, S, H, L, W]."""
        heads, width = self.config.heads, self.config.width // self.config.heads
        return rows.reshape(sequences, -1, parts, heads, width).transpose(2, 0, 3, 1, 4)

    def _attend(
        self, queries: Floats, keys: Floats, values: Floats, passage: Passage, block: int, last: bool
    ) -> Floats:
        """Attention of queries [S, H, L or 1, W] to the passage and to what is around it, [N, D]."""
        queries = self._rotated(queries, passage.wanted_places if last else passage.places)
        keys = self._rotated(keys, passage.places)
        if (around := passage.around) is not None:
            keys = np.concatenate([self._rotated(around.keys[block], around.places), keys], 2)
            values = np.concatenate([around.values[block], values], 2)
        scores = queries @ keys.swapaxes(-1, -2)
        scores *= self.score
        scores -= scores.max(-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(-1, keepdims=True)
        return (scores @ values).swapaxes(1, 2).reshape(-1, self.config.width)

    def _rotated(self, x: Floats, places: Ids) -> Floats:
        """[S, H, L, W] by their places [S, L]."""
        return (x.view(np.complex64) * self.rotations[places][:, None]).view(np.float32)


def starts(sizes: Sequence[int]) -> list[int]:
    """Where each part of a whole begins."""
    return [sum(sizes[:i]) for i in range(len(sizes))]


def split(rows: Floats, sizes: Sequence[int]) -> list[Floats]:
    """The rows of each passage."""
    return [rows[start : start + size] for start, size in zip(starts(sizes), sizes, strict=True)]


def norm(x: Floats) -> Floats:
    """Layer norm without weight and bias."""
    return rms_norm(x - x.mean(-1, keepdims=True))


def rms_norm(x: Floats) -> Floats:
    """x divided by its root mean square."""
    mean_square = np.einsum("...i,...i", x, x)[..., None] / np.float32(x.shape[-1])
    return x * np.reciprocal(np.sqrt(mean_square + np.float32(EPSILON)))


def gelu(x: Floats) -> Floats:
    """x sigmoid(x (a + b x²)), where sigmoid(2 y) = (1 + tanh y) / 2."""
    a, b = GELU
    made = np.square(x)
    made *= b / 2
    made += a / 2
    made *= x
    np.tanh(made, out=made)
    made += 1
    made *= x
    made *= 0.5
    return made


def log_softmax(x: Floats) -> Floats:
    """Over the last axis."""
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))
