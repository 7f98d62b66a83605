"""How likely a model finds texts that differ in one place, also if they differ in length.

Shapes: W windows, L positions, V vocabulary, R rows.

The score of a text is the sum of log g over its tokens, g being the probability of a token given all others
(leave-one-out; Besag's pseudo-likelihood). A model of any process that shuffles gives it in one reading: the text is
read as noisy data at a small t, and the weight of the token itself is taken out by Bayes' rule
(`scores.leave_one_out`). Only tokens near the place have another score in another version, so only a window is read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch

from cedd.data.text import Ids, encode_text
from cedd.models.loaded import LoadedModel
from cedd.network import Network, Places
from cedd.spelling.scores import Floats, Watch, leave_one_out, rate_of_time

SIZE, BEFORE, NEAR = 48, 24, 8
"""Characters that are read, so that windows have one length and are read together; of these before a place; tokens on
each side of it whose score counts."""
BATCH = 16


class Likelihoods:
    """Scores versions of a text.

    Args:
        loaded: the model.
        t: the time that the network is told.
        watch: called with how much of what was asked has been read.
    """

    def __init__(self, loaded: LoadedModel, t: float, watch: Watch | None = None) -> None:
        self.loaded, self.t, self.watch = loaded, t, watch
        self.network = Network.of(loaded.model, loaded.process.vocab_size, loaded.device)

    @torch.no_grad()
    def __call__(self, text: str, replacements: Sequence[tuple[int, int, str]]) -> Floats:
        """Of the text with text[start:stop] replaced, one score for each (start, stop, replacement)."""
        windows = [self.window(text, *replacement) for replacement in replacements]
        by_length: dict[int, list[int]] = defaultdict(list)
        for number, (ids, _) in enumerate(windows):
            by_length[len(ids)].append(number)
        result = np.zeros(len(windows))
        for numbers in by_length.values():
            for begin in range(0, len(numbers), BATCH):
                group = numbers[begin : begin + BATCH]
                scores = self.scores(np.stack([windows[number][0] for number in group]))
                for row, number in enumerate(group):
                    result[number] = scores[row, windows[number][1]].sum()
                if self.watch is not None:
                    self.watch(len(group) / len(windows))
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
        x = torch.from_numpy(ids).to(self.network.device)
        noise, rate = self.loaded.process.noise(self.t).to(x.device), rate_of_time(self.loaded.process, self.t)
        flat, parts = x.flatten(), list[torch.Tensor]()
        everywhere = Places(torch.arange(len(flat), device=x.device))
        for outputs, rows in self.network.rows(x, noise.sigma, everywhere).chunks():
            tokens = flat[rows]
            posterior = self.loaded.method.parameterization.log_posterior(outputs, tokens, noise.like(tokens))
            parts.append(leave_one_out(posterior, tokens[:, None], rate)[:, 0])
        return torch.cat(parts).view(x.shape).double().cpu().numpy()
