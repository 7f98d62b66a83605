"""Starting a run from another model's weights: checks, and copying the weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cedd.block_layout import InBlocks
from cedd.data.tokenizers import Tokenizer
from cedd.methods import Method
from cedd.models.backbone import Backbone, stored_tensors
from cedd.models.folder import ModelFolder
from cedd.parameterization import Affine
from cedd.process import TokenProcess
from cedd.training.config import TrainConfig


def check_start(
    source: ModelFolder, tokenizer: Tokenizer, method: Method, process: TokenProcess, labels: Sequence[str] = ()
) -> None:
    """Refuse a model whose tokens or outputs mean something else than in the run."""
    if source.tokenizer.fingerprint != tokenizer.fingerprint:
        raise ValueError(
            f"the tokens of {source.name} ({source.tokenizer.name}) are not those of the data ({tokenizer.name}); "
            f"use its own: --text.tokenizer {source.path}"
        )
    if source.method.meaning != method.meaning and not _goes_on_from_next_tokens(source.method, method):
        raise ValueError(
            f"the outputs of {source.name} ({source.method.name}) are {source.method.meaning}, those of {method.name} "
            f"{method.meaning}; train it by a method whose outputs mean the same"
        )
    own = source.config.get("labels", [])
    if own and labels and list(labels) != own:
        raise ValueError(f"the labels of {source.name} are {', '.join(own)}, those of the data {', '.join(labels)}")
    if process.has_mask and not source.model.has_mask:
        raise ValueError(f"{source.name} was trained without a mask; start it on a process without one (uniform)")


def _goes_on_from_next_tokens(source: Method, method: Method) -> bool:
    """Whether an autoregressive network is to be trained as a diffusion model; its outputs are logits of tokens too."""
    return not source.dynamics.noisy and isinstance(method.parameterization, Affine)


def check_network(model: Backbone, config: TrainConfig, method: Method) -> None:
    """Refuse a network that the method cannot train, or whose maximum length is too small."""
    if not method.dynamics.noisy and not model.capabilities.causal:
        raise ValueError(
            f"{method.name} needs a causal network, and {model.architecture} does not declare Capabilities(causal=True)"
        )
    if method.blocks_of(config.length) > 1:
        InBlocks(model, config.block or config.length)  # refuses those that cannot be read so
    for name in ("next_token_weight", "anneal"):
        if getattr(config.adapt, name) and not (model.capabilities.attention and model.capabilities.features):
            raise ValueError(
                f"adapt.{name} needs a network that takes an attention pattern, and {model.architecture} does not "
                "declare Capabilities(features=True, attention=True)"
            )
    longest = model.capabilities.max_length
    if longest is not None and config.length > longest:
        raise ValueError(f"{model.architecture} reads at most {longest} tokens; length is {config.length}")


@torch.no_grad()
def copy_weights(model: Backbone, source: ModelFolder) -> None:
    """Fill the model with the weights of another one of the same architecture (see `Backbone.weights_from`)."""
    if source.model.architecture != model.architecture:
        raise ValueError(
            f"{source.name} is of the architecture {source.model.architecture}, and the run of {model.architecture}"
        )
    try:
        given = model.weights_from(source.model)
    except ValueError as error:
        raise ValueError(f"cannot start from {source.name}: {error}") from None
    shapes, wanted = ({name: tensor.shape for name, tensor in one.items()} for one in (given, stored_tensors(model)))
    if different := sorted(name for name in shapes.keys() | wanted.keys() if shapes.get(name) != wanted.get(name)):
        raise ValueError(f"the network of {source.name} has other sizes than the run's, first at {different[0]}")
    model.load_state_dict(given, strict=False)  # tied parameters are stored once
