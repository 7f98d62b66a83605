"""Triton kernels for the product law given a language (`product_law.py` has the equations).

Shapes: B sequences, L positions, V vocabulary, Q states, C classes of tokens, E transitions; R rows, G groups.

A recursion over L positions is a few operations on Q numbers per position, each far shorter than the launch of a
kernel. One program therefore takes a whole sequence, all positions, and B programs run side by side. Logarithms are in
float64. Imported only where there is a CUDA device.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

from cedd import splitmix
from cedd.constraints.edges import Edges

WARPS = 4
PIECE = 32
"""Tokens of a class that are summed at once."""
MARKS = 1024
"""Positions that are searched at once for those that are drawn."""
LOWEST = tl.constexpr(-1e300)
"""In the place of -inf, where it is subtracted."""
LARGEST_SHARE = tl.constexpr(1 - 2.0**-53)
GAMMA = tl.constexpr(splitmix.GAMMA)
FIRST_FACTOR = tl.constexpr(0xBF58476D1CE4E5B9)
SECOND_FACTOR = tl.constexpr(0x94D049BB133111EB)
"""Of SplitMix64."""
SMALL = ((32, 0, 1), (32, 16, 64), (512, 64, 64), (512, 32, 128))
"""Shapes of automata that are kept in registers: the most states with few transitions, the most with many, and the
most transitions of these. There are few, since a kernel is compiled for each."""
FEW = 64
"""Groups up to which a tile has 32 of them."""


def tile_of(groups: int) -> tuple[int, int]:
    """How many groups, and terms of each, a program adds up at once. There are few tiles, since each is compiled."""
    return (32, 32) if groups <= FEW else (256, 4)


def small_shape(edges: Edges, states: int) -> tuple[int, int, int] | None:
    """The first of `SMALL` that an automaton fits; None if it fits none."""
    few, many, most = states - edges.many, edges.many, edges.most if edges.many else 0
    return next((shape for shape in SMALL if few <= shape[0] and many <= shape[1] and most <= shape[2]), None)


@triton.jit
def _terms(values, places, inside):
    """Values in float64 at some places; -inf outside."""
    return tl.load(values + places, mask=inside, other=float("-inf")).to(tl.float64)


@triton.jit
def _put_log_sums(
    to, first, first_places, only, second, second_places, starts, start, groups, JOINT: tl.constexpr,
    SINGLE: tl.constexpr, GREEDY: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """to[g] = log of the sum (GREEDY: the largest) of exp(first[first_places] + second[second_places]) over group g,
    from group `start` on. If `only` is at least 0, `first` is 0 there and -inf elsewhere.

    SINGLE: take exponentials in float32, for terms that have no more digits; in float64 they cost more than reading
    the terms."""
    group = start + tl.arange(0, TILE)
    exists = group < groups
    begin = tl.load(starts + group, mask=exists, other=0)
    end = tl.load(starts + group + 1, mask=exists, other=0)
    longest = tl.max(end - begin, 0).to(tl.int32)
    largest = tl.full([TILE], float("-inf"), tl.float64)
    total = tl.zeros([TILE], tl.float64)
    for depth in range(0, longest, DEPTH):
        place = (begin + depth)[:, None] + tl.arange(0, DEPTH)[None, :]
        inside = place < end[:, None]
        where = tl.load(first_places + place, mask=inside, other=0)
        fixed = tl.where(inside & (where == only), 0.0, float("-inf")).to(tl.float64)
        terms = tl.where(only < 0, _terms(first, where, inside), fixed)
        if JOINT:
            terms += _terms(second, tl.load(second_places + place, mask=inside, other=0), inside)
        higher = tl.maximum(largest, tl.max(terms, 1))
        if not GREEDY:
            unit = tl.maximum(higher, LOWEST)
            total *= tl.exp(tl.maximum(largest, LOWEST) - unit)
            below = terms - unit[:, None]
            total += tl.sum(tl.exp(below.to(tl.float32)).to(tl.float64) if SINGLE else tl.exp(below), 1)
        largest = higher
    found = largest if GREEDY else tl.log(total) + tl.maximum(largest, LOWEST)
    tl.store(to + group, found, mask=exists)


@triton.jit(do_not_specialize=["columns", "groups"])
def _row_sums_kernel(
    sums, values, places, starts, columns, groups, SINGLE: tl.constexpr, GREEDY: tl.constexpr, TILE: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    values += row * columns
    _put_log_sums(
        sums + row * groups, values, places, -1, values, places, starts, tl.program_id(1) * TILE, groups, False,
        SINGLE, GREEDY, TILE, DEPTH,
    )  # fmt: skip


@triton.jit
def _own_terms(own, only, label, inside):
    """log weights of classes, -inf outside: own[label], or, if `only` is at least 0, 0 for this class and -inf for
    others."""
    given = tl.where(inside & (label == only), 0.0, float("-inf")).to(tl.float64)
    return tl.where(only < 0, _terms(own, label, inside & (only < 0)), given)


@triton.jit
def _put_beta(
    to, own, only, after, labels, targets, starts, order, start, states, GREEDY: tl.constexpr, TILE: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """beta at a position for the states order[start..start + TILE], with the weights of `_own_terms`."""
    place = start + tl.arange(0, TILE)
    exists = place < states
    begin = tl.load(starts + place, mask=exists, other=0)
    end = tl.load(starts + place + 1, mask=exists, other=0)
    to += tl.load(order + place, mask=exists, other=0)
    longest = tl.max(end - begin, 0)
    largest = tl.full([TILE], float("-inf"), tl.float64)
    total = tl.zeros([TILE], tl.float64)
    for depth in range(0, longest, DEPTH):
        edge = (begin + depth)[:, None] + tl.arange(0, DEPTH)[None, :]
        inside = edge < end[:, None]
        label = tl.load(labels + edge, mask=inside, other=0)
        target = tl.load(targets + edge, mask=inside, other=0)
        terms = _own_terms(own, only, label, inside) + _terms(after, target, inside)
        higher = tl.maximum(largest, tl.max(terms, 1))
        if not GREEDY:
            unit = tl.maximum(higher, LOWEST)
            total *= tl.exp(tl.maximum(largest, LOWEST) - unit)
            total += tl.sum(tl.exp(terms - unit[:, None]), 1)
        largest = higher
    found = largest if GREEDY else tl.log(total) + tl.maximum(largest, LOWEST)
    tl.store(to, found, mask=exists)


@triton.jit(do_not_specialize=["length", "batch", "classes", "states", "many"])
def _backward_kernel(
    beta, weights, rows, known, labels, targets, starts, order, length, batch, classes, states, many,
    GREEDY: tl.constexpr,
):  # fmt: skip
    """beta [L + 1, B, Q], of which the last is given. Position i has the weights of row rows[b, i], or those of a token
    of the class known[b, i], if this is at least 0. States from `many` on have few transitions."""
    sequence = tl.program_id(0).to(tl.int64)
    rows += sequence * length
    known += sequence * length
    for count in range(length):
        i = length - 1 - count
        own = weights + tl.load(rows + i).to(tl.int64) * classes
        only = tl.load(known + i).to(tl.int32)
        after = beta + ((i + 1) * batch + sequence) * states
        to = beta + (i * batch + sequence) * states
        for start in range(0, many, 16):
            _put_beta(to, own, only, after, labels, targets, starts, order, start, many, GREEDY, 16, 64)
        for start in range(many, states, 128):
            _put_beta(to, own, only, after, labels, targets, starts, order, start, states, GREEDY, 128, 8)
        tl.debug_barrier()


@triton.jit
def _transitions(labels, targets, starts, order, start, states, TILE: tl.constexpr, DEPTH: tl.constexpr):
    """The states order[start..start + TILE] and whether they exist, [1, TILE]; and the labels and targets of up to
    DEPTH transitions of each, [DEPTH, TILE]. Labels are -1 where there is none."""
    place = start + tl.arange(0, TILE)[None, :]
    exists = place < states
    begin = tl.load(starts + place, mask=exists, other=0)
    end = tl.load(starts + place + 1, mask=exists, other=0)
    edge = begin + tl.arange(0, DEPTH)[:, None]
    inside = edge < end
    label = tl.load(labels + edge, mask=inside, other=-1)
    return tl.load(order + place, mask=exists, other=0), exists, label, tl.load(targets + edge, mask=inside, other=0)


@triton.jit
def _log_sums(terms, GREEDY: tl.constexpr):
    """log of the sums of exp(terms [DEPTH, TILE]), or the largest, [1, TILE]."""
    largest = tl.max(terms, 0, keep_dims=True)
    if GREEDY:
        return largest
    unit = tl.maximum(largest, LOWEST)
    return tl.log(tl.sum(tl.exp(terms - unit), 0, keep_dims=True)) + unit


@triton.jit(do_not_specialize=["length", "batch", "classes", "states", "many"])
def _small_backward_kernel(
    beta, weights, rows, known, labels, targets, starts, order, length, batch, classes, states, many,
    GREEDY: tl.constexpr, TILE: tl.constexpr, MANY: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """The same for automata whose transitions fit in registers: at most MANY states with up to DEPTH of them, and TILE
    with up to 8. What a position adds is read while the one after it is summed. Transitions are along the first axis:
    along the second, the compiler would exchange them between warps."""
    sequence = tl.program_id(0).to(tl.int64)
    rows += sequence * length
    known += sequence * length
    state, exists, label, target = _transitions(labels, targets, starts, order, many, states, TILE, 8)
    own, only = weights + tl.load(rows + length - 1).to(tl.int64) * classes, tl.load(known + length - 1).to(tl.int32)
    terms = _own_terms(own, only, label, label >= 0)
    if MANY > 0:
        many_state, many_exists, many_label, many_target = _transitions(
            labels, targets, starts, order, 0, many, MANY, DEPTH
        )
        many_terms = _own_terms(own, only, many_label, many_label >= 0)
    else:
        many_state, many_exists, many_label, many_target, many_terms = state, exists, label, target, terms  # not used
    for count in range(length):
        i = length - 1 - count
        after = beta + ((i + 1) * batch + sequence) * states
        to = beta + (i * batch + sequence) * states
        earlier = tl.maximum(i - 1, 0)
        own = weights + tl.load(rows + earlier).to(tl.int64) * classes
        only = tl.load(known + earlier).to(tl.int32)
        if MANY > 0:
            sums = many_terms + _terms(after, many_target, many_label >= 0)
            many_terms = _own_terms(own, only, many_label, many_label >= 0)
            tl.store(to + many_state, _log_sums(sums, GREEDY), mask=many_exists)
        sums = terms + _terms(after, target, label >= 0)
        terms = _own_terms(own, only, label, label >= 0)
        tl.store(to + state, _log_sums(sums, GREEDY), mask=exists)
        tl.debug_barrier()


@triton.jit
def _put_alpha(
    to, own, only, alpha, labels, sources, starts, states, GREEDY: tl.constexpr, TILE: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    for start in range(0, states, TILE):
        _put_log_sums(to, own, labels, only, alpha, sources, starts, start, states, True, False, GREEDY, TILE, DEPTH)
    tl.debug_barrier()


@triton.jit(do_not_specialize=["length", "batch", "classes", "states"])
def _forward_kernel(
    alpha, weights, labels, sources, starts, length, batch, classes, states, GREEDY: tl.constexpr,
    TILE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """alpha [L, B, Q], of which the first is given."""
    sequence = tl.program_id(0).to(tl.int64)
    for i in range(length - 1):
        own = weights + (i * batch + sequence) * classes
        before = alpha + (i * batch + sequence) * states
        _put_alpha(before + batch * states, own, -1, before, labels, sources, starts, states, GREEDY, TILE, DEPTH)


@triton.jit
def _hashed(number, place):
    """The number in [0, 1) of a position that is not drawn (see `own_numbers`)."""
    word = (number * 9007199254740992.0).to(tl.int64).to(tl.uint64) + (place + 1).to(tl.uint64) * GAMMA
    word = (word ^ (word >> 30)) * FIRST_FACTOR
    word = (word ^ (word >> 27)) * SECOND_FACTOR
    word = word ^ (word >> 31)
    return (word >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _weights(own, only, after, labels, targets, edge, inside):
    """log weights of some transitions, with the weights of `_own_terms`."""
    label = tl.load(labels + edge, mask=inside, other=0)
    target = tl.load(targets + edge, mask=inside, other=0)
    return _own_terms(own, only, label, inside) + _terms(after, target, inside)


@triton.jit
def _put_choices(
    to, own, only, before, after, u, labels, targets, starts, order, start, states, GREEDY: tl.constexpr,
    TILE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """The transition that is drawn by the number u in each of the states order[start..start + TILE], in proportion to
    exp(own[label] + after[target]). The log of the sum of these is known: before[state]."""
    place = start + tl.arange(0, TILE)
    exists = place < states
    begin = tl.load(starts + place, mask=exists, other=0)
    end = tl.load(starts + place + 1, mask=exists, other=0)
    state = tl.load(order + place, mask=exists, other=0)
    unit = tl.maximum(tl.load(before + state, mask=exists, other=0.0), LOWEST)
    chosen, found, total = begin, tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.float64)
    for depth in range(0, tl.max(end - begin, 0), DEPTH):
        edge = (begin + depth)[:, None] + tl.arange(0, DEPTH)[None, :]
        weight = _weights(own, only, after, labels, targets, edge, edge < end[:, None])
        if GREEDY:
            drawn, last = weight == unit[:, None], begin
        else:
            weight = tl.exp(weight - unit[:, None])
            drawn = (weight > 0) & (total[:, None] + tl.cumsum(weight, 1) > u)
            last = tl.max(tl.where(weight > 0, edge, 0), 1)  # by rounding, u can be beyond all
            total += tl.sum(weight, 1)
        first = tl.min(tl.where(drawn, edge, end[:, None]), 1)
        chosen = tl.where(found > 0, chosen, tl.where(first < end, first, tl.maximum(chosen, last)))
        found = tl.maximum(found, (first < end).to(tl.int32))
    # A state without transitions is only reached if no sequence is possible.
    tl.store(to + state, tl.where(begin < end, chosen, 0), mask=exists)


@triton.jit
def _marked(chosen, place, length):
    """Which of some positions are drawn."""
    return tl.load(chosen + place, mask=place < length, other=0) != 0


@triton.jit(do_not_specialize=["length", "batch", "classes", "states", "many"])
def _choose_kernel(
    edges, used, beta, weights, rows, known, numbers, chosen, labels, targets, starts, order, length, batch, classes,
    states, many, GREEDY: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """The transition that is drawn in every state, edges [B, L, Q], and the number used for it, [B, L], up to the last
    position that is drawn. One program for each position."""
    sequence, i = tl.program_id(0).to(tl.int64) // length, tl.program_id(0) % length
    offset, begin, following = sequence * length, i, length
    while (begin < length) & (following == length):
        place = begin + tl.arange(0, PLACES)
        following = tl.min(tl.where(_marked(chosen + offset, place, length), place, length), 0)
        begin += PLACES
    if following < length:
        u = tl.load(numbers + offset + following)
        u = tl.where(following == i, u, _hashed(u, i.to(tl.int64)))  # see `own_numbers`
        tl.store(used + offset + i, u)
        only = tl.load(known + offset + i).to(tl.int32)
        own = weights + tl.load(rows + offset + i).to(tl.int64) * classes
        before = beta + (i * batch + sequence) * states
        after, to = before + batch * states, edges + (offset + i) * states
        for start in range(0, many, 16):
            _put_choices(
                to, own, only, before, after, u, labels, targets, starts, order, start, many, GREEDY, 16, 64
            )  # fmt: skip
        for start in range(many, states, 128):
            _put_choices(
                to, own, only, before, after, u, labels, targets, starts, order, start, states, GREEDY, 128, 8
            )  # fmt: skip


@triton.jit(do_not_specialize=["length", "states"])
def _follow_kernel(path, edges, chosen, targets, length, states, PLACES: tl.constexpr):
    """The states path [B, L] that a sequence passes up to its last position that is drawn."""
    offset, state = tl.program_id(0).to(tl.int64) * length, tl.zeros([], tl.int32)
    end = tl.zeros([], tl.int32)
    for start in range(0, length, PLACES):
        place = start + tl.arange(0, PLACES)
        end = tl.maximum(end, tl.max(tl.where(_marked(chosen + offset, place, length), place + 1, 0), 0))
    for i in range(end):
        tl.store(path + offset + i, state)
        state = tl.load(targets + tl.load(edges + (offset + i) * states + state))


@triton.jit(do_not_specialize=["length", "batch", "classes", "states"])
def _draw_kernel(
    drawn, numbers, path, edges, beta, weights, rows, known, labels, targets, starts, rank, length, batch, classes,
    states, GREEDY: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Classes [B, L] on paths [B, L], which are -1 after their ends. Numbers become their places in their intervals."""
    at = tl.program_id(0).to(tl.int64)
    sequence, i = at // length, at % length
    state = tl.load(path + at)
    if state >= 0:
        taken = tl.load(edges + at * states + state)
        tl.store(drawn + at, tl.load(labels + taken).to(tl.int64))
        if not GREEDY:
            only = tl.load(known + at).to(tl.int32)
            own = weights + tl.load(rows + at).to(tl.int64) * classes
            before = beta + (i * batch + sequence) * states
            after, unit = before + batch * states, tl.maximum(tl.load(before + state), LOWEST)
            left, width = tl.load(numbers + at), tl.zeros([], tl.float64)
            for start in range(tl.load(starts + tl.load(rank + state)), taken + 1, TILE):
                edge = start + tl.arange(0, TILE)
                weight = tl.exp(_weights(own, only, after, labels, targets, edge, edge <= taken) - unit)
                width = tl.sum(tl.where(edge == taken, weight, 0.0), 0)
                left -= tl.sum(tl.where(edge < taken, weight, 0.0), 0)
            share = tl.minimum(tl.maximum(left / tl.maximum(width, 1e-300), 0.0), LARGEST_SHARE)
            tl.store(numbers + at, share)


@triton.jit(do_not_specialize=["columns"])
def _pick_kernel(
    picked, logits, rows, labels, numbers, tokens, starts, columns, GREEDY: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """picked[i] = the token drawn from logits [R, columns] at rows[i] within the class labels[i], by numbers[i]; 0 if
    labels[i] is -1."""
    i = tl.program_id(0)
    logits += tl.load(rows + i) * columns
    label = tl.load(labels + i)
    begin = tl.load(starts + label, mask=label >= 0, other=0)
    size = (tl.load(starts + label + 1, mask=label >= 0, other=0) - begin).to(tl.int32)
    tokens += begin
    unit = tl.full([], float("-inf"), tl.float64)
    for start in range(0, size, TILE):
        unit = tl.maximum(unit, tl.max(_at_tokens(logits, tokens, start + tl.arange(0, TILE), size), 0))
    goal = tl.zeros([], tl.float64)
    if not GREEDY:
        for start in range(0, size, TILE):
            goal += tl.sum(tl.exp(_at_tokens(logits, tokens, start + tl.arange(0, TILE), size) - unit), 0)
        goal *= tl.load(numbers + i)
    before, place = tl.zeros([], tl.float64), tl.full([], -1, tl.int32)
    found = tl.zeros([], tl.int32)
    for start in range(0, size, TILE):
        at = start + tl.arange(0, TILE)
        value = _at_tokens(logits, tokens, at, size)
        if GREEDY:
            taken = value == unit
            last = -1
        else:
            weight = tl.exp(value - unit)
            taken = (before + tl.cumsum(weight, 0) > goal) & (weight > 0)
            last = tl.max(tl.where(weight > 0, at, -1), 0)  # by rounding, the goal can be beyond all
            before += tl.sum(weight, 0)
        first = tl.min(tl.where(taken & (at < size), at, size), 0)
        if found == 0:
            place = tl.where(first < size, first, tl.maximum(place, last))
            found = (first < size).to(tl.int32)
    tl.store(picked + i, tl.load(tokens + tl.maximum(place, 0), mask=size > 0, other=0))


@triton.jit
def _at_tokens(logits, tokens, at, size):
    """The logits in float64 of the tokens of a class at some places."""
    return _terms(logits, tl.load(tokens + at, mask=at < size, other=0), at < size)


def _launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, warps: int = WARPS) -> None:
    kernel[grid](*arguments, num_warps=warps)


def log_sums_of_rows(values: Tensor, places: Tensor, starts: Tensor, greedy: bool) -> Tensor:
    """log of the sums of exp(values [R, N]) over groups of places [E], which begin at starts [G + 1]: [R, G]."""
    values, groups = values.contiguous(), len(starts) - 1
    sums = torch.empty(len(values), groups, dtype=torch.float64, device=values.device)
    tile, depth = 32, PIECE
    if sums.numel():
        grid = (len(values), triton.cdiv(groups, tile))
        single = values.dtype.itemsize < 8
        tables = sums, values, places, starts, values.shape[1], groups
        _launch(_row_sums_kernel, grid, *tables, single, greedy, tile, depth)
    return sums


def backward(weights: Tensor, rows: Tensor, known: Tensor, last: Tensor, edges: Edges, greedy: bool) -> Tensor:
    """log beta [L + 1, B, Q].

    Args:
        weights: log P(c), [N, C].
        rows: which of them each position has, [B, L].
        known: the class of the token that a position has instead, [B, L]; -1 for none.
        last: the last log beta, [Q].
        edges: the transitions.
        greedy: take maxima instead of sums.
    """
    (batch, length), classes, states = rows.shape, weights.shape[1], len(last)
    beta = weights.new_empty(length + 1, batch, states)
    beta[-1] = last
    given = beta, weights, rows.contiguous(), known.contiguous()
    tables = *given, edges.label, edges.target, edges.starts, edges.state
    tables = *tables, length, batch, classes, states, edges.many
    fits = small_shape(edges, states) if length else None
    if fits is None:
        _launch(_backward_kernel, (batch,), *tables, greedy)
    else:
        _launch(_small_backward_kernel, (batch,), *tables, greedy, *fits, warps=WARPS if max(fits) <= 64 else 16)
    return beta


def forward(
    log_weights: Tensor, first: Tensor, labels: Tensor, sources: Tensor, starts: Tensor, greedy: bool
) -> Tensor:
    """log alpha [L, B, Q] of log_weights [L, B, C], with the first [B, Q], by transitions sorted by target."""
    (length, batch, classes), states = log_weights.shape, first.shape[1]
    alpha = log_weights.new_empty(length, batch, states)
    alpha[0] = first
    sizes = (length, batch, classes, states)
    tables = alpha, log_weights, labels, sources, starts
    _launch(_forward_kernel, (batch,), *tables, *sizes, greedy, *tile_of(states))
    return alpha


def draw(
    weights: Tensor,
    rows: Tensor,
    known: Tensor,
    beta: Tensor,
    numbers: Tensor,
    chosen: Tensor,
    edges: Edges,
    greedy: bool,
) -> tuple[Tensor, Tensor]:
    """Classes [B, L] and what is left of the numbers [B, L], where chosen [B, L]; elsewhere they have no meaning.

    Args:
        weights: log P(c), [N, C].
        rows: which of them each position has, [B, L].
        known: the class of the token that a position has instead, [B, L]; -1 for none.
        beta: log beta, [L + 1, B, Q].
        numbers: uniform numbers, [B, L].
        chosen: which positions are drawn.
        edges: the transitions.
        greedy: take the largest.
    """
    (batch, length), classes, states = rows.shape, weights.shape[1], beta.shape[2]
    drawn, rest = rows.new_zeros(batch, length), numbers.new_zeros(batch, length)
    if length and len(edges.label):
        marked = chosen.to(torch.int8).contiguous()
        given = beta, weights, rows.contiguous(), known.contiguous()
        moves, places = (edges.label, edges.target, edges.starts), min(triton.next_power_of_2(length), MARKS)
        each = torch.empty(batch, length, states, dtype=torch.int32, device=beta.device)
        path, sizes = torch.full_like(rows, -1, dtype=torch.int32), (length, batch, classes, states)
        asked, grid = (numbers.contiguous(), marked), (batch * length,)
        _launch(
            _choose_kernel, grid, each, rest, *given, *asked, *moves, edges.state, *sizes, edges.many, greedy, places
        )
        _launch(_follow_kernel, (batch,), path, each, marked, edges.target, length, states, places, warps=1)
        _launch(_draw_kernel, grid, drawn, rest, path, each, *given, *moves, edges.rank, *sizes, greedy, 32, warps=1)
    return drawn, rest


def pick(
    logits: Tensor, rows: Tensor, labels: Tensor, numbers: Tensor, tokens: Tensor, starts: Tensor, greedy: bool
) -> Tensor:
    """Tokens [C] drawn from logits [R, V] at rows [C] within classes [C], by numbers [C].

    Args:
        logits: up to a number for each row.
        rows: which row each is drawn from.
        labels: the classes; the token is 0 for -1.
        numbers: uniform numbers.
        tokens: tokens by classes.
        starts: where each class begins, and the end, [classes + 1].
        greedy: take the likeliest.
    """
    logits, picked = logits.contiguous(), torch.empty_like(rows)
    if len(rows):
        tables = picked, logits, rows, labels, numbers, tokens, starts
        _launch(_pick_kernel, (len(rows),), *tables, logits.shape[1], greedy, 1024)
    return picked
