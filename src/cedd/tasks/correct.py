"""Correction: read the user's text as if it were noisy data at a small t, and take the noise away.

Shapes: W windows, L positions, V vocabulary, N tokens of the text, R rows.

The paper takes argmax p(x_0 | x_t) at every position at once. Two things serve a reader's text better:

- What is known of typed mistakes replaces the noise of the process (`judge`): a wrong letter is another letter.
- Changes that are near each other are not independent: one mistake makes its neighbours look wrong as well. So the
  text is read in several passes, each of which makes the surest change of every neighbourhood only, and the next one
  sees it made. This breaks far fewer right letters, and mends mistakes that stand side by side.

With several *steps* the reverse process is sampled from t instead. Only a process that can shuffle believes that a
token it sees may be wrong, so absorb is refused.
"""

from __future__ import annotations

import functools
import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, field, fields, replace
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
Watch = Callable[[float], None]
"""Told, now and then, how much the network has read since, in whole texts."""
_SURROGATE = re.compile("[\ud800-\udfff]")
_BATCH = 16


@dataclass(frozen=True)
class CorrectionOptions:
    """How to correct. A model's folder may have defaults of its own ("correction" in its config.json)."""

    rate: float = 0.05
    """The share of wrong tokens that is expected in the text."""
    t: float | None = None
    """The time that the network is told; by default the one at which its process has this rate (`time_of_rate`)."""
    threshold: float = 0.5
    """A token is kept unless own / (own + best) is below this, own being its probability and best that of the likeliest
    other; so one whose probability is at least this is never touched, and from 0.5 on all is left to the argmax.
    Of all rules that break as many right tokens this one fixes most (each change adds best to what is expected to be
    fixed and own to what is broken: take those with the highest ratio)."""
    change: Literal["letters", "all"] | None = None
    """letters: a letter may become another letter of its case, and nothing else changes: no space, digit, point or
    capital. all: any token may become any other. By default letters, where tokens are characters or bytes."""
    passes: int = 3
    """How often the text is read at most; later passes see what earlier ones have mended."""
    reach: int = 3
    """Of changes within so many tokens of each other a pass makes only the surest; 0 makes all at once."""
    strange: float | None = None
    """Changes are taken back where the text around them is stranger than this (`strangeness`): it is then in a
    language, or of a kind, that the model does not know. Without a limit none is."""
    steps: int = 1
    """1 takes the likeliest token; more sample the reverse process from t."""
    temperature: float = 0.0
    """Of several steps: 0 writes the likeliest token wherever it writes."""

    def changed(self, given: Mapping[str, Any], source: str = "the options of correction") -> CorrectionOptions:
        """These options with those given (not None) in their place."""
        asked = {name: value for name, value in given.items() if value is not None}
        if unknown := sorted(set(asked) - {field.name for field in fields(self)}):
            raise ValueError(f"{source} do not include {unknown[0]!r}")
        return replace(self, **asked)

    def check(self) -> None:
        """Refuse what cannot be meant."""
        if self.t is not None and not LAST_TIME < self.t <= 1:
            raise ValueError(f"t says how noisy the text is and must lie in ({LAST_TIME:g}, 1]; got {self.t:g}")
        if not 0 < self.rate < 1:
            raise ValueError(f"rate is a share of wrong tokens and must lie in (0, 1); got {self.rate:g}")
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold is a probability and must lie in [0, 1]; got {self.threshold:g}")
        if self.strange is not None and self.strange < 0:
            raise ValueError(f"strange is a mean of doubts and cannot be negative; got {self.strange:g}")
        if self.change not in (None, "letters", "all"):
            raise ValueError(f"change says what may be changed, letters or all; got {self.change!r}")
        for name, least in (("passes", 1), ("reach", 0), ("steps", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}; got {getattr(self, name)}")


def rate_of_time(process: TokenProcess, t: float) -> float:
    """The share of wrong tokens among those that are not masked at time t.

    Such a token has been redrawn from all V with probability (alive - keep)/alive = 1 - exp(-beta), and is then wrong
    but for one draw in V: rate = (1 - exp(-beta(t))) (1 - 1/V).
    """
    return -float(torch.expm1(-process.beta(t))) * (1 - 1 / process.vocab_size)


def time_of_rate(process: TokenProcess, rate: float) -> float:
    """The time of this rate: beta(t) = -log(1 - rate V/(V-1)), by bisection, since beta never decreases.

    For log-linear uniform t is nearly the rate itself; for log-linear roulette (1-t)^((1-p_m)/p_m) = 1 - rate V/(V-1),
    both but for the schedule's eps.
    """
    most = rate_of_time(process, 1.0)
    if not 0 < rate < most:
        raise ValueError(
            f"a rate of wrong tokens must lie in (0, {most:.3g}) for this model's process; got {rate:g}, without t"
        )
    low, high = 0.0, 1.0
    while high - low > 1e-12:
        middle = (low + high) / 2
        low, high = (middle, high) if rate_of_time(process, middle) < rate else (low, middle)
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
    """What the model thinks of each token, [N]: the likeliest other one, that one's probability and its own."""

    best: Ids
    confidence: NDArray[np.float64]
    own: NDArray[np.float64]

    @property
    def trust(self) -> NDArray[np.float64]:
        """own / (own + best): what the token weighs beside its likeliest replacement."""
        return self.own / np.maximum(self.own + self.confidence, 1e-300)

    def doubted(self, threshold: float) -> NDArray[np.bool_]:
        """Which tokens should be replaced."""
        return self.trust < min(threshold, 0.5)

    def where(self, chosen: NDArray[np.bool_], other: Opinion) -> Opinion:
        """This opinion of the chosen tokens, and the other one of the rest."""
        return Opinion(*(np.where(chosen, a, b) for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def strength(self) -> NDArray[np.float64]:
        """How far the scales are from level, |log(best / own)|."""
        return np.abs(np.log(np.maximum(self.confidence, 1e-300)) - np.log(np.maximum(self.own, 1e-300)))

    def surest_of(self, wanted: NDArray[np.bool_], reach: int) -> NDArray[np.bool_]:
        """The wanted changes within whose `reach` no other wanted one is stronger."""
        return wanted & surest(np.where(wanted, self.strength, -np.inf), reach)


def correct(setting: Setting, text: str, *, seed: int | None = None, **options: Any) -> Corrected:
    """The text with its mistakes put right; options are the fields of `CorrectionOptions`.

    What the caller does not give (or gives as None), the model's folder may say, and else the class does. Text of any
    length is read in overlapping windows. Characters the tokenizer does not know are left as they are.
    """
    (corrected,) = corrections(setting, text, [correction_options(setting, options)], seed)
    return corrected


def corrections(
    setting: Setting,
    text: str,
    ways: Iterable[CorrectionOptions],
    seed: int | None = None,
    watch: Watch | None = None,
) -> Iterator[Corrected]:
    """The text corrected in one way after another, each as if alone; its first reading is shared."""
    parts = [(Draft(setting, part), mark) for part, mark in _parts(setting.folder.tokenizer, text)]
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
    return asked if asked.t is not None else replace(asked, t=time_of_rate(folder.process, asked.rate))


@dataclass(frozen=True)
class Draft:
    """A text to be corrected, perhaps in several ways: those that ask the same of it at first ask once."""

    setting: Setting
    text: str
    first: dict[tuple[float | None, float, str | None], Opinion] = field(default_factory=dict)

    def corrected(
        self, options: CorrectionOptions, seed: int | None, watch: Watch | None = None
    ) -> tuple[str, list[Change]]:
        """The text put right, and what was changed."""
        tokenizer = self.setting.folder.tokenizer
        reading, groups = read_text(tokenizer, self.text), token_groups(tokenizer, options.change)
        protected = reading.protected | (groups[reading.ids] < 0)
        if protected.all():
            return self.text, []
        question = (options.t, options.rate, options.change)
        if question not in self.first:
            assert options.t is not None
            self.first[question] = ask(self.setting, reading.ids, groups, options.t, options.rate, watch=watch)
        now, opinion = revise(
            self.setting, reading.ids, protected, groups, options, seed, first=self.first[question], watch=watch
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
            for i, start in zip(places.tolist(), _starts(tokenizer, reading.ids, places), strict=True)
        ]
        return _write_text(tokenizer, self.text, now, places), changes


def revise(
    setting: Setting,
    given: Ids,
    protected: NDArray[np.bool_],
    groups: NDArray[np.int64],
    options: CorrectionOptions,
    seed: int | None = None,
    *,
    first: Opinion | None = None,
    watch: Watch | None = None,
) -> tuple[Ids, Opinion]:
    """The tokens after all passes, [N], and of each the opinion by which it was last decided.

    first: what the model thinks of the text as it is given, where that is known already.
    """
    assert options.t is not None
    think = functools.partial(ask, setting, groups=groups, t=options.t, rate=options.rate, watch=watch)
    opinion = first or think(given)
    if options.steps > 1:
        held = protected | (opinion.trust >= options.threshold)
        settings = Settings(steps=options.steps, temperature=options.temperature, seed=seed)
        drawn = _denoise(setting, given, held, options.t, settings, watch)
        drawn = np.where(groups[drawn] == groups[given], drawn, given)
        return drawn, replace(opinion, confidence=think(drawn).own)
    now, decided, free = given, opinion, ~protected
    turn = np.zeros_like(protected)
    for number in range(options.passes):
        if number:
            opinion = think(now, earlier=(opinion, turn))
        turn = opinion.surest_of(free & opinion.doubted(options.threshold), options.reach)
        if not turn.any():
            break
        now, decided = np.where(turn, opinion.best, now), opinion.where(turn, decided)
        free = free & ~turn  # what was replaced is not what was typed: its probability says nothing of it any more
    if options.strange is not None and (now != given).any():
        opinion = think(now, earlier=(opinion, turn))
        now = np.where(strangeness(opinion, free) > options.strange, given, now)
    return now, decided


def readings(options: CorrectionOptions) -> int:
    """How often, at most, the network reads a text to correct it so, after it has read it once."""
    return options.steps + 1 if options.steps > 1 else options.passes - 1 + (options.strange is not None)


def strangeness(opinion: Opinion, left: NDArray[np.bool_]) -> NDArray[np.float64]:
    """How doubtful the text around each token is to the model, once it has changed what it wants to, [N].

    The mean of -log trust, at most 4 each, over the letters that were left within 64 tokens (of fewer than 32 as if
    there were 32). After correction a text with mistakes is as familiar as one without; one in another language is
    not, however few of its letters were changed.
    """
    width = np.ones(2 * 64 + 1)
    doubts = np.where(left, np.minimum(-np.log(np.maximum(opinion.trust, 1e-9)), 4.0), 0.0)
    total, count = (np.convolve(values, width, "full")[64 : 64 + len(left)] for values in (doubts, left.astype(float)))
    return total / np.maximum(count, 32)


def surest(strength: NDArray[np.float64], reach: int) -> NDArray[np.bool_]:
    """Where nothing within `reach` is stronger, [N]."""
    around = np.pad(strength, reach, constant_values=-np.inf)
    return strength >= np.lib.stride_tricks.sliding_window_view(around, 2 * reach + 1).max(-1)


# ----------------------------------------------------------------------------------------------------------------
# Text and tokens


def _characters(tokenizer: Tokenizer) -> dict[str, int] | None:
    """The table of a tokenizer whose tokens are characters."""
    return getattr(tokenizer, "characters", None)


def _stand_in(tokenizer: Tokenizer) -> str | None:
    """The character that stands for those outside the alphabet, where a tokenizer has one; it is never written."""
    return getattr(tokenizer, "unknown", None)


_PLAIN = str.maketrans("‘’‚‛“”„‟′″–—―‐‑−\t\r", "''''\"\"\"\"'\"------  ")
"""Characters of print and of other systems, as a typewriter writes them."""


def _parts(tokenizer: Tokenizer, text: str) -> list[tuple[str, str]]:
    """A text cut at lone surrogates, (part, surrogate) each: to a tokenizer of characters they are characters like
    others that it does not know, but bytes cannot write them."""
    if _characters(tokenizer) is not None:
        return [(text, "")]
    return list(zip(_SURROGATE.split(text), [*_SURROGATE.findall(text), ""], strict=True))


def read_text(tokenizer: Tokenizer, text: str) -> Reading:
    """Tokens of any text. An unknown character is protected, and read as the known one that is most like it (é as e,
    a curly quote as a straight one), else as what stands for unknown ones, else as a space, else as the first token."""
    table = _characters(tokenizer)
    if table is None:
        ids = tokenizer.encode(text)
        return Reading(ids, np.zeros(len(ids), dtype=np.bool_))
    unknown = {character for character in set(text) if character not in table}
    filler = table.get(_stand_in(tokenizer) or " ", next(iter(table.values())))
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
            groups[token] = -int(character == _stand_in(tokenizer))
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
def ask(
    setting: Setting,
    ids: Ids,
    groups: NDArray[np.int64],
    t: float,
    rate: float,
    *,
    earlier: tuple[Opinion, NDArray[np.bool_]] | None = None,
    watch: Watch | None = None,
) -> Opinion:
    """What the model thinks of each token of a text (see `judge`).

    earlier: an opinion of the text as it was, and which tokens have changed since: windows without a change keep it.
    """
    cuts = windows(len(ids), setting.folder.length)
    whole = len(cuts)
    kinds = torch.from_numpy(groups).to(setting.device)
    opinion = Opinion(ids.copy(), np.zeros(len(ids)), np.ones(len(ids)))
    if earlier is not None:
        opinion = Opinion(*(values.copy() for values in astuple(earlier[0])))
        cuts = [w for w in cuts if earlier[1][w.start : w.stop].any()]
    for begin in range(0, len(cuts), _BATCH):
        group = cuts[begin : begin + _BATCH]
        x = torch.from_numpy(np.stack([ids[w.start : w.stop] for w in group])).to(setting.device)
        judged = [column.cpu().numpy() for column in _judge_windows(setting, x, kinds, t, rate)]
        for row, w in enumerate(group):
            inside = slice(w.first - w.start, w.last - w.start)
            for target, column in zip((opinion.best, opinion.confidence, opinion.own), judged, strict=True):
                target[w.first : w.last] = column[row, inside]
        if watch is not None:
            watch(len(group) / whole)
    return opinion


def _judge_windows(setting: Setting, x: Tensor, groups: Tensor, t: float, rate: float) -> list[Tensor]:
    """`judge` for windows of the text, [W, L] each, through the vocabulary in chunks."""
    folder: Any = setting.folder
    noise = folder.process.noise(t).to(x.device)
    sigma = noise.sigma.to(x.device, torch.float32).expand(len(x))
    hidden, flat = folder.model.features(x, sigma).flatten(0, 1), x.flatten()
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    for rows in chunks(len(flat), folder.process.vocab_size):
        here = noise.like(flat[rows]) if noise.alpha.device == flat.device else noise.like(flat[rows].cpu())
        outputs = folder.model.head(hidden[rows])
        log_posterior = folder.method.parameterization.log_posterior(outputs, flat[rows], here)
        parts.append(judge(log_posterior, flat[rows], groups, rate_of_time(folder.process, t), rate))
    return [torch.cat(column).view(x.shape) for column in zip(*parts, strict=True)]


def judge(
    log_posterior: Tensor, x: Tensor, groups: Tensor, noise_rate: float, rate: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The likeliest token other than x, its probability, and that of x itself; [R] each.

    The network's log p(x_0 | x_t) [R, V] takes x for a token of its own process at t: right with 1 - r, and wrong as
    each of V - 1 tokens with r / (V - 1), r = `noise_rate`. What is known of a *typed* text is something else: x is
    wrong with probability `rate`, and what was meant is one of the G - 1 others of its group (a letter of the same
    case). Bayes' rule puts the one in the place of the other: all outside the group drops out, the odds of x fall by

        [(1 - r) (V - 1) / r]  /  [(1 - rate) (G - 1) / rate].

    Where the likeliest other token of all is outside the group, what was meant cannot be written, and x stays as it is.
    """
    V = log_posterior.shape[-1]
    allowed = (groups == groups[x][:, None]) & (groups >= 0)  # [R, V]
    size = allowed.sum(-1).clamp_min(2).to(log_posterior)
    shift = torch.log((size - 1) / (V - 1)) + _log_odds(noise_rate) - _log_odds(rate)
    best = log_posterior.scatter(-1, x[:, None], -math.inf).argmax(-1)
    posterior = log_posterior.scatter_add(-1, x[:, None], shift[:, None]).masked_fill(~allowed, -math.inf).softmax(-1)
    own, confidence = (posterior.gather(-1, token[:, None]).squeeze(-1) for token in (x, best))
    stays = ~allowed.gather(-1, best[:, None]).squeeze(-1)
    return torch.where(stays, x, best), torch.where(stays, 0.0, confidence), torch.where(stays, 1.0, own)


def _log_odds(probability: float) -> float:
    return math.log(probability) - math.log1p(-probability)


def _denoise(
    setting: Setting, ids: Ids, held: NDArray[np.bool_], t: float, settings: Settings, watch: Watch | None
) -> Ids:
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
        if watch is not None:
            watch((settings.steps or 1) * len(group) / len(cuts))
    return result
