"""The likelihood estimators of published masked diffusion models, by name, for lm-evaluation-harness.

Shapes: B draws of a batch, n tokens of an answer.

Each shows the network the clean context and the answer with some tokens masked, and averages over draws

    Σ_masked i  w_i · -log p(x_i | what is shown),

with the weights and the law of the masks that the project's own harness has:

- llada: k tokens are masked, w = n/k, with k stratified over 1..n in each batch. The expectation is the ELBO of the
  sampler that reveals one token at a time in random order.
- dream: each token is masked with probability p, w = 1/p, with p = ε + (1 - ε) t and t stratified in each batch. The
  context begins with the start token, the answer is followed by the end token, which is never masked.
- dream-ar: all tokens from i on are masked, and x_i is scored: the product of conditionals from left to right (Dream's
  nll_type ar_ftb). Exact, and not the likelihood of any other order.

Differences from the originals: answers of one question are scored with common random numbers, and every value has a
standard error, that of the mean over batches (over draws if there is only one batch).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from cedd.data.tokenizers import Tokenizer
from cedd.names import suggestion

BATCH = 32
"""Draws of a batch, in which times are stratified."""


@dataclass(frozen=True)
class Masks:
    """Draws of which tokens of an answer are masked, [B, n] each."""

    where: Tensor
    weights: Tensor
    """What -log p of a masked token is multiplied by; 0 where it is not scored."""


class Protocol(ABC):
    """An estimator of -log p(answer | context)."""

    name: ClassVar[str]
    draws: int = 128
    exact: bool = False
    """Whether its value has no Monte Carlo error."""

    @abstractmethod
    def masks(self, length: int, batch: int, generator: torch.Generator) -> Masks:
        """A batch of draws for an answer of `length` tokens."""

    def batches(self, length: int, draws: int, generator: torch.Generator) -> Iterator[Masks]:
        """All draws for an answer. Numbers are drawn position by position, so that answers of different lengths share
        those of their common positions."""
        size = min(BATCH, draws)
        if draws % size:
            raise ValueError(
                f"draws must be a multiple of {BATCH}, the batch of the protocol {self.name} (got {draws})"
            )
        seeds = torch.randint(2**62, (draws // size,), generator=generator)
        for seed in seeds.tolist():
            yield self.masks(length, size, torch.Generator().manual_seed(seed))

    def framed(self, context: Tensor, answer: Tensor, tokenizer: Tokenizer) -> tuple[Tensor, Tensor, int]:
        """The context and the answer as the original shows them, and how many tokens at the answer's end are never
        masked."""
        del tokenizer
        return context, answer, 0


def _uniform(length: int, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A number [], and numbers [B, n] of which those of a longer answer are a continuation."""
    first = torch.rand((), generator=generator, dtype=torch.float64)
    return first, torch.rand(length, batch, generator=generator, dtype=torch.float64).T


class LLaDA(Protocol):
    """`get_log_likelihood` of LLaDA."""

    name = "llada"

    def masks(self, length: int, batch: int, generator: torch.Generator) -> Masks:
        first, keys = _uniform(length, batch, generator)
        k = 1 + int(first * length)
        last = k + (batch - 1) * (length / batch)
        counts = torch.linspace(k, last, batch, dtype=torch.float64).round().long()
        counts = (counts - 1) % length + 1
        where = keys.argsort(1).argsort(1) < counts[:, None]
        return Masks(where, (length / counts.double())[:, None].expand(batch, length))


class Dream(Protocol):
    """The Monte Carlo estimator of Dream's harness."""

    name = "dream"
    epsilon = 1e-3

    def masks(self, length: int, batch: int, generator: torch.Generator) -> Masks:
        first, u = _uniform(length, batch, generator)
        t = (first + torch.arange(batch, dtype=torch.float64) / batch) % 1
        p = (self.epsilon + (1 - self.epsilon) * t)[:, None].expand(batch, length)
        return Masks(u < p, 1 / p)

    def framed(self, context: Tensor, answer: Tensor, tokenizer: Tokenizer) -> tuple[Tensor, Tensor, int]:
        if tokenizer.bos_id is not None:
            context = torch.cat([torch.tensor([tokenizer.bos_id]), context])
        if tokenizer.eos_id is None:
            return context, answer, 0
        return context, torch.cat([answer, torch.tensor([tokenizer.eos_id])]), 1


class DreamLeftToRight(Dream):
    """The exact chain of Dream's harness."""

    name = "dream-ar"
    exact = True

    def batches(self, length: int, draws: int, generator: torch.Generator) -> Iterator[Masks]:
        where = torch.ones(length, length, dtype=torch.bool).triu()
        yield Masks(where, length * torch.eye(length, dtype=torch.float64))


PROTOCOLS: dict[str, Protocol] = {protocol.name: protocol for protocol in (LLaDA(), Dream(), DreamLeftToRight())}
"""Estimators by name."""


def get_protocol(name: str) -> Protocol:
    """The protocol of this name."""
    if name not in PROTOCOLS:
        raise ValueError(f"invalid protocol: {name!r}{suggestion(name, PROTOCOLS)}")
    return PROTOCOLS[name]


Nats = Callable[[Tensor, Tensor], Tensor]
"""(x_t [B, n], flat places [N] of masked tokens) -> -log p of their clean tokens [N] in float64."""


@dataclass(frozen=True)
class Estimate:
    """-log p of an answer in nats."""

    nats: float
    stderr: float
    evaluations: int
    freedom: int
    """Degrees of freedom of `stderr`."""


def estimate(batches: Iterator[Masks], answer: Tensor, mask_id: int, nats: Nats) -> Estimate:
    """The mean over draws of the weighted sum over masked tokens of an answer [n]."""
    means: list[float] = []
    each = torch.zeros(0, dtype=torch.float64)
    evaluations = 0
    for masks in batches:
        x_t = torch.where(masks.where, mask_id, answer)
        scored = masks.where & (masks.weights > 0)
        places = scored.flatten().nonzero().squeeze(1)
        terms = torch.zeros(scored.shape, dtype=torch.float64)
        if len(places):
            terms[scored] = masks.weights[scored] * nats(x_t, places).double().cpu()
        each = terms.sum(1)
        means.append(float(each.mean()))
        evaluations += len(x_t)
    values = torch.tensor(means, dtype=torch.float64) if len(means) > 1 else each
    spread = float(values.std() / math.sqrt(len(values))) if len(values) > 1 else math.nan
    return Estimate(sum(means) / len(means), spread, evaluations, len(values) - 1)
