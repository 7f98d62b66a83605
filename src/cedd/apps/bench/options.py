"""Options of timing, and a description of the machine."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from cedd.device import pick_device
from cedd.training.config import PrecisionName

Say = Callable[[str], object]
MOST_POSITIONS = 1 << 24
"""Largest number of positions of a shape."""


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """The rows to time: every shape with every METHOD/PROCESS, and the textbook implementation for each shape."""

    shapes: Sequence[tuple[int, int]]
    """Sequences and positions."""
    methods: Sequence[str]
    """METHOD/PROCESS, or METHOD/PROCESS/BLOCK with blocks of BLOCK tokens."""
    steps: int
    samplers: Sequence[str] = ("analytic", "first-hitting")
    """Samplers, each timed with every METHOD/PROCESS that it supports."""
    preset: str = "small"
    architecture: Literal["transformer", "llama"] = "transformer"
    """The network of the training step: the preset's, or a Llama-type one adapted from an autoregressive one."""
    vocab_size: int = 50257
    textbook: bool = True
    complementary: bool = False
    """Put every sequence into the batch twice, with complementary masks."""
    warmup: int = 8
    compile: Literal["auto", "off", "on", "graphs"] = "auto"
    precision: PrecisionName = "auto"
    device: str = "cpu"
    seed: int = 0


def machine(device: str) -> str:
    """A description of the machine."""
    chosen = pick_device(device)
    name = torch.cuda.get_device_name(chosen) if chosen.type == "cuda" else f"{chosen.type}, {platform.machine()}"
    threads = torch.get_num_threads()
    return f"{name}, {threads} thread{'s' * (threads != 1)}, torch {torch.__version__}"


def peak_gibibytes(device: torch.device) -> float | None:
    """Peak of allocated memory since the last reset, on CUDA."""
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None


def read_shape(text: str) -> tuple[int, int]:
    """The sequences and tokens of a shape such as 32x128."""
    try:
        batch, length = (int(part) for part in text.lower().split("x"))
    except ValueError:
        raise ValueError(f"--shapes must be SEQUENCESxTOKENS, such as 32x128 (got {text!r})") from None
    if batch < 1 or length < 1:
        raise ValueError(f"--shapes must have at least one sequence and one token (got {text!r})")
    if batch * length > MOST_POSITIONS:
        raise ValueError(f"--shapes must have at most {MOST_POSITIONS:,} tokens (got {text}: {batch * length:,})")
    return batch, length
