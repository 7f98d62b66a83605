"""Correction: read the user's text as if it were noisy data at a small t, and take the noise away.

Shapes: L positions, V vocabulary, N tokens of the text.

The paper takes argmax p(x_0 | x_t) at every position at once. Three things serve a reader's text better:

- What is known of typed mistakes replaces the noise of the process (`opinion.judge`): a wrong letter is another letter.
- Typed mistakes are also neighbours that changed places (`swaps`): "drak".
- Changes that are near each other are not independent: one mistake makes its neighbours look wrong as well. So the
  text is read in several passes, each of which makes the surest change of every neighbourhood only, and the next one
  sees it made. This breaks far fewer right letters, and mends mistakes that stand side by side.

With several *steps* the reverse process is sampled from t instead. Only a process that can shuffle believes that a
token it sees may be wrong, so absorb is refused.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from cedd.data.text import Flags, Ids, read_text, starts_of, without_surrogates, write_text
from cedd.models.loaded import Setting, Settings, changed
from cedd.parameterization import Denoiser
from cedd.samplers import Fixed
from cedd.samplers.grids import LAST_TIME
from cedd.spelling.letters import held, token_groups
from cedd.spelling.scores import BATCH, Opinion, Think, Watch, ask, strangeness, time_of_rate, windows
from cedd.spelling.transpositions import READINGS, Swaps, letter_groups


@dataclass(frozen=True)
class CorrectionOptions:
    """How to correct. A model's folder may have defaults of its own ("correction" in its config.json)."""

    rate: float = 0.05
    """The share of wrong tokens that is expected in the text."""
    t: float | None = None
    """The time that the network is told; by default the one at which its process has this rate (`time_of_rate`)."""
    threshold: float = 0.5
    """A token is kept unless own / (own + best) is below this, own being its probability and best that of the likeliest
    other; from 0.5 on all is left to the argmax. So no other token takes the place of one whose probability is at least
    this; of two letters that change places own is the probability that they should not (`transpositions`).
    Of all rules that break as many right tokens this one fixes most (each change adds best to what is expected to be
    fixed and own to what is broken: take those with the highest ratio)."""
    change: Literal["letters", "all"] | None = None
    """letters: a plain letter may become another of its script and case, and nothing else changes: no space, digit,
    point, capital or accent (`reading.plain_letter`), and no letter of an address, a name with digits or other things
    that are no words (`reading.left_alone`). all: any token may become any other. By default letters, where tokens are
    characters or bytes."""
    passes: int = 3
    """How often the text is read at most; later passes see what earlier ones have mended."""
    reach: int = 3
    """Of changes within so many tokens of each other a pass makes only the surest; 0 makes all at once."""
    strange: float | None = None
    """Changes are taken back where the text around them is stranger than this, in nats a letter (`strangeness`): it is
    then in a language, or of a kind, that the model does not know. Without a limit none is."""
    swaps: float = 0.002
    """The share of neighbouring letters that is expected to have changed places (`transpositions`); 0 looks for none,
    and so does a correction in several steps."""
    steps: int = 1
    """1 takes the likeliest token; more sample the reverse process from t."""
    temperature: float = 0.0
    """Of several steps: 0 writes the likeliest token wherever it writes."""

    def changed(self, given: Mapping[str, Any], source: str = "the options of correction") -> CorrectionOptions:
        """These options with those given (not None) in their place."""
        return changed(self, given, source)

    @property
    def question(self) -> tuple[float | None, float, str | None]:
        """What is asked of the text at first: ways that ask the same share its first reading."""
        return self.t, self.rate, self.change

    def check(self) -> None:
        """Refuse what cannot be meant."""
        if self.t is not None and not LAST_TIME < self.t <= 1:
            raise ValueError(f"t says how noisy the text is and must lie in ({LAST_TIME:g}, 1]; got {self.t:g}")
        if not 0 < self.rate < 1:
            raise ValueError(f"rate is a share of wrong tokens and must lie in (0, 1); got {self.rate:g}")
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold is a probability and must lie in [0, 1]; got {self.threshold:g}")
        if not 0 <= self.swaps < 1:
            raise ValueError(f"swaps is a share of neighbouring letters and must lie in [0, 1); got {self.swaps:g}")
        if self.strange is not None and not self.strange >= 0:
            raise ValueError(f"strange is a mean surprise and must be 0 or more; got {self.strange:g}")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be 0 or more, and finite; got {self.temperature:g}")
        if self.change not in (None, "letters", "all"):
            raise ValueError(f"change says what may be changed, letters or all; got {self.change!r}")
        for name, least in (("passes", 1), ("reach", 0), ("steps", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}; got {getattr(self, name)}")


@dataclass(frozen=True)
class Change:
    """One token that was replaced."""

    position: int
    """Where it begins in the given text, in characters."""
    before: str
    after: str
    confidence: float
    """p(x_0 = the new token), given the text as it was (one step) or as it became (several)."""
    doubt: float
    """1 - p(x_0 = the old token)."""


class Corrected(str):
    """The corrected text, with what was changed."""

    original: str
    changes: tuple[Change, ...]

    def __new__(cls, text: str, original: str, changes: tuple[Change, ...]) -> Corrected:
        made = super().__new__(cls, text)
        made.original, made.changes = original, changes
        return made

    @property
    def text(self) -> str:
        return str(self)


def corrections(
    setting: Setting,
    text: str,
    ways: Iterable[CorrectionOptions],
    seed: int | None = None,
    watch: Watch | None = None,
) -> Iterator[Corrected]:
    """The text corrected in one way after another, each as if alone; its first reading is shared."""
    if not isinstance(text, str):
        raise TypeError(f"what is corrected is a text (str), not {type(text).__name__}")
    parts = [(Draft(setting, part), mark) for part, mark in without_surrogates(setting.folder.tokenizer, text)]
    for options in ways:
        done: list[str] = []
        changes: list[Change] = []
        offset = 0
        for draft, mark in parts:
            fixed, changed = draft.corrected(options, seed, watch)
            done += [fixed, mark]
            changes += [replace(change, position=change.position + offset) for change in changed]
            offset += len(draft.text) + len(mark)
        yield Corrected("".join(done), text, tuple(changes))


def correction_options(setting: Setting, given: Mapping[str, Any]) -> CorrectionOptions:
    """What holds for this model: the caller's options, before its folder's, before the defaults; checked, and with
    a time."""
    folder = setting.folder
    if not folder.method.dynamics.noisy:
        raise ValueError(f"{folder.method.name} is autoregressive and cannot correct; train on uniform or roulette")
    if not folder.process.can_shuffle:
        raise ValueError(
            "this model's process only masks (absorb): to it a token that it sees is certainly right, so it cannot "
            "correct; train one on uniform or roulette"
        )
    usual = CorrectionOptions().changed(folder.config.get("correction", {}), "the corrections of the model's folder")
    asked = usual.changed(given)
    asked.check()
    return asked if asked.t is not None else replace(asked, t=time_of_rate(folder.process, asked.rate))


@dataclass(frozen=True)
class Draft:
    """A text to be corrected, perhaps in several ways: those that ask the same of it at first ask once."""

    setting: Setting
    text: str
    first: dict[Any, Opinion] = field(default_factory=dict[Any, Opinion])
    """By `CorrectionOptions.question`."""

    def corrected(
        self, options: CorrectionOptions, seed: int | None, watch: Watch | None = None
    ) -> tuple[str, list[Change]]:
        """The text put right, and what was changed."""
        tokenizer = self.setting.folder.tokenizer
        reading, groups = read_text(tokenizer, self.text), token_groups(tokenizer, options.change)
        protected = held(self.text, reading, groups, options.change)
        if protected.all():
            return self.text, []
        if options.question not in self.first:
            assert options.t is not None
            self.first[options.question] = ask(self.setting, reading.ids, groups, options.t, options.rate, watch=watch)
        now, opinion = revise(
            self.setting, reading.ids, protected, groups, options, seed, first=self.first[options.question], watch=watch
        )
        places = np.flatnonzero(now != reading.ids)
        if not len(places):
            return self.text, []
        changes = [
            Change(
                position=start,
                before=tokenizer.decode(reading.ids[i : i + 1]),
                after=tokenizer.decode(now[i : i + 1]),
                confidence=float(opinion.confidence[i]),
                doubt=float(1 - opinion.own[i]),
            )
            for i, start in zip(places.tolist(), starts_of(tokenizer, reading, places), strict=True)
        ]
        return write_text(tokenizer, self.text, reading, now, places), changes


@dataclass(frozen=True)
class Revision:
    """The tokens as they were revised, [N], and how that came about."""

    now: Ids
    decided: Opinion
    """By which each was last decided."""
    latest: Opinion
    """What the model last thought."""
    since: Flags
    """The tokens that were changed since."""
    pairs: Flags
    """The first ones of two that changed places."""


def revise(
    setting: Setting,
    given: Ids,
    protected: Flags,
    groups: NDArray[np.int64],
    options: CorrectionOptions,
    seed: int | None = None,
    *,
    first: Opinion | None = None,
    watch: Watch | None = None,
) -> tuple[Ids, Opinion]:
    """The tokens after all passes or steps, [N], and of each the opinion by which it was last decided.

    first: what the model thinks of the text as it is given, where that is known already.
    """
    assert options.t is not None
    think = functools.partial(ask, setting, groups=groups, t=options.t, rate=options.rate, watch=watch)
    opinion = first or think(given)
    if options.steps == 1:
        made = _in_passes(setting, think, opinion, given, ~protected, options)
    else:
        settings = Settings(steps=options.steps, temperature=options.temperature, seed=seed)
        fixed = protected | (opinion.trust >= options.threshold)
        drawn = _denoise(setting, given, fixed, options.t, settings, watch)
        drawn, none = np.where(groups[drawn] == groups[given], drawn, given), np.zeros_like(fixed)
        after = think(drawn)
        made = Revision(drawn, replace(opinion, confidence=after.own), after, none, none)
    if options.strange is None or (made.now == given).all():
        return made.now, made.decided
    left = ~protected & (made.now == given)
    back = strangeness(think(made.now, earlier=(made.latest, made.since)), left) > options.strange
    back[1:] = np.where(made.pairs[:-1], back[:-1], back[1:])  # both of a pair or neither
    return np.where(back, given, made.now), made.decided


def _in_passes(
    setting: Setting, think: Think, opinion: Opinion, given: Ids, free: Flags, options: CorrectionOptions
) -> Revision:
    """The surest change of every neighbourhood, time and again."""
    swaps = Swaps(think, options.swaps, letter_groups(setting.folder.tokenizer), len(given))
    now, decided, turn, exchanged = given, opinion, np.zeros_like(free), np.zeros_like(free)
    for number in range(options.passes):
        if number:
            opinion = think(now, earlier=(opinion, turn))
        view, pairs = swaps.weigh(now, opinion, free, turn)
        turn = view.surest_of(free & view.doubted(options.threshold), options.reach, pairs)
        if not turn.any():
            break
        now, decided = np.where(turn, view.best, now), view.where(turn, decided)
        exchanged[pairs] |= turn[pairs]
        free = free & ~turn  # what was replaced is not what was typed: its probability says nothing of it any more
    return Revision(now, decided, opinion, turn, exchanged)


def readings(options: CorrectionOptions) -> int:
    """About how often the network reads a text to correct it so, after it has read it once."""
    if options.steps > 1:
        return options.steps + 1
    return options.passes - 1 + (options.strange is not None) + READINGS * (options.swaps > 0)


class Readings:
    """How much of the work is done: how often the network has read the text, of as often as it may have to."""

    def __init__(self, ways: Sequence[CorrectionOptions], progress: Callable[[float, float], None]) -> None:
        questions = [options.question for options in ways]
        new = [question not in questions[:number] for number, question in enumerate(questions)]
        self.ends = list(accumulate(readings(options) + first for options, first in zip(ways, new, strict=True)))
        self.done, self.finished, self.progress = 0.0, 0, progress

    def read(self, texts: float) -> None:
        """So much more was read; a way never takes more than was planned for it."""
        self.done = min(self.done + texts, self.ends[self.finished])
        self.progress(self.done, self.ends[-1])

    def finish(self) -> None:
        """The way is done, whether or not it needed all of its readings."""
        self.done, self.finished = self.ends[self.finished], self.finished + 1
        self.progress(self.done, self.ends[-1])


def _denoise(setting: Setting, ids: Ids, fixed: Flags, t: float, settings: Settings, watch: Watch | None) -> Ids:
    """The reverse process from t, with some tokens fixed.

    The denoiser is taken at its word: its rescaling of sigma, which tames the bound, would keep mistakes in place.
    """
    method = setting.folder.method
    if isinstance(method.parameterization, Denoiser):
        method = replace(method, parameterization=Denoiser(rescale=False))
    result = ids.copy()
    cuts = windows(len(ids), setting.folder.length)
    for begin in range(0, len(cuts), BATCH):
        group = cuts[begin : begin + BATCH]
        x = torch.from_numpy(np.stack([ids[w.start : w.stop] for w in group]))
        where = torch.from_numpy(np.stack([fixed[w.start : w.stop] for w in group]))
        drawn = setting.draw((len(group), x.shape[1]), settings, Fixed(x, where), method=method, x_start=x, t_start=t)
        for row, w in enumerate(group):
            result[w.first : w.last] = drawn[row, w.first - w.start : w.last - w.start].numpy()
        if watch is not None:
            watch((settings.steps or 1) * len(group) / len(cuts))
    return result
