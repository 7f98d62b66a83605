"""The configuration of the Llama-type network. Imports no torch, so that --help is fast."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from cedd.models.transformer_config import LONGEST

AttentionKind = Literal["full", "causal", "block-causal"]
FloatType = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class LlamaOptions:
    """Size and options of a Llama-type network, independent of the vocabulary."""

    width: int
    """Width of the residual stream."""
    depth: int
    """Number of layers."""
    heads: int
    """Number of query heads."""
    key_heads: int
    """Number of key and value heads; query head h reads key head h // (heads / key_heads)."""
    head_width: int
    """Width of a head."""
    mlp_width: int
    """Width of the gated MLP."""
    length: int
    """The longest sequence the network reads."""
    rotary_base: float = 10_000.0
    """The base of the rotary frequencies (rope_theta)."""
    rotary_width: int | None = None
    """The number of leading entries of a head that are rotated; None: all."""
    rotary_factor: float = 1.0
    """The rotary frequencies are divided by this, to read longer texts (linear scaling)."""
    rotary_context: int | None = None
    """Divide only those of long wavelengths, relative to this length, that of the first training (Llama 3.1)."""
    rotary_low: float = 1.0
    """With `rotary_context` C: wavelengths above C / rotary_low are divided by the full factor."""
    rotary_high: float = 4.0
    """With `rotary_context` C: wavelengths below C / rotary_high are not scaled; those in between partly."""
    rotary_yarn: float | None = None
    """YaRN: cosines and sines are multiplied by this, and between the two limits the frequencies are mixed linearly in
    their index, not in their number of turns. None: as in Llama 3.1."""
    epsilon: float = 1e-5
    """Added to the mean square by the RMS norms."""
    qkv_bias: bool = False
    """Biases of queries, keys and values (Qwen2)."""
    qk_norm: bool = False
    """RMS norms of queries and keys before the rotation, with one weight of the head's width each (Qwen3)."""
    tied: bool = False
    """Whether the head is the embedding."""
    attention: AttentionKind = "full"
    """Which positions a position attends to: all, those up to its own, or all up to the end of its own block."""
    block: int = 1
    """Positions of a block, for block-causal attention."""
    causal_past: bool = False
    """In block diffusion: whether clean tokens attend to those up to their own position only, as in the autoregressive
    model that the network was adapted from."""
    mask_row: int | None = None
    """The row of the embedding that the mask, token V, is read from. None: a vector of its own."""
    shift: bool = False
    """Whether position i is predicted from the output at position i - 1, as in the autoregressive model that the
    network was adapted from."""
    start_row: int | None = None
    """With `shift`: the row of the embedding of a start token before every sequence, whose output predicts position 0.
    None: position 0 is predicted from its own output."""
    lora_rank: int = 0
    """Rank of the low-rank updates (LoRA) of the layers' matrices; the other weights are then frozen. 0: none."""
    lora_alpha: float = 16.0
    """The updates are scaled by lora_alpha / lora_rank."""
    weights_dtype: FloatType = "float32"
    """The dtype in which parameters are held."""
    checkpoint_blocks: bool = False
    """Activation checkpointing: recompute each layer in the backward pass, a third more compute for less memory."""


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(LlamaOptions):
    """The configuration of a `Llama` network."""

    vocab_size: int
    has_mask: bool
    """Whether the input may contain the mask, token V."""
    optional_start: bool = False
    """Of an autoregressive network: the start token is read only if a text has no prompt."""
    masks_padded_queries: bool = False
    """Of an imported network: with an attention_mask [B, L], padding attends to nothing (Dream)."""

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "length", "width", "depth", "heads", "key_heads", "head_width", "mlp_width", "block")
        for name in sizes:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1 (got {getattr(self, name)})")
        if self.length > LONGEST:
            raise ValueError(f"length must be at most {LONGEST:,} (got {self.length:,})")
        if self.heads % self.key_heads:
            raise ValueError(f"heads must be a multiple of key_heads (got {self.heads} and {self.key_heads})")
        self._check_rotary()
        for name in ("rotary_base", "rotary_factor", "rotary_low", "rotary_yarn", "epsilon", "lora_alpha"):
            if getattr(self, name) is not None and not 0.0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive and finite (got {getattr(self, name)})")
        for name in ("mask_row", "start_row"):
            row = getattr(self, name)
            if row is not None and not 0 <= row < self.vocab_size:
                raise ValueError(f"{name} must be a row of the embedding, 0 to {self.vocab_size - 1} (got {row})")
        if self.start_row is not None and not self.shift:
            raise ValueError("start_row needs shift: without it nothing is predicted from the start token")
        if self.lora_rank < 0:
            raise ValueError(f"lora_rank must be at least 0 (got {self.lora_rank})")

    def _check_rotary(self) -> None:
        """Refuse rotary positions that cannot be."""
        if self.rotated % 2 or not 0 < self.rotated <= self.head_width:
            raise ValueError(f"rotary_width must be even, and at most head_width (got {self.rotated})")
        if not self.rotary_low < self.rotary_high < math.inf:
            raise ValueError(f"rotary_high must be above rotary_low (got {self.rotary_high} and {self.rotary_low})")
        if self.rotary_context is not None and self.rotary_context < 1:
            raise ValueError(f"rotary_context must be at least 1 (got {self.rotary_context})")
        if self.rotary_yarn is not None and (self.rotary_context is None or self.rotary_base <= 1.0):
            raise ValueError("rotary_yarn needs rotary_context and a rotary_base above 1")

    @property
    def rotated(self) -> int:
        """The number of entries of a head that are rotated."""
        return self.head_width if self.rotary_width is None else self.rotary_width
