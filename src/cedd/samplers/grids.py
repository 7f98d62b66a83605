"""Time grids: where the steps of a sampler lie. t = 1 is noise, t = 0 is data; grids run downwards.

    kept       equal steps in the share of tokens that were never touched, keep = exp(-alpha-beta)
    flow       half of the steps equal in the share of masks a, half equal in log a
    jumps      the same expected number of jumps in every step
    uniform    equal steps in t

`kept` is the default of time reversal. The speed at which the network's posterior changes depends on the share of
remaining tokens and not on the time scale, so this grid has the smallest discretization error on most processes. It is
the uniform grid where keep falls linearly (absorb and uniform with the log-linear schedule).

`flow` is the default of flow matching, which redraws every token at the rate d log(a): equal steps in t are too coarse
near t = 0 for that, and equal steps in log t reveal too many masks at once near t = 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from cedd.names import check_at_least_one
from cedd.process import TokenProcess
from cedd.schedules import check_time

LAST_TIME = 1e-5
"""The last time of the steps; a final denoising step leads from there to clean data (as in the paper's experiments)."""

LAST_NOISE = 1e-4
"""The most noise alpha + beta at the end of the steps, for processes whose noise rises faster than t."""

MOST_STEPS = 1_000_000
"""Some 100 bytes per step are kept while sampling; many more steps than tokens change nothing."""

_FINE = 8192


def last_time(process: TokenProcess) -> float:
    """Where the steps end: at t = 1e-5, or earlier where the process still has more noise than 1e-4 there.

    A schedule with sigma(0) > 0 has more noise than that at any time, and ends at t = 1e-5.
    """
    if process.jumps_at_zero or float(process.sigma(LAST_TIME)) <= LAST_NOISE:
        return LAST_TIME
    return float(process.clocks.time(torch.tensor(LAST_NOISE, dtype=torch.float64)))


GridFunction = Callable[[TokenProcess, int, float, float], Tensor]
"""(process, steps, start, end) -> times [steps + 1], falling from start to end."""


def uniform_grid(process: TokenProcess, steps: int, start: float, end: float) -> Tensor:
    """Steps of equal length in t."""
    del process
    return torch.linspace(start, end, steps + 1, dtype=torch.float64)


def kept_grid(process: TokenProcess, steps: int, start: float, end: float) -> Tensor:
    """Equal parts of keep = exp(-alpha-beta)."""
    times = _fine_times(steps, start, end)
    return _even(-torch.exp(-process.sigma(times)), times, steps)


def flow_grid(process: TokenProcess, steps: int, start: float, end: float) -> Tensor:
    """Equal parts of a / (a_start - a_end) + log a / log(a_start / a_end), with a the share of masks."""
    if not process.has_mask:
        raise ValueError("grid='flow' needs a process with masks; use grid='kept'")
    times = _fine_times(steps, start, end)
    a = process.kernel(times).a
    return _even(a / (a[-1] - a[0]) + torch.log(a) / torch.log(a[-1] / a[0]), times, steps)


def jump_grid(process: TokenProcess, steps: int, start: float, end: float) -> Tensor:
    """Steps in which equally many tokens jump: equal parts of the integral of alive (alpha' + beta' (1 - 1/V)).

    The reverse process jumps as often as the forward one. For absorb these are equal parts of `alive`; for uniform,
    equal parts of sigma.
    """
    times = _fine_times(steps, start, end)
    alive, beta = torch.exp(-process.alpha(times)), process.beta(times)
    masked = -alive.diff()
    shuffled = (1 - 1 / process.vocab_size) * beta.diff() * (alive[1:] + alive[:-1]) / 2
    return _even(torch.cat([torch.zeros(1, dtype=torch.float64), (masked + shuffled).cumsum(0)]), times, steps)


def _fine_times(steps: int, start: float, end: float) -> Tensor:
    """Many more times than steps, ascending from end to start, and dense near `end` for noise that grows like a square
    root."""
    even = torch.linspace(end, start, _FINE + 2 * steps, dtype=torch.float64)
    first = math.log10(max(end, torch.finfo(torch.float64).tiny))
    near_end = torch.logspace(first, math.log10(start), _FINE // 8, dtype=torch.float64)[1:-1]
    return torch.cat([even, near_end]).sort().values


def _even(rising: Tensor, times: Tensor, steps: int) -> Tensor:
    """The times that divide an increasing function, given at fine times, into equal parts, in descending order."""
    goals = torch.linspace(1, 0, steps + 1, dtype=torch.float64) * (rising[-1] - rising[0]) + rising[0]
    upper = torch.searchsorted(rising, goals).clamp(1, len(rising) - 1)
    low, high = rising[upper - 1], rising[upper]
    share = ((goals - low) / (high - low).clamp_min(torch.finfo(torch.float64).tiny)).clamp(0.0, 1.0)
    cut = times[upper - 1] + share * (times[upper] - times[upper - 1])
    cut[0], cut[-1] = times[-1], times[0]
    return cut


GRIDS: Mapping[str, GridFunction] = {"kept": kept_grid, "flow": flow_grid, "jumps": jump_grid, "uniform": uniform_grid}


def time_grid(
    process: TokenProcess,
    steps: int,
    grid: str | Tensor = "kept",
    *,
    start: float = 1.0,
    end: float | None = None,
    final_denoise: bool = True,
) -> Tensor:
    """The times of a run, float64, strictly falling: `steps` steps from `start` to `end` (by default `last_time`),
    then to 0 if `final_denoise`. A tensor is taken as the times themselves."""
    if isinstance(grid, Tensor):
        times = check_time(grid).cpu().flatten()
        if len(times) < 2 or not bool((times.diff() < 0).all()):
            raise ValueError("a time grid needs at least two times, from noise down to data")
    else:
        check_at_least_one("steps", steps)
        if steps > MOST_STEPS:
            raise ValueError(f"steps must be at most {MOST_STEPS:,} (got {steps:,})")
        if grid not in GRIDS:
            raise ValueError(f"unknown time grid {grid!r}; use one of {', '.join(GRIDS)}")
        end = last_time(process) if end is None else end
        if not end < start <= 1:
            raise ValueError(f"t_start must be in ({end:g}, 1], where 1 is noise (got {start:g})")
        times = GRIDS[grid](process, steps, start, end)
    if final_denoise and float(times[-1]) > 0:
        times = torch.cat([times, torch.zeros(1, dtype=torch.float64)])
    return times
