"""`cedd quickstart`: train, measure, write, fill in, correct, and a page that shows it all."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from cedd.cli.arguments import Quickstart
from cedd.cli.console import PlainConsole
from cedd.cli.progress import Stages
from cedd.device import pick_device
from cedd.report.measure import describe_run
from cedd.report.pages import PAGE_FILE, interval, number, write_report
from cedd.report.records import Effort, RunReport
from cedd.report.runs import open_run
from cedd.training.config import PRESETS, TrainConfig
from cedd.training.loop import train

DEFAULT_OUT = Path("runs/quickstart")


def run(arguments: Quickstart) -> int:
    """Everything, with progress on standard error."""
    console = PlainConsole(stderr=True)
    started = time.monotonic()
    config = configuration(arguments)
    console.print(
        f"training {config.method} on {config.process.name} for {config.steps} steps on the text of Python's manual; "
        f"the run's folder is {config.out}",
        soft_wrap=True,
    )
    result = train(config, console)
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
        print(summary(report, page, time.monotonic() - started))
    return 0


def configuration(arguments: Quickstart) -> TrainConfig:
    """The run that quickstart trains: what has measured best in the time that its device has (docs/lab-notes.md)."""
    if arguments.fast:
        base, folder = replace(PRESETS["tiny"][1], steps=60, log_every=1, compile="off"), f"{DEFAULT_OUT.name}-fast"
    else:
        kind = pick_device(arguments.device).type
        base, folder = (gpu_run if kind == "cuda" else cpu_run)(PRESETS["char"][1]), DEFAULT_OUT.name
    steps = base.steps if arguments.steps is None else arguments.steps
    every = max(1, steps // (4 if arguments.fast else 10))
    return replace(
        base,
        out=arguments.out or DEFAULT_OUT.with_name(folder),
        text=replace(base.text, holdout_by="documents"),
        evaluation=replace(base.evaluation, every=every, sequences=32, samples=0),
        checkpoint_every=every,
        steps=steps,
        seed=arguments.seed,
        device=arguments.device,
    )


def cpu_run(base: TrainConfig) -> TrainConfig:
    """Minutes on two cores. In trials of one seed each (docs/lab-notes.md), for so few tokens a network of 2 blocks
    learnt as much from each as one of 4, at two thirds of its price, and 64 positions no less than 128."""
    return replace(
        base,
        length=64,
        model=replace(base.model, width=128, depth=2, heads=4),
        optimizer=replace(base.optimizer, rate=1.5e-3, beta2=0.99, warmup=60),
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


def summary(report: RunReport, page: Path, seconds: float) -> str:
    """The figures, a sample, and what to do next."""
    bound = report.bound
    rows = [(b.name, b.bits_per_character, "") for b in report.baselines]
    rows.append(("this model", bound.bits_per_character, f"  95% interval {interval(*bound.ci95)}"))
    width = max(len(name) for name, *_ in rows)
    lines = ["bits per character of held-out text (at most, for this model):", ""]
    lines += [f"  {name:<{width}}  {number(bits)}{note}" for name, bits, note in sorted(rows, key=lambda row: -row[1])]
    if report.correction is not None:
        done = report.correction
        lines += [
            "",
            f"wrong letters put right: {done.fixed} of {done.wrong}; right ones broken: {done.broken} of {done.right}",
        ]
    lines += ["", f"done in {seconds:.0f} s; open {page}", "", "next:"]
    commands = [report.commands[name] for name in ("sample", "infill", "correct") if name in report.commands]
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
