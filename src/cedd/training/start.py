"""A run that starts from another model's weights: what it takes over, and what that model must be for it."""

from __future__ import annotations

import torch

from cedd.data.tokenizers import Tokenizer
from cedd.methods import Method
from cedd.models.folder import ModelFolder
from cedd.models.transformer import Transformer
from cedd.process import TokenProcess

_EMBEDDING = "backbone.embedding.weight"


def check_start(source: ModelFolder, tokenizer: Tokenizer, method: Method, process: TokenProcess) -> None:
    """Refuse a model whose tokens, or whose outputs, mean something else than they shall in the run."""
    if source.tokenizer.fingerprint != tokenizer.fingerprint:
        raise ValueError(
            f"the tokens of {source.name} ({source.tokenizer.name}) are not those of the data ({tokenizer.name}); "
            f"use its own: --text.tokenizer {source.path}"
        )
    if source.method.meaning != method.meaning:
        raise ValueError(
            f"the outputs of {source.name} ({source.method.name}) are {source.method.meaning}, those of {method.name} "
            f"{method.meaning}; train it by a method whose outputs mean the same"
        )
    if process.has_mask and not source.model.config.has_mask:
        raise ValueError(f"{source.name} was never shown a mask; start it on a process without one (uniform)")


@torch.no_grad()
def take_over(model: Transformer, source: ModelFolder) -> None:
    """Fill the model with the weights of another; a mask that the new process has not is left out."""
    given, rows = source.model.state_dict(), model.config.vocab_size + int(model.config.has_mask)
    given[_EMBEDDING] = given[_EMBEDDING][:rows]
    own = model.state_dict()
    shapes, wanted = ({name: tensor.shape for name, tensor in state.items()} for state in (given, own))
    if different := sorted(name for name in shapes.keys() | wanted.keys() if shapes.get(name) != wanted.get(name)):
        raise ValueError(f"the network of {source.name} has other sizes than the run's, first at {different[0]}")
    model.load_state_dict(given)
