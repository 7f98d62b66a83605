"""`cedd sample`: text from a trained model."""

from __future__ import annotations

import sys
from dataclasses import replace

from cedd.cli import UserError
from cedd.cli.arguments import Sample
from cedd.cli.inputs import DEFAULT_MODEL
from cedd.cli.sampling import check, constraints_of, show
from cedd.models.loaded_model import LoadedModel
from cedd.models.locate import packaged
from cedd.tasks import load
from cedd.tasks.generate import chat_template, ends_of_text, template_of


def run(arguments: Sample) -> int:
    """Print the samples, separated by rules, or as JSON."""
    check(arguments)
    if arguments.chat is not None and arguments.prompt:
        raise UserError("--chat and --prompt cannot be combined; use one of them")
    languages = constraints_of(arguments.constraint)
    if len(languages) > 1:
        raise UserError("--regex can only be repeated for infill, once per blank")
    language = next(iter(languages), None)
    model = load(arguments.model or packaged(DEFAULT_MODEL), arguments.device)
    sampler = arguments.options.sampler if arguments.options.particles is None else "particles"
    if arguments.chat is None:
        template, _ = template_of(model, arguments.prompt, arguments.length, language)
    else:
        template = chat_template(model, arguments.chat, arguments.length)
        template = template if language is None else template.in_languages([language], may_end=True)
    title = f"{model.name}, {sampler}"
    if arguments.until_end or arguments.chat is not None:
        options = replace(arguments.options, stop=ends_of_text(model))
        arguments = replace(arguments, options=options)
    if template.width > model.length:
        print(note_on_length(model), file=sys.stderr)
    show(arguments, model, template, title, "samples", f"\n{'=' * 72}\n", sampler=sampler)
    return 0


def note_on_length(model: LoadedModel) -> str:
    """How a model writes more tokens than it reads at once."""
    if model.writes_blocks:
        return (
            f"the model's context is {model.length} tokens: each block of {model.method.block} is written given at "
            f"most {model.length - (model.method.block or 0)} tokens before it"
        )
    half = max(1, model.length // 2)
    return (
        f"the model's context is {model.length} tokens: longer text is written in parts of at most {half} tokens, each "
        f"given at least {half} tokens before it"
    )
