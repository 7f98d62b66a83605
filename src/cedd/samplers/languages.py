"""Constraints that are languages: spans of positions whose text is in a regular language.

Shapes: B batch, L positions, V vocabulary; M masks, of which C are drawn; S sequences, n positions of a span.

At each network call the tokens of a span are drawn from the product law given the language (`cedd.constraints`): the
product of the network's distributions p_i at the masks and of the known tokens, conditioned on the span being in the
language. The sampler gets exact draws from the marginal of this law at the positions that it reveals, so every finished
sequence is in the language. The distribution after many calls is called *tilted*. It is not p(x | language), because
each call uses its own p_i only; `cedd.samplers.particles` corrects it.

Temperature and excluded tokens change p_i. With temperature 0 the most probable sequence of the product law is taken.
top_p truncates the law given the language, position by position from left to right, so that a valid continuation always
remains. For autoregressive models p_i is restricted to tokens after which the language can still be completed in the
remaining positions, as is usual; this is not the law given the language.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

from cedd.constraints.product_law import ProductLaw, TokenLanguage, draw_classes, product_law
from cedd.constraints.token_automaton import before_end
from cedd.samplers.choice import Sharpening, inverse_cdf
from cedd.samplers.constraints import Draw, JointConstraint, WholeDraw


@dataclass(frozen=True)
class Span:
    """Positions start..stop-1, whose tokens are in a language.

    Args:
        start: the first position.
        stop: the position after the last.
        language: the language of the tokens.
        ends: tokens that end a text; they may be drawn even if they are excluded.
        name: the name of the language in messages.
    """

    start: int
    stop: int
    language: TokenLanguage
    ends: tuple[int, ...] = ()
    name: str = "the constraint"

    def __len__(self) -> int:
        return self.stop - self.start

    def moved(self, by: int) -> Span:
        """The same span of a text that begins `by` positions later."""
        return replace(self, start=self.start - by, stop=self.stop - by)

    def check(self) -> None:
        """Raise a ValueError if the language has no text of this number of tokens."""
        lengths = self.language.automaton.lengths(len(self))
        if not lengths or lengths[-1] != len(self):
            raise ValueError(_unsatisfied(self, lengths))


def _tokens(count: int) -> str:
    return f"{count} token" if count == 1 else f"{count} tokens"


def _unsatisfied(span: Span, lengths: list[int]) -> str:
    """The error for a span whose language has texts of other lengths, of which these are shorter."""
    most = 8 * len(span) + 64
    near = [*lengths[-1:], *[count for count in span.language.automaton.lengths(most) if count > len(span)][:1]]
    if not near:
        return (
            f"no text of up to {most} tokens satisfies {span.name}: its texts are longer, or the tokenizer lacks some "
            "of their characters"
        )
    nearest = f"lengths are {near[0]} and {near[1]} tokens" if len(near) > 1 else f"length is {_tokens(near[0])}"
    return f"no text of {_tokens(len(span))} satisfies {span.name}; the nearest {nearest}"


@dataclass(frozen=True)
class LanguageConstraint(JointConstraint):
    """Fixed tokens, and spans whose tokens are in a language. Spans do not overlap."""

    spans: tuple[Span, ...] = ()

    @staticmethod
    def of(length: int, spans: Iterable[Span]) -> LanguageConstraint:
        """Spans of sequences of L tokens, of which nothing else is known."""
        return LanguageConstraint(
            torch.zeros(length, dtype=torch.int64), torch.zeros(length, dtype=torch.bool), None, tuple(spans)
        )

    def check(self, shape: tuple[int, int], vocab_size: int) -> None:
        """Refuse languages of which there is no text, given what is fixed."""
        super().check(shape, vocab_size)
        for span in sorted(self.spans, key=lambda span: span.start):
            if not 0 <= span.start <= span.stop <= shape[1]:
                raise ValueError(f"the span {span.start}..{span.stop} of {span.name} is not within {shape[1]} tokens")
            if span.language.vocab_size != vocab_size:
                raise ValueError(f"{span.name} is compiled for {span.language.vocab_size} tokens, not {vocab_size}")
            span.check()
            if bool(self.where[..., span.start : span.stop].any()):
                self._check_fixed(span, shape)

    def _check_fixed(self, span: Span, shape: tuple[int, int]) -> None:
        language, mask = span.language, span.language.vocab_size
        part = self(torch.full(shape, mask))[:, span.start : span.stop]
        masked = part == mask
        weights = language.known_log_weights(part.masked_fill(masked, 0).flatten()).view(*part.shape, -1)
        law = product_law(language, weights.masked_fill(masked[..., None], 0.0))
        if not bool(torch.isfinite(law.log_normalizer).all()):
            raise ValueError(f"no text of {_tokens(len(span))} with the tokens that are fixed satisfies {span.name}")

    def up_to(self, stop: int) -> LanguageConstraint:
        """The constraint of the first `stop` tokens: that the rest can be written after them."""
        spans = [
            span
            if span.stop <= stop
            else replace(span, stop=stop, language=_beginnings(span.language, span.stop - stop))
            for span in self.spans
            if span.start < stop
        ]
        return LanguageConstraint.of(stop, spans)

    # Drawing

    def draw(
        self, x: Tensor, rows: Tensor, outputs: Tensor, sharpening: Sharpening, chosen: Tensor, v: Tensor
    ) -> Tensor:
        """See `JointConstraint`."""
        return self.prepared(x, rows, sharpening, chosen)(outputs, v)

    def prepared(self, x: Tensor, rows: Tensor, sharpening: Sharpening, chosen: Tensor) -> Draw:
        """See `JointConstraint`."""
        free, parts = torch.ones_like(chosen, dtype=torch.bool), list[tuple[Tensor | slice, SpanPlaces]]()
        position = rows[chosen] % x.shape[1]
        for span in self.spans:
            inside = (position >= span.start) & (position < span.stop)
            count = int(inside.sum())
            if count == len(chosen):
                places = SpanPlaces(span, x, rows, chosen)
                return lambda outputs, v: SpanLaws(places, outputs, sharpening).draw(v)
            if count:
                parts.append((inside.nonzero().squeeze(1), SpanPlaces(span, x, rows, chosen[inside])))
                free &= ~inside
        rest = free.nonzero().squeeze(1)

        def draw(outputs: Tensor, v: Tensor) -> Tensor:
            tokens = torch.zeros(len(chosen), dtype=torch.int64, device=outputs.device)
            for here, places in parts:
                tokens[here] = SpanLaws(places, outputs, sharpening).draw(v[here])
            if len(rest):
                tokens[rest] = sharpening.draw(outputs[chosen[rest]], v[rest])
            return tokens

        return draw

    def whole_draw(self, sharpening: Sharpening, device: torch.device) -> WholeDraw | None:
        """See `JointConstraint`: if there is a single span that has all masks."""
        if len(self.spans) != 1 or (sharpening.temperature > 0 and sharpening.top_p < 1):
            return None
        (span,) = self.spans
        is_whole = self.where[..., : span.start].all() & self.where[..., span.stop :].all()
        return SpanDraw.of(span, sharpening, device) if is_whole else None

    def log_marginals(self, x: Tensor, rows: Tensor, outputs: Tensor, sharpening: Sharpening) -> Tensor:
        """See `JointConstraint`."""
        found, position = sharpening.log_probs(outputs), rows % x.shape[1]
        for span in self.spans:
            inside = ((position >= span.start) & (position < span.stop)).nonzero().squeeze(1)
            if len(inside):
                laws = SpanLaws(SpanPlaces(span, x, rows, inside), outputs, replace(sharpening, top_p=1.0))
                found[inside] = laws.log_marginals()
        return found

    def log_normalizers(self, x: Tensor, rows: Tensor, outputs: Tensor, sharpening: Sharpening) -> Tensor:
        """log Z of the product laws of all sequences, [B] float64: the log-probability that tokens drawn independently
        at all masks `rows` [M] are in the languages of all spans."""
        found = torch.zeros(len(x), dtype=torch.float64, device=x.device)
        rows = rows.cpu()
        position = rows % x.shape[1]
        for span in self.spans:
            inside = ((position >= span.start) & (position < span.stop)).nonzero().squeeze(1)
            if len(inside):
                laws = SpanLaws(SpanPlaces(span, x, rows, inside), outputs, sharpening)
                found.index_add_(0, laws.places.sequences, laws.log_normalizers().to(found))
        return found


@dataclass(frozen=True)
class SpanDraw:
    """The draws of a span by operations on tensors alone (a `WholeDraw`)."""

    language: TokenLanguage
    start: int
    stop: int
    excluded: tuple[int, ...]
    is_greedy: bool
    has_temperature: bool
    constants: tuple[Tensor, ...] = field(compare=False)
    name: str = field(compare=False)

    @staticmethod
    def of(span: Span, sharpening: Sharpening, device: torch.device) -> SpanDraw:
        """The draws of a span on a device."""
        excluded = tuple(token for token in sharpening.excluded if token not in span.ends)
        language, temperature = span.language.on(device), float(sharpening.temperature)
        constants = () if temperature in (0, 1) else (torch.full((1,), temperature, device=device),)
        kind = temperature == 0, bool(constants)
        return SpanDraw(language, span.start, span.stop, excluded, *kind, constants, span.name)

    def __call__(self, outputs: Tensor, x: Tensor, numbers: Tensor, *constants: Tensor) -> tuple[Tensor, Tensor]:
        own, language, is_greedy = slice(self.start, self.stop), self.language, self.is_greedy
        logits = Sharpening(excluded=self.excluded).without(outputs, -math.inf)
        for temperature in constants:
            logits = logits / temperature
        here, numbers = x[:, own], numbers[:, own]
        masked, chosen = here == language.vocab_size, numbers >= 0
        rows = (masked.flatten().cumsum(0) - 1).clamp(0, len(outputs) - 1).view(here.shape)
        known = torch.where(masked, -1, language.classes[here.clamp_max(language.vocab_size - 1)])
        weights = language.class_log_weights(logits, is_greedy)
        classes, rest, log_normalizer = draw_classes(language, weights, rows, known, numbers, chosen, is_greedy)
        labels, at = classes.masked_fill(~chosen, -1).flatten(), rows.flatten()
        tokens = language.tokens_of(logits, at, labels, rest.flatten(), greedy=is_greedy)
        if tokens is None:
            inside = logits[at].masked_fill(language.classes != labels[:, None], -math.inf)
            tokens = inside.argmax(-1) if is_greedy else inverse_cdf(inside, rest.flatten(), log=True)
        drawn = x.clone()
        drawn[:, own] = torch.where(chosen, tokens.view(here.shape), here)
        return drawn, log_normalizer.sum()

    def error(self) -> ValueError:
        """See `WholeDraw`."""
        return impossible(self.name)


def impossible(name: str) -> ValueError:
    """The error for a language without a possible text."""
    return ValueError(
        f"every text that satisfies {name} has probability 0: its tokens are excluded, or the network gives them "
        "probability zero"
    )


@lru_cache(maxsize=64)
def _beginnings(language: TokenLanguage, following: int) -> TokenLanguage:
    return TokenLanguage(before_end(language.automaton, following))


@dataclass(frozen=True)
class BlockLanguages(JointConstraint):
    """The languages of texts of which one block is drawn: the fixed tokens are those of the block.

    The law of a block is the product of the network's laws of its masks, given that the text before it and the block
    can be continued to a text of the language. What follows has no influence beyond that.
    """

    before: Tensor | None = None
    """The text before the block, [B, P]."""
    languages: LanguageConstraint | None = None
    """Of the first P + b tokens of a text."""

    def part(self, start: int, stop: int) -> BlockLanguages:
        """See `Fixed.part`."""
        assert self.before is not None
        return replace(super().part(start, stop), before=self.before[start:stop])

    def _whole(self, x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The same states and positions in texts."""
        assert self.before is not None
        past, block = self.before.shape[1], x.shape[1]
        return torch.cat([self.before.to(x), x], 1), rows // block * (past + block) + past + rows % block

    def draw(
        self, x: Tensor, rows: Tensor, outputs: Tensor, sharpening: Sharpening, chosen: Tensor, v: Tensor
    ) -> Tensor:
        """See `JointConstraint`."""
        assert self.languages is not None
        return self.languages.draw(*self._whole(x, rows), outputs, sharpening, chosen, v)

    def log_marginals(self, x: Tensor, rows: Tensor, outputs: Tensor, sharpening: Sharpening) -> Tensor:
        """See `JointConstraint`."""
        assert self.languages is not None
        return self.languages.log_marginals(*self._whole(x, rows), outputs, sharpening)

    @property
    def spans(self) -> tuple[Span, ...]:
        """Those that begin in these tokens."""
        return () if self.languages is None else self.languages.spans

    def log_normalizers(self, x: Tensor, rows: Tensor, outputs: Tensor, sharpening: Sharpening) -> Tensor:
        """See `LanguageConstraint`: the log-probability that the text can be continued to one in the languages."""
        assert self.languages is not None
        return self.languages.log_normalizers(*self._whole(x, rows), outputs, sharpening)


class SpanPlaces:
    """Where the masks of one span are, for the sequences that have some of the chosen masks: what of `SpanLaws` does
    not depend on the network's outputs. It is found on the host and sent at once, without waiting for a GPU.

    Args:
        span: the span.
        x: the states [B, L].
        rows: all masks of some sequences, flat positions [M]; of a causal network the next positions only.
        chosen: masks within the span, as indices [C] into rows; both on the host.
    """

    def __init__(self, span: Span, x: Tensor, rows: Tensor, chosen: Tensor) -> None:
        self.span, self.language = span, span.language.on(x.device)
        vocab_size = self.language.vocab_size
        sequence, position = np.divmod(rows.numpy(), x.shape[1])
        has_chosen = np.zeros(len(x), dtype=np.bool_)
        has_chosen[sequence[chosen.numpy()]] = True
        sequences, rank = np.flatnonzero(has_chosen), np.cumsum(has_chosen) - 1
        masks = np.flatnonzero((position >= span.start) & (position < span.stop) & has_chosen[sequence])
        own = np.searchsorted(masks, chosen.numpy())
        at = rank[sequence[masks]] * len(span) + position[masks] - span.start
        parts = sequences, masks, own, at, at[own]
        together = torch.as_tensor(np.concatenate(parts)).to(x.device, non_blocking=True)
        self.sequences, some, self.own, self.at, self.place = torch.split(together, [*map(len, parts)])
        """Sequences [S]; of each chosen mask among all masks of these spans, its number; where these masks are in the
        flattened spans [S * n], and where the chosen ones are."""
        self.masks = slice(None) if len(masks) == len(rows) else some
        """The masks of these spans, as indices [m] into rows."""
        self.size = len(sequences), len(span)
        known = x[:, span.start : span.stop].index_select(0, self.sequences).flatten()
        unknown = known == vocab_size
        # The rows are all masks or one per sequence, so only in the latter case the states are looked at.
        self.is_partial = len(masks) == len(sequences) and int(unknown.sum()) > len(masks)
        """Whether nothing is known of some positions, as with a causal network of those that follow."""
        weights = self.language.known_log_weights(known.clamp_max(vocab_size - 1))
        self.weights = weights.masked_fill(unknown[:, None], 0.0)
        """log P(c) at each position [S * n, C]; 0 at those that are not known."""


class SpanLaws:
    """The product laws of one span.

    Args:
        places: the span's masks.
        outputs: the network's, at the rows of the places, [M, V] float64.
        sharpening: temperature, top_p and excluded tokens.
    """

    def __init__(self, places: SpanPlaces, outputs: Tensor, sharpening: Sharpening) -> None:
        self.places, self._language = places, places.language
        self._own, self._at, self._size = places.own, places.at, places.size
        excluded = tuple(token for token in sharpening.excluded if token not in places.span.ends)
        self._sharpening = replace(sharpening, excluded=excluded)
        logits = self._sharpening.without(outputs[places.masks], -math.inf)
        self._logits = logits if sharpening.temperature in (0, 1) else logits / sharpening.temperature
        """log p_i of the masks up to a number for each, [m, V], without top_p; where the likeliest is taken, the
        network's own."""
        self._weights = places.weights
        """log P(c) at each position, [S * n, C]."""
        if not places.is_partial:
            self._weights = self._weights.index_copy(
                0, self._at, self._language.class_log_weights(self._logits, self._is_greedy)
            )

    @property
    def _is_greedy(self) -> bool:
        return self._sharpening.temperature == 0

    def log_normalizers(self) -> Tensor:
        """log of the probability that tokens drawn at the masks are in the language, [S]; -inf if none are."""
        totals = torch.zeros(self._size, dtype=torch.float64, device=self._logits.device)
        totals.view(-1)[self._at] = self._logits.double().logsumexp(-1)
        found = self._unchecked_law.log_normalizer
        return torch.where(torch.isneginf(found), found, found - totals.sum(1))

    @cached_property
    def law(self) -> ProductLaw:
        """The laws."""
        if self._weights.device.type == "cpu":
            self._check(self._unchecked_law)
        return self._unchecked_law

    @cached_property
    def _unchecked_law(self) -> ProductLaw:
        """The laws, of which some may have no possible text."""
        return product_law(self._language, self._weights.view(*self._size, -1), greedy=self._is_greedy)

    def _check(self, law: ProductLaw) -> None:
        """Refuse a language without a possible text. On a GPU this is done last, since it waits for the device."""
        if not bool(torch.isfinite(law.log_normalizer).all()):
            raise impossible(self.places.span.name)

    def _checked(self, found: Tensor) -> Tensor:
        """What was computed with the laws, which are checked if they have not been."""
        if self._weights.device.type != "cpu":
            self._check(self.law)
        return found

    def _tilted(self, own: Tensor) -> Tensor:
        """log of the law given the language at some masks [C], [C, V]."""
        at = self._at[own]
        factors = self.law.log_factors(at // self._size[1], at % self._size[1])
        return self._language.at_tokens(factors) + self._logits[own]

    def log_marginals(self) -> Tensor:
        """log of the law given the language at the chosen masks, [C, V]."""
        return self._checked(self._tilted(self._own))

    def draw(self, v: Tensor) -> Tensor:
        """Tokens [C] at the chosen masks, by uniform numbers v [C]."""
        if self.places.is_partial:
            return self._checked(self._draw_next(v))
        in_turn = self._sharpening.top_p < 1 and not self._is_greedy
        return self._checked(self._draw_in_turn(v) if in_turn else self._draw_together(v))

    def _draw_together(self, v: Tensor) -> Tensor:
        place = self.places.place
        numbers = torch.zeros(self._size, dtype=torch.float64, device=v.device)
        where = torch.zeros(self._size, dtype=torch.bool, device=v.device)
        numbers.view(-1).index_copy_(0, place, v.double())
        where.view(-1).index_fill_(0, place, True)
        classes, rest = (part.view(-1).index_select(0, place) for part in self.law.draw(numbers, where))
        tokens = self._language.tokens_of(self._logits, self._own, classes, rest, greedy=self._is_greedy)
        if tokens is None:
            inside = self._logits.index_select(0, self._own)
            inside = inside.masked_fill(self._language.classes != classes[:, None], -math.inf)
            tokens = inside.argmax(-1) if self._is_greedy else inverse_cdf(inside, rest, log=True)
        return tokens

    def _draw_in_turn(self, v: Tensor) -> Tensor:
        """The same where top_p cuts the law of each position, given those that were drawn before it."""
        tokens = torch.zeros_like(self._own)
        order = torch.argsort(self._at[self._own])
        sequence = self._at[self._own][order] // self._size[1]
        first = torch.searchsorted(sequence, sequence)
        turn = torch.arange(len(order), device=order.device) - first
        cut = Sharpening(1.0, self._sharpening.top_p)
        for k in range(int(turn.max()) + 1):
            now = order[turn == k]
            tokens[now] = cut.draw(self._tilted(self._own[now]), v[now])
            at, classes = self._at[self._own[now]], self._language.classes[tokens[now]]
            self.law.fix(at // self._size[1], at % self._size[1], classes)
        return tokens

    def _draw_next(self, v: Tensor) -> Tensor:
        """The same where only the tokens are known after which the language can still be reached."""
        at = self._at[self._own]
        factors = self.law.log_factors(at // self._size[1], at % self._size[1])
        possible = self._language.at_tokens(torch.isfinite(factors))
        logits = self._logits[self._own].double().masked_fill(~possible, -math.inf)
        return Sharpening(0.0 if self._is_greedy else 1.0, self._sharpening.top_p).draw(logits, v)
