"""`cedd bench`: what a step costs, ours and a textbook's, side by side in one run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.table import Table

from cedd.cli import UserError

Suite = Literal["train", "sample"]


@dataclass(frozen=True)
class Arguments:
    """example: cedd bench train --preset char --shapes 16x128 --steps 5

    Time training steps or sampling against a plain textbook implementation (benchmarks/ of the source tree).
    """

    suite: tyro.conf.Positional[Suite]
    preset: Literal["tiny", "char", "small", "medium"] = "small"
    shapes: tuple[str, ...] = ("512x128", "64x1024", "32x128")
    """Sequences x positions, each a row of the table."""
    vocab_size: Annotated[int, tyro.conf.arg(name="vocab")] = 50257
    methods: tuple[str, ...] = ("cedd-star/absorb",)
    """METHOD/PROCESS, each a row for every shape."""
    textbook: bool = True
    """Time the textbook step too."""
    steps: int = 20
    warmup: int = 8
    compile: Literal["auto", "off", "on", "graphs"] = "auto"
    device: str = "auto"
    seed: int = 0
    json: bool = False


def _shape(text: str) -> tuple[int, int]:
    try:
        batch, length = (int(part) for part in text.lower().split("x"))
    except ValueError as error:
        raise UserError(f"a shape is SEQUENCESxPOSITIONS, such as 32x128; got {text!r}") from error
    if batch < 1 or length < 1:
        raise UserError(f"a shape needs at least one sequence and one position; got {text!r}")
    return batch, length


def run(arguments: Arguments) -> int:
    """Print the table, or JSON."""
    if arguments.steps < 1 or arguments.warmup < 0:
        raise UserError("--steps must be at least 1 and --warmup at least 0")
    from cedd.training.bench import bench_train, machine

    console = Console()
    rows = bench_train(
        preset=arguments.preset,
        shapes=[_shape(text) for text in arguments.shapes],
        methods=arguments.methods,
        vocab_size=arguments.vocab_size,
        textbook=arguments.textbook,
        steps=arguments.steps,
        warmup=arguments.warmup,
        compile_mode=arguments.compile,
        device=arguments.device,
        seed=arguments.seed,
        say=(lambda _: None) if arguments.json else console.print,
    )
    about = machine(arguments.device)
    if arguments.json:
        print(json.dumps({"machine": about, "rows": [vars(row) for row in rows]}))
        return 0
    table = Table(title=f"training step, {arguments.preset} network, V = {arguments.vocab_size}; {about}")
    for name in ("what", "batch", "length", "ms/step", "tokens/s", "GiB", "against textbook"):
        table.add_column(name, justify="left" if name == "what" else "right")
    for row in rows:
        ratio = "" if row.speedup is None else f"{row.speedup:.2f}x"
        memory = "" if row.gibibytes is None else f"{row.gibibytes:.1f}"
        table.add_row(
            row.what,
            str(row.batch),
            str(row.length),
            f"{row.milliseconds:.1f}",
            f"{row.tokens_per_second:,.0f}",
            memory,
            ratio,
        )
    console.print(table)
    return 0
