"""Decides which positions may jump before the network is called: on the host, in float64, without waiting for the
device.

Shapes: B batch, L positions, N = B*L; R candidates of a step, in S sequences.

For networks that output probabilities, the time at which a mask is revealed does not depend on the network, and the
probability that a token changes has a known upper bound (see `Chances`). The host therefore draws one uniform number u
for every position and step, keeps track of the masks, and sends only the candidates to the device:

    a mask with u < reveal     is revealed; the network determines the token
    a token with u < remask    is masked again
    a token with u < change    may jump; f_x determines whether it does (thinning), and the row of f the new token

A step without candidates costs nothing, and a network with a head runs only on sequences that have some.

Sequences are independent, so each advances at its own pace: a step in which something may happen to a sequence is an
*event*, and every network call processes the next event of every sequence in the batch.

    step              0   1   2   3   4   5                    call              0   1   2
    sequence one      .   x   .   .   x   .          ->        sequence one      1   4           (steps of its events)
    sequence two      x   .   .   x   .   x                    sequence two      0   3   5

The number of calls is the largest number of events of a sequence, and all but the last calls are of the whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cedd.dynamics.rules import StepRule
from cedd.network import HostPlaces, Places
from cedd.parameterization import Affine, Leap
from cedd.process import Noise
from cedd.samplers.random_numbers import FlatRows, RandomNumbers, UniformNumbers, Use

ROUNDING = 1e-12
LEEWAY = 1e-9
"""Tolerance for probabilities outside [0, 1] by rounding."""
_LOG_PROBABILITIES = (-math.inf, *map(math.log, (1e-3, 0.1, 0.5, 0.9, 1.0)))
"""Values of log f_x at which step rules are checked."""
_NEVER = np.iinfo(np.int64).max


class Chances(NamedTuple):
    """Probabilities of each of K steps that need no network, float64 [K].

    reveal: of a mask to become a token.    remask: of a token to be masked again.
    change: an upper bound, over all network outputs, on the probability that a token changes.
    floor: the `floor` of a mask's `Leap`.
    """

    reveal: Tensor
    remask: Tensor
    change: Tensor
    floor: Tensor

    @property
    def only_reveals(self) -> bool:
        """Whether tokens change only by being masked again, and masks become tokens with probabilities f."""
        return bool((self.change <= self.remask).all() and (self.floor == 0).all())

    def where(self, condition: Tensor, other: Chances) -> Chances:
        """These probabilities in the steps where `condition` [K] holds, and those of the others elsewhere."""
        return Chances(*(torch.where(condition, mine, its) for mine, its in zip(self, other, strict=True)))


def _leaps(
    rule: StepRule,
    parameterization: Affine,
    noise: Noise,
    earlier: Noise,
    states: Sequence[int],
    log_probs: Sequence[float],
) -> Leap:
    """The leaps [C, K] of C cases, each a state and log f_x, in the steps from noise [K] to earlier [K]."""
    noise, earlier = (each.map(lambda value: value.expand(len(states), -1)) for each in (noise, earlier))
    x, log_prob_x = torch.tensor(states), torch.tensor(log_probs, dtype=torch.float64)
    cases = (log_prob_x[:, None].expand(noise.t.shape), x[:, None].expand(noise.t.shape))
    return rule.leap(parameterization.coefficients(*cases, noise), earlier)


def chances(rule: StepRule, parameterization: Affine, noise: Noise, earlier: Noise) -> Chances:
    """The probabilities in the steps from noise [K] to earlier [K] for a rule that declares `jump_first`. `stay` of a
    token is then monotone in f_x, so its minimum is at f_x = 0 or 1."""
    states = [0, 0] + [noise.vocab_size] * noise.has_mask
    leap = _leaps(rule, parameterization, noise, earlier, states, [-math.inf, 0.0, 0.0][: len(states)])
    change, remask = 1 - torch.minimum(leap.stay[0], leap.stay[1]), leap.remask[0]
    change = torch.where(change - remask > ROUNDING, change, remask)
    if not noise.has_mask:
        return Chances(torch.zeros_like(change), torch.zeros_like(change), change, torch.zeros_like(change))
    reveal = 1 - leap.stay[2]
    # A step to t = 0 reveals all masks, without the rounding error of 1e-16.
    reveal = torch.where(earlier.t == 0, 1.0, reveal)
    return Chances(reveal, remask, change, leap.floor[2])


def check_leaps(rule: StepRule, parameterization: Affine, noise: Noise, earlier: Noise) -> None:
    """Raise a ValueError if a rule gives a probability outside [0, 1] in one of the steps from noise [K] to earlier
    [K], at a mask or at a token of any f_x. At t = 0 the last rule is used instead."""
    before_last = (earlier.t > 0).nonzero().squeeze(1)
    noise, earlier = noise.rows(before_last), earlier.rows(before_last)
    states = [0] * len(_LOG_PROBABILITIES) + [noise.vocab_size] * noise.has_mask
    leap = _leaps(rule, parameterization, noise, earlier, states, [*_LOG_PROBABILITIES, 0.0][: len(states)])
    for name, value in {"stay": leap.stay, "remask": leap.remask, "stay + remask": leap.stay + leap.remask}.items():
        wrong = (~((value >= -LEEWAY) & (value <= 1 + LEEWAY))).nonzero()  # also refuses nan
        if len(wrong):
            case, k = map(int, wrong[0])
            raise ValueError(
                f"the step rule {rule.name!r} has no law from t = {noise.t[k]:.4g} to {earlier.t[k]:.4g}: the "
                f"probability {name!r} of a {'token' if states[case] == 0 else 'mask'} is {value[case, k]:.4g}; use "
                "more steps, or limit it to [0, 1]"
            )


def _flat(flags: Tensor) -> NDArray[np.bool_]:
    """[B, L] -> [N] on the host."""
    return flags.cpu().flatten().numpy()


BLOCK_STEPS = 32
"""Largest number of steps that are planned and sent to the device together."""
MOST_FOLLOWED = 1 << 18
"""Positions of a batch up to which all masks of each of these steps are sent, too, if they are needed."""


def blocks(steps: int, largest: int) -> Iterator[tuple[int, int]]:
    """Blocks of 1, 2, 4, ... steps from 0 to `steps`, so that the device does not wait for a long first block."""
    start, size = 0, 1
    while start < steps:
        stop = min(start + size, steps)
        yield start, stop
        start, size = stop, min(2 * size, largest)


@dataclass(frozen=True)
class Candidates:
    """The positions of one network call: those that may jump, with uniform numbers u (for whether) and v (for the new
    token), and those that are masked again.

    steps: the step that each sequence of the batch is at, [B]; of_rows: the same for each of `places`, [R].
    only_reveals: those that may jump are masks, which become tokens with probabilities f.
    """

    places: Places
    u: Tensor
    v: Tensor
    masked_again: Tensor
    steps: Tensor
    of_rows: Tensor
    only_reveals: bool


class Moves(NamedTuple):
    """Candidates [R] on the host: step, uniform numbers, and whether they are masked again (`back`) or may jump."""

    rows: FlatRows
    steps: FlatRows
    u: UniformNumbers
    v: UniformNumbers
    back: NDArray[np.bool_]

    def of(self, index: NDArray[np.int64] | NDArray[np.bool_] | slice) -> Moves:
        """The candidates at an index."""
        return Moves(self.rows[index], self.steps[index], self.u[index], self.v[index], self.back[index])

    @staticmethod
    def together(moves: Sequence[Moves]) -> Moves:
        """The concatenation."""
        return Moves(*map(np.concatenate, zip(*moves, strict=True)))


class Events:
    """Assigns the steps of B sequences of L positions to network calls: the next event of each to the next call.

    Args:
        busy: which sequences may have events at all, [B].
    """

    def __init__(self, busy: NDArray[np.bool_], length: int) -> None:
        self._busy, self._length = busy, length
        self._counts = np.zeros(len(busy), dtype=np.int64)
        self._waiting: list[Moves] = []
        self._numbers: list[FlatRows] = []
        self._called = 0

    def add(self, moves: Moves) -> None:
        """Add the candidates of the next step."""
        sequences = moves.rows // self._length
        numbers = self._counts[sequences]
        self._waiting.append(moves)
        self._numbers.append(numbers)
        self._counts[sequences] = numbers + 1  # one entry per sequence; all rows of a sequence have the same number

    def calls(self, last: bool) -> list[Moves]:
        """The calls for which the event of every sequence is known; all remaining calls if `last`."""
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

    It uses NumPy, which is faster than torch on a few entries, because the host has to stay ahead of the device.
    """

    def __init__(
        self,
        chances: Chances,
        masked: Tensor,
        held: Tensor,
        random: RandomNumbers,
        by_sequence: bool,
        *,
        follows: bool = False,
    ) -> None:
        self._chances: list[list[float]] = np.asarray(torch.stack(chances).T).tolist()
        self.only_reveals = chances.only_reveals
        """Whether masks become tokens with probabilities f, and tokens stay or are masked again."""
        self.never_remasks = self.only_reveals and not bool(chances.remask.any())
        """Whether masks become tokens with probabilities f, and tokens stay."""
        self._shape = masked.shape
        self._masked = _flat(masked).copy()
        self._free = ~_flat(held)
        self._busy: NDArray[np.bool_] = np.asarray(~held.cpu().all(1))
        self._random, self._by_sequence = random, by_sequence
        self._called = self._masked.copy() if follows else None
        """The masks after the calls so far, in which some sequences may be ahead of others."""

    def observe(self, masked: Tensor) -> None:
        """Set the masks, which an arbitrary constraint may have changed."""
        self._masked = _flat(masked).copy()

    def step(self, k: int) -> Moves:
        """Draw the candidates of step k and update the masks."""
        reveal, remask, change, _ = self._chances[k]
        rows, u = self._random.below(max(reveal, change), Use.JUMP, k)
        was_masked = self._masked[rows]
        limits: UniformNumbers = np.where(was_masked, reveal, change)
        chosen = (u < limits) & self._free[rows]
        rows, u, was_masked = rows[chosen], u[chosen], was_masked[chosen]
        back = ~was_masked & (u < remask)
        self._masked[rows] = back
        return Moves(rows, np.full_like(rows, k), u, self._random.at(rows, Use.TARGET, k), back)

    def _candidates(self, moves: Moves) -> Candidates:
        batch, length = self._shape
        jumps, steps = moves.of(~moves.back), np.zeros(batch, dtype=np.int64)
        steps[jumps.rows // length] = jumps.steps
        u, v, masked_again, steps, of_rows = map(
            torch.as_tensor, (jumps.u, jumps.v, moves.rows[moves.back], steps, jumps.steps)
        )
        host = None
        if (masked := self._called) is not None:
            host = HostPlaces(jumps.rows, np.flatnonzero(masked))
            masked[jumps.rows], masked[moves.rows[moves.back]] = False, True
        places = self._places(jumps.rows, host)
        return Candidates(places, u, v, masked_again, steps, of_rows, self.only_reveals)

    def _places(self, rows: FlatRows, host: HostPlaces | None) -> Places:
        batch, length = self._shape
        if not self._by_sequence or batch == 1:
            return Places(torch.as_tensor(rows), host=host)
        sequence = rows // length
        first = np.ones(len(rows), dtype=np.bool_)
        np.not_equal(sequence[1:], sequence[:-1], out=first[1:])
        sequences = sequence[first]
        if len(sequences) == batch:
            return Places(torch.as_tensor(rows), host=host)
        local = (np.cumsum(first) - 1) * length + rows % length
        return Places(torch.as_tensor(rows), torch.as_tensor(sequences), torch.as_tensor(local), host)

    def block(self, start: int, stop: int, device: torch.device) -> Iterator[Candidates]:
        """The candidates of steps start..stop-1 on the device, with one call per step for all sequences."""
        return self._sent([self.step(k) for k in range(start, stop)], device)

    def calls(self, start: int, stop: int, device: torch.device) -> Iterator[Candidates]:
        """The same for sequences that advance at their own pace, with one call for the next event of each."""
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
            [c.places.rows[:0] if c.places.host is None else c.places.host.masks_on(c.u.device) for c in made],
        )
        sent = (torch.split(torch.cat(kind).to(device, non_blocking=True), [*map(len, kind)]) for kind in kinds)
        for call, rows, local, sequences, u, v, masked_again, steps, of_rows, masks in zip(made, *sent, strict=True):
            if (host := call.places.host) is not None:
                host.sent = masks
            places = Places(rows, None if call.places.sequences is None else sequences, local, host)
            yield Candidates(places, u, v, masked_again, steps, of_rows, call.only_reveals)
