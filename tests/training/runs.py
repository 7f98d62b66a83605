"""Small runs for the training tests, and readers of their output.

The text consists of a few words in random order, so that a model can learn something within fifty steps.
"""

import json
import random
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor

from cedd.models.ema import EMA
from cedd.models.transformer import Transformer, config_from_preset
from cedd.network import with_rounded
from cedd.training.config import (
    BatchConfig,
    DataConfig,
    EvaluationConfig,
    ModelConfig,
    OptimizerConfig,
    ProcessConfig,
    TrainConfig,
    from_json,
    to_json,
)
from cedd.training.distributed import Ranks
from cedd.training.loop import Hooks, Trainer, TrainResult
from cedd.training.run_log import read_log
from cedd.training.update import Update, make_optimizers

WORDS = ("one", "two", "three", "tree", "net", "not", "tent", "rotten")
SPEEDS = ("tokens_per_second", "share_of_peak")
ALONE = Ranks(0, 1, torch.device("cpu"))


def write_corpus(path: Path, words: int = 4000, seed: int = 0) -> Path:
    path.write_text(" ".join(random.Random(seed).choices(WORDS, k=words)), encoding="utf-8")
    return path


def tiny_config(corpus: Path, cache: Path, out: Path, changes: Mapping[str, Any] | None = None) -> TrainConfig:
    """A run with steps of a few milliseconds; settings are changed by their dotted names."""
    config = TrainConfig(
        data=str(corpus),
        out=out,
        method="cedd-star",
        process=ProcessConfig("roulette"),
        model=ModelConfig(width=16, depth=1, heads=2, conditioning_width=16, dropout=0.1),
        length=12,
        text=DataConfig(cache=cache),
        optimizer=OptimizerConfig(rate=1e-2, warmup=5, ema=0.9),
        batch=BatchConfig(size=8),
        evaluation=EvaluationConfig(every=0),
        steps=12,
        device="cpu",
        checkpoint_every=4,
        log_every=1,
    )
    return changed(config, changes or {})


def changed(config: TrainConfig, changes: Mapping[str, Any]) -> TrainConfig:
    """The configuration with settings such as "optimizer.rate" replaced."""
    values = to_json(config)
    for name, value in changes.items():
        *path, leaf = name.split(".")
        if path == ["process"] and leaf == "name":
            values["process"] = {"name": value, "arguments": {}}
            continue
        if path[:1] == ["process"]:
            process = from_json(ProcessConfig, values["process"]).replaced([*path[1:], leaf], value)
            values["process"] = to_json(process)
            continue
        record = values
        for part in path:
            record = record[part]
        assert leaf in record, name
        record[leaf] = to_json(value)
    return from_json(TrainConfig, values)


def without_kernels(update: Update) -> None:
    for optimizer in update.optimizers:
        optimizer.table = None


def updated(config: OptimizerConfig, device: str, *, plain: bool) -> Update:
    """The update of a small transformer after four steps with random gradients of its rounded copy, one of them
    skipped. `plain`: without the fused kernel."""
    torch.manual_seed(0)
    model = Transformer(config_from_preset("tiny", vocab_size=7, has_mask=True)).to(device)
    rounded = with_rounded(model, model.rounded_parameters(), torch.bfloat16)
    update = Update(model, make_optimizers(model, config), EMA(model, 0.9), config, rounded)
    if plain:
        without_kernels(update)
    generator = torch.Generator().manual_seed(1)
    for step in range(4):
        for source in rounded.parameters():
            source.grad = torch.randn(source.shape, generator=generator).to(source)
        update.apply(config.rate, update.norm(), torch.tensor(step != 1, device=device))
    return update


def listen() -> dict[int, Any]:
    """Restore the default handlers of the signals that stop a run, even if the tests were started with some ignored
    (nohup); return the previous handlers."""
    usual = {signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    return {number: signal.signal(number, handler) for number, handler in usual.items()}


class Crash(Exception):
    """Raised by a test inside a run to end it abruptly."""


def crash_at(step: int) -> Callable[[int], None]:
    def before_step(now: int) -> None:
        if now == step:
            raise Crash

    return before_step


@dataclass
class Watching(Hooks):
    """Calls `watch` with the number of steps taken, before every step."""

    watch: Callable[[int], None]

    def before_step(self, trainer: Trainer) -> None:
        self.watch(trainer.state.step)


def run(
    config: TrainConfig, before_step: Callable[[int], None] | None = None, console: Console | None = None
) -> TrainResult:
    """Train in this process, without other ranks."""
    config.check()
    hooks = None if before_step is None else Watching(before_step)
    return Trainer(config, ALONE, console or Console(quiet=True), hooks).run()


def checkpoint_steps(out: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (out / "checkpoints").glob("step-*"))


def final_state(out: Path) -> dict[str, Tensor]:
    """All tensors and counts of the newest checkpoint and of the model file, by name."""
    folder = out / "checkpoints" / f"step-{checkpoint_steps(out)[-1]:08d}"
    tensors = {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}
    tensors |= {f"file/{name}": tensor for name, tensor in load_file(out / "model.safetensors").items()}
    state = json.loads((folder / "state.json").read_text())
    counts = {"step": state["step"], **{name: state["values"][name] for name in ("averaged", "updates")}}
    return tensors | {name: torch.tensor(count) for name, count in counts.items()}


def final_log(out: Path) -> list[dict[str, Any]]:
    """The log without the fields that depend on the machine's speed."""
    return [{k: v for k, v in record.items() if k not in SPEEDS} for record in read_log(out / "log.jsonl")]


def assert_resumes(config: Callable[..., TrainConfig], changes: dict[str, Any], crash: int = 6) -> TrainResult:
    """A run that crashes before a step and is resumed equals one that was not stopped. Returns the resumed run's
    result."""
    run(config("whole", changes))
    with pytest.raises(Crash):
        run(config("crashed", changes), crash_at(crash))
    result = run(config("crashed", changes))
    assert_same_run(config("whole").out, config("crashed").out)
    return result


def assert_same_run(first: Path, second: Path) -> None:
    """Check that weights, averages, moments and log are bit-identical."""
    a, b = final_state(first), final_state(second)
    assert a.keys() == b.keys()
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert not different, f"{len(different)} of {len(a)} tensors differ, first {different[0]}"
    assert final_log(first) == final_log(second)
