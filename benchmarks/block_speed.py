"""Block diffusion against full diffusion in one run: a training step, and sampling with a cache.

    python benchmarks/block_speed.py
    python benchmarks/block_speed.py --preset tiny --vocab-size 99 --shape 4x32 --length 64 --block 8 --steps 3

Both use the network, complementary masks and times of a preset, and random tokens. A training step in blocks reads
three tokens for every two of a step without blocks. Sampling takes the same number of network calls per token, with
first-hitting and with analytic.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from command_line import command

from cedd.apps.bench.options import machine, peak_gibibytes, read_shape
from cedd.apps.bench.sample import random_network
from cedd.apps.bench.train import NumberTokenizer, one_by_one, our_step
from cedd.device import pick_device
from cedd.methods import get_method
from cedd.models.folder import ModelFolder
from cedd.models.loaded_model import LoadedModel
from cedd.process import PROCESSES
from cedd.samplers import SamplingOptions
from cedd.training.config import PRESETS, ProcessConfig


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """example: python benchmarks/block_speed.py --block 16 --shape 512x128 --length 1024

    Time a training step and sampling with and without blocks.
    """

    method: str = "cedd-star"
    """Method, as in cedd train."""
    process: str = "absorb"
    """Process, as in cedd train."""
    block: int = 16
    """Tokens per block."""
    shape: str = "512x128"
    """Sequences (each twice, with complementary masks) and tokens of a training step."""
    length: int = 1024
    """Tokens to sample, which full diffusion reads at once."""
    batches: tuple[int, ...] = (1,)
    """Texts drawn at once."""
    preset: str = "small-fast"
    """Preset, as in cedd train."""
    time_input: str = "none"
    """Time input, as --model.time-input in cedd train."""
    vocab_size: int = 50257
    """Tokens of the vocabulary."""
    steps: int = 20
    """Timed training steps."""
    warmup: int = 8
    """Training steps before that."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:1."""
    json: bool = False
    """Print JSON."""

    def check(self) -> None:
        for name in ("block", "length", "vocab_size", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1 (got {getattr(self, name)})")
        if self.preset not in PRESETS:
            raise ValueError(f"--preset: invalid choice: {self.preset!r} (choose from {', '.join(PRESETS)})")


def training(arguments: Arguments) -> list[dict[str, Any]]:
    """A training step without and with blocks."""
    usual, (batch, length) = PRESETS[arguments.preset][1], read_shape(arguments.shape)
    config = replace(
        usual,
        method=arguments.method,
        process=ProcessConfig(arguments.process),
        model=replace(usual.model, time_input=arguments.time_input),
        length=length,
        batch=replace(usual.batch, size=batch, complementary=True),
        device=arguments.device,
        out=Path("bench"),
    )
    blocks = replace(config, block=arguments.block)
    blocks.check()
    named = {"training step": our_step(config, arguments.vocab_size)}
    named["training step in blocks"] = our_step(blocks, arguments.vocab_size)
    rows = one_by_one(named, config, arguments.steps, arguments.warmup)
    return [
        {"what": row.what, "batch": batch, "milliseconds": row.milliseconds, "spread": row.spread, "gib": row.gibibytes}
        for row in rows
    ]


def sampling(arguments: Arguments) -> list[dict[str, Any]]:
    """Texts without and with blocks, one network call per token."""
    device, length, rows = pick_device(arguments.device), arguments.length, list[dict[str, Any]]()
    process, tokenizer = PROCESSES[arguments.process](arguments.vocab_size), NumberTokenizer(arguments.vocab_size)
    options = replace(PRESETS[arguments.preset][1].model, time_input=arguments.time_input)
    model = random_network(options.build(process, length, causal=False), device, seed=0)
    samplers = ("analytic",) if process.can_shuffle else ("analytic", "first-hitting")
    for batch in arguments.batches:
        for sampler in samplers:
            for block in (None, arguments.block):
                method = get_method(arguments.method).in_blocks(block)
                loaded = LoadedModel(ModelFolder(model, process, method, tokenizer, length), device)
                steps = None if sampler == "first-hitting" else block or length
                how = SamplingOptions(sampler=sampler, steps=steps, seed=0, deterministic=False)
                _, seconds = [_seconds(loaded, (batch, length), how, device) for _ in range(2)]
                rows.append(
                    {
                        "what": f"sampling, {sampler}{' in blocks' if block else ''}",
                        "batch": batch,
                        "milliseconds": 1000 * seconds,
                        "tokens_per_second": batch * length / seconds,
                        "gib": peak_gibibytes(device),
                    }
                )
    return rows


def _seconds(model: LoadedModel, shape: tuple[int, int], options: SamplingOptions, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    start = time.perf_counter()
    model.draw(shape, options)  # to the host
    return time.perf_counter() - start


def main(arguments: Arguments) -> None:
    """Print the rows, and how they compare."""
    arguments.check()
    rows = [*training(arguments), *sampling(arguments)]
    for full, blocks in zip(rows[::2], rows[1::2], strict=True):
        blocks["times"] = blocks["milliseconds"] / full["milliseconds"]
    if arguments.json:
        print(json.dumps({"machine": machine(arguments.device), "rows": rows}))
        return
    print(f"{machine(arguments.device)}; blocks of {arguments.block}, {arguments.length} tokens sampled")
    for row in rows:
        numbers = [f"batch {row['batch']}", f"{row['milliseconds']:,.1f} ms"]
        numbers += [f"{row['tokens_per_second']:,.1f} tokens/s"] if "tokens_per_second" in row else []
        numbers += [] if row["gib"] is None else [f"{row['gib']:.2f} GiB"]
        numbers += [f"{row['times']:.3f} times the time of the row above"] if "times" in row else []
        print(f"{row['what']}: {', '.join(numbers)}", flush=True)


if __name__ == "__main__":
    sys.exit(command(__file__, Arguments, main))
