"""log p(answer | context) of any model, with its error, for questions with several answers.

Shapes: C tokens of a context, A of an answer, L the model's context length, V vocabulary.

The computation depends on the model (`kind`):

    exact         autoregressive: the sum of log p(x_i | x_<i) over the answer.
    conditional   a process that only masks: the context stays clean, and the path is that of the answer alone. A lower
                  bound on log p(answer | context) of the model that infilling draws from. If the answer is short, the
                  exact likelihood, by a sum over all orders in which the first-hitting sampler can generate it
                  (bounds/exact_likelihood.py); `LogLikelihood.exact` is then true.
    joint         a process that shuffles, whose networks have never seen clean text next to noise. A lower bound on
                  log p(context, answer). It ranks answers to one context, since log p(context) is common to them, but
                  it is not the likelihood of the answer.

The estimator of another project can be used instead (`protocols.py`); `kind` is then its name.

Answers to one question are scored with the same times and noise (common random numbers), which reduces the error of
their differences. They are all exact or all bounds: a bound is lower than the likelihood, and would lose against an
exact value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cedd.block_layout import BlockNetwork, GivenPast, as_block_sequences
from cedd.bounds.estimate import combined_freedom, student_quantile
from cedd.bounds.estimator import estimate_bound
from cedd.bounds.exact_likelihood import MOST_POSITIONS, context_count, exact_likelihood
from cedd.data.text import Ids, before_first, encode_verbatim
from cedd.evaluation.joined_calls import JoinedCalls
from cedd.evaluation.protocols import Masks, Protocol, estimate, get_protocol
from cedd.models.backbone import Backbone
from cedd.models.loaded_model import LoadedModel
from cedd.network import Capabilities, Network, Places, capabilities_of, evaluating
from cedd.samplers import SamplingOptions, prompt

Kind = Literal["exact", "conditional", "joint"] | str
DRAWS = 8
"""Default number of noisy versions of each answer."""


@dataclass(frozen=True)
class LogLikelihood:
    """A log-likelihood in nats, or a lower bound on it.

    Args:
        value: of all tokens together.
        stderr: its Monte Carlo standard error (0 if exact).
        greedy: whether greedy decoding, most confident position first, would generate this.
        tokens: number of tokens.
        evaluations: noisy versions evaluated by the network.
        exact: whether it is the likelihood itself.
        freedom: degrees of freedom of `stderr`; 0 if it cannot be estimated.
    """

    value: float
    stderr: float
    greedy: bool
    tokens: int
    evaluations: int
    exact: bool = False
    freedom: int = 0

    @property
    def ci95(self) -> tuple[float, float]:
        """The 95% interval of the value, by Student's t: a point if it is exact, NaN if there is none."""
        if self.exact:
            return self.value, self.value
        half = student_quantile(self.freedom) * self.stderr if self.freedom else math.nan
        return self.value - half, self.value + half


def predicts_tokens(loaded: LoadedModel) -> bool:
    """Whether one network evaluation gives the probability of a token given those before it: by an autoregressive
    model, or by one that only masks, writes blocks of one token, and does not depend on the time."""
    if not loaded.method.dynamics.noisy:
        return True
    only_masks = loaded.method.dynamics.only_reveals(loaded.process)
    return only_masks and loaded.method.block == 1 and not capabilities_of(loaded.model).time_conditioned


class WithContext:
    """A network after a clean context [C], which gives outputs for the positions that follow."""

    capabilities = Capabilities(features=True)

    def __init__(self, model: Backbone, context: Tensor) -> None:
        self.model, self.context = model, context

    @property
    def head(self) -> Callable[[Tensor], Tensor]:
        return self.model.head

    def features(self, x_t: Tensor, sigma: Tensor) -> Tensor:
        """[B, A, D] for x_t [B, A]."""
        whole = torch.cat([self.context.to(x_t).expand(len(x_t), -1), x_t], 1)
        return self.model.features(whole, sigma)[:, len(self.context) :]


class AfterBlocks(BlockNetwork):
    """A network that writes blocks, after a clean context [C] that may end within one."""

    def __init__(self, model: Backbone, block: int, context: Tensor) -> None:
        self.model: GivenPast = GivenPast(model, block)
        self.context = context

    def features(self, x_t: Tensor, sigma: Tensor, **options: Any) -> Tensor:
        """[B, A, D] for x_t [B, A]."""
        return self.model.features(x_t, sigma, past=self.context.to(x_t).expand(len(x_t), -1), **options)


class TextLikelihoods:
    """The likelihoods of texts under a model.

    Args:
        loaded: the model.
        draws: noisy versions of each text; by default 8, or the protocol's own number.
        seed: of times and noise.
        protocol: an estimator of another project (`PROTOCOLS`); None: ours.
        guidance: w of classifier-free guidance, un + (w + 1) (c - un) with the context masked in un, for a protocol.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        draws: int | None = None,
        seed: int = 0,
        protocol: str | None = None,
        guidance: float = 0.0,
    ) -> None:
        self.protocol = None if protocol is None else get_protocol(protocol)
        if draws is None:
            draws = DRAWS if self.protocol is None else self.protocol.draws
        if draws < 2:
            raise ValueError(f"draws must be at least 2, to estimate an error (got {draws})")
        dynamics = loaded.method.dynamics
        if protocol is not None and not (dynamics.noisy and dynamics.only_reveals(loaded.process)):
            raise ValueError(f"the protocol {protocol} needs a model that only masks; this one is {loaded.name}")
        if protocol is not None and loaded.writes_blocks:
            loaded.method.check_whole(f"the protocol {protocol}")
        if guidance != 0.0 and protocol is None:
            raise ValueError("guidance needs a protocol, such as llada")
        self.loaded, self.draws, self.seed, self.guidance = loaded, draws, seed, guidance

    @property
    def kind(self) -> Kind:
        if self.protocol is not None:
            return self.protocol.name
        if not self.loaded.method.dynamics.noisy:
            return "exact"
        return "joint" if self.loaded.process.can_shuffle else "conditional"

    def is_short(self, context: str, answer: str) -> bool:
        """Whether the exact likelihood of an answer takes at most twice the evaluations of the draws."""
        if self.kind == "exact":
            return True
        if self.kind != "conditional" or not self.loaded.method.dynamics.only_reveals(self.loaded.process):
            return False
        tokens = len(self.encoded(context, answer)[1])
        if self.loaded.writes_blocks:
            tokens = min(tokens, self.loaded.method.block or tokens)
        return tokens <= MOST_POSITIONS and context_count(self.loaded.model, tokens) <= 2 * self.draws

    def answers(self, context: str, answers: Sequence[str], question: int = 0) -> list[LogLikelihood]:
        """Score each answer to a question: all exactly if all are short, otherwise all with the same times and noise.
        Their network calls are joined into batches."""
        exact = all(self.is_short(context, answer) for answer in answers)
        if len(answers) < 2:
            return [self.answer(context, answer, question, exact=exact) for answer in answers]
        joined = JoinedCalls(self.loaded.model)
        together = copy(self)
        together.loaded = LoadedModel(replace(self.loaded.folder, model=joined), self.loaded.device)
        return joined.run([partial(together.answer, context, answer, question, exact=exact) for answer in answers])

    def answer(self, context: str, answer: str, question: int = 0, *, exact: bool | None = None) -> LogLikelihood:
        """Score an answer after its context. Spaces at the end of the context are tokenized with the answer, as in the
        harness.

        Args:
            context: the text before; it is cut from the left if both do not fit.
            answer: the text to score.
            question: answers with the same number use the same times and noise.
            exact: sum over all orders; by default if the answer is short.
        """
        before, piece = self.encoded(context, answer)
        return self._scored(before, piece, question, self.is_short(context, answer) if exact is None else exact)

    def encoded(self, context: str, answer: str) -> tuple[Ids, Ids]:
        """The tokens of a context and of the answer after it."""
        stem = context.rstrip()
        before = encode_verbatim(self.loaded.tokenizer, stem) if stem else np.zeros(0, np.int64)
        whole = encode_verbatim(self.loaded.tokenizer, context + answer)
        if len(whole) <= len(before):
            raise ValueError(f"the answer {answer!r} has no tokens after {context[-20:]!r}")
        return before, whole[len(before) :]

    def text(self, text: str, number: int = 0) -> LogLikelihood:
        """Score a text of any length in pieces of the model's context length, each with as much of the text before it
        as fits (joint: without)."""
        ids = encode_verbatim(self.loaded.tokenizer, text)
        return self._scored(ids[:0], ids, number) if len(ids) else LogLikelihood(0.0, 0.0, True, 0, 0, True)

    def continued(
        self, context: str, most: int, until: Sequence[str] = (), options: SamplingOptions | None = None
    ) -> str:
        """At most `most` tokens of text after a context, cut before the first of `until`."""
        loaded, length = self.loaded, self.loaded.length
        given = torch.from_numpy(encode_verbatim(loaded.tokenizer, context))
        room = most if loaded.writes_blocks or most < length else length // 2
        given = given if loaded.writes_blocks else given[-(length - room) :]
        size = len(given) + room
        constraint = prompt(given, size) if len(given) else None
        drawn = loaded.draw((1, size), options or SamplingOptions(), constraint)[0]
        return before_first(loaded.tokenizer.decode(drawn[len(given) :].numpy()), until)

    def _scored(self, context: Ids, answer: Ids, number: int, exact: bool = False) -> LogLikelihood:
        generator = torch.Generator().manual_seed(int(np.random.SeedSequence((self.seed, number)).generate_state(1)[0]))
        parts = [
            self._part(torch.from_numpy(before), torch.from_numpy(piece), generator, exact)
            for before, piece in self._pieces(context, answer)
        ]
        return LogLikelihood(
            sum(part.value for part in parts),
            math.sqrt(sum(part.stderr**2 for part in parts)),
            all(part.greedy for part in parts),
            sum(part.tokens for part in parts),
            sum(part.evaluations for part in parts),
            all(part.exact for part in parts),
            combined_freedom([(part.stderr, part.freedom) for part in parts if not part.exact]),
        )

    def _pieces(self, context: Ids, answer: Ids) -> Iterator[tuple[Ids, Ids]]:
        """(context, piece) in order, each pair at most the model's context length."""
        length = self.loaded.length
        if self.loaded.writes_blocks:
            yield from self._blocks(context, answer)
            return
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

    def _blocks(self, context: Ids, answer: Ids) -> Iterator[tuple[Ids, Ids]]:
        """The same by blocks: the answer's tokens in each, and those before them. Where tokens are shuffled, those of
        the context in the answer's first block are scored with it (joint)."""
        block = self.loaded.method.block
        assert block is not None
        most = self.loaded.length - block  # whole blocks before one
        whole, start = np.concatenate([context, answer]), len(context)
        if self.kind == "joint":
            start -= start % block
        while start < len(whole):
            stop = min(start - start % block + block, len(whole))
            first = max(0, start - start % block - most // block * block)
            yield whole[first:start], whole[start:stop]
            start = stop

    def _part(self, context: Tensor, piece: Tensor, generator: torch.Generator, exact: bool) -> LogLikelihood:
        if self.kind == "exact":
            return self._exact(context, piece)
        if self.protocol is not None:
            return self._by_protocol(self.protocol, context, piece, generator)
        loaded, count = self.loaded, len(piece)
        if loaded.writes_blocks:
            assert loaded.method.block is not None
            model: Any = AfterBlocks(loaded.model, loaded.method.block, context)
            network, ids, method = model, piece, loaded.method.of_one_block
        else:
            model, network, method = self._after(context, count), loaded.reader(len(context) + count), loaded.method
            ids = torch.cat([context, piece])
        greedy = self.kind == "conditional" and self._is_greedy(model, piece)
        if exact:
            places = range(len(ids) - count, len(ids))
            nats = exact_likelihood(network, loaded.process, ids[None], places, method=method, device=loaded.device)
            return LogLikelihood(-float(nats), 0.0, greedy, count, context_count(network, count), True)
        found = estimate_bound(
            model,
            loaded.process,
            piece[None],
            method=method,
            draws=self.draws,
            generator=generator,
            fixed_set=True,
            nested=True,
            batch=self.draws,
            device=loaded.device,
        )
        value, error = -found.nats_per_token * count, found.monte_carlo_stderr * count
        return LogLikelihood(value, error, greedy, count, found.evaluations, freedom=found.monte_carlo_freedom)

    def _by_protocol(
        self, protocol: Protocol, context: Tensor, piece: Tensor, generator: torch.Generator
    ) -> LogLikelihood:
        """Score by another project's estimator."""
        process = self.loaded.process
        shown, answer, kept = protocol.framed(context, piece, self.loaded.tokenizer)
        shown = shown[max(0, len(shown) + len(answer) - self.loaded.length) :]
        model = self._after(shown, len(answer))
        hidden = self._after(torch.full_like(shown, process.vocab_size), len(answer)) if self.guidance else None
        last, scored = process.sigma(1.0), len(piece)

        def outputs(model: Backbone | WithContext, x_t: Tensor, places: Tensor) -> Tensor:
            network = Network.of(model, process.vocab_size, self.loaded.device)
            share = (x_t == process.vocab_size).double().mean(1)
            sigma = torch.minimum(-torch.log1p(-share), last).to(network.device)
            rows = network.rows(x_t.to(network.device), sigma, Places(places.to(network.device)), full_precision=True)
            return rows.map(lambda outputs, _: outputs.double())

        def nats(x_t: Tensor, places: Tensor) -> Tensor:
            targets = answer[places % len(answer)].to(self.loaded.device)
            logits = outputs(model, x_t, places)
            if hidden is not None:
                free = outputs(hidden, x_t, places)
                logits = free + (self.guidance + 1) * (logits - free)
            return logits.logsumexp(1) - logits.gather(1, targets[:, None])[:, 0]

        def whole(masks: Masks) -> Masks:
            return Masks(F.pad(masks.where, (0, kept)), F.pad(masks.weights, (0, kept)))

        with evaluating(self.loaded.model):
            batches = map(whole, protocol.batches(scored, self.draws, generator))
            found = estimate(batches, answer, process.vocab_size, nats)
        greedy = self._is_greedy(self._after(context, scored), piece)
        error = 0.0 if protocol.exact else found.stderr
        freedom = 0 if math.isnan(error) else found.freedom
        return LogLikelihood(-found.nats, error, greedy, scored, found.evaluations, freedom=freedom)

    def _after(self, context: Tensor, length: int) -> Backbone | WithContext:
        """The network after a clean context, for this number of tokens."""
        reader = self.loaded.reader(len(context) + length)
        return WithContext(reader, context) if len(context) else reader

    def token_log_probs(self, context: Tensor, piece: Tensor) -> Tensor:
        """log p(token | the tokens before it) for each position of a piece [A] after a context [C], [A, V] float64, for
        a model that `predicts_tokens`."""
        if self.loaded.method.dynamics.noisy:
            return self._mask_outputs(context, piece).log_softmax(-1)
        return self._next_token_outputs(context, piece).log_softmax(-1)

    def _mask_outputs(self, context: Tensor, piece: Tensor) -> Tensor:
        """The outputs of a network that writes blocks of one token, at a mask in the place of each token, [A, V]."""
        process = self.loaded.process
        text = torch.cat([context, piece])[None].to(self.loaded.device)
        network = Network.of(self.loaded.model, process.vocab_size, self.loaded.device)
        network, tokens = as_block_sequences(network, text, text.shape[1])
        sigma = process.sigma(1.0).to(network.device, torch.float32).expand(len(tokens))
        places = Places(torch.arange(len(context), len(tokens), device=network.device))
        with evaluating(self.loaded.model):
            rows = network.rows(torch.full_like(tokens, process.vocab_size), sigma, places)
            return rows.map(lambda outputs, _: outputs.double()).cpu()

    def _next_token_outputs(self, context: Tensor, piece: Tensor) -> Tensor:
        """The outputs of a causal network, which predicts the next token at each position, [A, V]."""
        process, dynamics = self.loaded.process, self.loaded.method.dynamics
        network = Network.of(self.loaded.model, process.vocab_size, self.loaded.device)
        x0 = torch.cat([context, piece])[None].to(network.device)
        skipped = int(len(context) > 0 and capabilities_of(self.loaded.model).optional_start)
        inputs = dynamics.network_input(x0, x0, process)[:, skipped:]
        places = Places(torch.arange(len(context) - skipped, inputs.shape[1], device=network.device))
        with evaluating(self.loaded.model):
            rows = network.rows(inputs, torch.zeros(1, device=network.device), places)
            return rows.map(lambda outputs, _: outputs.double()).cpu()

    def _exact(self, context: Tensor, piece: Tensor) -> LogLikelihood:
        outputs = self._next_token_outputs(context, piece)
        nats = outputs.logsumexp(-1) - outputs.gather(1, piece[:, None])[:, 0]
        return LogLikelihood(-float(nats.sum()), 0.0, bool((outputs.argmax(1) == piece).all()), len(piece), 1, True)

    def _is_greedy(self, model: Backbone | WithContext, piece: Tensor) -> bool:
        """Whether revealing the most confident position first, one after another, generates the piece [A].

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
                confidence, best = rows.map(lambda outputs, _: outputs.double().softmax(-1)).cpu().max(1)
                most_confident = int(confidence.argmax())
                place = masked[most_confident]
                if best[most_confident] != piece[place]:
                    return False
                x[place] = piece[place]
        return True
