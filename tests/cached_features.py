"""A network with cached features, for tests that compare results computed from the same features."""

from typing import Any

import torch
from torch import Tensor

from cedd.models.loaded_model import LoadedModel


def with_cached_features(loaded: LoadedModel) -> LoadedModel:
    """The same model, whose network caches its features per input and noise level."""
    network: Any = loaded.folder.model
    read, found = network.features, dict[tuple[Any, ...], Tensor]()

    def features(x_t: Tensor, sigma: Tensor | None = None, where: Tensor | None = None) -> Tensor:
        assert not torch.is_grad_enabled()
        given = (x_t, sigma, where)
        key = *(None if one is None else one.numpy().tobytes() for one in given), x_t.shape
        if key not in found:
            found[key] = read(x_t, sigma, where=where)
        return found[key].clone()

    network.features = features
    return loaded
