"""The tokens of a text as pieces of text that together spell it, and how they change.

Shape: L tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from operator import attrgetter, itemgetter

from cedd.data.text import REPLACEMENT
from cedd.data.tokenizers import Tokenizer
from cedd.tasks.template import Blank, Template


@lru_cache(maxsize=1 << 16)
def piece(tokenizer: Tokenizer, token: int) -> str | None:
    """The text of a token; None for the mask."""
    return None if token >= tokenizer.vocab_size else tokenizer.decode_after([token])


def whole_characters(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """The texts of tokens [L], with no character split: a character spelled by several tokens, such as an emoji in
    bytes, is at the last of them and the others are empty."""
    shown, begun = list[str](), 0
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode_after(ids[begun:end]) if begun else tokenizer.decode(ids[:end])
        whole = end == len(ids) or not text.endswith(REPLACEMENT)
        shown.append(text if whole else "")
        begun = end if whole else begun
    return shown


class TemplatePieces:
    """The tokens of a filled template as pieces whose concatenation is its text: given characters exactly as given, and
    a given space before a blank as part of the blank's first word, whether or not the model generated a space.

    Args:
        template: the template.
    """

    def __init__(self, template: Template) -> None:
        self.tokenizer, self._given = template.tokenizer, template.characters
        self._blanks: list[range] = []
        self._begins = False
        self._first: int | None = None
        """Where the text begins, if in a blank."""
        self._after_space: set[int] = set()
        """Beginnings of blanks whose space is not among the tokens (`Blank.after_space`)."""
        written = False
        for part, place in template.placed:
            if isinstance(part, Blank):
                self._first = self._first if written else place.start
                written = True
                self._blanks.append(range(place.start, place.stop))
                self._after_space |= {place.start} if part.after_space else set()
                self._begins = part.begins_text or self._begins
                continue
            written = written or bool(part.text)
            if self.tokenizer.characters is None:
                self._given |= enumerate(whole_characters(self.tokenizer, part.ids.tolist()), place.start)

    def piece(self, place: int, token: int) -> str | None:
        """The text of a token at a position, or the given text there; None for the mask."""
        text = self._given.get(place)
        return self.alternative(place, token) if text is None else self.spaced(place, text)

    def alternative(self, place: int, token: int) -> str | None:
        """The text of a token at a position, ignoring given text; None for the mask."""
        begins = place == self._first and token < self.tokenizer.vocab_size
        text = self.tokenizer.decode([token]) if begins else piece(self.tokenizer, token)
        return None if text is None else self.spaced(place, text)

    def spaced(self, place: int, text: str) -> str:
        """A text at this position, with the given space before it."""
        if place == 0 and self._begins:
            return text.removeprefix(" ")
        return f" {text}" if place in self._after_space and not text.startswith(" ") else text

    def pieces(self, ids: Sequence[int]) -> list[str | None]:
        """The pieces of tokens [L]. A character spelled by several tokens is at the last of them; while one of them is
        a mask, the others are shown as masks too. No character extends across the edge of a blank."""
        shown = [self.piece(place, token) for place, token in enumerate(ids)]
        for blank in self._blanks:
            for place, text in self._written(ids, blank).items():
                shown[place] = text
        return shown

    def _written(self, ids: Sequence[int], blank: range) -> dict[int, str | None]:
        """The pieces of a blank, by position."""
        shown = {place: self.piece(place, ids[place]) for place in blank}
        for places in _split(shown, blank):
            open_end = any(shown.get(place, "") is None for place in (places.start - 1, places.stop))
            texts, begun = whole_characters(self.tokenizer, [ids[i] for i in places]), 0
            for end, text in enumerate(texts, 1):
                if text:
                    half, spelling, begun = open_end and REPLACEMENT in text, places[begun:end], end
                    for place in spelling:
                        shown[place] = None if half else ""
                    if not half:
                        shown[spelling[-1]] = self.spaced(spelling[0], text)
        return shown

    def edits(self, before: Sequence[int], now: Sequence[int], changed: Sequence[int]) -> dict[int, str | None]:
        """The pieces that differ between two states [L], whose tokens differ at the sorted positions `changed`. Only
        the surroundings of these positions are compared, since the text may be long."""
        if self.tokenizer.characters is not None:
            return {place: self.piece(place, now[place]) for place in changed}
        found: dict[int, str | None] = {}
        for blank, places in groupby(changed, self._blank_of):
            inside = list(places)
            near = self._near(now, range(inside[0], inside[-1] + 1), blank)
            was, shown = self._written(before, near), self._written(now, near)
            found |= {i: shown[i] for i in near if before[i] != now[i] or was[i] != shown[i]}
        return found

    def _blank_of(self, place: int) -> range:
        return self._blanks[bisect_right(self._blanks, place, key=attrgetter("start")) - 1]

    def _near(self, ids: Sequence[int], places: range, blank: range) -> range:
        """These positions of a blank, adjacent tokens that hold parts of characters, and one more token on either side,
        which shows whether the parts are complete."""
        start, stop = places.start, places.stop
        while start > blank.start and self._is_part(ids[start - 1]):
            start -= 1
        while stop < blank.stop and self._is_part(ids[stop]):
            stop += 1
        return range(max(blank.start, start - 1), min(blank.stop, stop + 1))

    def _is_part(self, token: int) -> bool:
        return REPLACEMENT in (piece(self.tokenizer, token) or "")


def _split(shown: Mapping[int, str | None], blank: range) -> list[range]:
    """Runs of tokens in a blank that hold parts of characters."""
    split = ((place, REPLACEMENT in (shown[place] or "")) for place in blank)
    runs = ([place for place, _ in run] for part, run in groupby(split, itemgetter(1)) if part)
    return [range(run[0], run[-1] + 1) for run in runs]
