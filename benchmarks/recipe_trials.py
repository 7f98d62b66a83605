"""Short training trials on one GPU, one change at a time, to find the settings with the lowest bound in a given time.

    python benchmarks/recipe_trials.py plan.json FOLDER

The plan has a base (settings of `cedd train small`, by their names with dots), and entries, each with a change of some
settings and its expected effect. A trial trains the best settings so far plus one change for `seconds`, with the number
of steps chosen by the step time measured just before, and estimates the `tight` bound on held-out blocks, for the
averaged weights and for the last ones. A change that lowers the bound is kept, and the next one is tried on top of it.
While one trial trains, the next is compiled, both with and without the current change. The plan is read again before
each trial, so it can be edited meanwhile; a trial that fails is recorded and skipped. From `final_start` (seconds since
1970) on, or when no entry is left, the plan's finals are run with the kept settings:

    {"base": {"settings": {"optimizer.matrices": "muon", "optimizer.rate": 1e-3}, "seconds": 60,
              "data": ["train.bin"], "held_out": "held_out.bin"},
     "entries": [{"name": "start", "expected": 5.1},
                 {"name": "linear", "expected": -0.01, "settings": {"optimizer.schedule": "linear"}}],
     "finals": [{"name": "long", "seconds": 340, "sequences": 4096, "keep": false}],
     "overhead": 8, "final_start": 1e12}

`first` in a base, an entry or a final trains the same weights with other settings for a share of the seconds before (a
list: with several, one after the other), for example as a causal network, on other text, or with half of the blocks
(the full network then starts with two copies of each):

    "first": {"share": 0.3, "settings": {"method": "ar", "model.time_conditioning": false}}
    "first": {"share": 0.3, "settings": {"optimizer.schedule": "constant"}, "data": ["more.bin"]}
    "first": {"share": 0.3, "settings": {"optimizer.schedule": "constant", "model.depth": 6}}

Files of tokens are as in a packed set: 16 bits, little-endian. FOLDER receives `trials.jsonl`, with one line per trial,
and one folder per trial with its log and the bound of each block.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from helps import parser_of
from rich.console import Console
from torch import Tensor

from cedd.bounds.estimator import estimate_bound
from cedd.data.batches import Prefetcher
from cedd.data.packing import PackedDataset
from cedd.data.training_data import TrainingData
from cedd.models.deepening import deepened
from cedd.models.transformer import Transformer
from cedd.storage import read_json, write_json
from cedd.training.config import PRESETS, TrainConfig, from_json, to_json
from cedd.training.distributed import Ranks
from cedd.training.loop import Trainer, switch_threads_often
from cedd.training.step import StepMetrics

SPEC_FILE, RESULT, READY, GO, LINES = "spec.json", "result.json", "ready", "go", "trials.jsonl"
PARTS = ("base", "entries", "finals", "overhead", "final_start")
"""Of a plan."""
SPEC = {
    "settings": {},  # of `cedd train small`, by names with dots
    "start": [],  # changes of the first weights: names in STARTS
    "ema_share": 0.05,  # steps that the average remembers, as a share of all
    "warmup_share": 0.03,
    "seconds": 70.0,
    "steps": None,  # instead of seconds
    "first": [],  # {"share": of the seconds, "settings": {...}}, or several: what trains the same weights before
    "data": [],  # files of tokens, little-endian 16 bits
    "held_out": "",
    "others": {},  # more held-out files, by name
    "vocab_size": 50257,
    "sequences": 1024,
    "draws": 2,
    "device": "cuda",
}
GAIN = 0.002
"""Nats per token by which a change must lower the bound to be kept."""


# --- one trial ---------------------------------------------------------------------------------------------------


def network(trainer: Trainer) -> Transformer:
    """The network of a trial."""
    model = trainer.state.model
    assert isinstance(model, Transformer)
    return model


def frequencies(trainer: Trainer) -> None:
    """The head's bias begins at the logarithms of the tokens' frequencies."""
    bias = network(trainer).head.bias
    counts = np.bincount(trainer.data.train.blocks.reshape(-1), minlength=len(bias)) + 0.5
    bias.copy_(torch.from_numpy(np.log(counts / counts.sum())))


def large_embedding(trainer: Trainer) -> None:
    """Tokens begin ten times as far apart."""
    network(trainer).backbone.embedding.weight.mul_(10.0)


def zero_branches(trainer: Trainer) -> None:
    """Without gates: every block begins as the identity."""
    for name, parameter in network(trainer).backbone.blocks.named_parameters():
        if name.endswith("output.weight"):
            parameter.zero_()


def open_gates(trainer: Trainer) -> None:
    """With gates: they begin at 1, and the branches at zero."""
    conditioning = network(trainer).backbone.conditioning
    assert conditioning is not None
    conditioning.modulation.bias.view(conditioning.count, -1)[2:-2:3] = 1.0
    zero_branches(trainer)


STARTS = {start.__name__: start for start in (frequencies, large_embedding, zero_branches, open_gates)}


def blocks_of(files: list[str], length: int, vocab_size: int) -> PackedDataset:
    """Files of tokens as one set of blocks."""
    parts = [np.memmap(file, dtype="<u2", mode="r") for file in files]
    tokens = parts[0] if len(parts) == 1 else np.concatenate(parts)
    header = {"length": length, "blocks": len(tokens) // length, "vocab_size": vocab_size}
    return PackedDataset(tokens, header)


def data_of(spec: dict[str, Any], length: int, files: list[str]) -> TrainingData:
    """Blocks of these files to train on, and the held-out ones."""
    size = spec["vocab_size"]
    tokenizer: Any = SimpleNamespace(vocab_size=size)  # all that a trainer asks of it
    return TrainingData(tokenizer, blocks_of(files, length, size), blocks_of([spec["held_out"]], length, size))


def config_of(spec: dict[str, Any], out: Path) -> TrainConfig:
    """`small` with the settings of a trial."""
    values = to_json(replace(PRESETS["small"][1], out=out, device=spec["device"]))
    for name, value in spec["settings"].items():
        *path, leaf = name.split(".")
        place = values
        for part in path:
            place = place.get(part, {})
        if leaf not in place:
            raise ValueError(f"cedd train has no setting {name}")
        place[leaf] = value
    return from_json(TrainConfig, values)


@dataclass
class Trial:
    """A network that is compiled once, and trained from the start whenever it is asked to."""

    trainer: Trainer
    spec: dict[str, Any]
    first: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self._remember()

    def _remember(self) -> None:
        named = self.trainer.state.model.named_parameters()
        self.first = {name: parameter.detach().clone() for name, parameter in named}

    @torch.no_grad()
    def read_tokens(self) -> None:
        """The text to learn from, once it is there, and what the first weights take from it."""
        files = self.spec["data"]
        while not all(Path(file).exists() for file in files):
            time.sleep(0.1)
        self.trainer.data = data_of(self.spec, self.trainer.config.length, files)
        for name in self.spec["start"]:
            STARTS[name](self.trainer)
        self._remember()
        self.begin()

    @torch.no_grad()
    def begin(self) -> None:
        """The first step, again."""
        state = self.trainer.state
        for name, parameter in state.model.named_parameters():
            parameter.copy_(self.first[name])
            state.ema.shadow[name].copy_(self.first[name])
        for optimizer in state.optimizers:
            optimizer.restore(0)
            for moment in optimizer.tensors().values():
                moment.zero_()
        state.ema.updates = state.step = 0
        self.trainer.train_step.update.refresh()

    @torch.no_grad()
    def start_from(self, other: Trial) -> None:
        """Begin with the weights that another trial ended with, whose blocks may be fewer. Modulations that it did not
        have begin as its norms, and with open gates."""
        fewer, depth = (trial.trainer.config.model.depth for trial in (other, self))
        theirs = deepened(dict(other.trainer.state.model.named_parameters()), fewer, depth)
        for name in theirs.keys() & self.first.keys():
            self.first[name].copy_(theirs[name])
        had = network(other.trainer).backbone.conditioning
        if (conditioning := network(self.trainer).backbone.conditioning) is not None and had is None:
            bias = self.first["backbone.conditioning.modulation.bias"].view(conditioning.count, -1)
            scales = [weight - 1 for name, weight in theirs.items() if name.endswith("norm.weight")]
            bias[1::3] = torch.stack(scales)
            bias[2:-2:3] = 1.0
        self.begin()

    def run_for(self, seconds: float, steps: int | None = None) -> dict[str, Any]:
        """Train for as many steps as fit the seconds, at the present step time, or for a given number."""
        trainer, spec = self.trainer, self.spec
        step = self.step_seconds()
        steps = steps or max(1, math.floor(seconds / step))
        optimizer = replace(trainer.config.optimizer, warmup=max(1, round(spec["warmup_share"] * steps)))
        trainer.config = trainer.train_step.config = replace(trainer.config, steps=steps, optimizer=optimizer)
        ema = trainer.state.ema
        ema.decay = max(0.0, 1 - 1 / max(1.0, spec["ema_share"] * steps))
        ema.every = min(4, max(1, steps // 100))
        wall, losses = self.run(steps)
        print(f"{steps} steps in {wall:.1f} s", flush=True)
        return {
            "steps": steps,
            "tokens": steps * trainer.config.batch.size * trainer.config.length,
            "step_ms": round(1e3 * step, 2),
            "training_seconds": round(steps * step, 1),
            "wall_seconds": round(wall, 1),
            "losses": losses,
        }

    def step_seconds(self, windows: int = 12, steps: int = 4) -> float:
        """Of a step, when nobody disturbs it: of some windows of steps, the second fastest."""
        self.run(4)
        times: list[float] = []
        with Prefetcher(self.trainer.noising(), self.trainer.ranks.device, depth=8) as batches:
            time.sleep(0.2)
            for _ in range(windows):
                synchronize()
                before = time.perf_counter()
                for _ in range(steps):
                    self.trainer.train_step.step(next(batches))
                synchronize()
                times.append((time.perf_counter() - before) / steps)
        self.begin()
        return sorted(times)[1]

    def run(self, steps: int, every: int = 50) -> tuple[float, list[float]]:
        """That many steps: their seconds, and the mean losses of every `every`."""
        trainer, losses = self.trainer, list[float]()
        waiting: list[StepMetrics] = []
        synchronize()
        before = time.perf_counter()
        with Prefetcher(trainer.noising(), trainer.ranks.device) as batches:
            for _ in range(steps):
                waiting.append(trainer.train_step.step(next(batches)))
                if len(waiting) == every + 2:
                    losses.append(mean_loss(waiting[:every]))
                    waiting = waiting[every:]
        synchronize()
        seconds = time.perf_counter() - before
        mean_loss(waiting)  # the rest is too few for a mean, but not to fail
        return seconds, losses

    def bound(self, averaged: bool, held_out: PackedDataset) -> tuple[dict[str, float], Tensor]:
        """On held-out blocks, with its interval; and of each block."""
        trainer, spec = self.trainer, self.spec
        chosen = np.linspace(0, len(held_out) - 1, min(spec["sequences"], len(held_out))).astype(np.int64)
        model = trainer.state.averaged_model() if averaged else trainer.state.model
        with torch.no_grad(), trainer.train_step.precision.autocast():
            estimate = estimate_bound(
                model,
                trainer.process,
                torch.from_numpy(held_out[chosen]),
                method=trainer.method,
                draws=spec["draws"],
                generator=torch.Generator().manual_seed(0),
                batch=256,
                device=trainer.ranks.device,
            )
        low, high = estimate.ci95
        values = {"bound": estimate.nats_per_token, "low": low, "high": high, "sequences": len(chosen)}
        return {name: round(value, 5) for name, value in values.items()}, estimate.per_sequence


def mean_loss(figures: list[StepMetrics]) -> float:
    """Of some steps, none of which may have failed."""
    read = [one.read() for one in figures]
    if not all(finite for _, _, finite, _ in read):
        raise ValueError(f"the loss is not finite near step {figures[0].step}")
    return round(sum(loss for loss, _, _, _ in read) / len(read), 4)


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def run_trial(folder: Path) -> None:
    """Compile, say that it is ready, wait to be asked, train, measure."""
    spec = read_json(folder / SPEC_FILE)
    switch_threads_often()
    began = time.perf_counter()
    device = torch.device("cuda", 0) if spec["device"] == "cuda" else torch.device(spec["device"])
    first = [spec["first"]] if isinstance(spec["first"], dict) else spec["first"] or []
    trials: list[Trial] = []
    for stage in [*(merged(spec, change) for change in first), spec]:
        config = config_of(stage, folder / "run")
        # Held-out blocks will do to compile the network; the text may not be there yet.
        data = data_of(stage, config.length, [stage["held_out"]])
        trials.append(Trial(Trainer(config, Ranks(0, 1, device), Console(quiet=True), data=data), stage))
        trials[-1].run(6)
        trials[-1].begin()
    compiled = time.perf_counter() - began
    (folder / READY).touch()
    print(f"ready after {compiled:.1f} s", flush=True)
    while not (folder / GO).exists():
        time.sleep(0.02)
    *before, trial = trials
    trainer, seconds, done = trial.trainer, spec["seconds"], list[dict[str, Any]]()
    for one in trials:
        one.read_tokens()
    for change, other, following in zip(first, before, trials[1:], strict=True):
        done.append(other.run_for(change["share"] * spec["seconds"], other.spec["steps"]))
        following.start_from(other)
        seconds -= change["share"] * spec["seconds"]
    trained = trial.run_for(seconds, spec["steps"])
    began = time.perf_counter()
    average, each = trial.bound(True, trainer.data.validation)
    last, _ = trial.bound(False, trainer.data.validation)
    others = {
        name: trial.bound(True, blocks_of([file], trainer.config.length, spec["vocab_size"]))[0]
        for name, file in spec["others"].items()
    }
    np.save(folder / "per_sequence.npy", each.numpy())
    result = {
        **trained,
        "first": done,
        "compile_seconds": round(compiled, 1),
        "evaluation_seconds": round(time.perf_counter() - began, 1),
        "average": average,
        "last": last,
        "others": others,
        "parameters": trainer.state.model.num_parameters(),
    }
    write_json(folder / RESULT, result)


# --- one after the other -----------------------------------------------------------------------------------------


def merged(recipe: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """A recipe with a change; settings one by one, starts added (or left out, with a minus)."""
    made = {**recipe, **{key: value for key, value in change.items() if key in SPEC}}
    made["settings"] = {**recipe["settings"], **change.get("settings", {})}
    starts = [*recipe["start"], *(name for name in change.get("start", []) if name not in recipe["start"])]
    made["start"] = [name for name in starts if name[0] != "-" and f"-{name}" not in starts]
    return made


@dataclass
class Child:
    """A trial's process."""

    folder: Path
    process: subprocess.Popen[bytes]

    @classmethod
    def start(cls, folder: Path, spec: dict[str, Any]) -> Child:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / SPEC_FILE, spec)
        log = (folder / "log").open("wb")
        command = [sys.executable, "-u", __file__, "--trial", str(folder)]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        return cls(folder, process)

    def wait_for(self, name: str, seconds: float) -> bool:
        """Whether the file is there in time."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if (self.folder / name).exists():
                return True
            if self.process.poll() is not None:
                return (self.folder / name).exists()
            time.sleep(0.02)
        return False

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@dataclass
class Series:
    """The trials of a plan."""

    plan_file: Path
    out: Path
    best: dict[str, Any] = field(init=False)
    bound: float = math.inf
    each: Any = None
    done: set[str] = field(default_factory=set)
    tries: int = 0

    def __post_init__(self) -> None:
        self.best = merged(SPEC, self.plan()["base"])

    def plan(self) -> dict[str, Any]:
        plan = read_json(self.plan_file)
        if missing := [part for part in PARTS if part not in plan]:
            raise ValueError(f"{self.plan_file} is no plan: it lacks {', '.join(missing)}")
        return plan

    def pick(self, busy: float) -> dict[str, Any] | None:
        """The first entry that was not tried; one of the finals if, `busy` seconds from now, no other would fit."""
        plan = self.plan()
        left = [entry for entry in plan["entries"] if entry["name"] not in self.done]
        finals = [entry for entry in plan["finals"] if entry["name"] not in self.done]
        another = left[0].get("seconds", self.best["seconds"]) + plan["overhead"] if left else math.inf
        if time.time() + busy + another > plan["final_start"]:
            return finals[0] if finals else None
        return left[0] if left else None

    def recipe(self, *changes: dict[str, Any]) -> dict[str, Any]:
        made = self.best
        for change in (*changes, self.plan().get("forced", {})):
            made = merged(made, change)
        return made

    def start(self, entry: dict[str, Any], *before: dict[str, Any]) -> Child:
        self.tries += 1
        return Child.start(self.out / f"{self.tries:02d}-{entry['name']}", self.recipe(*before, entry))

    def run(self) -> None:
        entry = self.pick(0.0)
        children: dict[bool, Child] = {}
        while entry is not None:
            self.done.add(entry["name"])
            child = children.get(True) or self.start(entry)
            if not child.wait_for(READY, 180):
                self.note(entry, child, {"failed": tail(child)})
                child.end()
                entry, children = self.pick(0.0), {}
                continue
            overhead = self.plan()["overhead"]
            length = read_json(child.folder / SPEC_FILE)["seconds"]
            following = self.pick(length + overhead)
            next_children: dict[bool, Child] = {}
            if following is not None:
                if entry.get("keep", True):
                    next_children[True] = self.start(following, entry)
                if self.bound < math.inf:
                    next_children[False] = self.start(following)
            (child.folder / GO).touch()
            child.wait_for(RESULT, 3 * length + 120)
            kept = self.judge(entry, child)
            child.end()
            chosen = next_children.pop(kept, None)
            for other in next_children.values():
                other.end()
            entry, children = following, ({True: chosen} if chosen else {})

    def judge(self, entry: dict[str, Any], child: Child) -> bool:
        """Note how a trial ended; whether its change is kept."""
        path = child.folder / RESULT
        if not path.exists():
            self.note(entry, child, {"failed": tail(child)})
            return False
        result, each = read_json(path), np.load(child.folder / "per_sequence.npy")
        bound = result["average"]["bound"]
        if self.each is not None and len(each) == len(self.each):
            difference = each - self.each
            spread = difference.std() / math.sqrt(len(each))
            result["against_best"] = [round(float(difference.mean()), 4), round(1.96 * float(spread), 4)]
        kept = entry.get("keep", True) and bound < self.bound - GAIN
        self.note(entry, child, {**result, "kept": kept})
        if kept:
            self.best, self.bound, self.each = merged(self.best, entry), bound, each
        return kept

    def note(self, entry: dict[str, Any], child: Child, result: dict[str, Any]) -> None:
        spec = read_json(child.folder / SPEC_FILE)
        line = {"name": entry["name"], "expected": entry.get("expected"), "change": entry, "spec": spec, **result}
        with (self.out / LINES).open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(summary(line), flush=True)


def tail(child: Child) -> str:
    """The end of a trial's log."""
    return (child.folder / "log").read_text(errors="replace")[-1500:]


def summary(line: dict[str, Any]) -> str:
    """One trial in one line."""
    if "failed" in line:
        return f"{line['name']:>16} FAILED {line['failed'][-600:]}"
    average, last, kept = line["average"], line["last"], "kept" if line["kept"] else "not kept"
    difference = "{} ± {}".format(*line["against_best"]) if "against_best" in line else "-"
    parts = (
        f"{line['name']:>16} {average['bound']:.4f} [{average['low']:.4f}, {average['high']:.4f}]",
        f"last {last['bound']:.4f}, against best {difference} (expected {line['expected']}), {kept};",
        f"{line['steps']} steps of {line['step_ms']} ms, {line['tokens'] / 1e6:.1f}M tokens,",
        f"{line['training_seconds']} s (wall {line['wall_seconds']}, compile {line['compile_seconds']}, evaluation",
        f"{line['evaluation_seconds']})",
        *(f"{name} {other['bound']:.4f}" for name, other in line["others"].items()),
    )
    return " ".join(parts)


def main() -> None:
    """A series, or one of its trials."""
    if sys.argv[1:2] == ["--trial"]:
        run_trial(Path(sys.argv[2]))
        return
    parser = parser_of(__doc__)
    parser.add_argument("plan", type=Path, metavar="plan.json", help="base, entries and finals, as above")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="what receives the trials")
    arguments = parser.parse_args()
    try:
        series = Series(arguments.plan, arguments.folder)
        arguments.folder.mkdir(parents=True, exist_ok=True)
        if (arguments.folder / LINES).exists():
            raise ValueError(f"{arguments.folder} has the trials of another series: name another folder")
    except (ValueError, OSError) as error:
        parser.error(str(error))
    series.run()


if __name__ == "__main__":
    main()
