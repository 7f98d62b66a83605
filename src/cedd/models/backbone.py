"""The protocol of networks: what training, model folders, sampling and serving use, whatever the architecture.

Shapes: B batch, L positions, V vocabulary, D width, N selected positions.

    features(x_t [B, L], sigma [B]) -> [B, L, D],        head([N, D]) -> [N, V]

`Backbone` is the base class of the architectures in this package and of your own. A subclass defines `features`, `head`
and `config`, and declares everything else that it supports in `capabilities`. A plain `torch.nn.Module` with
`forward(x_t, sigma) -> [B, L, V]` needs none of this: `ModuleBackbone` wraps it, with its outputs as features and the
identity as head.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from cedd.models.kernels.rows import gather_rows
from cedd.network import AttentionPattern, Capabilities, capabilities_of
from cedd.storage import JSONMapping, JSONObject

Parameters = dict[str, nn.Parameter]


@dataclass(frozen=True)
class ParameterGroups:
    """The parameters of a network by name, as optimizers treat them."""

    matrices: Parameters
    """Hidden matrices, which Muon can train."""
    embeddings: Parameters
    """Token embeddings."""
    head: Parameters
    """The vocabulary head."""
    rest: Parameters
    """Everything else: norms, biases, time conditioning."""


class Backbone(nn.Module):
    """A network with a vocabulary head.

    Subclasses set `vocab_size`, `has_mask` and `head` in their constructor and define `features` and `config`.
    """

    capabilities: Capabilities = Capabilities(features=True)
    """Optional features of the network beyond `features` and `head`; a class attribute or a property."""
    architecture: str
    """The name in config.json: an entry of `ARCHITECTURES`, or package:Class."""
    vocab_size: int
    has_mask: bool
    """Whether inputs may contain the mask, token V."""
    head: nn.Module

    def __init__(self) -> None:
        super().__init__()
        self.architecture = class_path(type(self))

    @classmethod
    def from_config(cls, config: JSONMapping) -> Backbone:
        """The network that `config` describes, with new weights."""
        return cls(**config)

    @classmethod
    def least_parameters(cls, config: Mapping[str, Any]) -> int:
        """A lower bound on the number of parameters, checked against the size of a weights file before the network is
        built."""
        return 0

    @property
    def mask_id(self) -> int | None:
        """The token id of the mask; None if inputs never contain it."""
        return self.vocab_size if self.has_mask else None

    def features(
        self,
        x_t: Tensor,
        sigma: Tensor | None = None,
        *,
        attention: AttentionPattern | None = None,
        cache: Any = None,
        where: Tensor | None = None,
        **conditions: Any,
    ) -> Tensor:
        """[B, L, D], the input of the head, for x_t [B, L] and sigma [B].

        `attention`, `cache` and `where` are passed only to networks that declare `Capabilities.attention`, `cache` and
        `selected_rows`; sigma is [B, L] only with `token_times`. Conditions are the user's own inputs, one entry per
        sequence.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define features")

    def config(self) -> JSONObject:
        """The arguments of `from_config`, as JSON values."""
        raise NotImplementedError(f"{type(self).__name__} does not define config")

    def forward(self, x_t: Tensor, sigma: Tensor | None = None, **conditions: Any) -> Tensor:
        """Outputs [B, L, V]."""
        return self.head(self.features(x_t, sigma, **conditions))

    def original_logits(self, ids: Tensor, *args: Any, **inputs: Any) -> Tensor:
        """[B, L, rows]: what the original network of an imported one returns for its own ids [B, L]."""
        raise ValueError(f"{self.architecture} is not an imported network, or was saved since: there is no original")

    def next_tokens(self, clean: Tensor) -> tuple[Tensor, Tensor]:
        """Which features of clean texts [B, L], under causal attention, predict a next token: distinct places [N] of
        the flattened texts, and the tokens [N] that they predict. By default position i predicts token i + 1."""
        places = torch.arange(clean.numel(), device=clean.device).view(clean.shape)[:, :-1]
        return places.flatten(), clean[:, 1:].flatten()

    def rows(self, features: Tensor, places: Tensor) -> Tensor:
        """Features [B, L, D] at distinct places [N] of the flattened batch, [N, D]."""
        return gather_rows(features.flatten(0, 1), places)

    def parameter_groups(self) -> ParameterGroups:
        """By default the weights of `nn.Embedding` modules are embeddings, and there are no matrices for Muon."""
        embeddings = {id(module.weight) for module in self.modules() if isinstance(module, nn.Embedding)}
        return self.grouped(embeddings=embeddings)

    def grouped(self, matrices: Iterable[int] = (), embeddings: Iterable[int] = ()) -> ParameterGroups:
        """Groups of all parameters, given the ids of those that are matrices and embeddings."""
        ids = {"head": {id(one) for one in self.head.parameters()}}
        ids |= {"matrices": set(matrices) - ids["head"], "embeddings": set(embeddings) - ids["head"]}
        found: dict[str, Parameters] = {name: {} for name in (*ids, "rest")}
        for name, parameter in self.named_parameters():
            group = next((group for group, members in ids.items() if id(parameter) in members), "rest")
            found[group][name] = parameter
        return ParameterGroups(**found)

    def rounded_parameters(self) -> set[str]:
        """Names of the parameters that are only used after autocast has rounded them, so that a bfloat16 copy gives the
        same outputs faster. None by default."""
        return set()

    def shard_units(self) -> Sequence[nn.Module]:
        """Modules that FSDP shards and gathers one at a time; by default the network is one unit."""
        return ()

    def weights_from(self, source: Backbone) -> dict[str, Tensor]:
        """Weights for this network from a trained one of the same architecture, by default its own; raises a ValueError
        if they cannot be converted."""
        return stored_tensors(source)

    def merged(self) -> Backbone:
        """The network for export, without parts that only training needs; by default itself. Low-rank updates are added
        to the weights."""
        return self

    def num_parameters(self) -> int:
        """The number of parameters."""
        return sum(parameter.numel() for parameter in self.parameters())

    def flops_per_token(self, length: int) -> float:
        """Model FLOPs of a training step per token, without recomputation; by default 6 per parameter outside the
        embeddings."""
        embedded = sum(one.numel() for one in self.parameter_groups().embeddings.values())
        return 6.0 * (self.num_parameters() - embedded)


class ModuleBackbone(Backbone):
    """Any `nn.Module` with `forward(x_t [B, L], sigma [B]) -> [B, L, V]` as a `Backbone`.

    Args:
        network: the module.
        vocab_size: V.
        has_mask: whether inputs may contain the mask, token V.
        arguments: the other arguments of its constructor, as JSON values.
    """

    def __init__(
        self, network: nn.Module, vocab_size: int, has_mask: bool, arguments: JSONMapping | None = None
    ) -> None:
        super().__init__()
        self.network, self.vocab_size, self.has_mask = network, vocab_size, has_mask
        self.arguments, self.head = dict(arguments or {}), nn.Identity()
        self.architecture = class_path(type(network))

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        """The module's own declarations that describe its outputs (causal, time_conditioned, ...)."""
        declared = capabilities_of(self.network)
        return replace(declared, features=True, selected_rows=False, head_losses=False, cache=False, attention=False)

    def config(self) -> JSONObject:
        return {"vocab_size": self.vocab_size, "has_mask": self.has_mask, **self.arguments}

    def features(self, x_t: Tensor, sigma: Tensor | None = None, **conditions: Any) -> Tensor:
        """The outputs [B, L, V]."""
        return self.network(x_t, sigma, **conditions)


def class_path(kind: type) -> str:
    """package:Class."""
    return f"{kind.__module__}:{kind.__qualname__}"


def stored_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a model's weights file by name: each parameter once, and persistent buffers."""
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return parameters | persistent_buffers(model)


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that `state_dict` contains, such as running means, by name."""
    kept = model.state_dict(keep_vars=True).keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in kept}
