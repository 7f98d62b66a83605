"""`cedd sample`: text from a trained model."""

from __future__ import annotations

from cedd.cli.arguments import Sample
from cedd.cli.given import WRITER
from cedd.cli.sampling import check, show
from cedd.models.locate import packaged
from cedd.tasks import load
from cedd.tasks.generate import prompt_template


def run(arguments: Sample) -> int:
    """Print the samples, separated by rules, or as JSON."""
    check(arguments)
    model, sampler = load(arguments.model or packaged(WRITER), arguments.device), arguments.options.sampler
    template = prompt_template(model, arguments.prompt, arguments.length)
    title = f"{model.name}, {sampler}"
    show(arguments, model, template, title, "samples", f"\n{'=' * 72}\n", sampler=sampler)
    return 0
