"""Monte Carlo estimates of the bound of a model on data, with standard errors.

Shapes: N sequences, L positions, V vocabulary, D draws per sequence (a draw is a time and a noisy sequence at it).

The bounds `tight`, `j1` and `j2` are defined in dynamics/reverse.py: a path integral plus constants (`terminal`) that
do not depend on the model, plus the cost of the last step if the path stops before t = 0.

There are two sampling schemes:

    stratified    (default) times are stratified within each sequence and across sequences, with a density that follows
                  the variance of the integrand (bounds/times.py). Noisy sequences come from a proposal that forces one
                  position to change, which keeps the variance finite down to t = 0 (bounds/proposal.py). Control
                  variates are cross-fitted (bounds/control.py).
    independent   independent uniform times and noise, as in the paper; lbar for j2 and l otherwise. The variance
                  diverges logarithmically at t = 0, so there is a standard error but no interval
                  (benchmarks/bound_coverage.py measures how often an interval would miss).

In block diffusion the bound of a sequence is the sum over its blocks, each given the clean text before it. Blocks are
drawn like sequences, and one pass of the network evaluates all blocks of a sequence (block_layout.py).

Errors. The population error is the standard deviation of the N per-sequence values over sqrt(N), minus the part due to
a curve in time that all sequences share, which stratification across sequences removes from the mean. The Monte Carlo
error, for exactly these sequences, comes from two independent halves of the draws (bounds/drawing.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from cedd.block_layout import as_block_sequences
from cedd.bounds.drawing import Evaluation, IndependentDraws, SequenceValues, StratifiedDraws, parts_of
from cedd.bounds.estimate import (
    BoundEstimate,
    cannot_narrow,
    exact_estimate,
    is_within,
    mean_and_stderr,
)
from cedd.bounds.exact_likelihood import context_count, exact_likelihood
from cedd.bounds.importance import importance_bound
from cedd.bounds.options import BoundOptions, Progress, Sampling
from cedd.bounds.order_weights import WeightFile
from cedd.device import model_device
from cedd.dynamics import BOUNDS, Bound, Corrector, Dynamics
from cedd.dynamics.path import Target
from cedd.methods import Method, get_method, model_first
from cedd.names import suggestion
from cedd.network import AnyModel, Network, evaluating
from cedd.process import TokenProcess

BATCH = 32
"""Noisy sequences per network call."""
_Wanted = tuple[Bound, float | None]
_WORTH_SETTLING = 1.125  # growth of the number of draws between settlings; settling after every round is quadratic
_NEARLY = 1e-4  # largest distance between the earliest times of bounds that share their draws


@model_first("cedd.estimate_bound(model, process, data, method=...)")
def estimate_bound(
    model: AnyModel,
    process: TokenProcess,
    data: Tensor,
    *,
    method: str | Method,
    bound: Bound | Literal["importance", "exact"] = "tight",
    block: int | None = None,
    orders: int | None = None,
    draws: int = 16,
    tolerance: float | None = None,
    seconds: float | None = None,
    generator: torch.Generator | None = None,
    sampling: Sampling | None = None,
    time_floor: float | None = None,
    corrector: Corrector | None = None,
    fixed_set: bool = False,
    nested: bool = False,
    max_draws: int = 4096,
    batch: int | None = None,
    device: torch.device | str | None = None,
    checkpoint: WeightFile | None = None,
    progress: Progress | None = None,
    **conditions: Tensor,
) -> BoundEstimate:
    """An upper bound on the negative log-likelihood of data [N, L], in nats per token, with its error.

    If the cost of clean tokens grows like 1/t, the bound down to t = 0 is infinite. For some methods this holds for
    every network (sedds and a denoiser without rescaling, on processes that shuffle; dfm). Their path stops earlier, at
    the time of `Method.with_stop`, which `cedd.bounds.stop.choose_stop` chooses on training text. For other methods,
    and for sedds with sigma(0) > 0 (a geometric schedule), time_floor=1e-3 gives a valid bound that is finite unless
    the network gives the data probability zero. `BoundEstimate.why_infinite` explains an infinite bound.

    Args:
        model: any callable `(x_t [B, L] int64, sigma [B] float32) -> [B, L, V]`. If it has `features` and `head`, the
            full outputs [B, L, V] are never stored.
        process: the process that the model was trained to reverse.
        data: token ids [N, L].
        method: what the model's outputs mean.
        bound: "tight", a valid upper bound; "j1" or "j2", the paper's figures; "importance", the importance-weighted
            bound of the first-hitting sampler (bounds/importance.py), an `ImportanceEstimate`; or "exact", the
            likelihood of that sampler, for blocks (or sequences) of at most 12 tokens (bounds/exact_likelihood.py). The
            last two take only block, generator, fixed_set, batch, device and progress of the arguments below;
            "importance" also takes orders, tolerance, seconds and checkpoint.
        block: tokens per block, for block diffusion; by default that of the method. The network is called as for
            `cedd.loss`.
        orders: orders per sequence for "importance" (default: 64). With a tolerance or seconds: the largest number
            (default: 4,096).
        draws: noisy versions of each sequence, rounded up to an even number for stratified sampling. The paper's
            per-sequence J1 is bound="j1", draws=1024.
        tolerance: add rounds of `draws` until the half-width of the 95% interval is at most this share of the
            perplexity (0.005: half a percent), until `max_draws`, or until more draws cannot help because the variance
            is that of the sequences. For "importance", the orders start at 2 and are doubled.
        seconds: for "importance": double the orders, starting at 2, while the next round is expected to end within
            this time.
        generator: the random number generator.
        sampling: "stratified" (stratified times, a proposal for the noise, and control variates) or "independent"
            (independent uniform times and noise, as in the paper; without an interval).
        time_floor: for `tight`, the time at which the path stops; x_0 is drawn there, and the cost of this draw is
            included. By default that of the method, usually 0. For j1 and j2, the earliest time (default: 1e-4).
        corrector: dfm's corrector.
        fixed_set: compute the error for exactly these sequences instead of for the population they come from.
        nested: draw the noise so that, with equal generators, texts of different lengths get the same noise on their
            common beginning (in batches of at least half the draws).
        max_draws: largest number of draws with a tolerance.
        batch: noisy sequences per network call (default: 32; for "importance" chosen for the device).
        device: the device of the network; by default that of its parameters.
        checkpoint: for "importance": the file (`cedd.bounds.order_weights.WeightFile`) in which weights are saved, and
            from which the same call resumes.
        progress: called after each batch with the number of evaluations done and the number planned so far.
        conditions: other inputs of the network, one entry per sequence [N, ...], passed by name.
    """
    options = BoundOptions(
        block=block,
        orders=orders,
        draws=draws,
        tolerance=tolerance,
        seconds=seconds,
        generator=generator,
        sampling=sampling,
        time_floor=time_floor,
        corrector=corrector,
        fixed_set=fixed_set,
        nested=nested,
        max_draws=max_draws,
        batch=batch,
        device=device,
        checkpoint=checkpoint,
        progress=progress,
    )
    method = get_method(method).in_blocks(block)
    if bound in ("importance", "exact"):
        _refuse_unused(bound, options, "sampling", "time_floor", "corrector")
    if bound != "importance":
        _refuse_unused(bound, options, "orders", "seconds", "checkpoint")
    if bound == "importance":
        return importance_bound(model, process, data, method, options, conditions)
    if bound == "exact" and method.dynamics.noisy:
        _refuse_unused(bound, options, "tolerance")
        return _exact_in_orders(model, process, data, method, options, conditions)
    if bound not in (*BOUNDS, "exact"):
        raise ValueError(f"unknown bound {bound!r}{suggestion(bound, (*BOUNDS, 'importance', 'exact'))}")
    one: Bound = "tight" if bound == "exact" else bound  # which is exact for autoregressive methods
    return _estimates(model, process, data, [(one, time_floor)], method, options, conditions)[0]


def _refuse_unused(bound: str, options: BoundOptions, *names: str) -> None:
    """Refuse options that have no effect on a bound."""
    for name in names:
        if (value := getattr(options, name)) is not None:
            raise ValueError(f"the bound {bound!r} takes no {name} (got {value!r})")


def _exact_in_orders(
    model: AnyModel,
    process: TokenProcess,
    data: Tensor,
    method: Method,
    options: BoundOptions,
    conditions: Mapping[str, Tensor],
) -> BoundEstimate:
    """The likelihood of the first-hitting sampler, summed over all orders."""
    length = data.shape[-1]
    how: dict[str, Any] = {name: getattr(options, name) for name in ("batch", "device", "progress")} | {**conditions}
    nats = exact_likelihood(model, process, data, range(length), method=method, **how)
    draws = context_count(model, method.block or length)
    return exact_estimate("exact", nats / length, draws, length, options.fixed_set)


def estimate_bounds(
    model: AnyModel,
    process: TokenProcess,
    data: Tensor,
    bounds: Sequence[Bound],
    *,
    method: str | Method,
    **arguments: Any,
) -> dict[Bound, BoundEstimate]:
    """Several bounds on the same data, in the requested order; the other arguments are those of `estimate_bound`.

    Bounds that stop at nearly the same time are measured by the same stratified draws: `tight`, `j1` and `j2` take as
    many evaluations as one of them. If bounds have different draws, each starts from the same state of the generator.
    """
    options, conditions = BoundOptions.and_conditions(arguments)
    chosen = get_method(method).in_blocks(options.block)
    wanted: list[_Wanted] = [(bound, options.time_floor) for bound in bounds]
    return dict(zip(bounds, _estimates(model, process, data, wanted, chosen, options, conditions), strict=True))


def bounds_with_stops(
    model: AnyModel, process: TokenProcess, data: Tensor, stops: Sequence[float], *, method: Method, **arguments: Any
) -> list[BoundEstimate]:
    """`tight` for each time at which the path may stop, all by the same draws of the path."""
    options, conditions = BoundOptions.and_conditions(arguments)
    wanted: list[_Wanted] = [("tight", stop) for stop in stops]
    return _estimates(model, process, data, wanted, method, options, conditions, nearly=math.inf)


def _estimates(
    model: AnyModel,
    process: TokenProcess,
    data: Tensor,
    wanted: Sequence[_Wanted],
    method: Method,
    options: BoundOptions,
    conditions: Mapping[str, Tensor],
    nearly: float = _NEARLY,
) -> list[BoundEstimate]:
    """Bounds, each with the end of its path (None: the method's)."""
    for bound, floor in wanted:
        method.check(process)
        method.check_bound(bound, floor)
    process.check_tokens(data)
    if data.dim() != 2 or 0 in data.shape:
        raise ValueError(f"data must be sequences [N, L], at least one of at least one token (got {list(data.shape)})")
    dynamics = method.dynamics if options.corrector is None else method.dynamics.with_corrector(options.corrector)
    home = model_device(model, data.device) if options.device is None else options.device
    network = Network.of(model, process.vocab_size, home, conditions, len(data))
    clean = data.detach().to(device="cpu", dtype=torch.int64)
    blocks = method.blocks_of(data.shape[1])
    if blocks > 1:
        network, clean = as_block_sequences(network, clean, blocks)
    with evaluating(model):
        if not dynamics.noisy:
            return [_exact(network, process, dynamics, clean, options) for _ in wanted]
        targets = list[Target]()
        for bound, floor in wanted:
            entropy = options.sampling != "independent" or bound != "j2"
            low = dynamics.earliest(method.parameterization, process, bound) if floor is None else floor
            targets.append(dynamics.target(method.parameterization, process, bound, with_entropy=entropy, low=low))
        names: list[Bound] = [bound for bound, _ in wanted]
        job = _BoundRun(network, process, clean, blocks, names, targets, options, _Counter(options.progress))
        source = torch.default_generator if options.generator is None else options.generator
        state, found = source.get_state(), dict[int, BoundEstimate]()
        for together in _drawn_together(targets, nearly, options.sampling):
            found |= job.estimates(together, source.set_state(state))
        return [found[index] for index in range(len(wanted))]


def _drawn_together(targets: Sequence[Target], nearly: float, sampling: Sampling | None) -> list[list[int]]:
    """The targets in groups that are measured by the same draws: of one path, to nearly the same time."""
    groups: list[list[int]] = []
    for index, target in enumerate(targets):
        for group in groups if sampling != "independent" else ():
            first = targets[group[0]]
            if target.path == first.path and abs(target.low - first.low) <= nearly:
                group.append(index)
                break
        else:
            groups.append([index])
    return groups


@dataclass
class _Counter:
    """Evaluations done and planned."""

    progress: Progress | None
    planned: int = 0
    done: int = 0

    def add(self, count: int) -> None:
        self.done += count
        if self.progress is not None:
            self.progress(self.done, max(self.done, self.planned))


@dataclass(frozen=True)
class _BoundRun:
    """The bounds of a call."""

    network: Network
    process: TokenProcess
    data: Tensor
    blocks: int
    """Blocks per text; each block is a sequence of `data`."""
    names: Sequence[Bound]
    targets: Sequence[Target]
    options: BoundOptions
    counter: _Counter

    def estimates(self, which: Sequence[int], generator: torch.Generator) -> dict[int, BoundEstimate]:
        """The bounds with these numbers, by the same draws. Bounds that turn out to be infinite are removed."""
        if not which:
            return {}
        options, counter, state = self.options, self.counter, generator.get_state()
        before, draws = counter.done, options.draws
        targets, batch = tuple(self.targets[number] for number in which), options.batch or BATCH
        evaluation = Evaluation(
            self.network, self.process, self.data, targets, batch, counter.add, options.nested, self.blocks
        )
        if (why := evaluation.infinite_at_zero()) is not None:
            infinite = {number: why for number in which if self.targets[number].low == 0}
            return self._without(infinite, which, generator.set_state(state), counter.done - before)
        drawn = IndependentDraws(evaluation) if options.sampling == "independent" else StratifiedDraws(evaluation)
        total = settled_at = 0
        while True:
            counter.planned += draws * len(self.data) // self.blocks
            drawn.add(draws, generator)
            total += draws
            reasons = {number: drawn.why_infinite(index) for index, number in enumerate(which)}
            if infinite := {number: why for number, why in reasons.items() if why is not None}:
                return self._without(infinite, which, generator.set_state(state), counter.done - before)
            if total < _WORTH_SETTLING * settled_at and total + draws <= options.max_draws:
                continue
            settled_at = total
            found = {
                number: self._estimate(number, drawn.settle(index), counter.done - before, total)
                for index, number in enumerate(which)
            }
            if total + draws > options.max_draws or all(e.reached or cannot_narrow(e) for e in found.values()):
                return found

    def _without(
        self, infinite: Mapping[int, str], which: Sequence[int], generator: torch.Generator, evaluations: int
    ) -> dict[int, BoundEstimate]:
        """Mark bounds as infinite, with the reason, and draw the others again, because infinite costs would spoil their
        statistics."""
        found = self.estimates([number for number in which if number not in infinite], generator)
        for number, why in infinite.items():
            settled = SequenceValues(torch.full((len(self.data),), math.inf, dtype=torch.float64), math.nan, 0)
            estimate = self._estimate(number, settled, evaluations, 0)
            found[number] = replace(estimate, why_infinite=why, reached=True)
        return found

    def _estimate(self, number: int, settled: SequenceValues, evaluations: int, draws: int) -> BoundEstimate:
        """The estimate from settled values, for texts of `blocks` blocks."""
        target, tolerance = self.targets[number], self.options.tolerance
        values = settled.per_sequence.reshape(-1, self.blocks).mean(1) + target.terminal
        mean, error = mean_and_stderr(values)
        scatter = max(error**2 - settled.curve, settled.variance - settled.shared) if settled.curve > 0 else error**2
        estimate = BoundEstimate(
            bound=self.names[number],
            nats_per_token=mean,
            per_sequence=values,
            sequence_stderr=math.sqrt(scatter + settled.shared),
            monte_carlo_stderr=math.sqrt(settled.variance),
            monte_carlo_freedom=settled.freedom,
            fixed_set=self.options.fixed_set or len(values) < 2,
            terminal=target.terminal,
            earliest_time=target.low,
            evaluations=evaluations,
            draws=draws,
            length=self.data.shape[1] * self.blocks,
            heavy_tailed=settled.heavy_tailed,
        )
        return estimate if tolerance is None else replace(estimate, reached=is_within(estimate, tolerance))


def _exact(
    network: Network, process: TokenProcess, dynamics: Dynamics, data: Tensor, options: BoundOptions
) -> BoundEstimate:
    """The exact likelihood of an autoregressive model: one evaluation per sequence, no Monte Carlo error."""
    counter, parts = _Counter(options.progress, planned=len(data)), list[Tensor]()
    for rows in parts_of(len(data), options.batch or BATCH):
        x0 = data[rows].to(network.device)
        parts.append(dynamics.token_nats(network.of_sequences(rows), process, x0).mean(1).cpu())
        counter.add(len(rows))
    return exact_estimate("tight", torch.cat(parts), 1, data.shape[1], options.fixed_set)
