"""`cedd sample`: text from a trained model."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from cedd.cli.sampling import SamplerOptions, check_writable, save_views, watching
from cedd.tasks import Trajectory, load
from cedd.tasks.generate import generate


@dataclass(frozen=True)
class Arguments:
    """example: cedd sample runs/first --n 3 --prompt "The " --watch

    Draw texts from a trained model: a run's folder, or a name on the hub.
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    n: int = 1
    """Number of samples."""
    length: int | None = None
    """Tokens of a sample; by default as many as the model reads."""
    prompt: str = ""
    """What every sample begins with."""
    options: Annotated[SamplerOptions, tyro.conf.arg(name="")] = field(default_factory=SamplerOptions)
    seed: int | None = None
    """The same seed gives the same text on the same device."""
    watch: bool = False
    """Show the first sample while it is denoised."""
    html: Path | None = None
    """Write the first sample's way from noise to text as a page."""
    gif: Path | None = None
    """The same as a moving picture."""
    device: str = "auto"
    json: bool = False


def run(arguments: Arguments) -> int:
    """Print the samples, separated by rules, or as JSON."""
    check_writable(arguments.html, arguments.gif)
    model = load(arguments.model, arguments.device)
    trajectory = Trajectory(model.tokenizer)
    seen = arguments.watch or arguments.html is not None or arguments.gif is not None
    with watching(trajectory, arguments.watch and not arguments.json) as callback:
        texts = generate(
            model.setting,
            arguments.n,
            length=arguments.length,
            prompt=arguments.prompt,
            settings=arguments.options.settings(arguments.seed),
            callback=callback if seen else None,
        )
    save_views(trajectory, arguments.html, arguments.gif, f"{model!r}, {arguments.options.sampler}")
    if arguments.json:
        print(json.dumps({"samples": texts, "sampler": arguments.options.sampler, "seed": arguments.seed}))
        return 0
    print(f"\n{'=' * 72}\n".join(texts))
    return 0
