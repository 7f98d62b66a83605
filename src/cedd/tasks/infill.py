"""Filling blanks: "The ____ sat on the ____." keeps all that is given, and the model writes the rest.

A blank is three or more underscores: as many tokens as it has underscores, or as many as ____{12} says.

Sampling begins at the time t at which as many tokens are noise as are blank, 1 - keep(t) = blanks / L. At t = 1 the
network would be told that all it reads is noise, and not trust what is given.
"""

from __future__ import annotations

import re
from dataclasses import replace

import torch

from cedd.data.tokenizers import Tokenizer
from cedd.models.loaded import LoadedModel, SamplingOptions
from cedd.process import TokenProcess
from cedd.quadrature import bisect
from cedd.samplers.grids import LAST_TIME
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
    return replace(template, start=start_time(template, loaded.process))


def start_time(template: Template, process: TokenProcess) -> float:
    """The time at which as many tokens are noise as are blank, 1 where nothing is given."""
    blank = 1 - template.given.double().mean()
    if blank == 1:
        return 1.0
    time = bisect(lambda t: 1 - torch.exp(-process.alpha(t) - process.beta(t)), blank, 0.0, 1.0, halvings=40)
    return max(float(time), 2 * LAST_TIME)


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
