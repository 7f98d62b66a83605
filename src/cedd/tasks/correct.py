"""Correction: read the user's text as if it were noisy data at a small t, and take the noise away.

Shapes: W windows, L positions, V vocabulary, N tokens of the text.

One step (the paper's): argmax of p(x_0 | x_t) at every position. Several steps: sample the reverse process from t.
Only a process that can shuffle believes that a token it sees may be wrong, so absorb is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cedd.data.tokenizers import Tokenizer
from cedd.parameterization import Denoiser
from cedd.samplers import Fixed
from cedd.samplers.grids import LAST_TIME
from cedd.samplers.network import chunks
from cedd.tasks.setting import Setting, Settings

Ids = NDArray[np.int64]
_SURROGATE = re.compile("[\ud800-\udfff]")
_BATCH = 16


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


@dataclass(frozen=True)
class Reading:
    """A text as tokens [N]; `protected` ones stand for what the tokenizer does not know."""

    ids: Ids
    protected: NDArray[np.bool_]


@dataclass(frozen=True)
class Opinion:
    """What the model thinks of each token, [N]: its best replacement, that one's probability and the token's own."""

    best: Ids
    confidence: NDArray[np.float64]
    own: NDArray[np.float64]


def correct(
    setting: Setting,
    text: str,
    *,
    t: float = 0.05,
    threshold: float = 1.0,
    steps: int = 1,
    temperature: float = 0.0,
    seed: int | None = None,
) -> Corrected:
    """The text with its mistakes put right.

    t: how noisy the text is taken to be (the share of wrong tokens, for log-linear uniform).
    threshold: a token whose own probability is at least this is never touched; 1 leaves all to the argmax.
    steps: 1 takes the likeliest token everywhere; more sample the reverse process from t, in which corrections see
        each other; temperature 0 then still writes the likeliest token wherever it writes.

    Text of any length is read in overlapping windows. Characters the tokenizer does not know are left as they are.
    """
    check_correction(setting, t, threshold, steps)
    settings = Settings(steps=steps, temperature=temperature, seed=seed)
    parts = _SURROGATE.split(text)
    lone = _SURROGATE.findall(text)
    done: list[str] = []
    changes: list[Change] = []
    offset = 0
    for part, mark in zip(parts, [*lone, ""], strict=True):
        fixed, changed = _correct_part(setting, part, t, threshold, settings)
        done += [fixed, mark]
        changes += [replace(change, position=change.position + offset) for change in changed]
        offset += len(part) + len(mark)
    return Corrected("".join(done), text, tuple(changes))


def check_correction(setting: Setting, t: float, threshold: float, steps: int) -> None:
    """Refuse what cannot be done, saying why."""
    folder = setting.folder
    if folder.method.causal:
        raise ValueError(f"{folder.method.name} is autoregressive and cannot correct; train on uniform or roulette")
    if not folder.process.can_shuffle:
        raise ValueError(
            "this model's process only masks (absorb): to it a token that it sees is certainly right, so it cannot "
            "correct; train one on uniform or roulette"
        )
    if not LAST_TIME < t <= 1:
        raise ValueError(f"t says how noisy the text is and must lie in ({LAST_TIME:g}, 1]; got {t:g}")
    if not 0 <= threshold <= 1:
        raise ValueError(f"threshold is a probability and must lie in [0, 1]; got {threshold:g}")
    if steps < 1:
        raise ValueError(f"steps must be at least 1; got {steps}")


def _correct_part(
    setting: Setting, text: str, t: float, threshold: float, settings: Settings
) -> tuple[str, list[Change]]:
    tokenizer = setting.folder.tokenizer
    reading = read_text(tokenizer, text)
    if not len(reading.ids):
        return text, []
    opinion = ask(setting, reading.ids, t)
    held = reading.protected | (opinion.own >= threshold)
    one_step = settings.steps == 1
    new = opinion.best if one_step else _denoise(setting, reading.ids, held, t, settings)
    new = np.where(held | ~_has_text(tokenizer)[new], reading.ids, new)
    places = np.flatnonzero(new != reading.ids)
    if not len(places):
        return text, []
    confidence = opinion.confidence if one_step else ask(setting, new, t).own
    changes = [
        Change(
            position=_offset(tokenizer, reading.ids, i),
            before=tokenizer.decode(reading.ids[i : i + 1]),
            after=tokenizer.decode(new[i : i + 1]),
            confidence=float(confidence[i]),
            doubt=float(1 - opinion.own[i]),
        )
        for i in places.tolist()
    ]
    return _write_text(tokenizer, text, new, places), changes


# ----------------------------------------------------------------------------------------------------------------
# Text and tokens


def _characters(tokenizer: Tokenizer) -> dict[str, int] | None:
    """The table of a tokenizer whose tokens are characters."""
    return getattr(tokenizer, "characters", None)


def read_text(tokenizer: Tokenizer, text: str) -> Reading:
    """Tokens of any text. An unknown character is read as a space (or the first token) and protected."""
    table = _characters(tokenizer)
    if table is None:
        ids = tokenizer.encode(text)
        return Reading(ids, np.zeros(len(ids), dtype=np.bool_))
    filler = table.get(" ", next(iter(table.values())))
    known = [table.get(character) for character in text]
    ids = np.array([filler if token is None else token for token in known], dtype=np.int64)
    return Reading(ids, np.array([token is None for token in known], dtype=np.bool_))


def _has_text(tokenizer: Tokenizer) -> NDArray[np.bool_]:
    """Which tokens stand for text, [V]: all, but for a vocabulary of which only some tokens are characters."""
    table = _characters(tokenizer)
    if table is None:
        return np.ones(tokenizer.vocab_size, dtype=np.bool_)
    usable = np.zeros(tokenizer.vocab_size, dtype=np.bool_)
    usable[list(table.values())] = True
    return usable


def _offset(tokenizer: Tokenizer, ids: Ids, i: int) -> int:
    return i if _characters(tokenizer) is not None else len(tokenizer.decode(ids[:i]))


def _write_text(tokenizer: Tokenizer, text: str, ids: Ids, places: NDArray[np.intp]) -> str:
    if _characters(tokenizer) is None:
        return tokenizer.decode(ids)
    letters = list(text)
    for i in places.tolist():
        letters[i] = tokenizer.decode(ids[i : i + 1])
    return "".join(letters)


# ----------------------------------------------------------------------------------------------------------------
# The network's opinion, window by window


@dataclass(frozen=True)
class Window:
    """Tokens start..stop-1, of which it decides those from `first` to `last`-1: the rest is context."""

    start: int
    stop: int
    first: int
    last: int


def windows(count: int, length: int) -> list[Window]:
    """Windows of `length` tokens that overlap by a quarter and together decide every token once."""
    if count <= length:
        return [Window(0, count, 0, count)]
    context = length // 8
    stride = length - 2 * context
    starts = [*range(0, count - length, stride), count - length]
    made: list[Window] = []
    decided = 0
    for start in starts:
        last = count if start == count - length else start + length - context
        made.append(Window(start, start + length, decided, last))
        decided = last
    return made


@torch.no_grad()
def ask(setting: Setting, ids: Ids, t: float) -> Opinion:
    """p(x_0 | the text at time t), token by token."""
    cuts = windows(len(ids), setting.folder.length)
    usable = torch.from_numpy(_has_text(setting.folder.tokenizer)).to(setting.device)
    best, confidence, own = np.zeros_like(ids), np.zeros(len(ids)), np.zeros(len(ids))
    for begin in range(0, len(cuts), _BATCH):
        group = cuts[begin : begin + _BATCH]
        x = torch.from_numpy(np.stack([ids[w.start : w.stop] for w in group])).to(setting.device)
        columns = [v.cpu().numpy() for v in _posterior(setting, x, t, usable)]
        for row, w in enumerate(group):
            inside = slice(w.first - w.start, w.last - w.start)
            for target, column in zip((best, confidence, own), columns, strict=True):
                target[w.first : w.last] = column[row, inside]
    return Opinion(best, confidence, own)


def _posterior(setting: Setting, x: Tensor, t: float, usable: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The likeliest usable token, its probability and that of x itself, each [W, L]."""
    folder: Any = setting.folder
    noise = folder.process.noise(t).to(x.device)
    sigma = noise.sigma.to(x.device, torch.float32).expand(len(x))
    hidden = folder.model.features(x, sigma).flatten(0, 1)
    flat = x.flatten()
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    for rows in chunks(len(flat), folder.process.vocab_size):
        outputs = folder.model.head(hidden[rows])
        here = noise.like(flat[rows]) if noise.alpha.device == flat.device else noise.like(flat[rows].cpu())
        log_probs = folder.method.parameterization.log_posterior(outputs, flat[rows], here)
        probs = torch.exp(log_probs)
        own = probs.gather(-1, flat[rows][:, None]).squeeze(-1)
        value, best = torch.where(usable, probs, -1.0).max(-1)
        parts.append((torch.where(value > own, best, flat[rows]), torch.maximum(value, own), own))
    best, value, own = (torch.cat(column).view(x.shape) for column in zip(*parts, strict=True))
    return best, value, own


def _denoise(setting: Setting, ids: Ids, held: NDArray[np.bool_], t: float, settings: Settings) -> Ids:
    """The reverse process from t, with what is held fixed.

    The denoiser is taken at its word: its rescaling of sigma, which tames the bound, would keep mistakes in place.
    """
    method = setting.folder.method
    if isinstance(method.parameterization, Denoiser):
        method = replace(method, parameterization=Denoiser(rescale=False))
    result = ids.copy()
    cuts = windows(len(ids), setting.folder.length)
    for begin in range(0, len(cuts), _BATCH):
        group = cuts[begin : begin + _BATCH]
        x = torch.from_numpy(np.stack([ids[w.start : w.stop] for w in group]))
        where = torch.from_numpy(np.stack([held[w.start : w.stop] for w in group]))
        drawn = setting.draw((len(group), x.shape[1]), settings, Fixed(x, where), method=method, x_start=x, t_start=t)
        for row, w in enumerate(group):
            result[w.first : w.last] = drawn[row, w.first - w.start : w.last - w.start].numpy()
    return result
