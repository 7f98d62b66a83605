"""The forward pass of a transformer in NumPy, so that commands need not import torch.

Shapes: S sequences, L tokens of each, P tokens around them, N tokens of all, D width, H heads, W head width, V
vocabulary.

At a fixed noise level the modulations are constants, which are multiplied into the adjacent matrices:

    M (norm(x) (1 + scale) + shift) = (M diag(1 + scale)) norm(x) + M shift,        gate (M x) = (diag(gate) M) x.

A sequence is read alone, or inside a text that was read before: its tokens attend to the cached keys and values of the
text (`States`), which do not attend to it. Texts that differ in one place share the computation of everything else.
"""

from __future__ import annotations

import math
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from cedd.models.numpy_weights import PackedArrays
from cedd.models.transformer_config import BASE, EPSILON, FREQUENCIES, GELU, TransformerConfig

Floats = NDArray[np.floating[Any]]
"""Of float32, as the network is."""
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class States:
    """Cached keys (not yet rotated) and values of texts, [depth, S, H, P, W], at these positions [S, P]."""

    keys: Floats
    values: Floats
    places: Ids

    def of(self, sequences: Sequence[int], tokens: Sequence[int], places: Ids) -> States:
        """Some tokens of some of the texts, moved to other positions [S, P]."""
        chosen = np.ix_(range(len(self.keys)), sequences, range(self.keys.shape[2]), tokens)
        return States(self.keys[chosen], self.values[chosen], places)


@dataclass(frozen=True)
class Passage:
    """Sequences of one length that are read together, alone or inside a text."""

    ids: Ids
    """[S, L]"""
    places: Ids
    """[S, L]"""
    wanted: Ids
    """[S], the token of each sequence whose log-probabilities are computed."""
    around: States | None = None

    @property
    def wanted_rows(self) -> Ids:
        """[S], the rows of these tokens among all tokens of the passage."""
        return np.arange(len(self.ids)) * self.ids.shape[1] + self.wanted

    @property
    def wanted_places(self) -> Ids:
        """[S, 1]"""
        return np.take_along_axis(self.places, self.wanted[:, None], 1)


class PassageReader(Protocol):
    """A network that reads passages."""

    def read(self, passages: Sequence[Passage]) -> list[tuple[Floats, States]]:
        """For each passage, log p of all tokens at the wanted positions [S, V], and its keys and values."""
        ...


class Linear(NamedTuple):
    """x -> x matrix + bias."""

    matrix: Floats
    """[in, out]"""
    bias: Floats

    def __call__(self, x: Floats) -> Floats:
        made = x @ self.matrix
        made += self.bias
        return made

    def after(self, scale: Floats, shift: Floats) -> Linear:
        """The map x -> self(x scale + shift)."""
        return Linear(self.matrix * scale[:, None], self.bias + shift @ self.matrix)

    def times(self, gate: Floats) -> Linear:
        """The map multiplied by a gate; its rows are contiguous, which is faster for many inputs."""
        return Linear(np.multiply(self.matrix, gate, order="C"), self.bias * gate)

    def only(self, outputs: Ids) -> Linear:
        """The map to some of its outputs."""
        return Linear(self.matrix.T[outputs].T, self.bias[outputs])


@dataclass(frozen=True)
class NumpyBlock:
    """The maps of one block."""

    queries: Linear
    keys_and_values: Linear
    attended: Linear
    hidden: Linear
    output: Linear


class NumpyNetwork:
    """The forward pass of a `Transformer` that is not causal, in float32.

    Args:
        config: its sizes.
        tensors: its parameters by name; each is removed when it has been used, since a modified copy is kept.
        time_input: the input of its time conditioning.
    """

    def __init__(
        self, config: TransformerConfig, tensors: MutableMapping[str, Floats], time_input: float = 0.0
    ) -> None:
        if config.causal:
            raise ValueError("a causal network does not read the text after a word")
        self.config, self._tensors = config, tensors
        name = "backbone.embedding.weight"
        self.embedding = tensors.rows(name) if isinstance(tensors, PackedArrays) else tensors[name].__getitem__
        """Ids -> vectors; the matrix stays packed."""
        modulations = self._modulations(time_input)
        shift, scale = modulations[
            -2:
        ]  # the head is the largest matrix: its copy is made before the others take memory
        self.head = self._affine("head").after(self._scale("backbone.norm", scale), shift)
        self.blocks = [self._block(i, modulations[6 * i : 6 * i + 6]) for i in range(config.depth)]
        del self._tensors
        width = config.width // config.heads
        angles = np.arange(config.length)[:, None] * BASE ** -(np.arange(0, width, 2) / width)
        self.rotations = np.exp(1j * angles).astype(np.complex64)
        """[positions, W / 2], the rotation of each pair of numbers at each position."""
        score = 1 / math.sqrt(width) if config.largest_score is None else config.largest_score / width
        self.score = score
        """The factor of the product of a query and a key."""

    def _modulations(self, time_input: float) -> Floats:
        """shift, scale and gate of each branch, and shift and scale of the last norm, [6 depth + 2, D]."""
        if not self.config.time_conditioning:
            still = np.zeros((6 * self.config.depth + 2, self.config.width), np.float32)
            still[2:-2:3] = 1.0
            return still
        angles = time_input * np.exp(-math.log(BASE) * np.arange(FREQUENCIES, dtype=np.float32) / FREQUENCIES)
        vector = np.concatenate([np.cos(angles), np.sin(angles)]).astype(np.float32)
        for name in ("hidden", "output"):
            vector = self._affine(f"backbone.conditioning.{name}")(vector)
            vector = vector / (1 + np.exp(-vector))
        return self._affine("backbone.conditioning.modulation")(vector).reshape(-1, self.config.width)

    def _affine(self, name: str) -> Linear:
        weight = self._tensors.pop(f"{name}.weight")
        bias = self._tensors.pop(f"{name}.bias", None)
        return Linear(weight.T, np.zeros(len(weight), np.float32) if bias is None else bias)

    def _scale(self, norm: str, scale: Floats) -> Floats:
        """The factor of a norm's output: its weight if it has one, otherwise the modulation."""
        return self._tensors.pop(f"{norm}.weight", 1 + scale)

    def _block(self, number: int, modulations: Floats) -> NumpyBlock:
        name = f"backbone.blocks.{number}"
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = modulations
        qkv = self._affine(f"{name}.attention.qkv").after(self._scale(f"{name}.attention_norm", scale), shift)
        of_heads = np.arange(3 * self.config.width).reshape(3, self.config.heads, 2, -1)
        queries, keys = of_heads[:2].swapaxes(-1, -2)  # the two numbers that are rotated together side by side
        return NumpyBlock(
            qkv.only(queries.ravel()),
            qkv.only(np.concatenate([keys.ravel(), of_heads[2].ravel()])),
            self._affine(f"{name}.attention.output").times(gate),
            self._affine(f"{name}.mlp.hidden").after(self._scale(f"{name}.mlp_norm", mlp_scale), mlp_shift),
            self._affine(f"{name}.mlp.output").times(mlp_gate),
        )

    def read(self, passages: Sequence[Passage]) -> list[tuple[Floats, States]]:
        """For each passage, log p of all tokens at the wanted positions [S, V], and its keys and values.

        On a process that only masks, outputs at a mask are logits of x_0 for every parameterization.
        """
        x = self.embedding(np.concatenate([passage.ids.ravel() for passage in passages]))
        rows = [passage.ids.size for passage in passages]
        states: list[list[tuple[Floats, Floats]]] = [[] for _ in passages]
        for number, block in enumerate(self.blocks):
            normed, last = norm(x), number == len(self.blocks) - 1
            keys_and_values = split(block.keys_and_values(normed), rows)
            if last:  # only the wanted rows are needed from here on
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
        log_probs = split(log_softmax(self.head(norm(x))), rows)
        found = list[tuple[Floats, States]]()
        for passage, of_rows, of_blocks in zip(passages, log_probs, states, strict=True):
            keys, values = (np.stack(part) for part in zip(*of_blocks, strict=True))
            found.append((of_rows, States(keys, values, passage.places)))
        return found

    def _heads(self, rows: Floats, sequences: int, parts: int) -> Floats:
        """[N, parts D] -> [parts, S, H, L, W]."""
        heads, width = self.config.heads, self.config.width // self.config.heads
        return rows.reshape(sequences, -1, parts, heads, width).transpose(2, 0, 3, 1, 4)

    def _attend(
        self, queries: Floats, keys: Floats, values: Floats, passage: Passage, block: int, last: bool
    ) -> Floats:
        """Attention of queries [S, H, L or 1, W] to the passage and the cached text around it, [N, D]."""
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
        """Vectors [S, H, L, W] rotated by their positions [S, L]."""
        return (x.view(np.complex64) * self.rotations[places][:, None]).view(np.float32)


def starts(sizes: Sequence[int]) -> list[int]:
    """The index of the first row of each part."""
    return [sum(sizes[:i]) for i in range(len(sizes))]


def split(rows: Floats, sizes: Sequence[int]) -> list[Floats]:
    """An array cut into consecutive parts of these sizes."""
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
