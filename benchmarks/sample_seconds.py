"""How long `cedd sample` takes with its start, alternated with another version, and where the time goes.

    python benchmarks/sample_seconds.py                                       # the version checked out here
    python benchmarks/sample_seconds.py --other ../before --turns 3 --seeds 1 2

Each run is a separate process with the defaults of the model. For every version it prints the seconds of a whole run,
and of one that writes two tokens in one step, which is the start; both with their CPU time and the CPU time of other
programs meanwhile (Linux), because seconds on a shared machine depend on it. Then it times one call of the network of
the version checked out here, and its matrix products alone.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from command_line import command
from torch import nn

from cedd.cli.inputs import DEFAULT_MODEL
from cedd.models.locate import packaged
from cedd.models.transformer import Transformer
from cedd.tasks import load

HERE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Arguments:
    """example: python benchmarks/sample_seconds.py --other ../before --turns 3 --seeds 1 2

    Time `cedd sample`.
    """

    model: str | None = None
    """A run's folder; by default what each version's `cedd sample` takes."""
    other: Path | None = None
    """The checkout of another version, which takes turns with this one."""
    turns: int = 2
    """Turns per version."""
    seeds: tuple[int, ...] = (1,)
    """Seeds; each is one call per turn."""


@dataclass(frozen=True)
class Seconds:
    """Times of one process."""

    wall: float
    cpu: float
    others: float | None
    """CPU time of other programs meanwhile."""


def timed(checkout: Path, words: list[str]) -> Seconds:
    """A run of `cedd` as it is in a checkout."""
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src")}
    busy, before, began = _busy(), _children(), time.perf_counter()
    subprocess.run([sys.executable, "-m", "cedd", *words], env=environment, stdout=subprocess.DEVNULL, check=True)
    wall, cpu, busy_after = time.perf_counter() - began, _children() - before, _busy()
    return Seconds(wall, cpu, None if busy is None or busy_after is None else max(0.0, busy_after - busy - cpu))


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _busy() -> float | None:
    """CPU seconds of all programs since the machine was started."""
    if not (file := Path("/proc/stat")).is_file():
        return None
    user, nice, system, *_ = map(int, file.read_text().split("\n", 1)[0].split()[1:])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def summary(runs: list[Seconds]) -> dict[str, float | list[float]]:
    """Medians, and all of the seconds."""
    others = [run.others for run in runs if run.others is not None]
    return {
        "seconds": round(statistics.median(run.wall for run in runs), 2),
        "cpu_seconds": round(statistics.median(run.cpu for run in runs), 2),
        **({"cpu_seconds_of_others": round(statistics.median(others), 2)} if others else {}),
        "all_seconds": [round(run.wall, 2) for run in runs],
    }


def least(function: Callable[[], object], times: int = 10) -> float:
    """Milliseconds, the least of several."""
    found = list[float]()
    for _ in range(times):
        began = time.perf_counter()
        function()
        found.append(time.perf_counter() - began)
    return 1000 * min(found)


@torch.no_grad()
def call(model: str | Path, seed: int) -> dict[str, float]:
    """The calls of the network that a text takes; and a call for one text, two tokens of which are drawn."""
    loaded = load(model, "cpu")
    network, length, calls = loaded.model, loaded.length, list[int]()
    assert isinstance(network, Transformer)
    counting = network.backbone.register_forward_pre_hook(lambda module, given: calls.append(1))
    loaded.generate(1, seed=seed)
    counting.remove()
    x, sigma, where = torch.zeros(1, length, dtype=torch.int64), torch.ones(1), torch.tensor([0, length // 2])
    last = f"{len(network.backbone.blocks) - 1}.mlp."  # which runs at two rows
    linear = [
        module
        for name, module in network.backbone.blocks.named_modules()
        if isinstance(module, nn.Linear) and not name.startswith(last)
    ]
    products = sum(least(partial(module, torch.randn(length, module.in_features))) for module in linear)
    flops = sum(2e-6 * length * module.weight.numel() for module in linear)
    return {
        "calls": len(calls),
        "milliseconds": round(least(lambda: network.features(x, sigma, where=where)), 1),
        "of_products": round(products, 3),
        "gigaflops_a_second": round(flops / products, 1),
        "threads": torch.get_num_threads(),
    }


def main(arguments: Arguments) -> int:
    """Print one JSON object."""
    checkouts = {"here": HERE, **({"other": arguments.other.resolve()} if arguments.other is not None else {})}
    whole, start = ({name: list[Seconds]() for name in checkouts} for _ in range(2))
    for _ in range(arguments.turns):
        for name, checkout in checkouts.items():
            words = ["sample", *([] if arguments.model is None else [arguments.model]), "--device", "cpu"]
            whole[name] += [timed(checkout, [*words, "--seed", str(seed)]) for seed in arguments.seeds]
            start[name].append(timed(checkout, [*words, "--length", "2", "--steps", "1"]))
    found = {name: {"sample": summary(whole[name]), "start": summary(start[name])} for name in checkouts}
    print(json.dumps({**found, "call": call(arguments.model or packaged(DEFAULT_MODEL), arguments.seeds[0])}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(command(__file__, Arguments, main))
