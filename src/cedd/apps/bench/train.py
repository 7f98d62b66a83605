"""`cedd bench train`: the time of a step of the training loop on random tokens, and of a textbook implementation."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from cedd.apps.bench.options import BenchOptions, Say, peak_gibibytes
from cedd.apps.bench.textbook_train import TextbookNetwork, TextbookStep
from cedd.data.batches import Prefetcher
from cedd.data.packing import PackedDataset
from cedd.data.tokenizers import ByteTokenizer
from cedd.data.training_data import TrainingData
from cedd.device import pick_device
from cedd.storage import JSONObject
from cedd.training.config import PRESETS, BatchConfig, ProcessConfig, TrainConfig
from cedd.training.distributed import Ranks
from cedd.training.loop import Trainer, switch_threads_often
from cedd.training.noising import NoisingSampler

Step = Callable[[], object]


@dataclass(frozen=True)
class BenchRow:
    """One timed training step."""

    what: str
    batch: int
    length: int
    milliseconds: float
    spread: float
    """Half the range between the slowest and the fastest third of the steps, in milliseconds."""
    tokens_per_second: float
    gibibytes: float | None
    speedup: float | None = None


class NumberTokenizer(ByteTokenizer):
    """Random tokens have no text; only the size of their vocabulary matters here."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size


def random_data(config: TrainConfig, vocab_size: int) -> TrainingData:
    """Random tokens in place of a text."""
    length, blocks = config.length, max(4 * config.batch.size, 64)
    tokens = np.random.default_rng(config.seed).integers(vocab_size, size=blocks * length)
    header: JSONObject = {"length": length, "blocks": blocks, "vocab_size": vocab_size}
    dataset = PackedDataset(tokens.astype(np.uint32), header)
    return TrainingData(NumberTokenizer(vocab_size), dataset, dataset)


def timed(step: Step, steps: int, warmup: int, device: torch.device) -> list[float]:
    """Milliseconds of each step, read from the device's clock once at the end."""
    for _ in range(warmup):
        step()
    if device.type != "cuda":
        return [_milliseconds(step) for _ in range(steps)]
    torch.cuda.synchronize(device)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize(device)
    return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]


def timed_in_turn(named: Mapping[str, Step], steps: int, warmup: int) -> dict[str, list[float]]:
    """Milliseconds of each step of several functions, called in turn, so that other load on the machine affects all of
    them equally."""
    rounds = [{name: _milliseconds(step) for name, step in named.items()} for _ in range(warmup + steps)]
    return {name: [times[name] for times in rounds[warmup:]] for name in named}


def _milliseconds(step: Step) -> float:
    start = time.perf_counter()
    step()
    return 1000 * (time.perf_counter() - start)


def bench_row(what: str, config: TrainConfig, times: Sequence[float], gibibytes: float | None = None) -> BenchRow:
    """The median, and the spread of the middle two thirds."""
    ordered, third, tokens = sorted(times), len(times) // 6, config.batch.size * config.length
    median = ordered[len(times) // 2]
    spread = (ordered[-1 - third] - ordered[third]) / 2
    return BenchRow(what, config.batch.size, config.length, median, spread, 1000 * tokens / median, gibibytes)


def _fresh(device: torch.device) -> None:
    gc.collect()
    torch.compiler.reset()
    if device.type == "cuda":
        torch.cuda.init()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def synthetic_trainer(config: TrainConfig, vocab_size: int) -> tuple[Trainer, NoisingSampler]:
    """The loop's own trainer on random tokens, and its batches."""
    ranks = Ranks(0, 1, pick_device(config.device))
    trainer = Trainer(config, ranks, Console(quiet=True), data=random_data(config, vocab_size))
    return trainer, trainer.noising()


@contextmanager
def our_step(config: TrainConfig, vocab_size: int) -> Iterator[Step]:
    """The loop's own step, with its prefetcher."""
    trainer, noising = synthetic_trainer(config, vocab_size)
    with Prefetcher(noising, trainer.ranks.device) as batches:
        yield lambda: trainer.train_step.step(next(batches))


@contextmanager
def textbook_step(config: TrainConfig, vocab_size: int) -> Iterator[Step]:
    """The textbook's step."""
    model = config.model
    network = TextbookNetwork(vocab_size, config.length, model.width, model.depth, model.heads, model.dropout)
    yield TextbookStep(network, vocab_size, (config.batch.size, config.length), pick_device(config.device))


SMOLLM2 = {"width": 576, "depth": 30, "heads": 9, "key_heads": 3, "mlp_width": 1536}
"""Sizes of SmolLM2-135M."""


def llama(preset: str, length: int) -> JSONObject:
    """The arguments of an autoregressive Llama-type network, which diffusion methods adapt."""
    model = PRESETS[preset][1].model
    sizes = {"width": model.width, "depth": model.depth, "heads": model.heads, "key_heads": model.heads}
    sizes = SMOLLM2 if preset == "small" else {**sizes, "mlp_width": 8 * model.width // 3}
    own = {"head_width": sizes["width"] // sizes["heads"], "length": length, "tied": True}
    return {**sizes, **own, "attention": "causal", "mask_row": 0}


TEXTBOOK = "textbook cedd-star/absorb"


def bench_train(options: BenchOptions, say: Say = lambda _: None) -> list[BenchRow]:
    """A row for every shape and method, and one for the textbook step of each shape.

    On a GPU, whose peak memory is measured too, they are timed one after the other. On a CPU, where other processes
    change the speed, their steps alternate.
    """
    rows: list[BenchRow] = []
    switch_threads_often()
    measure = one_by_one if pick_device(options.device).type == "cuda" else _in_turn
    for batch, length in options.shapes:
        config = replace(
            PRESETS[options.preset][1],
            length=length,
            batch=BatchConfig(size=batch, complementary=options.complementary),
            device=options.device,
            compile=options.compile,
            precision=options.precision,
            seed=options.seed,
            out=Path("bench"),
        )
        named: dict[str, AbstractContextManager[Step]] = {}
        if options.textbook:
            named[TEXTBOOK] = textbook_step(config, options.vocab_size)
        for pair in options.methods:
            method, process, block = [*pair.split("/"), "", ""][:3]
            chosen = replace(config, method=method, process=ProcessConfig(process or "absorb"))
            chosen = replace(chosen, block=int(block) if block else None)
            if options.architecture == "llama":
                chosen = replace(chosen, architecture="llama", architecture_arguments=llama(options.preset, length))
            chosen.check()
            named[pair] = our_step(chosen, options.vocab_size)
        measured = measure(named, config, options.steps, options.warmup)
        reference = measured[0].milliseconds if options.textbook else None
        for row in measured:
            faster = None if reference is None or row.what == TEXTBOOK else reference / row.milliseconds
            rows.append(replace(row, speedup=faster))
            say(f"{row.what} {batch}x{length}: {row.milliseconds:.1f} ms")
    return rows


def one_by_one(
    named: Mapping[str, AbstractContextManager[Step]], config: TrainConfig, steps: int, warmup: int
) -> list[BenchRow]:
    """Time each with its peak memory, after the previous one has been freed."""
    device, rows = pick_device(config.device), list[BenchRow]()
    for what, opened in named.items():
        _fresh(device)
        enough = (max(3, steps // 4), min(3, warmup)) if what == TEXTBOOK else (steps, warmup)
        with opened as step:
            rows.append(bench_row(what, config, timed(step, *enough, device), peak_gibibytes(device)))
        del step  # also frees the network
    return rows


def _in_turn(
    named: Mapping[str, AbstractContextManager[Step]], config: TrainConfig, steps: int, warmup: int
) -> list[BenchRow]:
    _fresh(pick_device(config.device))
    with ExitStack() as opened:
        ready = {what: opened.enter_context(step) for what, step in named.items()}
        return [bench_row(what, config, times) for what, times in timed_in_turn(ready, steps, warmup).items()]
