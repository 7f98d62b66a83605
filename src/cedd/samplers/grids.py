"""Time grids: where the steps of a sampler lie. t = 1 is noise, t = 0 is data; grids run downwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Integral

import torch
from torch import Tensor

from cedd.process import TokenProcess
from cedd.schedules import check_time

LAST_TIME = 1e-5
"""Where the steps end; a final denoising step goes from there to clean data (as in the paper's experiments)."""

MOST_STEPS = 1_000_000
"""What is known of each step is kept while sampling, some 100 bytes; steps that are finer by far than a token's change
give nothing."""

_FINE = 8192


def default_steps(length: int) -> int:
    """Steps for texts of `length` tokens: one for four tokens, from 64 to 256.

    Tokens drawn in the same step do not see each other, but those of a step lie far apart: of texts that are judged by
    another model, a step a token were not measurably better (docs/sampling.md). Every step is a call of the network.
    """
    return min(max(length // 4, 64), 256)


GridFunction = Callable[[TokenProcess, int, float, float], Tensor]


def uniform_grid(process: TokenProcess, steps: int, start: float, end: float) -> Tensor:
    """Steps of equal length in t."""
    del process
    return torch.linspace(start, end, steps + 1, dtype=torch.float64)


def jump_grid(process: TokenProcess, steps: int, start: float, end: float) -> Tensor:
    """Steps in which equally many tokens jump: equal parts of the integral of alive (alpha' + beta' (1 - 1/V)).

    The reverse process jumps as often as the forward one. For absorb these are equal parts of `alive`, which for
    the log-linear schedule is the uniform grid again; for uniform, equal parts of sigma.
    """
    fine = torch.linspace(end, start, _FINE * max(1, -(-steps // 1024)) + 1, dtype=torch.float64)
    alive, beta = torch.exp(-process.alpha(fine)), process.beta(fine)
    masked = -alive.diff()
    shuffled = (1 - 1 / process.vocab_size) * beta.diff() * (alive[1:] + alive[:-1]) / 2
    mass = torch.cat([torch.zeros(1, dtype=torch.float64), (masked + shuffled).cumsum(0)])
    goals = torch.linspace(1, 0, steps + 1, dtype=torch.float64) * mass[-1]
    upper = torch.searchsorted(mass, goals).clamp(1, len(mass) - 1)
    low, high = mass[upper - 1], mass[upper]
    share = ((goals - low) / (high - low).clamp_min(torch.finfo(torch.float64).tiny)).clamp(0.0, 1.0)
    times = fine[upper - 1] + share * (fine[upper] - fine[upper - 1])
    times[0], times[-1] = start, end
    return times


GRIDS: Mapping[str, GridFunction] = {"uniform": uniform_grid, "jumps": jump_grid}


def time_grid(
    process: TokenProcess,
    steps: int,
    grid: str | Tensor = "uniform",
    *,
    start: float = 1.0,
    end: float = LAST_TIME,
    final_denoise: bool = True,
) -> Tensor:
    """The times of a run, float64, strictly falling: `steps` steps from `start` to `end`, then to 0 if
    `final_denoise`. A tensor is taken as the times themselves."""
    if isinstance(grid, Tensor):
        times = check_time(grid).cpu().flatten()
        if len(times) < 2 or not bool((times.diff() < 0).all()):
            raise ValueError("a time grid needs at least two times, from noise down to data")
    else:
        if not isinstance(steps, Integral):
            raise ValueError(f"steps must be a whole number; got {steps}")
        if steps < 1:
            raise ValueError(f"steps must be at least 1; got {steps}")
        if steps > MOST_STEPS:
            raise ValueError(f"steps must be at most {MOST_STEPS:,}, where one a token is plenty; got {steps:,}")
        if grid not in GRIDS:
            raise ValueError(f"unknown time grid {grid!r}; use one of {', '.join(GRIDS)}")
        if not end < start <= 1:
            raise ValueError(f"sampling starts at a time in ({end:g}, 1], where 1 is noise; got {start:g}")
        times = GRIDS[grid](process, steps, start, end)
    if final_denoise and float(times[-1]) > 0:
        times = torch.cat([times, torch.zeros(1, dtype=torch.float64)])
    return times
