"""`cedd quickstart`: train, measure, write, fill in, correct, and a page that shows it all."""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from cedd.bench.train import our_step, timed
from cedd.cli import UserError
from cedd.cli.arguments import Quickstart
from cedd.cli.console import PlainConsole
from cedd.cli.progress import Stages
from cedd.device import pick_device
from cedd.report.measure import describe_run
from cedd.report.pages import PAGE_FILE, interval, number, write_report
from cedd.report.records import Effort, RunReport
from cedd.report.runs import open_run
from cedd.training.config import PRESETS, OptimizerConfig, ProcessConfig, TrainConfig
from cedd.training.in_time import GoesOn, InTime, begun
from cedd.training.loop import Hooks, train

DEFAULT_OUT = Path("runs/quickstart")
BOXED_CORRECTION = 'cedd correct "teh cat sat on teh mat"  # by english, which is part of the package'
"""What to try where the run's own model cannot correct."""


def run(arguments: Quickstart) -> int:
    """Everything, with progress on standard error."""
    if (ranks := os.environ.get("WORLD_SIZE", "1")) != "1":
        if os.environ.get("RANK", "0") != "0":  # the first says it for all
            return 0
        raise UserError(f"it runs in one process, and WORLD_SIZE is {ranks}; start it without torchrun")
    console = PlainConsole(stderr=True)
    started = time.monotonic()
    config, hooks = configuration(arguments), Hooks()
    config.check()
    if arguments.steps is None and not arguments.fast:
        config, hooks = in_time(config, 60 * (arguments.minutes or MINUTES), console)
    many = "" if isinstance(hooks, InTime) else f" for {config.steps} steps"  # of which in_time has told
    console.print(
        f"training {config.method} on {config.process.name}{many} on the text of Python's manual; "
        f"the run's folder is {config.out}",
        soft_wrap=True,
    )
    result = train(config, console, hooks)
    if not result.finished:
        console.print("stopped; the same command goes on from here")
        return result.exit_code
    effort = Effort(sequences=48, samples=2) if arguments.fast else Effort()
    stages = Stages()
    with stages.bar:
        opened = open_run(config.out, arguments.device)
        facts = {"computed on": device_text(opened.model.device)}
        report = describe_run(opened, effort, arguments.seed, stages, facts)
    page = config.out / PAGE_FILE
    write_report(report, page)
    if arguments.json:
        print(json.dumps({**report.record(), "page": str(page)}))
    else:
        print(summary(report, result.step, page, time.monotonic() - started))
    return 0


# ----------------------------------------------------------------------------------------------------------------
# The run


def configuration(arguments: Quickstart) -> TrainConfig:
    """The run that quickstart trains: what has measured best in the time that its device has (docs/lab-notes.md)."""
    if arguments.minutes is not None:
        if not 0 < arguments.minutes <= MOST_MINUTES:
            raise UserError(f"--minutes must be above 0 and at most {MOST_MINUTES}, a day; got {arguments.minutes:g}")
        if arguments.fast or arguments.steps is not None:
            fixed = "--fast" if arguments.fast else "--steps"
            raise UserError(f"give either --minutes or {fixed}, which says how many steps there are")
    if arguments.fast:
        base, folder = replace(PRESETS["tiny"][1], steps=60, log_every=1, compile="off"), f"{DEFAULT_OUT.name}-fast"
    else:
        kind = pick_device(arguments.device).type
        base, folder = (gpu_run if kind == "cuda" else cpu_run)(PRESETS["char"][1]), DEFAULT_OUT.name
    base = replace(
        base,
        out=arguments.out or DEFAULT_OUT.with_name(folder),
        text=replace(base.text, holdout_by="documents"),
        evaluation=replace(base.evaluation, sequences=32, samples=0),
        seed=arguments.seed,
        device=arguments.device,
    )
    return of_steps(base, base.steps if arguments.steps is None else arguments.steps, 4 if arguments.fast else 10)


def of_steps(config: TrainConfig, steps: int, evaluations: int = 10) -> TrainConfig:
    """The same run with so many steps, evaluated and saved a few times on its way."""
    every = max(1, steps // evaluations)
    return replace(config, steps=steps, evaluation=replace(config.evaluation, every=every), checkpoint_every=every)


def in_time(config: TrainConfig, seconds: float, console: Console) -> tuple[TrainConfig, Hooks]:
    """The run with as many steps as fit, at the speed that this machine has now; one that was begun keeps its own.

    Where the rate is constant or falls linearly, the number follows the speed: another program may come or go.
    """
    if (again := begun(config, unchosen=first_choice(config.optimizer))) is not None:
        config = of_steps(again, again.steps)
        console.print(
            f"{config.out} was begun with {config.steps} steps and keeps them, whatever --minutes says; another --out "
            "begins anew",
            highlight=False,
            soft_wrap=True,
        )
        return config, GoesOn()
    started, device = time.monotonic(), pick_device(config.device)
    each = seconds_per_step(config, device)
    left = seconds - OTHER_SECONDS - (time.monotonic() - started)
    fitting = int(left / each - OTHER_STEPS)
    most = config.steps if device.type == "cuda" else None
    steps = max(LEAST_STEPS, fitting if most is None else min(most, fitting))
    short = ", and may take longer: fewer are not trained" if fitting < LEAST_STEPS else ""
    console.print(
        f"a step takes {1000 * each:.0f} ms on this machine: {steps} steps for {seconds / 60:g} "
        f"minute{'s' * (seconds != 60)} (--minutes){short}",
        highlight=False,
        soft_wrap=True,
    )
    hooks = InTime(left, 0, EVERY, OTHER_STEPS, most, of_steps, steps)
    return of_steps(config, max(steps, first_choice(config.optimizer))), hooks


def first_choice(config: OptimizerConfig) -> int:
    """How many steps a run must have at first, so that their number is chosen again before its rate falls."""
    constant = 1 - config.decay_share
    return math.ceil((config.warmup + 2 * EVERY) / constant) if constant > 0 else 0


def seconds_per_step(config: TrainConfig, device: torch.device) -> float:
    """What a step takes with all threads or with one, whichever is faster, which is kept.

    Threads wait for one another at every operation: where another program holds a core, two were five times slower.
    """
    usual, seconds = torch.get_num_threads(), dict[int, float]()
    with our_step(config, vocabulary(config)) as step:
        for threads in (usual, 1) if device.type == "cpu" and usual > 1 else (usual,):
            torch.set_num_threads(threads)
            first = statistics.median(timed(step, 4, 4, device))
            steps = max(4, round(1000 * MEASURED_SECONDS / first))
            seconds[threads] = statistics.mean(timed(step, steps, 0, device)) / 1000
    torch.set_num_threads(min(seconds, key=seconds.__getitem__))
    return min(seconds.values())


def vocabulary(config: TrainConfig) -> int:
    """How many tokens the run will have: as many as its tokenizer's name says, or about as many as the manual has
    characters."""
    _, _, size = config.text.tokenizer.partition(":")
    return int(size) if size else 97


MINUTES = 4.0
"""All of it, unless --minutes or a number of steps is given."""
MOST_MINUTES = 24 * 60
"""What takes longer is no start: `cedd train` is for that."""
MEASURED_SECONDS = 3.0
OTHER_SECONDS, OTHER_STEPS = 25.0, 120
"""What is not training takes so many seconds, and as long as so many steps where the network is needed: at most."""
LEAST_STEPS = 40
"""Fewer are not trained: their number is chosen when the rate has risen, for EVERY more at least."""
EVERY = 10
"""Steps after which their number is chosen anew."""


def cpu_run(base: TrainConfig) -> TrainConfig:
    """Minutes on two cores: tokens are pieces of words, which say more than characters at the price of a position each.
    Each setting is a line of docs/lab-notes.md ("Quickstart")."""
    return replace(
        base,
        method="cedd-star",
        process=ProcessConfig("absorb"),
        text=replace(base.text, tokenizer="bpe:8192"),
        length=64,
        model=replace(base.model, width=128, depth=2, heads=4),
        optimizer=replace(
            base.optimizer,
            matrices="muon",
            matrix_rate=4e-3,
            rate=2e-3,
            beta2=0.99,
            warmup=30,
            schedule="linear",
            decay_share=0.7,
            ema=0.95,  # where the rate falls to 0, a longer memory lags behind
        ),
        batch=replace(base.batch, complementary=True, lowest_time=0.2, highest_time=0.8),
        steps=5000,
        log_every=5,
        compile="off",
    )


def gpu_run(base: TrainConfig) -> TrainConfig:
    """Seconds on a GPU, which is fast enough for a larger network: more sequences, fewer steps."""
    return replace(
        base,
        length=128,
        model=replace(base.model, width=256, depth=4, heads=8),
        optimizer=replace(base.optimizer, rate=1.5e-3, beta2=0.99, warmup=100),
        batch=replace(base.batch, size=128),
        steps=1500,
        log_every=5,
        compile="record",  # the compiler would take longer than the run
    )


def device_text(device: torch.device) -> str:
    """The device in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{threads} CPU thread{'s' * (threads != 1)}" if device.type == "cpu" else device.type


def summary(report: RunReport, steps: int, page: Path, seconds: float) -> str:
    """The figures, a sample, and what to do next."""
    bound = report.bound
    rows = [(b.name, b.bits_per_character, "") for b in report.baselines]
    rows.append(("this model", bound.bits_per_character, f"  95% interval {interval(*bound.ci95)}"))
    width = max(len(name) for name, *_ in rows)
    lines = ["bits per character of held-out text (at most, for this model):", ""]
    lines += [f"  {name:<{width}}  {number(bits)}{note}" for name, bits, note in sorted(rows, key=lambda row: -row[1])]
    gzip = next(b.bits_per_character for b in report.baselines if b.name == "gzip")
    if bound.bits_per_character > gzip:
        lines += ["", f"above gzip: {steps} steps are too few; cedd quickstart --minutes 20 --out runs/longer has more"]
    if report.correction is not None:
        done = report.correction
        lines += [
            "",
            f"wrong letters put right: {done.fixed} of {done.wrong}; right ones broken: {done.broken} of {done.right}",
        ]
    lines += ["", f"done in {seconds:.0f} s; open {page}", "", "next:"]
    usual = {"correct": BOXED_CORRECTION, **report.commands}
    commands = [usual[name] for name in ("sample", "infill", "correct") if name in usual]
    lines += [f"  {command}" for command in [*activation(), *commands]]
    return "\n".join(lines)


def activation() -> list[str]:
    """The command that makes `cedd` one of the shell's, where it is not yet."""
    here = Path(sys.executable).parent
    script, found = here / "activate", shutil.which("cedd")
    if not script.is_file() or (found is not None and Path(found).resolve() == (here / "cedd").resolve()):
        return []
    shown = script.relative_to(Path.cwd()) if script.is_relative_to(Path.cwd()) else script
    return [f"source {shlex.quote(str(shown))}"]
