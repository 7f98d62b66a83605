"""A textbook implementation of a training step, the baseline of `cedd bench train`.

The same network (adaLN transformer, rotary positions, dropout) and the same loss as the library's, in plain eager
PyTorch under bf16 autocast: all [B, L, V] outputs at once, a log-softmax over them, one optimizer step, one moving
average updated parameter by parameter. It shares no code with the library and is not deliberately slow.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class TextbookBlock(nn.Module):
    """Attention and MLP, each with its own modulation."""

    def __init__(self, width: int, heads: int, conditioning: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))
        self.modulation = nn.Linear(conditioning, 6 * width)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, x: Tensor, c: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        s1, k1, g1, s2, k2, g2 = self.modulation(c)[:, None].chunk(6, -1)
        h = self.norm1(x) * (1 + k1) + s1
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(h).chunk(3, -1))
        q, k = rotate(q, cosine, sine), rotate(k, cosine, sine)
        h = F.scaled_dot_product_attention(q.to(v), k.to(v), v).transpose(1, 2).flatten(2)
        x = x + g1 * F.dropout(self.out(h), self.dropout, self.training)
        h = self.norm2(x) * (1 + k2) + s2
        return x + g2 * F.dropout(self.mlp(h), self.dropout, self.training)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary positions."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cosine - b * sine, a * sine + b * cosine], -1)


class TextbookNetwork(nn.Module):
    """tokens [B, L], sigma [B] -> outputs [B, L, V]."""

    def __init__(self, vocab_size: int, length: int, width: int, depth: int, heads: int, dropout: float) -> None:
        super().__init__()
        conditioning = 128
        self.embedding = nn.Embedding(vocab_size + 1, width)
        self.time = nn.Sequential(
            nn.Linear(256, conditioning), nn.SiLU(), nn.Linear(conditioning, conditioning), nn.SiLU()
        )
        self.blocks = nn.ModuleList(TextbookBlock(width, heads, conditioning, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.modulation = nn.Linear(conditioning, 2 * width)
        self.head = nn.Linear(width, vocab_size)
        for layer in (self.modulation, self.head):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
        half = width // heads // 2
        angles = torch.arange(length)[:, None] * 10_000.0 ** -(torch.arange(half) / half)
        self.register_buffer("cosine", angles.cos())
        self.register_buffer("sine", angles.sin())

    def forward(self, x_t: Tensor, sigma: Tensor) -> Tensor:
        frequencies = torch.exp(-math.log(10_000) * torch.arange(128, device=sigma.device) / 128)
        angles = sigma[:, None] * frequencies
        c = self.time(torch.cat([angles.cos(), angles.sin()], -1))
        x = self.embedding(x_t)
        for block in self.blocks:
            x = block(x, c, self.cosine, self.sine)
        shift, scale = self.modulation(c)[:, None].chunk(2, -1)
        return self.head(self.norm(x) * (1 + scale) + shift)


def absorb_cedd_star(model: nn.Module, x0: Tensor, vocab_size: int) -> Tensor:
    """CEDD* on absorb with the log-linear schedule."""
    t = torch.rand(len(x0), device=x0.device) * (1 - 1e-3) + 1e-3
    sigma = -torch.log1p(-(1 - 1e-3) * t)
    masked = torch.rand(x0.shape, device=x0.device) < -torch.expm1(-sigma)[:, None]
    outputs = model(torch.where(masked, vocab_size, x0), sigma).float()
    picked = torch.log_softmax(outputs, -1).gather(-1, x0[..., None]).squeeze(-1)
    weight = torch.log(math.e + 0.3 / t)[:, None]
    return -(weight * picked * masked).sum() / x0.numel()


class TextbookStep:
    """One call is one training step on fresh tokens."""

    def __init__(self, model: TextbookNetwork, vocab_size: int, shape: tuple[int, int], device: torch.device) -> None:
        self.vocab_size, self.shape, self.device = vocab_size, shape, device
        self.model = model.to(device).train()
        self.average = [p.detach().clone() for p in self.model.parameters()]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, weight_decay=0.0)

    def __call__(self) -> Tensor:
        x0 = torch.randint(self.vocab_size, self.shape, device=self.device)
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda"):
            loss = absorb_cedd_star(self.model, x0, self.vocab_size)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        with torch.no_grad():
            for average, parameter in zip(self.average, self.model.parameters(), strict=True):
                average.mul_(0.9999).add_(parameter, alpha=1e-4)
        return loss.detach()
