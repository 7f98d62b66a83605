"""`cedd bench sample`: the time of a sampling step with cedd and with a textbook implementation, on one network."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn

from cedd.apps.bench.options import BenchOptions, Say, peak_gibibytes
from cedd.apps.bench.textbook_sample import STEPS, textbook_sample
from cedd.device import model_device, pick_device
from cedd.methods import get_method
from cedd.models.architectures import build_network
from cedd.models.backbone import Backbone
from cedd.models.transformer_config import TransformerConfig, config_from_preset
from cedd.process import PROCESSES, TokenProcess, seeded_generator
from cedd.samplers import GraphedNetwork, get_sampler, sample, time_grid

Result = TypeVar("Result")


@dataclass(frozen=True)
class SampleRow:
    """One timed sampler. Our samplers run the whole grid, the textbook implementation `timed_steps` of it."""

    what: str
    sampler: str
    batch: int
    length: int
    steps: int
    timed_steps: int
    network_calls: int
    milliseconds_per_step: float
    seconds_per_batch: float
    gibibytes: float | None
    speedup: float | None = None
    """Speedup over the textbook sampler with the same number of steps (first-hitting: over all of its steps)."""


class CountingNetwork:
    """Counts the calls of a backbone."""

    def __init__(self, model: Any) -> None:
        self._model, self.head, self.calls = model, model.head, 0
        self.device = next(model.parameters()).device if isinstance(model, nn.Module) else model.device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def features(self, *inputs: torch.Tensor, **others: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self._model.features(*inputs, **others)


def random_network(config: TransformerConfig, device: torch.device, seed: int) -> Backbone:
    """A network with random weights everywhere, so that its outputs are as uneven as a trained one's."""
    torch.manual_seed(seed)
    model = build_network("transformer", asdict(config)).eval().requires_grad_(False)
    groups = model.parameter_groups()
    for matrix in (one for one in groups.head.values() if one.ndim == 2):
        nn.init.normal_(matrix, std=3 / config.width**0.5)
    for matrix in (one for one in groups.rest.values() if one.ndim == 2 and not one.any()):  # they start at zero
        nn.init.normal_(matrix, std=0.02)
    return model.to(device)


def _timed(work: Callable[[], Result], device: torch.device) -> tuple[Result, float]:
    """The result of a function, and its duration on the device in seconds."""
    on_cuda = device.type == "cuda"
    if on_cuda:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    start = time.perf_counter()
    result = work()
    if on_cuda:
        torch.cuda.synchronize(device)
    return result, time.perf_counter() - start


def _time_textbook(model: Backbone, process: str, shape: tuple[int, int], steps: int, timed: int) -> SampleRow:
    device = model_device(model)
    times = torch.linspace(1, 1e-5, steps + 1, dtype=torch.float64)
    vocab_size = model.vocab_size
    textbook_sample(model, process, vocab_size, shape, times[:3], device)
    _, seconds = _timed(lambda: textbook_sample(model, process, vocab_size, shape, times[: timed + 1], device), device)
    counts, each = (steps, timed, timed), seconds / timed
    return SampleRow(
        f"textbook {process}", "analytic", *shape, *counts, 1000 * each, each * steps, peak_gibibytes(device)
    )


def _time_ours(
    model: Backbone, process: TokenProcess, pair: str, sampler: str, shape: tuple[int, int], options: BenchOptions
) -> SampleRow:
    device = model_device(model)
    network: Any = model
    if device.type == "cuda":
        network = GraphedNetwork(model, *shape, compiled=options.compile in ("on", "graphs"))
    method, steps = pair.partition("/")[0], options.steps

    def draw() -> int:
        counting = CountingNetwork(network)
        sample(
            counting,
            process,
            shape,
            method=method,
            sampler=sampler,
            steps=steps,
            generator=seeded_generator(options.seed),
            deterministic=False,
            device=device,
        )
        return counting.calls

    if device.type == "cuda":
        draw()  # records the graphs
    calls, whole = _timed(draw, device)
    has_grid = "grid" not in get_sampler(sampler, get_method(method)).unused
    count = len(time_grid(process, steps)) - 1 if has_grid else calls
    return SampleRow(pair, sampler, *shape, count, count, calls, 1000 * whole / count, whole, peak_gibibytes(device))


def bench_sample(options: BenchOptions, say: Say = lambda _: None, *, textbook_steps: int = 20) -> list[SampleRow]:
    """A row for each shape, METHOD/PROCESS and sampler that can be combined, and one for the textbook of each shape.

    The textbook implementation also computes and draws the law of every position in float64. It is timed over
    `textbook_steps` of the same grid, because its cost per step is constant; ours over the whole grid.
    """
    device, rows = pick_device(options.device), list[SampleRow]()
    for shape in options.shapes:
        reference: dict[str, SampleRow] = {}
        for pair in options.methods:
            name = pair.partition("/")[2] or "absorb"
            process = PROCESSES[name](options.vocab_size)
            get_method(pair.partition("/")[0]).check(process)
            sizes = {"vocab_size": process.vocab_size, "has_mask": process.has_mask, "length": shape[1]}
            model = random_network(config_from_preset(options.preset, **sizes), device, options.seed)
            if options.textbook and name in STEPS and name not in reference:
                timed = min(textbook_steps, options.steps)
                reference[name] = _time_textbook(model, name, shape, options.steps, timed)
                rows.append(reference[name])
                say(_line(rows[-1]))
            for sampler in options.samplers:
                method = get_method(pair.partition("/")[0])
                try:
                    get_sampler(sampler, method).check(method, process)
                except ValueError:
                    continue
                row = _time_ours(model, process, pair, sampler, shape, options)
                against = reference.get(name, reference.get("absorb"))
                if against is not None:
                    row = replace(row, speedup=against.seconds_per_batch / row.seconds_per_batch)
                rows.append(row)
                say(_line(row))
    return rows


def _line(row: SampleRow) -> str:
    speed = "" if row.speedup is None else f", {row.speedup:.1f}x"
    return (
        f"{row.what} {row.sampler} {row.batch}x{row.length}: {row.milliseconds_per_step:.2f} ms per step, "
        f"{row.seconds_per_batch:.2f} s in all, {row.network_calls} network calls{speed}"
    )
