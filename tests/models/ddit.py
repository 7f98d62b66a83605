"""A reference implementation of the transformer of SEDD, MDLM, DUO, UDLM and GIDD, with their tensor names.

Shapes: B batch, L positions, R rows, D width, C conditioning width, W head width.
"""

import json
import math
from dataclasses import dataclass
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
    """A model folder as on the hub."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({f"{prefix}{name}": value.contiguous() for name, value in weights.items()}, folder / "model.safetensors")
    return folder


def outputs(
    weights: Weights,
    x: Tensor,
    time_input: Tensor,
    mistake: str = "",
    visible: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """The network's outputs for tokens x [B, L] and its time input [B]: [B, L, R], in float64.

    mistake: a convention to get wrong. visible [L, L]: which keys a query attends to. positions [L]: other positions.
    """
    twin = Twin({name: value.double() for name, value in weights.items()}, mistake, visible, positions)
    c, h = twin.conditioning(time_input), twin.embedded(x)
    for i in range(DEPTH):
        h = twin.block(i, h, c)
    return twin.head(h, c)


@dataclass(frozen=True)
class Twin:
    """The network with their tensor names, one method per part."""

    w: Weights
    mistake: str
    visible: Tensor | None = None
    positions: Tensor | None = None

    def linear(self, name: str, value: Tensor, bias: bool = True) -> Tensor:
        return F.linear(value, self.w[f"{name}.weight"], self.w[f"{name}.bias"] if bias else None)

    def norm(self, name: str, value: Tensor) -> Tensor:
        weight = self.w[f"{name}.weight"]
        weight = {"no weight": torch.ones_like(weight), "weight twice": weight**2}.get(self.mistake, weight)
        if self.mistake == "mean kept":
            return F.rms_norm(value, (D,), eps=1e-5) * weight
        return F.layer_norm(value, (D,), eps=1e-3 if self.mistake == "eps" else 1e-5) * weight

    def modulated(self, value: Tensor, name: str, shift: Tensor, scale: Tensor) -> Tensor:
        weight = self.w[f"{name}.weight"]
        if self.mistake == "weight after the shift":
            return (F.layer_norm(value, (D,)) * (1 + scale) + shift) * weight
        if self.mistake == "weight beside the scale":
            return F.layer_norm(value, (D,)) * (weight + scale) + shift
        if self.mistake == "shift before the scale":
            return (self.norm(name, value) + shift) * (1 + scale)
        return self.norm(name, value) * (scale if self.mistake == "scale alone" else 1 + scale) + shift

    def conditioning(self, time_input: Tensor) -> Tensor:
        steps = torch.arange(128, dtype=torch.float64) / (127 if self.mistake == "frequencies" else 128)
        angles = time_input.double()[:, None] * torch.exp(-math.log(10_000) * steps)
        angles = 1000 * angles if self.mistake == "thousandths" else angles
        waves = (angles.sin(), angles.cos()) if self.mistake == "sines first" else (angles.cos(), angles.sin())
        c = self.linear("sigma_map.mlp.2", F.silu(self.linear("sigma_map.mlp.0", torch.cat(waves, -1))))
        for _ in range({"no SiLU at the end": 0, "two SiLUs at the end": 2}.get(self.mistake, 1)):
            c = F.silu(c)
        return c

    def embedded(self, x: Tensor) -> Tensor:
        table = self.w["vocab_embed.embedding"]
        table = table.roll(1, 0) if self.mistake == "mask in front" else table
        return table[x] * (math.sqrt(D) if self.mistake == "embedding scaled" else 1)

    def modulations(self, i: int, c: Tensor) -> list[Tensor]:
        parts = list(self.linear(f"blocks.{i}.adaLN_modulation", c)[:, None].chunk(6, -1))
        orders = {"scale before shift": (1, 0, 2, 4, 3, 5), "MLP before attention": (3, 4, 5, 0, 1, 2)}
        parts = [parts[k] for k in orders.get(self.mistake, range(6))]
        gates = {"gates after tanh": torch.tanh, "no gates": torch.ones_like}
        for k in (2, 5):
            parts[k] = gates.get(self.mistake, lambda gate: gate)(parts[k])
        return parts

    def block(self, i: int, h: Tensor, c: Tensor) -> Tensor:
        parts = self.modulations(i, c)
        a = self.attention(i, self.modulated(h, f"blocks.{i}.norm1", *parts[:2]))
        h = h + parts[2] * self.linear(f"blocks.{i}.attn_out", a, bias=False)
        m = self.modulated(h, f"blocks.{i}.norm2", *parts[3:5])
        m = self.linear(f"blocks.{i}.mlp.0", m, self.mistake != "no bias")
        others = {"exact GELU": F.gelu, "SiLU in the MLP": F.silu}
        m = others.get(self.mistake, lambda value: F.gelu(value, approximate="tanh"))(m)
        h = h + parts[5] * self.linear(f"blocks.{i}.mlp.2", m, self.mistake != "no second bias")
        return h.bfloat16().double() if self.mistake == "bfloat16" else h

    def attention(self, i: int, x: Tensor) -> Tensor:
        width, mixed = D // HEADS, self.mistake == "heads before q, k, v"
        qkv = F.linear(x, self.w[f"blocks.{i}.attn_qkv.weight"])
        qkv = qkv.unflatten(-1, (HEADS, 3, width)).transpose(2, 3) if mixed else qkv.unflatten(-1, (3, HEADS, width))
        q, k, v = qkv.unbind(2)  # [B, L, H, W]
        if self.mistake == "k and v exchanged":
            k, v = v, k
        keys = k if self.mistake == "queries turned alone" else self.turned(k)
        size = D if self.mistake == "scores over D" else width
        scores = torch.einsum("blhw,bmhw->bhlm", self.turned(q), keys) / math.sqrt(size)
        if self.visible is not None:
            scores = scores.masked_fill(~self.visible, -math.inf)
        values = self.turned(v) if self.mistake == "values turned" else v
        if self.mistake == "causal":
            scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
        return torch.einsum("bhlm,bmhw->blhw", scores.softmax(-1), values).flatten(2)

    def turned(self, value: Tensor) -> Tensor:
        positions = torch.arange(value.shape[1]) if self.positions is None else self.positions
        angles = positions.double()[:, None] * self.w["rotary_emb.inv_freq"]  # [L, W/2]
        angles = {"other angles": angles.square(), "no positions": 0 * angles}.get(self.mistake, angles)
        cosine, sine = angles.cos()[:, None], angles.sin()[:, None]
        if self.mistake == "neighbours turned":
            first, second = value[..., ::2], value[..., 1::2]
            return torch.stack((first * cosine - second * sine, first * sine + second * cosine), -1).flatten(-2)
        first, second = value.chunk(2, -1)
        return torch.cat((first * cosine - second * sine, first * sine + second * cosine), -1)

    def head(self, h: Tensor, c: Tensor) -> Tensor:
        shift, scale = self.linear("output_layer.adaLN_modulation", c)[:, None].chunk(2, -1)
        if self.mistake == "last scale before shift":
            shift, scale = scale, shift
        last = self.modulated(h, "output_layer.norm_final", shift, scale)
        table = self.w["vocab_embed.embedding" if self.mistake == "tied head" else "output_layer.linear.weight"]
        return F.linear(
            last, table, None if self.mistake == "no bias of the head" else self.w["output_layer.linear.bias"]
        )


MISTAKES = (
    *("eps", "weight after the shift", "frequencies", "sines first", "no SiLU at the end", "two SiLUs at the end"),
    *("scale before shift", "MLP before attention", "no bias", "no second bias", "exact GELU", "heads before q, k, v"),
    *("neighbours turned", "values turned", "causal", "no weight", "weight twice", "mean kept", "scale alone"),
    *("weight beside the scale", "shift before the scale", "thousandths", "embedding scaled", "mask in front"),
    *("gates after tanh", "no gates", "SiLU in the MLP", "bfloat16", "last scale before shift", "tied head"),
    *("no bias of the head", "k and v exchanged", "other angles", "no positions", "queries turned alone"),
    "scores over D",
)
