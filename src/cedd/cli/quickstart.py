"""`cedd quickstart`: train, evaluate, sample, infill and correct, and a report that shows the results."""

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

from cedd.apps.bench.train import our_step, timed
from cedd.apps.report.measure import describe_run
from cedd.apps.report.pages import PAGE_FILE, interval, number, write_report
from cedd.apps.report.records import ReportOptions, RunReport
from cedd.apps.report.runs import open_run
from cedd.cli import UserError
from cedd.cli.arguments import Quickstart
from cedd.cli.console import PlainConsole
from cedd.cli.progress import Stages
from cedd.device import pick_device
from cedd.training.config import PRESETS, OptimizerConfig, ProcessConfig, TrainConfig
from cedd.training.loop import Hooks, run_training, switch_threads_often
from cedd.training.time_limit import ResumedTimeLimit, TimeLimit, begun

DEFAULT_OUT = Path("runs/quickstart")
BOXED_CORRECTION = 'cedd correct "teh cat sat on teh mat"  # by english, which is part of the package'
"""The suggestion if the run's own model cannot correct."""


def run(arguments: Quickstart) -> int:
    """Run all stages, with progress on standard error."""
    if (ranks := os.environ.get("WORLD_SIZE", "1")) != "1":
        if os.environ.get("RANK", "0") != "0":  # the first says it for all
            return 0
        raise UserError(f"quickstart runs in one process, but WORLD_SIZE is {ranks}; run it without torchrun")
    console = PlainConsole(stderr=True)
    started = time.monotonic()
    config, hooks = configuration(arguments), Hooks()
    config.check()
    if arguments.steps is None and not arguments.fast:
        config, hooks = within(config, 60 * (arguments.minutes or MINUTES), console)
    many = "" if isinstance(hooks, TimeLimit) else f" for {config.steps} steps"  # within() has printed it
    console.print(
        f"training {config.method} on {config.process.name}{many} on the text of Python's manual; "
        f"the run's folder is {config.out}",
        soft_wrap=True,
    )
    switch_threads_often()
    result = run_training(config, console, hooks)
    if not result.finished:
        console.print("stopped; the same command continues from here")
        return result.exit_code
    effort = ReportOptions(sequences=48, samples=2) if arguments.fast else ReportOptions()
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
    """The training configuration: the best measured for the time limit on each kind of device (dev/lab-notes.md)."""
    if arguments.minutes is not None:
        if not 0 < arguments.minutes <= MOST_MINUTES:
            raise UserError(f"--minutes must be above 0 and at most {MOST_MINUTES}, a day (got {arguments.minutes:g})")
        if arguments.fast or arguments.steps is not None:
            fixed = "--fast" if arguments.fast else "--steps"
            raise UserError(f"give either --minutes or {fixed}, which determines the number of steps")
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
    return with_steps(base, base.steps if arguments.steps is None else arguments.steps, 4 if arguments.fast else 10)


def with_steps(config: TrainConfig, steps: int, evaluations: int = 10) -> TrainConfig:
    """The same configuration with this number of steps, evaluations and checkpoints."""
    every = max(1, steps // evaluations)
    return replace(config, steps=steps, evaluation=replace(config.evaluation, every=every), checkpoint_every=every)


def within(config: TrainConfig, seconds: float, console: Console) -> tuple[TrainConfig, Hooks]:
    """The configuration with as many steps as fit into the time at this machine's current speed. A run that exists
    keeps its own.

    While the learning rate is constant or falls linearly, the number of steps follows the speed, since other programs
    may start or stop.
    """
    if (again := begun(config, unchosen=first_choice(config.optimizer))) is not None:
        config = with_steps(again, again.steps)
        console.print(
            f"{config.out} was started with {config.steps} steps, which --minutes does not change; another --out "
            "starts a new run",
            highlight=False,
            soft_wrap=True,
        )
        return config, ResumedTimeLimit()
    started, device = time.monotonic(), pick_device(config.device)
    each = seconds_per_step(config, device)
    left = seconds - OTHER_SECONDS - (time.monotonic() - started)
    fitting = int(left / each - OTHER_STEPS)
    most = config.steps if device.type == "cuda" else None
    steps = max(LEAST_STEPS, fitting if most is None else min(most, fitting))
    short = "(the minimum), which may take longer" if fitting < LEAST_STEPS else ""
    console.print(
        f"a step takes {1000 * each:.0f} ms on this machine: {steps} steps for {seconds / 60:g} "
        f"minute{'s' * (seconds != 60)} (--minutes){short}",
        highlight=False,
        soft_wrap=True,
    )
    hooks = TimeLimit(left, 0, EVERY, OTHER_STEPS, most, with_steps, steps)
    return with_steps(config, max(steps, first_choice(config.optimizer))), hooks


def first_choice(config: OptimizerConfig) -> int:
    """The initial number of steps, large enough that it is chosen again before the learning rate falls."""
    constant = 1 - config.decay_share
    return math.ceil((config.warmup + 2 * EVERY) / constant) if constant > 0 else 0


def seconds_per_step(config: TrainConfig, device: torch.device) -> float:
    """Seconds per step with all threads or with one, whichever is faster; that number of threads is kept.

    Threads wait for each other at every operation: where another program occupied a core, two threads were five times
    slower than one.
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
    """The vocabulary size: that of the tokenizer's name, or about the number of distinct characters in the manual."""
    _, _, size = config.text.tokenizer.partition(":")
    return int(size) if size else 97


MINUTES = 4.0
"""Time limit in minutes, unless --minutes or --steps is given."""
MOST_MINUTES = 24 * 60
"""The largest value of --minutes; longer runs are for `cedd train`."""
MEASURED_SECONDS = 3.0
OTHER_SECONDS, OTHER_STEPS = 25.0, 120
"""Upper limits of the time for everything but training: a constant, and a number of steps that take as long."""
LEAST_STEPS = 40
"""The smallest number of steps: it is chosen after warm-up, for at least EVERY more."""
EVERY = 10
"""Steps after which the number of steps is chosen again."""


def cpu_run(base: TrainConfig) -> TrainConfig:
    """A run of minutes on two cores. Tokens are pieces of words, which carry more information per position than
    characters. Each setting is a line of dev/lab-notes.md ("Quickstart")."""
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
    """A run of seconds on a GPU: a larger network, more sequences, fewer steps."""
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
    """The name of the device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{threads} CPU thread{'s' * (threads != 1)}" if device.type == "cpu" else device.type


def summary(report: RunReport, steps: int, page: Path, seconds: float) -> str:
    """The results, and what to do next."""
    bound = report.bound
    rows = [(b.name, b.bits_per_character, "") for b in report.baselines]
    rows.append(("this model", bound.bits_per_character, f"  95% interval {interval(*bound.ci95)}"))
    width = max(len(name) for name, *_ in rows)
    lines = ["bits per character of held-out text (at most, for this model):", ""]
    lines += [f"  {name:<{width}}  {number(bits)}{note}" for name, bits, note in sorted(rows, key=lambda row: -row[1])]
    gzip = next(b.bits_per_character for b in report.baselines if b.name == "gzip")
    if bound.bits_per_character > gzip:
        lines += [
            "",
            f"above gzip: {steps} steps are too few; train longer with cedd quickstart --minutes 20 --out runs/longer",
        ]
    if report.correction is not None:
        done = report.correction
        lines += [
            "",
            f"wrong letters fixed: {done.fixed} of {done.wrong}; correct letters broken: {done.broken} of {done.right}",
        ]
    lines += ["", f"done in {seconds:.0f} s; open {page}", "", "next:"]
    usual = {"correct": BOXED_CORRECTION, **report.commands}
    commands = [usual[name] for name in ("sample", "infill", "correct") if name in usual]
    lines += [f"  {command}" for command in [*activation(), *commands]]
    return "\n".join(lines)


def activation() -> list[str]:
    """The command that puts `cedd` on the shell's path, if it is not there."""
    here = Path(sys.executable).parent
    script, found = here / "activate", shutil.which("cedd")
    if not script.is_file() or (found is not None and Path(found).resolve() == (here / "cedd").resolve()):
        return []
    shown = script.relative_to(Path.cwd()) if script.is_relative_to(Path.cwd()) else script
    return [f"source {shlex.quote(str(shown))}"]
