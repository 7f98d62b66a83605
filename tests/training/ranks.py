"""Distributed training with two processes: what each one runs, and how they are started.

They compute in float64, where summation order matters little: a difference above 1e-9 is an error.
"""

import errno
import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor

import cedd.training.loop
import cedd.training.time_limit
from cedd.data.batches import BatchSampler
from cedd.losses import NoisyBatch
from cedd.models.backbone import Backbone
from cedd.models.transformer import Transformer
from cedd.training.config import TrainConfig, from_json, to_json
from cedd.training.distributed import (
    FirstRankFailed,
    LossModule,
    Ranks,
    Strategy,
    distribute,
    gather_full,
    joined_ranks,
    without_sync,
)
from cedd.training.loop import Hooks, NonFiniteLoss, Trainer
from cedd.training.noising import NoisingSampler
from cedd.training.time_limit import TimeLimit
from tests.training.processes import POINTS, start, wait
from tests.training.runs import ALONE, Watching


@contextmanager
def double_precision() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def together(scenario: Callable[..., None], config: TrainConfig, *arguments: Any, world_size: int = 2) -> list[int]:
    """Run scenario(ranks, config, *arguments) in `world_size` processes and return their exit codes."""
    port = free_port()
    children = [
        start(_joined, rank, world_size, port, scenario, to_json(config), arguments) for rank in range(world_size)
    ]
    return [wait(child) for child in children]


def _joined(
    rank: int, world_size: int, port: int, scenario: Callable[..., None], values: dict[str, Any], arguments: Any
) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error", FutureWarning)
    cedd.training.loop.plot_log = lambda folder: None
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(world_size))
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    with joined_ranks("cpu") as ranks, double_precision():
        scenario(ranks, from_json(TrainConfig, values), *arguments)


# Scenarios


def gradients(ranks: Ranks, config: TrainConfig, strategy: Strategy, output: Path) -> None:
    """Save the gathered gradient of one step of a network without zero-initialized weights."""
    trainer = Trainer(config, ALONE, Console(quiet=True))  # only its data and process are used
    torch.manual_seed(5)
    model = Transformer.from_config(trainer.state.model.config())
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    module = distribute(LossModule(model, trainer.method), strategy)
    sampler = BatchSampler(trainer.data.train, config.batch.size, rank=ranks.rank, world_size=ranks.world_size)
    parts = NoisingSampler(sampler, trainer.method, trainer.process, config.batch).batch(3).parts
    for index, part in enumerate(parts):
        with without_sync(module, index == len(parts) - 1):
            (module(part) / len(parts)).backward()
    found = {name: gather_full(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    assert len(found) == len(list(model.parameters()))
    if ranks.is_first:
        save_file(found, output)


def train_together(ranks: Ranks, config: TrainConfig, output: Path | None = None) -> None:
    """Train, and save the gathered state."""
    trainer = Trainer(config, ranks, Console(quiet=True))
    trainer.run()
    held = {name: gather_full(tensor).contiguous() for name, tensor in trainer.state.tensors().items()}
    if ranks.is_first and output is not None:
        save_file(held, output)


def train_and_die(ranks: Ranks, config: TrainConfig, point: str) -> None:
    """The first rank kills itself in its second save."""
    if ranks.is_first:
        POINTS[point](2)
    Trainer(config, ranks, Console(quiet=True)).run()


def train_until_signal(ranks: Ranks, config: TrainConfig, output: Path) -> None:
    """Only the last rank receives a signal to stop, during step 3; each rank writes how it ended."""

    def stop(step: int) -> None:
        if step == 3 and ranks.rank == ranks.world_size - 1:
            signal.raise_signal(signal.SIGTERM)

    result = Trainer(config, ranks, Console(quiet=True), Watching(stop)).run()
    (output / f"rank{ranks.rank}").write_text(f"{result.reason} {result.step}")


def train_with_bad_last_rank(ranks: Ranks, config: TrainConfig, output: Path) -> None:
    """The last rank's loss becomes NaN in step 3; each rank writes how it ended."""
    healthy = LossModule.forward
    trainer = Trainer(config, ranks, Console(quiet=True))

    def forward(module: LossModule, batch: NoisyBatch) -> Tensor:
        spoiled = trainer.state.step == 2 and ranks.rank == ranks.world_size - 1
        return healthy(module, batch) * (float("nan") if spoiled else 1.0)

    LossModule.forward = forward  # type: ignore[method-assign]
    try:
        ending = str(trainer.run().step)
    except NonFiniteLoss as error:
        ending = str(error).partition(";")[0]
    (output / f"rank{ranks.rank}").write_text(ending)


def train_with_bounds(ranks: Ranks, config: TrainConfig, output: Path) -> None:
    """Only the first rank measures bounds, which stop improving; each rank writes how it ended."""

    class Scripted(Hooks):
        def evaluate(self, trainer: Trainer, model: Backbone) -> float:
            assert trainer.ranks.is_first
            assert not any(hasattr(parameter, "full_tensor") for parameter in model.parameters())
            return [3.0, 2.0, 2.5, 2.5, 1.0, 1.0][trainer.state.step // 2 - 1]

    result = Trainer(config, ranks, Console(quiet=True), Scripted()).run()
    (output / f"rank{ranks.rank}").write_text(f"{result.reason} {result.step} {result.bound}")


def train_in_time(ranks: Ranks, config: TrainConfig, output: Path) -> None:
    """As many steps as fit in a minute, at most 15, although the second rank's clock runs far too fast; each rank
    writes its number of steps."""
    speed = 1e6**ranks.rank
    cedd.training.time_limit.time = SimpleNamespace(monotonic=lambda: speed * time.monotonic())  # type: ignore[attr-defined]
    result = Trainer(config, ranks, Console(quiet=True), TimeLimit(60.0, first=2, every=5, most=15)).run()
    (output / f"rank{ranks.rank}").write_text(str(result.step))


def train_where_first_rank_fails(ranks: Ranks, config: TrainConfig, place: str, output: Path) -> None:
    """A function fails on the first rank only; each rank writes how it ended."""

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", place)

    if ranks.is_first and place:
        owner, _, name = place.rpartition(".")
        setattr(sys.modules[owner], name, fail)
    try:
        ending = str(Trainer(config, ranks, Console(quiet=True)).run().step)
    except (FirstRankFailed, OSError, ValueError) as error:
        ending = f"{type(error).__name__}: {error}"
    (output / f"rank{ranks.rank}").write_text(ending)


# Comparison


def assert_near(first: Path, second: Path) -> None:
    """Check that two tensor files agree to 1e-10, and to 1e-6 for averages, which are kept in float32."""
    a, b = load_file(first), load_file(second)
    assert a.keys() == b.keys()
    for name in a:
        close = 1e-6 if name.startswith("average/") else 1e-10
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=close, msg=lambda text, name=name: f"{name}: {text}")
