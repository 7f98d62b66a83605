"""Where the time of a training step goes: host, device and kernels, on random tokens.

    python benchmarks/profile_training.py --shape 512x128

Prints the time of a step on a fixed batch, the time that the host takes to enqueue it, the peak memory, and the GPU
kernels by their time per step. It also times the attention backends alone, forward and backward, at that shape.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from command_line import command
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from cedd.apps.bench.options import read_shape
from cedd.apps.bench.train import synthetic_trainer
from cedd.device import pick_device
from cedd.training.config import PRESETS, BatchConfig, ProcessConfig

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


@dataclass(frozen=True)
class Arguments:
    """example: python benchmarks/profile_training.py --shape 512x128

    Profile one training step on a CUDA device.
    """

    shape: str = "512x128"
    """Sequences x positions."""
    method: str = "cedd-star"
    """Method; the network has random weights."""
    process: str = "absorb"
    """The noise."""
    vocab: int = 50257
    """Tokens of the vocabulary."""
    steps: int = 10
    """Number of steps to profile."""
    kernels: int = 30
    """Number of kernels to list, slowest first."""


def milliseconds(run: Callable[[], object], steps: int) -> tuple[float, float]:
    """(milliseconds until done, milliseconds to enqueue) per step."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        run()
    enqueued = time.perf_counter()
    torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - start) / steps, 1000 * (enqueued - start) / steps


def profile_step(arguments: Arguments, batch: int, length: int) -> None:
    """The step itself."""
    base = PRESETS["small"][1]
    process: Any = arguments.process
    config = replace(
        base,
        length=length,
        batch=BatchConfig(size=batch),
        method=arguments.method,
        process=ProcessConfig(process),
        device="cuda",
        out=Path("profile"),
    )
    trainer, noising = synthetic_trainer(config, arguments.vocab)
    start = time.perf_counter()
    ready = noising.batch(0)
    print(f"noising on the CPU: {1000 * (time.perf_counter() - start):.1f} ms")
    ready = ready.pin_memory().to(torch.device("cuda"))
    for _ in range(6):
        trainer.train_step.step(ready)
    done, enqueued = milliseconds(lambda: trainer.train_step.step(ready), arguments.steps)
    peak = torch.cuda.max_memory_allocated() / 2**30
    print(f"{arguments.shape}: {done:.2f} ms per step, {enqueued:.2f} ms to enqueue, peak {peak:.1f} GiB")
    print_kernels(lambda: [trainer.train_step.step(ready) for _ in range(3)], 3, arguments.kernels)


def print_kernels(run: Callable[[], object], times: int, most: int) -> None:
    """The device's kernels by time, for a `run` that repeats the same work this number of times."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    kernels = sorted(seen.key_averages(), key=lambda event: -event.self_device_time_total)
    total = sum(event.self_device_time_total for event in kernels)
    print(f"{total / 1000 / times:9.3f} ms on the device")
    for event in kernels[:most]:
        print(f"{event.self_device_time_total / 1000 / times:9.3f} ms {event.count / times:6.1f} x  {event.key[:100]}")


def time_attention(batch: int, length: int) -> None:
    """Time each attention backend alone."""
    qkv = torch.randn(batch, length, 3, 12, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn(batch, 12, length, 64, device="cuda", dtype=torch.bfloat16)

    def run() -> None:
        queries, keys, values = qkv.transpose(1, 3).unbind(2)
        F.scaled_dot_product_attention(queries, keys, values).backward(gradient)

    for name, backend in BACKENDS.items():
        with sdpa_kernel(backend):
            milliseconds(run, 5)
            print(f"attention by {name}: {milliseconds(run, 20)[0]:.3f} ms forward and backward")


def main(arguments: Arguments) -> None:
    """Attention alone, then all of a step."""
    shape = read_shape(arguments.shape)
    pick_device("cuda")  # or refuse: only a GPU's kernels are looked at
    time_attention(*shape)
    profile_step(arguments, *shape)


if __name__ == "__main__":
    sys.exit(command(__file__, Arguments, main))
