"""`cedd infill`: fill the blanks of a text."""

from __future__ import annotations

from cedd.cli.arguments import Infill
from cedd.cli.inputs import DEFAULT_MODEL, model_and_source
from cedd.cli.sampling import check, constraints_of, show
from cedd.tasks import load
from cedd.tasks.infill import parse_template


def run(arguments: Infill) -> int:
    """Print the filled texts, one after the other, or as JSON."""
    check(arguments)
    languages = constraints_of(arguments.constraint)
    name, source = model_and_source(
        arguments.words, arguments.file, DEFAULT_MODEL, 'cedd infill "The ____ sat on the ____."'
    )
    model = load(name, arguments.device)
    template = parse_template(source.read(), model.tokenizer)
    if len(languages) < 2:
        languages = (languages or [None]) * len(template.blanks)
    template = template.in_languages(languages)
    end = "\n" if source.text is not None else ""  # a file already has its own last byte
    show(arguments, model, template, f"{model.name}, infilling", "texts", "\n", end)
    return 0
