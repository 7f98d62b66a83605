"""Filling blanks: "The ____ sat on the ____." keeps all that is given, and the model writes the rest.

A blank is three or more underscores: as many tokens as it has underscores, or as many as ____{12} says.
"""

from __future__ import annotations

import re

from cedd.data.tokenizers import Tokenizer
from cedd.models.loaded import LoadedModel, SamplingOptions
from cedd.samplers.loop import Callback
from cedd.tasks.template import Template

BLANK = re.compile(r"_{3,}(?:\{([+-]?\d+)\})?")


def parse_template(text: str, tokenizer: Tokenizer) -> Template:
    """The text cut at its blanks."""
    parts: list[str | int] = []
    end = 0
    for blank in BLANK.finditer(text):
        width = int(blank[1]) if blank[1] else len(blank[0])
        if width < 1:
            raise ValueError(f"the blank {blank[0]!r} has no width; write for example ____{{12}}")
        parts += [text[end : blank.start()], width]
        end = blank.end()
    if not parts:
        raise ValueError("the text has no blank to fill; write ____, or ____{12} for one of 12 tokens")
    return Template.of([*parts, text[end:]], tokenizer)


def blank_template(loaded: LoadedModel, text: str) -> Template:
    """The text cut at its blanks, if the model can read it."""
    template = parse_template(text, loaded.tokenizer)
    if (length := template.width) > loaded.length:
        raise ValueError(f"the text has {length} tokens with its blanks, but the model reads {loaded.length}")
    return template


def infill(
    loaded: LoadedModel,
    text: str,
    n: int = 1,
    *,
    options: SamplingOptions | None = None,
    callback: Callback | None = None,
) -> list[str]:
    """n ways to fill the blanks of `text`, whose other characters are in all of them exactly."""
    return blank_template(loaded, text).fill(loaded, n, options, callback)
