"""`cedd infill`: fill the blanks of a text."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from cedd.cli.sampling import SamplerOptions, check_writable, save_views, watching
from cedd.tasks import Trajectory, load
from cedd.tasks.infill import infill


@dataclass(frozen=True)
class Arguments:
    """example: cedd infill runs/first "The ____{5} sat on the ____." --n 3

    Fill the blanks of a text: ____ has as many tokens as underscores (three at least), ____{12} has 12.
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    text: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="TEXT")]
    n: int = 1
    """Number of ways to fill it."""
    options: Annotated[SamplerOptions, tyro.conf.arg(name="")] = field(default_factory=SamplerOptions)
    seed: int | None = None
    watch: bool = False
    """Show the first one while it is filled."""
    html: Path | None = None
    gif: Path | None = None
    device: str = "auto"
    json: bool = False


def run(arguments: Arguments) -> int:
    """Print the filled texts, one after the other, or as JSON."""
    check_writable(arguments.html, arguments.gif)
    model = load(arguments.model, arguments.device)
    trajectory = Trajectory(model.tokenizer)
    seen = arguments.watch or arguments.html is not None or arguments.gif is not None
    with watching(trajectory, arguments.watch and not arguments.json) as callback:
        texts = infill(
            model.setting,
            arguments.text,
            arguments.n,
            settings=arguments.options.settings(arguments.seed),
            callback=callback if seen else None,
        )
    save_views(trajectory, arguments.html, arguments.gif, f"{model!r}, infilling")
    print(json.dumps({"texts": texts, "seed": arguments.seed}) if arguments.json else "\n".join(texts))
    return 0
