"""`cedd bench`: time our training step or sampler against a textbook implementation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from cedd.apps.bench.options import BenchOptions, machine, read_shape
from cedd.apps.bench.sample import bench_sample
from cedd.apps.bench.train import bench_train
from cedd.cli import UserError
from cedd.cli.arguments import Bench
from cedd.cli.console import PlainConsole
from cedd.cli.unused import refuse_unused
from cedd.methods import get_method
from cedd.names import suggestion
from cedd.process import PROCESSES

USUAL = {
    "train": (("512x128", "64x1024", "32x128"), ("cedd-star/absorb",), 20),
    "sample": (("64x128",), ("cedd-star/absorb", "bayes/roulette", "bayes/uniform"), 1024),
}
"""Default shapes, methods and steps of each suite."""
UNUSED = {"train": ("samplers",), "sample": ("architecture", "warmup", "precision", "complementary")}
"""Options that have no effect on a suite."""


def options_of(arguments: Bench) -> BenchOptions:
    """The options of the benchmark, checked."""
    if (arguments.steps is not None and arguments.steps < 1) or arguments.warmup < 0:
        raise UserError("--steps must be at least 1 and --warmup at least 0")
    if arguments.vocab_size < 2:
        raise UserError(f"--vocab must be at least 2 (got {arguments.vocab_size})")
    if arguments.shapes == ():
        raise UserError("--shapes needs at least one, such as --shapes 32x128")
    refuse_unused(arguments, UNUSED[arguments.suite], f"on bench {arguments.suite}")
    shapes, methods, steps = USUAL[arguments.suite]
    methods = arguments.methods or methods
    for pair in methods:
        _check_pair(pair, arguments.suite)
    shared = {field.name for field in fields(BenchOptions)} - {"shapes", "methods", "steps"}
    return BenchOptions(
        shapes=[read_shape(text) for text in arguments.shapes or shapes],
        methods=methods,
        steps=arguments.steps or steps,
        **{name: getattr(arguments, name) for name in shared},
    )


def _check_pair(text: str, suite: str) -> None:
    method, *others = text.split("/")
    get_method(method)
    process, blocks = "".join(others[:1]), others[1:]
    if process and process not in PROCESSES:
        raise UserError(f"--methods: unknown process {process!r}{suggestion(process, PROCESSES)}")
    if blocks and (suite != "train" or len(blocks) > 1 or not blocks[0].isdigit()):
        form = "METHOD/PROCESS/BLOCK" if suite == "train" else "METHOD/PROCESS"
        raise UserError(f"--methods takes {form} (got {text})")


COLUMNS = {
    "train": {
        "what": "what",
        "batch": "B",
        "length": "L",
        "milliseconds": "ms/step",
        "spread": "±",
        "tokens_per_second": "tokens/s",
        "gibibytes": "GiB",
        "speedup": "speed-up",
    },
    "sample": {
        "what": "what",
        "sampler": "sampler",
        "steps": "steps",
        "network_calls": "calls",
        "milliseconds_per_step": "ms/step",
        "seconds_per_batch": "s/batch",
        "gibibytes": "GiB",
        "speedup": "speed-up",
    },
}
"""Columns of the table with their headings; --json has all fields."""


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"
    return str(value)


def run(arguments: Bench) -> int:
    """Print the table, or JSON."""
    options, console = options_of(arguments), PlainConsole()
    say = (lambda _: None) if arguments.json else lambda line: console.print(line)
    bench = bench_train if arguments.suite == "train" else bench_sample
    rows = [asdict(row) for row in bench(options, say)]
    about = machine(arguments.device)
    if arguments.json:
        print(json.dumps({"machine": about, "preset": arguments.preset, "vocab": arguments.vocab_size, "rows": rows}))
        return 0
    console.print(
        f"{arguments.suite}, {arguments.preset} {arguments.architecture}, V = {arguments.vocab_size}; {about}",
        highlight=False,
    )
    console.print(_table(rows, COLUMNS[arguments.suite]))
    return 0


def _table(rows: Sequence[dict[str, Any]], columns: dict[str, str]) -> Table:
    """The rows, without empty columns."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), caption="speed-up: against the textbook's row")
    filled = [name for name in columns if any(row[name] is not None for row in rows)]
    for name in filled:
        table.add_column(columns[name], justify="left" if name in ("what", "sampler") else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(_cell(row[name]) for name in filled))
    return table
