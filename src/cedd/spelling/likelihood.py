"""How likely a model finds texts that differ in one place, also if they differ in length.

Shapes: W windows, L positions, V vocabulary, R rows.

Only tokens near the place have another score in another version, so only a window is read. A model of a process that
shuffles gives the sum of log g over its tokens, g being the probability of a token given all others (leave-one-out;
Besag's pseudo-likelihood), in one reading: the text is read as noisy data at a small t, and the weight of the token
itself is taken out by Bayes' rule (`scores.leave_one_out`). To a model that only masks, a token that it sees is
certainly right, but it fills blanks: what stands in the place is masked, and its tokens a b c, given the text on both
sides, have

    log p(a | _ _ _) + log p(b | a _ _) + log p(c | a b _).

Versions that begin alike and have as many tokens share their readings.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Sequence
from weakref import WeakKeyDictionary

import numpy as np
import torch

from cedd.data.text import Ids, encode_given, encode_text
from cedd.models.integers import has_integer_products, with_integers
from cedd.models.loaded import LoadedModel
from cedd.models.transformer import Transformer
from cedd.network import AnyModel, Network
from cedd.spelling.scores import Floats, Watch, leave_one_out, log_posteriors, rate_of_time

SIZE, BEFORE, NEAR = 48, 24, 8
"""Characters that are read, so that windows have one length and are read together; of these before a place; tokens on
each side of it whose score counts."""
TOKENS, TOKENS_BEFORE, LONGEST_TOKEN = 32, 19, 8
"""The same of tokens, where a place is masked; characters that a token has at most, as a rule."""
MASKED_TIME = 0.1
BATCH = 16
_LINE_END = re.compile(r"(?<!\n)\r?\n(?!\r?\n)")
Replacement = tuple[int, int, str]
"""text[start:stop] becomes another text."""


class Likelihoods(ABC):
    """Scores versions of a text.

    Args:
        loaded: the model.
        t: the time that the network is told.
        watch: called with how much of what was asked has been read.
    """

    def __init__(self, loaded: LoadedModel, t: float, watch: Watch | None = None) -> None:
        self.loaded, self.t, self.watch = loaded, t, watch
        self.network = Network.of(self.model(), loaded.process.vocab_size, loaded.device)

    def model(self) -> AnyModel:
        """The network that is asked."""
        return self.loaded.model

    @abstractmethod
    def __call__(self, text: str, replacements: Sequence[Replacement]) -> Floats:
        """Of the text with text[start:stop] replaced, for each (start, stop, replacement) the score, and of how many
        tokens it is the sum, [N, 2]."""

    def read(self, windows: Sequence[Ids]) -> Iterator[list[int]]:
        """The numbers of windows of one length that are read together, batch after batch."""
        by_length: dict[int, list[int]] = defaultdict(list)
        for number, ids in enumerate(windows):
            by_length[len(ids)].append(number)
        for numbers in by_length.values():
            for begin in range(0, len(numbers), BATCH):
                group = numbers[begin : begin + BATCH]
                yield group
                if self.watch is not None:
                    self.watch(len(group) / len(windows))


class LeaveOneOut(Likelihoods):
    """By a model of a process that shuffles."""

    @torch.no_grad()
    def __call__(self, text: str, replacements: Sequence[Replacement]) -> Floats:
        windows = [self.window(text, *replacement) for replacement in replacements]
        result = np.zeros((len(windows), 2))
        for group in self.read([ids for ids, _ in windows]):
            scores = self.scores(np.stack([windows[number][0] for number in group]))
            for row, number in enumerate(group):
                near = scores[row, windows[number][1]]
                result[number] = near.sum(), len(near)
        return result

    def window(self, text: str, start: int, stop: int, replacement: str) -> tuple[Ids, slice]:
        """The tokens to be read, and those of them whose scores count."""
        room = self.loaded.length - len(replacement)
        before = text[max(0, start - min(BEFORE, room // 2)) : start]
        wanted = max(SIZE - len(before) - len(replacement), NEAR)
        after = text[stop : stop + min(wanted, room - len(before))]
        encode = self.loaded.tokenizer
        parts = [encode_text(encode, part).ids for part in (before, replacement, after)]
        sizes = [len(part) for part in parts]
        return np.concatenate(parts), slice(max(0, sizes[0] - NEAR), sizes[0] + sizes[1] + min(NEAR, sizes[2]))

    def scores(self, ids: Ids) -> Floats:
        """log g of each token of windows, [W, L]."""
        x, rate = torch.from_numpy(ids).to(self.network.device), rate_of_time(self.loaded.process, self.t)
        flat = x.flatten()
        everywhere = torch.arange(len(flat), device=x.device)
        parts = [
            leave_one_out(posterior, flat[rows][:, None], rate)[:, 0]
            for posterior, rows in log_posteriors(self.loaded, self.network, x, everywhere, self.t)
        ]
        return torch.cat(parts).view(x.shape).double().cpu().numpy()


class LeftToRight(Likelihoods):
    """By a model that fills masks: of the tokens of a replacement one after another, amid the text on both sides.

    On a CPU with units for it the network multiplies in int8: its log-probabilities are off by a tenth, as options of
    a doubt differ by several, and it reads half as long.
    """

    def model(self) -> AnyModel:
        """The network that is asked, in int8 where that is faster."""
        model, on_cpu = self.loaded.model, self.loaded.device.type == "cpu"
        return in_integers(model) if on_cpu and isinstance(model, Transformer) and has_integer_products() else model

    @torch.no_grad()
    def __call__(self, text: str, replacements: Sequence[Replacement]) -> Floats:
        wanted: dict[tuple[int, ...], list[tuple[int, int]]] = defaultdict(list)
        for number, replacement in enumerate(replacements):
            before, middle, after = self.window(text, *replacement)
            for done in range(len(middle)):
                masks = [self.mask] * (len(middle) - done)
                wanted[*before, *middle[:done], *masks, *after].append((number, middle[done]))
        windows = [np.array(window, np.int64) for window in wanted]
        asked, result = list(wanted.values()), np.zeros((len(replacements), 2))
        for group in self.read(windows):
            said = self.first_masks(np.stack([windows[i] for i in group]))
            for row, i in enumerate(group):
                for number, token in asked[i]:
                    result[number] += said[row, token], 1
        return result

    @property
    def mask(self) -> int:
        assert self.loaded.process.mask_id is not None
        return self.loaded.process.mask_id

    def window(self, text: str, start: int, stop: int, replacement: str) -> tuple[list[int], list[int], list[int]]:
        """The tokens before, of the replacement, and after; a line ends as any word does. A space belongs to the token
        that it stands before."""
        reach = LONGEST_TOKEN * TOKENS
        before, after = (
            _LINE_END.sub(" ", part) for part in (text[max(0, start - reach) : start], text[stop : stop + reach])
        )
        space = before[-1:] if before.endswith(" ") else ""
        left, middle, right = (
            encode_given(self.loaded.tokenizer, part).tolist()
            for part in (before.removesuffix(space), space + replacement, after)
        )
        size = min(TOKENS, self.loaded.length)
        middle = middle[: size // 2]
        left = left[-min(TOKENS_BEFORE, size - len(middle)) :]
        return left, middle, right[: size - len(left) - len(middle)]

    def first_masks(self, ids: Ids) -> Floats:
        """log p of all tokens at the first mask of windows, [W, V]."""
        x = torch.from_numpy(ids).to(self.network.device)
        first = (x == self.mask).to(torch.int8).argmax(-1) + torch.arange(len(x), device=x.device) * x.shape[1]
        parts = [posterior for posterior, _ in log_posteriors(self.loaded, self.network, x, first, self.t)]
        return torch.cat(parts).double().cpu().numpy()


_IN_INTEGERS: WeakKeyDictionary[Transformer, Transformer] = WeakKeyDictionary()


def in_integers(model: Transformer) -> Transformer:
    """The network in int8, made once."""
    if model not in _IN_INTEGERS:
        _IN_INTEGERS[model] = with_integers(model)
    return _IN_INTEGERS[model]


def likelihoods(loaded: LoadedModel, t: float | None, watch: Watch | None = None) -> Likelihoods:
    """By the way that a model's process allows; t is what one that shuffles is told."""
    if loaded.process.can_shuffle:
        assert t is not None
        return LeaveOneOut(loaded, t, watch)
    if not loaded.method.dynamics.noisy:
        raise ValueError(f"{loaded.method.name} is autoregressive and does not read what comes after a word")
    return LeftToRight(loaded, MASKED_TIME, watch)
