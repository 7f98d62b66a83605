"""Filling blanks: in "The ____ sat on the ____." the given text is kept, and the model writes the rest.

A blank is three or more underscores, with one token per underscore, or ____{12} with 12 tokens. A brace directly after
the underscores always belongs to the blank; ____{4}{ is a blank followed by a brace of the text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from cedd.constraints import Language
from cedd.data.text import check_text
from cedd.data.tokenizers import Tokenizer
from cedd.models.loaded_model import LoadedModel
from cedd.samplers import Constraint, SamplingOptions
from cedd.tasks.template import Template

MOST_BLANK = 1_000_000
"""Tokens in the blanks of a text."""
MOST_SHOWN = 40
"""Characters of a wrong brace in an error message."""
BLANK = re.compile(r"(_{3,})(\{(?:([+-]?\d+)\})?)?")
"""The underscores, and the brace after them with its number, if it contains only a number."""


def parse_template(text: str, tokenizer: Tokenizer, most: int = MOST_BLANK) -> Template:
    """The text split at its blanks, which may have at most `most` tokens in total."""
    check_text(text, "the text to fill")
    parts: list[str | int] = []
    end = 0
    for blank in BLANK.finditer(text):
        underscores, brace, number = blank.groups()
        if number and len(number) > 20:  # too many digits for int()
            raise ValueError(f"a blank is too wide: at most {most:,} tokens are filled")
        width = int(number) if number else 0 if brace else len(underscores)
        if width < 1:
            otherwise = "____{4}{ where the brace is part of the text"
            raise ValueError(f"the blank {_shown(text, blank)} has no width; write ____{{12}}, or {otherwise}")
        parts += [text[end : blank.start()], width]
        end = blank.end()
    if not parts:
        raise ValueError("the text has no blank to fill; write ____, or ____{12} for one of 12 tokens")
    if (blank := sum(part for part in parts if isinstance(part, int))) > most:
        raise ValueError(f"the text has {blank:,} tokens in blanks; at most {most:,} are filled")
    return Template.of([*parts, text[end:]], tokenizer)


def _shown(text: str, blank: re.Match[str]) -> str:
    """A blank and its brace, shortened for a message, and its line number if the text has several lines."""
    rest = text[blank.start(2) :].partition("\n")[0]
    inside, closing, _ = rest.partition("}")
    shown = inside + closing
    shown = shown if len(shown) <= MOST_SHOWN else shown[: MOST_SHOWN - 1] + "…"
    line = f" in line {text.count(chr(10), 0, blank.start()) + 1}" if "\n" in text.rstrip("\n") else ""
    return f"{blank[1][-4:] + shown!r}{line}"


Constraints = Constraint | Language | Sequence[Language | None]
"""A constraint on the tokens; or a language for all blanks, or a list with one per blank (None: any text)."""


def infill(
    loaded: LoadedModel,
    text: str,
    n: int = 1,
    *,
    constraint: Constraints | None = None,
    options: SamplingOptions | None = None,
) -> list[str]:
    """n texts with the blanks of `text` filled; all other characters are unchanged."""
    template = parse_template(text, loaded.tokenizer)
    if isinstance(constraint, Language):
        constraint = [constraint] * len(template.blanks)
    if isinstance(constraint, Sequence):
        return template.in_languages(constraint).fill(loaded, n, options)
    return template.fill(loaded, n, options, constraint)
