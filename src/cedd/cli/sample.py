"""`cedd sample`: text from a trained model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from cedd.cli.given import DEFAULT_MODEL
from cedd.cli.sampling import SamplingArguments
from cedd.models.locate import packaged
from cedd.tasks import load
from cedd.tasks.generate import prompt_template


@dataclass(frozen=True)
class Arguments(SamplingArguments):
    """example: cedd sample -n 3 --prompt "The " --watch

    Sample texts from a trained model: a run's folder, a name on the hub, or by default the model that comes with cedd,
    english-char. Your own: cedd sample runs/first
    """

    model: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[RUN]")] = None
    """A run's folder or a name; without it english-char of the package."""
    length: int | None = None
    """Tokens of a sample; by default as many as the model reads."""
    prompt: str = ""
    """What every sample begins with."""


def run(arguments: Arguments) -> int:
    """Print the samples, separated by rules, or as JSON."""
    arguments.view.check()
    model, sampler = load(arguments.model or packaged(DEFAULT_MODEL), arguments.device), arguments.options.sampler
    template = prompt_template(model, arguments.prompt, arguments.length)
    title = f"{model.name}, {sampler}"
    arguments.show(model, template, title, "samples", f"\n{'=' * 72}\n", sampler=sampler)
    return 0
