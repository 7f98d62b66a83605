"""GPT-2's network, from which DiffuGPT was adapted: learned positions, layer norms, a GELU, and biases everywhere.

Shapes: B batch, L positions, D width.

Embedding of the mask, shift, attention patterns, cache and head are those of `llama.py`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cedd.models.kernels import at_least_float32
from cedd.models.llama import (
    GroupedQueryAttention,
    Llama,
    LlamaLayer,
    LlamaStack,
    Projection,
    Rotation,
    stream_dtype,
)
from cedd.models.llama_config import LlamaConfig


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(var + ε) · weight + bias."""

    def __init__(self, width: int, epsilon: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.ones(width, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(width, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        wide = at_least_float32(x)
        weight, bias = self.weight.to(wide.dtype), self.bias.to(wide.dtype)
        return F.layer_norm(wide, weight.shape, weight, bias, self.epsilon).to(x.dtype)


class GELUMLP(nn.Module):
    """output(gelu(hidden x)), the GELU by tanh."""

    def __init__(self, config: LlamaConfig, dtype: torch.dtype) -> None:
        super().__init__()
        low_rank = {"rank": config.lora_rank, "alpha": config.lora_alpha}
        self.hidden = Projection(config.width, config.mlp_width, dtype, bias=True, **low_rank)
        self.output = Projection(config.mlp_width, config.width, dtype, bias=True, **low_rank)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(F.gelu(self.hidden(x), approximate="tanh"))


class GPT2Layer(LlamaLayer):
    """Attention, then an MLP, each on a residual branch."""

    def __init__(self, config: LlamaConfig, layer: int, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.attention_norm = LayerNorm(config.width, config.epsilon, dtype)
        self.attention = GroupedQueryAttention(config, layer, dtype, qkv_bias=True, output_bias=True)
        self.mlp_norm = LayerNorm(config.width, config.epsilon, dtype)
        self.mlp = GELUMLP(config, dtype)


class GPT2Stack(LlamaStack):
    """Embeddings of tokens and positions, layers and the last norm."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.positions = nn.Embedding(config.length, config.width, dtype=self.embedding.weight.dtype)
        nn.init.normal_(self.positions.weight, std=0.02)

    def make_layer(self, layer: int, dtype: torch.dtype) -> nn.Module:
        return GPT2Layer(self.config, layer, dtype)

    def make_norm(self, dtype: torch.dtype) -> nn.Module:
        return LayerNorm(self.config.width, self.config.epsilon, dtype)

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return super().embed(tokens, positions) + self.positions(positions).to(stream_dtype(self.embedding.weight))

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> Rotation | None:
        return None


class GPT2(Llama):
    """GPT-2's network with an optional shift of its outputs: `model(x_t) -> outputs [B, L, V]`."""

    architecture_name = "gpt2"

    @staticmethod
    def make_stack(config: LlamaConfig) -> LlamaStack:
        return GPT2Stack(config)
