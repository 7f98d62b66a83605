"""The training loss: noise the data, run the network, and cost the rows that count.

Shapes: B batch, L positions, V vocabulary, D width; N rows are the positions that count.

`NoisyBatch` is made on the CPU, where the number of rows is known without waiting for the device; the network then
runs on the device. A network that offers `features` and a `head_loss` (see SupportsHeadLoss) never makes
[B, L, V] outputs: its head runs on the N rows, a chunk at a time. Any other callable is run as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from cedd.objectives.methods import Method, get_method
from cedd.objectives.objective import CrossEntropyRows, Rows
from cedd.objectives.times import draw_times
from cedd.process import TokenProcess
from cedd.schedules import Time, check_time

Model = Callable[[Tensor, Tensor], Tensor]
RowLoss = Callable[[Tensor, slice], Tensor]


@runtime_checkable
class SupportsHeadLoss(Protocol):
    """A network whose vocabulary head can be run on chosen rows, in chunks, with its loss."""

    def features(self, x_t: Tensor, sigma: Tensor) -> Tensor:
        """[B, L] tokens -> [B, L, D], just before the vocabulary head."""
        ...

    def head_loss(self, features: Tensor, row_loss: RowLoss) -> Tensor:
        """The sum of row_loss(outputs of a chunk of rows, which rows) over chunks of features [N, D]."""
        ...

    def head_cross_entropy(self, features: Tensor, rows: CrossEntropyRows) -> Tensor:
        """The sum of weighted cross entropies over features [N, D]."""
        ...


@dataclass(frozen=True)
class NoisyBatch:
    """A batch ready for the network: its input [B, L], sigma [B] float32, and the rows that count, with their
    places [N] in the flattened batch."""

    inputs: Tensor
    sigma: Tensor
    places: Tensor
    rows: Rows

    @property
    def tokens(self) -> int:
        return self.inputs.numel()

    def to(self, device: torch.device | str) -> NoisyBatch:
        """On another device, without waiting."""

        def move(v: Tensor) -> Tensor:
            return v.to(device, non_blocking=True)

        rows = Rows(move(self.rows.x0), move(self.rows.x_t), self.rows.noise.map(move))
        return NoisyBatch(move(self.inputs), move(self.sigma), move(self.places), rows)


def noisy_batch(
    method: Method, process: TokenProcess, x0: Tensor, t: Tensor, generator: torch.Generator | None = None
) -> NoisyBatch:
    """Draw x_t for clean tokens x0 [B, L] at times t [B] and pick the rows that count."""
    noise = process.noise(t).to(x0.device)
    x_t = noise.sample(x0, generator)
    wide = noise.like(x_t)
    places = method.objective.positions(x_t, wide).reshape(-1).nonzero().squeeze(-1)
    rows = Rows(x0.reshape(-1)[places], x_t.reshape(-1)[places], wide.rows(places))
    inputs = method.objective.network_input(x0, x_t, process)
    return NoisyBatch(inputs, noise.sigma.to(device=x0.device, dtype=torch.float32), places, rows)


def batch_loss(method: Method, model: Model, batch: NoisyBatch) -> Tensor:
    """The loss in nats per token of the batch: the sum over its rows, divided by B*L."""
    rows, total = batch.rows, max(batch.tokens, 1)
    if isinstance(model, SupportsHeadLoss):
        features = model.features(batch.inputs, batch.sigma).flatten(0, 1).index_select(0, batch.places)
        simple = method.objective.cross_entropy(method.parameterization, rows)
        if simple is not None:
            return model.head_cross_entropy(features, simple) / total

        def row_loss(outputs: Tensor, part: slice) -> Tensor:
            return method.objective.row_loss(method.parameterization, outputs, rows.chunk(part))

        return model.head_loss(features, row_loss) / total
    outputs = model(batch.inputs, batch.sigma).flatten(0, 1).index_select(0, batch.places)
    return method.objective.row_loss(method.parameterization, outputs, rows).sum() / total


def loss(
    method: str | Method,
    process: TokenProcess,
    model: Model,
    x0: Tensor,
    t: Time | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """A training loss, in nats per token, of any callable model(x_t [B, L], sigma [B]) -> [B, L, V].

    x0 [B, L] are clean tokens; t [B] are times, stratified over [1e-3, 1] if not given.
    """
    chosen = get_method(method)
    chosen.check(process)
    process.check_tokens(x0)
    if x0.dim() != 2:
        raise ValueError(f"x0 must be a batch of sequences [B, L]; got shape {tuple(x0.shape)}")
    if t is None:
        cpu_generator = generator if generator is None or generator.device.type == "cpu" else None
        time = draw_times(len(x0), cpu_generator)
    else:
        time = check_time(t).expand(len(x0))
    return batch_loss(chosen, model, noisy_batch(chosen, process, x0, time.to(x0.device), generator))
