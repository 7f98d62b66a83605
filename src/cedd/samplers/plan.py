"""Who may jump, decided before the network is asked: on the host, in float64, without waiting for the device.

Shapes: B batch, L positions, N = B*L; R candidates of a step, in S sequences.

For a parameterization by probabilities, when a mask is revealed does not depend on the network, and a token becomes
another one with at most a known probability (see `Chances`). So the host draws one uniform number u for every
position and step, knows which positions are masked at every step, and sends the device only the candidates:

    a mask with u < reveal     is revealed, the network says as what
    a token with u < remask    is masked again
    a token with u < change    may jump; the network's f_x says whether (thinning), and its row where to

A step without candidates costs nothing, and a network that can runs only on sequences that have some.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
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
    """The positions of one step: those that may jump with their uniform numbers (u: whether, v: where to), and
    those that are masked again.

    only_reveals: those that may jump are masks, and they become what f says.
    """

    places: Places
    u: Tensor
    v: Tensor
    masked_again: Tensor
    only_reveals: bool


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
        self._draws, self._by_sequence = draws, by_sequence

    def observe(self, masked: Tensor) -> None:
        """Take the masks as they are: a constraint of which nothing is known may have changed them."""
        self._masked = _flat(masked).copy()

    def step(self, k: int) -> Candidates:
        """Draw the candidates of step k and move the masks."""
        reveal, remask, change, _ = self._chances[k]
        rows, u = self._draws.below(max(reveal, change), Use.JUMP, k)
        was_masked = self._masked[rows]
        limits: Numbers = np.where(was_masked, reveal, change)
        chosen = (u < limits) & self._free[rows]
        rows, u, was_masked = rows[chosen], u[chosen], was_masked[chosen]
        back = ~was_masked & (u < remask)
        self._masked[rows] = back
        masked_again, rows, u = rows[back], rows[~back], u[~back]
        numbers, other = torch.as_tensor(u), torch.as_tensor(self._draws.at(rows, Use.TARGET, k))
        return Candidates(self._places(rows), numbers, other, torch.as_tensor(masked_again), self._only_reveals)

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
        """The candidates of steps start..stop-1, on the device, in one transfer for each kind of number."""
        steps = [self.step(k) for k in range(start, stop)]
        if device.type == "cpu":
            yield from steps
            return
        kinds = (
            [c.places.rows for c in steps],
            [c.places.index for c in steps],
            [c.places.sequences if c.places.sequences is not None else c.places.rows[:0] for c in steps],
            [c.masked_again for c in steps],
            [c.u for c in steps],
            [c.v for c in steps],
        )
        sent = (torch.split(torch.cat(kind).to(device, non_blocking=True), [*map(len, kind)]) for kind in kinds)
        for step, rows, local, sequences, masked_again, u, v in zip(steps, *sent, strict=True):
            places = Places(rows, None if step.places.sequences is None else sequences, local)
            yield Candidates(places, u, v, masked_again, step.only_reveals)
