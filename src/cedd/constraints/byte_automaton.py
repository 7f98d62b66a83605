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

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

from cedd.constraints.syntax import Alternatives, Both, Characters, Expression, Repeat, Sequence

Table = NDArray[np.int32]
DEAD, START = 0, 1
MOST_NODES = 200_000
"""Of the automaton with empty moves."""
MOST_STATES = 20_000
"""Of a deterministic one."""
_ENDS_OF_LENGTHS = (0x7F, 0x7FF, 0xFFFF, 0x10FFFF)
"""The last code points that UTF-8 writes in 1, 2, 3 and 4 bytes."""


@dataclass(frozen=True, eq=False)
class ByteAutomaton:
    """table: the state after each state and byte, [Q, 256]. accepting: whether a text may end there, [Q] bool."""

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
        """The texts of the prefix and one of this language."""
        count = len(prefix)
        # The prefix's states come first, from the new start on; those of this language move up.
        moved = np.where(self.table == DEAD, DEAD, self.table + count).astype(np.int32)
        chain = np.zeros((count, 256), dtype=np.int32)
        chain[np.arange(count), list(prefix)] = np.arange(count) + START + 1
        table = np.concatenate([moved[:1], chain, moved[1:]])
        return ByteAutomaton(table, np.insert(self.accepting, START, np.zeros(count, dtype=bool)))

    def intersect(self, other: ByteAutomaton) -> ByteAutomaton:
        """The texts of both languages."""
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
        raise ValueError(
            f"the constraint needs more than {MOST_STATES:,} states; shorten its counts, or what may come between its "
            "parts"
        )
    return states


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
        if len(self.empty) >= MOST_NODES:
            raise ValueError(f"the constraint has more than {MOST_NODES:,} parts; shorten its counts")
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
            case Both(one, other):
                return self._automaton(compile_expression(one).intersect(compile_expression(other)), first)

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

    def _characters(self, ranges: Iterable[tuple[int, int]], first: int) -> int:
        last = self.new()
        shared: dict[tuple[tuple[int, int], ...], int] = {(): last}  # by what is still to come

        def node_before(rest: tuple[tuple[int, int], ...]) -> int:
            if rest not in shared:
                shared[rest] = self.new()
                self.moves[shared[rest]].append((*rest[0], node_before(rest[1:])))
            return shared[rest]

        for low, high in ranges:
            for encoded in utf8_ranges(low, high):
                self.moves[first].append((*encoded[0], node_before(encoded[1:])))
        return last

    def _repeat(self, repeat: Repeat, first: int) -> int:
        for _ in range(repeat.least):
            first = self.add(repeat.part, first)
        last = self._after(first)
        if repeat.most is None:
            self.empty[self.add(repeat.part, last)].append(last)
            return self._after(last)
        for _ in range(repeat.most - repeat.least):
            first = self.add(repeat.part, first)
            self.empty[first].append(last)
        return last

    def _automaton(self, automaton: ByteAutomaton, first: int) -> int:
        nodes, last = [self.new() for _ in range(len(automaton))], self.new()
        self.empty[first].append(nodes[START])
        for state in range(START, len(automaton)):
            if automaton.accepting[state]:
                self.empty[nodes[state]].append(last)
            row = automaton.table[state]
            cuts = np.flatnonzero(np.diff(row, prepend=-1)).tolist()
            for low, high in zip(cuts, [*cuts[1:], 256], strict=True):
                if row[low] != DEAD:
                    self.moves[nodes[state]].append((low, high - 1, nodes[row[low]]))
        return last


def utf8_ranges(first: int, last: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Ranges of bytes, one after the other, that together write the code points first to last in UTF-8."""
    for end in _ENDS_OF_LENGTHS:
        if first <= min(end, last):
            yield from _of_one_length(first, min(end, last))
            first = end + 1


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
    for state in waiting:  # which grows
        targets: list[set[int]] = [set() for _ in lengths]
        for node in state:
            for low, high, target in moves[node]:
                for place in range(low, high):
                    targets[place].add(target)
        row: list[int] = []
        for target in targets:
            key = frozenset(target)
            if key not in joined:
                joined[key] = frozenset[int]().union(*map(closure, key))
            reached = joined[key]
            if reached and reached not in numbers:
                numbers[reached] = _checked(len(numbers) + 1)
                waiting.append(reached)
            row.append(numbers[reached] if reached else DEAD)
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
    _, first = np.unique(table, axis=1, return_index=True)
    return np.sort(first)


def _equivalent(table: Table, accepting: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The number of each state's class of equivalent states, [Q], by Moore's refinement.

    Rows of numbers are compared by a hash of 64 bits; the result is checked, so that a collision costs time only.
    """
    weights = np.random.default_rng(0).integers(1, 2**63, table.shape[1] + 1, dtype=np.uint64) | np.uint64(1)
    block, count = accepting.astype(np.int64), 0
    while True:
        found, block = np.unique(_hashes(block, table, weights), return_inverse=True)
        if len(found) == count:
            break
        count = len(found)
    member = np.zeros(count, dtype=np.int64)
    member[block] = np.arange(len(block))
    like = member[block]
    if (block[table] != block[table[like]]).any() or (accepting != accepting[like]).any():
        return _equivalent_by_rows(table, accepting)
    return block


def _hashes(block: NDArray[np.int64], table: Table, weights: NDArray[np.uint64]) -> NDArray[np.uint64]:
    mixed = block.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x632BE59BD9B4E019)
    mixed ^= mixed >> np.uint64(29)
    return mixed * weights[-1] + (mixed[table] * weights[:-1]).sum(1, dtype=np.uint64)


def _equivalent_by_rows(table: Table, accepting: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The same without hashes."""
    block, count = accepting.astype(np.int64), 0
    while True:
        rows = np.concatenate([block[:, None], block[table]], 1)
        found, block = np.unique(rows, axis=0, return_inverse=True)
        if len(found) == count:
            return block.reshape(-1)
        count = len(found)
