"""Distances between samples of a perfect network and the data, by time grid; cited in docs/concepts/samplers.md.

python -m tests.samplers.grid_distances
"""

import sys

import numpy as np
import torch

import cedd
from cedd.process import TokenProcess
from cedd.samplers.grids import last_time, time_grid
from tests.samplers.chains import Table, sampler_law

GRIDS = ("uniform", "jumps", "kept")
STEPS = 32
PROCESSES = {
    "absorb, geometric schedule": lambda: cedd.absorb(3, schedule=cedd.Geometric(1e-4, 20.0)),
    "uniform": lambda: cedd.uniform(3),
    "roulette, p_m = 0.6": lambda: cedd.roulette(3, p_m=0.6),
    "hybrid, p_u = 0.3": lambda: cedd.hybrid(3, p_u=0.3),
    "hybrid, p_u = 0.99": lambda: cedd.hybrid(3, p_u=0.99),
}


class Perfect(Table):
    """The ideal `bayes` network for data p0 [V, V] on two positions: p(x_0 | x_t at the other position)."""

    def __init__(self, process: TokenProcess, p0: torch.Tensor) -> None:
        super().__init__(process, 2)
        self.process, self.p0 = process, p0

    def outputs(self, x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        times = self.process.clocks.time(sigma.double())
        seen = self.process.transition_matrix(times)[torch.arange(len(x))[:, None], x, : self.process.vocab_size]
        return torch.stack([seen[:, 1] @ self.p0.T, seen[:, 0] @ self.p0], 1).log()


def data(tokens: int = 3) -> torch.Tensor:
    """Probabilities of two tokens, [V, V]."""
    generator = torch.Generator().manual_seed(0)
    return torch.softmax(2.5 * torch.randn(tokens**2, dtype=torch.float64, generator=generator), 0).view(tokens, tokens)


def distance(process: TokenProcess, times: torch.Tensor) -> float:
    """Total variation between the data and what the analytic sampler draws at these times, by enumeration."""
    p0, n = data(process.vocab_size), process.num_states
    law = sampler_law(Perfect(process, p0), "bayes", "analytic", process, times).reshape(n, n)
    return float(np.abs(law[: len(p0), : len(p0)] - p0.numpy()).sum() / 2)


def times_of(process: TokenProcess, grid: str) -> torch.Tensor:
    """The steps of a grid; equal steps in time end at t = 1e-5."""
    return time_grid(process, STEPS, grid, end=1e-5 if grid == "uniform" else last_time(process))


def main() -> None:
    """Print the table."""
    sys.stdout.write(f"| process | {' | '.join(f'`{grid}`' for grid in GRIDS)} |\n|---|{'--:|' * len(GRIDS)}\n")
    for name, make in PROCESSES.items():
        process = make()
        cells = (f"{distance(process, times_of(process, grid)):.4f}" for grid in GRIDS)
        sys.stdout.write(f"| {name} | {' | '.join(cells)} |\n")


if __name__ == "__main__":
    main()
