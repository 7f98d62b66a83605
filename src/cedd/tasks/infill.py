"""Filling blanks: "The ____ sat on the ____." keeps every given token, and the model writes the rest.

A blank is three or more underscores: as many tokens as it has underscores, or as many as ____{12} says.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import torch

from cedd.data.tokenizers import Tokenizer
from cedd.samplers import Fixed
from cedd.samplers.loop import Callback
from cedd.tasks.setting import Setting, Settings

BLANK = re.compile(r"_{3,}(?:\{(\d+)\})?")


@dataclass(frozen=True)
class Template:
    """A text with blanks as tokens: the given ones where `given` holds, anything elsewhere; both [L]."""

    tokens: torch.Tensor
    given: torch.Tensor

    @property
    def constraint(self) -> Fixed:
        return Fixed(self.tokens, self.given)


def parse_template(text: str, tokenizer: Tokenizer) -> Template:
    """The given parts are encoded one by one, so that no token spans a blank's edge."""
    tokens: list[np.ndarray] = []
    given: list[np.ndarray] = []

    def add(ids: np.ndarray, known: bool) -> None:
        tokens.append(ids)
        given.append(np.full(len(ids), known))

    end = 0
    for blank in BLANK.finditer(text):
        add(tokenizer.encode(text[end : blank.start()]), True)
        width = int(blank[1]) if blank[1] else len(blank[0])
        if width < 1:
            raise ValueError(f"the blank {blank[0]!r} has no width; write for example ____{{12}}")
        add(np.zeros(width, dtype=np.int64), False)
        end = blank.end()
    if not tokens:
        raise ValueError("the text has no blank to fill; write ____, or ____{12} for one of 12 tokens")
    add(tokenizer.encode(text[end:]), True)
    return Template(torch.from_numpy(np.concatenate(tokens)), torch.from_numpy(np.concatenate(given)))


def infill(
    setting: Setting,
    text: str,
    n: int = 1,
    *,
    settings: Settings | None = None,
    callback: Callback | None = None,
) -> list[str]:
    """n ways to fill the blanks of `text`."""
    template = parse_template(text, setting.folder.tokenizer)
    length = len(template.tokens)
    if length > setting.folder.length:
        raise ValueError(f"the text has {length} tokens with its blanks, but the model reads {setting.folder.length}")
    if n < 1:
        raise ValueError(f"at least one sample must be asked for; got {n}")
    drawn = setting.draw((n, length), settings or Settings(), template.constraint, callback)
    return [setting.folder.tokenizer.decode(row.numpy()) for row in drawn]
