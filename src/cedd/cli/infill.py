"""`cedd infill`: fill the blanks of a text."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Annotated

import tyro

from cedd.cli import UserError
from cedd.cli.correct import write_output
from cedd.cli.given import ModelAndText, model_and_text
from cedd.cli.sampling import SamplerOptions, ViewOptions
from cedd.tasks import load
from cedd.tasks.infill import infill, parse_template


@dataclass(frozen=True)
class Arguments:
    """example: cedd infill "The ____{5} sat on the ____." -n 3

    Fill the blanks of a text: ____ has as many tokens as underscores (three at least), ____{12} has 12. What is given
    comes out byte for byte.
    Without a RUN (a folder, or a name on the hub) the model that comes with cedd does it, english-char.
    """

    words: ModelAndText
    n: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 1
    """Number of ways to fill it."""
    options: Annotated[SamplerOptions, tyro.conf.arg(name="")] = field(default_factory=SamplerOptions)
    view: Annotated[ViewOptions, tyro.conf.arg(name="")] = field(default_factory=ViewOptions)
    seed: int | None = None
    """The same seed gives the same texts on the same device."""
    device: str = "auto"
    json: bool = False


def run(arguments: Arguments) -> int:
    """Print the filled texts, one after the other, or as JSON."""
    arguments.view.check()
    name, text = model_and_text(arguments.words)
    if text is None:
        raise UserError('there is no text: cedd infill "The ____ sat on the ____."')
    model = load(name, arguments.device)
    settings = arguments.options.settings(arguments.seed)
    template = parse_template(text, model.tokenizer)
    with arguments.view.recording(template, arguments.n, f"{model.name}, infilling", quiet=arguments.json) as callback:
        texts = infill(model.setting, text, arguments.n, settings=settings, callback=callback)
    if arguments.json:
        print(json.dumps({"texts": texts, "seed": arguments.seed}))
    else:
        write_output("\n".join(texts) + "\n")
    return 0
