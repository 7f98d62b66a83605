"""The forward pass of a transformer in NumPy, so that commands need not import torch.

Shapes: S sequences, L tokens of each with padding, P tokens of the text around each, N tokens of all without padding,
D width, H heads, W head width, V vocabulary.

At a fixed noise level the modulations are constants, which are multiplied into the adjacent matrices:

    M (norm(x) (1 + scale) + shift) = (M diag(1 + scale)) norm(x) + M shift,        gate (M x) = (diag(gate) M) x.

Sequences are read alone, or inside others: their tokens attend to the keys and values of a text, which does not attend
to them, so that versions of a text that differ in one place share the computation of everything else. Linear maps are
applied to the tokens of all sequences at once, without padding; only attention is padded.
"""

from __future__ import annotations

import math
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from cedd.apps.correct.blas_threads import one_blas_thread
from cedd.models.numpy_weights import PackedArrays
from cedd.models.transformer_config import BASE, EPSILON, FREQUENCIES, GELU, TransformerConfig

Floats = NDArray[np.floating[Any]]
"""Of float32, as the network is."""
Ids = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Passage:
    """Sequences that are read together."""

    ids: Ids
    """[S, L]"""
    places: Ids
    """[S, L], positions; only their differences matter."""
    groups: Ids
    """[S, L], numbers: a token attends to those of its sequence with the same number. -1 is padding."""
    wanted: Ids
    """The tokens whose log-probabilities are computed, by their indices in [S L], increasing."""


@dataclass(frozen=True)
class Inside(Passage):
    """Sequences each of which is read inside the text with the same number, between two parts of it."""

    before: int
    """Number of tokens, with padding, of the part before."""
    after: int
    """The first token of the part after."""
    shift: Ids
    """[S, L], by how many positions the part after is further from each token than `places` say."""


class PassageReader(Protocol):
    """A network that reads passages."""

    def read(self, text: Passage, inside: Inside | None = None) -> Floats:
        """log p of all tokens at the wanted positions of the text and of what is inside it, [N, V]."""
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

    @one_blas_thread()
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
        self.frequencies = BASE ** -(np.arange(0, width, 2) / width)
        """[W / 2], the angle between neighbouring positions for each pair of numbers."""
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

    @one_blas_thread()
    def read(self, text: Passage, inside: Inside | None = None) -> Floats:
        """log p of all tokens at the wanted positions of the text and of what is inside it, [N, V].

        On a process that only masks, outputs at a mask are logits of x_0 for every parameterization.
        """
        parts = [PassageAttention(self, passage) for passage in (text, inside) if passage is not None]
        rows, last = [part.rows for part in parts], len(self.blocks) - 1
        x = self.embedding(np.concatenate([part.ids for part in parts]))
        for number, block in enumerate(self.blocks):
            normed = norm(x)
            keys_and_values = split(block.keys_and_values(normed), rows)
            if number == last:  # only the wanted rows are needed from here on
                wanted = [np.searchsorted(part.rows, part.passage.wanted) for part in parts]
                chosen = np.concatenate([wanted[0], *(len(rows[0]) + some for some in wanted[1:])])
                x, normed, rows = x[chosen], normed[chosen], [part.passage.wanted for part in parts]
            queries, attended, around = split(block.queries(normed), rows), list[Floats](), None
            for part, of_rows, asked, made in zip(parts, rows, queries, keys_and_values, strict=True):
                own = part.keys_and_values(made)
                attended.append(part(asked, of_rows, own, around))
                around = own
            x += block.attended(np.concatenate(attended))
            x += block.output(gelu(block.hidden(norm(x))))
        return log_softmax(self.head(norm(x)))

    def rotations(self, places: Ids) -> NDArray[np.complex64]:
        """The rotation of each pair of numbers in the heads of tokens at these positions [N], [N, 1, W / 2]."""
        return np.exp(1j * places[:, None, None] * self.frequencies).astype(np.complex64)


class PassageAttention:
    """The attention of the tokens of a passage, in any block."""

    def __init__(self, network: NumpyNetwork, passage: Passage) -> None:
        self.config, self.score, self.passage = network.config, network.score, passage
        groups, places = passage.groups, passage.places.ravel()
        self.rows = np.flatnonzero(groups >= 0)
        """Indices of the tokens that are not padding."""
        self.ids = passage.ids.ravel()[self.rows]
        self.turns = np.zeros((groups.size, 1, len(network.frequencies)), np.complex64)
        self.turns[self.rows] = network.rotations(places[self.rows])
        self.hidden = unseen(groups[:, None, :, None] == groups[:, None, None])
        self.padding = unseen((groups >= 0)[:, None, None])
        """-inf where a token of the passage is not seen by its other tokens, and by those inside it."""
        self.further = self.turns
        if isinstance(passage, Inside):
            self.further = np.zeros_like(self.turns)
            self.further[self.rows] = network.rotations((places - passage.shift.ravel())[self.rows])

    def keys_and_values(self, made: Floats) -> Seen:
        """The keys, rotated by their positions, and the values, from [N, 2 D]."""
        keys, values = np.split(made.reshape(len(made), 2 * self.config.heads, -1), 2, 1)
        if self.config.largest_score is not None:
            keys = rms_norm(keys)
        keys = rotated(keys, self.turns[self.rows])
        return Seen(self.padded(keys, self.rows), self.padded(values, self.rows), self.padding)

    def padded(self, x: Floats, rows: Ids) -> Floats:
        """[N, H, W] -> [S, L, H, W], with zeros at all other indices than `rows`."""
        S, L = self.passage.ids.shape
        if len(rows) < S * L:
            made = np.zeros((S * L, *x.shape[1:]), np.float32)
            made[rows] = x
            x = made
        return x.reshape(S, L, *x.shape[1:])

    def __call__(self, queries: Floats, rows: Ids, own: Seen, around: Seen | None) -> Floats:
        """What the tokens at these indices attend to, in the passage and in the text around it, [N, D]."""
        asking = queries.reshape(len(queries), self.config.heads, -1)
        if self.config.largest_score is not None:
            asking = rms_norm(asking)
        asking = asking * np.float32(self.score)
        turned = self.padded(rotated(asking, self.turns[rows]), rows)
        parts = [(turned, Seen(own.keys, own.values, self.hidden))]
        if around is not None:
            assert isinstance(self.passage, Inside)
            further = self.padded(rotated(asking, self.further[rows]), rows)
            before, after = np.s_[: self.passage.before], np.s_[self.passage.after :]
            parts += [(turned, around.part(before)), (further, around.part(after))]
        S, L, H, W = turned.shape
        weights, made = np.zeros((S, H, L, 1), np.float32), np.zeros((S, H, L, W), np.float32)
        scores = [asked.swapaxes(1, 2) @ seen.keys.transpose(0, 2, 3, 1) for asked, seen in parts]
        highest = None
        if self.config.largest_score is None:
            for part, (_, seen) in zip(scores, parts, strict=True):
                if seen.hidden is not None:
                    np.copyto(part, -np.inf, where=seen.hidden == 0)
            highest = np.max([part.max(-1, keepdims=True, initial=-np.inf) for part in scores], 0)
        for part, (_, seen) in zip(scores, parts, strict=True):
            if highest is not None:
                part -= highest
            np.exp(part, out=part)
            if seen.hidden is not None:
                part *= seen.hidden
            weights += part.sum(-1, keepdims=True)
            made += part @ seen.values.swapaxes(1, 2)
        made /= weights
        return made.swapaxes(1, 2).reshape(S * L, H * W)[rows]


class Seen(NamedTuple):
    """Keys and values of tokens [S, L, H, W], and a factor of their weights: 0 where a token is not seen; None if all
    are."""

    keys: Floats
    values: Floats
    hidden: Floats | None

    def part(self, tokens: slice) -> Seen:
        """Some of the tokens."""
        hidden = None if self.hidden is None else self.hidden[..., tokens]
        return Seen(self.keys[:, tokens], self.values[:, tokens], hidden)


def unseen(seen: Flags) -> Floats | None:
    """1 where a token is seen and 0 elsewhere; None if all are seen."""
    return None if seen.all() else seen.astype(np.float32)


def split(made: Floats, rows: Sequence[Ids]) -> list[Floats]:
    """An array cut into consecutive parts with these rows."""
    return np.split(made, np.cumsum([len(some) for some in rows])[:-1])


def rotated(x: Floats, turns: NDArray[np.complex64]) -> Floats:
    """Vectors [N, H, W] with each pair of numbers rotated."""
    return (np.ascontiguousarray(x).view(np.complex64) * turns).view(np.float32)


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
    """Over the last axis, in place."""
    x -= x.max(-1, keepdims=True)
    x -= np.log(np.exp(x).sum(-1, keepdims=True))
    return x
