"""The interface of samplers, and what a sampler runs on.

Shapes: B batch, L positions, V vocabulary; R chosen positions; M masks, of which C are drawn.

A `Sampler` declares which methods and processes it supports (`check`), the number of steps per sequence
(`steps_taken`) and the options that it does not use (`unused`), and draws the sequences of a `SamplingRun` (`sample`).
`SAMPLERS` in samplers/registry.py lists them by name.

What a sampler can build on:

- `run.network.rows(x, sigma, places)`: the network's outputs at chosen positions, one noise level per sequence.
- `run.reveal(...)` and `run.reveal_with_confidence(...)`: call the network and draw tokens at masks; the second also
  returns the probability of each token.
- `run.draw_tokens(...)`: tokens from given outputs. Every token that a sampler draws from the network's probabilities
  passes through it, so that a `JointConstraint` can draw instead (samplers/constraints.py).
- `run.uniform(use, step)`: random numbers, which depend on a sequence's seed, the use, the step and the position alone.
- `run.of_sequences(start, stop)`: the run of some of the sequences.

A sampler that generates block by block loops over blocks in `sample`, with a network that sees the clean past.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from cedd.dynamics import Dynamics
from cedd.methods import Method
from cedd.network import MOST_TOGETHER, HostPlaces, Network, Places, flat_places, put_at
from cedd.parameterization import Parameterization, at_token
from cedd.process import TokenProcess
from cedd.samplers.choice import Reveal, Sharpening
from cedd.samplers.constraints import Constraint, Fixed, JointConstraint, WholeDraw, held_positions
from cedd.samplers.grids import last_time, time_grid
from cedd.samplers.options import Callback, SamplingOptions
from cedd.samplers.random_numbers import RandomNumbers, Use

Shared = TypeVar("Shared")

OWN_OPTIONS = ("block_length", "threshold", "place_temperature")
"""Fields of `SamplingOptions` that only some samplers use, which declare them in `Sampler.own_options`."""
STEPS = 256
"""Steps of `cedd.sample` unless given."""


class BlockPlace(Protocol):
    """The texts that the sequences of a run are blocks of."""

    def texts(self, x: Tensor) -> Tensor:
        """The texts up to the end of the block [G B, n], with the tokens x [G B, L] in it."""
        ...

    def of_ancestors(self, rows: Tensor) -> SamplingRun:
        """The run of the block after the texts are replaced by those with these numbers [B], some of which may be the
        same."""
        ...


class RevealCall(NamedTuple):
    """A network call that reveals masks at some places [R], by numbers v [R]; sigma [B]."""

    sigma: Tensor
    places: Places
    v: Tensor


@dataclass(frozen=True, kw_only=True)
class SamplingRun:
    """A run that draws B sequences of L tokens."""

    network: Network
    process: TokenProcess
    method: Method
    length: int
    seeds: Sequence[int]
    """One per sequence."""
    options: SamplingOptions
    sharpening: Sharpening
    constraint: Constraint | None
    part: BlockPlace | None = None
    """Given if the run draws one block of each text."""
    shared: dict[Hashable, Any] = field(default_factory=dict[Hashable, Any], compare=False, repr=False)
    """Values that depend on the process, the method and the options only, computed once for the runs of all blocks."""

    def once(self, key: Hashable, make: Callable[[], Shared]) -> Shared:
        """The value of make(), cached by key and shared with the runs derived from this one."""
        if key not in self.shared:
            self.shared[key] = make()
        return self.shared[key]

    def of_sequences(self, start: int, stop: int) -> SamplingRun:
        """The run of sequences start..stop-1."""
        part, constraint, x_start = slice(start, stop), self.constraint, self.options.x_start
        return replace(
            self,
            network=self.network.of_sequences(part),
            seeds=self.seeds[part],
            constraint=constraint.part(start, stop) if isinstance(constraint, Fixed) else constraint,
            options=self.options if x_start is None else replace(self.options, x_start=x_start[part]),
        )

    @property
    def shape(self) -> tuple[int, int]:
        """(B, L)"""
        return len(self.seeds), self.length

    @property
    def dynamics(self) -> Dynamics:
        return self.method.dynamics

    @property
    def parameterization(self) -> Parameterization:
        return self.method.parameterization

    @property
    def device(self) -> torch.device:
        return self.network.device

    @property
    def callback(self) -> Callback | None:
        return self.options.callback

    @property
    def steps(self) -> int:
        return STEPS if self.options.steps is None else self.options.steps

    @cached_property
    def held(self) -> Tensor:
        """Which positions the constraint holds, [B, L] bool on the host."""
        return held_positions(self.constraint, self.shape)

    @property
    def joint(self) -> JointConstraint | None:
        """The constraint, if it draws the tokens."""
        return self.constraint if isinstance(self.constraint, JointConstraint) else None

    def constrained(self, x: Tensor) -> Tensor:
        """x after the constraint."""
        if self.constraint is None:
            return x
        made = self.constraint(x)
        shape = getattr(made, "shape", None)
        if shape != x.shape:
            got = type(made).__name__ if shape is None else list(shape)
            raise ValueError(f"a constraint must return states of shape {list(x.shape)} (got {got})")
        return made

    def show(self, step: int, t: float, x: Tensor) -> None:
        """Call the callback."""
        if self.callback is not None:
            self.callback(step, t, x)

    # Random numbers

    @cached_property
    def random(self) -> RandomNumbers:
        return RandomNumbers(self.seeds, self.length)

    def uniform(self, use: Use, step: int = 0) -> Tensor:
        """Uniform numbers [B, L] in float64 on the device."""
        return self.random.uniform(use, step).to(self.device)

    # The start

    def times(self) -> Tensor:
        """The time grid of the options, [K + 1], from noise to data."""
        end = max(self.dynamics.end(self.parameterization, self.process), last_time(self.process))
        grid = self.dynamics.grid if self.options.grid is None else self.options.grid
        start, final = self.options.t_start, self.options.final_denoise
        return time_grid(self.process, self.steps, grid, start=start, end=end, final_denoise=final)

    def start(self, noise: Callable[[], Tensor] | None = None) -> Tensor:
        """The states [B, L] to start from: those of the options, or noise (by default that of t = 1); constrained."""
        given = self.options.x_start
        if given is not None:
            x = given.to(self.device, torch.int64, copy=True)
        else:
            x = self.noise() if noise is None else noise()
        return self.constrained(x)

    def masks(self) -> Tensor:
        """[B, L]"""
        return torch.full(self.shape, self.process.vocab_size, device=self.device)

    def noise(self) -> Tensor:
        """Noise at t = 1, [B, L]: uniform tokens, except for excluded ones, that are then masked by the process. With a
        `JointConstraint` there are only masks, because the constraint would not draw the few tokens that a process with
        eps > 0 leaves.
        """
        if self.joint is not None and not self.process.can_shuffle:
            return self.masks()
        allowed = torch.arange(self.process.vocab_size)
        if self.sharpening.excluded:
            allowed = allowed[~torch.isin(allowed, torch.tensor(self.sharpening.excluded))]
        u, only = self.random.uniform(Use.TOKEN), self.network.only
        tokens = allowed[(u * len(allowed)).long()]
        if only is not None:
            possible = allowed[only.tokens.cpu()[allowed]]
            tokens = torch.where(only.where.cpu(), possible[(u * len(possible)).long()], tokens)
        masked = self.random.uniform(Use.MASK) < self.process.kernel(1.0).a
        return tokens.masked_fill_(masked, self.process.vocab_size).to(self.device)

    # Tokens

    def draw_tokens(self, x: Tensor, rows: Tensor, outputs: Tensor, chosen: Tensor | slice, v: Tensor) -> Tensor:
        """Tokens [C] drawn from softmax(outputs [M, V]) after sharpening, given the joint constraint if there is one.

        Args:
            x: the states [B, L].
            rows: the positions of the outputs in the flattened batch, [M].
            outputs: of the network, for a `JointConstraint` at all masks of their sequences.
            chosen: which of them are drawn, as indices [C] into rows.
            v: uniform numbers [C].
        """
        if self.joint is None:
            return self.sharpening.draw(outputs[chosen], v)
        which = torch.arange(len(rows))[chosen] if isinstance(chosen, slice) else chosen.cpu()
        return self.joint.draw(x, rows.cpu(), outputs, self.sharpening, which, v)

    def log_marginals(self, x: Tensor, rows: Tensor, outputs: Tensor) -> Tensor:
        """The log-probabilities [M, V] from which confidence orders rank all masks `rows` [M] of some sequences:
        those of the network or of a `JointConstraint`, without temperature and top-p."""
        if self.joint is None:
            return self.sharpening.plain.log_probs(outputs)
        return self.joint.log_marginals(x, rows.cpu(), outputs, self.sharpening.plain)

    def reveal(self, x: Tensor, sigma: Tensor, places: Places, v: Tensor) -> Tensor:
        """Tokens [R] for masks of x [B, L], from one network call at sigma [] or [B], by uniform numbers v [R]."""
        if self.joint is not None:
            return self._reveal(x, sigma, places.rows, v, host=places.host)
        outputs = self.network.rows(x, sigma, places, full_precision=True)
        return outputs.apply(Reveal(self.sharpening), (v,))

    @cached_property
    def _whole_draw(self) -> WholeDraw | None:
        if self.joint is None or self.network.recorder is None:
            return None
        return self.joint.whole_draw(self.sharpening, self.device)

    @cached_property
    def _undrawn(self) -> Tensor:
        """-1 for each position, [B * L]."""
        return torch.full((len(self.seeds) * self.length,), -1.0, dtype=torch.float64, device=self.device)

    def revealed(self, x: Tensor, sigma: Tensor, places: Places, v: Tensor) -> Tensor:
        """x [B, L] after `reveal`, which is recorded together with the head if possible."""
        host, draw = places.host, self._whole_draw
        if draw is not None and host is not None:
            numbers = self._undrawn.index_copy(0, places.rows, v).view(x.shape)
            if found := self.network.recorded(x, sigma, host.masks_on(x.device), draw, numbers, *draw.constants):
                x, number = found
                self.network.check.add(number, draw.error)
                return x
        return put_at(x, places.rows, self.reveal(x, sigma, places, v))

    @property
    def reveals_together(self) -> bool:
        """Whether several calls may be recorded together."""
        few = len(self.seeds) * self.length <= MOST_TOGETHER
        few &= self.joint is None and Reveal(self.sharpening).of_tensors
        return few and self.network.reveal_recorder is not None

    def revealed_in_turn(self, x: Tensor, calls: Iterable[RevealCall]) -> Tensor:
        """x [B, L] after these calls of `revealed`, recorded together if possible."""
        if self.reveals_together:
            calls = list(calls)
            if calls and (found := self._revealed_together(x, calls)) is not None:
                return found
        for call in calls:
            x = self.revealed(x, *call)
        return x

    def _revealed_together(self, x: Tensor, calls: Sequence[RevealCall]) -> Tensor | None:
        shape, device = (len(calls), x.numel()), x.device
        rows = torch.cat([call.places.rows + number * shape[1] for number, call in enumerate(calls)])
        when = torch.zeros(shape, dtype=torch.bool, device=device).view(-1).index_fill_(0, rows, True).view(shape)
        v = torch.zeros(shape, dtype=torch.float64, device=device)
        v.view(-1).index_copy_(0, rows, torch.cat([call.v for call in calls]).double())
        sigma = torch.stack([call.sigma for call in calls])
        return self.network.reveals(x, sigma, when, v, Reveal(self.sharpening))

    def reveal_with_confidence(self, x: Tensor, sigma: Tensor, rows: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The same for ascending flat positions `rows` [R], with the probability of each token, [R]."""
        probs = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
        return self._reveal(x, sigma, rows, v, probs), probs

    def _reveal(
        self,
        x: Tensor,
        sigma: Tensor,
        rows: Tensor,
        v: Tensor,
        probs: Tensor | None = None,
        host: HostPlaces | None = None,
    ) -> Tensor:
        """Tokens at ascending flat positions [R]; their probabilities are written to `probs` [R]."""
        if not len(rows):
            return rows
        tokens, draw = torch.zeros_like(rows), None
        places, masks, which, counts = Places(rows), rows, rows, None
        if self.joint is not None:
            places, masks, which, counts = self._all_masks(x, rows, host)
            if not (self.network.one_by_one and len(x) > 1):  # mostly one chunk
                draw = self.joint.prepared(x, masks, self.sharpening, which)
        for outputs, part in self.network.rows(x, sigma, places, full_precision=True).chunks(counts):
            if draw is not None and probs is None and part.stop - part.start == len(places):
                return draw(outputs, v)
            if self.joint is None:
                here, chosen = part, slice(None)
            elif part.stop - part.start == len(places):
                here, chosen = slice(None), which
            else:
                here = flat_places((which >= part.start) & (which < part.stop))
                chosen = which[here] - part.start
            tokens[here] = self.draw_tokens(x, masks[part], outputs, chosen, v[here])
            if probs is not None:
                probs[here] = at_token(self.sharpening.log_probs(outputs[chosen].double()), tokens[here]).exp()
        return tokens

    def _all_masks(
        self, x: Tensor, rows: Tensor, host: HostPlaces | None
    ) -> tuple[Places, Tensor, Tensor, Sequence[int]]:
        """All masks of the sequences that have some of the rows [R]; on the host, these masks, which of them the rows
        are, and how many each of these sequences has. Unless the host has both, the call waits for a GPU here."""
        if host is None:
            masks, own = np.flatnonzero(np.asarray((x == self.process.vocab_size).cpu())), np.asarray(rows.cpu())
        else:
            masks, own = host.masks, host.rows
        has_rows = np.zeros(len(x), dtype=np.bool_)
        has_rows[own // self.length] = True
        masks = masks[has_rows[masks // self.length]]
        sequences, rank = np.flatnonzero(has_rows), np.cumsum(has_rows) - 1
        local = rank[masks // self.length] * self.length + masks % self.length
        counts: list[int] = np.bincount(local // self.length).tolist()
        parts = masks, sequences, local
        together = torch.as_tensor(np.concatenate(parts)).to(x.device, non_blocking=True)
        sent = torch.split(together, [*map(len, parts)])
        return (
            Places(sent[0], sent[1], sent[2]),
            torch.as_tensor(masks),
            torch.as_tensor(np.searchsorted(masks, own)),
            counts,
        )


class Sampler(ABC):
    """Draws the sequences of a `SamplingRun`. A subclass defines `sample`, and `check` if it has limits."""

    name: str
    """The name in `SAMPLERS` and in error messages."""
    noisy: ClassVar[bool] = True
    """Whether it goes from noise to data. Autoregressive methods have no noise, and use their own sampler instead."""
    unused: ClassVar[tuple[str, ...]] = ()
    """Fields of `SamplingOptions` that have no effect."""
    own_options: ClassVar[tuple[str, ...]] = ()
    """Those of `OWN_OPTIONS` that it uses."""
    draws_jointly: ClassVar[bool] = False
    """Whether it draws all tokens by `SamplingRun.draw_tokens`, so that a `JointConstraint` can draw them instead."""
    draws_together: ClassVar[bool] = False
    """Whether the sequences of a run depend on each other, so that those that have ended belong to it too."""

    def check(self, method: Method, process: TokenProcess, constraint: Constraint | None = None) -> None:
        """Raise a ValueError for unsupported combinations; the message names an alternative."""
        del method, process
        if isinstance(constraint, JointConstraint) and not self.draws_jointly:
            raise ValueError(
                f"the sampler {self.name} cannot write texts under a constraint (a regular expression, choices, a JSON "
                "schema); use sampler='first-hitting' with a model that only masks (process absorb)"
            )

    def steps_taken(self, steps: int, length: int) -> int:
        """The number of steps for a sequence of `length` tokens, if the options ask for `steps`."""
        del length
        return steps

    def tokens_are_final(self, method: Method, process: TokenProcess) -> bool:
        """Whether a token never changes once it is drawn."""
        del method, process
        return False

    @abstractmethod
    def sample(self, run: SamplingRun) -> Tensor:
        """The sequences of the run, [B, L]."""

    def texts(self, run: SamplingRun, write: Callable[[Sampler, SamplingRun], Tensor]) -> Tensor:
        """The texts of the run, [B, L], which `write` writes by a sampler, at once or block by block."""
        return write(self, run)


def sample_at_once(sampler: Sampler, run: SamplingRun) -> Tensor:
    """The sequences of a run, [B, L]."""
    return sampler.sample(run)
