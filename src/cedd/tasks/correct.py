"""Correction: read the user's text as if it were noisy data at a small t, and take the noise away.

Shapes: W windows, L positions, V vocabulary, N tokens of the text, R rows.

One step (the paper's): argmax of p(x_0 | x_t) at every position. Several steps: sample the reverse process from t.
Only a process that can shuffle believes that a token it sees may be wrong, so absorb is refused.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cedd.data.tokenizers import ByteTokenizer, Tokenizer
from cedd.parameterization import Denoiser
from cedd.process import TokenProcess
from cedd.samplers import Fixed
from cedd.samplers.grids import LAST_TIME
from cedd.samplers.network import chunks
from cedd.tasks.setting import Setting, Settings

Ids = NDArray[np.int64]
_SURROGATE = re.compile("[\ud800-\udfff]")
_BATCH = 16


@dataclass(frozen=True)
class CorrectionOptions:
    """How to correct. A model's folder may have defaults of its own ("correction" in its config.json)."""

    rate: float | None = 0.05
    """The share of wrong tokens that is expected in the text; it stands for a time t (`time_of_rate`)."""
    t: float | None = None
    """The time itself, in place of a rate."""
    threshold: float = 1.0
    """A token whose own probability is at least this is never touched; 1 leaves all to the argmax."""
    change: Literal["letters", "all"] | None = None
    """letters: a letter may become another letter of its case, and nothing else changes: no space, digit, point or
    capital. all: any token may become any other. By default letters, where tokens are characters or bytes."""
    passes: int = 1
    """How often the text is read; later passes see what earlier ones have mended."""
    steps: int = 1
    """1 takes the likeliest token everywhere; more sample the reverse process from t."""
    temperature: float = 0.0
    """Of several steps: 0 writes the likeliest token wherever it writes."""

    def changed(self, given: Mapping[str, Any], source: str = "the options of correction") -> CorrectionOptions:
        """These options with those given (not None) in their place; a time replaces a rate, and a rate a time."""
        asked = {name: value for name, value in given.items() if value is not None}
        if unknown := sorted(set(asked) - {field.name for field in fields(self)}):
            raise ValueError(f"{source} do not include {unknown[0]!r}")
        if {"t", "rate"} <= set(asked):
            raise ValueError("a rate stands for a time: give rate or t, not both")
        if "t" in asked:
            asked["rate"] = None
        elif "rate" in asked:
            asked["t"] = None
        return replace(self, **asked)

    def check(self) -> None:
        """Refuse what cannot be meant."""
        if self.t is not None and not LAST_TIME < self.t <= 1:
            raise ValueError(f"t says how noisy the text is and must lie in ({LAST_TIME:g}, 1]; got {self.t:g}")
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold is a probability and must lie in [0, 1]; got {self.threshold:g}")
        if self.change not in (None, "letters", "all"):
            raise ValueError(f"change says what may be changed, letters or all; got {self.change!r}")
        for name in ("passes", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")


def time_of_rate(process: TokenProcess, rate: float) -> float:
    """The time at which this share of the tokens that are not masked is wrong.

    At time t a token that is not masked has been redrawn from all V with probability (alive - keep)/alive =
    1 - exp(-beta), and is then wrong but for one draw in V:

        rate = (1 - exp(-beta(t))) (1 - 1/V),    hence    beta(t) = -log(1 - rate V/(V-1)),

    which is solved for t by bisection, since the shuffle clock never decreases. For log-linear uniform, t is nearly
    the rate itself; for roulette, (1-t)^((1-p_m)/p_m) = 1 - rate V/(V-1), but for the schedule's eps.
    """
    V = process.vocab_size
    wanted = rate * V / (V - 1)
    most = -float(torch.expm1(-process.beta(1.0)))
    if not 0 < wanted < most:
        raise ValueError(
            f"the rate of wrong tokens must lie in (0, {most * (1 - 1 / V):.3g}), what this model's process reaches; "
            f"got {rate:g}"
        )
    low, high = 0.0, 1.0
    while high - low > 1e-12:
        middle = (low + high) / 2
        if -float(torch.expm1(-process.beta(middle))) < wanted:
            low = middle
        else:
            high = middle
    return max(high, 2 * LAST_TIME)


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
    """What the model thinks of each token, [N]: the likeliest of its group, that one's probability and its own."""

    best: Ids
    confidence: NDArray[np.float64]
    own: NDArray[np.float64]


@dataclass(frozen=True)
class Replacement:
    """What a pass makes of each token, [N]: the tokens now, their probabilities, and those of the tokens before."""

    tokens: Ids
    confidence: NDArray[np.float64]
    own: NDArray[np.float64]


def correct(setting: Setting, text: str, *, seed: int | None = None, **options: Any) -> Corrected:
    """The text with its mistakes put right; options are the fields of `CorrectionOptions`.

    What the caller does not give (or gives as None), the model's folder may say, and else the class does. Text of any
    length is read in overlapping windows. Characters the tokenizer does not know are left as they are.
    """
    asked = correction_options(setting, options)
    done: list[str] = []
    changes: list[Change] = []
    offset = 0
    for part, mark in zip(_SURROGATE.split(text), [*_SURROGATE.findall(text), ""], strict=True):
        fixed, changed = _correct_part(setting, part, asked, seed)
        done += [fixed, mark]
        changes += [replace(change, position=change.position + offset) for change in changed]
        offset += len(part) + len(mark)
    return Corrected("".join(done), text, tuple(changes))


def correction_options(setting: Setting, given: Mapping[str, Any]) -> CorrectionOptions:
    """What holds for this model: the caller's options, before its folder's, before the defaults; checked, with the
    time in place of the rate."""
    folder = setting.folder
    if folder.method.causal:
        raise ValueError(f"{folder.method.name} is autoregressive and cannot correct; train on uniform or roulette")
    if not folder.process.can_shuffle:
        raise ValueError(
            "this model's process only masks (absorb): to it a token that it sees is certainly right, so it cannot "
            "correct; train one on uniform or roulette"
        )
    usual = CorrectionOptions().changed(folder.config.get("correction", {}), "the corrections of the model's folder")
    asked = usual.changed(given)
    asked.check()
    if asked.rate is not None:
        asked = asked.changed({"t": time_of_rate(folder.process, asked.rate)})
    return asked


def _correct_part(
    setting: Setting, text: str, options: CorrectionOptions, seed: int | None
) -> tuple[str, list[Change]]:
    tokenizer = setting.folder.tokenizer
    reading = read_text(tokenizer, text)
    groups = token_groups(tokenizer, options.change)
    given = now = reading.ids
    protected = reading.protected | (groups[given] < 0)
    confidence, own = np.zeros(len(given)), np.ones(len(given))
    for number in range(options.passes if not protected.all() else 0):
        seen = replace_tokens(setting, now, protected, groups, options, None if seed is None else seed + number)
        places = seen.tokens != now
        if not places.any():
            break
        own = np.where(places & (now == given), seen.own, own)
        confidence = np.where(places, seen.confidence, confidence)
        now = seen.tokens
    places = np.flatnonzero(now != given)
    if not len(places):
        return text, []
    changes = [
        Change(
            position=start,
            before=tokenizer.decode(given[i : i + 1]),
            after=tokenizer.decode(now[i : i + 1]),
            confidence=float(confidence[i]),
            doubt=float(1 - own[i]),
        )
        for i, start in zip(places.tolist(), _starts(tokenizer, given, places), strict=True)
    ]
    return _write_text(tokenizer, text, now, places), changes


def replace_tokens(
    setting: Setting,
    ids: Ids,
    protected: NDArray[np.bool_],
    groups: NDArray[np.int64],
    options: CorrectionOptions,
    seed: int | None,
) -> Replacement:
    """One pass: the tokens that are doubted, replaced by others of their group."""
    assert options.t is not None
    opinion = ask(setting, ids, options.t, groups)
    held = protected | (opinion.own >= options.threshold)
    if options.steps == 1:
        return Replacement(np.where(held, ids, opinion.best), opinion.confidence, opinion.own)
    settings = Settings(steps=options.steps, temperature=options.temperature, seed=seed)
    drawn = _denoise(setting, ids, held, options.t, settings)
    drawn = np.where(held | (groups[drawn] != groups[ids]), ids, drawn)
    return Replacement(drawn, ask(setting, drawn, options.t, groups).own, opinion.own)


# ----------------------------------------------------------------------------------------------------------------
# Text and tokens


def _characters(tokenizer: Tokenizer) -> dict[str, int] | None:
    """The table of a tokenizer whose tokens are characters."""
    return getattr(tokenizer, "characters", None)


_PLAIN = str.maketrans("‘’‚‛“”„‟′″–—―‐‑−\t\r", "''''\"\"\"\"'\"------  ")
"""Characters of print and of other systems, as a typewriter writes them."""


def read_text(tokenizer: Tokenizer, text: str) -> Reading:
    """Tokens of any text. An unknown character is protected, and read as the known one that is most like it (é as e,
    a curly quote as a straight one), else as a space, else as the first token."""
    table = _characters(tokenizer)
    if table is None:
        ids = tokenizer.encode(text)
        return Reading(ids, np.zeros(len(ids), dtype=np.bool_))
    unknown = {character for character in set(text) if character not in table}
    filler = table.get(" ", next(iter(table.values())))
    read_as = table | {
        character: table.get(unicodedata.normalize("NFKD", character.translate(_PLAIN))[0], filler)
        for character in unknown
    }
    ids = np.fromiter((read_as[character] for character in text), np.int64, len(text))
    protected = np.fromiter((character in unknown for character in text), np.bool_, len(text))
    return Reading(ids, protected)


def token_groups(tokenizer: Tokenizer, change: str | None) -> NDArray[np.int64]:
    """The group of each token, [V]: a token may become another of its group, and one of group -1 never changes.

    For letters the groups are small, capital, and letters without case; -1 is all that is no letter. For all there is
    one group, and -1 is what stands for no text: a vocabulary may have tokens that are no characters.
    """
    V = tokenizer.vocab_size
    table = _characters(tokenizer)
    if table is None and isinstance(tokenizer, ByteTokenizer):
        table = {chr(byte): byte for byte in range(128 if change != "all" else 256)}
    if table is None and change == "letters":
        raise ValueError("letters can be told apart only where tokens are characters or bytes; use change='all'")
    if table is None:
        return np.zeros(V, dtype=np.int64)
    groups = np.full(V, -1, dtype=np.int64)
    for character, token in table.items():
        if change == "all":
            groups[token] = 0
        elif character.isalpha():
            groups[token] = int(character.islower()) + 2 * int(character.isupper())
    return groups


def _starts(tokenizer: Tokenizer, ids: Ids, places: NDArray[np.intp]) -> list[int]:
    """Where the tokens at these places begin in the text, in characters."""
    if _characters(tokenizer) is not None:
        return places.tolist()
    between = zip([0, *places[:-1].tolist()], places.tolist(), strict=True)
    return np.cumsum([len(tokenizer.decode(ids[i:j])) for i, j in between]).tolist()


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
def ask(setting: Setting, ids: Ids, t: float, groups: NDArray[np.int64]) -> Opinion:
    """p(x_0 | the text at time t), token by token."""
    cuts = windows(len(ids), setting.folder.length)
    kinds = torch.from_numpy(groups).to(setting.device)
    best, confidence, own = np.zeros_like(ids), np.zeros(len(ids)), np.zeros(len(ids))
    for begin in range(0, len(cuts), _BATCH):
        group = cuts[begin : begin + _BATCH]
        x = torch.from_numpy(np.stack([ids[w.start : w.stop] for w in group])).to(setting.device)
        columns = [v.cpu().numpy() for v in _posterior(setting, x, t, kinds)]
        for row, w in enumerate(group):
            inside = slice(w.first - w.start, w.last - w.start)
            for target, column in zip((best, confidence, own), columns, strict=True):
                target[w.first : w.last] = column[row, inside]
    return Opinion(best, confidence, own)


def _posterior(setting: Setting, x: Tensor, t: float, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The likeliest token of x's group, its probability and that of x itself, each [W, L]."""
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
        allowed = (groups == groups[flat[rows]][:, None]) & (groups >= 0)  # [R, V]
        value, best = torch.where(allowed, probs, -1.0).max(-1)
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
