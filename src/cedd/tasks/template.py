"""A text with blanks: what is given comes back character for character, and the model writes the rest.

Shapes: L tokens, of what is given and of the blanks.

The model reads any text (`encode_given`), unknown characters as those most like them and lines that end in \\r\\n as
others; what is written is the user's own text, not what the model was shown of it. Where a space belongs to the word
after it, the space before a blank is left to the blank, which begins with it: the model writes the word with its space;
the user's is the one that stands. So does a blank that begins a text, without the space: no word is cut there.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral

import numpy as np
import torch

from cedd.data.text import Ids, encode_given, without_returns
from cedd.data.tokenizers import Tokenizer
from cedd.models.loaded import LoadedModel, SamplingOptions
from cedd.network import Only
from cedd.samplers import Fixed
from cedd.samplers.loop import Callback
from cedd.tasks.windows import draw_windows, windows_around

_LINE_END = re.compile(r"(?<!\r)\n")


@dataclass(frozen=True)
class Given:
    """A part that stays, and its tokens."""

    text: str
    ids: Ids
    hides_space: bool = False
    """Whether its tokens are those of the text without its last character, a space."""

    @property
    def width(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Blank:
    """A part that the model writes: so many tokens."""

    width: int
    after_space: bool = False
    """Whether the part before ends with a space that the model was not shown."""
    begins_text: bool = False
    """Whether the text begins with it, as with a word whose space is not written."""

    @property
    def begins_word(self) -> bool:
        """Whether its first token is one with a space."""
        return self.after_space or self.begins_text

    def write(self, text: str) -> str:
        """What the model wrote, less the space that is there already."""
        return text.removeprefix(" ") if self.begins_word else text


@dataclass(frozen=True)
class Template:
    """Parts in the order of the text. Each is read by itself, so that no token spans the edge of a blank."""

    parts: Sequence[Given | Blank]
    tokenizer: Tokenizer

    @classmethod
    def of(cls, parts: Sequence[str | int], tokenizer: Tokenizer) -> Template:
        """Of texts that are given and widths of blanks."""
        made: list[Given | Blank] = []
        begins = tokenizer.words_begin_with_spaces and any(isinstance(part, str) and part for part in parts)
        for part, following in itertools.zip_longest(parts, parts[1:]):
            if isinstance(part, int):
                before = made[-1] if made else None
                made.append(Blank(part, isinstance(before, Given) and before.hides_space, begins))
            else:
                hides = tokenizer.words_begin_with_spaces and isinstance(following, int) and part.endswith(" ")
                shown = without_returns(tokenizer, part[:-1] if hides else part)
                made.append(Given(part, encode_given(tokenizer, shown), hides))
            begins = begins and not part
        return cls(made, tokenizer)

    @property
    def width(self) -> int:
        """L."""
        return sum(part.width for part in self.parts)

    @property
    def given(self) -> torch.Tensor:
        """Which tokens are given, [L] bool."""
        return torch.cat([torch.full((part.width,), isinstance(part, Given)) for part in self.parts])

    @property
    def ids(self) -> torch.Tensor:
        """The given tokens, and zeros in the blanks, [L]."""
        ids = [part.ids if isinstance(part, Given) else np.zeros(part.width, dtype=np.int64) for part in self.parts]
        return torch.from_numpy(np.concatenate(ids))

    @property
    def only(self) -> Only | None:
        """That blanks which begin with a word begin with its space; None where none do."""
        starts = [
            place.start for part, place in self.placed if isinstance(part, Blank) and part.width and part.begins_word
        ]
        if not starts or not self.tokenizer.spaced.any():
            return None
        where = torch.zeros(self.width, dtype=torch.bool)
        where[starts] = True
        return Only(where, torch.from_numpy(self.tokenizer.spaced))

    @property
    def held(self) -> Fixed:
        """What is given, and how blanks begin."""
        return Fixed(self.ids, self.given, self.only)

    @property
    def constraint(self) -> Fixed | None:
        """The same; None where it says nothing."""
        held = self.held
        return held if held.where.any() or held.only is not None else None

    @property
    def placed(self) -> Iterator[tuple[Given | Blank, slice]]:
        """The parts, and where their tokens are."""
        ends = list(itertools.accumulate((part.width for part in self.parts), initial=0))
        return zip(self.parts, itertools.starmap(slice, itertools.pairwise(ends)), strict=True)

    @property
    def blanks(self) -> list[range]:
        """Where the tokens of the blanks are."""
        return [range(place.start, place.stop) for part, place in self.placed if isinstance(part, Blank)]

    @property
    def characters(self) -> dict[int, str]:
        """The given characters, as they can be shown, by the positions of their tokens, where tokens are characters."""
        if self.tokenizer.characters is None:
            return {}
        shown: dict[int, str] = {}
        for part, place in self.placed:
            if isinstance(part, Given):
                text = without_returns(self.tokenizer, part.text)
                shown |= enumerate(text.encode("utf-8", "replace").decode(), place.start)  # no lone surrogates
        return shown

    def write(self, ids: Ids) -> str:
        """What is given as it was given, and in the blanks what the tokens [L] say there; lines end there as all that
        are given do."""
        given = "_".join(part.text for part in self.parts if isinstance(part, Given))
        ends = "\r\n" if 0 < given.count("\n") == given.count("\r\n") else "\n"
        return "".join(
            part.text if isinstance(part, Given) else _LINE_END.sub(ends, part.write(self.tokenizer.decode(ids[place])))
            for part, place in self.placed
        )

    def draw(
        self, loaded: LoadedModel, n: int, options: SamplingOptions | None = None, callback: Callback | None = None
    ) -> torch.Tensor:
        """n ways to fill it, as tokens [n, L]; more tokens than the model reads in windows around the blanks."""
        if not (isinstance(n, Integral) and n >= 1):
            raise ValueError(f"at least one sample must be asked for; got {n}")
        options = options or SamplingOptions()
        if self.width <= loaded.length:
            return loaded.draw((n, self.width), options, self.constraint, callback)
        windows = windows_around(self.blanks, self.width, loaded.length)
        return draw_windows(loaded, self.held, windows, n, options, callback)

    def fill(
        self, loaded: LoadedModel, n: int, options: SamplingOptions | None = None, callback: Callback | None = None
    ) -> list[str]:
        """The same as texts."""
        return [self.write(row.numpy()) for row in self.draw(loaded, n, options, callback)]
