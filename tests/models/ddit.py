"""The transformer that SEDD, MDLM, DUO, UDLM and GIDD share, once more, from its description and with their names.

Shapes: B batch, L positions, R rows, D width, C conditioning width, W head width.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

D, C, HEADS, DEPTH, LENGTH = 24, 20, 3, 2, 12
Weights = dict[str, Tensor]


def random_weights(rows: int, seed: int = 0) -> Weights:
    """Every tensor that their files hold, without a prefix; none is zero."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "vocab_embed.embedding": (rows, D),
        "sigma_map.mlp.0.weight": (C, 256),
        "sigma_map.mlp.0.bias": (C,),
        "sigma_map.mlp.2.weight": (C, C),
        "sigma_map.mlp.2.bias": (C,),
        "output_layer.norm_final.weight": (D,),
        "output_layer.adaLN_modulation.weight": (2 * D, C),
        "output_layer.adaLN_modulation.bias": (2 * D,),
        "output_layer.linear.weight": (rows, D),
        "output_layer.linear.bias": (rows,),
    }
    for i in range(DEPTH):
        shapes |= {
            f"blocks.{i}.norm1.weight": (D,),
            f"blocks.{i}.attn_qkv.weight": (3 * D, D),
            f"blocks.{i}.attn_out.weight": (D, D),
            f"blocks.{i}.norm2.weight": (D,),
            f"blocks.{i}.mlp.0.weight": (4 * D, D),
            f"blocks.{i}.mlp.0.bias": (4 * D,),
            f"blocks.{i}.mlp.2.weight": (D, 4 * D),
            f"blocks.{i}.mlp.2.bias": (D,),
            f"blocks.{i}.adaLN_modulation.weight": (6 * D, C),
            f"blocks.{i}.adaLN_modulation.bias": (6 * D,),
        }
    made = {
        name: torch.randn(shape, generator=generator) * (shape[-1] ** -0.5 if len(shape) == 2 else 0.3)
        for name, shape in shapes.items()
    }
    for name, value in made.items():
        if "norm" in name:
            value.abs_().add_(0.5)
    return made | {"rotary_emb.inv_freq": 10_000.0 ** -(torch.arange(0, D // HEADS, 2).float() / (D // HEADS))}


def write(folder: Path, config: dict[str, Any], weights: Weights, prefix: str = "") -> Path:
    """A folder as the hub has it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({f"{prefix}{name}": value.contiguous() for name, value in weights.items()}, folder / "model.safetensors")
    return folder


def outputs(weights: Weights, x: Tensor, told: Tensor, mistake: str = "") -> Tensor:
    """What their network returns for tokens x [B, L] and the number it is told [B]: [B, L, R], in float64.

    mistake: one convention is taken wrongly.
    """
    w = {name: value.double() for name, value in weights.items()}

    def linear(name: str, value: Tensor, bias: bool = True) -> Tensor:
        return F.linear(value, w[f"{name}.weight"], w[f"{name}.bias"] if bias else None)

    def norm(name: str, value: Tensor) -> Tensor:
        return F.layer_norm(value, (D,), eps=1e-3 if mistake == "eps" else 1e-5) * w[f"{name}.weight"]

    def modulated(value: Tensor, name: str, shift: Tensor, scale: Tensor) -> Tensor:
        if mistake == "weight after the shift":
            return (F.layer_norm(value, (D,)) * (1 + scale) + shift) * w[f"{name}.weight"]
        return norm(name, value) * (1 + scale) + shift

    steps = torch.arange(128, dtype=torch.float64) / (127 if mistake == "frequencies" else 128)
    angles = told.double()[:, None] * torch.exp(-math.log(10_000) * steps)
    waves = (angles.sin(), angles.cos()) if mistake == "sines first" else (angles.cos(), angles.sin())
    c = linear("sigma_map.mlp.2", F.silu(linear("sigma_map.mlp.0", torch.cat(waves, -1))))
    c = c if mistake == "no SiLU at the end" else F.silu(c)
    if mistake == "two SiLUs at the end":
        c = F.silu(c)
    h = w["vocab_embed.embedding"][x]
    for i in range(DEPTH):
        parts = linear(f"blocks.{i}.adaLN_modulation", c)[:, None].chunk(6, -1)
        if mistake == "scale before shift":
            parts = [parts[k] for k in (1, 0, 2, 4, 3, 5)]
        if mistake == "MLP before attention":
            parts = [parts[k] for k in (3, 4, 5, 0, 1, 2)]
        a = modulated(h, f"blocks.{i}.norm1", *parts[:2])
        h = h + parts[2] * linear(f"blocks.{i}.attn_out", attention(w, i, a, mistake), bias=False)
        m = linear(f"blocks.{i}.mlp.0", modulated(h, f"blocks.{i}.norm2", *parts[3:5]), mistake != "no bias")
        m = F.gelu(m, approximate="none" if mistake == "exact GELU" else "tanh")
        h = h + parts[5] * linear(f"blocks.{i}.mlp.2", m, mistake != "no second bias")
    shift, scale = linear("output_layer.adaLN_modulation", c)[:, None].chunk(2, -1)
    return linear("output_layer.linear", modulated(h, "output_layer.norm_final", shift, scale))


def attention(w: Weights, i: int, x: Tensor, mistake: str) -> Tensor:
    width = D // HEADS
    order = (HEADS, 3) if mistake == "heads before q, k, v" else (3, HEADS)
    qkv = F.linear(x, w[f"blocks.{i}.attn_qkv.weight"]).unflatten(-1, (*order, width))
    q, k, v = (qkv.transpose(2, 3) if mistake == "heads before q, k, v" else qkv).unbind(2)  # [B, L, H, W]
    angles = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * w["rotary_emb.inv_freq"]  # [L, W/2]
    cosine, sine = angles.cos()[:, None], angles.sin()[:, None]

    def turned(value: Tensor) -> Tensor:
        if mistake == "neighbours turned":
            first, second = value[..., ::2], value[..., 1::2]
            both = torch.stack((first * cosine - second * sine, first * sine + second * cosine), -1)
            return both.flatten(-2)
        first, second = value.chunk(2, -1)
        return torch.cat((first * cosine - second * sine, first * sine + second * cosine), -1)

    scores = torch.einsum("blhw,bmhw->bhlm", turned(q), turned(k)) / math.sqrt(width)
    values = turned(v) if mistake == "values turned" else v
    if mistake == "causal":
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    return torch.einsum("bhlm,bmhw->blhw", scores.softmax(-1), values).flatten(2)


MISTAKES = (
    *("eps", "weight after the shift", "frequencies", "sines first", "no SiLU at the end", "two SiLUs at the end"),
    *("scale before shift", "MLP before attention", "no bias", "no second bias", "exact GELU", "heads before q, k, v"),
    *("neighbours turned", "values turned", "causal"),
)
