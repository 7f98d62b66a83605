"""The transformer: from a noisy sequence and its noise level to one vector of outputs per position.

Shapes: B batch, L positions, V vocabulary, D width, H heads, C conditioning width; G stretches of L / G positions.

    x_t [B, L], sigma [B] or [B, G]  --backbone-->  features [B, L, D]  --head-->  outputs [B, L, V]

There are two variants. The *diffusion* network attends to the whole sequence and is conditioned on sigma by adaptive
layer norms (DiT; Peebles and Xie 2023, as used by SEDD): each residual branch computes

    x + gate * branch(norm(x) * (1 + scale) + shift),        (shift, scale, gate) = linear(embed(sigma)),

with the linear map starting at zero, so that every block starts as the identity. The *causal* network
(``causal=True, time_conditioning=False``) is the autoregressive baseline: plain pre-norm blocks, and a cache of
keys and values for sampling token by token.

Precision: parameters are float32; the matrix products run in autocast's type; norms, rotations and the embedding
of sigma are computed in float32. The residual stream is kept in autocast's type as well: at 65,536 tokens the
activations saved for the backward pass dominate the memory, two residual tensors per block among them, and in
bfloat16 they take half the memory and bandwidth. The rounding error, about 2^-9 of the stream per block, is usual in
bfloat16 training; ``float32_residual=True`` avoids it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cedd.clocks import Hybrid
from cedd.device import has_float64
from cedd.models.backbone import Backbone, ParameterGroups, stored_tensors
from cedd.models.compilation import compile_stack
from cedd.models.deepening import EMBEDDING, deepened
from cedd.models.head import VocabularyHead
from cedd.models.kernels.attention import (
    attend,
    attend_after,
    attend_visible,
    attention,
    project,
    takes_tiles,
    tiles_of,
)
from cedd.models.kernels.gelu import linear_gelu
from cedd.models.kernels.matmul import matmul_dtype
from cedd.models.kernels.packed import PackedWeights
from cedd.models.kernels.rotation import Product, linear, rotary_tables
from cedd.models.residual_stream import AdaptiveNorm, Modulation, ResidualStream, checkpointed, prepare_branches
from cedd.models.transformer_config import BASE, FREQUENCIES
from cedd.models.transformer_config import SIZES as SIZES
from cedd.models.transformer_config import NetworkOptions as NetworkOptions
from cedd.models.transformer_config import TransformerConfig as TransformerConfig
from cedd.models.transformer_config import config_from_preset as config_from_preset
from cedd.names import suggestion
from cedd.network import UNKNOWN_LABEL, AttentionPattern, Capabilities
from cedd.storage import JSONMapping, JSONObject, from_json

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def _in_float64(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The function of sigma, computed in float64 where the device has it."""
    return lambda sigma: function(sigma.double() if has_float64(sigma.device) else sigma)


TIME_INPUTS: Mapping[str, Callable[..., Callable[[Tensor], Tensor]]] = {
    "sigma": lambda: lambda sigma: sigma,
    "none": lambda: torch.zeros_like,
    # The t of GIDD's formulas, without the slower end of the process.
    "hybrid-time": lambda p_u: _in_float64(Hybrid(float(p_u), eps=1e-9).time),
}
"""Time inputs by name: from the number after the colon to a function of sigma."""


@dataclass
class KVCache:
    """Keys and values of up to ``keys.shape[3]`` positions, of which ``length`` are filled."""

    keys: Tensor  # [depth, B, H, positions, head width]
    values: Tensor
    length: int = 0
    packed: PackedWeights | None = None
    """The network's weights in another order, for calls with few tokens of one sequence."""
    modulations: list[Modulation] | None = None
    """Those of all calls, if they do not depend on time."""

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values [B, H, n, head width] of a layer; returns all of that layer's."""
        end = self.length + keys.shape[2]
        self.keys[layer, :, :, self.length : end] = keys
        self.values[layer, :, :, self.length : end] = values
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]

    def of_rows(self, rows: Sequence[int]) -> KVCache:
        """A cache for some of the sequences, in ascending order; additions to it do not change this cache."""
        if len(rows) == self.keys.shape[1]:
            return replace(self)
        chosen = slice(rows[0], rows[0] + 1) if len(rows) == 1 else list(rows)
        return KVCache(self.keys[:, chosen], self.values[:, chosen], self.length)

    def take(self, rows: Tensor) -> None:
        """Replace the sequences by those with these numbers [B], of which some may be the same."""
        for part in (self.keys, self.values):
            part[:, :, :, : self.length] = part[:, rows, :, : self.length]

    def at(self, positions: Tensor) -> KVCache:
        """The cache for new tokens at these consecutive positions [n], which attend to each other and to all earlier
        positions."""
        return _CacheAt(self.keys, self.values, positions=positions)


@dataclass(kw_only=True)
class _CacheAt(KVCache):
    positions: Tensor

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        for room, new in ((self.keys[layer], keys), (self.values[layer], values)):
            room.index_copy_(2, self.positions, new.to(room.dtype))
        return self.keys[layer], self.values[layer]


def _product(cache: KVCache | None) -> Product:
    return linear if cache is None or cache.packed is None else cache.packed.product


class Attention(nn.Module):
    """Multi-head attention to all positions, or to those up to its own if causal."""

    def __init__(self, config: TransformerConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.heads, self.causal = layer, config.heads, config.causal
        self.largest_score = config.largest_score
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.output = nn.Linear(config.width, config.width, bias=False)

    def forward(
        self,
        x: Tensor,
        rotation: tuple[Tensor, Tensor],
        cache: KVCache | None = None,
        visible: Tensor | None = None,
        tiles: BlockMask | None = None,
    ) -> Tensor:
        """visible: [L, L] or [B, L, L] bool, whether query i attends to key j; tiles: the same for FlexAttention."""
        values = self._after(x, rotation, cache) if isinstance(cache, _CacheAt) else None
        if values is None and cache is None and visible is None:
            values = attend(x, self.qkv, self.heads, rotation, self.causal, self.largest_score)
        elif values is None:
            product = _product(cache)
            heads = project(x, self.qkv, self.heads, rotation, self.largest_score, product)  # each [B, H, L, D/H]
            if cache is not None:
                keys, values = cache.append(self.layer, heads.keys, heads.values)
                heads = heads._replace(keys=keys, values=values)
            if visible is not None:
                values = attend_visible(heads, visible, tiles)
            else:
                values = attention(*heads, **self._which(x, cache)).transpose(1, 2)
        return _product(cache)(values.flatten(2), self.output)

    def _after(self, x: Tensor, rotation: tuple[Tensor, Tensor], cache: _CacheAt) -> Tensor | None:
        """Attention at the positions of the cache in one kernel; None where there is none."""
        if self.causal:
            return None
        room = cache.positions, cache.keys[self.layer], cache.values[self.layer]
        return attend_after(x, self.qkv, self.heads, rotation, self.largest_score, *room)

    def _which(self, x: Tensor, cache: KVCache | None) -> dict[str, Any]:
        """The options of attention after a cache: all positions, or earlier ones if causal."""
        past, new = 0 if cache is None else cache.length, x.shape[1]
        if not self.causal or new == 1:
            return {}
        if past == 0:
            return {"is_causal": True}
        return {"attn_mask": torch.ones(new, past + new, dtype=torch.bool, device=x.device).tril(past)}


class MLP(nn.Module):
    """Two linear maps with a GELU between them.

    No biases by default, as in the attention: the modulation's shift replaces them, and their gradients, sums over all
    tokens, would cost 1.5% of a training step. Published networks have them (`mlp_bias`).
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.hidden = nn.Linear(config.width, config.mlp_ratio * config.width, bias=config.mlp_bias)
        self.output = nn.Linear(config.mlp_ratio * config.width, config.width, bias=config.mlp_bias)

    def forward(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        product = _product(cache)
        return product(linear_gelu(x, self.hidden, product), self.output)


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
        visible: Tensor | None = None,
        tiles: BlockMask | None = None,
    ) -> ResidualStream:
        x = x + first.gated(self.attention(self.attention_norm(x, first), rotation, cache, visible, tiles))
        return x + second.gated(self.mlp(self.mlp_norm(x, second), cache))


def _norm(config: TransformerConfig) -> AdaptiveNorm:
    return AdaptiveNorm(config.width, config.dropout, has_weight=not config.time_conditioning)


def _time_input(name: str) -> Callable[[Tensor], Tensor]:
    """The time input by this name, such as hybrid-time:0.1."""
    kind, _, number = name.partition(":")
    if kind not in TIME_INPUTS:
        raise ValueError(f"invalid time_input: {name!r}{suggestion(kind, TIME_INPUTS)}")
    try:
        return TIME_INPUTS[kind](number) if number else TIME_INPUTS[kind]()
    except (TypeError, ValueError) as error:
        raise ValueError(f"invalid time_input: {name!r}: {error}") from None


class TimeConditioning(nn.Module):
    """From sigma, [B] or [B, G], to the modulations of all blocks and of the last norm, as one linear map.

    One wide product instead of one per block: the same parameters, a tenth of the kernel launches. Its input is
    computed in float32, since bfloat16 cannot distinguish neighbouring noise levels.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.count, self.width = 6 * config.depth + 2, config.width  # shift, scale, gate per branch; no gate at the end
        self.time_input, self.time_conditioned = _time_input(config.time_input), config.time_conditioned
        self.hidden = nn.Linear(2 * FREQUENCIES, config.conditioning_width)
        self.output = nn.Linear(config.conditioning_width, config.conditioning_width)
        self.modulation = nn.Linear(config.conditioning_width, self.count * config.width)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)
        self.labels = _label_embedding(config) if config.labels else None

    def forward(self, sigma: Tensor, label: Tensor | None = None) -> list[Modulation]:
        """One for each branch, and one for the last norm; of [B, 1, D] tensors, or [B, G, D] for sigma [B, G].

        Without a time input and labels all are equal: they are computed once and expanded to [B, 1, D].
        """
        batch = len(sigma)
        if not self.time_conditioned:
            sigma = sigma.new_zeros(1 if self.labels is None else batch)
        with torch.autocast(sigma.device.type, enabled=False):
            embedded = self._embed(self.time_input(sigma.flatten()).float()).to(self.hidden.weight.dtype)
            vector = self.output(F.silu(self.hidden(embedded)))
            if self.labels is not None:
                label = torch.full((batch,), UNKNOWN_LABEL, device=sigma.device) if label is None else label
                vector = vector + self.labels(label.long() + 1).repeat_interleave(len(vector) // batch, 0)
            vector = F.silu(vector)
        modulations = self.modulation(vector).view(len(sigma), -1, self.count, self.width)
        *parts, shift, scale = modulations.expand(batch, -1, -1, -1).unbind(2)
        branches = [Modulation(*parts[i : i + 3]) for i in range(0, len(parts), 3)]
        return [*branches, Modulation(shift, scale)]

    @staticmethod
    def _embed(sigma: Tensor) -> Tensor:
        """cos and sin of sigma times geometrically spaced frequencies from 1 to 1/10000, [B, 256]."""
        steps = torch.arange(FREQUENCIES, dtype=torch.float32, device=sigma.device) / FREQUENCIES
        angles = sigma[:, None] * torch.exp(-math.log(BASE) * steps)
        return torch.cat((angles.cos(), angles.sin()), dim=-1)


LABELS, LABELLED_BIAS = "backbone.conditioning.labels.weight", "backbone.conditioning.output.bias"


def _label_embedding(config: TransformerConfig) -> nn.Embedding:
    """A row for unknown labels, and one for each label."""
    made = nn.Embedding(config.labels + 1, config.conditioning_width)
    nn.init.normal_(made.weight, std=0.02)
    return made


class TransformerStack(nn.Module):
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
        """Without gates that start at zero, 2·depth branches add up: scale each by 1/sqrt(2·depth), as in GPT-2."""
        for name, parameter in self.blocks.named_parameters():
            if name.endswith("output.weight"):
                parameter.mul_((2 * self.config.depth) ** -0.5)

    def forward(
        self,
        x_t: Tensor,
        sigma: Tensor | None = None,
        cache: KVCache | None = None,
        where: Tensor | None = None,
        attention: AttentionPattern | None = None,
        tiles: BlockMask | None = None,
        label: Tensor | None = None,
    ) -> Tensor:
        config, past = self.config, 0 if cache is None else cache.length
        positions: slice | Tensor = slice(past, past + x_t.shape[1])
        if attention is not None and attention.positions is not None:
            positions = attention.positions
        elif positions.stop > config.length:
            raise ValueError(f"{positions.stop} positions do not fit a network of length {config.length}")
        rotation = self.cosine[positions], self.sine[positions]
        visible = None if attention is None else attention.visible
        dropout = self.training and config.dropout > 0
        modulations = prepare_branches(self._modulations_of(cache, sigma, label), where, x_t.device, dropout)

        x = ResidualStream(self.embedding(x_t).to(self._residual_dtype(x_t.device.type)))
        for block, first, second in zip(self.blocks, modulations[:-1:2], modulations[1::2], strict=True):
            if config.checkpoint_blocks and self.training and cache is None:
                x = checkpointed(block, x, first, second, rotation, None, visible, tiles)
            else:
                x = block(x, first, second, rotation, cache, visible, tiles)
        if cache is not None:
            cache.length = past + x_t.shape[1]
        return self.norm(x, modulations[-1])

    def _modulations_of(self, cache: KVCache | None, sigma: Tensor | None, label: Tensor | None) -> list[Modulation]:
        """The modulations of a call; a cache keeps them if they are the same in all calls."""
        constant = self.conditioning is not None and not self.conditioning.time_conditioned and label is None
        if cache is None or cache.packed is None or not constant or torch.is_grad_enabled():
            return self._modulations(sigma, label)
        if cache.modulations is None:
            cache.modulations = self._modulations(sigma, label)
        return cache.modulations

    def _modulations(self, sigma: Tensor | None, label: Tensor | None) -> list[Modulation]:
        """One for each branch, and one for the last norm."""
        if label is not None and not self.config.labels:
            raise ValueError("this network was not trained with labels")
        if self.conditioning is None:
            return [Modulation()] * (2 * self.config.depth + 1)
        if sigma is None:
            raise ValueError("this network is conditioned on time: pass sigma, [B] or [B, G]")
        return self.conditioning(sigma, label)

    def _residual_dtype(self, device_type: str) -> torch.dtype:
        dtype = self.embedding.weight.dtype
        return dtype if self.config.float32_residual else matmul_dtype(device_type, dtype)


class Transformer(Backbone):
    """The diffusion transformer, or its causal variant: ``model(x_t, sigma) -> outputs [B, L, V]``.

    Losses that need not hold all of [B, L, V] use backbone and head instead: ``model.features(x_t, sigma)``, then
    ``model.head.loss(...)``, ``cross_entropy(...)`` or ``score_entropy(...)``, which process the rows in chunks.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.architecture, self.options = "transformer", config
        self.vocab_size, self.has_mask = config.vocab_size, config.has_mask
        self.backbone = TransformerStack(config)
        self.head: VocabularyHead = VocabularyHead(config.width, config.vocab_size)  # pyright: ignore

    @classmethod
    def from_config(cls, config: JSONMapping) -> Transformer:
        return cls(from_json(TransformerConfig, config, "network"))

    @classmethod
    def least_parameters(cls, config: Mapping[str, Any]) -> int:
        """The number of parameters of the blocks' matrices and of the modulation."""
        options = from_json(TransformerConfig, config, "network")
        blocks = options.depth * options.width**2 * (4 + 2 * options.mlp_ratio)
        return blocks + (options.width * options.conditioning_width if options.time_conditioning else 0)

    def config(self) -> JSONObject:
        """The options of the model, without the recomputation of activations, which is a setting of a run."""
        return asdict(replace(self.options, checkpoint_blocks=False))

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        return Capabilities(
            features=True,
            selected_rows=True,
            head_losses=True,
            cache=True,
            static_cache=True,
            attention=not self.options.causal,
            causal=self.options.causal,
            time_conditioned=self.options.time_conditioned,
            token_times=True,
            cuda_graphs=True,
            max_length=self.options.length,
        )

    def features(  # pyright: ignore[reportIncompatibleMethodOverride] - it takes no other conditions
        self,
        x_t: Tensor,
        sigma: Tensor | None = None,
        *,
        attention: AttentionPattern | None = None,
        cache: KVCache | None = None,
        where: Tensor | None = None,
        label: Tensor | None = None,
    ) -> Tensor:
        """[B, L, D], the input of the vocabulary head, for sigma [B], or [B, G] for G equal stretches; with a cache,
        ``x_t`` continues the tokens in it. Networks with labels take them as indices [B], -1 where none is given.

        With ``where``, distinct places [N] of the flattened batch, only the features there are defined: the last
        block's MLP, whose output no other position reads, runs there only.
        """
        if cache is not None:
            # Not through __call__, which may be compiled: the filled length changes with every call.
            return self.backbone.forward(x_t, sigma, cache, attention=attention, label=label)
        if attention is None:
            return self.backbone(x_t, sigma, where=where, label=label)
        tiles, head_width = None, self.options.width // self.options.heads
        if attention.rule is not None and self._is_compiled and takes_tiles(x_t.device, head_width):
            tiles = tiles_of(attention.rule, x_t.shape[1], x_t.device)
        return self.backbone(x_t, sigma, where=where, attention=attention, tiles=tiles, label=label)

    @property
    def _is_compiled(self) -> bool:
        return self.backbone._compiled_call_impl is not None

    def new_cache(self, batch: int, length: int | None = None) -> KVCache:
        """An empty cache for ``batch`` sequences, of the dtype of matrix products (autocast's, under autocast)."""
        config, weight = self.options, self.head.weight
        dtype = matmul_dtype(weight.device.type, weight.dtype)
        head_width = config.width // config.heads
        shape = (config.depth, batch, config.heads, length or config.length, head_width)
        keys = torch.zeros(shape, dtype=dtype, device=weight.device)
        packs = batch == 1 and not config.causal and PackedWeights.helps(weight)
        return KVCache(keys, torch.zeros_like(keys), packed=PackedWeights() if packs else None)

    def compile(self, *args: Any, **options: Any) -> None:
        """Compile the two costly parts in place: the backbone as one graph, and the losses of the head's rows.

        Takes the options of ``torch.compile``; parameters keep their names.
        """
        compile_stack(self.backbone, *args, **options)
        self.head.fused = True

    def rounded_parameters(self) -> set[str]:
        """The weights and biases of all linear layers, except for those that embed the noise level."""
        conditioning = self.backbone.conditioning
        exact = () if conditioning is None else (conditioning.hidden, conditioning.output)
        return {
            f"{name}.{leaf}"
            for name, module in self.named_modules()
            if isinstance(module, nn.Linear) and module not in exact
            for leaf, _ in module.named_parameters()
        }

    def parameter_groups(self) -> ParameterGroups:
        """Muon updates the matrices of the blocks."""
        matrices = {id(parameter) for parameter in self.backbone.blocks.parameters() if parameter.ndim == 2}
        return self.grouped(matrices, {id(self.backbone.embedding.weight)})

    def shard_units(self) -> Sequence[nn.Module]:
        return list(self.backbone.blocks)

    def weights_from(self, source: Backbone) -> dict[str, Tensor]:
        """The weights of a transformer with the same number of blocks, or fewer, which are then repeated. The embedding
        of the mask is dropped if this network has none; embeddings of new labels are zero.
        """
        assert isinstance(source, Transformer)
        weights = stored_tensors(source)
        weights[EMBEDDING] = weights[EMBEDDING][: self.vocab_size + int(self.has_mask)]
        if source.options.labels and not self.options.labels:  # none is given, always
            unknown = weights.pop(LABELS)[UNKNOWN_LABEL + 1]
            weights[LABELLED_BIAS] = weights[LABELLED_BIAS] + unknown
        elif self.options.labels and not source.options.labels:
            weights[LABELS] = torch.zeros_like(stored_tensors(self)[LABELS])
        shallower, depth = source.options.depth, self.options.depth
        if depth % shallower:
            raise ValueError(f"it has {shallower} blocks; use the same depth or a multiple of it, not {depth}")
        return weights if depth == shallower else deepened(weights, shallower, depth)

    def flops_per_token(self, length: int) -> float:
        """Model FLOPs of a training step per token: 2 forward and 4 backward for each weight applied to the token.

        Recomputation is not counted. Divided by the peak of the chip, this is the share that does useful work.
        """
        config = self.options
        attention_weights = 4 * config.width**2
        mlp_weights = 2 * config.mlp_ratio * config.width**2
        seen = length / 2 if config.causal else length
        scores = 2 * seen * config.width  # queries·keys and weights·values, as if each were a weight
        head = config.width * config.vocab_size
        per_sequence = 0.0
        if self.backbone.conditioning is not None:
            per_sequence = float(self.backbone.conditioning.modulation.weight.numel())
        return 6 * (config.depth * (attention_weights + mlp_weights + scores) + head + per_sequence / length)
