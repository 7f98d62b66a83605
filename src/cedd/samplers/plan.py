"""Who may jump, decided before the network is asked: on the host, in float64, without waiting for the device.

Shapes: B batch, L positions, N = B*L; R candidates of a step, in S sequences.

For a parameterization by probabilities, when a mask is revealed does not depend on the network, and a token becomes
another one with at most a known probability (see `Chances`). So the host draws one uniform number u for every
position and step, knows which positions are masked at every step, and sends the device only the candidates:

    a mask with u < reveal     is revealed, the network says as what
    a token with u < remask    is masked again
    a token with u < change    may jump; the network's f_x says whether (thinning), and its row where to

A step without candidates costs nothing, and a network that can runs only on sequences that have some.

Texts are independent of each other, so none has to wait for the others' steps. A step in which something happens to a
text is an *event* of it, and one call of the network serves the next event of every text, each at its own time:

    step          0   1   2   3   4   5                    call          0   1   2
    text one      .   x   .   .   x   .          ->        text one      1   4           (the steps of its events)
    text two      x   .   .   x   .   x                    text two      0   3   5

There are as many calls as the busiest text has events, and all but the last ones are of the whole batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cedd.dynamics.rules import StepRule
from cedd.network import Places
from cedd.parameterization import Affine, Leap
from cedd.process import Noise
from cedd.samplers.draws import Draws, Numbers, Rows, Use

ROUNDING = 1e-12
_NEVER = np.iinfo(np.int64).max


class Chances(NamedTuple):
    """Probabilities of each of K steps that need no network, float64 [K].

    reveal: that a mask becomes a token.    remask: that a token is masked again.
    change: the most with which a token can become anything else, whatever the network says.
    floor: what a mask becomes a token by, besides its probability (see `Leap`).
    """

    reveal: Tensor
    remask: Tensor
    change: Tensor
    floor: Tensor

    @property
    def only_reveals(self) -> bool:
        """Whether tokens stay until they are masked again, and masks become what f says."""
        return bool((self.change <= self.remask).all() and (self.floor == 0).all())

    def where(self, condition: Tensor, other: Chances) -> Chances:
        """These chances in the steps where `condition` [K] holds, the others' elsewhere."""
        return Chances(*(torch.where(condition, mine, its) for mine, its in zip(self, other, strict=True)))


def chances(rule: StepRule, parameterization: Affine, noise: Noise, earlier: Noise) -> Chances:
    """The chances of the steps from noise [K] to earlier [K], of a rule that declares `jump_first`: `stay` of a token
    is then monotone in f_x, and its least value is at f_x = 0 or 1."""
    token = torch.zeros_like(noise.t, dtype=torch.int64)

    def leap(x: Tensor, log_prob: float) -> Leap:
        log_prob_x = torch.full_like(noise.t, log_prob)
        return rule.leap(parameterization.coefficients(log_prob_x, x, noise), earlier)

    doubtful, certain = leap(token, -torch.inf), leap(token, 0.0)
    change, remask = 1 - torch.minimum(doubtful.stay, certain.stay), doubtful.remask
    change = torch.where(change - remask > ROUNDING, change, remask)
    if not noise.has_mask:
        return Chances(torch.zeros_like(change), torch.zeros_like(change), change, torch.zeros_like(change))
    at_mask = leap(torch.full_like(token, noise.vocab_size), 0.0)
    reveal = 1 - at_mask.stay
    # Clean data have no masks: a step to t = 0 reveals all of them, not all but one in 10^16.
    reveal = torch.where(earlier.t == 0, 1.0, reveal)
    return Chances(reveal, remask, change, at_mask.floor)


def _flat(flags: Tensor) -> NDArray[np.bool_]:
    """[B, L] -> [N] on the host."""
    return flags.cpu().flatten().numpy()


BLOCK_STEPS = 32
"""Steps that are planned and sent to the device together, at most."""


def blocks(steps: int, largest: int) -> Iterator[tuple[int, int]]:
    """From 0 to `steps` in blocks of 1, 2, 4, ... up to the largest: the device is not to wait for a long first one."""
    start, size = 0, 1
    while start < steps:
        stop = min(start + size, steps)
        yield start, stop
        start, size = stop, min(2 * size, largest)


@dataclass(frozen=True)
class Candidates:
    """The positions of one call of the network: those that may jump with their uniform numbers (u: whether, v: where
    to), and those that are masked again.

    steps: the step that each sequence of the batch is at, [B]; of_rows: the same for each of `places`, [R].
    only_reveals: those that may jump are masks, and they become what f says.
    """

    places: Places
    u: Tensor
    v: Tensor
    masked_again: Tensor
    steps: Tensor
    of_rows: Tensor
    only_reveals: bool


class Moves(NamedTuple):
    """What may happen to positions [R], on the host: in which step, by which numbers, and whether they are masked again
    (`back`) or may jump."""

    rows: Rows
    steps: Rows
    u: Numbers
    v: Numbers
    back: NDArray[np.bool_]

    def of(self, index: NDArray[np.int64] | NDArray[np.bool_] | slice) -> Moves:
        """Those of an index."""
        return Moves(self.rows[index], self.steps[index], self.u[index], self.v[index], self.back[index])

    @staticmethod
    def together(moves: Sequence[Moves]) -> Moves:
        """One after the other."""
        return Moves(*map(np.concatenate, zip(*moves, strict=True)))


class Events:
    """Steps of B texts of L positions, dealt out to calls of the network: the next event of each text to the next call.

    Args:
        busy: which texts may have events at all, [B].
    """

    def __init__(self, busy: NDArray[np.bool_], length: int) -> None:
        self._busy, self._length = busy, length
        self._counts = np.zeros(len(busy), dtype=np.int64)
        self._waiting: list[Moves] = []
        self._numbers: list[Rows] = []
        self._called = 0

    def add(self, moves: Moves) -> None:
        """The step after those that were added before."""
        texts = moves.rows // self._length
        numbers = self._counts[texts]
        self._waiting.append(moves)
        self._numbers.append(numbers)
        self._counts[texts] = numbers + 1  # once for each text: its rows all have the same number

    def calls(self, last: bool) -> list[Moves]:
        """The calls for which each text has its event by now; all, if no step is to be added any more (`last`)."""
        stop = int(self._counts.max() if last else self._counts[self._busy].min(initial=_NEVER))
        if not self._called < stop < _NEVER:
            return []
        moves, numbers = Moves.together(self._waiting), np.concatenate(self._numbers)
        order = np.lexsort((moves.rows, numbers))
        moves, numbers = moves.of(order), numbers[order]
        edges = np.searchsorted(numbers, np.arange(self._called, stop + 1))
        self._waiting, self._numbers, self._called = [moves.of(slice(edges[-1], None))], [numbers[edges[-1] :]], stop
        return [moves.of(slice(first, end)) for first, end in pairwise(edges)]


class Plan:
    """Follows which positions are masked, step by step.

    In NumPy, whose calls on a handful of entries cost a fraction of torch's: the host has to be ahead of the device.
    """

    def __init__(self, chances: Chances, masked: Tensor, held: Tensor, draws: Draws, by_sequence: bool) -> None:
        self._chances: list[list[float]] = np.asarray(torch.stack(chances).T).tolist()
        self._only_reveals = chances.only_reveals
        self._shape = masked.shape
        self._masked = _flat(masked).copy()
        self._free = ~_flat(held)
        self._busy: NDArray[np.bool_] = np.asarray(~held.cpu().all(1))
        self._draws, self._by_sequence = draws, by_sequence

    def observe(self, masked: Tensor) -> None:
        """Take the masks as they are: a constraint of which nothing is known may have changed them."""
        self._masked = _flat(masked).copy()

    def step(self, k: int) -> Moves:
        """Draw the candidates of step k and move the masks."""
        reveal, remask, change, _ = self._chances[k]
        rows, u = self._draws.below(max(reveal, change), Use.JUMP, k)
        was_masked = self._masked[rows]
        limits: Numbers = np.where(was_masked, reveal, change)
        chosen = (u < limits) & self._free[rows]
        rows, u, was_masked = rows[chosen], u[chosen], was_masked[chosen]
        back = ~was_masked & (u < remask)
        self._masked[rows] = back
        return Moves(rows, np.full_like(rows, k), u, self._draws.at(rows, Use.TARGET, k), back)

    def _candidates(self, moves: Moves) -> Candidates:
        batch, length = self._shape
        jumps, steps = moves.of(~moves.back), np.zeros(batch, dtype=np.int64)
        steps[jumps.rows // length] = jumps.steps
        u, v, masked_again, steps, of_rows = map(
            torch.as_tensor, (jumps.u, jumps.v, moves.rows[moves.back], steps, jumps.steps)
        )
        return Candidates(self._places(jumps.rows), u, v, masked_again, steps, of_rows, self._only_reveals)

    def _places(self, rows: Rows) -> Places:
        batch, length = self._shape
        if not self._by_sequence or batch == 1:
            return Places(torch.as_tensor(rows))
        sequence = rows // length
        first = np.ones(len(rows), dtype=np.bool_)
        np.not_equal(sequence[1:], sequence[:-1], out=first[1:])
        sequences = sequence[first]
        if len(sequences) == batch:
            return Places(torch.as_tensor(rows))
        local = (np.cumsum(first) - 1) * length + rows % length
        return Places(*map(torch.as_tensor, (rows, sequences, local)))

    def block(self, start: int, stop: int, device: torch.device) -> Iterator[Candidates]:
        """The candidates of steps start..stop-1, on the device: a call for each step, for all texts together."""
        return self._sent([self.step(k) for k in range(start, stop)], device)

    def calls(self, start: int, stop: int, device: torch.device) -> Iterator[Candidates]:
        """The same for texts that do not wait for each other: a call for the next event of each."""
        events = Events(self._busy, self._shape[1])
        for first, end in blocks(stop - start, BLOCK_STEPS):
            for k in range(start + first, start + end):
                events.add(self.step(k))
            yield from self._sent(events.calls(last=start + end == stop), device)

    def _sent(self, calls: Sequence[Moves], device: torch.device) -> Iterator[Candidates]:
        """Candidates on the device, in one transfer for each kind of number."""
        made = [self._candidates(moves) for moves in calls]
        if device.type == "cpu" or not made:
            yield from made
            return
        kinds = (
            [c.places.rows for c in made],
            [c.places.index for c in made],
            [c.places.sequences if c.places.sequences is not None else c.places.rows[:0] for c in made],
            [c.u for c in made],
            [c.v for c in made],
            [c.masked_again for c in made],
            [c.steps for c in made],
            [c.of_rows for c in made],
        )
        sent = (torch.split(torch.cat(kind).to(device, non_blocking=True), [*map(len, kind)]) for kind in kinds)
        for call, rows, local, sequences, u, v, masked_again, steps, of_rows in zip(made, *sent, strict=True):
            places = Places(rows, None if call.places.sequences is None else sequences, local)
            yield Candidates(places, u, v, masked_again, steps, of_rows, call.only_reveals)
