"""Deterministic finite automata over bytes: what the expressions of `syntax` are compiled to.

Shapes: Q states, of which 0 is dead: it accepts nothing and is never left. The text begins in state 1.

An expression becomes an automaton with empty moves (Thompson's construction, characters as the UTF-8 of their ranges),
that one deterministic by its sets of states, and that one as small as it can be by refining partitions (Moore). States
are then numbered in the order in which a search from the start finds them, so that equal languages have equal tables.

Existing engines do not give such a table. `interegular` works on characters and is no longer developed;
`outlines-core` returns a dictionary of tokens per state, which cannot be intersected any more; `llguidance` derives
what is allowed while a text is written. The law of a constraint (`product_law`) needs the table and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache, partial
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

from cedd.constraints.syntax import Alternatives, Both, Characters, Expression, Range, Repeat, Separated, Sequence
from cedd.splitmix import Words

Table = NDArray[np.int32]
DEAD, START = 0, 1
MOST_NODES = 200_000
"""Of the automaton with empty moves."""
MOST_STATES = 20_000
"""Of a deterministic one."""
MOST_SET_SIZES = 1_000_000
"""Sum of the sizes of the sets of nodes that are joined to make an automaton deterministic."""
MANY_COPIES = 8
"""Repetitions from which a part is compiled by itself."""
_ENDS_OF_LENGTHS = (0x7F, 0x7FF, 0xFFFF, 0x10FFFF)
"""The last code points that UTF-8 writes in 1, 2, 3 and 4 bytes."""


@dataclass(frozen=True, eq=False)
class ByteAutomaton:
    """A deterministic automaton over bytes.

    Args:
        table: the next state for each state and byte, [Q, 256].
        accepting: whether a text may end in each state, [Q] bool.
    """

    table: Table
    accepting: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.table)

    @property
    def is_empty(self) -> bool:
        """Whether no text is in the language."""
        return not self.accepting.any()

    @cached_property
    def fingerprint(self) -> str:
        """A hash that automata of the same language share."""
        return sha256(self.table.tobytes() + self.accepting.tobytes()).hexdigest()

    def matches(self, text: bytes) -> bool:
        """Whether a text is in the language."""
        state = START
        for byte in text:
            state = int(self.table[state, byte])
        return bool(self.accepting[state])

    def after(self, prefix: bytes) -> ByteAutomaton:
        """The language of texts that consist of the prefix and a text of this language."""
        count = len(prefix)
        # The prefix's states come first, from the new start on; those of this language move up.
        moved = np.where(self.table == DEAD, DEAD, self.table + count).astype(np.int32)
        chain = np.zeros((count, 256), dtype=np.int32)
        chain[np.arange(count), list(prefix)] = np.arange(count) + START + 1
        table = np.concatenate([moved[:1], chain, moved[1:]])
        return ByteAutomaton(table, np.insert(self.accepting, START, np.zeros(count, dtype=bool)))

    def intersect(self, other: ByteAutomaton) -> ByteAutomaton:
        """The intersection of two languages."""
        numbers = {(START, START): START}
        waiting, rows = [(START, START)], [np.zeros(256, dtype=np.int32)]
        accepting = [False]
        while waiting:
            following: list[tuple[int, int]] = []
            for one, two in waiting:
                pairs = self.table[one].astype(np.int64) * len(other) + other.table[two]
                pairs[(self.table[one] == DEAD) | (other.table[two] == DEAD)] = 0
                found, inverse = np.unique(pairs, return_inverse=True)
                targets: list[int] = []
                for pair in found.tolist():
                    key = divmod(pair, len(other))
                    if pair and key not in numbers:
                        numbers[key] = _checked(len(numbers) + 1)
                        following.append(key)
                    targets.append(numbers[key] if pair else DEAD)
                rows.append(np.array(targets, dtype=np.int32)[inverse])
                accepting.append(bool(self.accepting[one] and other.accepting[two]))
            waiting = following
        return minimal(np.stack(rows), np.array(accepting))


def _checked(states: int) -> int:
    if states > MOST_STATES:
        raise ValueError(f"the constraint needs more than {MOST_STATES:,} states; use smaller counts")
    return states


def _check_parts(nodes: int) -> None:
    if nodes > MOST_NODES:
        raise ValueError(f"the constraint has more than {MOST_NODES:,} parts; use smaller counts")


def compile_expression(expression: Expression) -> ByteAutomaton:
    """The smallest automaton of an expression."""
    nodes = _Nodes()
    last = nodes.add(expression, nodes.new())
    return minimal(*_deterministic(nodes, 0, last))


# ----------------------------------------------------------------------------------------------------------------
# With empty moves


class _Nodes:
    """An automaton with empty moves, to which expressions are added from one node on."""

    def __init__(self) -> None:
        self.empty: list[list[int]] = []
        self.moves: list[list[tuple[int, int, int]]] = []
        """Of each node: (first byte, last byte, node)."""

    def new(self) -> int:
        _check_parts(len(self.empty) + 1)
        self.empty.append([])
        self.moves.append([])
        return len(self.empty) - 1

    def add(self, expression: Expression, first: int) -> int:
        """The node that a text of the expression leads to from `first`."""
        match expression:
            case Characters(ranges):
                return self._characters(ranges, first)
            case Sequence(parts):
                for part in parts:
                    first = self.add(part, first)
                return first
            case Alternatives(options):
                last = self.new()
                for option in options:
                    self.empty[self.add(option, self._after(first))].append(last)
                return last
            case Repeat():
                return self._repeat(expression, first)
            case Separated(parts, separator):
                return self._separated(parts, separator, first)
            case Both(one, other):
                both = compile_expression(one).intersect(compile_expression(other))
                return self._automaton(_moves_of(both), both.accepting.tolist(), first)

    def closure(self, node: int, last: int) -> frozenset[int]:
        """What empty moves lead to, as far as it matters: nodes with moves, and the last."""
        seen, stack = {node}, [node]
        while stack:
            following = [each for each in self.empty[stack.pop()] if each not in seen]
            seen.update(following)
            stack += following
        return frozenset(each for each in seen if self.moves[each] or each == last)

    def _after(self, node: int) -> int:
        """A new node after an empty move."""
        made = self.new()
        self.empty[node].append(made)
        return made

    def _characters(self, ranges: tuple[Range, ...], first: int) -> int:
        last = self.new()
        shared: dict[tuple[tuple[int, int], ...], int] = {(): last}  # by what is still to come

        def node_before(rest: tuple[tuple[int, int], ...]) -> int:
            if rest not in shared:
                shared[rest] = self.new()
                self.moves[shared[rest]].append((*rest[0], node_before(rest[1:])))
            return shared[rest]

        for encoded in _encoded(ranges):
            self.moves[first].append((*encoded[0], node_before(encoded[1:])))
        return last

    def _repeat(self, repeat: Repeat, first: int) -> int:
        copies = repeat.least + (1 if repeat.most is None else repeat.most - repeat.least)
        _check_parts(len(self.empty) + copies)
        add = partial(self.add, repeat.part)
        if copies >= MANY_COPIES and not isinstance(repeat.part, Characters):
            # The minimal automaton of a part is often much smaller than its expression.
            automaton = compile_expression(repeat.part)
            _check_parts(len(self.empty) + copies * len(automaton))
            add = partial(self._automaton, _moves_of(automaton), automaton.accepting.tolist())
        for _ in range(repeat.least):
            first = add(first)
        last = self._after(first)
        if repeat.most is None:
            self.empty[add(last)].append(last)
            return self._after(last)
        for _ in range(repeat.most - repeat.least):
            first = add(first)
            self.empty[first].append(last)
        return last

    def _separated(self, parts: tuple[tuple[Expression, bool], ...], separator: Expression, first: int) -> int:
        none: int | None = first  # no part has been written; None after a required part
        some: int | None = None  # at least one has
        for part, may_miss in parts:
            begin, after = self.new(), self.new()
            if none is not None:
                self.empty[none].append(begin)
            if some is not None:
                self.empty[self.add(separator, some)].append(begin)
            self.empty[self.add(part, begin)].append(after)
            if some is not None and may_miss:
                self.empty[some].append(after)
            none, some = none if may_miss else None, after
        last = self.new()
        for node in (none, some):
            if node is not None:
                self.empty[node].append(last)
        return last

    def _automaton(self, moves: list[list[tuple[int, int, int]]], accepting: list[bool], first: int) -> int:
        """A copy of an automaton: the moves of its states, of which the dead one is left out."""
        before, last = self.new(), self.new()
        offset = len(self.empty) - START
        self.empty[first].append(before)
        for state in range(START, len(moves)):
            node = self.new()
            self.moves[node] = [(low, high, target + offset) for low, high, target in moves[state]]
            if accepting[state]:
                self.empty[node].append(last)
        self.empty[before].append(START + offset)
        return last


def _moves_of(automaton: ByteAutomaton) -> list[list[tuple[int, int, int]]]:
    """The moves of each state: (first byte, last byte, state)."""
    made: list[list[tuple[int, int, int]]] = []
    for row in automaton.table:
        cuts = np.flatnonzero(np.diff(row, prepend=-1)).tolist()
        ends = zip(cuts, [*cuts[1:], 256], row[cuts].tolist(), strict=True)
        made.append([(low, high - 1, target) for low, high, target in ends if target != DEAD])
    return made


def utf8_ranges(first: int, last: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Ranges of bytes, one after the other, that together write the code points first to last in UTF-8."""
    for end in _ENDS_OF_LENGTHS:
        if first <= min(end, last):
            yield from _of_one_length(first, min(end, last))
            first = end + 1


@lru_cache(maxsize=1024)
def _encoded(chosen: tuple[Range, ...]) -> list[tuple[tuple[int, int], ...]]:
    """The same for several ranges of code points."""
    return [encoded for low, high in chosen for encoded in utf8_ranges(low, high)]


def _of_one_length(first: int, last: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """The same for code points that have equally many bytes: cut where a leading byte changes before all that can
    follow it has been."""
    low, high = chr(first).encode(), chr(last).encode()
    for shift in range(6 * (len(low) - 1), 0, -6):
        block = 1 << shift
        if first // block != last // block:
            if first % block:
                yield from _of_one_length(first, first - first % block + block - 1)
                yield from _of_one_length(first - first % block + block, last)
                return
            if last % block != block - 1:
                yield from _of_one_length(first, last - last % block - 1)
                yield from _of_one_length(last - last % block, last)
                return
    yield tuple(zip(low, high, strict=True))


# ----------------------------------------------------------------------------------------------------------------
# Deterministic


def _deterministic(nodes: _Nodes, first: int, last: int) -> tuple[Table, NDArray[np.bool_]]:
    """The automaton whose states are sets of nodes."""
    edges = sorted({edge for moves in nodes.moves for low, high, _ in moves for edge in (low, high + 1)} | {0, 256})
    lengths = np.diff(edges)
    class_of = {edge: number for number, edge in enumerate(edges)}
    moves = [[(class_of[low], class_of[high + 1], node) for low, high, node in each] for each in nodes.moves]
    closure = cache(lambda node: nodes.closure(node, last))
    begin = closure(first)
    numbers, waiting, rows = {begin: START}, [begin], [np.zeros(256, dtype=np.int32)]
    joined: dict[frozenset[int], frozenset[int]] = {}  # the closure of a set of nodes
    followed = 0
    for state in waiting:  # which grows
        targets: dict[int, set[int]] = {}
        for node in state:
            for low, high, target in moves[node]:
                for place in range(low, high):
                    targets.setdefault(place, set()).add(target)
        row = [DEAD] * len(lengths)
        for place, target in targets.items():
            key = frozenset(target)
            if key not in joined:
                parts = list(map(closure, key))
                joined[key] = frozenset[int]().union(*parts)
                followed += sum(map(len, parts))
                if followed > MOST_SET_SIZES:
                    raise ValueError("the constraint can match a text in too many ways; use smaller or fewer counts")
            if reached := joined[key]:
                if reached not in numbers:
                    numbers[reached] = _checked(len(numbers) + 1)
                    waiting.append(reached)
                row[place] = numbers[reached]
        rows.append(np.repeat(np.array(row, dtype=np.int32), lengths))
    return np.stack(rows), np.array([False, *(last in state for state in waiting)])


def minimal(table: Table, accepting: NDArray[np.bool_]) -> ByteAutomaton:
    """The smallest automaton of the same language, its states in the order of a search from the start."""
    columns = _distinct_columns(table)
    small = table[:, columns]
    block = _equivalent(small, accepting)
    # The dead state's block is 0 by another name: all that cannot lead to acceptance is in it.
    order, number = [int(block[START])], {int(block[DEAD]): DEAD}
    number.setdefault(order[0], START)
    if number[order[0]] == DEAD:
        return ByteAutomaton(np.zeros((2, 256), dtype=np.int32), np.zeros(2, dtype=bool))
    member = np.zeros(block.max() + 1, dtype=np.int64)
    member[block[::-1]] = np.arange(len(block))[::-1]  # the first state of each block
    for each in order:  # which grows
        for target in block[small[member[each]]].tolist():
            if target not in number:
                number[target] = len(number)
                order.append(target)
    renamed = np.zeros(block.max() + 1, dtype=np.int32)
    for each, place in number.items():
        renamed[each] = place
    rows = member[order]
    kept = renamed[block[table[rows]]].astype(np.int32)
    return ByteAutomaton(
        np.concatenate([np.zeros((1, 256), dtype=np.int32), kept]), np.concatenate([[False], accepting[rows]])
    )


def _distinct_columns(table: Table) -> NDArray[np.int64]:
    """A byte of each group of bytes that lead from every state to the same, in order."""
    first: dict[bytes, int] = {}
    for byte in range(table.shape[1]):
        first.setdefault(table[:, byte].tobytes(), byte)
    return np.array(list(first.values()))


def _equivalent(table: Table, accepting: NDArray[np.bool_], seed: int = 0) -> NDArray[np.int64]:
    """The number of each state's equivalence class, [Q], by partition refinement (Hopcroft).

    A block is split if its states lead to different blocks. Its largest part keeps the block's number, so that only
    states that lead to the other parts are compared again. Rows are compared by 64-bit hashes. The result is checked;
    after a collision the refinement is repeated with another seed.
    """
    states, columns = table.shape
    rng = np.random.default_rng(seed)
    weights, names = (rng.integers(0, 2**64, size, dtype=np.uint64) | np.uint64(1) for size in (columns, states + 2))
    entering = np.argsort(table, axis=None, kind="stable")  # transitions by target
    starts = np.searchsorted(table.reshape(-1)[entering], np.arange(states + 1))
    source, weight = entering // columns, weights[entering % columns]
    blocks = _Blocks(accepting)
    hashes = (names[blocks.of][table] * weights).sum(1, dtype=np.uint64)
    compared = np.arange(states)
    while len(compared):
        moved, old = blocks.split(compared, hashes)
        places, counts = ranges(starts, moved)
        change = np.repeat(names[blocks.of[moved]] - names[old], counts)
        np.add.at(hashes, source[places], change * weight[places])
        compared = np.unique(source[places])
    _, first, found = np.unique(blocks.of, return_index=True, return_inverse=True)
    like = first[found]
    if (found[table] != found[table[like]]).any() or (accepting != accepting[like]).any():
        return _equivalent(table, accepting, seed + 1)
    return found


class _Blocks:
    """A partition of the states."""

    def __init__(self, accepting: NDArray[np.bool_]) -> None:
        self.of = accepting.astype(np.int64)
        """The block of each state, [Q]."""
        self._sizes = np.zeros(len(accepting) + 2, dtype=np.int64)
        self._sizes[:2] = np.bincount(self.of, minlength=2)
        self._count = 2

    def split(self, compared: NDArray[np.int64], hashes: Words) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Split blocks by the hashes of their states; returns the states that moved to a new block, and their old ones.

        Args:
            compared: the states whose hashes have changed; the other states of a block have equal hashes.
            hashes: the hash of each state.
        """
        if len(compared) == 1:  # the most frequent case: a long chain, one state at a time
            old = self.of[compared]
            if self._sizes[old] == 1:
                return compared[:0], old[:0]
            self.of[compared] = self._count
            self._sizes[old] -= 1
            self._sizes[self._count] = 1
            self._count += 1
            return compared, old
        listed, counts = np.unique(self.of[compared], return_counts=True)
        most = 2 * counts > self._sizes[listed]
        if (partly := most & (counts < self._sizes[listed])).any():
            compared = np.union1d(compared, np.flatnonzero(np.isin(self.of, listed[partly])))
        order = np.lexsort((hashes[compared], self.of[compared]))
        states, old, value = compared[order], self.of[compared[order]], hashes[compared[order]]
        begins = np.ones(len(states), dtype=bool)
        begins[1:] = (old[1:] != old[:-1]) | (value[1:] != value[:-1])
        first = np.flatnonzero(begins)
        sizes, own = np.diff(first, append=len(states)), old[first]  # of each part
        # If all states of a block are compared, its largest part keeps the number; otherwise the other states do.
        by_size = np.lexsort((-sizes, own))
        largest = by_size[np.flatnonzero(np.diff(own[by_size], prepend=-1))]
        keeps = np.zeros(len(first), dtype=bool)
        keeps[largest[most]] = True
        names = own.copy()
        names[~keeps] = self._count + np.arange(len(first) - int(keeps.sum()))
        self._count += len(first) - int(keeps.sum())
        np.subtract.at(self._sizes, own[~keeps], sizes[~keeps])
        self._sizes[names[~keeps]] = sizes[~keeps]
        self.of[states] = np.repeat(names, sizes)
        moved = ~np.repeat(keeps, sizes)
        return states[moved], old[moved]


def ranges(starts: NDArray[np.int64], chosen: NDArray[np.integer]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The numbers in the ranges starts[i] .. starts[i + 1] - 1 for some i, one range after the other, and their
    lengths."""
    begin = starts[chosen]
    lengths = starts[chosen + 1] - begin
    before = np.cumsum(lengths) - lengths
    return np.repeat(begin - before, lengths) + np.arange(int(lengths.sum())), lengths
