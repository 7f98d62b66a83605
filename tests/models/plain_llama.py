"""Reference implementations of Llama networks and GPT-2 in plain float64 operations, with published tensor names."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

Weights = dict[str, Tensor]
V, D, HEADS, KEYS, WIDTH, INNER, DEPTH, LENGTH = 23, 24, 4, 2, 6, 20, 2, 16
COMMON: dict[str, Any] = {
    "hidden_size": D,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEYS,
    "intermediate_size": INNER,
    "max_position_embeddings": LENGTH,
    "vocab_size": V,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "torch_dtype": "float32",
}
QWEN = {"bos_token_id": 1, "eos_token_id": 2, "use_sliding_window": False, "sliding_window": 8, "max_window_layers": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**COMMON, "model_type": "llama", "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2},
    "qwen2": {**COMMON, **QWEN, "model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {**COMMON, **QWEN, "model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": False},
    "diffullama": {**COMMON, "model_type": "llama", "mask_token_id": 7, "tie_word_embeddings": False},
    "dream": {**COMMON, **QWEN, "model_type": "Dream", "mask_token_id": 20, "tie_word_embeddings": False},
    "sdar": {
        **COMMON,
        **QWEN,
        "model_type": "sdar",
        "head_dim": 8,
        "mask_token_id": 20,
        "block_size": 4,
        "attn_implementation": "flex_attention",
    },
    "a2d": {
        **COMMON,
        **QWEN,
        "model_type": "a2d-qwen3",
        "head_dim": 8,
        "mask_token_id": 20,
        "tie_word_embeddings": True,
    },
    "llada": {
        "model_type": "llada",
        "d_model": D,
        "n_layers": DEPTH,
        "n_heads": HEADS,
        "n_kv_heads": HEADS,
        "mlp_hidden_size": INNER,
        "max_sequence_length": LENGTH,
        "embedding_size": V,
        "vocab_size": V,
        "mask_token_id": 20,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "block_type": "llama",
        "rope": True,
        "alibi": False,
        "include_bias": False,
        "include_qkv_bias": False,
        "weight_tying": False,
        "scale_logits": False,
        "input_emb_norm": False,
        "block_group_size": 1,
        "layer_norm_type": "rms",
        "activation_type": "silu",
    },
    "diffugpt": {
        "model_type": "gpt2",
        "n_embd": D,
        "n_layer": DEPTH,
        "n_head": HEADS,
        "n_inner": None,
        "n_positions": LENGTH,
        "n_ctx": LENGTH,
        "layer_norm_epsilon": 1e-5,
        "activation_function": "gelu_new",
        "vocab_size": V - 1,
        "mask_token_id": 7,
        "scale_attn_weights": True,
    },
}
LLADA_NAMES = {
    "model.embed_tokens": "model.transformer.wte",
    "model.norm": "model.transformer.ln_f",
    "lm_head": "model.transformer.ff_out",
    "model.layers": "model.transformer.blocks",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ff_norm",
    "self_attn.o_proj": "attn_out",
    "self_attn.": "",
    "mlp.gate_proj": "ff_proj",
    "mlp.up_proj": "up_proj",
    "mlp.down_proj": "ff_out",
}


def _renamed(name: str) -> str:
    for theirs, llada in LLADA_NAMES.items():
        name = name.replace(theirs, llada)
    return name


def head_width(kind: str) -> int:
    return CONFIGS[kind].get("head_dim", WIDTH)


def random_weights(kind: str, seed: int = 0) -> Weights:
    """Every tensor random, in float32, by the names of the family's files."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float) -> Tensor:
        return torch.randn(shape, generator=generator) * scale

    def around_one(size: int) -> Tensor:
        return 1 + normal(size, scale=0.3)

    made: Weights = {}
    if kind == "diffugpt":
        made["embed_tokens.weight"] = normal(V, D, scale=1.0)
        made["denoise_model.wpe.weight"] = normal(LENGTH, D, scale=0.5)
        for i in range(DEPTH):
            at = f"denoise_model.h.{i}."
            for norm in ("ln_1", "ln_2"):
                made |= {f"{at}{norm}.weight": around_one(D), f"{at}{norm}.bias": normal(D, scale=0.3)}
            sizes = {"attn.c_attn": (D, 3 * D), "attn.c_proj": (D, D), "mlp.c_fc": (D, 4 * D), "mlp.c_proj": (4 * D, D)}
            for name, (inputs, outputs) in sizes.items():
                made[f"{at}{name}.weight"] = normal(inputs, outputs, scale=1.5 / math.sqrt(inputs))
                made[f"{at}{name}.bias"] = normal(outputs, scale=0.3)
        made |= {"denoise_model.ln_f.weight": around_one(D), "denoise_model.ln_f.bias": normal(D, scale=0.3)}
        return made
    config, W = CONFIGS[kind], head_width(kind)
    keys = HEADS if kind == "llada" else KEYS
    made["model.embed_tokens.weight"] = normal(V, D, scale=0.5)
    for i in range(DEPTH):
        at = f"model.layers.{i}."
        sizes = {
            "self_attn.q_proj": (HEADS * W, D),
            "self_attn.k_proj": (keys * W, D),
            "self_attn.v_proj": (keys * W, D),
            "self_attn.o_proj": (D, HEADS * W),
            "mlp.gate_proj": (INNER, D),
            "mlp.up_proj": (INNER, D),
            "mlp.down_proj": (D, INNER),
        }
        for name, (outputs, inputs) in sizes.items():
            made[f"{at}{name}.weight"] = normal(outputs, inputs, scale=1.5 / math.sqrt(inputs))
            if kind in ("qwen2", "dream") and name[-6:] in ("q_proj", "k_proj", "v_proj"):
                made[f"{at}{name}.bias"] = normal(outputs, scale=0.5)
        made |= {f"{at}{norm}.weight": around_one(D) for norm in ("input_layernorm", "post_attention_layernorm")}
        if "head_dim" in config:
            made |= {f"{at}self_attn.{norm}.weight": around_one(W) for norm in ("q_norm", "k_norm")}
    made["model.norm.weight"] = around_one(D)
    if not config.get("tie_word_embeddings"):
        made["lm_head.weight"] = normal(V, D, scale=2.0 / math.sqrt(D))
    return {_renamed(name): value for name, value in made.items()} if kind == "llada" else made


def write(folder: Path, kind: str, weights: Mapping[str, Tensor] | None = None, **changes: Any) -> Path:
    """A model folder in the format that the family publishes."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {name: value for name, value in {**CONFIGS[kind], **changes}.items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(random_weights(kind) if weights is None else weights), folder / "model.safetensors")
    return folder


def visible_of(attention: str, length: int, block: int = 4) -> Tensor:
    """[L, L] bool."""
    number = torch.arange(length) // {"full": length, "causal": 1, "block": block}[attention]
    return number[:, None] >= number


def outputs(kind: str, weights: Mapping[str, Tensor], ids: Tensor, visible: Tensor) -> Tensor:
    """Logits [B, L, V] in float64 for row numbers [B, L]; visible [L, L] or [B, L, L]."""
    w = {name: value.double() for name, value in weights.items()}
    return _gpt2(w, ids, visible) if kind == "diffugpt" else _llama(kind, w, ids, visible)


def _attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """[B, L, H W] of q, k, v [B, L, H, W], head by head; 0 for queries that attend to nothing."""
    heads = []
    for h in range(q.shape[2]):
        scores = q[:, :, h] @ k[:, :, h].transpose(1, 2) / math.sqrt(q.shape[3])
        heads.append(scores.masked_fill(~visible, -math.inf).softmax(-1).nan_to_num(0.0) @ v[:, :, h])
    return torch.cat(heads, -1)


def _gpt2(w: Mapping[str, Tensor], ids: Tensor, visible: Tensor) -> Tensor:
    def norm(x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return scaled * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    x = w["embed_tokens.weight"][ids] + w["denoise_model.wpe.weight"][: ids.shape[1]]
    for i in range(DEPTH):
        at = f"denoise_model.h.{i}."
        q, k, v = linear(norm(x, at + "ln_1"), at + "attn.c_attn").unflatten(-1, (3, HEADS, WIDTH)).unbind(2)
        x = x + linear(_attention(q, k, v, visible), at + "attn.c_proj")
        y = linear(norm(x, at + "ln_2"), at + "mlp.c_fc")
        y = 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
        x = x + linear(y, at + "mlp.c_proj")
    return norm(x, "denoise_model.ln_f") @ w["embed_tokens.weight"].T


def _llama(kind: str, w: Mapping[str, Tensor], ids: Tensor, visible: Tensor) -> Tensor:
    config, W = CONFIGS[kind], head_width(kind)
    keys = HEADS if kind == "llada" else KEYS
    named = _renamed if kind == "llada" else str

    def get(name: str) -> Tensor:
        return w[named(name)]

    def norm(x: Tensor, name: str) -> Tensor:
        return get(f"{name}.weight") * x / (x.square().mean(-1, keepdim=True) + config["rms_norm_eps"]).sqrt()

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ get(f"{name}.weight").T + w.get(f"{name}.bias", torch.zeros((), dtype=torch.float64))

    def turned(x: Tensor) -> Tensor:
        made = x.clone()
        for position in range(x.shape[1]):
            for j in range(W // 2):
                angle = position * config["rope_theta"] ** (-2 * j / W)
                a, b = x[:, position, :, j], x[:, position, :, j + W // 2]
                made[:, position, :, j] = a * math.cos(angle) - b * math.sin(angle)
                made[:, position, :, j + W // 2] = b * math.cos(angle) + a * math.sin(angle)
        return made

    x = get("model.embed_tokens.weight")[ids]
    for i in range(DEPTH):
        at = f"model.layers.{i}."
        y = norm(x, at + "input_layernorm")
        q, k, v = (linear(y, f"{at}self_attn.{part}_proj").unflatten(-1, (-1, W)) for part in "qkv")
        if "head_dim" in config:
            q, k = norm(q, at + "self_attn.q_norm"), norm(k, at + "self_attn.k_norm")
        q, k = turned(q), turned(k)
        k, v = (torch.stack([part[:, :, h // (HEADS // keys)] for h in range(HEADS)], 2) for part in (k, v))
        x = x + linear(_attention(q, k, v, visible), at + "self_attn.o_proj")
        y = norm(x, at + "post_attention_layernorm")
        gate = linear(y, at + "mlp.gate_proj")
        x = x + linear(gate / (1 + torch.exp(-gate)) * linear(y, at + "mlp.up_proj"), at + "mlp.down_proj")
    tied = config.get("tie_word_embeddings")
    return norm(x, "model.norm") @ get("model.embed_tokens.weight" if tied else "lm_head.weight").T
