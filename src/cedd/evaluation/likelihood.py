"""log p(answer | context) of any model, with its error: what a question with several answers asks for.

Shapes: C tokens of a context, A of an answer, L that the model reads at once, V vocabulary.

What is computed depends on the model (`kind`):

    exact         autoregressive: the sum of log p(x_i | x_<i) over the answer.
    conditional   a process that only masks: the context stays clean, and the path is that of the answer alone. A lower
                  bound on log p(answer | context) of the model that infilling draws from.
    joint         a process that shuffles: its networks cannot be told that tokens are clean, and were never shown such
                  text beside noise. A lower bound on log p(context, answer): answers to one context are ranked by it,
                  since log p(context) is common to them, but it is not the likelihood of the answer.

Answers of one question are scored with the same times and noise (common random numbers), so that much of the error of
each is not in their differences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from cedd.bounds.estimator import estimate_bound
from cedd.data.text import Ids, before_first, encode_given
from cedd.models.loaded import LoadedModel, SamplingOptions, TextReader
from cedd.network import Network, Places, evaluating
from cedd.samplers import prompt

Kind = Literal["exact", "conditional", "joint"]
DRAWS = 8
"""Noisy versions of each answer, by default."""


@dataclass(frozen=True)
class LogLikelihood:
    """A log-likelihood in nats, or a lower bound on it.

    Args:
        value: of all tokens together.
        stderr: its Monte Carlo standard error (0 where it is exact).
        greedy: whether the model, always taking what it is surest of, would write this.
        tokens: how many there are.
        evaluations: noisy versions that the network was shown.
    """

    value: float
    stderr: float
    greedy: bool
    tokens: int
    evaluations: int


class Continuing:
    """A network after a clean context [C]: what it says of the positions that follow."""

    def __init__(self, model: TextReader, context: Tensor) -> None:
        self.model, self.context = model, context

    @property
    def head(self) -> Callable[[Tensor], Tensor]:
        return self.model.head

    def features(self, x_t: Tensor, sigma: Tensor) -> Tensor:
        """[B, A, D] for x_t [B, A]."""
        whole = torch.cat([self.context.to(x_t).expand(len(x_t), -1), x_t], 1)
        return self.model.features(whole, sigma)[:, len(self.context) :]


class TextLikelihoods:
    """The likelihoods of texts under a model.

    Args:
        loaded: the model.
        draws: noisy versions of each text.
        seed: of times and noise.
    """

    def __init__(self, loaded: LoadedModel, draws: int = DRAWS, seed: int = 0) -> None:
        if draws < 2:
            raise ValueError(f"an error needs two draws at least; got {draws}")
        self.loaded, self.draws, self.seed = loaded, draws, seed

    @property
    def kind(self) -> Kind:
        if not self.loaded.method.dynamics.noisy:
            return "exact"
        return "joint" if self.loaded.process.can_shuffle else "conditional"

    def answer(self, context: str, answer: str, question: int = 0) -> LogLikelihood:
        """Of an answer after its context. Blanks at the end of the context are read with the answer, as the harness
        does.

        Args:
            context: what comes before; it is cut from the left where both do not fit.
            answer: what is scored.
            question: answers with the same number are shown the same times and noise.
        """
        stem = context.rstrip()
        before = encode_given(self.loaded.tokenizer, stem) if stem else np.zeros(0, np.int64)
        whole = encode_given(self.loaded.tokenizer, context + answer)
        if len(whole) <= len(before):
            raise ValueError(f"the answer {answer!r} has no tokens")
        return self._scored(before, whole[len(before) :], question)

    def text(self, text: str, number: int = 0) -> LogLikelihood:
        """Of a whole text, of any length: pieces that the model reads at once, the last one with as much of the text
        before it as fits (joint: without)."""
        ids = encode_given(self.loaded.tokenizer, text)
        return self._scored(ids[:0], ids, number) if len(ids) else LogLikelihood(0.0, 0.0, True, 0, 0)

    def continued(
        self, context: str, most: int, until: Sequence[str] = (), options: SamplingOptions | None = None
    ) -> str:
        """Text of at most so many tokens after a context, cut before the first of `until`."""
        length = self.loaded.length
        room = most if most < length else length // 2
        given = torch.from_numpy(encode_given(self.loaded.tokenizer, context)[-(length - room) :])
        size = len(given) + room
        constraint = prompt(given, size) if len(given) else None
        drawn = self.loaded.draw((1, size), options or SamplingOptions(), constraint)[0]
        return before_first(self.loaded.tokenizer.decode(drawn[len(given) :].numpy()), until)

    def _scored(self, context: Ids, answer: Ids, number: int) -> LogLikelihood:
        generator = torch.Generator().manual_seed(int(np.random.SeedSequence((self.seed, number)).generate_state(1)[0]))
        parts = [
            self._part(torch.from_numpy(before), torch.from_numpy(piece), generator)
            for before, piece in self._pieces(context, answer)
        ]
        return LogLikelihood(
            sum(part.value for part in parts),
            math.sqrt(sum(part.stderr**2 for part in parts)),
            all(part.greedy for part in parts),
            sum(part.tokens for part in parts),
            sum(part.evaluations for part in parts),
        )

    def _pieces(self, context: Ids, answer: Ids) -> Iterator[tuple[Ids, Ids]]:
        """(context, piece) in order, each pair no longer than the model reads."""
        length = self.loaded.length
        if self.kind == "joint":
            whole = np.concatenate([context, answer])
            whole = whole[-length:] if len(answer) <= length else whole
            for start in range(0, len(whole), length):
                yield whole[:0], whole[start : start + length]
            return
        for start in range(0, len(answer), length):
            piece = answer[start : start + length]
            before = np.concatenate([context, answer[:start]])
            yield before[max(0, len(before) + len(piece) - length) :], piece

    def _part(self, context: Tensor, piece: Tensor, generator: torch.Generator) -> LogLikelihood:
        if self.kind == "exact":
            return self._exact(context, piece)
        reader = self.loaded.reader(len(context) + len(piece))
        model = Continuing(reader, context) if len(context) else reader
        found = estimate_bound(
            model,
            self.loaded.process,
            piece[None],
            method=self.loaded.method,
            draws=self.draws,
            generator=generator,
            fixed_set=True,
            nested=True,
            batch=self.draws,
            device=self.loaded.device,
        )
        greedy = self.kind == "conditional" and self._is_greedy(model, piece)
        count = len(piece)
        return LogLikelihood(
            -found.nats_per_token * count, found.monte_carlo_stderr * count, greedy, count, found.evaluations
        )

    def _exact(self, context: Tensor, piece: Tensor) -> LogLikelihood:
        """By a causal network, which says of each position what comes next."""
        process, dynamics = self.loaded.process, self.loaded.method.dynamics
        network = Network.of(self.loaded.model, process.vocab_size, self.loaded.device)
        x0 = torch.cat([context, piece])[None].to(network.device)
        places = Places(torch.arange(len(context), x0.shape[1], device=network.device))
        with evaluating(self.loaded.model):
            rows = network.rows(dynamics.network_input(x0, x0, process), torch.zeros(1, device=network.device), places)
            outputs = rows.map(lambda outputs, _: outputs.double()).cpu()
        nats = outputs.logsumexp(-1) - outputs.gather(1, piece[:, None])[:, 0]
        return LogLikelihood(-float(nats.sum()), 0.0, bool((outputs.argmax(1) == piece).all()), len(piece), 1)

    def _is_greedy(self, model: TextReader | Continuing, piece: Tensor) -> bool:
        """Whether revealing the surest position first, one after another, writes the piece [A].

        On a process that only masks, all methods' outputs at a mask are the logits of x_0.
        """
        process, last = self.loaded.process, self.loaded.process.sigma(1.0)
        network = Network.of(model, process.vocab_size, self.loaded.device)
        x = torch.full_like(piece, process.vocab_size)
        with evaluating(self.loaded.model):
            while len(masked := torch.nonzero(x == process.vocab_size)[:, 0]):
                share = torch.tensor(len(masked) / len(piece), dtype=torch.float64)
                sigma = torch.minimum(-torch.log1p(-share), last)
                rows = network.rows(x[None].to(network.device), sigma, Places(masked.to(network.device)))
                sureness, best = rows.map(lambda outputs, _: outputs.double().softmax(-1)).cpu().max(1)
                surest = int(sureness.argmax())
                place = masked[surest]
                if best[surest] != piece[place]:
                    return False
                x[place] = piece[place]
        return True
