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

WARPS = 4
PIECE = 32
"""Tokens of a class that are summed at once."""
LOWEST = tl.constexpr(-1e300)
"""In the place of -inf, where it is subtracted."""
LARGEST_SHARE = tl.constexpr(1 - 2.0**-53)
FEW = 64
"""Groups up to which a tile has 32 of them."""


def tile_of(groups: int) -> tuple[int, int]:
    """How many groups, and terms of each, a program adds up at once. There are few tiles, since each is compiled."""
    return (32, 32) if groups <= FEW else (256, 4)


@triton.jit
def _terms(values, places, inside):
    """Values in float64 at some places; -inf outside."""
    return tl.load(values + places, mask=inside, other=float("-inf")).to(tl.float64)


@triton.jit
def _put_log_sums(
    to, first, first_places, only, second, second_places, starts, start, groups, JOINT: tl.constexpr,
    GREEDY: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """to[g] = log of the sum (GREEDY: the largest) of exp(first[first_places] + second[second_places]) over group g,
    from group `start` on. If `only` is at least 0, `first` is 0 there and -inf elsewhere."""
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
            total += tl.sum(tl.exp(terms - unit[:, None]), 1)
        largest = higher
    found = largest if GREEDY else tl.log(total) + tl.maximum(largest, LOWEST)
    tl.store(to + group, found, mask=exists)


@triton.jit(do_not_specialize=["columns", "groups"])
def _row_sums_kernel(
    sums, values, places, starts, columns, groups, GREEDY: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    values += row * columns
    _put_log_sums(
        sums + row * groups, values, places, -1, values, places, starts, tl.program_id(1) * TILE, groups, False,
        GREEDY, TILE, DEPTH,
    )  # fmt: skip


@triton.jit(do_not_specialize=["length", "batch", "classes", "states"])
def _backward_kernel(
    beta, weights, labels, targets, starts, length, batch, classes, states, GREEDY: tl.constexpr, TILE: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """beta [L + 1, B, Q], of which the last is given."""
    sequence = tl.program_id(0).to(tl.int64)
    for count in range(length):
        i = length - 1 - count
        own = weights + (i * batch + sequence) * classes
        after = beta + ((i + 1) * batch + sequence) * states
        to = beta + (i * batch + sequence) * states
        for start in range(0, states, TILE):
            _put_log_sums(
                to, own, labels, -1, after, targets, starts, start, states, True, GREEDY, TILE, DEPTH
            )  # fmt: skip
        tl.debug_barrier()


@triton.jit
def _put_alpha(
    to, own, only, alpha, labels, sources, starts, states, GREEDY: tl.constexpr, TILE: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    for start in range(0, states, TILE):
        _put_log_sums(to, own, labels, only, alpha, sources, starts, start, states, True, GREEDY, TILE, DEPTH)
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
def _largest(own, factors, classes, TILE: tl.constexpr):
    """The largest of own + factors [C], and the first class that has it."""
    best, place = tl.full([], float("-inf"), tl.float64), tl.zeros([], tl.int32)
    for start in range(0, classes, TILE):
        label = start + tl.arange(0, TILE)
        weight = _terms(own, label, label < classes) + _terms(factors, label, label < classes)
        higher = tl.max(weight, 0)
        if higher > best:
            best = higher
            place = tl.min(tl.where(weight == higher, label, classes), 0)
    return best, place


@triton.jit
def _scaled(own, factors, unit, label, classes):
    """exp(own + factors - unit) at some classes."""
    return tl.exp(_terms(own, label, label < classes) + _terms(factors, label, label < classes) - unit)


@triton.jit
def _inverse(own, factors, u, classes, TILE: tl.constexpr):
    """A class drawn in proportion to exp(own + factors) by the number u, and how far into its interval u is."""
    unit, place = _largest(own, factors, classes, TILE)
    unit = tl.maximum(unit, LOWEST)
    total = tl.zeros([], tl.float64)
    for start in range(0, classes, TILE):
        total += tl.sum(_scaled(own, factors, unit, start + tl.arange(0, TILE), classes), 0)
    goal, before = u * total, tl.zeros([], tl.float64)
    share, found = tl.full([], LARGEST_SHARE, tl.float64), tl.zeros([], tl.int32)
    for start in range(0, classes, TILE):
        label = start + tl.arange(0, TILE)
        weight = _scaled(own, factors, unit, label, classes)
        until = before + tl.cumsum(weight, 0)
        beyond = tl.min(tl.where((until > goal) & (weight > 0), label, classes), 0)
        last = tl.max(tl.where(weight > 0, label, -1), 0)  # by rounding, the goal can be beyond all
        taken = tl.where(beyond < classes, beyond, last)
        if (found == 0) & (taken >= 0):
            here = label == taken
            own_weight = tl.sum(tl.where(here, weight, 0.0), 0)
            left = goal - (tl.sum(tl.where(here, until, 0.0), 0) - own_weight)
            share = tl.minimum(tl.maximum(left / tl.maximum(own_weight, 1e-300), 0.0), LARGEST_SHARE)
            place = taken
            found = (beyond < classes).to(tl.int32)
        before += tl.sum(weight, 0)
    return place, share


@triton.jit(do_not_specialize=["length", "batch", "classes", "states"])
def _draw_kernel(
    drawn, rest, alpha, factors, beta, weights, numbers, chosen, target_labels, target_sources, target_starts,
    label_sources, label_targets, label_starts, length, batch, classes, states, GREEDY: tl.constexpr,
    TILE: tl.constexpr, DEPTH: tl.constexpr, LABELS: tl.constexpr, LABEL_DEPTH: tl.constexpr,
):  # fmt: skip
    """Classes [B, L] by numbers [B, L], where chosen [B, L]; alpha [2, B, Q], of which the first is given, and factors
    [B, C] are room."""
    sequence = tl.program_id(0).to(tl.int64)
    factors += sequence * classes
    last = tl.zeros([], tl.int32)
    for i in range(length):
        last = tl.where(tl.load(chosen + sequence * length + i) != 0, i, last)
    for i in range(last + 1):
        own = weights + (i * batch + sequence) * classes
        before = alpha + ((i % 2) * batch + sequence) * states
        to = alpha + (((i + 1) % 2) * batch + sequence) * states
        only = tl.full([], -1, tl.int32)
        if tl.load(chosen + sequence * length + i) != 0:
            after = beta + ((i + 1) * batch + sequence) * states
            for start in range(0, classes, LABELS):
                _put_log_sums(
                    factors, before, label_sources, -1, after, label_targets, label_starts, start, classes, True,
                    GREEDY, LABELS, LABEL_DEPTH,
                )  # fmt: skip
            tl.debug_barrier()
            share = tl.load(numbers + sequence * length + i)
            if GREEDY:
                _, only = _largest(own, factors, classes, 1024)
            else:
                only, share = _inverse(own, factors, share, classes, 1024)
            tl.store(drawn + sequence * length + i, only)
            tl.store(rest + sequence * length + i, share)
            tl.debug_barrier()
        _put_alpha(to, own, only, before, target_labels, target_sources, target_starts, states, GREEDY, TILE, DEPTH)


@triton.jit(do_not_specialize=["columns"])
def _pick_kernel(
    picked, logits, rows, labels, numbers, tokens, starts, columns, GREEDY: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """picked[i] = the token drawn from logits [R, columns] at rows[i] within the class labels[i], by numbers[i]."""
    i = tl.program_id(0)
    logits += tl.load(rows + i) * columns
    label = tl.load(labels + i)
    begin = tl.load(starts + label)
    size = (tl.load(starts + label + 1) - begin).to(tl.int32)
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
    tl.store(picked + i, tl.load(tokens + tl.maximum(place, 0)))


@triton.jit
def _at_tokens(logits, tokens, at, size):
    """The logits in float64 of the tokens of a class at some places."""
    return _terms(logits, tl.load(tokens + at, mask=at < size, other=0), at < size)


def _launch(kernel: Any, grid: tuple[int, ...], *arguments: Any) -> None:
    kernel[grid](*arguments, num_warps=WARPS)


def log_sums_of_rows(values: Tensor, places: Tensor, starts: Tensor, greedy: bool) -> Tensor:
    """log of the sums of exp(values [R, N]) over groups of places [E], which begin at starts [G + 1]: [R, G]."""
    values, groups = values.contiguous(), len(starts) - 1
    sums = torch.empty(len(values), groups, dtype=torch.float64, device=values.device)
    tile, depth = 32, PIECE
    if sums.numel():
        grid = (len(values), triton.cdiv(groups, tile))
        _launch(_row_sums_kernel, grid, sums, values, places, starts, values.shape[1], groups, greedy, tile, depth)
    return sums


def backward(
    log_weights: Tensor, last: Tensor, labels: Tensor, targets: Tensor, starts: Tensor, greedy: bool
) -> Tensor:
    """log beta [L + 1, B, Q] of log_weights [L, B, C], with the last [Q], by transitions sorted by source."""
    (length, batch, classes), states = log_weights.shape, len(last)
    beta = log_weights.new_empty(length + 1, batch, states)
    beta[-1] = last
    sizes = (length, batch, classes, states)
    tables = beta, log_weights, labels, targets, starts
    _launch(_backward_kernel, (batch,), *tables, *sizes, greedy, *tile_of(states))
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
    log_weights: Tensor,
    beta: Tensor,
    first: Tensor,
    numbers: Tensor,
    chosen: Tensor,
    by_target: tuple[Tensor, Tensor, Tensor],
    by_label: tuple[Tensor, Tensor, Tensor],
    greedy: bool,
) -> tuple[Tensor, Tensor]:
    """Classes [B, L] and what is left of the numbers [B, L], where chosen [B, L].

    Args:
        log_weights: [L, B, C].
        beta: log beta, [L + 1, B, Q].
        first: the first log alpha, [B, Q].
        numbers: uniform numbers.
        chosen: which positions are drawn.
        by_target: labels, sources and starts of the transitions sorted by target.
        by_label: sources, targets and starts of those sorted by label.
        greedy: take the largest.
    """
    (length, batch, classes), states = log_weights.shape, first.shape[1]
    alpha, factors = torch.stack([first, first]), log_weights.new_empty(batch, classes)
    drawn, rest = torch.empty(batch, length, dtype=torch.int64, device=first.device), torch.empty_like(numbers)
    marked = chosen.to(torch.int8).contiguous()
    tables = drawn, rest, alpha, factors, beta, log_weights, numbers.contiguous(), marked, *by_target, *by_label
    sizes = (length, batch, classes, states)
    _launch(_draw_kernel, (batch,), *tables, *sizes, greedy, *tile_of(states), *tile_of(classes))
    return drawn, rest


def pick(
    logits: Tensor, rows: Tensor, labels: Tensor, numbers: Tensor, tokens: Tensor, starts: Tensor, greedy: bool
) -> Tensor:
    """Tokens [C] drawn from logits [R, V] at rows [C] within classes [C], by numbers [C].

    Args:
        logits: up to a number for each row.
        rows: which row each is drawn from.
        labels: the classes.
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
