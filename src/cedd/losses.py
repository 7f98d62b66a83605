"""The training loss: noise the data, run the network, and cost the rows that count.

Shapes: B batch, L positions, V vocabulary, D width; N rows are the positions that count.

`NoisyBatch` is made on the CPU, where the number of rows is known without waiting for the device; the network then
runs on the device. A network that offers `features` and a head with losses of its own (`network.SupportsRows`) never
makes [B, L, V] outputs: its head runs on the N rows, a chunk at a time. Any other callable is run as it is.

Times are stratified: the batch is cut into as many strata of [low, high] as it has sequences, and one time is drawn in
each. They are strata of the *global* batch: every rank draws the same list and takes its own part, so that the number
of ranks changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from typing import NamedTuple, cast

import torch
from torch import Tensor

from cedd.device import has_float64
from cedd.methods import Method, get_method
from cedd.network import AnyModel, OutputCheck, check_extras, checked_outputs, no_numbers, supports_rows
from cedd.objectives.objective import Rows
from cedd.process import Noise, TokenProcess, uniform_noise, uniform_tokens
from cedd.schedules import Time, check_times


def draw_times(
    count: int,
    generator: torch.Generator | None = None,
    *,
    stratified: bool = True,
    low: float = 1e-3,
    high: float = 1.0,
) -> Tensor:
    """`count` times in [low, high], float64 on the CPU; one in each stratum, in random order, or independent."""
    if count < 1:
        raise ValueError(f"a batch needs at least one sequence; got {count}")
    if not 0.0 <= low < high <= 1.0:
        raise ValueError(f"training times must lie in [0, 1], the lowest below the highest; got {low!r} and {high!r}")
    u = torch.rand(count, generator=generator, dtype=torch.float64)
    if stratified:
        u = (torch.randperm(count, generator=generator) + u) / count
    return low + (high - low) * u


@dataclass(frozen=True)
class NoisyBatch:
    """A batch ready for the network: its input [B, L], sigma [B] float32, and the rows that count, with their
    distinct places [N] in the flattened batch."""

    inputs: Tensor
    sigma: Tensor
    places: Tensor
    rows: Rows
    counts: Tensor | None = None
    """[N] float32: 1 for a row that counts, 0 for padding, which gives all batches one shape. None: all rows count."""

    @property
    def tokens(self) -> int:
        return self.inputs.numel()

    def map(self, function: Callable[[Tensor], Tensor]) -> NoisyBatch:
        """The same batch with `function` applied to each of its tensors."""
        rows = Rows(function(self.rows.x0), function(self.rows.x_t), self.rows.noise.map(function))
        counts = None if self.counts is None else function(self.counts)
        return NoisyBatch(function(self.inputs), function(self.sigma), function(self.places), rows, counts)

    def to(self, device: torch.device | str) -> NoisyBatch:
        """On another device, without waiting (its float64 fields in float32 where the device has none)."""
        narrow = not has_float64(device)

        def move(v: Tensor) -> Tensor:
            return (v.float() if narrow and v.dtype == torch.float64 else v).to(device, non_blocking=True)

        return self.map(move)


@dataclass(frozen=True)
class Draws:
    """The randomness of a batch: uniform numbers and uniform tokens, [B, L] each."""

    u: Tensor
    redraw: Tensor

    @staticmethod
    def make(shape: tuple[int, ...], vocab_size: int, device: torch.device, generator: torch.Generator | None) -> Draws:
        u = uniform_noise(shape, device, generator)
        return Draws(u, uniform_tokens(shape, vocab_size, device, generator))

    def part(self, sequences: slice) -> Draws:
        return Draws(self.u[sequences], self.redraw[sequences])


def noisy_batch(
    method: Method, process: TokenProcess, x0: Tensor, t: Tensor, draws: Draws, capacity: int | None = None
) -> NoisyBatch:
    """x_t for clean tokens x0 [B, L] at times t [B], and the rows that count, padded to `capacity` if given."""
    noise = process.noise(t).to(x0.device)
    x_t = noise.move(x0, draws.u, draws.redraw)
    chosen = method.dynamics.positions(x_t, noise.like(x_t)).reshape(-1)
    filled = filled_up(chosen, capacity)
    places = filled.places
    # A row of padding is a copy of the first row: its loss is finite, and has weight 0.
    origins = places if filled.counts is None else torch.where(filled.counts > 0, places, places[0])
    sequences = origins // x0.shape[1]
    rows = Rows(x0.reshape(-1)[origins], x_t.reshape(-1)[origins], noise.map(lambda v: v[sequences]))
    inputs = method.dynamics.network_input(x0, x_t, process)
    sigma = noise.sigma.to(device=x0.device, dtype=torch.float32)
    return NoisyBatch(inputs, sigma, places, rows, filled.counts)


class FilledUp(NamedTuple):
    """Distinct places, and which of them count (None: all)."""

    places: Tensor
    counts: Tensor | None


def filled_up(chosen: Tensor, capacity: int | None) -> FilledUp:
    """The chosen places of a flattened batch [B*L], padded with others to `capacity`: all batches get one shape.

    No padding is added where none or more than `capacity` are chosen, or where it would reach the whole batch.
    """
    places = chosen.nonzero().squeeze(-1)
    number = len(places)
    if capacity is None or not 0 < number <= capacity < len(chosen):
        return FilledUp(places, None)
    others = chosen.logical_not().nonzero().squeeze(-1)[: capacity - number]
    counts = torch.zeros(capacity, device=chosen.device)
    counts[:number] = 1.0
    return FilledUp(torch.cat([places, others]), counts)


_NOISE_TENSORS = tuple(f.name for f in fields(Noise) if f.name not in ("vocab_size", "has_mask"))


@cache
def row_function(method: Method, vocab_size: int, has_mask: bool) -> Callable[..., Tensor]:
    """The method's loss of one row as a function of outputs and plain [N] tensors.

    One and the same function for the same arguments, so that a compiler sees it once.
    """

    def row_loss(outputs: Tensor, x0: Tensor, x_t: Tensor, *noise: Tensor) -> Tensor:
        levels = Noise(vocab_size, has_mask, **dict(zip(_NOISE_TENSORS, noise, strict=True)))
        return method.objective.row_loss(method.parameterization, outputs, Rows(x0, x_t, levels))

    return row_loss


def batch_loss(method: Method, model: AnyModel, batch: NoisyBatch, **extras: Tensor) -> Tensor:
    """The loss in nats per token of the batch: the sum over its rows, divided by B*L."""
    check_extras(extras, len(batch.inputs))
    rows, noise, counts = batch.rows, batch.rows.noise, batch.counts
    if not supports_rows(model):
        made = cast(Callable[..., object], model)(batch.inputs, batch.sigma, **extras)
        outputs = checked_outputs(made, (*batch.inputs.shape, noise.vocab_size))
        if outputs.device.type == "cpu":
            OutputCheck().look_at(outputs)
        losses = method.objective.row_loss(method.parameterization, outputs.flatten(0, 1)[batch.places], rows)
        return (losses if counts is None else losses * counts).sum() / batch.tokens
    wanted = extras if counts is None else {**extras, "where": batch.places}
    features = model.rows(model.features(batch.inputs, batch.sigma, **wanted), batch.places)
    # What the mean divides by is the weights' here: of the total it would be a sweep over the head's gradient.
    exact = torch.promote_types(features.dtype, torch.float32)
    each = 1 / batch.tokens
    shares = features.new_full((len(features),), each, dtype=exact) if counts is None else each * counts.to(exact)
    simple = method.objective.closed_form(method.parameterization, rows)
    if simple is not None and hasattr(model.head, simple.way):
        return simple.total(model.head, features, shares)
    row_loss = row_function(method, noise.vocab_size, noise.has_mask)
    arguments = (rows.x0, rows.x_t, *(getattr(noise, name) for name in _NOISE_TENSORS))
    return model.head.loss(features, row_loss, arguments, shares).total


def loss(
    method: str | Method,
    process: TokenProcess,
    model: AnyModel,
    x0: Tensor,
    t: Time | None = None,
    generator: torch.Generator | None = None,
    **extras: Tensor,
) -> Tensor:
    """A training loss, in nats per token, of any callable model(x_t [B, L], sigma [B]) -> [B, L, V].

    x0 [B, L] are clean tokens; t [B] are times, stratified over [1e-3, 1] if not given. Extras (a label [B], say) are
    handed to the network: model(x_t, sigma, **extras).

    On a CPU, outputs that are nan or infinite are refused. On a GPU that would wait for the device at every step of a
    training loop: there the loss is nan.
    """
    chosen = get_method(method)
    chosen.check(process)
    process.check_tokens(x0)
    if x0.dim() != 2 or x0.numel() == 0:
        raise ValueError(f"x0 must be a batch of sequences [B, L]; got shape {tuple(x0.shape)}")
    if t is None:
        cpu_generator = generator if generator is None or generator.device.type == "cpu" else None
        time = draw_times(len(x0), cpu_generator)
    else:
        time = check_times(t, x0, "x0", by_position=False).expand(len(x0))  # the network is told one a sequence
    home = x0.device if has_float64(x0.device) else torch.device("cpu")
    draws = Draws.make(tuple(x0.shape), process.vocab_size, home, generator)
    batch = noisy_batch(chosen, process, x0.to(home), time.to(home), draws)
    total = batch_loss(chosen, model, batch if home == x0.device else batch.to(x0.device), **extras)
    if total.device.type == "cpu" and math.isnan(total.detach()):
        raise no_numbers()
    return total
