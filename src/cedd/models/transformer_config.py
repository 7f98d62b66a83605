"""The configuration of the transformer, its preset sizes and constants. Imports no torch, so that --help is fast."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from cedd.names import suggestion
from cedd.storage import JSONMapping

EPSILON = 1e-5
"""Added to the variance by a layer norm, as torch does."""
GELU = 2 * math.sqrt(2 / math.pi), 2 * math.sqrt(2 / math.pi) * 0.044715
"""a and b of gelu(x) = x sigmoid(x (a + b x²))."""
FREQUENCIES = 128
"""Number of sines, and of cosines, in the embedding of sigma."""
BASE = 10_000.0
"""Ratio of the highest to the lowest frequency, in the embedding of sigma and in rotary positions."""

LONGEST = 1 << 20
"""The largest length: the tables of rotary positions of a longer one would fill the memory."""


@dataclass(frozen=True)
class NetworkOptions:
    """Size and options of the transformer, independent of the data."""

    width: int
    """Width of the residual stream."""
    depth: int
    """Number of blocks, each with attention and an MLP."""
    heads: int
    """Number of attention heads, which share the width."""
    conditioning_width: int = 128
    """Width of the embedding of the noise level."""
    dropout: float = 0.1
    """Dropout rate of each residual branch, before its gate; rounded to a multiple of 1/256."""
    time_conditioning: bool = True
    """Whether the network takes the noise level as an input."""
    checkpoint_blocks: bool = False
    """Activation checkpointing: recompute each block in the backward pass, a third more compute for less memory."""
    float32_residual: bool = False
    """Keep the residual stream in float32 instead of the precision of matrix products."""
    mlp_bias: bool = False
    """Biases in the MLPs, as in published networks."""
    time_input: str = "sigma"
    """The input of the time conditioning: sigma; none, which is 0 at every noise level; or hybrid-time:P_U, the time t
    at which the hybrid process with this p_u has that sigma (as in GIDD's networks)."""
    largest_score: float | None = None
    """Normalize queries and keys so that no attention score exceeds this; by default they are not normalized."""

    @property
    def time_conditioned(self) -> bool:
        """Whether outputs depend on the noise level, not on the text alone."""
        return self.time_conditioning and self.time_input != "none"


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(NetworkOptions):
    """The configuration of a ``Transformer``."""

    vocab_size: int
    has_mask: bool
    """Whether the input may contain the mask, token V: the embedding then has V+1 rows."""
    length: int
    """The longest sequence the network can read."""
    causal: bool = False
    mlp_ratio: int = 4
    labels: int = 0
    """The number of labels that the network is conditioned on; 0 for a network without."""

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "length", "width", "depth", "heads", "conditioning_width", "mlp_ratio")
        for name in sizes:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1 (got {getattr(self, name)})")
        if self.length > LONGEST:
            raise ValueError(f"length must be at most {LONGEST:,} (got {self.length:,})")
        if self.width % (2 * self.heads):
            raise ValueError(
                f"width must be a multiple of {2 * self.heads}, for {self.heads} heads of even size (got {self.width})"
            )
        if self.labels < 0 or (self.labels and not self.time_conditioning):
            raise ValueError(f"labels need time_conditioning, and must not be negative; got {self.labels}")
        if self.largest_score is not None and not 0.0 < self.largest_score < math.inf:
            raise ValueError(f"largest_score must be positive and finite, if given (got {self.largest_score})")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout must be in [0, 1) (got {self.dropout})")


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


def wrap_of(config: JSONMapping) -> Literal["none", "bos-eos"]:
    """What the blocks of the model that a config.json describes stood between when it was trained: nothing, or the
    tokens that begin and end a document."""
    return config.get("wrap", config.get("imported", {}).get("wrap", "none"))
