"""`cedd sample`: text from a trained model."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Annotated

import tyro

from cedd.cli.correct import write_output
from cedd.cli.given import default_model
from cedd.cli.sampling import SamplerOptions, ViewOptions
from cedd.tasks import load
from cedd.tasks.generate import generate, prompt_template


@dataclass(frozen=True)
class Arguments:
    """example: cedd sample -n 3 --prompt "The " --watch

    Draw texts from a trained model: a run's folder, a name on the hub, or without either the model that comes with
    cedd, english-char. Your own: cedd sample runs/first
    """

    model: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[RUN]")] = None
    """A run's folder or a name; without it english-char of the package."""
    n: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 1
    """Number of samples."""
    length: int | None = None
    """Tokens of a sample; by default as many as the model reads."""
    prompt: str = ""
    """What every sample begins with."""
    options: Annotated[SamplerOptions, tyro.conf.arg(name="")] = field(default_factory=SamplerOptions)
    view: Annotated[ViewOptions, tyro.conf.arg(name="")] = field(default_factory=ViewOptions)
    seed: int | None = None
    """The same seed gives the same text on the same device."""
    device: str = "auto"
    json: bool = False


def run(arguments: Arguments) -> int:
    """Print the samples, separated by rules, or as JSON."""
    arguments.view.check()
    model = load(arguments.model or default_model(), arguments.device)
    title = f"{model.name}, {arguments.options.sampler}"
    template = prompt_template(model.setting, arguments.prompt, arguments.length)
    with arguments.view.recording(template, arguments.n, title, quiet=arguments.json) as callback:
        texts = generate(
            model.setting,
            arguments.n,
            length=arguments.length,
            prompt=arguments.prompt,
            settings=arguments.options.settings(arguments.seed),
            callback=callback,
        )
    if arguments.json:
        print(json.dumps({"samples": texts, "sampler": arguments.options.sampler, "seed": arguments.seed}))
        return 0
    write_output(f"\n{'=' * 72}\n".join(texts) + "\n")
    return 0
