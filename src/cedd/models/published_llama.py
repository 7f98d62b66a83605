"""Llama-type networks that others have published, as ours: autoregressive parents (LLaMA, SmolLM2, Qwen2, Qwen3) and
diffusion models (LLaDA, Dream, SDAR, DiffuLLaMA, DiffuGPT), from safetensors or GGUF files.

Shapes: V rows of the embedding and of the head, D width.

A family (`LlamaFamily`) defines how its config.json is recognised, its names of settings and tensors, which positions
a position attends to, and what its outputs mean. Settings that would change what the network computes must have the
value that is implemented; others are refused by name. None of the originals' code is run.

Ids stay the originals' own: V is the number of rows. The mask is one of these rows. In our processes it is token V,
which is read from that row, so that a text in which the row's own token occurs has a likelihood like any other.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cedd.data.tokenizers import BPE_FILE, GPT2_VOCAB_SIZE, IdTokenizer, JSONTokenizer, Tokenizer, fitting_tokenizer
from cedd.methods import get_method
from cedd.models.byte_level_tokenizers import content_of_merges, tokenizer_content
from cedd.models.folder import ModelFolder
from cedd.models.gpt2 import GPT2
from cedd.models.import_config import Description
from cedd.models.llama import FLOAT_TYPES, Llama, frequencies
from cedd.models.llama_config import FloatType, LlamaConfig
from cedd.models.tensor_files import UNUSED, GGUFFile, SafetensorsFiles, TensorFiles
from cedd.models.transformer_config import LONGEST
from cedd.models.weights import SkipInitialization
from cedd.names import nearest
from cedd.process import absorb
from cedd.storage import JSONMapping, JSONObject, expanded, read_json

# ----------------------------------------------------------------------------------------------------------------
# Their tensors


@dataclass(frozen=True)
class Names:
    """What a family calls its tensors, without .weight and .bias. Ours that consist of several have their names.

    Those before `attention_norm` may have a prefix in the files, such as model. or denoise_model.; see `in_files`.
    """

    embedding: str
    norm: str
    head: str
    layer: str
    """The prefix of a layer's tensors, with {} for its number."""
    attention_norm: str
    mlp_norm: str
    qkv: tuple[str, ...]
    output: str
    gate_up: tuple[str, ...]
    down: str
    query_norm: str = ""
    key_norm: str = ""
    positions: str = ""

    def in_files(self, files: TensorFiles) -> Names:
        """The names with the prefixes that the files have: the embedding and the layers may have different ones."""
        first = f"{self.layer.format(0)}{self.attention_norm}"
        place, stack = (_prefix_of(files, name) for name in (self.embedding, first))
        inside, above = stack + self.head, re.sub(r"[^.]*\.$", "", stack) + self.head
        return replace(
            self,
            embedding=place + self.embedding,
            norm=stack + self.norm,
            head=inside if f"{inside}.weight" in files.shapes else above,
            layer=stack + self.layer,
            positions=self.positions and stack + self.positions,
        )


def _prefix_of(files: TensorFiles, name: str) -> str:
    """What precedes the only tensor of this name."""
    stem = f"{name}.weight"
    found = [one for one in files.shapes if one == stem or one.endswith(f".{stem}")]
    if len(found) != 1:
        raise ValueError(f"{files.source} has {len(found)} tensors {stem}; a network of this family has one")
    return found[0].removesuffix(stem)


HUGGING_FACE = Names(
    embedding="embed_tokens",
    norm="norm",
    head="lm_head",
    layer="layers.{}.",
    attention_norm="input_layernorm",
    mlp_norm="post_attention_layernorm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    output="self_attn.o_proj",
    gate_up=("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
    query_norm="self_attn.q_norm",
    key_norm="self_attn.k_norm",
)
LLADA = Names(
    embedding="wte",
    norm="ln_f",
    head="ff_out",
    layer="blocks.{}.",
    attention_norm="attn_norm",
    mlp_norm="ff_norm",
    qkv=("q_proj", "k_proj", "v_proj"),
    output="attn_out",
    gate_up=("ff_proj", "up_proj"),
    down="ff_out",
)
DIFFUGPT = Names(
    embedding="embed_tokens",
    norm="ln_f",
    head="lm_head",
    layer="h.{}.",
    attention_norm="ln_1",
    mlp_norm="ln_2",
    qkv=("attn.c_attn",),
    output="attn.c_proj",
    gate_up=("mlp.c_fc",),
    down="mlp.c_proj",
    positions="wpe",
)


@dataclass(frozen=True)
class WeightSlice:
    """A piece of one of our tensors: rows `start` to `stop` are the tensor `name`, transposed for a Conv1D."""

    ours: str
    name: str
    start: int
    stop: int
    columns: tuple[int, ...]
    transposed: bool = False

    @property
    def stored_shape(self) -> tuple[int, ...]:
        shape = (self.stop - self.start, *self.columns)
        return shape[::-1] if self.transposed else shape


def parts_of(
    names: Names, config: LlamaConfig, has_bias: Callable[[str], bool], gpt2: bool = False
) -> Iterator[WeightSlice]:
    """All pieces of a network's tensors.

    has_bias: whether one of our linear maps has a bias, by the end of its name.
    """
    D, V, W = config.width, config.vocab_size, config.head_width

    def whole(ours: str, name: str, *shape: int) -> WeightSlice:
        return WeightSlice(ours, name, 0, shape[0], shape[1:])

    def linear(ours: str, pieces: Sequence[tuple[str, int]], inputs: int) -> Iterator[WeightSlice]:
        for leaf, columns in (("weight", (inputs,)), ("bias", ())):
            if leaf == "bias" and not has_bias(ours):
                continue
            start = 0
            for name, rows in pieces:
                turned = gpt2 and leaf == "weight"
                yield WeightSlice(f"{ours}.{leaf}", f"{name}.{leaf}", start, start + rows, columns, turned)
                start += rows

    def norm(ours: str, name: str, width: int = D) -> Iterator[WeightSlice]:
        yield whole(f"{ours}.weight", f"{name}.weight", width)
        if gpt2:
            yield whole(f"{ours}.bias", f"{name}.bias", width)

    yield whole("backbone.embedding.weight", f"{names.embedding}.weight", V, D)
    if names.positions:
        yield whole("backbone.positions.weight", f"{names.positions}.weight", config.length, D)
    rows = [config.heads * W, config.key_heads * W, config.key_heads * W]
    rows = [sum(rows)] if len(names.qkv) == 1 else rows
    inner = [config.mlp_width] * len(names.gate_up)
    for i in range(config.depth):
        ours, theirs = f"backbone.layers.{i}", names.layer.format(i)
        yield from norm(f"{ours}.attention_norm", theirs + names.attention_norm)
        pieces = [(theirs + name, count) for name, count in zip(names.qkv, rows, strict=True)]
        yield from linear(f"{ours}.attention.qkv", pieces, D)
        if config.qk_norm:
            yield from norm(f"{ours}.attention.query_norm", theirs + names.query_norm, W)
            yield from norm(f"{ours}.attention.key_norm", theirs + names.key_norm, W)
        yield from linear(f"{ours}.attention.output", [(theirs + names.output, D)], config.heads * W)
        yield from norm(f"{ours}.mlp_norm", theirs + names.mlp_norm)
        pieces = [(theirs + name, count) for name, count in zip(names.gate_up, inner, strict=True)]
        yield from linear(f"{ours}.mlp.{'hidden' if gpt2 else 'gate_up'}", pieces, D)
        yield from linear(f"{ours}.mlp.{'output' if gpt2 else 'down'}", [(theirs + names.down, D)], config.mlp_width)
    yield from norm("backbone.norm", names.norm)
    if not config.tied:
        yield whole("head.weight", f"{names.head}.weight", V, D)


# ----------------------------------------------------------------------------------------------------------------
# Their configurations

Switches = Mapping[str, tuple[Any, ...]]
"""Settings, and the values that are implemented; a setting that is absent or null has the first."""

_HARMLESS = """
_name_or_path _attn_implementation _attn_implementation_autoset attn_implementation architectures auto_map
bos_token_id eos_token_id pad_token_id mask_token_id unk_token_id sep_token_id cls_token_id pad_token bos_token
eos_token transformers.js_config max_length min_length do_sample early_stopping num_beams num_beam_groups temperature
top_k top_p typical_p repetition_penalty length_penalty finetuning_task prefix torchscript use_bfloat16 tf_legacy_loss
pruned_heads chunk_size_feed_forward decoder_start_token_id tokenizer_class name_or_path dtype torch_dtype
transformers_version model_type vocab_size embedding_size initializer_range initializer_type init_cutoff_factor
init_device init_fn init_std precision attention_dropout hidden_dropout embedding_dropout residual_dropout embd_pdrop
attn_pdrop resid_pdrop use_cache return_dict output_attentions output_hidden_states keys_to_ignore_at_inference
id2label label2id num_labels problem_type task_specific_params gradient_checkpointing is_llama_config
max_window_layers flash_attention flash_attn_varlen alibi_bias_max attention_layer_norm_with_affine mlp_ratio n_ctx
summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
fuse_cross_entropy debug ep_size micro_forward skip_checkpoint use_deepep num_logits_to_keep logits_to_keep
"""
_IGNORED = frozenset(_HARMLESS.split())
"""Settings that change nothing that an imported network computes, or that are read elsewhere."""

LLAMA_SWITCHES: Switches = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "rope_scaling": (None,),
    "rope_interleaved": (False,),
    "pretraining_tp": (1,),
    "sliding_window": (None,),
    "use_sliding_window": (False,),
    "no_rope_layers": (None, []),
    "layer_types": (None,),
    "quantization_config": (None,),
    "is_decoder": (False, True),
    "clip_qkv": (None,),
    "logit_scale": (None, 1.0),
    "final_logit_softcapping": (None,),
    "attn_logit_softcapping": (None,),
}
QWEN2_SWITCHES: Switches = {**LLAMA_SWITCHES, "attention_bias": (True,), "use_mrope": (False,)}
QWEN3_SWITCHES: Switches = {**LLAMA_SWITCHES, "use_mrope": (False,)}
LLADA_SWITCHES: Switches = {
    "block_type": ("llama",),
    "rope": (True,),
    "rope_full_precision": (True,),
    "rope_scaling": (None,),
    "alibi": (False,),
    "include_bias": (False,),
    "include_qkv_bias": (False,),
    "bias_for_layer_norm": (False,),
    "weight_tying": (False,),
    "scale_logits": (False,),
    "input_emb_norm": (False,),
    "attention_layer_norm": (False,),
    "layer_norm_with_affine": (True,),
    "block_group_size": (1,),
    "layer_norm_type": ("rms",),
    "activation_type": ("silu",),
    "multi_query_attention": (None, False),
    "clip_qkv": (None,),
    "quantization_config": (None,),
}
GPT2_SWITCHES: Switches = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "reorder_and_upcast_attn": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
    "quantization_config": (None,),
    "is_decoder": (False, True),
}


@dataclass(frozen=True)
class Settings:
    """What a family calls the settings that are read."""

    width: str = "hidden_size"
    depth: str = "num_hidden_layers"
    heads: str = "num_attention_heads"
    key_heads: str = "num_key_value_heads"
    mlp_width: str = "intermediate_size"
    length: str = "max_position_embeddings"
    epsilon: str = "rms_norm_eps"
    head_width: str = "head_dim"
    base: str = "rope_theta"
    rotated: str = "partial_rotary_factor"
    tied: str = "tie_word_embeddings"


@dataclass(frozen=True)
class LlamaFamily:
    """The conventions of one kind of networks.

    Args:
        name: what the project is called.
        recognises: whether a config.json, of a folder or hub name, is one of its own.
        switches: settings with their implemented values.
        names: of its tensors.
        settings: names of its settings.
        method: what the outputs mean: ar, or a method of masks.
        attention: which positions a position attends to.
        shift: whether position i is predicted from the output at i - 1.
        qkv_bias, qk_norm, masks_padded_queries: see `LlamaConfig`.
        mask: the id of the mask in released networks, if neither config.json nor the tokenizer gives one. A network
            that has no such row is imported without a mask: its outputs can be read, but it writes and bounds no text.
        defaults: settings that are left out of a config.json.
        gpt2: whether it is GPT-2's network instead of a Llama-type one.
    """

    name: str
    recognises: Callable[[Description, str], bool]
    switches: Switches
    names: Names = HUGGING_FACE
    settings: Settings = Settings()
    method: str = "ar"
    attention: str = "causal"
    shift: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    masks_padded_queries: bool = False
    mask: int | None = None
    defaults: JSONMapping = field(default_factory=JSONObject)
    gpt2: bool = False

    def load(
        self,
        files: TensorFiles,
        description: Description,
        tokenizer: Tokenizer | Callable[[int], Tokenizer],
        *,
        device: torch.device,
        dtype: torch.dtype | None = None,
        mask_id: int | None = None,
    ) -> ModelFolder:
        """The network with its process, method and tokenizer, on a device.

        Args:
            files: its tensors.
            description: its config.json.
            tokenizer: the tokenizer, or a function of V.
            device: where the parameters are held.
            dtype: of the parameters; by default the files'.
            mask_id: the id of the mask, where the family's networks do not agree on one.
        """
        description = replace(description, values={**self.defaults, **description.values})
        self.check_switches(description)
        if mask_id is not None and self.method == "ar":
            raise ValueError(f"{description.source}: a {self.name} network has no mask; remove --mask-id (mask_id=)")
        names, V = self._placed(files, description, mask_id is not None)
        made = tokenizer(V) if callable(tokenizer) else tokenizer
        row = self._mask_row(description, made, V, mask_id)
        kinds: dict[torch.dtype, FloatType] = {kind: name for name, kind in FLOAT_TYPES.items()}
        wanted = files.dtype() if dtype is None else dtype
        if wanted not in kinds:
            raise ValueError(f"dtype must be {', '.join(map(str, kinds))} (got {wanted})")
        config = LlamaConfig(
            **self._sizes(description),
            vocab_size=V,
            has_mask=row is not None,
            optional_start=self.method == "ar" and not made.adds_bos,
            mask_row=row,
            attention=self.attention,  # type: ignore[arg-type]
            block=self._block(description),
            shift=self.shift,
            qkv_bias=self.qkv_bias,
            qk_norm=self.qk_norm,
            masks_padded_queries=self.masks_padded_queries,
            weights_dtype=kinds[wanted],
        )
        kind = GPT2 if self.gpt2 else Llama
        parts = list(self._checked_parts(files, names, config, description))
        with SkipInitialization(), torch.device(device):
            model = kind(config)
        fill(model, parts, files)
        model = model.eval().requires_grad_(False)
        method = get_method(self.method).in_blocks(config.block if config.attention == "block-causal" else None)
        return ModelFolder(model, absorb(V), method, made, config.length)

    def check_switches(self, config: Description) -> None:
        """Refuse settings that would change what the network computes."""
        read = {*vars(self.settings).values(), "rope_parameters", *(_BLOCK if "block" in self.attention else ())}
        for name, value in config.values.items():
            if name in _ROPE:
                _scaling(config, name, self.names is HUGGING_FACE)
            elif name == "layer_types":
                kinds = value if isinstance(value, list) else [value]
                if others := sorted({str(kind) for kind in kinds} - {"full_attention", "None"}):
                    raise ValueError(f"{config.source}: layer_types has {others[0]!r}; only full_attention is imported")
            elif name == "is_causal":
                if value is False and self.method == "ar":
                    raise ValueError(f"{config.source}: is_causal is False; only True is imported")
            elif name == "sliding_window" and config.get("use_sliding_window") is False:
                continue  # it has no effect
            elif name in self.switches:
                allowed = self.switches[name]
                if value is not None and not any(value == one and type(value) is type(one) for one in allowed):
                    wanted = " or ".join(map(repr, allowed))
                    raise ValueError(f"{config.source}: {name} is {value!r}; only {wanted} is imported")
            elif name not in read | _IGNORED and not _is_off(value):
                near = nearest(name, {*self.switches, *read})
                raise ValueError(
                    f"{config.source}: unknown setting {name} = {value!r}, which may change what the network computes"
                    + ("" if near is None else f"; did you mean {near!r}?")
                )

    def _sizes(self, config: Description) -> JSONObject:
        """The sizes of the network, by our names."""
        names = self.settings
        width, heads = config.whole(names.width), config.whole(names.heads)
        given = config.get(names.head_width)
        if given is None and width % heads:
            raise ValueError(f"{config.source}: {names.width} {width} does not divide into {heads} {names.heads}")
        key_heads = config.whole(names.key_heads, default=heads)
        if heads % key_heads:
            raise ValueError(
                f"{config.source}: {names.heads} {heads} is not divisible by {names.key_heads} {key_heads}"
            )
        head_width = config.whole(names.head_width, default=width // heads)
        rope = config.get("rope_parameters", default={})
        share = config.share(names.rotated, zero=False, below=1.01, default=rope.get("partial_rotary_factor", 1.0))
        rotated = int(head_width * share)
        if rotated % 2 or not 0 < rotated <= head_width:
            wrong = f"{names.rotated} {share:g} rotates {rotated} of the {head_width} entries of a head"
            raise ValueError(f"{config.source}: {wrong}; this must be a positive even number")
        base = config.share(names.base, zero=False, below=math.inf, default=rope.get("rope_theta", 10_000.0))
        inner = None if self.names is HUGGING_FACE else int(config.get("mlp_ratio", default=4) * width)
        return {
            "width": width,
            "depth": config.whole(names.depth),
            "heads": heads,
            "key_heads": key_heads,
            "head_width": head_width,
            "mlp_width": config.whole(names.mlp_width, default=inner),
            "length": config.whole(names.length, most=LONGEST),
            "rotary_base": base,
            "rotary_width": None if rotated == head_width else rotated,
            **{key: value for name in _ROPE for key, value in _scaling(config, name).items()},
            "epsilon": config.share(names.epsilon, zero=False, default=1e-6),
            "tied": self.gpt2 or config.flag(names.tied, default=False),
        }

    def _placed(self, files: TensorFiles, config: Description, has_mask: bool) -> tuple[Names, int]:
        """The names as the files have them, and the number of rows of the embedding."""
        names = self.names
        if self.gpt2 and not any(one.endswith(f"{names.embedding}.weight") for one in files.shapes):
            if not (has_mask or _is_marked(config)):
                raise ValueError(
                    f"{files.source}: GPT-2 itself is not imported; for DiffuGPT with its tensor names use --mask-id"
                )
            names = replace(names, embedding="wte")
        names = names.in_files(files)
        name = f"{names.embedding}.weight"
        shape = files.shapes[name]
        stated = config.whole("embedding_size", "vocab_size", default=shape[0]) if not self.gpt2 else shape[0]
        if len(shape) != 2 or shape[0] != stated:
            raise ValueError(f"{files.source}: {name} is {list(shape)}, but config.json requires {stated} rows")
        return names, shape[0]

    def _checked_parts(
        self, files: TensorFiles, names: Names, config: LlamaConfig, description: Description
    ) -> Iterator[WeightSlice]:
        """The pieces of the network's tensors, all of which the files must have in their shapes."""
        depth = f"; {self.settings.depth} is {config.depth}"
        layer = names.layer.partition("{}")[0]
        used: set[str] = set()
        for part in parts_of(names, config, self._has_bias, self.gpt2):
            untied = f"; {self.settings.tied} is false" if part.ours == "head.weight" else ""
            files.check(part.name, part.stored_shape, depth if part.name.startswith(layer) else untied)
            used.add(part.name)
            yield part
        tied = {f"{names.head}.weight"} if config.tied else set[str]()
        unused = {name for name in files.shapes if name.endswith(UNUSED)} | tied
        if left := sorted(files.shapes.keys() - used - unused):
            raise ValueError(f"{files.source} holds {len(left)} tensors that have no place, first {left[0]}")

    def _has_bias(self, ours: str) -> bool:
        return self.gpt2 or (self.qkv_bias and ours.endswith("attention.qkv"))

    def _block(self, config: Description) -> int:
        return config.whole(*_BLOCK, default=4) if "block" in self.attention else 1

    def _mask_row(self, config: Description, tokenizer: Tokenizer, V: int, given: int | None) -> int | None:
        """The row that the mask is read from, if it is known; for an autoregressive network the start token's."""
        if self.method == "ar":
            if tokenizer.bos_id is not None:
                return tokenizer.bos_id
            row = next(iter(config.token_ids("bos_token_id") or config.token_ids("eos_token_id")), 0)
            return row if 0 <= row < V else 0
        row = config.get("mask_token_id") if given is None else given
        row = getattr(tokenizer, "mask_token", None) if row is None else row
        if row is None:
            released = _MASK_OF_MEDIUM if self.gpt2 and config.get(self.settings.width) == 1024 else self.mask
            return released if released is not None and released < V else None
        if isinstance(row, bool) or not isinstance(row, int) or not 0 <= row < V:
            raise ValueError(f"{config.source}: mask_token_id must be a row of the embedding, 0 to {V - 1} (got {row})")
        return row


_MASK_OF_MEDIUM = 50257
"""The mask of DiffuGPT-medium, a row that GPT-2 does not have."""
_BLOCK = ("block_size", "block_length", "bd_size")
"""Settings of the number of tokens of a block."""
_ROPE = ("rope_scaling", "rope_parameters")
"""Settings of the rotary positions, of older and newer files."""


def _scaling(config: Description, name: str, supported: bool = True) -> JSONObject:
    """The scaling of the rotary positions, by our names; {} for none. Other kinds are refused."""
    value = config.values.get(name)
    kind = value.get("rope_type", value.get("type")) if isinstance(value, Mapping) else value
    if kind in (None, "default"):
        return {}
    if not (isinstance(value, Mapping) and supported and kind in ("linear", "llama3", "yarn")):
        known = "linear, llama3 and yarn are imported" if supported else "only unscaled rotary positions are imported"
        raise ValueError(f"{config.source}: {name} is {value!r}; {known}")
    part, above_0 = config.part(name), {"zero": False, "below": math.inf}
    found: JSONObject = {"rotary_factor": part.share("factor", **above_0)}
    if kind == "llama3":
        found["rotary_context"] = part.whole("original_max_position_embeddings")
        found["rotary_low"] = part.share("low_freq_factor", **above_0)
        found["rotary_high"] = part.share("high_freq_factor", **above_0)
    if kind == "yarn":
        for other in ("mscale", "mscale_all_dim", "truncate"):
            if (given := part.get(other)) not in (None, True):
                raise ValueError(f"{config.source}: {name}.{other} is {given!r}; only yarn without it is imported")
        length = config.get("max_position_embeddings")
        found["rotary_context"] = part.whole("original_max_position_embeddings", default=length)
        found["rotary_low"] = part.share("beta_slow", **above_0, default=1.0)
        found["rotary_high"] = part.share("beta_fast", **above_0, default=32.0)
        usual = 1.0 + 0.1 * math.log(max(found["rotary_factor"], 1.0))
        found["rotary_yarn"] = part.share("attention_factor", **above_0, default=usual)
    if kind != "linear" and found["rotary_low"] >= found["rotary_high"]:
        low, high = ("beta_slow", "beta_fast") if kind == "yarn" else ("low_freq_factor", "high_freq_factor")
        got = f"{found['rotary_high']:g} and {found['rotary_low']:g}"
        raise ValueError(f"{config.source}: {name}.{high} must be above {name}.{low} (got {got})")
    return found


def _is_off(value: object) -> bool:
    """Whether a setting is switched off, or 1, so that it changes nothing."""
    return value is None or value is False or (not isinstance(value, bool) and value in (0, 1, "", [], {}))


@torch.no_grad()
def fill(model: Llama, parts: Sequence[WeightSlice], files: TensorFiles) -> None:
    """Every parameter of the model from the files, one tensor at a time."""
    state: dict[str, Tensor] = dict(model.named_parameters())
    if model.options.tied:
        state.pop("head.weight", None)
    empty = set(state)
    for part in parts:
        target = state[part.ours][part.start : part.stop]
        if part.transposed:
            stored = torch.empty(part.stored_shape, dtype=target.dtype, device=target.device)
            files.take(part.name, stored)
            target.copy_(stored.T)
        else:
            files.take(part.name, target)
        empty.discard(part.ours)
    assert not empty, f"no map for {sorted(empty)}"


# ----------------------------------------------------------------------------------------------------------------
# The table


def _kind(*kinds: str) -> Callable[[Description, str], bool]:
    return lambda config, _: config.kind in kinds


def _is_marked(config: Description) -> bool:
    """Whether a config.json says that its network is a diffusion model."""
    classes = str(config.get("architectures", default="")).lower()
    return config.get("mask_token_id") is not None or "discretediffusion" in classes


def _is_diffullama(config: Description, name: str) -> bool:
    """LLaMA's config.json with a mask, or by its name: the released one is LLaMA's own."""
    named = f"{name} {config.get('_name_or_path', default='')}".lower()
    return config.kind in ("llama", "diffullama") and (_is_marked(config) or "diffullama" in named)


def _is_diffugpt(config: Description, _: str) -> bool:
    return config.kind in ("gpt2", "diffugpt", "ddm", "") and config.get("n_embd") is not None


_LLADA_SETTINGS = Settings(
    *("d_model", "n_layers", "n_heads", "n_kv_heads", "mlp_hidden_size", "max_sequence_length", "rms_norm_eps"),
    tied="weight_tying",
)
_GPT2_SETTINGS = Settings(
    *("n_embd", "n_layer", "n_head", "n_head_kv", "n_inner", "n_positions", "layer_norm_epsilon"),
)
_MASKS: JSONObject = {"method": "ceddt", "attention": "full"}

_LLAMA = {"max_position_embeddings": 2048}
_QWEN: JSONObject = {"max_position_embeddings": 32_768, "use_sliding_window": False}
_QWEN3 = {**_QWEN, "head_dim": 128}
_LLADA = {"max_sequence_length": 1024, "rms_norm_eps": 1e-5}
_GPT2 = {"n_positions": 1024, "layer_norm_epsilon": 1e-5}

LLAMA_FAMILIES: tuple[LlamaFamily, ...] = (
    LlamaFamily("DiffuLLaMA", _is_diffullama, LLAMA_SWITCHES, shift=True, mask=811, defaults=_LLAMA, **_MASKS),
    LlamaFamily("Llama", _kind("llama"), LLAMA_SWITCHES, defaults=_LLAMA),
    LlamaFamily("Qwen2", _kind("qwen2"), QWEN2_SWITCHES, qkv_bias=True, defaults=_QWEN),
    LlamaFamily("Qwen3", _kind("qwen3"), QWEN3_SWITCHES, qk_norm=True, defaults=_QWEN3),
    LlamaFamily("A2D Llama", _kind("a2d-llama"), LLAMA_SWITCHES, defaults=_LLAMA, **_MASKS),
    LlamaFamily("A2D Qwen2", _kind("a2d-qwen2"), QWEN2_SWITCHES, qkv_bias=True, defaults=_QWEN, **_MASKS),
    LlamaFamily("A2D Qwen3", _kind("a2d-qwen3"), QWEN3_SWITCHES, qk_norm=True, defaults=_QWEN3, **_MASKS),
    LlamaFamily(
        "LLaDA", _kind("llada"), LLADA_SWITCHES, LLADA, _LLADA_SETTINGS, mask=126336, defaults=_LLADA, **_MASKS
    ),
    LlamaFamily(
        "Dream",
        _kind("dream"),
        QWEN2_SWITCHES,
        shift=True,
        qkv_bias=True,
        masks_padded_queries=True,
        mask=151666,
        defaults=_QWEN,
        **_MASKS,
    ),
    LlamaFamily(
        "SDAR",
        _kind("sdar"),
        QWEN3_SWITCHES,
        qk_norm=True,
        mask=151669,
        method="ceddt",
        attention="block-causal",
        defaults=_QWEN3,
    ),
    LlamaFamily(
        "DiffuGPT",
        _is_diffugpt,
        GPT2_SWITCHES,
        DIFFUGPT,
        _GPT2_SETTINGS,
        shift=True,
        mask=10541,
        defaults=_GPT2,
        gpt2=True,
        **_MASKS,
    ),
)
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Settings of the number of experts: LLaDA-MoE has the same model_type as LLaDA."""


def llama_family_of(config: Description, name: str) -> LlamaFamily | None:
    """The family that recognises a config.json, of a folder or hub name; None if none does."""
    setting, experts = config.find(*_EXPERTS)
    if "moe" in config.kind or config.kind == "mixtral":
        raise ValueError(f"{config.source}: {config.get('model_type')} is a mixture of experts, which is not imported")
    if not _is_off(experts):
        raise ValueError(f"{config.source}: {setting} is {experts}; mixtures of experts are not imported")
    return next((family for family in LLAMA_FAMILIES if family.recognises(config, name)), None)


# ----------------------------------------------------------------------------------------------------------------
# Files


def import_llama(
    family: LlamaFamily,
    folder: Path,
    description: Description,
    tokenizer: str | Path | None,
    *,
    device: torch.device,
    dtype: torch.dtype | None,
    mask_id: int | None,
) -> tuple[LlamaFamily, ModelFolder]:
    """The network in a folder of safetensors, with its family: DiffuLLaMA has LLaMA's config.json."""
    files = SafetensorsFiles(folder)
    if family.name == "Llama" and any(one.startswith("denoise_model.") for one in files.shapes):
        family = next(one for one in LLAMA_FAMILIES if one.name == "DiffuLLaMA")

    def fitting(V: int) -> Tokenizer:
        return _tokenizer(folder, tokenizer, V, description, family)

    return family, family.load(files, description, fitting, device=device, dtype=dtype, mask_id=mask_id)


def _tokenizer(folder: Path, asked: str | Path | None, V: int, config: Description, family: LlamaFamily) -> Tokenizer:
    """The folder's own tokenizer, or the one that is asked for; tokens are numbers where there is none."""
    place = folder if asked is None else expanded(asked)
    generation = folder / "generation_config.json"
    more = Description(read_json(generation) if generation.is_file() else {}, str(generation), 0)
    stops = config.token_ids("eos_token_id") + more.token_ids("eos_token_id")
    stops = [one for one in dict.fromkeys(stops) if 0 <= one < V]  # configurations may have ids of a larger vocabulary
    bos = next((one for one in config.token_ids("bos_token_id") if 0 <= one < V), None)
    has_merges = all((place / name).is_file() for name in ("vocab.json", "merges.txt"))
    pre = "gpt-2" if family.gpt2 else "qwen2" if family.qkv_bias or family.qk_norm else None
    if (place / BPE_FILE).is_file() or (has_merges and pre is not None):
        content = None if (place / BPE_FILE).is_file() or pre is None else content_of_merges(place, pre)
        return JSONTokenizer.from_folder(place, V, stops, bos, content)
    if asked is not None:
        return fitting_tokenizer(str(asked), V)
    if family.gpt2 and V in (GPT2_VOCAB_SIZE, GPT2_VOCAB_SIZE + 1):
        return fitting_tokenizer("gpt2", V)
    return IdTokenizer(V)


FREQUENCIES = "rope_freqs.weight"
"""Divisors of the rotary frequencies in a GGUF file."""
GGUF_FAMILIES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
"""Families by the architecture that a GGUF file names."""


def import_gguf(
    path: Path, tokenizer: str | Path | None, *, device: torch.device, dtype: torch.dtype | None
) -> tuple[LlamaFamily, ModelFolder]:
    """The network in a GGUF file, with its own tokenizer; quantized matrices become float32."""
    file = GGUFFile(path)
    named = GGUF_FAMILIES.get(file.architecture)
    if named is None:
        raise ValueError(f"{path} has the architecture {file.architecture}; known are {', '.join(GGUF_FAMILIES)}")
    family = next(one for one in LLAMA_FAMILIES if one.name == named)
    heads = file.setting("attention.head_count")
    experts = file.setting("expert_count", 0)
    if experts:
        raise ValueError(f"{path}: {file.architecture}.expert_count is {experts}; mixtures of experts are not imported")
    divisors = file.taken_out(FREQUENCIES)
    values = {
        "model_type": file.architecture,
        "hidden_size": file.setting("embedding_length"),
        "num_hidden_layers": file.setting("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.setting("attention.head_count_kv", heads),
        "intermediate_size": file.setting("feed_forward_length"),
        "max_position_embeddings": file.setting("context_length"),
        "rms_norm_eps": file.setting("attention.layer_norm_rms_epsilon"),
        "rope_theta": file.setting("rope.freq_base", 10_000.0),
        "rope_scaling": _scaling_of_gguf(file, divisors),
        "head_dim": file.setting("attention.key_length"),
        "sliding_window": file.setting("attention.sliding_window"),
        "tie_word_embeddings": "lm_head.weight" not in file.shapes,
        "bos_token_id": file.value("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.value("tokenizer.ggml.eos_token_id"),
    }
    values = {name: value for name, value in values.items() if value is not None}
    description = Description(values, str(path), 0)
    width = values.get("head_dim") or description.whole("hidden_size") // description.whole("num_attention_heads")
    if (rotated := file.setting("rope.dimension_count", width)) != width:
        values["partial_rotary_factor"] = rotated / width

    def fitting(V: int) -> Tokenizer:
        if tokenizer is not None:
            return _tokenizer(expanded(tokenizer), tokenizer, V, description, family)
        content = tokenizer_content(file)
        tokens = file.value("tokenizer.ggml.tokens")
        for name in ("bos_token_id", "eos_token_id"):
            if not 0 <= values.get(name, 0) < len(tokens):
                raise ValueError(f"{path}: {name} is {values[name]}, but there are {len(tokens)} tokens")
        stops = [values[name] for name in ("eos_token_id",) if name in values]
        variables = {
            f"{name}_token": tokens[i] for name in ("bos", "eos") if (i := values.get(f"{name}_token_id")) is not None
        }
        return JSONTokenizer(
            content,
            V,
            path.stem,
            bos=values.get("bos_token_id"),
            stops=stops,
            chat_template=file.value("tokenizer.chat_template"),
            variables=variables,
            adds_bos=file.value("tokenizer.ggml.add_bos_token", True) is not False,
            ends_turns=True,
        )

    made = family.load(file, description, fitting, device=device, dtype=dtype)
    if divisors is not None:
        assert isinstance(made.model, Llama)
        _check_divisors(path, divisors, made.model.options)
    return family, made


LLAMA3_SCALING = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""The scaling of Llama 3.1 to 3.3, except for its factor."""


def _scaling_of_gguf(file: GGUFFile, divisors: Tensor | None) -> JSONObject | None:
    """The scaling of the rotary positions, as config.json has it. That of Llama 3 is in the file as the divisor of each
    frequency, of which the largest is the factor."""
    if divisors is not None:
        return None if bool((divisors == 1).all()) else {**LLAMA3_SCALING, "factor": float(divisors.max())}
    kind = file.setting("rope.scaling.type", "none")
    if kind == "none":
        return None
    context = file.setting("rope.scaling.original_context_length")
    known = {"factor": file.setting("rope.scaling.factor"), "original_max_position_embeddings": context}
    return {"rope_type": kind, **{name: value for name, value in known.items() if value is not None}}


def _check_divisors(path: Path, divisors: Tensor, config: LlamaConfig) -> None:
    """Refuse divisors of the rotary frequencies other than Llama 3's."""
    plain, scaled = (frequencies(one, "cpu", torch.float32) for one in (replace(config, rotary_factor=1.0), config))
    if divisors.shape != plain.shape or not torch.allclose(divisors, plain / scaled, rtol=1e-4):
        raise ValueError(f"{path}: {FREQUENCIES} is not the scaling of Llama 3.1, the only one that is imported")
