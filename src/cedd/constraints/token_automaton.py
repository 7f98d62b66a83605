"""Automata over tokens, compiled from automata over bytes.

Shapes: V vocabulary, Q states, C classes of tokens, E transitions.

Tokens with the same transition from every state form a class; most automata have few classes. A transition is (state,
class, state). Only transitions on a path to an accepting state are kept; a token without a transition is not possible.

If a text can end before the last token, accepting states also have transitions for the end-of-text tokens (`ends`).
After these any tokens may follow, which are not part of the text, as in training texts that are joined one after the
other, or padded. Otherwise the tokens must end in an accepting state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cedd.constraints.byte_automaton import DEAD, START, ByteAutomaton, ranges
from cedd.splitmix import Words, mix

Ints = NDArray[np.int32]

PAIRS_AT_ONCE = 1 << 21
"""Pairs of a token and a state that are followed at the same time."""
MOST_TRANSITIONS = 10_000_000


@dataclass(frozen=True, eq=False)
class TokenTexts:
    """The bytes that each token of a vocabulary stands for.

    Args:
        contents: the bytes that each token adds to a text, [V]; None if it adds no text, or the text is unknown.
        beginnings: the same for the first token of a text, if different.
        ends: tokens that end a text.
    """

    contents: Sequence[bytes | None]
    beginnings: Sequence[bytes | None] | None = None
    ends: tuple[int, ...] = ()

    @cached_property
    def longest(self) -> int:
        """The largest number of bytes of a token."""
        contents = (*self.contents, *(self.beginnings or ()))
        return max((len(content) for content in contents if content), default=0)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all of it."""
        made = sha256(repr(self.ends).encode())
        for contents in (self.contents, self.beginnings or ()):
            made.update(b"|")
            for content in contents:
                made.update(b"-" if content is None else b"%d:%b" % (len(content), content))
        return made.hexdigest()


class Transitions(NamedTuple):
    """The source, label and target of transitions, [E] each."""

    source: Ints
    label: Ints
    """A token, or the class of tokens."""
    target: Ints

    def where(self, kept: NDArray[np.bool_] | NDArray[np.intp]) -> Transitions:
        """Some of them."""
        return Transitions(*(part[kept] for part in self))


@dataclass(frozen=True, eq=False)
class TokenAutomaton:
    """A language of sequences of tokens, which begin in state 0.

    Args:
        classes: the class of each token, [V].
        transitions: by classes, in the order of their sources.
        accepting: where the tokens may end, [Q] bool.
    """

    classes: Ints
    transitions: Transitions
    accepting: NDArray[np.bool_]

    @property
    def num_states(self) -> int:
        """Q."""
        return len(self.accepting)

    @cached_property
    def num_classes(self) -> int:
        """C."""
        return int(self.classes.max(initial=0)) + 1

    @cached_property
    def _next(self) -> dict[tuple[int, int], int]:
        source, label, target = (part.tolist() for part in self.transitions)
        return dict(zip(zip(source, label, strict=True), target, strict=True))

    def matches(self, tokens: Sequence[int]) -> bool:
        """Whether a sequence of tokens is in the language."""
        state: int | None = 0
        for token in tokens:
            state = self._next.get((state, int(self.classes[token])))
            if state is None:
                return False
        return bool(self.accepting[state])

    @cached_property
    def is_infinite(self) -> bool:
        """Whether there is no longest sequence: whether the states, all of which lead to acceptance, have a cycle."""
        source, _, target = self.transitions
        following, starts = _sorted_by(source, target, self.num_states)
        entering = np.bincount(target, minlength=self.num_states)
        removed, left = np.flatnonzero(entering == 0), self.num_states
        while len(removed):  # states that only removed states lead to
            left -= len(removed)
            reached, counts = np.unique(following[ranges(starts, removed)[0]], return_counts=True)
            entering[reached] -= counts
            removed = reached[entering[reached] == 0]
        return left > 0

    def lengths(self, most: int) -> list[int]:
        """The lengths in tokens, up to `most`, of the texts of the language."""
        if most not in self._lengths:
            self._lengths[most] = self._counted(most)
        return [*self._lengths[most]]

    @cached_property
    def _lengths(self) -> dict[int, list[int]]:
        return {}

    def _counted(self, most: int) -> list[int]:
        source, _, target = self.transitions
        reached = np.arange(self.num_states) == 0
        found: list[int] = []
        for count in range(most + 1):
            if (reached & self.accepting).any():
                found.append(count)
            following = np.zeros_like(reached)
            following[target[reached[source]]] = True
            reached = following
        return found


def before_end(automaton: TokenAutomaton, following: int) -> TokenAutomaton:
    """The beginnings of the language's texts that some number of tokens follow."""
    source, _, target = automaton.transitions
    can_end = automaton.accepting
    for _ in range(following):
        before = np.zeros_like(can_end)
        before[source[can_end[target]]] = True
        can_end = before
    return replace(automaton, accepting=can_end)


def compile_tokens(automaton: ByteAutomaton, texts: TokenTexts, *, may_end: bool) -> TokenAutomaton:
    """Compile an automaton over bytes to one over tokens.

    Args:
        automaton: the automaton of the texts.
        texts: the bytes of the tokens.
        may_end: whether a text may end before the tokens do, by one of `texts.ends`.
    """
    distinct, which = _distinct(automaton, texts)
    made = _compiled(automaton, distinct, may_end)
    return replace(made, classes=made.classes[which])


def _distinct(automaton: ByteAutomaton, texts: TokenTexts) -> tuple[TokenTexts, NDArray[np.intp]]:
    """The texts of tokens that differ in their transitions, and the index of each token's text among them.

    Bytes that lead from every state to the same state are replaced by the first such byte, after which most tokens have
    the text of another one.
    """
    first: dict[bytes, int] = {}
    names = bytes(first.setdefault(automaton.table[:, byte].tobytes(), byte) for byte in range(256))
    dead = set(range(256)).difference(np.flatnonzero(automaton.table.any(0)).tolist())

    def named(content: bytes | None) -> bytes | None:
        text = content.translate(names) if content else None
        return None if text and dead.intersection(text) else text

    numbers: dict[tuple[bytes | None, bytes | None, bool], int] = {}
    ends, beginnings = set(texts.ends), texts.beginnings or [None] * len(texts.contents)
    which = [
        numbers.setdefault((named(content), named(beginning), token in ends), len(numbers))
        for token, (content, beginning) in enumerate(zip(texts.contents, beginnings, strict=True))
    ]
    contents, beginnings, is_end = zip(*numbers, strict=True)
    kept = TokenTexts(
        contents, None if texts.beginnings is None else beginnings, tuple(np.flatnonzero(is_end).tolist())
    )
    return kept, np.array(which)


def _compiled(automaton: ByteAutomaton, texts: TokenTexts, may_end: bool) -> TokenAutomaton:
    """`compile_tokens` for texts that differ."""
    begin = START if texts.beginnings is None else len(automaton)
    accepting = automaton.accepting
    few: list[Transitions] = []
    if texts.beginnings is not None:
        accepting = np.append(accepting, accepting[START])
        first = _walk(automaton, texts.beginnings, np.array([START], dtype=np.int32))
        few += [part._replace(source=np.full_like(part.source, begin)) for part in first]
    end = len(accepting) if may_end and texts.ends else None
    if end is not None:
        closing = np.flatnonzero(accepting).astype(np.int32)
        token = np.repeat(np.array(texts.ends, dtype=np.int32), len(closing))
        few.append(Transitions(np.tile(closing, len(texts.ends)), token, np.full(len(token), end, dtype=np.int32)))
        accepting = np.append(accepting, True)
    states = np.flatnonzero(automaton.table.any(1)).astype(np.int32)
    classes, transitions = _classified(len(texts.contents), few, _walk(automaton, texts.contents, states))
    if end is not None:
        labels = np.arange(int(classes.max()) + 1, dtype=np.int32)
        after = np.full_like(labels, end)
        transitions = _joined([transitions, Transitions(after, labels, after)])
    return _trimmed(classes, transitions, accepting, begin)


def _walk(automaton: ByteAutomaton, contents: Sequence[bytes | None], states: Ints) -> Iterator[Transitions]:
    """The transitions by tokens from these states, all of a token together; those of some tokens at a time."""
    written = [(content, token) for token, content in enumerate(contents) if content]
    if not written:
        return
    lengths = np.array([len(content) for content, _ in written])
    places = np.concatenate([[0], np.cumsum(lengths)])
    content = np.frombuffer(b"".join(content for content, _ in written), dtype=np.uint8)
    tokens = np.array([token for _, token in written], dtype=np.int32)
    alive = [states[automaton.table[states, byte] != DEAD] for byte in range(256)]
    first = content[places[:-1]]
    counts = np.array([len(each) for each in alive])[first]
    at_once = np.cumsum(counts) // PAIRS_AT_ONCE
    for part in np.split(np.arange(len(written)), np.flatnonzero(np.diff(at_once)) + 1):
        number = np.repeat(part, counts[part])
        if not len(number):
            continue
        source = np.concatenate([alive[byte] for byte in first[part]])
        target = automaton.table[source, first[number]]
        for place in range(1, int(lengths[part].max())):
            longer = np.flatnonzero(lengths[number] > place)
            if not len(longer):
                break
            target[longer] = automaton.table[target[longer], content[places[number[longer]] + place]]
            kept = target != DEAD
            number, source, target = number[kept], source[kept], target[kept]
        yield Transitions(source, tokens[number], target)


def _classified(vocab_size: int, few: Sequence[Transitions], many: Iterator[Transitions]) -> tuple[Ints, Transitions]:
    """The class of each token, and the transitions by classes.

    Classes are distinguished by a 128-bit hash of a token's transitions; that any two of a million tokens collide has a
    chance of 1e-27.

    Args:
        few: transitions by tokens.
        many: further ones, all of a token in the same part; only those of one token of each class are kept.
    """
    words = np.zeros((vocab_size, 2), dtype=np.uint64)
    for part in few:
        _add_hashes(words, part)
    numbers: dict[tuple[int, int], int] = {(0, 0): 0}
    classes, settled = np.zeros(vocab_size, dtype=np.int32), np.zeros(vocab_size, dtype=bool)
    representatives: list[int] = [-1]
    kept: list[Transitions] = []

    def settle(tokens: NDArray[np.intp]) -> NDArray[np.intp]:
        """Number the classes of tokens; the tokens that represent a new class."""
        found, first, inverse = np.unique(words[tokens], axis=0, return_index=True, return_inverse=True)
        new: list[int] = []
        for key, token in zip(map(tuple, found.tolist()), tokens[first].tolist(), strict=True):
            if key not in numbers:
                numbers[key] = len(representatives)
                representatives.append(token)
                new.append(token)
        of_found = np.array([numbers[key] for key in map(tuple, found.tolist())], dtype=np.int32)
        classes[tokens], settled[tokens] = of_found[inverse.reshape(-1)], True
        return np.array(new, dtype=np.intp)

    total = 0
    for part in many:
        if not len(part.label):
            continue
        new = settle(_add_hashes(words, part))
        kept.append(part.where(np.isin(part.label, new)))
        total += len(kept[-1].label)
        if total > MOST_TRANSITIONS:
            raise ValueError(
                f"the constraint needs more than {MOST_TRANSITIONS:,} transitions between tokens; shorten its counts"
            )
    settle(np.flatnonzero(~settled))
    is_representative = np.zeros(vocab_size, dtype=bool)
    is_representative[representatives[1:]] = True
    kept += [part.where(is_representative[part.label]) for part in few]
    transitions = _joined(kept)
    return classes, transitions._replace(label=classes[transitions.label])


def _add_hashes(words: Words, part: Transitions) -> NDArray[np.intp]:
    """Add the hashes of transitions to those of their labels [N, 2]. Returns the labels that occur."""
    order = np.argsort(part.label, kind="stable")
    label = part.label[order]
    pair = part.source[order].astype(np.uint64) << np.uint64(32) | part.target[order].astype(np.uint64)
    starts = np.flatnonzero(np.diff(label, prepend=-1))
    if len(starts):
        for word, seed in enumerate((0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F)):
            words[label[starts], word] += np.add.reduceat(mix(pair + np.uint64(seed)), starts)
    return label[starts].astype(np.intp)


def _joined(parts: Sequence[Transitions]) -> Transitions:
    none = np.zeros(0, dtype=np.int32)
    return Transitions(*(np.concatenate([none, *(part[i] for part in parts)]).astype(np.int32) for i in range(3)))


def _trimmed(classes: Ints, transitions: Transitions, accepting: NDArray[np.bool_], begin: int) -> TokenAutomaton:
    """The states and transitions on paths from state `begin` to an accepting one, with classes that are then equal
    merged. `begin` becomes state 0."""
    reached = _closure(np.arange(len(accepting)) == begin, transitions.source, transitions.target)
    ending = _closure(accepting, transitions.target, transitions.source)
    alive = reached & ending
    alive[begin] = True
    numbers = np.cumsum(alive, dtype=np.int32) - 1
    numbers[begin], numbers[alive.argmax()] = 0, numbers[begin]
    transitions = transitions.where(alive[transitions.source] & alive[transitions.target])
    source, target = numbers[transitions.source], numbers[transitions.target]
    words = np.zeros((int(classes.max()) + 1, 2), dtype=np.uint64)
    _add_hashes(words, Transitions(source, transitions.label, target))
    found, representatives, merged = np.unique(words, axis=0, return_index=True, return_inverse=True)
    del found
    merged = merged.reshape(-1).astype(np.int32)
    kept = np.isin(transitions.label, representatives)
    order = np.lexsort((merged[transitions.label[kept]], source[kept]))
    made = Transitions(source[kept], merged[transitions.label[kept]], target[kept]).where(order)
    kinds = np.zeros(int(alive.sum()), dtype=bool)
    kinds[numbers[alive]] = accepting[alive]
    return TokenAutomaton(merged[classes], made, kinds)


def _closure(marked: NDArray[np.bool_], source: Ints, target: Ints) -> NDArray[np.bool_]:
    """All states that transitions lead to from those that are marked."""
    marked = marked.copy()
    following, starts = _sorted_by(source, target, len(marked))
    new = np.flatnonzero(marked)
    while len(new):
        reached = following[ranges(starts, new)[0]]
        new = np.unique(reached[~marked[reached]])
        marked[new] = True
    return marked


def _sorted_by(source: Ints, target: Ints, count: int) -> tuple[Ints, NDArray[np.int64]]:
    """The targets in the order of their sources, and where those of each source begin, and the end, [count + 1]."""
    order = np.argsort(source, kind="stable")
    return target[order], np.searchsorted(source[order], np.arange(count + 1))
