"""Defaults of correction for one model, found on a text that it was not trained on.

Shapes: N tokens of the text.

The text's letters are replaced as a user's would be (`corrupt_letters`: so many in a hundred, by other letters of
their case, at places that the model is not told) and corrected. A letter is replaced where it weighs less than a
*level* beside its likeliest replacement; the level falls from daring to timid until no more right letters are broken
than is allowed. That is done with a single pass for each of several times that the network may be told, then with all
passes at the time that fixes most. How strange the text is to the model once it is corrected, and how strange its
letters would be to one that knows no more than how often each occurs, say from where on it should leave a text alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cedd.data.corruption import corrupt_letters
from cedd.tasks.correct import CorrectionOptions, correction_options, revise
from cedd.tasks.opinion import ask, rate_of_time, strangeness, time_of_rate
from cedd.tasks.reading import Ids, read_text, token_groups
from cedd.tasks.setting import Setting

RATES = (0.02, 0.05, 0.1, 0.2)
"""Times are tried at which the process has these rates."""
LEVELS = (0.98, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01, 0.003, 0.001, 0.0)


@dataclass(frozen=True)
class Calibration:
    """Options of correction, and what they did: shares of wrong letters fixed and of right letters broken."""

    options: dict[str, Any]
    fixed: float
    broken: float


@dataclass(frozen=True)
class Exercise:
    """A text with mistakes, as tokens [N]: what was meant, what is given, and which of them are letters."""

    text: str
    meant: Ids
    given: Ids
    letters: NDArray[np.bool_]

    def shares(self, now: Ids) -> tuple[float, float]:
        """The share of wrong letters fixed, and that of right letters broken."""
        wrong = self.given != self.meant
        right = self.letters & ~wrong
        return float((now == self.meant)[wrong].mean()), float((now != self.meant)[right].mean())


def calibrate(
    setting: Setting,
    text: str,
    *,
    mistakes: float = 0.05,
    broken: float = 0.0025,
    rates: Sequence[float] = RATES,
    seed: int = 0,
) -> Calibration:
    """The options that fix most mistakes of this text and break at most this share of its right letters."""
    exercise = _exercise(setting, text, mistakes, seed)
    process, groups = setting.folder.process, token_groups(setting.folder.tokenizer, "letters")
    times = [time_of_rate(process, rate) for rate in rates if rate < rate_of_time(process, 1.0)]
    if not times:
        raise ValueError("this model's process shuffles too little to correct; train one with a smaller p_m")

    def once(t: float) -> Calibration:
        opinion = ask(setting, exercise.given, groups, t, mistakes)

        def at(level: float) -> Calibration:
            turn = opinion.surest_of(exercise.letters & (opinion.trust < level), CorrectionOptions.reach)
            now = np.where(turn, opinion.best, exercise.given)
            return Calibration(level_options(t, mistakes, level), *exercise.shares(now))

        return _boldest(map(at, LEVELS), broken)

    def in_full(level: float) -> Calibration:
        options = level_options(chosen, mistakes, level)
        now, _ = revise(setting, exercise.given, ~exercise.letters, groups, correction_options(setting, options))
        return Calibration(options, *exercise.shares(now))

    chosen = max(map(once, times), key=lambda one: one.fixed).options["t"]
    best = _boldest(map(in_full, LEVELS), broken)
    return replace(best, options={**best.options, "strange": _limit(setting, exercise, best.options)})


def level_options(t: float, rate: float, level: float) -> dict[str, Any]:
    """Options by which a letter is replaced if own / (own + best) < level at this rate.

    Up to 1/2 that is the threshold. Beyond, it is the argmax at a higher rate, whose odds are level / (1 - level) times
    those of this one.
    """
    odds = rate / (1 - rate) * max(1.0, level / (1 - level))
    return {"rate": _short(odds / (1 + odds)), "t": _short(t), "threshold": min(level, 0.5)}


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _boldest(falling: Iterable[Calibration], broken: float) -> Calibration:
    return next(one for one in falling if one.broken <= broken)  # the last level, 0, changes nothing


def _limit(setting: Setting, exercise: Exercise, options: dict[str, Any]) -> float:
    """A third of the way from what 99 in 100 places of the text stay below, once corrected, to the entropy of its
    letters: the surprise of one who knows only how often each occurs (2.8 nats in English)."""
    asked, groups = correction_options(setting, options), token_groups(setting.folder.tokenizer, "letters")
    assert asked.t is not None
    now, _ = revise(setting, exercise.given, ~exercise.letters, groups, asked)
    left = exercise.letters & (now == exercise.given)
    strange = strangeness(ask(setting, now, groups, asked.t, asked.rate), left)
    usual = float(np.quantile(strange[exercise.letters], 0.99))
    shares = np.unique(exercise.meant[exercise.letters], return_counts=True)[1] / exercise.letters.sum()
    return _short(usual + (float(-(shares * np.log(shares)).sum()) - usual) / 3)


def _exercise(setting: Setting, text: str, mistakes: float, seed: int) -> Exercise:
    tokenizer = setting.folder.tokenizer
    if getattr(tokenizer, "characters", None) is None:
        raise ValueError("correction is calibrated where tokens are characters; this model's are not")
    corruption, meant = corrupt_letters(text, mistakes, seed), read_text(tokenizer, text)
    given = read_text(tokenizer, corruption.text).ids
    letters = (token_groups(tokenizer, "letters")[given] >= 0) & ~meant.protected
    if not (given != meant.ids).any():
        raise ValueError("the text to calibrate on has too few letters; give a longer one")
    return Exercise(corruption.text, meant.ids, given, letters)
