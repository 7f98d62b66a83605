"""Where the time of a call of the network goes while a batch is sampled: the kernels, on random weights.

    python benchmarks/profile_sampling.py --sampler first-hitting

Prints the seconds of a batch, the calls of the network, and the device's kernels by the time they take in a call,
decisions included. The network is that of `cedd bench sample`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import tyro
from profile_training import milliseconds, print_kernels

from cedd.bench.sample import CountingNetwork, _network
from cedd.process import PROCESSES
from cedd.samplers import GraphedNetwork, sample


@dataclass(frozen=True)
class Arguments:
    """Profile one batch on a CUDA device."""

    sampler: str = "analytic"
    method: str = "cedd-star"
    process: str = "absorb"
    shape: str = "64x128"
    steps: int = 1024
    vocab: int = 50257
    kernels: int = 30


def main(arguments: Arguments) -> None:
    """Time a batch, then profile one."""
    batch, length = (int(part) for part in arguments.shape.split("x"))
    process = PROCESSES[arguments.process](arguments.vocab)
    model = _network("small", process, length, torch.device("cuda"), 0)
    network = CountingNetwork(GraphedNetwork(model, batch, length))

    def draw() -> None:
        network.calls = 0
        how = {"sampler": arguments.sampler, "steps": arguments.steps, "generator": torch.Generator().manual_seed(0)}
        sample(network, process, (batch, length), method=arguments.method, **how)

    draw()  # records the graphs
    whole, enqueued = milliseconds(draw, 2)
    print(f"{arguments.shape}: {whole / 1000:.4f} s a batch, {enqueued / 1000:.4f} s to enqueue, {network.calls} calls")
    print_kernels(draw, network.calls, arguments.kernels)


if __name__ == "__main__":
    main(tyro.cli(Arguments))
