"""A text with blanks: the given text is kept character for character, and the model writes the blanks.

Shapes: L tokens, of the given text and of the blanks.

The model reads any text (`encode_verbatim`): unknown characters as similar known ones, and \\r\\n as \\n. The output
contains the user's own text, not the encoded one. In vocabularies where a space belongs to the following word, the
first token of a blank begins with the space before the blank, which appears once in the output. A blank at the
beginning of a text also begins with a whole word, without the space.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral

import numpy as np
import torch

from cedd.constraints import Language
from cedd.data.text import Ids, encode_verbatim, without_returns
from cedd.data.token_languages import token_language
from cedd.data.tokenizers import Tokenizer
from cedd.models.loaded_model import LoadedModel
from cedd.network import AllowedTokens
from cedd.samplers import Constraint, Fixed, SamplingOptions
from cedd.samplers.constraints import combined
from cedd.samplers.languages import LanguageConstraint, Span
from cedd.samplers.random_numbers import check_shape
from cedd.tasks.windows import draw_windows, infilling_windows

_LINE_END = re.compile(r"(?<!\r)\n")


@dataclass(frozen=True)
class Given:
    """A given part and its tokens."""

    text: str
    ids: Ids
    hides_space: bool = False
    """Whether the tokens leave out the last character of the text, a space."""

    @property
    def width(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Blank:
    """A part of `width` tokens that the model writes."""

    width: int
    after_space: bool = False
    """Whether the part before ends with a space that is not among its tokens."""
    begins_text: bool = False
    """Whether the text begins with this blank, so that the space of its first word is removed."""
    language: Language | None = None
    """The language of its text."""
    may_end: bool = False
    """Whether the text may end before the last token of the blank."""

    @property
    def begins_word(self) -> bool:
        """Whether the first token must begin with a space."""
        return self.after_space or self.begins_text

    def write(self, text: str) -> str:
        """The text that the model wrote, without a space that the given text already has."""
        return text.removeprefix(" ") if self.begins_word else text


@dataclass(frozen=True)
class Template:
    """The parts of the text in order. Each is tokenized separately, so that no token crosses the edge of a blank."""

    parts: Sequence[Given | Blank]
    tokenizer: Tokenizer

    @classmethod
    def of(cls, parts: Sequence[str | int], tokenizer: Tokenizer) -> Template:
        """A template from given texts (str) and widths of blanks (int)."""
        made: list[Given | Blank] = []
        begins = tokenizer.words_begin_with_spaces and any(isinstance(part, str) and part for part in parts)
        for part, following in itertools.zip_longest(parts, parts[1:]):
            if isinstance(part, int):
                before = made[-1] if made else None
                made.append(Blank(part, isinstance(before, Given) and before.hides_space, begins))
            else:
                hides = tokenizer.words_begin_with_spaces and isinstance(following, int) and part.endswith(" ")
                shown = without_returns(tokenizer, part[:-1] if hides else part)
                made.append(Given(part, encode_verbatim(tokenizer, shown), hides))
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

    def in_languages(self, languages: Sequence[Language | None], *, may_end: bool = False) -> Template:
        """The same with the text of each blank in a language, or of any kind with None.

        Args:
            languages: one per blank.
            may_end: whether these texts may end before the last token of their blank.
        """
        for language in [languages] if isinstance(languages, str) else languages:
            if language is not None and not isinstance(language, Language):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(f"each blank takes a language, such as cedd.constraints.regex(...) (got {language!r})")
        blanks = sum(isinstance(part, Blank) for part in self.parts)
        if len(languages) != blanks:
            raise ValueError(f"give one constraint per blank (constraints: {len(languages)}, blanks: {blanks})")
        following = iter(languages)
        made = [
            replace(part, language=next(following), may_end=may_end) if isinstance(part, Blank) else part
            for part in self.parts
        ]
        return replace(self, parts=made)

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """The tokens of blanks whose text is in a language."""
        made: list[Span] = []
        for part, place in self.placed:
            if isinstance(part, Blank) and part.language is not None:
                before = " " if part.begins_word and self.tokenizer.spaced.any() else ""
                ends = self.tokenizer.ends if part.may_end else ()
                part.language.check_room(part.width, self.tokenizer.texts.longest)
                compiled = token_language(part.language, self.tokenizer, may_end=part.may_end, before=before)
                made.append(Span(place.start, place.stop, compiled, ends, part.language.name))
        return tuple(made)

    @property
    def only(self) -> AllowedTokens | None:
        """A constraint: the first token of a blank that begins with a word begins with a space; None if there are no
        such blanks. Blanks with a language need none, because the language includes the space."""
        starts = [
            place.start
            for part, place in self.placed
            if isinstance(part, Blank) and part.width and part.begins_word and part.language is None
        ]
        if not starts or not self.tokenizer.spaced.any():
            return None
        where = torch.zeros(self.width, dtype=torch.bool)
        where[starts] = True
        return AllowedTokens(where, torch.from_numpy(self.tokenizer.spaced))

    @property
    def held(self) -> Fixed:
        """The constraint that fixes the given tokens, and includes the languages of blanks."""
        if self.spans:
            return LanguageConstraint(self.ids, self.given, self.only, self.spans)
        return Fixed(self.ids, self.given, self.only)

    @property
    def constraint(self) -> Fixed | None:
        """The same; None if it has no effect."""
        held = self.held
        return held if held.where.any() or held.only is not None or self.spans else None

    @property
    def placed(self) -> Iterator[tuple[Given | Blank, slice]]:
        """The parts, with the slices of their tokens."""
        ends = list(itertools.accumulate((part.width for part in self.parts), initial=0))
        return zip(self.parts, itertools.starmap(slice, itertools.pairwise(ends)), strict=True)

    @property
    def blanks(self) -> list[range]:
        """The slices of the tokens of the blanks."""
        return [range(place.start, place.stop) for part, place in self.placed if isinstance(part, Blank)]

    @property
    def characters(self) -> dict[int, str]:
        """The given characters in displayable form, by position; empty unless tokens are characters."""
        if self.tokenizer.characters is None:
            return {}
        shown: dict[int, str] = {}
        for part, place in self.placed:
            if isinstance(part, Given):
                text = without_returns(self.tokenizer, part.text)
                shown |= enumerate(text.encode("utf-8", "replace").decode(), place.start)  # no lone surrogates
        return shown

    def write(self, ids: Ids, stop: Sequence[int] = ()) -> str:
        """The text for tokens [L]: the given parts unchanged, and the blanks decoded up to a token of `stop`, with the
        line ends of the given text.
        """
        given = "_".join(part.text for part in self.parts if isinstance(part, Given))
        ends = "\r\n" if 0 < given.count("\n") == given.count("\r\n") else "\n"
        text = ""
        for part, place in self.placed:
            own = isinstance(part, Blank)
            text += self._written(part, _before(ids[place], stop), ends, bool(text)) if own else part.text
        return text

    def written(self, ids: Ids, stop: Sequence[int]) -> tuple[int, bool]:
        """The number of tokens in the blanks of tokens [L], up to those of `stop`, and whether there is a `stop`
        token."""
        parts = [ids[place] for part, place in self.placed if isinstance(part, Blank)]
        ended = [len(_before(part, stop)) < len(part) for part in parts]
        return sum(len(_before(part, stop)) for part in parts) + sum(ended), any(ended)

    def _written(self, blank: Blank, ids: Ids, ends: str, follows: bool) -> str:
        """The text of a blank's tokens, after the preceding text."""
        if blank.may_end:
            ids = _before(ids, self.tokenizer.ends)
        text = blank.write(self.tokenizer.decode_after(ids) if follows else self.tokenizer.decode(ids))
        return text if blank.language is not None else _LINE_END.sub(ends, text)

    def draw(
        self, loaded: LoadedModel, n: int, options: SamplingOptions | None = None, constraint: Constraint | None = None
    ) -> torch.Tensor:
        """n filled templates as tokens [n, L]; templates above the context length are filled in windows around the
        blanks.

        constraint: an additional constraint on the tokens.
        """
        if not (isinstance(n, Integral) and n >= 1):
            raise ValueError(f"n must be at least 1 (got {n})")
        check_shape((n, self.width))
        options = self._with_reward_of_texts(options or SamplingOptions())
        if self.width <= loaded.length or loaded.writes_blocks:
            return loaded.draw((n, self.width), options, combined(self.constraint, constraint))
        if constraint is not None:
            raise ValueError(f"a constraint needs a text of at most {loaded.length} tokens (got {self.width})")
        if options.particles is not None:
            raise ValueError(f"particles need a text of at most {loaded.length} tokens (got {self.width})")
        windows = infilling_windows(self.blanks, self.width, loaded.length)
        for span in self.spans:
            if not any(window.first <= span.start and span.stop <= window.last for window in windows):
                raise ValueError(
                    f"a blank with a constraint has at most {loaded.length // 2} tokens in a text that is longer than "
                    f"the model reads (got {len(span)})"
                )
        return draw_windows(loaded, self.held, windows, n, options)

    def _with_reward_of_texts(self, options: SamplingOptions) -> SamplingOptions:
        """The options with a reward of tokens instead of texts."""
        if (reward := options.reward) is None:
            return options
        stop = options.stop
        return replace(options, reward=lambda tokens: reward([self.write(row.cpu().numpy(), stop) for row in tokens]))

    def fill(
        self, loaded: LoadedModel, n: int, options: SamplingOptions | None = None, constraint: Constraint | None = None
    ) -> list[str]:
        """The same, as texts."""
        stop = () if options is None else options.stop
        return [self.write(row.numpy(), stop) for row in self.draw(loaded, n, options, constraint)]


def _before(ids: Ids, stop: Sequence[int]) -> Ids:
    """The tokens before the first of the `stop` tokens."""
    end = next((place for place, token in enumerate(ids.tolist()) if token in stop), None) if stop else None
    return ids[:end]
