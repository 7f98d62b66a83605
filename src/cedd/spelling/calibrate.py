"""Choosing a model's defaults of correction on a text that it was not trained on.

Shapes: N tokens of the text.

Letters of the text are replaced (`corrupt_letters`: a share of them, by other letters of the same case, at positions
unknown to the model) and corrected. A letter is replaced if p_keep / (p_keep + p_best) is below a *level*, which is
lowered until no more correct letters are broken than allowed. This is done with a single pass for each of several
times, then with all passes at the time that fixes the most. The limit of surprise lies between the surprise of the
corrected text and that of a unigram model of letters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cedd.data.text import EncodedText, Flags, Ids, encode_text
from cedd.models.loaded_model import LoadedModel
from cedd.spelling.corruption import Corruption, corrupt_letters
from cedd.spelling.letter_engine import revise
from cedd.spelling.options import CorrectionOptions, correction_options
from cedd.spelling.scores import mean_surprise, rate_of_time, score_tokens, time_of_rate
from cedd.spelling.token_groups import protected_tokens, token_groups
from cedd.spelling.user_protocol import outcomes
from cedd.storage import JSONObject

RATES = (0.02, 0.05, 0.1, 0.2)
"""The times tried are those at which the process has these rates."""
LEVELS = (0.98, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01, 0.003, 0.001, 0.0)


@dataclass(frozen=True)
class Calibration:
    """Options of correction, and their effect: shares of wrong letters fixed and of correct letters broken."""

    options: dict[str, Any]
    fixed: float
    broken: float


Attempt = tuple[Calibration, Ids]
"""The effect of options, and the resulting tokens [N]."""


@dataclass(frozen=True)
class CalibrationText:
    """A text with mistakes, its tokens, and which of them [N] are letters that may be changed."""

    loaded: LoadedModel
    corruption: Corruption
    encoded: EncodedText
    letters: Flags

    @property
    def given(self) -> Ids:
        return self.encoded.ids

    def evaluated(self, now: Ids, options: JSONObject) -> Attempt:
        """The effect of options that gave these tokens [N]."""
        seen = outcomes(self.corruption.original, self.corruption.text, self.encoded.written(now))
        return Calibration(options, seen.fixed.value, seen.broken.value), now


def calibrate(
    loaded: LoadedModel,
    text: str,
    *,
    mistakes: float = 0.05,
    broken: float = 0.0025,
    rates: Sequence[float] = RATES,
    seed: int = 0,
) -> Calibration:
    """The options that fix the most mistakes of this text and break at most this share of its correct letters.

    Options that are not searched (`swaps`, `passes`, ...) are the folder's, except for the limit of surprise, which is
    determined last.
    """
    if not 0 <= broken <= 1:
        raise ValueError(f"broken must be in [0, 1] (got {broken:g})")
    exercise = _exercise(loaded, text, mistakes, seed)
    process, groups = loaded.process, token_groups(loaded.tokenizer, "letters")
    times = [time_of_rate(process, rate) for rate in rates if rate < rate_of_time(process, 1.0)]
    if not times:
        raise ValueError("this model's process shuffles too little to correct; train one with a smaller p_m")

    def unlimited(options: JSONObject) -> CorrectionOptions:
        return replace(correction_options(loaded, options), max_surprise=None)

    def once(t: float) -> Attempt:
        scores = score_tokens(loaded, exercise.given, groups, t, mistakes)

        def at(level: float) -> Attempt:
            options = level_options(t, mistakes, level)
            turn = scores.strongest(exercise.letters & (scores.trust < level), unlimited(options).reach)
            return exercise.evaluated(np.where(turn, scores.best, exercise.given), options)

        return _boldest(map(at, LEVELS), broken)

    def in_full(level: float) -> Attempt:
        options = level_options(chosen, mistakes, level)
        now, _ = revise(loaded, exercise.given, ~exercise.letters, groups, unlimited(options))
        return exercise.evaluated(now, options)

    chosen = max((once(t)[0] for t in times), key=lambda one: one.fixed).options["t"]
    best, now = _boldest(map(in_full, LEVELS), broken)
    limit = _limit(exercise, now, unlimited(best.options))
    return replace(best, options={**best.options, "max_surprise": limit})


def level_options(t: float, rate: float, level: float) -> JSONObject:
    """Options by which a letter is replaced if p_keep / (p_keep + p_best) < level at this rate.

    Up to 1/2 the level is the threshold. Above, it is the argmax at a higher rate, whose odds are level / (1 - level)
    times those of this one.
    """
    odds = rate / (1 - rate) * max(1.0, level / (1 - level))
    return {"rate": _short(odds / (1 + odds)), "t": _short(t), "threshold": min(level, 0.5)}


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _boldest(falling: Iterable[Attempt], broken: float) -> Attempt:
    return next(one for one in falling if one[0].broken <= broken)  # the last level, 0, changes nothing


def _limit(exercise: CalibrationText, now: Ids, options: CorrectionOptions) -> float:
    """One third of the way from the 99% quantile of the corrected text's surprise to the entropy of its letters, which
    is the surprise of a unigram model (2.8 nats in English)."""
    loaded, letters = exercise.loaded, exercise.letters
    assert options.t is not None
    scores = score_tokens(loaded, now, token_groups(loaded.tokenizer, "letters"), options.t, options.rate)
    usual = float(np.quantile(mean_surprise(scores, letters & (now == exercise.given))[letters], 0.99))
    meant = encode_text(loaded.tokenizer, exercise.corruption.original).ids
    shares = np.unique(meant[letters], return_counts=True)[1] / letters.sum()
    return _short(usual + (float(-(shares * np.log(shares)).sum()) - usual) / 3)


def _exercise(loaded: LoadedModel, text: str, mistakes: float, seed: int) -> CalibrationText:
    tokenizer = loaded.tokenizer
    if tokenizer.characters is None:
        raise ValueError("calibration needs a character tokenizer")
    corruption = corrupt_letters(text, mistakes, seed)
    encoded = encode_text(tokenizer, corruption.text)
    letters = ~protected_tokens(encoded, token_groups(tokenizer, "letters"), "letters")
    if not len(corruption.positions) or not letters.any():
        raise ValueError("the text for calibration has too few letters; give a longer one")
    return CalibrationText(loaded, corruption, encoded, letters)
