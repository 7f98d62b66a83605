"""A cache of a network's features, so that unchanged sequences are not computed again.

Shapes: B sequences, L positions, D width.

A step without jumps leaves a sequence unchanged, and a network without a time input then returns the same features. A
corrector of text that is being typed reads windows around suspicious words, most of which are the same as in its last
call.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable
from typing import cast

import torch
from torch import Tensor

from cedd.device import model_device
from cedd.network import AnyModel, Capabilities, HasHead, capabilities_of, has_head

MOST_BYTES = 64 * 2**20
MOST_NUMBERS = 2**14


class NumberCache(OrderedDict[Hashable, float]):
    """The most recent numbers by key, up to a maximum number."""

    def __setitem__(self, key: Hashable, number: float) -> None:
        super().__setitem__(key, number)
        while len(self) > MOST_NUMBERS:
            self.popitem(last=False)


class FeatureCache:
    """The most recently used features of sequences, up to a size in bytes, and numbers computed with a network.

    Args:
        most_bytes: the largest size of all cached features.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.size, self._most = 0, most_bytes
        self._kept: OrderedDict[Hashable, Tensor] = OrderedDict()
        self.numbers: defaultdict[Hashable, NumberCache] = defaultdict(NumberCache)
        """By owner."""

    def read(self, owner: Hashable, x_t: Tensor, sigma: Tensor, features: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """The features [B, L, D] of x_t [B, L] and sigma [B]; the network runs only on new ones."""
        levels, texts = cast(list[float], sigma.tolist()), cast(list[list[int]], x_t.tolist())  # pyright: ignore[reportUnknownMemberType]
        keys = [(owner, level, tuple(text)) for level, text in zip(levels, texts, strict=True)]
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
        """Add a row, and drop the oldest rows beyond the size."""
        if key not in self._kept:
            self._kept[key] = row
            self.size += row.nbytes
        self._kept.move_to_end(key)
        while self.size > self._most:
            _, oldest = self._kept.popitem(last=False)
            self.size -= oldest.nbytes


SAMPLER_BYTES = 2**30
"""The cache of a sampler, which calls the network on each sequence of its batch once per step."""


class CachedNetwork:
    """A network without a time input, which runs on a sequence again only if one of its tokens changed."""

    capabilities = Capabilities(features=True, time_conditioned=False)

    def __init__(self, model: HasHead) -> None:
        self._model, self._cache = model, FeatureCache(SAMPLER_BYTES)
        self.head, self.device = model.head, model_device(model)

    def features(self, x_t: Tensor, sigma: Tensor) -> Tensor:
        """[B, L, D]"""
        return self._cache.read(None, x_t, sigma.new_zeros(len(x_t)), self._model.features)


def with_cached_features(model: AnyModel) -> AnyModel:
    """The network with cached features, if they do not depend on time. On a CPU only: on a GPU, comparing the sequences
    takes longer than computing them again.
    """
    if has_head(model) and not capabilities_of(model).time_conditioned and model_device(model).type == "cpu":
        return CachedNetwork(model)
    return model
