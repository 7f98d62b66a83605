"""A run that starts from another model's weights: what it takes over, and what that model must be for it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from cedd.data.tokenizers import Tokenizer
from cedd.methods import Method
from cedd.models.folder import ModelFolder
from cedd.models.transformer import Transformer
from cedd.process import TokenProcess

_EMBEDDING, _BLOCKS, _MODULATION = "backbone.embedding.weight", "backbone.blocks.", "backbone.conditioning.modulation."


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


def deepened(weights: Mapping[str, Tensor], fewer: int, depth: int) -> dict[str, Tensor]:
    """The weights of a network of `fewer` blocks as those of one of `depth`, in which each block is there n times in a
    row. A branch that added gate * f(x) to the stream is then n branches, which add

        (gate / n) * f(x)

    each, to streams that differ by what those before added: the deeper network begins by computing nearly the same.
    Without gates, the last map of f is divided by n.
    """
    times, made = depth // fewer, dict[str, Tensor]()
    has_gates = f"{_MODULATION}weight" in weights
    for name, value in weights.items():
        if name.startswith(_BLOCKS):
            block, _, rest = name.removeprefix(_BLOCKS).partition(".")
            part = value if has_gates or ".output." not in rest else value / times
            made |= {f"{_BLOCKS}{times * int(block) + copy}.{rest}": part for copy in range(times)}
        elif name.startswith(_MODULATION):  # shift, scale and gate of two branches a block; two of the last norm
            parts = value.unflatten(0, (6 * fewer + 2, -1))
            blocks = parts[:-2].unflatten(0, (fewer, 6)).repeat_interleave(times, 0)
            blocks[:, 2::3] /= times
            made[name] = torch.cat([blocks.flatten(0, 1), parts[-2:]]).flatten(0, 1)
        else:
            made[name] = value
    return made


@torch.no_grad()
def take_over(model: Transformer, source: ModelFolder) -> None:
    """Fill the model with the weights of another, which may have fewer blocks; a mask that the new process has not is
    left out."""
    given, rows = source.model.state_dict(), model.config.vocab_size + int(model.config.has_mask)
    given[_EMBEDDING] = given[_EMBEDDING][:rows]
    if (fewer := source.model.config.depth) != (depth := model.config.depth):
        if depth % fewer:
            raise ValueError(f"{source.name} has {fewer} blocks; a run from it has as many or a multiple, not {depth}")
        given = deepened(given, fewer, depth)
    own = model.state_dict()
    shapes, wanted = ({name: tensor.shape for name, tensor in state.items()} for state in (given, own))
    if different := sorted(name for name in shapes.keys() | wanted.keys() if shapes.get(name) != wanted.get(name)):
        raise ValueError(f"the network of {source.name} has other sizes than the run's, first at {different[0]}")
    model.load_state_dict(given)
