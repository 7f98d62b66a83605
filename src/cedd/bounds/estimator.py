"""The bound of a model on data, estimated with an honest error.

Shapes: N sequences, L positions, V vocabulary, D draws per sequence (a draw is a time and a noisy sequence at it).

The bounds `tight`, `j1` and `j2` are defined in bounds/target.py; all three are one path integral plus constants
(`terminal`) that no model influences.

Two ways to draw:

    stratified    times stratified within each sequence and across sequences, at a density that follows the scatter of
                  the integrand (bounds/times.py); noisy sequences with one position chosen on purpose, which keeps
                  the variance finite down to t = 0 (bounds/proposal.py); cross-fitted control variates
                  (bounds/control.py). The default for `tight`, and the one to use.
    independent   independent uniform times and plain noise, as in the paper; lbar for j2 and l otherwise. The default
                  for `j1` and `j2`. Its variance grows without bound (like a logarithm) as times near 0 are met.

Errors. The population's is the standard deviation of the N per-sequence values over sqrt(N). It treats them as
independent, which stratification across sequences makes slightly pessimistic and never optimistic: what strata share is
the mean curve in time, and the control variates have taken that out of each value already. The Monte Carlo error, of
times and noise alone, comes from two independent halves of the draws (bounds/drawing.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from cedd.bounds.autoregressive import sequence_nats
from cedd.bounds.drawing import Evaluation, IndependentDraws, Settled, StratifiedDraws, parts_of
from cedd.bounds.estimate import BoundEstimate, mean_and_stderr
from cedd.bounds.exact import Bound
from cedd.bounds.flow_matching import FLOW_LOW, NO_CORRECTOR, Corrector
from cedd.bounds.rows import for_float64
from cedd.bounds.target import check_bound, flow_target, score_target
from cedd.objectives import Method, Model, get_method
from cedd.objectives.flow_matching import FlowMatching
from cedd.process import TokenProcess

Sampling = Literal["stratified", "independent"]
Progress = Callable[[int, int], None]
"""Told, after each batch, how many evaluations are done and how many are planned so far."""

_HOPELESS = 0.05  # the share of Monte Carlo noise in the variance below which more draws are not worth while


def estimate_bound(
    model: Model,
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
    max_draws: int = 4096,
    batch: int = 32,
    device: torch.device | str | None = None,
    progress: Progress | None = None,
) -> BoundEstimate:
    """A bound on the negative log-likelihood of data [N, L], in nats per token, with its error (see the module's head).

    A network whose cost of clean tokens grows like 1/t (sedds on a process that shuffles, dfm without a time floor) has
    an infinite bound, and so is the estimate; time_floor=1e-4 gives the finite numbers of published code.

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
        generator: what is random.
        sampling: "stratified" or "independent"; by default what the module's head says for the bound.
        time_floor: leave out earlier times, as published code does (1e-4). Default 0, but 1e-4 for dfm, whose bound is
            infinite without (and whose last step is then counted).
        corrector: dfm's corrector.
        fixed_set: give the error for these very sequences instead of for the population they are drawn from.
        max_draws: the most that a tolerance can ask for.
        batch: noisy sequences shown to the network at once.
        device: where the network lives, by default where its parameters are.
        progress: told, after each batch, how many evaluations are done and how many are planned so far.
    """
    chosen = get_method(method)
    _check(chosen, process, data, bound, draws, tolerance, time_floor, corrector)
    network, where = for_float64(model, _device_of(model, data, device))
    clean = data.detach().to(device="cpu", dtype=torch.int64)
    with evaluating(model):
        if chosen.causal:
            return _exact(network, process, chosen, clean, batch, where, fixed_set, progress)
        way = sampling or ("stratified" if bound == "tight" else "independent")
        if isinstance(chosen.objective, FlowMatching):
            low = FLOW_LOW if time_floor is None else time_floor
            target = flow_target(process, chosen, low, corrector or NO_CORRECTOR)
        else:
            with_entropy = way == "stratified" or bound != "j2"
            target = score_target(process, chosen, bound, with_entropy, time_floor or 0.0)
        counter = _Counter(progress)
        evaluation = Evaluation(network, process, clean, target, batch, where, counter.add)
        if evaluation.grows_like_inverse_time():
            return _infinite(bound, target.terminal, counter.done, clean, fixed_set)
        drawn = StratifiedDraws(evaluation) if way == "stratified" else IndependentDraws(evaluation)
        total = 0
        while True:
            counter.planned += draws * len(clean)
            drawn.add(draws, generator)
            total += draws
            settled = drawn.settle()
            estimate = _estimate(bound, settled, target.terminal, counter.done, total, clean, fixed_set, tolerance)
            if estimate.reached or total + draws > max_draws or _is_hopeless(estimate):
                return estimate


def _estimate(
    bound: str,
    settled: Settled,
    terminal: float,
    evaluations: int,
    draws: int,
    data: Tensor,
    fixed_set: bool,
    tolerance: float | None,
) -> BoundEstimate:
    values = settled.per_sequence + terminal
    mean, error = mean_and_stderr(values)
    estimate = BoundEstimate(
        bound=bound,
        nats_per_token=mean,
        per_sequence=values,
        sequence_stderr=math.sqrt(error**2 + settled.shared),
        monte_carlo_stderr=math.sqrt(settled.variance),
        monte_carlo_freedom=settled.freedom,
        fixed_set=fixed_set or len(values) < 2,
        terminal=terminal,
        evaluations=evaluations,
        draws=draws,
        length=data.shape[1],
    )
    if tolerance is None:
        return estimate
    low, high = estimate.ci95
    return replace(estimate, reached=(high - low) / 2 <= math.log1p(tolerance))


def _infinite(bound: str, terminal: float, evaluations: int, data: Tensor, fixed_set: bool) -> BoundEstimate:
    """The estimate of an integral that diverges at t = 0."""
    settled = Settled(torch.full((len(data),), math.inf, dtype=torch.float64), math.nan, 0)
    return _estimate(bound, settled, terminal, evaluations, 0, data, fixed_set, None)


def _is_hopeless(estimate: BoundEstimate) -> bool:
    """Whether more draws cannot narrow the interval: the sequences differ more than their draws scatter."""
    if estimate.fixed_set:
        return estimate.monte_carlo_stderr == 0
    return estimate.monte_carlo_stderr**2 < _HOPELESS * estimate.sequence_stderr**2


def _exact(
    model: Model,
    process: TokenProcess,
    method: Method,
    data: Tensor,
    batch: int,
    device: torch.device,
    fixed_set: bool,
    progress: Progress | None,
) -> BoundEstimate:
    """The likelihood of a causal network: no Monte Carlo error, one evaluation a sequence."""
    counter = _Counter(progress, planned=len(data))
    parts: list[Tensor] = []
    for rows in parts_of(len(data), batch):
        parts.append(sequence_nats(model, process, method, data[rows].to(device)).cpu())
        counter.add(len(rows))
    settled = Settled(torch.cat(parts), 0.0, len(data))
    return _estimate("tight", settled, 0.0, len(data), 1, data, fixed_set, None)


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
    corrector: Corrector | None,
) -> None:
    method.check(process)
    check_bound(method, bound)
    if data.dim() != 2 or 0 in data.shape:
        raise ValueError(f"data must be sequences [N, L], at least one of at least one token; got {list(data.shape)}")
    process.check_tokens(data)
    if draws < 1:
        raise ValueError(f"a bound needs at least one draw per sequence; got {draws}")
    if tolerance is not None and not tolerance > 0:
        raise ValueError(f"a tolerance is a positive share, such as 0.005 for half a percent; got {tolerance!r}")
    if time_floor is not None and not 0 <= time_floor < 1:
        raise ValueError(f"the earliest time must lie in [0, 1); got {time_floor!r}")
    if corrector is not None and not isinstance(method.objective, FlowMatching):
        raise ValueError(f"{method.name} has no corrector; only dfm has")


def _device_of(model: Model, data: Tensor, device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    if isinstance(model, torch.nn.Module):
        first = next(model.parameters(), None)
        if first is not None:
            return first.device
    return data.device


@contextmanager
def evaluating(model: Model) -> Generator[None]:
    """Without gradients, and with a module in evaluation mode for as long."""
    training = isinstance(model, torch.nn.Module) and model.training
    if isinstance(model, torch.nn.Module) and training:
        model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        if isinstance(model, torch.nn.Module) and training:
            model.train()
