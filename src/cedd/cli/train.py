"""`cedd train`: train any method on any process."""

from __future__ import annotations

import json
import os

import tyro
from rich.console import Console

from cedd.cli import UserError
from cedd.training.config import PRESETS, TrainConfig

DESCRIPTION = """example: cedd train char --data python-manual --out runs/first

Train a network on a text file, a folder of them, a jsonl, a hub data set (hf:NAME) or python-manual.
Every setting of the preset can be changed: --method cedd --process.name uniform --batch.size 64 --steps 5000.
A run that was killed goes on with the same command. Many GPUs: torchrun --nproc-per-node 8 -m cedd train ...
"""
_CONFIG = (tyro.conf.FlagConversionOff,)


def parse(words: list[str]) -> TrainConfig:
    """The preset's configuration with the command line's changes; unknown keys are refused."""
    if not words or words[0].startswith("-"):
        presets = dict(PRESETS)
        return tyro.extras.overridable_config_cli(
            presets, prog="cedd train", description=DESCRIPTION, args=words, config=_CONFIG
        )
    name, rest = words[0], words[1:]
    if name not in PRESETS:
        raise UserError(f"no preset {name!r}; use one of {', '.join(PRESETS)}")
    summary, config = PRESETS[name]
    return tyro.cli(
        TrainConfig,
        default=config,
        prog=f"cedd train {name}",
        description=f"example: cedd train {name} --data {config.data} --out runs/first\n\n{summary}",
        args=rest,
        config=_CONFIG,
    )


def run(config: TrainConfig) -> int:
    """Train, and print how it ended as one line of JSON."""
    if str(config.out).startswith("("):
        raise UserError("say where the run goes: --out FOLDER")
    from cedd.training.loop import train
    from cedd.training.records import in_json

    result = train(config, Console(stderr=True))
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps({"out": str(config.out), **in_json(vars(result))}))
    return 0
