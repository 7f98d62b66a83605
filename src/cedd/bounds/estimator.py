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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from cedd.block_layout import as_block_sequences
from cedd.bounds.drawing import Evaluation, IndependentDraws, SequenceValues, StratifiedDraws, parts_of
from cedd.bounds.estimate import (
    BoundEstimate,
    cannot_narrow,
    check_tolerance,
    exact_estimate,
    is_within,
    mean_and_stderr,
)
from cedd.bounds.exact_likelihood import context_count, exact_likelihood
from cedd.bounds.importance import importance_bound
from cedd.bounds.order_weights import WeightFile
from cedd.device import model_device
from cedd.dynamics import Bound, Corrector, Dynamics
from cedd.dynamics.path import Target
from cedd.methods import Method, get_method, model_first
from cedd.network import AnyModel, Network, evaluating
from cedd.process import TokenProcess

Sampling = Literal["stratified", "independent"]
Progress = Callable[[int, int], None]
"""Called after each batch with the number of evaluations done and the number planned so far."""

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
        sampling: "stratified" or "independent", as described at the top of the module.
        time_floor: for `tight`, the time at which the path stops; x_0 is drawn there, and the cost of this draw is
            included. By default that of the method, usually 0. For j1 and j2, the earliest time (default: 1e-4).
        corrector: dfm's corrector.
        fixed_set: compute the error for exactly these sequences instead of for the population they come from.
        nested: draw the noise so that, with equal generators, texts of different lengths get the same noise on their
            common beginning (in batches of at least half the draws).
        max_draws: largest number of draws with a tolerance.
        batch: noisy sequences per network call (default: 32; for "importance" chosen for the device).
        device: the device of the network; by default that of its parameters.
        checkpoint: for "importance": the file in which weights are saved, and from which the same call resumes.
        progress: called after each batch with the number of evaluations done and the number planned so far.
        conditions: other inputs of the network, one entry per sequence [N, ...], passed by name.
    """
    method = get_method(method).in_blocks(block)
    if bound in ("importance", "exact"):
        _refuse_unused(bound, sampling=sampling, time_floor=time_floor, corrector=corrector)
    if bound != "importance":
        _refuse_unused(bound, orders=orders, seconds=seconds, checkpoint=checkpoint)
    if bound == "exact" and method.dynamics.noisy:
        _refuse_unused(bound, tolerance=tolerance)
        return _exact_in_orders(model, process, data, method, fixed_set, batch, device, progress, conditions)
    if bound == "importance":
        return importance_bound(
            model,
            process,
            data,
            method=method,
            block=block,
            orders=orders,
            tolerance=tolerance,
            seconds=seconds,
            antithetic=True,
            generator=generator,
            fixed_set=fixed_set,
            checkpoint=checkpoint,
            batch=batch,
            device=device,
            progress=progress,
            **conditions,
        )
    bound = "tight" if bound == "exact" else bound  # which is exact for autoregressive methods
    found = estimate_bounds(
        model,
        process,
        data,
        (bound,),
        method=method,
        block=block,
        draws=draws,
        tolerance=tolerance,
        generator=generator,
        sampling=sampling,
        time_floor=time_floor,
        corrector=corrector,
        fixed_set=fixed_set,
        nested=nested,
        max_draws=max_draws,
        batch=32 if batch is None else batch,
        device=device,
        progress=progress,
        **conditions,
    )
    return found[bound]


def _refuse_unused(bound: str, **options: object) -> None:
    """Refuse options that say nothing about a bound."""
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"the bound {bound!r} takes no {name} (got {value!r})")


def _exact_in_orders(
    model: AnyModel,
    process: TokenProcess,
    data: Tensor,
    method: Method,
    fixed_set: bool,
    batch: int | None,
    device: torch.device | str | None,
    progress: Progress | None,
    conditions: Mapping[str, Tensor],
) -> BoundEstimate:
    """The likelihood of the first-hitting sampler, summed over all orders."""
    length = data.shape[-1]
    how: dict[str, Any] = {"batch": batch, "device": device, "progress": progress, **conditions}
    nats = exact_likelihood(model, process, data, range(length), method=method, **how)
    draws = context_count(model, method.block or length)
    return exact_estimate("exact", nats / length, draws, length, fixed_set)


def estimate_bounds(
    model: AnyModel,
    process: TokenProcess,
    data: Tensor,
    bounds: Sequence[Bound],
    *,
    method: str | Method,
    block: int | None = None,
    draws: int = 16,
    tolerance: float | None = None,
    generator: torch.Generator | None = None,
    sampling: Sampling | None = None,
    time_floor: float | None = None,
    corrector: Corrector | None = None,
    fixed_set: bool = False,
    nested: bool = False,
    max_draws: int = 4096,
    batch: int = 32,
    device: torch.device | str | None = None,
    progress: Progress | None = None,
    **conditions: Tensor,
) -> dict[Bound, BoundEstimate]:
    """Several bounds on the same data, in the order asked for; the other arguments are those of `estimate_bound`.

    Bounds that stop at nearly the same time are measured by the same stratified draws: `tight`, `j1` and `j2` take as
    many evaluations as one of them. Where their draws are not the same, each begins with the generator as it is.
    """
    chosen = get_method(method).in_blocks(block)
    for bound in bounds:
        _check(chosen, process, data, bound, draws, tolerance, time_floor, batch, max_draws)
    if sampling not in (None, *get_args(Sampling)):
        raise ValueError(f"draws are {' or '.join(get_args(Sampling))} (got {sampling!r})")
    if tolerance is not None and sampling == "independent":
        raise ValueError("independent draws have no interval that a tolerance could be held against; use stratified")
    dynamics = chosen.dynamics if corrector is None else chosen.dynamics.with_corrector(corrector)
    home = model_device(model, data.device) if device is None else device
    network = Network.of(model, process.vocab_size, home, conditions, len(data))
    clean = data.detach().to(device="cpu", dtype=torch.int64)
    blocks = chosen.blocks_of(data.shape[1])
    if blocks > 1:
        network, clean = as_block_sequences(network, clean, blocks)
    with evaluating(model):
        if not dynamics.noisy:
            return {one: _exact(network, process, dynamics, clean, batch, fixed_set, progress) for one in bounds}
        way, targets = sampling or "stratified", dict[Bound, Target]()
        for bound in bounds:
            earliest = dynamics.earliest(chosen.parameterization, process, bound)
            targets[bound] = dynamics.target(
                chosen.parameterization,
                process,
                bound,
                with_entropy=way == "stratified" or bound != "j2",
                low=earliest if time_floor is None else time_floor,
            )
        counter = _Counter(progress)
        job = _BoundRun(
            network, process, clean, blocks, way, draws, tolerance, max_draws, batch, fixed_set, nested, counter
        )
        source, found = torch.default_generator if generator is None else generator, dict[Bound, BoundEstimate]()
        state = source.get_state()
        for together in _drawn_together(targets, way):
            found |= job.estimates(together, source.set_state(state))
        return {bound: found[bound] for bound in bounds}


def _drawn_together(targets: Mapping[Bound, Target], way: Sampling) -> list[dict[Bound, Target]]:
    """The targets in groups that are measured by the same draws: of one path, to nearly the same time."""
    groups: list[dict[Bound, Target]] = []
    for bound, target in targets.items():
        for group in groups if way == "stratified" else ():
            first = next(iter(group.values()))
            if target.path == first.path and abs(target.low - first.low) <= _NEARLY:
                group[bound] = target
                break
        else:
            groups.append({bound: target})
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
    """Arguments shared by all bounds of a call; see `estimate_bound`."""

    network: Network
    process: TokenProcess
    data: Tensor
    blocks: int
    """Blocks per text; each block is a sequence of `data`."""
    way: Sampling
    draws: int
    tolerance: float | None
    max_draws: int
    batch: int
    fixed_set: bool
    nested: bool
    counter: _Counter

    def estimates(self, targets: Mapping[Bound, Target], generator: torch.Generator) -> dict[Bound, BoundEstimate]:
        """The bounds of these targets, by the same draws. One that turns out to be infinite is left out of them."""
        if not targets:
            return {}
        counter, names, state = self.counter, list[Bound](targets), generator.get_state()
        before = counter.done
        bounds = tuple(targets.values())
        evaluation = Evaluation(
            self.network, self.process, self.data, bounds, self.batch, counter.add, self.nested, self.blocks
        )
        if (why := evaluation.infinite_at_zero()) is not None:
            infinite: dict[Bound, str] = {name: why for name in names if targets[name].low == 0}
            return self._without(infinite, targets, generator.set_state(state), counter.done - before)
        drawn = StratifiedDraws(evaluation) if self.way == "stratified" else IndependentDraws(evaluation)
        total = settled_at = 0
        while True:
            counter.planned += self.draws * len(self.data) // self.blocks
            drawn.add(self.draws, generator)
            total += self.draws
            infinite = {name: why for index, name in enumerate(names) if (why := drawn.why_infinite(index)) is not None}
            if infinite:
                return self._without(infinite, targets, generator.set_state(state), counter.done - before)
            if total < _WORTH_SETTLING * settled_at and total + self.draws <= self.max_draws:
                continue
            settled_at = total
            found: dict[Bound, BoundEstimate] = {
                name: _estimate(
                    name,
                    drawn.settle(index),
                    targets[name],
                    counter.done - before,
                    total,
                    self.data,
                    self.blocks,
                    self.fixed_set,
                    self.tolerance,
                )
                for index, name in enumerate(names)
            }
            if total + self.draws > self.max_draws or all(e.reached or cannot_narrow(e) for e in found.values()):
                return found

    def _without(
        self,
        infinite: Mapping[Bound, str],
        targets: Mapping[Bound, Target],
        generator: torch.Generator,
        evaluations: int,
    ) -> dict[Bound, BoundEstimate]:
        """These are infinite, and why; the others are drawn anew, since costs without end would spoil what draws have
        learnt."""
        rest: dict[Bound, Target] = {name: target for name, target in targets.items() if name not in infinite}
        found = self.estimates(rest, generator)
        for name, why in infinite.items():
            found[name] = _infinite(name, targets[name], evaluations, self.data, self.blocks, self.fixed_set, why)
        return found


def _estimate(
    bound: str,
    settled: SequenceValues,
    target: Target,
    evaluations: int,
    draws: int,
    data: Tensor,
    blocks: int,
    fixed_set: bool,
    tolerance: float | None,
) -> BoundEstimate:
    """The estimate from settled values, for texts of `blocks` blocks."""
    values = settled.per_sequence.reshape(-1, blocks).mean(1) + target.terminal
    mean, error = mean_and_stderr(values)
    scatter = max(error**2 - settled.curve, settled.variance - settled.shared) if settled.curve > 0 else error**2
    estimate = BoundEstimate(
        bound=bound,
        nats_per_token=mean,
        per_sequence=values,
        sequence_stderr=math.sqrt(scatter + settled.shared),
        monte_carlo_stderr=math.sqrt(settled.variance),
        monte_carlo_freedom=settled.freedom,
        fixed_set=fixed_set or len(values) < 2,
        terminal=target.terminal,
        earliest_time=target.low,
        evaluations=evaluations,
        draws=draws,
        length=data.shape[1] * blocks,
        heavy_tailed=settled.heavy_tailed,
    )
    if tolerance is None:
        return estimate
    return replace(estimate, reached=is_within(estimate, tolerance))


def _infinite(
    bound: str, target: Target, evaluations: int, data: Tensor, blocks: int, fixed_set: bool, why: str
) -> BoundEstimate:
    """The estimate if the integral diverges at t = 0 or the data have probability zero."""
    settled = SequenceValues(torch.full((len(data),), math.inf, dtype=torch.float64), math.nan, 0)
    return replace(_estimate(bound, settled, target, evaluations, 0, data, blocks, fixed_set, None), why_infinite=why)


def _exact(
    network: Network,
    process: TokenProcess,
    dynamics: Dynamics,
    data: Tensor,
    batch: int,
    fixed_set: bool,
    progress: Progress | None,
) -> BoundEstimate:
    """The exact likelihood of an autoregressive model: one evaluation per sequence, no Monte Carlo error."""
    counter = _Counter(progress, planned=len(data))
    parts: list[Tensor] = []
    for rows in parts_of(len(data), batch):
        x0 = data[rows].to(network.device)
        parts.append(dynamics.token_nats(network.of_sequences(rows), process, x0).mean(1).cpu())
        counter.add(len(rows))
    return exact_estimate("tight", torch.cat(parts), 1, data.shape[1], fixed_set)


def _check(
    method: Method,
    process: TokenProcess,
    data: Tensor,
    bound: str,
    draws: int,
    tolerance: float | None,
    time_floor: float | None,
    batch: int,
    max_draws: int,
) -> None:
    method.check(process)
    method.check_bound(bound, time_floor)
    process.check_tokens(data)
    if data.dim() != 2 or 0 in data.shape:
        raise ValueError(f"data must be sequences [N, L], at least one of at least one token (got {list(data.shape)})")
    if draws < 1:
        raise ValueError(f"a bound needs at least one draw per sequence (got {draws})")
    if batch < 1:
        raise ValueError(f"a batch has at least one sequence (got {batch})")
    if max_draws < 1:
        raise ValueError(f"max_draws must be at least 1 (got {max_draws})")
    check_tolerance(tolerance)
