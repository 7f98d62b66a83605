"""`cedd infill`: fill the blanks of a text."""

from __future__ import annotations

from cedd.cli import UserError
from cedd.cli.arguments import Infill
from cedd.cli.given import WRITER, model_and_text
from cedd.cli.sampling import check, show
from cedd.tasks import load
from cedd.tasks.infill import parse_template


def run(arguments: Infill) -> int:
    """Print the filled texts, one after the other, or as JSON."""
    check(arguments)
    name, text = model_and_text(arguments.words, WRITER)
    if text is None:
        raise UserError('there is no text: cedd infill "The ____ sat on the ____."')
    model = load(name, arguments.device)
    show(arguments, model, parse_template(text, model.tokenizer), f"{model.name}, infilling", "texts", "\n")
    return 0
