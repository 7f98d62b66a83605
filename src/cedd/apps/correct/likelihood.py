"""Log-likelihoods of alternatives in one place of a text, also of different lengths.

Shapes: W windows, L positions, R rows.

Only tokens near the place change their score, so only a window is read. For a process that shuffles, one reading gives
the sum of log g over its tokens, g being the probability of a token given all others (leave-one-out; Besag's
pseudo-likelihood): the text is read as noisy data at a small t, and the weight of the token itself is removed by Bayes'
rule (`scores.leave_one_out`). A masked model fills the place (`left_to_right`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, MutableMapping, Sequence
from weakref import WeakKeyDictionary

import numpy as np
import torch

from cedd.apps.correct.left_to_right import LeftToRight, Replacement
from cedd.apps.correct.numpy_network import NumpyNetwork, PassageReader
from cedd.data.text import Ids, encode_text
from cedd.models.loaded_model import LoadedModel
from cedd.models.transformer import Transformer
from cedd.network import Network
from cedd.spelling.scores import BATCH, Floats, Watch, leave_one_out, log_posteriors, rate_of_time

SIZE, BEFORE, NEAR = 48, 24, 8
"""Characters of a window, so that windows of equal length are read together; characters of it before the place; tokens
on each side of the place whose scores are summed."""
MASKED_TIME = 0.1
"""The time input of a masked model."""


class LeaveOneOut:
    """Scores alternatives by a model on a process that shuffles.

    Args:
        loaded: the model.
        t: the time at which the network reads the text.
        watch: called with the share of the alternatives that has been read since the last call.
    """

    def __init__(self, loaded: LoadedModel, t: float, watch: Watch | None = None) -> None:
        self.loaded, self.t, self.watch = loaded, t, watch
        self.network = Network.of(loaded.model, loaded.process.vocab_size, loaded.device)

    @torch.no_grad()
    def __call__(self, text: str, replacements: Sequence[Replacement]) -> Floats:
        """For each (start, stop, replacement): the score of the text with text[start:stop] replaced, and the number of
        tokens over which it is summed, [N, 2]."""
        windows = [self.window(text, *replacement) for replacement in replacements]
        result = np.zeros((len(windows), 2))
        for group in self.read([ids for ids, _ in windows]):
            scores = self.scores(np.stack([windows[number][0] for number in group]))
            for row, number in enumerate(group):
                near = scores[row, windows[number][1]]
                result[number] = near.sum(), len(near)
        return result

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

    def window(self, text: str, start: int, stop: int, replacement: str) -> tuple[Ids, slice]:
        """The tokens of a window, and the slice whose scores are summed."""
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


def likelihoods(
    loaded: LoadedModel,
    t: float | None,
    watch: Watch | None = None,
    network: PassageReader | None = None,
    known: MutableMapping[Hashable, float] | None = None,
) -> LeaveOneOut | LeftToRight:
    """The scorer that a model's process allows.

    Args:
        loaded: the model.
        t: the time at which a model of a process that shuffles reads the text.
        watch: called with the share of the candidates that has been read since the last call.
        network: the network of a masked model; by default its own in NumPy.
        known: cached scores of a masked model; new ones are added.
    """
    if loaded.process.can_shuffle:
        assert t is not None
        return LeaveOneOut(loaded, t, watch)
    if not loaded.method.dynamics.noisy:
        raise ValueError(f"{loaded.method.name} is autoregressive and does not read what comes after a word")
    assert loaded.process.mask_id is not None
    network = network or numpy_network(loaded, MASKED_TIME)
    return LeftToRight(network, loaded.tokenizer, loaded.length, loaded.process.mask_id, watch, known)


_NETWORKS: WeakKeyDictionary[LoadedModel, dict[float, NumpyNetwork]] = WeakKeyDictionary()


def numpy_network(loaded: LoadedModel, t: float) -> NumpyNetwork:
    """The network of a model in NumPy at one time t; it is cached as long as the model exists."""
    kept = _NETWORKS.setdefault(loaded, {})
    if t not in kept:
        model = loaded.model
        if not isinstance(model, Transformer):
            raise ValueError(f"the engine 'words' needs the architecture transformer; this is {model.architecture}")
        conditioning, sigma = model.backbone.conditioning, loaded.process.noise(t).sigma.view(1)
        time_input = 0.0 if conditioning is None else float(conditioning.time_input(sigma))
        tensors = {name: tensor.float().cpu().numpy() for name, tensor in model.state_dict().items()}
        kept[t] = NumpyNetwork(model.options, tensors, time_input)
    return kept[t]
