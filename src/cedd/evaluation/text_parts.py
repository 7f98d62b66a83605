"""Texts of any length as parts that a model can be measured on.

A text is cut into pieces of at most the tokens that the model reads at once. A model that writes blocks has whole
blocks of each piece as one part, and the rest as another: a shorter block, given those before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from cedd.block_layout import GivenPast
from cedd.methods import Method
from cedd.models.loaded_model import LoadedModel
from cedd.network import AnyModel


@dataclass(frozen=True)
class TextPart:
    """Tokens of texts [B, n], and with what they are measured."""

    model: AnyModel
    method: Method
    ids: Tensor
    conditions: Mapping[str, Any]


def text_parts(loaded: LoadedModel, ids: Tensor) -> Iterator[TextPart]:
    """The parts of texts [B, n]."""
    for piece in ids.split(loaded.length, 1):  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        yield from _of_piece(loaded, piece)


def _of_piece(loaded: LoadedModel, ids: Tensor) -> Iterator[TextPart]:
    """The parts of texts that the model reads at once."""
    length, block = ids.shape[1], loaded.method.block
    if block is None or not loaded.writes_blocks:
        yield TextPart(loaded.reader(length), loaded.method, ids, {})
        return
    whole = length // block * block
    if whole:
        yield TextPart(loaded.model, loaded.method, ids[:, :whole], {})
    if whole < length:
        past = {"past": ids[:, :whole]}
        yield TextPart(GivenPast(loaded.model, block), loaded.method.of_one_block, ids[:, whole:], past)
