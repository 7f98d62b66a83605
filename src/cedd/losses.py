"""The training loss: noise the data, run the network, and compute the loss of the rows that count.

Shapes: B batch, L positions, V vocabulary, D width; N rows are the positions that count. In block diffusion a text has
K blocks, each with a time of its own, and v noisy views.

`NoisyBatch` is made on the CPU, where the number of rows is known without waiting for the device; the network then
runs on the device. A network that declares selected rows and head losses (`network.Capabilities`) never makes
[B, L, V] outputs: its head runs on the N rows, a chunk at a time. Any other callable is run as it is.

Times are stratified: the batch is cut into as many strata of [low, high] as it has sequences, and one time is drawn in
each. They are strata of the *global* batch: every rank draws the same list and takes its own part, so that the result
does not depend on the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from cedd.block_layout import InBlocks
from cedd.device import has_float64
from cedd.methods import Method, get_method, model_first
from cedd.network import (
    AnyModel,
    AttentionPattern,
    OutputCheck,
    TrainsOnRows,
    check_conditions,
    check_token_times,
    checked_outputs,
    invalid_outputs,
    trains_on_rows,
)
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
        raise ValueError(f"a batch needs at least one sequence (got {count})")
    if not 0.0 <= low < high <= 1.0:
        raise ValueError(f"training times must be in [0, 1], the lowest below the highest (got {low!r} and {high!r})")
    u = torch.rand(count, generator=generator, dtype=torch.float64)
    if stratified:
        u = (torch.randperm(count, generator=generator) + u) / count
    return low + (high - low) * u


@dataclass(frozen=True)
class NoisyBatch:
    """A batch ready for the network: its input [B, L], sigma [B], [B, K] or [B, L] float32, and the rows that count,
    with their distinct places [N] in the flattened batch."""

    inputs: Tensor
    sigma: Tensor
    places: Tensor
    rows: Rows
    counts: Tensor | None = None
    """[N] float32: 1 for a row that counts, 0 for padding, which gives all batches one shape. None: all rows count."""
    selected: int | None = None
    """The number of positions that `where` selects. None: all."""
    clean: Tensor | None = None
    """[B / v, L], in block diffusion and with a next-token loss: the clean texts that the inputs are views of."""
    in_blocks: bool = False
    """Whether blocks are read after the clean text before them."""
    visible: Tensor | None = None
    """[L, L] bool, the keys that a query attends to; None: the network's own."""
    next_token_weight: float = 0.0
    """The weight of the next-token loss of the clean texts."""
    label: Tensor | None = None
    """[B] int64, an input of the network, with UNKNOWN_LABEL where it is not given. None: a network without labels."""

    @property
    def tokens(self) -> int:
        """The number of positions, of which the loss is the mean."""
        return self.inputs.numel() if self.selected is None else self.selected

    def map(self, function: Callable[[Tensor], Tensor]) -> NoisyBatch:
        """The same batch with `function` applied to each of its tensors."""
        rows = Rows(function(self.rows.x0), function(self.rows.x_t), self.rows.noise.map(function))
        counts = None if self.counts is None else function(self.counts)
        tensors = function(self.inputs), function(self.sigma), function(self.places)
        clean = None if self.clean is None else function(self.clean)
        visible = None if self.visible is None else function(self.visible)
        label = None if self.label is None else function(self.label)
        others = self.selected, clean, self.in_blocks, visible, self.next_token_weight, label
        return NoisyBatch(*tensors, rows, counts, *others)

    def to(self, device: torch.device | str) -> NoisyBatch:
        """On another device, without waiting (its float64 fields in float32 where the device has none)."""
        narrow = not has_float64(device)

        def move(v: Tensor) -> Tensor:
            return (v.float() if narrow and v.dtype == torch.float64 else v).to(device, non_blocking=True)

        return self.map(move)


@dataclass(frozen=True)
class NoiseDraws:
    """The random numbers of a batch's noise: uniform numbers and uniform tokens, [B, L] each."""

    u: Tensor
    redraw: Tensor

    @staticmethod
    def make(
        shape: tuple[int, ...], vocab_size: int, device: torch.device, generator: torch.Generator | None
    ) -> NoiseDraws:
        u = uniform_noise(shape, device, generator)
        return NoiseDraws(u, uniform_tokens(shape, vocab_size, device, generator))

    def part(self, sequences: slice) -> NoiseDraws:
        return NoiseDraws(self.u[sequences], self.redraw[sequences])


def noisy_batch(
    method: Method,
    process: TokenProcess,
    x0: Tensor,
    t: Tensor,
    draws: NoiseDraws,
    capacity: int | None = None,
    where: Tensor | None = None,
    views: int = 1,
) -> NoisyBatch:
    """x_t for clean tokens x0 [B, L] at times t, and the rows that count, padded to `capacity` if given.

    Args:
        t: [B], [B, K] for the blocks of a text, or [B, L].
        where: [B, L] bool, the positions that may count; None: all.
        views: how many rows of x0, one after the other, are the same text.
    """
    length, times = x0.shape[1], t.shape[1] if t.dim() == 2 else 1
    each = length // times  # positions that share a time
    noise = process.noise(t.reshape(len(x0), times)).to(x0.device)
    wide = noise.map(lambda v: v.repeat_interleave(each, 1) if times > 1 else v.expand(x0.shape))
    x_t = wide.move(x0, draws.u, draws.redraw)
    chosen = method.dynamics.positions(x_t, wide)
    selected = None if where is None else int(where.sum())
    padded = pad_rows((chosen if where is None else chosen & where).reshape(-1), capacity)
    places = padded.places
    # A row of padding is a copy of the first row: its loss is finite, and has weight 0.
    origins = places if padded.counts is None else torch.where(padded.counts > 0, places, places[0])
    rows = Rows(x0.reshape(-1)[origins], x_t.reshape(-1)[origins], noise.rows(origins // each))
    inputs = method.dynamics.network_input(x0, x_t, process)
    sigma = noise.sigma.to(device=x0.device, dtype=torch.float32)
    clean = None
    if (blocks := method.blocks_of(length)) > 1:
        sigma, clean = sigma if times == blocks else sigma.expand(-1, blocks), x0[::views].contiguous()
    elif t.dim() == 1:
        sigma = sigma.squeeze(1)
    return NoisyBatch(inputs, sigma, places, rows, padded.counts, selected, clean, clean is not None)


class PaddedRows(NamedTuple):
    """Distinct places, and which of them count (None: all)."""

    places: Tensor
    counts: Tensor | None


def pad_rows(chosen: Tensor, capacity: int | None) -> PaddedRows:
    """The chosen places of a flattened batch [B*L], padded with others to `capacity`: all batches get one shape.

    No padding is added where none or more than `capacity` are chosen, or where it would reach the whole batch.
    """
    places = chosen.nonzero().squeeze(-1)
    number = len(places)
    if capacity is None or not 0 < number <= capacity < len(chosen):
        return PaddedRows(places, None)
    others = chosen.logical_not().nonzero().squeeze(-1)[: capacity - number]
    counts = torch.zeros(capacity, device=chosen.device)
    counts[:number] = 1.0
    return PaddedRows(torch.cat([places, others]), counts)


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


def batch_loss(method: Method, model: AnyModel, batch: NoisyBatch, **conditions: Tensor) -> Tensor:
    """The loss in nats per token of the batch: the sum over its rows, divided by the number of positions (B*L, or those
    that `where` selects)."""
    if batch.label is not None:
        conditions = {"label": batch.label, **conditions}
    check_conditions(conditions, len(batch.inputs))
    options: dict[str, Any] = dict(conditions)
    if batch.in_blocks:
        model, options["clean"] = InBlocks(model, batch.inputs.shape[1] // batch.sigma.shape[1]), batch.clean
    elif batch.visible is not None:
        options["attention"] = AttentionPattern(batch.visible)
    elif batch.sigma.dim() == 2:
        check_token_times(model)
    rows, noise, counts = batch.rows, batch.rows.noise, batch.counts
    if not trains_on_rows(model):
        made = cast(Callable[..., object], model)(batch.inputs, batch.sigma, **options)
        outputs = checked_outputs(made, (*batch.inputs.shape, noise.vocab_size))
        if outputs.device.type == "cpu":
            OutputCheck().look_at(outputs)
        losses = method.objective.row_loss(method.parameterization, outputs.flatten(0, 1)[batch.places], rows)
        return (losses if counts is None else losses * counts).sum() / batch.tokens
    if counts is not None:
        options["where"] = batch.places
    if batch.next_token_weight:
        assert batch.clean is not None
        made, next_tokens = _with_next_tokens(model, batch, options, conditions)
    else:
        made, next_tokens = model.features(batch.inputs, batch.sigma, **options), None
    total = _total(method, model, batch, model.rows(made, batch.places))
    return total if next_tokens is None else total + batch.next_token_weight * next_tokens


def _total(method: Method, model: TrainsOnRows, batch: NoisyBatch, features: Tensor) -> Tensor:
    """The loss of the rows that count, given their features [N, D]."""
    rows, noise, counts = batch.rows, batch.rows.noise, batch.counts
    # The weights include the divisor of the mean: dividing the total would take a sweep over the head's gradient.
    exact = torch.promote_types(features.dtype, torch.float32)
    each = 1 / batch.tokens
    shares = features.new_full((len(features),), each, dtype=exact) if counts is None else each * counts.to(exact)
    simple = method.objective.closed_form(method.parameterization, rows)
    if simple is not None:
        return simple.total(model.head, features, shares)
    row_loss = row_function(method, noise.vocab_size, noise.has_mask)
    arguments = (rows.x0, rows.x_t, *(getattr(noise, name) for name in _NOISE_TENSORS))
    return model.head.loss(features, row_loss, arguments, shares).total


def _with_next_tokens(
    model: TrainsOnRows, batch: NoisyBatch, options: dict[str, Any], conditions: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """The features of the noisy texts, and the mean next-token loss of the clean ones under causal attention: in the
    same pass if clean tokens of the block layout attend causally, otherwise in a separate pass."""
    clean = batch.clean
    assert clean is not None
    if isinstance(model, InBlocks) and model.capabilities.causal_past:
        network = cast(Any, model.model)
        features, of_clean = model.halves(batch.inputs, batch.sigma, **options)
    else:
        network = cast(Any, model.model if isinstance(model, InBlocks) else model)
        features, length = model.features(batch.inputs, batch.sigma, **options), clean.shape[1]
        earlier = torch.ones(length, length, dtype=torch.bool, device=clean.device).tril()
        views = len(batch.inputs) // len(clean)
        own = {name: value[::views] for name, value in conditions.items()}
        level = batch.sigma.new_zeros(len(clean))
        of_clean = network.features(clean, level, attention=AttentionPattern(earlier), **own)
    places, targets = network.next_tokens(clean)
    shares = of_clean.new_full(
        (len(places),), 1 / len(places), dtype=torch.promote_types(of_clean.dtype, torch.float32)
    )
    rows = network.rows(of_clean, places)
    return features, network.head.cross_entropy(rows, targets, shares).total


@model_first("cedd.loss(model, process, x0, method=...)")
def loss(
    model: AnyModel,
    process: TokenProcess,
    x0: Tensor,
    *,
    method: str | Method,
    t: Time | None = None,
    where: Tensor | None = None,
    block: int | None = None,
    generator: torch.Generator | None = None,
    **conditions: Tensor,
) -> Tensor:
    """The training loss in nats per token of any callable model(x_t [B, L], sigma [B]) -> [B, L, V].

    On a CPU, outputs that are NaN or infinite raise an error. On a GPU this check would synchronize at every training
    step: the loss is NaN instead.

    Args:
        model: the network. With t [B, L] it takes sigma [B, L]; a backbone declares this by
            `Capabilities(token_times=True)`.
        process: the noise process.
        x0: clean tokens [B, L].
        method: a name in `METHODS`, or a `Method`.
        t: noise times, one for all, [B] or [B, L]; by default one per sequence, stratified over [1e-3, 1]. Positions
            with t = 0 stay clean, such as a prompt. In block diffusion one for all, [B], or [B, K] for the K blocks of
            a sequence; by default one per block.
        where: [B, L] bool, the positions that count; by default all. The loss is the sum over the positions that count,
            divided by their number, so that prompts and padding do not affect it. Positions that do not count are
            noised like the others, unless t [B, L] is 0 there.
        block: tokens per block, for block diffusion; by default that of the method. The network takes
            an attention pattern (`Capabilities.attention`), or is a function model(x_t, sigma [B, L], clean=x0) whose
            outputs depend on x_t in their own block and on the clean tokens of earlier blocks.
        generator: the random number generator.
        conditions: further inputs of the network, one entry per sequence: model(x_t, sigma, **conditions).
    """
    chosen = get_method(method).in_blocks(block)
    chosen.check(process)
    process.check_tokens(x0)
    if x0.dim() != 2 or x0.numel() == 0:
        raise ValueError(f"x0 must be a batch of sequences [B, L] (got shape {tuple(x0.shape)})")
    blocks = chosen.blocks_of(x0.shape[1])
    if t is None:
        cpu_generator = generator if generator is None or generator.device.type == "cpu" else None
        time = draw_times(len(x0) * blocks, cpu_generator)
        time = time.reshape(len(x0), blocks) if blocks > 1 else time
    elif blocks > 1:
        time = check_times(t, x0[:, :blocks], "the blocks of x0")
    else:
        time = check_times(t, x0, "x0")
    time = time.expand(len(x0)) if time.dim() == 0 else time
    if where is not None:
        _check_where(where, x0)
    home = x0.device if has_float64(x0.device) else torch.device("cpu")
    draws = NoiseDraws.make(tuple(x0.shape), process.vocab_size, home, generator)
    selected = None if where is None else where.to(home)
    batch = noisy_batch(chosen, process, x0.to(home), time.to(home), draws, where=selected)
    total = batch_loss(chosen, model, batch if home == x0.device else batch.to(x0.device), **conditions)
    if total.device.type == "cpu" and math.isnan(total.detach()):
        raise invalid_outputs()
    return total


def _check_where(where: object, x0: Tensor) -> None:
    """Refuse what does not select positions of x0."""
    if not isinstance(where, Tensor) or where.dtype != torch.bool or where.shape != x0.shape:
        got = f"{list(where.shape)} {where.dtype}" if isinstance(where, Tensor) else type(where).__name__
        raise ValueError(f"where must be a Boolean tensor of x0's shape {list(x0.shape)} (got {got})")
    if not bool(where.any()):
        raise ValueError("where selects no position, so the loss is undefined")
