"""The network: a transformer that reads a noisy sequence and the noise level, and writes one vector a position.

Shapes: B batch, L positions, V vocabulary, D width, H heads, C conditioning width.

    x_t [B, L], sigma [B]  --backbone-->  features [B, L, D]  --head-->  outputs [B, L, V]

Two variants share every line below. The *diffusion* network sees the whole sequence and is conditioned on sigma
by adaptive layer norms (DiT; Peebles and Xie 2023, as used by SEDD): each residual branch computes

    x + gate * branch(norm(x) * (1 + scale) + shift),        (shift, scale, gate) = linear(embed(sigma)),

with the linear map starting at zero, so that every block starts as the identity. The *causal* network
(``causal=True, time_conditioning=False``) is the autoregressive baseline: plain pre-norm blocks, and a cache of
keys and values for sampling token by token.

Precision: parameters are float32; the matrix products run in autocast's type; norms, rotations and the embedding
of sigma are computed in float32. The residual stream is kept in autocast's type as well: at 65,536 tokens the
activations saved for the backward pass dominate the memory, two residual tensors a block among them, and in
bfloat16 they take half the room and half the bandwidth. Its rounding, about 2^-9 of the stream a block, is what
most bfloat16 training accepts; ``float32_residual=True`` avoids it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import Tensor, nn

from cedd.clocks import Hybrid
from cedd.device import has_float64
from cedd.models.head import VocabularyHead
from cedd.models.kernels.attention import attend, attention, project
from cedd.models.kernels.gelu import linear_gelu
from cedd.models.kernels.matmul import matmul_dtype
from cedd.models.kernels.rotation import rotary_tables
from cedd.models.kernels.rows import gather_rows
from cedd.models.options import BASE, FREQUENCIES
from cedd.models.options import SIZES as SIZES
from cedd.models.options import NetworkOptions as NetworkOptions
from cedd.models.options import TransformerConfig as TransformerConfig
from cedd.models.options import config_from_preset as config_from_preset
from cedd.models.stream import AdaptiveNorm, Modulation, ResidualStream, checkpointed, prepare_branches
from cedd.names import suggestion


def _in_float64(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The function of sigma, computed in float64 where the device has it."""
    return lambda sigma: function(sigma.double() if has_float64(sigma.device) else sigma)


TOLD: Mapping[str, Callable[..., Callable[[Tensor], Tensor]]] = {
    "sigma": lambda: lambda sigma: sigma,
    "nothing": lambda: torch.zeros_like,
    # Without the slower end of the process: the t of GIDD's formulas.
    "hybrid-time": lambda p_u: _in_float64(Hybrid(float(p_u), eps=1e-12).time),
}
"""What a network may be told of the noise, by name: from the number after the colon to a function of sigma."""


@dataclass
class KVCache:
    """Room for the keys and values of ``keys.shape[3]`` positions, of which ``length`` are filled."""

    keys: Tensor  # [depth, B, H, positions, head width]
    values: Tensor
    length: int = 0

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store one layer's new [B, H, n, head width]; return all of that layer's, old and new."""
        end = self.length + keys.shape[2]
        self.keys[layer, :, :, self.length : end] = keys
        self.values[layer, :, :, self.length : end] = values
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]


class Attention(nn.Module):
    """Multi-head attention over all positions, or over those up to its own if causal."""

    def __init__(self, config: TransformerConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.heads, self.causal = layer, config.heads, config.causal
        self.largest_score = config.largest_score
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.output = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], cache: KVCache | None = None) -> Tensor:
        if cache is None:
            values = attend(x, self.qkv, self.heads, rotation, self.causal, self.largest_score)
        else:
            values = self._with_cache(x, rotation, cache)
        return self.output(values.flatten(2))

    def _with_cache(self, x: Tensor, rotation: tuple[Tensor, Tensor], cache: KVCache) -> Tensor:
        """As `attend`, to what the cache holds as well."""
        queries, keys, values = project(x, self.qkv, self.heads, rotation, self.largest_score)  # each [B, H, L, D/H]
        keys, values = cache.append(self.layer, keys, values)
        past, new, mask = cache.length, queries.shape[2], None
        if past > 0 and new > 1:  # new position i sees the past ones and the new ones up to i
            mask = torch.ones(new, past + new, dtype=torch.bool, device=x.device).tril(past)
        return attention(queries, keys, values, attn_mask=mask, is_causal=past == 0).transpose(1, 2)


class MLP(nn.Module):
    """Two linear maps with a GELU between them.

    No biases by default, as in the attention: the modulation's shift does their job, and their gradients are sums over
    all tokens that would cost 1.5% of a training step. Published networks have them (`mlp_bias`).
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.hidden = nn.Linear(config.width, config.mlp_ratio * config.width, bias=config.mlp_bias)
        self.output = nn.Linear(config.mlp_ratio * config.width, config.width, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(linear_gelu(x, self.hidden))


class Block(nn.Module):
    """Attention, then an MLP, each on a residual branch:

    x = x + gate * attention(modulate(norm(x)))
    x = x + gate * mlp(modulate(norm(x)))
    """

    def __init__(self, config: TransformerConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = _norm(config)
        self.attention = Attention(config, layer)
        self.mlp_norm = _norm(config)
        self.mlp = MLP(config)

    def forward(
        self,
        x: ResidualStream,
        first: Modulation,
        second: Modulation,
        rotation: tuple[Tensor, Tensor],
        cache: KVCache | None = None,
    ) -> ResidualStream:
        x = x + first.gated(self.attention(self.attention_norm(x, first), rotation, cache))
        return x + second.gated(self.mlp(self.mlp_norm(x, second)))


def _norm(config: TransformerConfig) -> AdaptiveNorm:
    return AdaptiveNorm(config.width, config.dropout, has_weight=not config.time_conditioning)


def _told(name: str) -> Callable[[Tensor], Tensor]:
    """The function of sigma [B] that `name` says, such as hybrid-time:0.1."""
    kind, _, number = name.partition(":")
    if kind not in TOLD:
        raise ValueError(f"a network cannot be told {name!r}{suggestion(kind, TOLD)}")
    try:
        return TOLD[kind](number) if number else TOLD[kind]()
    except (TypeError, ValueError) as error:
        raise ValueError(f"a network cannot be told {name!r}: {error}") from None


class TimeConditioning(nn.Module):
    """From sigma [B] to the modulations of all blocks and of the last norm, as one linear map of one vector.

    One wide product instead of one a block: the same parameters, a tenth of the kernel launches. What feeds it
    is computed in float32, for bfloat16 cannot tell neighbouring noise levels apart.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.count, self.width = 6 * config.depth + 2, config.width  # shift, scale, gate a branch; none at the end
        self.told = _told(config.told)
        self.hidden = nn.Linear(2 * FREQUENCIES, config.conditioning_width)
        self.output = nn.Linear(config.conditioning_width, config.conditioning_width)
        self.modulation = nn.Linear(config.conditioning_width, self.count * config.width)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, sigma: Tensor) -> list[Modulation]:
        """One for each branch, and one for the last norm."""
        with torch.autocast(sigma.device.type, enabled=False):
            embedded = self._embed(self.told(sigma).float()).to(self.hidden.weight.dtype)
            vector = F.silu(self.output(F.silu(self.hidden(embedded))))
        *parts, shift, scale = self.modulation(vector).view(-1, self.count, 1, self.width).unbind(1)
        branches = [Modulation(*parts[i : i + 3]) for i in range(0, len(parts), 3)]
        return [*branches, Modulation(shift, scale)]

    @staticmethod
    def _embed(sigma: Tensor) -> Tensor:
        """cos and sin of sigma times geometrically spaced frequencies from 1 to 1/10000, [B, 256]."""
        steps = torch.arange(FREQUENCIES, dtype=torch.float32, device=sigma.device) / FREQUENCIES
        angles = sigma[:, None] * torch.exp(-math.log(BASE) * steps)
        return torch.cat((angles.cos(), angles.sin()), dim=-1)


class Backbone(nn.Module):
    """Everything but the vocabulary head; compiles as one graph."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size + int(config.has_mask), config.width)
        bound = config.width**-0.5
        nn.init.uniform_(self.embedding.weight, -bound, bound)
        self.conditioning = TimeConditioning(config) if config.time_conditioning else None
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.depth))
        self.norm = _norm(config)
        if not config.time_conditioning:
            self._shrink_branches()
        cosine, sine = rotary_tables(config.length, config.width // config.heads)
        self.register_buffer("cosine", cosine, persistent=False)
        self.register_buffer("sine", sine, persistent=False)

    @torch.no_grad()
    def _shrink_branches(self) -> None:
        """Without gates that start at zero, 2·depth branches add up: start each at 1/sqrt(2·depth), as GPT-2."""
        for name, parameter in self.blocks.named_parameters():
            if name.endswith("output.weight"):
                parameter.mul_((2 * self.config.depth) ** -0.5)

    def forward(
        self, x_t: Tensor, sigma: Tensor | None = None, cache: KVCache | None = None, where: Tensor | None = None
    ) -> Tensor:
        config, past = self.config, 0 if cache is None else cache.length
        positions = slice(past, past + x_t.shape[1])
        if positions.stop > config.length:
            raise ValueError(f"{positions.stop} positions do not fit a network of length {config.length}")
        if cache is not None and not config.causal:
            raise ValueError("only a causal network can use a cache: build it with causal=True")
        rotation = self.cosine[positions], self.sine[positions]
        dropout = self.training and config.dropout > 0
        modulations = prepare_branches(self._modulations(sigma), where, x_t.device, dropout)

        x = ResidualStream(self.embedding(x_t).to(self._residual_dtype(x_t.device.type)))
        for block, first, second in zip(self.blocks, modulations[:-1:2], modulations[1::2], strict=True):
            if config.checkpoint_blocks and self.training and cache is None:
                x = checkpointed(block, x, first, second, rotation)
            else:
                x = block(x, first, second, rotation, cache)
        if cache is not None:
            cache.length = positions.stop
        return self.norm(x, modulations[-1])

    def _modulations(self, sigma: Tensor | None) -> list[Modulation]:
        """One for each branch, and one for the last norm."""
        if self.conditioning is None:
            return [Modulation()] * (2 * self.config.depth + 1)
        if sigma is None:
            raise ValueError("this network is conditioned on time: pass sigma, one value a sequence")
        return self.conditioning(sigma)

    def _residual_dtype(self, device_type: str) -> torch.dtype:
        dtype = self.embedding.weight.dtype
        return dtype if self.config.float32_residual else matmul_dtype(device_type, dtype)


class Transformer(nn.Module):
    """The diffusion transformer, or its causal twin: ``model(x_t, sigma) -> outputs [B, L, V]``.

    Losses that need not hold all of [B, L, V] take the two halves instead: ``model.features(x_t, sigma)``, then
    ``model.head.loss(...)``, ``cross_entropy(...)`` or ``score_entropy(...)``, which go through the rows in chunks.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.backbone = Backbone(config)
        self.head = VocabularyHead(config.width, config.vocab_size)

    @property
    def knows_time(self) -> bool:
        """Whether what it says depends on the noise level besides the text."""
        return self.config.knows_time

    def forward(self, x_t: Tensor, sigma: Tensor | None = None) -> Tensor:
        return self.head(self.features(x_t, sigma))

    def features(
        self, x_t: Tensor, sigma: Tensor | None = None, cache: KVCache | None = None, where: Tensor | None = None
    ) -> Tensor:
        """[B, L, D], what the vocabulary head reads; with a cache, ``x_t`` continues what the cache holds.

        With ``where``, distinct places [N] of the flattened batch, only the features there mean something: the last
        block's MLP, whose output no other position sees, runs at those.
        """
        if cache is not None:
            # Not through __call__, which may be compiled: the filled length changes with every call.
            return self.backbone.forward(x_t, sigma, cache)
        return self.backbone(x_t, sigma, where=where)

    def rows(self, features: Tensor, places: Tensor) -> Tensor:
        """Features [B, L, D] at distinct places [N] of the flattened batch, [N, D]."""
        return gather_rows(features.flatten(0, 1), places)

    def new_cache(self, batch: int, length: int | None = None, dtype: torch.dtype | None = None) -> KVCache:
        """An empty cache for ``batch`` sequences; ``dtype`` is that of the keys (autocast's, under autocast)."""
        config, weight = self.config, self.head.weight
        dtype = dtype or matmul_dtype(weight.device.type, weight.dtype)
        head_width = config.width // config.heads
        shape = (config.depth, batch, config.heads, length or config.length, head_width)
        keys = torch.zeros(shape, dtype=dtype, device=weight.device)
        return KVCache(keys, torch.zeros_like(keys))

    def compile(self, *args: Any, **options: Any) -> None:
        """Compile the two costly parts in place: the backbone as one graph, and the losses of the head's rows.

        Takes the options of ``torch.compile``; parameters keep their names. The backward pass may then
        recompute what is cheap but wide: by default the compiler keeps the MLP's activations before *and* after
        the GELU, 8 of the 20 [B, L, D] tensors a block would hold.
        """
        torch._functorch.config.ban_recompute_materialized_backward = False  # for the whole process
        # The only float32 products are those of the noise level's embedding, which are small and want their digits.
        warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
        self.backbone.compile(*args, **{"fullgraph": True, **options})
        self.head.fused = True

    def rounded_parameters(self) -> set[str]:
        """Names of those that autocast rounds before each use: all linear maps' but the noise level's embedding's."""
        conditioning = self.backbone.conditioning
        exact = () if conditioning is None else (conditioning.hidden, conditioning.output)
        return {
            f"{name}.{leaf}"
            for name, module in self.named_modules()
            if isinstance(module, nn.Linear) and module not in exact
            for leaf, _ in module.named_parameters()
        }

    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def flops_per_token(self, length: int, head_fraction: float = 1.0) -> float:
        """Model FLOPs of one training step a token: 2 forward and 4 backward for each weight a token meets.

        ``head_fraction`` is the share of positions that go through the vocabulary head. Recomputation is not
        counted: divided by the chip's peak, this gives the share of the peak that does useful work.
        """
        config = self.config
        attention_weights = 4 * config.width**2
        mlp_weights = 2 * config.mlp_ratio * config.width**2
        seen = length / 2 if config.causal else length
        scores = 2 * seen * config.width  # queries·keys and weights·values, as if each were a weight
        head = head_fraction * config.width * config.vocab_size
        per_sequence = 0.0
        if self.backbone.conditioning is not None:
            per_sequence = float(self.backbone.conditioning.modulation.weight.numel())
        return 6 * (config.depth * (attention_weights + mlp_weights + scores) + head + per_sequence / length)
