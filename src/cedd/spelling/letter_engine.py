"""The engine `letters`: which tokens of a text are changed, and into which.

Shapes: L positions, N tokens of the text.

The paper takes argmax p(x_0 | x_t) at every position at once. Three additions help with typed text:

- A model of typing errors replaces the noise of the process (`scores.best_replacement`).
- Neighbours may be transposed (`transpositions`).
- Nearby changes are not independent: one mistake makes its neighbours look wrong as well. The text is therefore read
  in several passes. Each makes only the strongest change of every neighbourhood, and the next one sees it made. This
  breaks far fewer correct letters, and fixes adjacent mistakes.

With several *steps* the reverse process is sampled from t instead.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from cedd.data.text import Flags, Ids
from cedd.data.windows import windows
from cedd.models.loaded_model import LoadedModel
from cedd.parameterization import Denoiser
from cedd.samplers import Fixed, SamplingOptions
from cedd.spelling.options import CorrectionOptions
from cedd.spelling.scores import BATCH, Scorer, TokenScores, Watch, mean_surprise, score_tokens
from cedd.spelling.transpositions import Transpositions, letter_groups


@dataclass(frozen=True)
class Revision:
    """The revised tokens [N], and how they were decided."""

    now: Ids
    decided: TokenScores
    """The scores by which each token was last decided."""
    latest: TokenScores
    """The last scores of the text."""
    since: Flags
    """Tokens changed since these scores."""
    pairs: Flags
    """First tokens of transposed pairs."""


def revise(
    loaded: LoadedModel,
    given: Ids,
    protected: Flags,
    groups: NDArray[np.int64],
    options: CorrectionOptions,
    seed: int | None = None,
    *,
    first: TokenScores | None = None,
    watch: Watch | None = None,
) -> tuple[Ids, TokenScores]:
    """The tokens after all passes or steps, [N], and the scores by which each was last decided.

    `first`: the scores of the given text, if already computed.
    """
    assert options.t is not None
    score = functools.partial(score_tokens, loaded, groups=groups, t=options.t, rate=options.rate, watch=watch)
    scores = first or score(given)
    if options.steps == 1:
        made = _in_passes(loaded, score, scores, given, ~protected, options)
    else:
        fixed = protected | (scores.trust >= options.threshold)
        drawn = _denoise(loaded, given, fixed, options, seed, watch)
        drawn, none = np.where(groups[drawn] == groups[given], drawn, given), np.zeros_like(fixed)
        after = score(drawn)
        made = Revision(drawn, replace(scores, confidence=after.own), after, none, none)
    if options.max_surprise is None or (made.now == given).all():
        return made.now, made.decided
    left = ~protected & (made.now == given)
    back = mean_surprise(score(made.now, earlier=(made.latest, made.since)), left) > options.max_surprise
    back[1:] = np.where(made.pairs[:-1], back[:-1], back[1:])  # both of a pair or neither
    return np.where(back, given, made.now), made.decided


def _in_passes(
    loaded: LoadedModel, score: Scorer, scores: TokenScores, given: Ids, free: Flags, options: CorrectionOptions
) -> Revision:
    """Make the strongest change of every neighbourhood, pass after pass."""
    swaps = Transpositions(score, options.swaps, letter_groups(loaded.tokenizer), len(given))
    now, decided, turn, transposed = given, scores, np.zeros_like(free), np.zeros_like(free)
    for number in range(options.passes):
        if number:
            scores = score(now, earlier=(scores, turn))
        view, pairs = swaps.weigh(now, scores, free, turn)
        turn = view.strongest(free & view.suspicious(options.threshold), options.reach, pairs)
        if not turn.any():
            break
        now, decided = np.where(turn, view.best, now), view.where(turn, decided)
        transposed[pairs] |= turn[pairs]
        free = free & ~turn  # a replaced token was not typed, so it is not changed again
    return Revision(now, decided, scores, turn, transposed)


def _denoise(
    loaded: LoadedModel, ids: Ids, fixed: Flags, options: CorrectionOptions, seed: int | None, watch: Watch | None
) -> Ids:
    """Sample the reverse process from t, with some tokens fixed.

    A denoiser's rescaling of sigma is left out: it is for the bound, and would keep mistakes in place.
    """
    method = loaded.method
    if isinstance(method.parameterization, Denoiser):
        method = replace(method, parameterization=Denoiser(rescale=False))
    sampling = SamplingOptions(steps=options.steps, temperature=options.temperature, seed=seed)
    result = ids.copy()
    cuts = windows(len(ids), loaded.length)
    seeds = sampling.seeds_of(len(cuts))
    for begin in range(0, len(cuts), BATCH):
        group = cuts[begin : begin + BATCH]
        x, where = (torch.from_numpy(np.stack([part[w.start : w.stop] for w in group])) for part in (ids, fixed))
        own = replace(sampling, seed=None, seeds=seeds[begin : begin + BATCH], x_start=x, t_start=options.t)
        drawn = loaded.draw((len(group), x.shape[1]), own, Fixed(x, where), method=method)
        for row, w in enumerate(group):
            result[w.first : w.last] = drawn[row, w.first - w.start : w.last - w.start].numpy()
        if watch is not None:
            watch(options.steps * len(group) / len(cuts))
    return result
