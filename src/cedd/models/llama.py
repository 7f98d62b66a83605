"""Llama-type networks: RMS norms, gated MLPs, grouped-query attention and rotary positions, for diffusion and for
autoregression.

Shapes: B batch, L positions, V vocabulary, D width, H query heads, K key heads, W head width, N selected positions.

    x = embed[ids];   per layer:  x += output(attention(norm x)),   x += down(silu(gate y) * up y), y = norm x

One class reads what LLaMA, Qwen2, Qwen3, LLaDA, Dream and SDAR have published (`published_llama.py`). Which positions a
position attends to is an option (`LlamaConfig.attention`) or an `AttentionPattern`. Outputs have one column per row of
the embedding, V of them. The mask, token V, is read from one of these rows (`mask_row`) or from a vector of its own.

Networks adapted from autoregressive ones may predict position i from the output at position i - 1 (`shift`). The shift
is part of `features`, so that losses, bounds and samplers see outputs [B, L, V] at their own positions. Where a pattern
shows position i - 1 twice, noisy and clean, the output that position i attends to is read.

Precision: products run in autocast's type, else in the weights' dtype on an accelerator and in float32 on a CPU, which
reads weights stored in two bytes one matrix at a time. Norms and rotations are computed in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cedd.models.backbone import Backbone, ParameterGroups, stored_tensors
from cedd.models.compilation import compile_stack
from cedd.models.head import VocabularyHead
from cedd.models.kernels import at_least_float32
from cedd.models.kernels.attention import attend_tiles, attention, is_short, takes_tiles, tiles_of
from cedd.models.kernels.matmul import matmul_dtype
from cedd.models.kernels.rows import gather_rows
from cedd.models.llama_config import FloatType, LlamaConfig
from cedd.models.llama_config import LlamaOptions as LlamaOptions
from cedd.network import AttentionPattern, Capabilities
from cedd.storage import JSONMapping, JSONObject, from_json

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

FLOAT_TYPES: Mapping[FloatType, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_DEVIATION = 0.02
"""Standard deviation of new weights."""


@dataclass
class LlamaCache:
    """Keys and values of up to `keys.shape[3]` positions, of which those of `length` tokens are filled; a start token
    comes before them. Networks that shift their outputs also keep the last layer's."""

    keys: Tensor  # [depth, B, K, positions, W]
    values: Tensor
    start: int = 0
    """1 if the network puts a start token before every sequence."""
    hidden: Tensor | None = None  # [B, positions, D]
    length: int = 0

    @property
    def filled(self) -> int:
        """The number of filled positions, with the start token."""
        return self.length + self.start if self.length else 0

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values [B, K, n, W] of a layer; returns all of that layer's."""
        start, end = self.filled, self.filled + keys.shape[2]
        self.keys[layer, :, :, start:end] = keys
        self.values[layer, :, :, start:end] = values
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]

    def of_rows(self, rows: Sequence[int]) -> LlamaCache:
        """A cache for some of the sequences, in ascending order; additions to it do not change this cache."""
        if len(rows) == self.keys.shape[1]:
            return replace(self)
        chosen = slice(rows[0], rows[0] + 1) if len(rows) == 1 else list(rows)
        hidden = None if self.hidden is None else self.hidden[chosen]
        return LlamaCache(self.keys[:, chosen], self.values[:, chosen], self.start, hidden, self.length)

    def take(self, rows: Tensor) -> None:
        """Replace the sequences by those with these numbers [B], of which some may be the same."""
        for part in (self.keys, self.values):
            part[:, :, :, : self.filled] = part[:, rows, :, : self.filled]
        if self.hidden is not None:
            self.hidden[:] = self.hidden[rows]


# ----------------------------------------------------------------------------------------------------------------
# Layers


class Projection(nn.Linear):
    """A linear map in the dtype of its input, with an optional low-rank update: W x + scale · up(down x)."""

    def __init__(
        self, inputs: int, outputs: int, dtype: torch.dtype, bias: bool = False, rank: int = 0, alpha: float = 1.0
    ) -> None:
        super().__init__(inputs, outputs, bias=bias, dtype=dtype)
        nn.init.normal_(self.weight, std=_DEVIATION)
        if bias:
            nn.init.zeros_(self.bias)
        self.scale = alpha / max(rank, 1)
        self.lora_down = nn.Parameter(torch.empty(rank, inputs)) if rank else None
        self.lora_up = nn.Parameter(torch.empty(outputs, rank)) if rank else None
        if self.lora_down is not None and self.lora_up is not None:
            nn.init.normal_(self.lora_down, std=inputs**-0.5)
            nn.init.zeros_(self.lora_up)

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride] - by its own name
        made = F.linear(x, _like(self.weight, x), None if self.bias is None else _like(self.bias, x))
        if self.lora_down is None or self.lora_up is None:
            return made
        return made + F.linear(F.linear(x, _like(self.lora_down, x)), _like(self.lora_up, x)) * self.scale

    def update(self) -> Tensor | None:
        """The low-rank update of the weight, in float32."""
        if self.lora_down is None or self.lora_up is None:
            return None
        return self.scale * (self.lora_up.detach().float() @ self.lora_down.detach().float())


def _like(weight: Tensor, x: Tensor) -> Tensor:
    """The weight in the dtype of x, unless autocast chooses."""
    return weight if weight.dtype == x.dtype or torch.is_autocast_enabled(x.device.type) else weight.to(x.dtype)


class RMSNorm(nn.Module):
    """weight · x / sqrt(mean x² + ε), over the last axis."""

    def __init__(self, width: int, epsilon: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.ones(width, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        wide = at_least_float32(x)
        if torch.compiler.is_compiling():  # written out, so that it is fused with its neighbours
            scaled = wide * (wide.square().mean(-1, keepdim=True) + self.epsilon).rsqrt()
            return (scaled * self.weight).to(x.dtype)
        return F.rms_norm(wide, self.weight.shape, self.weight.to(wide.dtype), self.epsilon).to(x.dtype)


@dataclass(frozen=True)
class Visible:
    """The keys that queries attend to: those of `mask`, [L, P] or [B, 1, L, P] bool; without a mask, all or (causal)
    those up to their own position."""

    mask: Tensor | None = None
    causal: bool = False
    tiles: BlockMask | None = None
    """The mask for FlexAttention (`tiles_of`), which compiled networks on a GPU use."""


Rotation = tuple[Tensor, Tensor]
"""cos and sin of the angles of the positions, [L, 1, R/2] or [B, L, 1, R/2]."""


def rotation_of(positions: Tensor, config: LlamaConfig, dtype: torch.dtype) -> Rotation:
    """Rotation for positions p, [L] or [B, L]: entries j and j + R/2 turn by p times frequency j."""
    angles = positions[..., None, None].to(dtype) * frequencies(config, positions.device, dtype)
    scale = config.rotary_yarn or 1.0
    return (angles.cos(), angles.sin()) if scale == 1.0 else (angles.cos() * scale, angles.sin() * scale)


def frequencies(config: LlamaConfig, device: torch.device | str, dtype: torch.dtype) -> Tensor:
    """The rotary frequencies [R/2], base^(-2j/R), scaled.

    With a context C, a frequency with n = C / wavelength turns within it is divided by the factor if n is below
    `rotary_low`, is kept if n is above `rotary_high`, and is a mixture of both in between. YaRN rounds the indices of
    the frequencies with these numbers of turns outwards.
    """
    steps = torch.arange(0, config.rotated, 2, device=device, dtype=dtype) / config.rotated
    plain = 1.0 / config.rotary_base**steps
    if config.rotary_factor == 1.0:
        return plain
    if config.rotary_context is None:
        return plain / config.rotary_factor
    if config.rotary_yarn is not None:
        scale = config.rotated / (2 * math.log(config.rotary_base))
        edges = [math.log(config.rotary_context / (n * 2 * math.pi)) for n in (config.rotary_high, config.rotary_low)]
        first, last = max(math.floor(scale * edges[0]), 0), min(math.ceil(scale * edges[1]), config.rotated - 1)
        kept = 1 - ((torch.arange(len(plain), device=device) - first) / max(last - first, 1e-3)).clamp(0.0, 1.0)
        return plain / config.rotary_factor * (1 - kept) + plain * kept
    turns, low = config.rotary_context * plain / (2 * math.pi), config.rotary_low
    kept = ((turns - low) / (config.rotary_high - low)).clamp(0.0, 1.0)
    return kept * plain + (1 - kept) * plain / config.rotary_factor


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """x [B, L, heads, W], rotated in float32."""
    cosine, sine = rotation
    half = cosine.shape[-1]
    wide = at_least_float32(x)
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], x[..., 2 * half :]
    turned = torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1).to(x.dtype)
    return torch.cat((turned, rest), -1) if rest.shape[-1] else turned


class GroupedQueryAttention(nn.Module):
    """Attention of H query heads to K heads of keys and values; query head h reads head h // (H / K)."""

    def __init__(
        self,
        config: LlamaConfig,
        layer: int,
        dtype: torch.dtype,
        qkv_bias: bool | None = None,
        output_bias: bool = False,
    ) -> None:
        super().__init__()
        qkv_bias = config.qkv_bias if qkv_bias is None else qkv_bias
        self.layer, self.heads, self.key_heads = layer, config.heads, config.key_heads
        self.head_width = config.head_width
        low_rank = {"rank": config.lora_rank, "alpha": config.lora_alpha}
        rows = (config.heads + 2 * config.key_heads) * config.head_width
        self.qkv = Projection(config.width, rows, dtype, qkv_bias, **low_rank)
        self.output = Projection(config.heads * config.head_width, config.width, dtype, output_bias, **low_rank)
        norm = (config.head_width, config.epsilon, dtype)
        self.query_norm = RMSNorm(*norm) if config.qk_norm else None
        self.key_norm = RMSNorm(*norm) if config.qk_norm else None

    def forward(
        self, x: Tensor, rotation: Rotation | None, visible: Visible, cache: LlamaCache | None = None
    ) -> Tensor:
        """x [B, L, D] -> [B, L, D]."""
        H, K = self.heads, self.key_heads
        qkv = self.qkv(x).unflatten(-1, (H + 2 * K, self.head_width))
        queries, keys, values = qkv.split((H, K, K), 2)
        if self.query_norm is not None and self.key_norm is not None:
            queries, keys = self.query_norm(queries), self.key_norm(keys)
        if rotation is not None and cache is None and visible.mask is None and self._is_short(x, rotation):
            return self.output(self._short(queries, keys, values, rotation, visible.causal).flatten(2))
        if rotation is not None:
            queries, keys = rotate(queries, rotation), rotate(keys, rotation)
        queries, keys, values = queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)
        if cache is not None:
            keys, values = cache.append(self.layer, keys, values)
            keys, values = keys.to(queries.dtype), values.to(queries.dtype)
        if visible.tiles is not None and torch.compiler.is_compiling():
            found = attend_tiles(queries, keys, values, visible.tiles)
            return self.output(found.transpose(1, 2).flatten(2))
        if H != K:
            keys, values = (one.repeat_interleave(H // K, 1) for one in (keys, values))
        found = attention(queries, keys, values, attn_mask=visible.mask, is_causal=visible.causal)
        return self.output(found.transpose(1, 2).flatten(2))

    def _is_short(self, x: Tensor, rotation: Rotation) -> bool:
        """Whether one fused kernel computes attention and rotations."""
        whole = rotation[0].dim() == 3 and 2 * rotation[0].shape[-1] == self.head_width
        return whole and is_short(x, self.heads, self.head_width)

    def _short(self, queries: Tensor, keys: Tensor, values: Tensor, rotation: Rotation, causal: bool) -> Tensor:
        """Attention [B, L, H, W] from queries before rotation."""
        from cedd.models.kernels.attention_triton import attend_short

        groups = self.heads // self.key_heads
        keys, values = (one.repeat_interleave(groups, 2) for one in (keys, values))
        cosine, sine = rotation
        cosine = torch.cat((cosine, cosine), -1).unsqueeze(1).repeat(1, 3, 1, 1)
        sine = torch.cat((-sine, sine), -1).unsqueeze(1).repeat(1, 3, 1, 1)
        return attend_short(torch.stack((queries, keys, values), 2), cosine, sine, causal)


class GatedMLP(nn.Module):
    """down(silu(gate x) * up x), with gate and up as one matrix."""

    def __init__(self, config: LlamaConfig, dtype: torch.dtype) -> None:
        super().__init__()
        low_rank = {"rank": config.lora_rank, "alpha": config.lora_alpha}
        self.gate_up = Projection(config.width, 2 * config.mlp_width, dtype, **low_rank)
        self.down = Projection(config.mlp_width, config.width, dtype, **low_rank)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class LlamaLayer(nn.Module):
    """Attention, then a gated MLP, each on a residual branch."""

    def __init__(self, config: LlamaConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.attention_norm: nn.Module = RMSNorm(config.width, config.epsilon, dtype)
        self.attention: GroupedQueryAttention = GroupedQueryAttention(config, layer, dtype)
        self.mlp_norm: nn.Module = RMSNorm(config.width, config.epsilon, dtype)
        self.mlp: nn.Module = GatedMLP(config, dtype)

    def forward(
        self,
        x: Tensor,
        rotation: Rotation | None,
        visible: Visible,
        cache: LlamaCache | None = None,
        where: Tensor | None = None,
    ) -> Tensor:
        """x [B, L, D]; with `where`, distinct indices [N] into the flattened batch, the MLP runs only there."""
        x = x + self.attention(self.attention_norm(x), rotation, visible, cache)
        if where is None:
            return x + self.mlp(self.mlp_norm(x))
        rows = x.flatten(0, 1)
        chosen = gather_rows(rows, where)
        return rows.index_copy(0, where, chosen + self.mlp(self.mlp_norm(chosen))).view(x.shape)


# ----------------------------------------------------------------------------------------------------------------
# The network without its head


class LlamaStack(nn.Module):
    """Embedding, layers and the last norm; compiles as one graph."""

    mask: nn.Parameter | None

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config, dtype = config, FLOAT_TYPES[config.weights_dtype]
        self.embedding = nn.Embedding(config.vocab_size, config.width, dtype=dtype)
        nn.init.normal_(self.embedding.weight, std=_DEVIATION)
        self.mask = None
        if config.has_mask and config.mask_row is None:
            self.mask = nn.Parameter(torch.empty(config.width, dtype=dtype))
            nn.init.normal_(self.mask, std=_DEVIATION)
        self.layers = nn.ModuleList(self.make_layer(layer, dtype) for layer in range(config.depth))
        self.norm = self.make_norm(dtype)
        self._scale_outputs()

    def make_layer(self, layer: int, dtype: torch.dtype) -> nn.Module:
        return LlamaLayer(self.config, layer, dtype)

    def make_norm(self, dtype: torch.dtype) -> nn.Module:
        return RMSNorm(self.config.width, self.config.epsilon, dtype)

    def _scale_outputs(self) -> None:
        """Divide the last map of each branch by sqrt(2·depth), as in GPT-2, because 2·depth branches add up."""
        for name, parameter in self.layers.named_parameters():
            if name.endswith(("output.weight", "down.weight")):
                nn.init.normal_(parameter, std=_DEVIATION * (2 * self.config.depth) ** -0.5)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor | None = None,
        causal: bool = False,
        cache: LlamaCache | None = None,
        where: Tensor | None = None,
        tiles: BlockMask | None = None,
    ) -> Tensor:
        """[B, L, D] for tokens [B, L] at positions [L] or [B, L]; see `Visible` for mask, causal and tiles."""
        x = self.embed(tokens, positions)
        rotation, visible = self.rotation(positions, x.dtype), Visible(mask, causal, tiles)
        for number, layer in enumerate(self.layers):
            last = where if number == len(self.layers) - 1 else None
            if self.config.checkpoint_blocks and self.training and cache is None:
                x = cast(Tensor, checkpoint(layer, x, rotation, visible, None, last, use_reentrant=False))
            else:
                x = layer(x, rotation, visible, cache, last)
        return self.norm(x)

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """[B, L, D], in the dtype of the residual stream."""
        weight, V = self.embedding.weight, self.config.vocab_size
        dtype = stream_dtype(weight)
        if not self.config.has_mask:
            return F.embedding(tokens, weight).to(dtype)
        is_mask = tokens == V
        if self.mask is None:
            row = self.config.mask_row
            assert row is not None
            return F.embedding(tokens.masked_fill(is_mask, row), weight).to(dtype)
        found = F.embedding(tokens.masked_fill(is_mask, 0), weight)
        return torch.where(is_mask[..., None], self.mask.to(found.dtype), found).to(dtype)

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> Rotation | None:
        """The rotation of queries and keys, in float64 for a network in float64."""
        wide = torch.promote_types(dtype, torch.float32)
        return rotation_of(positions, self.config, wide)


def stream_dtype(weight: Tensor) -> torch.dtype:
    """The dtype of the residual stream: autocast's, else the weights', but at least float32 on a CPU."""
    device = weight.device.type
    dtype = matmul_dtype(device, weight.dtype)
    if device == "cpu" and not torch.is_autocast_enabled(device):
        return torch.promote_types(dtype, torch.float32)
    return dtype


# ----------------------------------------------------------------------------------------------------------------
# The whole


class Llama(Backbone):
    """A Llama-type network: `model(x_t) -> outputs [B, L, V]`."""

    architecture_name = "llama"
    backbone: LlamaStack

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.architecture, self.options = self.architecture_name, config
        self.vocab_size, self.has_mask = config.vocab_size, config.has_mask
        self.backbone = self.make_stack(config)
        dtype = FLOAT_TYPES[config.weights_dtype]
        head = VocabularyHead(config.width, config.vocab_size, bias=False, dtype=dtype)
        self.head: VocabularyHead = head  # pyright: ignore
        if config.tied:
            self.head.weight = self.backbone.embedding.weight
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not config.lora_rank or ".lora_" in name or name == _MASK)

    @staticmethod
    def make_stack(config: LlamaConfig) -> LlamaStack:
        return LlamaStack(config)

    @classmethod
    def from_config(cls, config: JSONMapping) -> Llama:
        return cls(from_json(LlamaConfig, config, "network"))

    @classmethod
    def least_parameters(cls, config: Mapping[str, Any]) -> int:
        """The number of parameters of the embedding and of the matrices in the layers."""
        options = from_json(LlamaConfig, config, "network")
        return options.width * options.vocab_size + options.depth * _layer_weights(options)

    def config(self) -> JSONObject:
        """The options of the model, without the recomputation of activations, which is a setting of a run."""
        return asdict(replace(self.options, checkpoint_blocks=False))

    @property
    def is_causal(self) -> bool:
        return self.options.attention == "causal"

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        return Capabilities(
            features=True,
            selected_rows=True,
            head_losses=True,
            cache=True,
            attention=True,
            causal_past=self.options.causal_past,
            causal=self.is_causal and not self.options.shift,
            optional_start=self.options.optional_start,
            time_conditioned=False,
            token_times=True,
            any_length=True,
            cuda_graphs=True,
            max_length=self.options.length,
        )

    def features(  # pyright: ignore[reportIncompatibleMethodOverride] - it takes no conditions
        self,
        x_t: Tensor,
        sigma: Tensor | None = None,
        *,
        attention: AttentionPattern | None = None,
        cache: LlamaCache | None = None,
        where: Tensor | None = None,
    ) -> Tensor:
        """[B, L, D], the input of the vocabulary head; with a cache, `x_t` continues the tokens in it.

        With `where`, distinct places [N] of the flattened batch, only the features there are defined.
        """
        del sigma  # no time conditioning
        arranged = self._arranged(x_t, attention, cache)
        tokens = arranged.tokens(x_t, self.options.start_row)
        places = None if where is None else arranged.places(where)
        tiles = None
        if arranged.rule is not None and self._is_compiled and takes_tiles(x_t.device, self.options.head_width):
            tiles = tiles_of(arranged.rule, tokens.shape[1], x_t.device)
        inputs = (tokens, arranged.positions, arranged.mask, arranged.is_causal)
        if cache is None:
            return arranged.read(self.backbone(*inputs, where=places, tiles=tiles))
        # Not through __call__, which may be compiled: the filled length changes with every call.
        hidden = self.backbone.forward(*inputs, cache=cache, where=places)
        past, added = cache.filled, tokens.shape[1]
        if cache.hidden is not None:
            cache.hidden[:, past : past + added] = hidden
            hidden = torch.cat([cache.hidden[:, :past].to(hidden.dtype), hidden], 1)
        cache.length = past + added - cache.start
        return arranged.read(hidden)

    def next_tokens(self, clean: Tensor) -> tuple[Tensor, Tensor]:
        """With shifted outputs, features at position i predict token i; at position 0 only after a start token."""
        if not self.options.shift:
            return super().next_tokens(clean)
        first = int(self.options.start_row is None)
        places = torch.arange(clean.numel(), device=clean.device).view(clean.shape)
        return places[:, first:].flatten(), clean[:, first:].flatten()

    @property
    def _is_compiled(self) -> bool:
        return self.backbone._compiled_call_impl is not None

    def _arranged(self, x_t: Tensor, pattern: AttentionPattern | None, cache: LlamaCache | None) -> _Arrangement:
        """The order, positions and mask with which the layers read new tokens."""
        tokens, past = (0, 0) if cache is None else (cache.length, cache.filled)
        length = x_t.shape[1]
        if (pattern is None or pattern.positions is None) and tokens + length > self.options.length:
            raise ValueError(f"{tokens + length} positions do not fit a network of length {self.options.length}")
        if pattern is not None and pattern.rule is not None and not past:
            return _arrangement_of(self.options, length, pattern, x_t.device)
        return _Arrangement.of(self.options, length, pattern, x_t.device, tokens, past)

    def original_logits(
        self,
        ids: Tensor,
        *,
        attention_mask: Tensor | Literal["full"] | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """Outputs [B, L, V] for rows of the embedding [B, L], without a shift and without a special mask row.

        attention_mask: keys that are attended to, [B, L] (1 or true), in Dream only by each other; or a mask [L, L],
            [B, L, L] or [B, 1, L, L] that replaces the network's own: 1 or true where query i attends to key j, or a
            number that is added to the scores, 0 or negative; or "full", as for Dream: all attend to all. The attention
            of a query that attends to nothing is 0, as in PyTorch.
        position_ids: [L] or [B, L]; by default 0 to L - 1.
        """
        length = ids.shape[1]
        positions = torch.arange(length, device=ids.device) if position_ids is None else position_ids
        positions = positions[0] if positions.dim() == 2 and len(positions) == 1 else positions
        own = self._own_mask(torch.arange(length, device=ids.device), length)
        mask, causal = own, self.is_causal
        if isinstance(attention_mask, str):
            if attention_mask != "full":
                raise ValueError(f"attention_mask must be a tensor or 'full' (got {attention_mask!r})")
            mask, causal = None, False
        elif attention_mask is not None:
            given, hides = attention_mask.to(ids.device), self.options.masks_padded_queries
            mask, causal = _visible_of(given, own, causal, ids.shape, hides), False
        return self.head(self.backbone(ids, positions, mask, causal))

    def _own_mask(self, queries: Tensor, keys: int) -> Tensor | None:
        """The mask [L, P] for query positions [L] and P keys; None if attention is full or causal."""
        if self.options.attention != "block-causal":
            return None
        block = self.options.block
        return queries[:, None] // block >= torch.arange(keys, device=queries.device) // block

    def new_cache(self, batch: int, length: int | None = None) -> LlamaCache:
        """An empty cache for `batch` sequences of at most `length` tokens."""
        config, weight = self.options, self.backbone.embedding.weight
        dtype = stream_dtype(weight)
        start = int(config.start_row is not None)
        positions = (length or config.length) + start
        shape = (config.depth, batch, config.key_heads, positions, config.head_width)
        keys = torch.zeros(shape, dtype=dtype, device=weight.device)
        hidden = None
        if config.shift:
            hidden = torch.zeros((batch, positions, config.width), dtype=dtype, device=weight.device)
        return LlamaCache(keys, torch.zeros_like(keys), start, hidden)

    def compile(self, *args: Any, **options: Any) -> None:
        """Compile the two costly parts in place: the stack as one graph, and the losses of the head's rows."""
        compile_stack(self.backbone, *args, **options)
        self.head.fused = True

    def rounded_parameters(self) -> set[str]:
        """The weights and biases of all linear maps; of the embedding only if the head is tied to it."""
        names = {
            f"{name}.{leaf}"
            for name, module in self.named_modules()
            if isinstance(module, nn.Linear)
            for leaf, _ in module.named_parameters()
        }
        return names & {name for name, parameter in self.named_parameters() if parameter.dtype == torch.float32}

    def parameter_groups(self) -> ParameterGroups:
        """Muon updates the matrices of the layers."""
        matrices = {id(parameter) for parameter in self.backbone.layers.parameters() if parameter.ndim == 2}
        return self.grouped(matrices, {id(self.backbone.embedding.weight)})

    def shard_units(self) -> Sequence[nn.Module]:
        return list(self.backbone.layers)

    def weights_from(self, source: Backbone) -> dict[str, Tensor]:
        """Load the weights of a Llama-type network of the same sizes. Its low-rank updates are merged; a missing mask
        vector is set to the mean of its embedding."""
        assert isinstance(source, Llama)
        fresh = stored_tensors(self)
        weights = stored_tensors(source.merged() if not self.options.lora_rank else source)
        if "head.weight" in fresh and "head.weight" not in weights:
            weights["head.weight"] = weights[_EMBEDDING]
        if _MASK in fresh and _MASK not in weights:
            row = source.options.mask_row
            taken = weights[_EMBEDDING].float().mean(0) if row is None else weights[_EMBEDDING][row]
            weights[_MASK] = taken.to(fresh[_MASK].dtype)
        if _MASK not in fresh:
            weights.pop(_MASK, None)
        updates = {name for name in fresh if ".lora_" in name} - weights.keys()
        return weights | {name: fresh[name] for name in updates}

    def merged(self) -> Llama:
        """The same network with its low-rank updates added to its weights; itself if it has none."""
        if not self.options.lora_rank:
            return self
        plain = type(self)(replace(self.options, lora_rank=0)).to(self.head.weight.device)
        weights = stored_tensors(self)
        for name, module in self.named_modules():
            if isinstance(module, Projection) and (update := module.update()) is not None:
                weight = weights.pop(f"{name}.weight")
                weights[f"{name}.weight"] = (weight.float() + update).to(weight.dtype)
        kept = {name: value for name, value in weights.items() if ".lora_" not in name}
        plain.load_state_dict(kept, strict=False)  # tied parameters are stored once
        return plain.train(self.training)

    def flops_per_token(self, length: int) -> float:
        config = self.options
        seen = length / 2 if self.is_causal else length
        scores = 2 * seen * config.heads * config.head_width  # queries·keys and weights·values, as if weights
        head = config.width * config.vocab_size
        return 6 * (config.depth * (_layer_weights(config) + scores) + head)


_EMBEDDING, _MASK = "backbone.embedding.weight", "backbone.mask"


def _layer_weights(config: LlamaConfig) -> int:
    """The number of entries of a layer's matrices."""
    attention_rows = (2 * config.heads + 2 * config.key_heads) * config.head_width
    return config.width * (attention_rows + 3 * config.mlp_width)


def _visible_of(given: Tensor, own: Tensor | None, causal: bool, shape: Sequence[int], hides_queries: bool) -> Tensor:
    """The mask [L, L] or [B, 1, L, L] of an attention_mask; one of [B, L] may hide queries, too."""
    batch, length = shape
    added = given.is_floating_point() and not bool((given > 0).any())
    visible = given >= 0 if added else given.bool()
    as_square = given.shape == (length, length) and (batch != length or given.dtype == torch.bool or added)
    if given.dim() == 2 and not as_square:
        keys = visible[:, None, None, :]
        keys = keys & visible[:, None, :, None] if hides_queries else keys
        if causal:
            own = torch.ones(length, length, dtype=torch.bool, device=given.device).tril()
        visible = keys.expand(-1, 1, length, -1) if own is None else keys & own
    elif given.dim() == 3:
        visible = visible[:, None]
    return visible


# ----------------------------------------------------------------------------------------------------------------
# What the stack reads, and where its outputs belong

Rule = Callable[[Tensor, Tensor], Tensor]
"""Whether a query attends to a key, given their indices."""


@dataclass(frozen=True, eq=False)
class _Arrangement:
    """How the layers read L new tokens.

    With a start token the M tokens that it could read are that one and the L; it leaves out those whose outputs nothing
    depends on, such as all noisy tokens where each is predicted from the clean token before it.
    """

    positions: Tensor
    """[M] or [B, M]."""
    starts: bool
    """Whether a start token comes first."""
    keep: Tensor | None
    """[M'], indices of the tokens that are read, ascending; None means all."""
    mask: Tensor | None
    """[M', P + M'] or [B, 1, M', P + M'] bool: the keys that a query attends to; None means all, or earlier ones."""
    is_causal: bool
    source: Tensor | None
    """[L] or [B, L]: the output (of the cache or of the M') that predicts each token; None means its own."""
    distinct: bool
    """Whether every output is used at most once."""
    rule: Rule | None = None
    """The mask as a function of token indices, if there is one."""

    @staticmethod
    def of(
        options: LlamaConfig,
        length: int,
        pattern: AttentionPattern | None,
        device: torch.device,
        tokens: int,
        past: int,
    ) -> _Arrangement:
        """For `length` tokens after `tokens` in a cache, which are `past` positions with the start token."""
        offset = int(options.start_row is not None)  # the start token has position 0
        starts = bool(offset and not past)
        positions = None if pattern is None else pattern.positions
        if positions is None:
            positions = torch.arange(tokens, tokens + length, device=device)
        source = _sources(pattern, past, length, offset, positions) if options.shift else None
        mask, causal = _mask(options, pattern, past, length + starts, starts, device)
        rule = None if pattern is None or pattern.rule is None or past else _with_start(pattern.rule, starts)
        places = positions + offset
        if starts:
            places = torch.cat([places.new_zeros(*places.shape[:-1], 1), places], -1)
        made = _Arrangement(places, starts, None, mask, causal, source, bool(offset) or past > 0, rule)
        return made if rule is None else made._without_unread()

    def _without_unread(self) -> _Arrangement:
        """The same without tokens whose outputs are not used."""
        if self.source is None or self.mask is None:
            return self
        read = torch.zeros(self.mask.shape[-1], dtype=torch.bool, device=self.mask.device)
        read[self.source] = True
        while not torch.equal(more := read | self.mask[read].any(0), read):
            read = more
        keep = read.nonzero().squeeze(1)
        if len(keep) == len(read):
            return self
        mask = self.mask[keep][:, keep]
        causal = torch.equal(mask, torch.ones_like(mask).tril())
        is_prefix = int(keep[-1]) == len(keep) - 1
        return replace(
            self,
            positions=self.positions[keep],
            keep=keep,
            mask=None if causal else mask,
            is_causal=causal,
            source=torch.searchsorted(keep, self.source),
            rule=self.rule if is_prefix and not causal else None,
        )

    def tokens(self, x_t: Tensor, start_row: int | None) -> Tensor:
        """The tokens that are read, [B, M'], from x_t [B, L]."""
        tokens = x_t
        if self.starts:
            assert start_row is not None
            tokens = torch.cat([torch.full_like(x_t[:, :1], start_row), x_t], 1)
        return tokens if self.keep is None else tokens.index_select(1, self.keep)

    def places(self, where: Tensor) -> Tensor | None:
        """Flat indices [N] of x_t converted to those of the outputs; None if one would occur twice."""
        if self.source is None:
            return where
        if not self.distinct:
            return None
        length, made = self.source.shape[-1], self.positions.shape[-1]
        rows, columns = where // length, where % length
        read = self.source[columns] if self.source.dim() == 1 else self.source[rows, columns]
        return rows * made + read

    def read(self, hidden: Tensor) -> Tensor:
        """The outputs that predict the tokens, [B, L, D]."""
        if self.source is None:
            return hidden
        if self.source.dim() == 1:
            return hidden.index_select(1, self.source)
        index = self.source[..., None].expand(-1, -1, hidden.shape[-1])
        return hidden.gather(1, index)


@lru_cache(maxsize=32)
def _arrangement_of(options: LlamaConfig, length: int, pattern: AttentionPattern, device: torch.device) -> _Arrangement:
    """The cached plan of a pattern with a rule: finding unused tokens would wait for the device in every call."""
    return _Arrangement.of(options, length, pattern, device, 0, 0)


def _with_start(rule: Rule, starts: bool) -> Rule:
    """The rule for tokens after a start token, which attends to itself and to which all tokens attend."""
    if not starts:
        return rule
    return lambda query, key: (key == 0) | ((query > 0) & (key > 0) & rule(query - 1, key - 1))


def _mask(
    options: LlamaConfig, pattern: AttentionPattern | None, past: int, queries: int, starts: bool, device: torch.device
) -> tuple[Tensor | None, bool]:
    """(mask, causal) for `queries` new positions after `past`; with `starts`, the first one is the start token."""
    offset = int(options.start_row is not None)
    if pattern is None:
        index = torch.arange(past, past + queries, device=device)
        if options.attention == "causal":
            if past == 0:
                return None, True
            return (index[:, None] >= torch.arange(past + queries, device=device) if queries > 1 else None), False
        if options.attention == "full":
            return None, False
        number = (torch.arange(past + queries, device=device) - offset).div(options.block, rounding_mode="floor")
        return number[past:, None] >= number, False
    visible = pattern.visible
    if offset:
        visible = F.pad(visible, (1, 0), value=True)  # all attend to the start token
        if starts:
            first = torch.zeros_like(visible[..., :1, :])
            first[..., 0] = True  # which attends to itself
            visible = torch.cat([first, visible], -2)
    return (visible if visible.dim() == 2 else visible[:, None]), False


def _sources(pattern: AttentionPattern | None, past: int, length: int, offset: int, positions: Tensor) -> Tensor:
    """The index of the output that predicts each of L new positions: that of the preceding position it attends to,
    otherwise that of any preceding position, otherwise its own."""
    device = positions.device
    if pattern is None or pattern.positions is None:
        own = torch.arange(past, past + length, device=device)
        return own if offset and not past else (own - 1).clamp_min(0)
    # Keys: those of the cache, the start token, and the new ones, by position; the start token is before 0.
    before = torch.arange(past, device=device) - offset if past else torch.arange(-offset, 0, device=device)
    keys = torch.cat([before.expand(*positions.shape[:-1], -1), positions], -1)
    visible = F.pad(pattern.visible, (keys.shape[-1] - pattern.visible.shape[-1], 0), value=True)
    precedes = keys[..., None, :] == positions[..., :, None] - 1
    rank = precedes.int() + (precedes & visible).int()
    own = torch.arange(keys.shape[-1] - length, keys.shape[-1], device=device)
    best, index = rank.max(-1)
    return torch.where(best > 0, index, own)
