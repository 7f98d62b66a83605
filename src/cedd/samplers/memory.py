"""What a network said lately of a sequence, so that it need not read it again.

Shapes: B sequences, L positions, D width.

A step in which nothing jumped leaves a text as it was, and a network that is not told the time says the same of it
again. And who types sends nearly the same text again and again: a corrector reads windows around the words that it
doubts, and most of them have not changed since the last pause.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable
from typing import cast

import torch
from torch import Tensor

from cedd.device import model_device
from cedd.network import AnyModel, HasHead, has_head, knows_time

MOST_BYTES = 64 * 2**20
MOST_NUMBERS = 2**14


class Numbers(OrderedDict[Hashable, float]):
    """Numbers by what they are of, the latest found, up to a count."""

    def __setitem__(self, key: Hashable, number: float) -> None:
        super().__setitem__(key, number)
        while len(self) > MOST_NUMBERS:
            self.popitem(last=False)


class Memory:
    """Features of sequences, the latest used, up to a size; and numbers that were found with a network.

    Args:
        most_bytes: of all features that are kept.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.size, self._most = 0, most_bytes
        self._kept: OrderedDict[Hashable, Tensor] = OrderedDict()
        self.numbers: defaultdict[Hashable, Numbers] = defaultdict(Numbers)
        """By whose they are."""

    def read(self, whose: Hashable, x_t: Tensor, sigma: Tensor, features: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """The features [B, L, D] of x_t [B, L] and sigma [B]; only sequences that are new are asked for."""
        levels, texts = cast(list[float], sigma.tolist()), cast(list[list[int]], x_t.tolist())  # pyright: ignore[reportUnknownMemberType]
        keys = [(whose, level, tuple(text)) for level, text in zip(levels, texts, strict=True)]
        found = {key: self._kept[key] for key in keys if key in self._kept}
        new = {key: number for number, key in enumerate(keys) if key not in found}
        if new:
            rows = torch.tensor(list(new.values()), device=x_t.device)
            made = features(x_t.index_select(0, rows), sigma.index_select(0, rows))
            found |= {key: row.clone() for key, row in zip(new, made, strict=True)}
        for key in found:
            self._keep(key, found[key])
        return torch.stack([found[key] for key in keys])

    def _keep(self, key: Hashable, row: Tensor) -> None:
        """Keep a row as the latest, and forget the oldest ones beyond the size."""
        if key not in self._kept:
            self._kept[key] = row
            self.size += row.nbytes
        self._kept.move_to_end(key)
        while self.size > self._most:
            _, oldest = self._kept.popitem(last=False)
            self.size -= oldest.nbytes


SAMPLERS_BYTES = 2**30
"""Kept for a sampler, which comes back to each text of its batch once a step."""


class RememberingNetwork:
    """A network in two halves that is not told the time: it reads a text only if a token of it changed."""

    def __init__(self, model: HasHead) -> None:
        self._model, self._memory = model, Memory(SAMPLERS_BYTES)
        self.head, self.device = model.head, model_device(model)

    def features(self, x_t: Tensor, sigma: Tensor) -> Tensor:
        """[B, L, D]"""
        return self._memory.read(None, x_t, torch.zeros_like(sigma), self._model.features)


def remembering(model: AnyModel) -> AnyModel:
    """The same network, which remembers what it has read if it says the same of it at any time.

    On a CPU: a GPU would wait longer for the host to look at the texts than it takes to read them again.
    """
    if has_head(model) and not knows_time(model) and model_device(model).type == "cpu":
        return RememberingNetwork(model)
    return model
