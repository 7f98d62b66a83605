"""Where the time of a network call goes while a batch is sampled, by kernel, with random weights.

    python benchmarks/profile_sampling.py --sampler first-hitting

Prints the seconds per batch, the number of network calls, the time of a call's matrix products alone, and the GPU
kernels by their time per call, decisions included. The network is that of `cedd bench sample`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from command_line import command
from profile_training import milliseconds, print_kernels

from cedd.apps.bench.options import read_shape
from cedd.apps.bench.sample import CountingNetwork, random_network
from cedd.device import pick_device
from cedd.models.kernels.gelu import product_with_gelu
from cedd.models.transformer import Transformer, TransformerConfig, config_from_preset
from cedd.process import PROCESSES
from cedd.samplers import GraphedNetwork, sample


@dataclass(frozen=True)
class Arguments:
    """example: python benchmarks/profile_sampling.py --sampler first-hitting --shape 64x128

    Profile one batch on a CUDA device.
    """

    sampler: str = "analytic"
    """Sampler, as in cedd sample."""
    method: str = "cedd-star"
    """Method; the network has random weights."""
    process: str = "absorb"
    """Process."""
    shape: str = "64x128"
    """Sequences x positions."""
    steps: int = 1024
    """Sampling steps."""
    vocab: int = 50257
    """Vocabulary size."""
    kernels: int = 30
    """Number of kernels to list, slowest first."""


def time_products(config: TransformerConfig, rows: int) -> None:
    """The products of all blocks but the last MLP's, which runs at few rows, each alone, on random numbers."""
    from kernel_times import recorded  # which needs the GPU's compiler

    width, inner, depth = config.width, config.mlp_ratio * config.width, config.depth
    products = {
        "q, k and v": (width, 3 * width, depth),
        "attention's output": (width, width, depth),
        "MLP, with the GELU": (width, inner, depth - 1),
        "MLP's output": (inner, width, depth - 1),
    }
    times, flops = 0.0, 0.0
    for name, (inputs, outputs, count) in products.items():
        x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
        weight = torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) * inputs**-0.5
        multiply = product_with_gelu if "GELU" in name else torch.nn.functional.linear
        time, work = recorded(lambda: multiply(x, weight, None)), 2e-9 * rows * inputs * outputs  # noqa: B023
        print(f"{count:3} x {name}: {1000 * time:.1f} us each, {work / time:.0f} TFLOP/s")
        times, flops = times + count * time, flops + count * work
    print(f"products of a call alone: {times:.3f} ms, {flops / times:.0f} TFLOP/s")


@torch.no_grad()
def main(arguments: Arguments) -> None:
    """Time a batch, then profile one."""
    (batch, length), device = read_shape(arguments.shape), pick_device("cuda")
    process = PROCESSES[arguments.process](arguments.vocab)
    sizes = {"vocab_size": process.vocab_size, "has_mask": process.has_mask, "length": length}
    model = random_network(config_from_preset("small", **sizes), device, 0)
    assert isinstance(model, Transformer)
    network = CountingNetwork(GraphedNetwork(model, batch, length))

    def draw() -> None:
        network.calls = 0
        how = {"sampler": arguments.sampler, "steps": arguments.steps, "generator": torch.Generator().manual_seed(0)}
        sample(network, process, (batch, length), method=arguments.method, **how)

    draw()  # records the graphs
    whole, enqueued = milliseconds(draw, 2)
    print(f"{arguments.shape}: {whole / 1000:.4f} s a batch, {enqueued / 1000:.4f} s to enqueue, {network.calls} calls")
    time_products(model.options, batch * length)
    print_kernels(draw, network.calls, arguments.kernels)


if __name__ == "__main__":
    sys.exit(command(__file__, Arguments, main))
