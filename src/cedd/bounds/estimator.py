"""The bound of a model on data, estimated with an honest error.

Shapes: N sequences, L positions, V vocabulary, D draws per sequence (a draw is a time and a noisy sequence at it).

The bounds `tight`, `j1` and `j2` are defined in dynamics/reverse.py: a path integral plus constants (`terminal`) that
no model influences, and for a path that stops short of t = 0 what its last step costs.

Two ways to draw:

    stratified    times stratified within each sequence and across sequences, at a density that follows the scatter of
                  the integrand (bounds/times.py); noisy sequences with one position chosen on purpose, which keeps
                  the variance finite down to t = 0 (bounds/proposal.py); cross-fitted control variates
                  (bounds/control.py). The default, and the one to use.
    independent   independent uniform times and plain noise, as in the paper; lbar for j2 and l otherwise. Its variance
                  grows without bound (like a logarithm) as times near 0 are met, so that it gets a standard error but
                  no interval: benchmarks/bound_coverage.py shows how often that would miss.

Errors. The population's is the standard deviation of the N per-sequence values over sqrt(N), less what they show of a
curve in time that all sequences share: stratification across sequences has taken that out of their mean. The Monte
Carlo error, for these very sequences, comes from two independent halves of the draws (bounds/drawing.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from cedd.bounds.drawing import Evaluation, IndependentDraws, SequenceValues, StratifiedDraws, parts_of
from cedd.bounds.estimate import BoundEstimate, mean_and_stderr
from cedd.device import model_device
from cedd.dynamics import Bound, Corrector, Dynamics
from cedd.dynamics.path import Target
from cedd.methods import Method, get_method
from cedd.network import AnyModel, Network, evaluating
from cedd.process import TokenProcess

Sampling = Literal["stratified", "independent"]
Progress = Callable[[int, int], None]
"""Told, after each batch, how many evaluations are done and how many are planned so far."""

_WORTH_SETTLING = 1.125  # so many times as many draws: settling all of them after every round would be quadratic
_HOPELESS = 0.05  # the share of Monte Carlo noise in the variance below which more draws are not worth while


def estimate_bound(
    model: AnyModel,
    process: TokenProcess,
    data: Tensor,
    *,
    method: str | Method,
    bound: Bound = "tight",
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
    **extras: Tensor,
) -> BoundEstimate:
    """A bound on the negative log-likelihood of data [N, L], in nats per token, with its error (see the module's head).

    Down to t = 0, a network whose cost of clean tokens grows like 1/t has an infinite bound. The path of methods whose
    every network is such (sedds on a process that shuffles, dfm) stops before (`Method.with_stop`); for another,
    time_floor=1e-3 gives a finite bound that is as true.

    Args:
        model: any callable `(x_t [B, L] int64, sigma [B] float32) -> [B, L, V]`; one with `features` and `head` is run
            without ever holding all of [B, L, V].
        process: the process that it was trained to undo.
        data: token ids [N, L].
        method: what the model's outputs mean.
        bound: "tight", a true bound, or the paper's "j1" or "j2".
        draws: noisy sequences per sequence of the data, made even where sampling is stratified. The paper's
            per-sequence J1 is bound="j1", draws=1024.
        tolerance: go on in rounds of `draws` until the 95% interval of the perplexity is this narrow (0.005: within
            half a percent on either side), `max_draws` are made, or more draws cannot help because the sequences
            themselves differ.
        generator: the random number generator.
        sampling: "stratified" or "independent" (the module's head).
        time_floor: where the path of `tight` ends: there x_0 is drawn, and what that costs is counted. Default: where
            the method's does, which for most is 0. For j1 and j2 the earliest time, 1e-4 as in the paper.
        corrector: dfm's corrector.
        fixed_set: give the error for these very sequences instead of for the population they are drawn from.
        nested: draw the noise so that, with equal generators, texts of different lengths are shown the same noise
            where they begin alike (in batches of at least half the draws).
        max_draws: the most that a tolerance can ask for.
        batch: noisy sequences shown to the network at once.
        device: where the network lives, by default where its parameters are.
        progress: told, after each batch, how many evaluations are done and how many are planned so far.
        extras: what the network takes besides, with one entry a sequence [N, ...]; handed to it by name.
    """
    chosen = get_method(method)
    _check(chosen, process, data, bound, draws, tolerance, time_floor)
    if tolerance is not None and sampling == "independent":
        raise ValueError("independent draws have no interval that a tolerance could be held against; use stratified")
    dynamics = chosen.dynamics if corrector is None else chosen.dynamics.with_corrector(corrector)
    home = model_device(model, data.device) if device is None else device
    network = Network.of(model, process.vocab_size, home, extras, len(data))
    clean = data.detach().to(device="cpu", dtype=torch.int64)
    with evaluating(model):
        if not dynamics.noisy:
            return _exact(network, process, dynamics, clean, batch, fixed_set, progress)
        way = sampling or "stratified"
        earliest = dynamics.earliest(chosen.parameterization, process, bound)
        low = earliest if time_floor is None else time_floor
        with_entropy = way == "stratified" or bound != "j2"
        target = dynamics.target(chosen.parameterization, process, bound, with_entropy=with_entropy, low=low)
        counter = _Counter(progress)
        evaluation = Evaluation(network, process, clean, target, batch, counter.add, nested)
        if evaluation.grows_like_inverse_time():
            return _infinite(bound, target, counter.done, clean, fixed_set)
        drawn = StratifiedDraws(evaluation) if way == "stratified" else IndependentDraws(evaluation)
        total = settled_at = 0
        while True:
            counter.planned += draws * len(clean)
            drawn.add(draws, generator)
            total += draws
            if drawn.diverges:
                return _infinite(bound, target, counter.done, clean, fixed_set)
            if total < _WORTH_SETTLING * settled_at and total + draws <= max_draws:
                continue
            settled, settled_at = drawn.settle(), total
            estimate = _estimate(bound, settled, target, counter.done, total, clean, fixed_set, tolerance)
            if estimate.reached or total + draws > max_draws or _is_hopeless(estimate):
                return estimate


def _estimate(
    bound: str,
    settled: SequenceValues,
    target: Target | None,
    evaluations: int,
    draws: int,
    data: Tensor,
    fixed_set: bool,
    tolerance: float | None,
) -> BoundEstimate:
    """An estimate of settled values; without a target they are exact."""
    terminal = 0.0 if target is None else target.terminal
    values = settled.per_sequence + terminal
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
        terminal=terminal,
        earliest_time=0.0 if target is None else target.low,
        evaluations=evaluations,
        draws=draws,
        length=data.shape[1],
        heavy_tailed=settled.heavy_tailed,
    )
    if tolerance is None:
        return estimate
    low, high = estimate.ci95
    return replace(estimate, reached=(high - low) / 2 <= math.log1p(tolerance))


def _infinite(bound: str, target: Target, evaluations: int, data: Tensor, fixed_set: bool) -> BoundEstimate:
    """The estimate of an integral that diverges at t = 0."""
    settled = SequenceValues(torch.full((len(data),), math.inf, dtype=torch.float64), math.nan, 0)
    return _estimate(bound, settled, target, evaluations, 0, data, fixed_set, None)


def _is_hopeless(estimate: BoundEstimate) -> bool:
    """Whether more draws cannot narrow the interval: the sequences differ more than their draws scatter."""
    if estimate.fixed_set:
        return estimate.monte_carlo_stderr == 0
    return estimate.monte_carlo_stderr**2 < _HOPELESS * estimate.sequence_stderr**2


def _exact(
    network: Network,
    process: TokenProcess,
    dynamics: Dynamics,
    data: Tensor,
    batch: int,
    fixed_set: bool,
    progress: Progress | None,
) -> BoundEstimate:
    """The likelihood itself, where it is known: no Monte Carlo error, one evaluation a sequence."""
    counter = _Counter(progress, planned=len(data))
    parts: list[Tensor] = []
    for rows in parts_of(len(data), batch):
        x0 = data[rows].to(network.device)
        parts.append(dynamics.token_nats(network.of_sequences(rows), process, x0).mean(1).cpu())
        counter.add(len(rows))
    settled = SequenceValues(torch.cat(parts), 0.0, len(data))
    return _estimate("tight", settled, None, len(data), 1, data, fixed_set, None)


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


def _check(
    method: Method,
    process: TokenProcess,
    data: Tensor,
    bound: str,
    draws: int,
    tolerance: float | None,
    time_floor: float | None,
) -> None:
    method.check(process)
    method.check_bound(bound)
    if data.dim() != 2 or 0 in data.shape:
        raise ValueError(f"data must be sequences [N, L], at least one of at least one token; got {list(data.shape)}")
    process.check_tokens(data)
    if draws < 1:
        raise ValueError(f"a bound needs at least one draw per sequence; got {draws}")
    if tolerance is not None and not tolerance > 0:
        raise ValueError(f"a tolerance is a positive share, such as 0.005 for half a percent; got {tolerance!r}")
    if time_floor is not None and not 0 <= time_floor < 1:
        raise ValueError(f"the earliest time must lie in [0, 1); got {time_floor!r}")
