"""Shared by the examples: sequences that count upwards, a small network, and a training loop."""

import math

import torch
from torch import Tensor, nn

import cedd

V, L = 6, 8
ENTROPY = math.log(V) / L  # nats per token: the first token determines the others


def counting(number: int) -> Tensor:
    """Clean data [number, L]: 3 4 5 0 1 2 3 4."""
    return (torch.randint(V, (number, 1)) + torch.arange(L)) % V


def counts(x: Tensor) -> float:
    """The share of sequences that count upwards without an error."""
    return float((x.diff(dim=1) % V == 1).all(1).double().mean())


class Network(nn.Module):
    """(x_t [B, L], sigma [B]) -> [B, L, V]; the mask is token V of the input."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(L * (V + 1) + 1, width), nn.GELU(), nn.Linear(width, L * V))

    def forward(self, x_t: Tensor, sigma: Tensor) -> Tensor:
        """A multilayer perceptron over the whole sequence."""
        seen = nn.functional.one_hot(x_t, V + 1).flatten(1)
        return self.layers(torch.cat([seen, sigma[:, None]], 1).float()).view(-1, L, V)


def train(method: str | cedd.Method, process: cedd.TokenProcess, steps: int = 300) -> Network:
    """Train a network on batches of clean data."""
    torch.manual_seed(0)
    network = Network()
    optimizer = torch.optim.Adam(network.parameters(), lr=5e-3)
    for _ in range(steps):
        loss = cedd.loss(network, process, counting(128), method=method)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return network
