"""`cedd train`: train any method on any process."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Annotated

import tyro
from rich.console import Console

from cedd.cli import UserError
from cedd.cli.parsing import parse_arguments
from cedd.methods import get_method
from cedd.names import suggestion
from cedd.storage import finite
from cedd.training.config import PRESETS, TrainConfig

HELP = """example: cedd train char --data python-manual --out runs/first

usage: cedd train {__NAMES__} [OPTIONS]      (cedd train char --help lists them)

Train a network on a text file, a folder of them, a jsonl, a hub data set (hf:NAME) or python-manual.
Every setting of the preset can be changed: --method cedd --process.name uniform --batch.size 64 --steps 5000.
A run that was killed goes on with the same command. Many GPUs: torchrun --nproc-per-node 8 -m cedd train ...

__PRESETS__"""


@dataclass(frozen=True)
class Arguments:
    """A run, as its preset and the command line have it, and what is printed when it has ended."""

    config: Annotated[TrainConfig, tyro.conf.arg(name=""), tyro.conf.FlagConversionOff]
    json: bool = False
    """Print how it ended as one JSON object."""


def parse(words: list[str]) -> Arguments:
    """The preset's configuration with the command line's changes; unknown keys are refused."""
    if words[:1] in (["-h"], ["--help"]):
        width = max(map(len, PRESETS))
        presets = "\n".join(f"  {name:<{width}}  {summary}" for name, (summary, _) in PRESETS.items())
        print(HELP.replace("__NAMES__", ",".join(PRESETS)).replace("__PRESETS__", presets))
        raise SystemExit(0)
    name, rest = (words[0], words[1:]) if words else ("", [])
    if not name or name.startswith("-"):
        raise UserError(f"name a preset first, one of {', '.join(PRESETS)}: cedd train char --out runs/first")
    if name not in PRESETS:
        raise UserError(f"no preset {name!r}{suggestion(name, PRESETS)}")
    summary, config = PRESETS[name]
    description = f"example: cedd train {name} --data {config.data} --out runs/first\n\n{summary}"
    prog = f"cedd train {name}"
    return parse_arguments(Arguments, rest, prog=prog, description=description, default=Arguments(config))


def run(arguments: Arguments) -> int:
    """Train; what happens is told on stderr, and how it ended, for machines, on stdout by the first of the ranks."""
    config = arguments.config
    if str(config.out).startswith("("):
        raise UserError("say where the run goes: --out FOLDER")
    get_method(config.method)
    from cedd.training.loop import train

    result = train(config, Console(stderr=True))
    if arguments.json and os.environ.get("RANK", "0") == "0":
        print(json.dumps({"out": str(config.out), **finite(vars(result))}))
    return 0
