"""`cedd infill`: fill the blanks of a text."""

from __future__ import annotations

from dataclasses import dataclass

from cedd.cli import UserError
from cedd.cli.given import ModelAndText, model_and_text
from cedd.cli.sampling import SamplingArguments
from cedd.tasks import load
from cedd.tasks.infill import blank_template


@dataclass(frozen=True)
class Arguments(SamplingArguments):
    """example: cedd infill "The ____{5} sat on the ____." -n 3

    Fill the blanks of a text: ____ has as many tokens as underscores (three at least), ____{12} has 12. What is given
    comes out byte for byte.
    Without a RUN (a folder, or a name on the hub) the model that comes with cedd does it, english-char.
    """

    words: ModelAndText


def run(arguments: Arguments) -> int:
    """Print the filled texts, one after the other, or as JSON."""
    arguments.view.check()
    name, text = model_and_text(arguments.words)
    if text is None:
        raise UserError('there is no text: cedd infill "The ____ sat on the ____."')
    model = load(name, arguments.device)
    arguments.show(model, blank_template(model, text), f"{model.name}, infilling", "texts", "\n")
    return 0
