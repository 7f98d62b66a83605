"""The options of a network, its sizes by name, and its constants; without torch, so that the command line can show them
at once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from cedd.names import suggestion

EPSILON = 1e-5
"""Added to the variance by a layer norm, as torch does."""
GELU = 2 * math.sqrt(2 / math.pi), 2 * math.sqrt(2 / math.pi) * 0.044715
"""a and b of gelu(x) = x sigmoid(x (a + b x²))."""
FREQUENCIES = 128
"""Sines, and as many cosines, in the embedding of sigma."""
BASE = 10_000.0
"""What the frequencies fall to a part of, in the embedding of sigma and in the rotation of positions."""


@dataclass(frozen=True)
class NetworkOptions:
    """Size and options of the network, whatever data it is trained on."""

    width: int
    """Numbers that the network keeps of each token."""
    depth: int
    """Blocks, of attention and an MLP each."""
    heads: int
    """Of the attention; the width is divided among them."""
    conditioning_width: int = 128
    """Width of the embedding of the noise level."""
    dropout: float = 0.1
    """Applied to each residual branch, before its gate; rounded to a multiple of 1/256."""
    time_conditioning: bool = True
    """Whether the network is told the noise level."""
    checkpoint_blocks: bool = False
    """Recompute each block in the backward pass: about a third more arithmetic for far fewer activations."""
    float32_residual: bool = False
    """Keep the sum of all branches in float32, not in the precision of matrix products."""
    mlp_bias: bool = False
    """Biases in the MLPs, which published networks have."""
    told: str = "sigma"
    """What the network is told of the noise: sigma; nothing, 0 in its place; or hybrid-time:P_U, the time t at which
    the hybrid process with this p_u has that sigma (as GIDD's networks are)."""
    largest_score: float | None = None
    """Norm queries and keys, so that no score of the attention exceeds this; None: leave them as they are."""

    @property
    def knows_time(self) -> bool:
        """Whether what the network says depends on the noise level besides the text."""
        return self.time_conditioning and self.told != "nothing"


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(NetworkOptions):
    """Everything that ``Transformer`` needs to be built again."""

    vocab_size: int
    has_mask: bool
    """Whether the input may hold the mask, token ``vocab_size``: the embedding has then V+1 rows."""
    length: int
    """The longest sequence the network can read."""
    causal: bool = False
    mlp_ratio: int = 4

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "length", "width", "depth", "heads", "conditioning_width", "mlp_ratio")
        for name in sizes:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, but is {getattr(self, name)}")
        if self.width % (2 * self.heads):
            raise ValueError(
                f"width {self.width} does not divide into {self.heads} heads of an even size: "
                f"use a multiple of {2 * self.heads}"
            )
        if self.largest_score is not None and not 0.0 < self.largest_score < math.inf:
            raise ValueError(f"largest_score must be positive and finite, if given, but is {self.largest_score}")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout must lie in [0, 1), but is {self.dropout}")


SIZES: dict[str, dict[str, int]] = {
    # For tests.
    "tiny": {"length": 32, "width": 64, "depth": 2, "heads": 2, "conditioning_width": 32},
    # Characters, on two CPU cores.
    "char": {"length": 128, "width": 192, "depth": 4, "heads": 6, "conditioning_width": 64},
    # Characters of English, the model in the box.
    "english-char": {"length": 256, "width": 512, "depth": 7, "heads": 8, "conditioning_width": 64},
    # The paper's, the size of GPT-2 small.
    "small": {"length": 128, "width": 768, "depth": 12, "heads": 12},
    # The size of GPT-2 medium.
    "medium": {"length": 1024, "width": 1024, "depth": 24, "heads": 16},
}


def config_from_preset(name: str, *, vocab_size: int, has_mask: bool, **changes: Any) -> TransformerConfig:
    """The configuration of the size called ``name``, with any field changed by keyword."""
    if name not in SIZES:
        raise ValueError(f"no preset is called {name!r}{suggestion(name, SIZES)}")
    fields: dict[str, Any] = {"vocab_size": vocab_size, "has_mask": has_mask, **SIZES[name], **changes}
    return TransformerConfig(**fields)


def wrap_of(config: Mapping[str, Any]) -> Literal["none", "bos-eos"]:
    """What the blocks of the model that a config.json describes stood between when it was trained: nothing, or the
    tokens that begin and end a document."""
    return config.get("wrap", config.get("imported", {}).get("wrap", "none"))
