"""Infilling texts with more tokens than the model's context: blanks are filled window by window, from left to right.

Shapes: B texts, L tokens of a text, N tokens of the context.

Every window has N tokens. Blanks within half of that are filled together, in a window with them in its middle, as far
as the ends of the text allow. A window that would end within a later, still unknown blank ends before it. A wider blank
is filled in equal parts of at most half a window, each in the window that ends with it, except for the last, which also
has the text after the blank as context.

A window contains its given tokens and those filled by earlier windows. Later blanks in it are drawn with the others and
discarded, so that the kept tokens are drawn from the model's law with these tokens unknown.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from cedd.data.windows import Window
from cedd.models.loaded_model import LoadedModel
from cedd.samplers import Callback, Fixed, SamplingOptions, text_seeds
from cedd.samplers.languages import LanguageConstraint


def infilling_windows(blanks: Iterable[range], count: int, length: int) -> list[Window]:
    """Windows of `length` tokens in a text of `count`, which is longer; together they fill the blanks, in order."""
    made = list[Window]()
    half = max(1, length // 2)
    waiting = [blank for blank in blanks if blank][::-1]  # the next one last
    while waiting:
        blank = waiting.pop()
        first, last = blank.start, blank.stop
        if (width := len(blank)) > half:
            parts = -(-width // half)
            stop = last = first + -(-width // parts)
            waiting.append(range(last, blank.stop))
        else:
            while waiting and waiting[-1].stop - first <= half:
                last = waiting.pop().stop
            around = length - (last - first)
            stop = _before_blanks(min(last + -(-around // 2), count), waiting)
        start = max(0, stop - length)
        made.append(Window(start, start + length, first, last))
    return made


def _before_blanks(stop: int, waiting: Sequence[range]) -> int:
    """The end of a window that would end at `stop`, moved so that it does not lie within one of these blanks (nearest
    last)."""
    number = len(waiting)
    while number and waiting[number - 1].start < stop:
        number -= 1
    for blank in waiting[number:]:
        stop = blank.start if blank.stop >= stop else stop
    return stop


def windows_of_filled_text(blanks: Iterable[range], count: int, length: int) -> list[Window]:
    """Windows to score a filled text: each has the blanks of one of `infilling_windows`, as near to its middle as the
    ends of the text allow. A text that fits into the context is one window."""
    if count <= length:
        return [Window(0, count, 0, count)]
    around = infilling_windows(blanks, count, length)
    starts = [min(max(0, one.first - (length - (one.last - one.first)) // 2), count - length) for one in around]
    return [Window(start, start + length, one.first, one.last) for start, one in zip(starts, around, strict=True)]


def draw_windows(
    loaded: LoadedModel, held: Fixed, windows: Sequence[Window], n: int, options: SamplingOptions
) -> Tensor:
    """n fillings of the positions [L] that are not fixed, as tokens [n, L].

    The callback sees whole texts, with token V in blanks that have not been filled yet, as if of one run whose time
    goes from 1 to 0 over all windows.
    """
    loaded.method.dynamics.check_held(held.where[None])  # each window has a part of it only
    seeds, batch = options.seeds_of(n), max(1, options.batch or n)
    parts = (seeds[start : start + batch] for start in range(0, n, batch))
    return torch.cat([_draw_part(loaded, held, windows, part, options) for part in parts])


def _draw_part(
    loaded: LoadedModel, held: Fixed, windows: Sequence[Window], seeds: Sequence[int], options: SamplingOptions
) -> Tensor:
    """[B, L] for seeds [B]. Every window has its own seed; otherwise equal blanks would be filled identically."""
    x = held.tokens.where(held.where, loaded.process.vocab_size).repeat(len(seeds), 1)
    own, steps = [text_seeds(seed, len(windows)) for seed in seeds], itertools.count()

    def seen(number: int, window: Window, watch: Callback) -> Callback:
        begun = rows = 0  # rows that were drawn before, and those in progress

        def show(step: int, t: float, part: Tensor) -> None:
            nonlocal begun, rows
            if step == 0:  # the next rows, or the same ones again in smaller batches after memory ran out
                begun, rows = min(begun + rows, len(x) - len(part)), len(part)
            x[begun : begun + rows, window.first : window.last] = _decided(window, part).cpu()
            done = (begun + rows * (1 - t)) / len(x)
            watch(next(steps), 1 - (number + done) / len(windows), x)

        return show

    for number, window in enumerate(windows):
        place = slice(window.start, window.stop)
        known = held.where[place].clone()
        known[: window.first - window.start] = True
        only = held.only and replace(held.only, where=held.only.where[place].expand(len(x), -1))
        callback = None if options.callback is None else seen(number, window, options.callback)
        fixed = Fixed(x[:, place].masked_fill(~known, 0), known.expand(len(x), -1), only)
        drawn = loaded.draw(
            (len(x), len(known)),
            replace(options, seed=None, seeds=[one[number] for one in own], callback=callback),
            _with_spans(fixed, held, window),
        )
        x[:, window.first : window.last] = _decided(window, drawn)
    return x


def _with_spans(fixed: Fixed, held: Fixed, window: Window) -> Fixed:
    """The constraint of a window: fixed tokens, and the languages of the blanks that it decides."""
    if not isinstance(held, LanguageConstraint):
        return fixed
    spans = [span for span in held.spans if window.first <= span.start and span.stop <= window.last]
    return LanguageConstraint(fixed.tokens, fixed.where, fixed.only, tuple(span.moved(window.start) for span in spans))


def _decided(window: Window, x: Tensor) -> Tensor:
    """The tokens that a window decides, from its tokens [B, N]."""
    return x[:, window.first - window.start : window.last - window.start]
