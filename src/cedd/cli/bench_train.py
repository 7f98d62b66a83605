"""The training half of `cedd bench`: the loop's own step on random tokens, and a textbook's in one run."""

from __future__ import annotations

import gc
import itertools
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from cedd.cli.textbook import load_textbook
from cedd.data import ByteTokenizer, PackedDataset, Prefetcher, TrainingData
from cedd.data.batches import BatchSampler
from cedd.training.config import PRESETS, BatchConfig, ProcessConfig, TrainConfig
from cedd.training.distributed import Ranks, pick_device
from cedd.training.loop import Trainer, share_the_interpreter
from cedd.training.noising import NoisingSampler


@dataclass(frozen=True)
class BenchRow:
    """One timed thing."""

    what: str
    batch: int
    length: int
    milliseconds: float
    spread: float
    """Half the range between the slowest and the fastest third of the steps, in milliseconds."""
    tokens_per_second: float
    gibibytes: float | None
    speedup: float | None = None


class _Numbers(ByteTokenizer):
    """Random tokens have no text; only the size of their vocabulary matters here."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size


class _SyntheticTrainer(Trainer):
    """The trainer on random tokens: everything but reading data and writing files."""

    vocab_size: int = 50257

    def _prepare_data(self) -> TrainingData:
        length, blocks = self.config.length, max(4 * self.config.batch.size, 64)
        tokens = np.random.default_rng(self.config.seed).integers(self.vocab_size, size=blocks * length)
        header: dict[str, Any] = {"length": length, "blocks": blocks, "vocab_size": self.vocab_size}
        dataset = PackedDataset(tokens.astype(np.uint32), header)
        return TrainingData(_Numbers(self.vocab_size), dataset, dataset)


def machine(device: str) -> str:
    """What the figures were measured on."""
    chosen = pick_device(device)
    name = torch.cuda.get_device_name(chosen) if chosen.type == "cuda" else f"{chosen.type}, {platform.machine()}"
    return f"{name}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def timed(step: Callable[[], object], steps: int, warmup: int, device: torch.device) -> tuple[float, float]:
    """Milliseconds a step (median), and the spread of the middle two thirds; the device is waited for each time
    only to read its clock, at the end."""
    for _ in range(warmup):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        events[0].record()
        for event in events[1:]:
            step()
            event.record()
        torch.cuda.synchronize(device)
        times = sorted(a.elapsed_time(b) for a, b in itertools.pairwise(events))
    else:
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            step()
            times.append(1000 * (time.perf_counter() - start))
        times.sort()
    third = len(times) // 6
    return times[len(times) // 2], (times[-1 - third] - times[third]) / 2


def _peak(device: torch.device) -> float | None:
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None


def _fresh(device: torch.device) -> None:
    gc.collect()
    torch.compiler.reset()
    if device.type == "cuda":
        torch.cuda.init()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def synthetic_trainer(config: TrainConfig, vocab_size: int) -> tuple[Trainer, NoisingSampler]:
    """The loop's own trainer on random tokens, and its batches."""
    kind = type("_Synthetic", (_SyntheticTrainer,), {"vocab_size": vocab_size})
    trainer: Trainer = kind(config, Ranks(0, 1, pick_device(config.device)), Console(quiet=True))
    sampler = BatchSampler(trainer.data.train, config.batch.size, seed=config.seed)
    return trainer, NoisingSampler(sampler, trainer.method, trainer.process, config.batch)


def time_ours(config: TrainConfig, vocab_size: int, steps: int, warmup: int, label: str) -> BenchRow:
    """The loop's own step, with its prefetcher."""
    device = pick_device(config.device)
    _fresh(device)
    trainer, noising = synthetic_trainer(config, vocab_size)
    with Prefetcher(noising, device) as batches:
        milliseconds, spread = timed(lambda: trainer.step(next(batches)), steps, warmup, device)
    tokens = config.batch.size * config.length
    return BenchRow(
        label, config.batch.size, config.length, milliseconds, spread, 1000 * tokens / milliseconds, _peak(device)
    )


def time_textbook(config: TrainConfig, vocab_size: int, steps: int, warmup: int, method: str) -> BenchRow | None:
    """The textbook's step, where the source tree is at hand."""
    textbook = load_textbook("train")
    if textbook is None:
        return None
    device = pick_device(config.device)
    _fresh(device)
    model = config.model
    step = textbook.TextbookStep(
        vocab_size,
        config.batch.size,
        config.length,
        model.width,
        model.depth,
        model.heads,
        method,
        str(device),
        model.dropout,
    )
    milliseconds, spread = timed(step, steps, warmup, device)
    tokens = config.batch.size * config.length
    label = f"textbook {method}/absorb"
    return BenchRow(
        label, config.batch.size, config.length, milliseconds, spread, 1000 * tokens / milliseconds, _peak(device)
    )


def bench_train(
    *,
    preset: str,
    shapes: Sequence[tuple[int, int]],
    methods: Sequence[str],
    vocab_size: int,
    textbook: bool,
    steps: int,
    warmup: int,
    compile_mode: str,
    device: str,
    seed: int,
    say: Callable[[str], object],
) -> list[BenchRow]:
    """A row for every shape and method, and one for the textbook step of each shape."""
    rows: list[BenchRow] = []
    share_the_interpreter()
    base = PRESETS[preset][1]
    for batch, length in shapes:
        config = replace(
            base,
            length=length,
            batch=BatchConfig(size=batch),
            device=device,
            compile=compile_mode,  # pyright: ignore[reportArgumentType]
            seed=seed,
            out=Path("bench"),
        )
        reference: BenchRow | None = None
        if textbook:
            reference = time_textbook(config, vocab_size, max(3, steps // 4), min(3, warmup), "cedd-star")
            if reference is not None:
                rows.append(reference)
                say(f"{reference.what} {batch}x{length}: {reference.milliseconds:.1f} ms")
        for pair in methods:
            method, _, process = pair.partition("/")
            chosen = replace(config, method=method, process=ProcessConfig(process or "absorb"))  # pyright: ignore
            row = time_ours(chosen, vocab_size, steps, warmup, pair)
            if reference is not None:
                row = replace(row, speedup=reference.milliseconds / row.milliseconds)
            rows.append(row)
            say(f"{row.what} {batch}x{length}: {row.milliseconds:.1f} ms")
    return rows
