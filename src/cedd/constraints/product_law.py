"""Independent tokens conditioned on a language: exact draws, marginals and the partition function.

Shapes: B sequences, L positions, V vocabulary, Q states, C classes of tokens, E transitions; R rows.

With p_i the law of position i (of a known token, all on that token), tokens drawn independently of each other are in
the language with probability Z, and given that they are,

    p(x | language) = prod_i p_i(x_i) / Z,        x in the language,

has a Markov chain over the states of the automaton. With P_i(c) the sum of p_i over a class,

    backward    beta_L(q) = [q accepting],    beta_{i-1}(q) = sum_c P_i(c) beta_i(delta(q, c)),    Z = beta_0(start)
    forward     alpha_0(q) = [q start],       alpha_i(q') = sum over (q, c, q') of alpha_{i-1}(q) P_i(c)
    marginal    p_i(v) M_i(class of v) / Z,       M_i(c) = sum over (q, c, q') of alpha_{i-1}(q) beta_i(q')
    draw        left to right: the state q_i = delta(q_{i-1}, c), with the class c in proportion to P_i(c) beta_i(q_i);
                then p_i within c

in L E operations, whatever V. p_i need not be normalised: a factor of a position is one of Z. A draw visits every
position up to the last one that is drawn, so the tokens that it returns have their joint marginal law. The numbers for
the other positions are hashes of the number for the next position that is drawn (see `own_numbers`).

There are two implementations. `LogLaw` keeps the logarithm of each state, on any device and for all sequences at once;
on CUDA devices a kernel runs all positions of a sequence (`product_law_triton.py`).
`ScaledLaw` is for the CPU: numbers in float64 in units of the largest at each position. Where these are not above
1e-200 (for marginals, the sum of alpha_i beta_i in units of both), it uses `LogLaw`.

This is the law of one pass of a network given the language. A sampler that draws from it in several passes does not
follow the model's p(x | language): see `cedd.samplers.particles`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cedd.constraints.edges import Edges
from cedd.constraints.token_automaton import TokenAutomaton
from cedd.device import has_triton
from cedd.splitmix import GAMMA, mix

Numbers = NDArray[np.float64]
_LEAST = 1e-200
_FAR = 700.0  # largest difference of logarithms whose exponentials are added: exp(-745) is 0
_LOWEST = -1e300  # replaces -inf where it is subtracted
_TINY = float(np.finfo(np.float64).tiny)


@dataclass(frozen=True, eq=False)
class _Groups:
    """Transitions sorted by their source, label or target, in which they are summed."""

    source: Tensor
    label: Tensor
    target: Tensor
    starts: Tensor
    """Where each group begins, and the end, [G + 1]."""

    @staticmethod
    def of(parts: Sequence[Tensor], by: int, count: int) -> _Groups:
        order = torch.argsort(parts[by], stable=True)
        keys = parts[by][order].contiguous()
        starts = torch.searchsorted(keys, torch.arange(count + 1, device=keys.device))
        return _Groups(parts[0][order], parts[1][order], parts[2][order], starts)

    @cached_property
    def of_each(self) -> Tensor:
        """The group of each transition, [E]."""
        counts = torch.diff(self.starts)
        return torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)

    @cached_property
    def on_host(self) -> _HostGroups:
        source, label, target, starts = (
            part.cpu().numpy() for part in (self.source, self.label, self.target, self.starts)
        )
        some = np.flatnonzero(np.diff(starts))
        return _HostGroups(source, label, target, starts, some, starts[:-1][some])

    def log_sums(self, terms: Tensor, greedy: bool = False) -> Tensor:
        """log of the sums of exp(terms [B, E]) over each group, [B, G], or their largest."""
        ends = self.starts.expand(len(terms), -1).contiguous()
        largest = torch.segment_reduce(terms, "max", offsets=ends, axis=1, unsafe=True, initial=-math.inf)
        if greedy:
            return largest
        unit = largest.clamp_min(_LOWEST)
        parts = (terms - unit.index_select(1, self.of_each)).exp_()
        return torch.segment_reduce(parts, "sum", offsets=ends, axis=1, unsafe=True, initial=0.0).log() + unit


class _HostGroups(NamedTuple):
    source: NDArray[np.int64]
    label: NDArray[np.int64]
    target: NDArray[np.int64]
    starts: NDArray[np.int64]
    some: NDArray[np.int64]
    """The groups that have transitions."""
    firsts: NDArray[np.int64]
    """The first transition of each of these."""

    def sums(self, terms: Numbers) -> Numbers:
        """Sums of terms [..., E] over each group, [..., G]."""
        found = np.zeros((*terms.shape[:-1], len(self.starts) - 1))
        if len(self.some):
            found[..., self.some] = np.add.reduceat(terms, self.firsts, axis=-1)
        return found


class TokenLanguage:
    """A token automaton's tables on a device, in the orders in which they are needed.

    Args:
        automaton: the automaton.
        device: where laws are computed.
    """

    def __init__(self, automaton: TokenAutomaton, device: torch.device | str = "cpu") -> None:
        self.automaton, self.device = automaton, torch.device(device)
        classes = torch.as_tensor(automaton.classes, dtype=torch.int64)
        parts = [torch.as_tensor(part, dtype=torch.int64) for part in automaton.transitions]
        self._parts = [part.to(self.device) for part in parts]
        self.classes = classes.to(self.device)
        self.accepting = torch.as_tensor(automaton.accepting, device=self.device)
        alive = torch.zeros(automaton.num_classes, dtype=torch.bool)
        alive[parts[1]] = True
        order = torch.argsort(classes, stable=True)
        order = order[alive[classes[order]]]
        self._tokens = order.to(self.device)
        """Tokens that are in a transition, by classes."""
        self._counts = torch.bincount(classes[order], minlength=automaton.num_classes).to(self.device)

        self._others: dict[torch.device, TokenLanguage] = {self.device: self}

    def on(self, device: torch.device) -> TokenLanguage:
        """The same tables on a device."""
        if device not in self._others:
            self._others[device] = TokenLanguage(self.automaton, device)
        return self._others[device]

    @property
    def vocab_size(self) -> int:
        """V."""
        return len(self.automaton.classes)

    @property
    def num_states(self) -> int:
        """Q."""
        return self.automaton.num_states

    @property
    def num_classes(self) -> int:
        """C."""
        return self.automaton.num_classes

    @cached_property
    def by_source(self) -> _Groups:
        """Transitions in the order of the states that they leave."""
        return _Groups.of(self._parts, 0, self.num_states)

    @cached_property
    def by_label(self) -> _Groups:
        """In the order of their classes."""
        return _Groups.of(self._parts, 1, self.num_classes)

    @cached_property
    def by_target(self) -> _Groups:
        """In the order of the states that they enter."""
        return _Groups.of(self._parts, 2, self.num_states)

    @cached_property
    def leaving(self) -> Tensor:
        """The transitions that leave each state, as indices into `by_source`, [Q, largest number per state]; -1 after
        the last."""
        counts = torch.diff(self.by_source.starts)
        places = torch.arange(max(1, int(counts.max())), device=self.device)
        return torch.where(places < counts[:, None], self.by_source.starts[:-1, None] + places, -1)

    @cached_property
    def edges(self) -> Edges:
        """The transitions for kernels: by the number that leave a state, most first."""
        return Edges.by_count(self.by_source.label, self.by_source.target, self.by_source.starts)

    @cached_property
    def _pieces(self) -> tuple[Tensor, Tensor]:
        """The tokens by classes in pieces of at most `PIECE` tokens: the start of each piece, and the end, [N + 1];
        and the first piece of each class, and the end, [C + 1]."""
        from cedd.constraints.product_law_triton import PIECE

        counts = self._counts.cpu()
        pieces = -(-counts // PIECE)
        firsts = torch.cat([torch.zeros(1, dtype=torch.int64), pieces.cumsum(0)])
        number = torch.arange(int(firsts[-1])) - firsts[:-1].repeat_interleave(pieces)
        starts = (counts.cumsum(0) - counts).repeat_interleave(pieces) + number * PIECE
        ends = torch.cat([starts, counts.sum()[None]])
        return ends.to(self.device), firsts.to(self.device)

    def class_log_weights(self, log_weights: Tensor, greedy: bool = False) -> Tensor:
        """log of the sum of exp(log_weights [R, V]) over each class, [R, C] float64; of the largest, if `greedy`."""
        if not len(self._tokens) or not len(log_weights):
            return log_weights.new_full((len(log_weights), self.num_classes), -math.inf, dtype=torch.float64)
        if _takes_kernels(log_weights):
            from cedd.constraints.product_law_triton import log_sums_of_rows

            (starts, of_class), pieces = self._pieces, torch.arange(len(self._pieces[0]) - 1, device=self.device)
            sums = log_sums_of_rows(log_weights, self._tokens, starts, greedy)
            return log_sums_of_rows(sums, pieces, of_class, greedy)
        rows = log_weights.index_select(1, self._tokens).to(torch.float64)
        largest = rows.amax(-1, keepdim=True).clamp_min(_LOWEST)
        if not greedy and bool((largest.squeeze(1) - rows.amin(-1) < _FAR).all()):
            return self._of_classes(rows.sub_(largest).exp_(), "sum").log() + largest
        own = self._of_classes(rows, "max")
        if greedy:
            return own
        own = own.clamp_min(_LOWEST)
        parts = (rows - own.repeat_interleave(self._counts, 1)).exp_()
        return self._of_classes(parts, "sum").log() + own

    def _of_classes(self, rows: Tensor, reduce: str) -> Tensor:
        """Sums or maxima of rows [R, tokens] over the classes, [R, C]."""
        lengths = self._counts.expand(len(rows), -1).contiguous()
        nothing = 0.0 if reduce == "sum" else -math.inf
        return torch.segment_reduce(rows, reduce, lengths=lengths, axis=1, unsafe=True, initial=nothing)

    def known_log_weights(self, tokens: Tensor) -> Tensor:
        """log P(c) of known tokens [R]: all on the class of each, [R, C]."""
        return self.given_log_weights(self.classes[tokens.to(self.device)])

    def given_log_weights(self, classes: Tensor) -> Tensor:
        """log P(c) where the class is known, [...]: all on this one, [..., C]."""
        found = torch.full((*classes.shape, self.num_classes), -math.inf, dtype=torch.float64, device=self.device)
        return found.scatter(-1, classes[..., None], 0.0)

    def tokens_of(
        self, logits: Tensor, rows: Tensor, classes: Tensor, u: Tensor, *, greedy: bool = False
    ) -> Tensor | None:
        """Tokens [C] drawn by a kernel from logits [R, V] at rows [C] within classes [C], by uniform numbers u [C];
        the likeliest, if `greedy`; 0 for a class of -1. None where there are no kernels."""
        if not _takes_kernels(logits):
            return None
        from cedd.constraints.product_law_triton import pick

        return pick(logits, rows, classes, u, self._tokens, self._class_starts, greedy)

    @cached_property
    def _class_starts(self) -> Tensor:
        """Where each class begins in `_tokens`, and the end, [C + 1]."""
        return torch.cat([self._counts.new_zeros(1), self._counts.cumsum(0)])

    @cached_property
    def log_accepting(self) -> Tensor:
        """log beta after the last position, [Q]."""
        return torch.where(self.accepting, 0.0, -math.inf).double()

    @cached_property
    def log_start(self) -> Tensor:
        """log alpha before the first position, [Q]."""
        return torch.where(torch.arange(self.num_states, device=self.device) == 0, 0.0, -math.inf).double()

    def at_tokens(self, values: Tensor) -> Tensor:
        """Values of classes [R, C] for each token, [R, V]."""
        return values.index_select(1, self.classes)


class ProductLaw(Protocol):
    """Independent tokens conditioned on a language, for B sequences."""

    @property
    def log_normalizer(self) -> Tensor:
        """log Z, [B]; -inf where no sequence is possible."""
        ...

    def draw(self, u: Tensor, chosen: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Classes of the tokens at some positions, [B, L], and what is left of the numbers by which they were drawn,
        uniform again, to draw the tokens within their classes by.

        Args:
            u: uniform numbers [B, L].
            chosen: which positions are drawn, [B, L] bool; by default all. Elsewhere the results have no meaning.
        """
        ...

    def log_factors(self, sequences: Tensor, positions: Tensor) -> Tensor:
        """log M_i(c) / Z at some positions [R] of sequences [R], [R, C]: log p_i(v) plus that of v's class is the
        log-probability of v there given the language."""
        ...

    def fix(self, sequences: Tensor, positions: Tensor, classes: Tensor) -> None:
        """Fix the classes [R] of the tokens at these positions [R] of sequences [R], one per sequence.
        `log_factors` is then valid for the positions after them."""
        ...


def product_law(language: TokenLanguage, log_weights: Tensor, *, greedy: bool = False) -> ProductLaw:
    """The product law given a language.

    Args:
        language: the language.
        log_weights: log P_i(c), [B, L, C] (see `TokenLanguage.class_log_weights` and `known_log_weights`).
        greedy: take maxima instead of sums, so that `draw` returns the most probable sequence.
    """
    if not greedy and language.device.type == "cpu":
        return ScaledLaw(language, log_weights)
    return LogLaw(language, log_weights, greedy=greedy)


def own_numbers(u: Numbers, chosen: NDArray[np.bool_]) -> Numbers:
    """A uniform number for each position, [B, L]: u where chosen, and elsewhere a hash of the number of the next chosen
    position and of the own position. After the last chosen position the numbers have no meaning."""
    length = u.shape[1]
    places = np.full(u.shape, length - 1)
    places[chosen] = np.nonzero(chosen)[1]
    following: NDArray[np.int64] = np.minimum.accumulate(places[:, ::-1], axis=1)[:, ::-1]
    words: NDArray[np.uint64] = (np.take_along_axis(u, following, 1) * 2.0**53).astype(np.uint64)
    words += np.arange(1, length + 1, dtype=np.uint64) * np.uint64(GAMMA)
    return np.where(chosen, u, (mix(words) >> np.uint64(11)) * 2.0**-53)


def draw_classes(
    language: TokenLanguage, weights: Tensor, rows: Tensor, known: Tensor, numbers: Tensor, chosen: Tensor, greedy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Classes of the tokens at some positions and what is left of the numbers, as `ProductLaw.draw` has it, both
    [B, L]; and log Z, [B]. Kernels read nothing on the host, so that a GPU can record it.

    Args:
        language: the language, on the device.
        weights: log P(c) of some positions, [R, C].
        rows: which of them each position has, [B, L].
        known: the class of the token that a position has instead, [B, L]; -1 for none.
        numbers: uniform numbers, [B, L].
        chosen: which positions are drawn, [B, L] bool.
        greedy: draw the most probable sequence.
    """
    if _takes_kernels(weights):
        from cedd.constraints.product_law_triton import backward, draw

        beta = backward(weights, rows, known, language.log_accepting, language.edges, greedy)
        classes, rest = draw(weights, rows, known, beta, numbers, chosen, language.edges, greedy)
        return classes, rest, beta[0, :, 0]
    given = language.given_log_weights(known.clamp_min(0))
    law = LogLaw(language, torch.where((known >= 0)[..., None], given, weights[rows]), greedy=greedy)
    classes, rest = law.draw(numbers, chosen)
    return classes, rest, law.log_normalizer


class LogLaw:
    """The law, computed with the logarithm of each state.

    Args:
        language: the language.
        log_weights: log P_i(c), [B, L, C].
        greedy: take maxima instead of sums.
    """

    def __init__(self, language: TokenLanguage, log_weights: Tensor, *, greedy: bool = False) -> None:
        self._language, self._greedy = language, greedy
        self._batch, self._length, _ = log_weights.shape
        self._log_weights = log_weights.transpose(0, 1).clone(memory_format=torch.contiguous_format)

    @cached_property
    def _log_beta(self) -> Tensor:
        """[L + 1, B, Q]."""
        groups = self._language.by_source
        last = self._language.log_accepting
        if _takes_kernels(last):
            from cedd.constraints.product_law_triton import backward

            return backward(*self._places, last, self._language.edges, self._greedy)
        found = [last.expand(self._batch, -1)]
        for i in reversed(range(self._length)):
            terms = self._log_weights[i].index_select(1, groups.label) + found[-1].index_select(1, groups.target)
            found.append(groups.log_sums(terms, self._greedy))
        return torch.stack(found[::-1])

    @property
    def _places(self) -> tuple[Tensor, Tensor, Tensor]:
        """The weights [L * B, C], the row of each position's weights [B, L], and that no position has a known token."""
        count = torch.arange(self._length * self._batch, device=self._log_weights.device)
        rows = count.view(self._length, self._batch).T
        return self._log_weights.flatten(0, 1), rows, torch.full_like(rows, -1)

    def _start(self) -> Tensor:
        """log alpha_0, [B, Q]."""
        return self._language.log_start.expand(self._batch, -1)

    @cached_property
    def _log_alpha(self) -> Tensor:
        """[L, B, Q]."""
        groups = self._language.by_target
        if _takes_kernels(self._log_weights):
            from cedd.constraints.product_law_triton import forward

            parts = groups.label, groups.source, groups.starts
            return forward(self._log_weights, self._start(), *parts, self._greedy)
        found = [self._start()]
        for i in range(self._length - 1):
            terms = self._log_weights[i].index_select(1, groups.label) + found[-1].index_select(1, groups.source)
            found.append(groups.log_sums(terms, self._greedy))
        return torch.stack(found)

    @property
    def log_normalizer(self) -> Tensor:
        """See `ProductLaw`."""
        return self._log_beta[0, :, 0]

    def draw(self, u: Tensor, chosen: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See `ProductLaw`."""
        where = torch.ones(u.shape, dtype=torch.bool, device=u.device) if chosen is None else chosen
        if _takes_kernels(self._log_weights):
            from cedd.constraints.product_law_triton import draw

            numbers, edges = (u.double(), where.to(u.device)), self._language.edges
            return draw(*self._places, self._log_beta, *numbers, edges, self._greedy)
        groups, leaving = self._language.by_source, self._language.leaving
        numbers = torch.as_tensor(own_numbers(u.cpu().double().numpy(), where.cpu().numpy()), device=u.device)
        state = torch.zeros(self._batch, dtype=torch.int64, device=u.device)
        classes, rest = list[Tensor](), list[Tensor]()
        for i in range(self._length):
            edges = leaving[state]
            label, target = groups.label[edges], groups.target[edges]
            weights = self._log_weights[i].gather(1, label) + self._log_beta[i + 1].gather(1, target)
            weights = weights.masked_fill_(edges < 0, -math.inf)
            if self._greedy:
                place, remainder = weights.argmax(1), numbers[:, i]
            else:
                unit = weights.amax(1, keepdim=True).clamp_min(_LOWEST)
                place, remainder = _inverse((weights - unit).exp_().cumsum(1), numbers[:, i])
            state, drawn = (part.gather(1, place[:, None]).squeeze(1) for part in (target, label))
            classes.append(drawn)
            rest.append(remainder)
        return torch.stack(classes, 1), torch.stack(rest, 1)

    def log_factors(self, sequences: Tensor, positions: Tensor) -> Tensor:
        """See `ProductLaw`."""
        groups = self._language.by_label
        alpha, beta = self._log_alpha[positions, sequences], self._log_beta[positions + 1, sequences]
        found = groups.log_sums(alpha.index_select(1, groups.source) + beta.index_select(1, groups.target))
        return found - (found + self._log_weights[positions, sequences]).logsumexp(1, keepdim=True)

    def fix(self, sequences: Tensor, positions: Tensor, classes: Tensor) -> None:
        """See `ProductLaw`."""
        del self._log_alpha  # beta after these positions stays
        self._log_weights[positions, sequences] = -math.inf
        self._log_weights[positions, sequences, classes] = 0.0


def _takes_kernels(tensor: Tensor) -> bool:
    """Whether kernels compute a law on the tensor's device."""
    return tensor.is_cuda and has_triton()


def _inverse(sums: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """The index drawn from cumulated weights [B, E] by numbers u [B], and how far into it each lies, in [0, 1)."""
    total = sums[:, -1]
    goal = torch.minimum(u * total, torch.nextafter(total, torch.zeros_like(total)))
    place = torch.searchsorted(sums, goal[:, None], right=True).clamp_max(sums.shape[1] - 1)
    before = torch.where(place > 0, sums.gather(1, (place - 1).clamp_min(0)), 0.0)
    share = (goal[:, None] - before) / (sums.gather(1, place) - before).clamp_min(_TINY)
    return place.squeeze(1), share.squeeze(1).clamp(0.0, 1 - 2.0**-53)


class ScaledLaw:
    """The law in float64 on the host, at each position in units of the largest number.

    Args:
        language: the language.
        log_weights: log P_i(c), [B, L, C].
    """

    def __init__(self, language: TokenLanguage, log_weights: Tensor) -> None:
        self._language, self._log_weights = language, log_weights
        logs = np.asarray(log_weights, dtype=np.float64)
        self._unit = np.maximum(logs.max(-1), _LOWEST)
        """The log of the largest weight at each position, [B, L]."""
        self._weights = np.exp(logs - self._unit[..., None])
        batch, length, _ = logs.shape
        self._beta = np.zeros((batch, length + 1, language.num_states))
        self._valid = np.full(batch, -1)
        """The last position of each sequence whose alpha is computed."""
        self._least = math.inf
        self._log_normalizer = np.array([self._backward(b) + self._unit[b].sum() for b in range(batch)])

    def _backward(self, b: int) -> float:
        """log Z, in units of the weights."""
        groups, weights, beta = self._language.by_source.on_host, self._weights[b], self._beta[b]
        beta[-1] = self._language.automaton.accepting
        units = 0.0
        for i in reversed(range(len(weights))):
            units += self._into(beta[i], groups.sums(weights[i].take(groups.label) * beta[i + 1].take(groups.target)))
        self._least = min(self._least, beta[0, 0])
        return units + (math.log(beta[0, 0]) if beta[0, 0] > 0 else -math.inf)

    @cached_property
    def _logs(self) -> LogLaw:
        """The law for numbers that float64 cannot hold."""
        return LogLaw(self._language, self._log_weights)

    @cached_property
    def _alpha(self) -> Numbers:
        """[B, L + 1, Q]"""
        self._valid[:] = 0
        alpha = np.zeros_like(self._beta)
        alpha[:, 0, 0] = 1.0
        return alpha

    def _forward(self, b: int, start: int, stop: int) -> None:
        """alpha after positions start..stop-1."""
        groups, weights, alpha = self._language.by_target.on_host, self._weights[b], self._alpha[b]
        for i in range(start, stop):
            self._into(alpha[i + 1], groups.sums(weights[i].take(groups.label) * alpha[i].take(groups.source)))

    def _into(self, row: Numbers, values: Numbers) -> float:
        """Put values [Q] in units of the largest into a row; the log of that unit."""
        unit = float(values.max())
        self._least = min(self._least, unit)
        if unit < _LEAST:
            return -math.inf
        np.divide(values, unit, out=row)
        return math.log(unit)

    @cached_property
    def has_beta(self) -> bool:
        """Whether beta has not lost precision (see the top of the module)."""
        return self._least > _LEAST

    @cached_property
    def has_marginals(self) -> bool:
        """Whether the marginals have not either."""
        if not self.has_beta:
            return False
        for b in range(len(self._beta)):
            self._forward(b, 0, self._weights.shape[1])
        self._valid[:] = self._weights.shape[1]
        return self._least > _LEAST and bool(((self._alpha * self._beta).sum(-1) > _LEAST).all())

    @property
    def log_normalizer(self) -> Tensor:
        """See `ProductLaw`."""
        return torch.as_tensor(self._log_normalizer) if self.has_beta else self._logs.log_normalizer

    def draw(self, u: Tensor, chosen: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See `ProductLaw`."""
        where = np.ones(u.shape, dtype=np.bool_) if chosen is None else chosen.numpy()
        numbers = own_numbers(u.to("cpu", torch.float64).numpy(), where)
        classes, rest = np.zeros(u.shape, dtype=np.int64), np.zeros(u.shape)
        for b in range(len(numbers)):
            drawn = np.flatnonzero(where[b])
            length = int(drawn[-1]) + 1 if len(drawn) else 0
            if not (self.has_beta and self._walk(b, length, numbers[b], classes[b], rest[b])):
                return self._logs.draw(u, chosen)
        return torch.as_tensor(classes), torch.as_tensor(rest)

    def _walk(self, b: int, length: int, u: Numbers, classes: NDArray[np.int64], rest: Numbers) -> bool:
        """Draw the classes of the first positions; whether the precision sufficed."""
        leaving, state = self._language.by_source.on_host, 0
        for i in range(length):
            edges = slice(leaving.starts[state], leaving.starts[state + 1])
            labels, target = leaving.label[edges], leaving.target[edges]
            sums: Numbers = np.cumsum(self._weights[b, i].take(labels) * self._beta[b, i + 1].take(target))
            if sums[-1] <= _LEAST:
                return False
            place, rest[i] = _host_inverse(sums, float(u[i]))
            classes[i], state = labels[place], target[place]
        return True

    def log_factors(self, sequences: Tensor, positions: Tensor) -> Tensor:
        """See `ProductLaw`."""
        if not self.has_marginals:
            return self._logs.log_factors(sequences, positions)
        groups = self._language.by_label.on_host
        b, i = sequences.numpy(), positions.numpy()
        for row, position in zip(b.tolist(), i.tolist(), strict=True):
            if self._valid[row] < position:
                self._forward(row, int(self._valid[row]), position)
                self._valid[row] = position
        alpha, beta, weights = self._alpha[b, i], self._beta[b, i + 1], self._weights[b, i]
        found = groups.sums(alpha.take(groups.source, -1) * beta.take(groups.target, -1))
        total = (found * weights).sum(-1)
        with np.errstate(divide="ignore"):
            logs = np.log(found) - (np.log(total) + self._unit[b, i])[:, None]
        return torch.as_tensor(logs)

    def fix(self, sequences: Tensor, positions: Tensor, classes: Tensor) -> None:
        """See `ProductLaw`."""
        if not self.has_marginals:
            self._logs.fix(sequences, positions, classes)
            return
        b, i = sequences.numpy(), positions.numpy()
        self._weights[b, i], self._unit[b, i] = 0.0, 0.0
        self._weights[b, i, classes.numpy()] = 1.0
        self._valid[b] = i


def _host_inverse(sums: Numbers, u: float) -> tuple[int, float]:
    """`_inverse` of one row."""
    total = float(sums[-1])
    goal = min(u * total, math.nextafter(total, 0.0))
    place = min(int(np.searchsorted(sums, goal, side="right")), len(sums) - 1)
    before = float(sums[place - 1]) if place else 0.0
    share = (goal - before) / max(float(sums[place]) - before, _TINY)
    return place, min(max(share, 0.0), 1 - 2.0**-53)
