"""`cedd train`: train any method on any process."""

from __future__ import annotations

import json

import tyro
from rich.console import Console

from cedd.cli import UserError
from cedd.training.config import PRESETS, TrainConfig

DESCRIPTION = """example: cedd train char --data python-manual --out runs/first

Train a network on a text file, a folder of them, a jsonl, a hub data set (hf:NAME) or python-manual.
Every setting of the preset can be changed: --method cedd --process.name uniform --batch.size 64 --steps 5000.
A run that was killed goes on with the same command. Many GPUs: torchrun --nproc-per-node 8 -m cedd train ...
"""


def parse(words: list[str]) -> TrainConfig:
    """The preset's configuration with the command line's changes; unknown keys are refused."""
    presets = {name: (help_text, config) for name, (help_text, config) in PRESETS.items()}
    return tyro.extras.overridable_config_cli(
        presets,
        prog="cedd train",
        description=DESCRIPTION,
        args=words,
        config=(tyro.conf.FlagConversionOff,),
    )


def run(config: TrainConfig) -> int:
    """Train, and print how it ended as one line of JSON."""
    if str(config.out).startswith("("):
        raise UserError("say where the run goes: --out FOLDER")
    from cedd.training.loop import train

    result = train(config, Console(stderr=True))
    print(json.dumps({"out": str(config.out), **vars(result)}))
    return 0
