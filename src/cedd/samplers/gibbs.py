"""The Gibbs corrector: after each step some positions are redrawn given all others, at the same time.

Shapes: B batch, L positions, V vocabulary, n states; R rows.

After an analytic step to s, positions are redrawn from their law given all others at s,

    p(x_i = y | others) = b + keep g_y,      p(x_i = mask | others) = a,

with g the network's distribution of x_0 at position i given the other positions only, as `bayes` outputs it. On absorb
the network's output at a visible token is not such a distribution, so the positions are masked first, for every method.
With a perfect network x_s keeps its distribution if one position is redrawn at a time; positions redrawn together
ignore each other.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from cedd.methods import Method
from cedd.network import put_at
from cedd.parameterization import Bayes
from cedd.process import Noise, TokenProcess
from cedd.samplers.choice import Sharpening, beliefs, inverse_cdf, is_surely_mask
from cedd.samplers.constraints import Constraint
from cedd.samplers.grid_sampler import BackwardSampler, GridRun, GridStep, PlainStep
from cedd.samplers.random_numbers import Use


@dataclass(frozen=True)
class Gibbs(BackwardSampler):
    """The Gibbs corrector: after each analytic step, some positions are redrawn given all others.

    Args:
        share: share of positions that are redrawn together; at least one position.
        sweeps: number of corrections after each step, with one network call each.
        start: the latest time at which the corrector runs; 1 is noise.
        stop: the earliest time.
    """

    share: float = 0.125
    sweeps: int = 1
    start: float = 1.0
    stop: float = 0.0
    name: str = field(default="gibbs", init=False)

    def __post_init__(self) -> None:
        if not (0 < self.share <= 1 and self.sweeps >= 1 and 0 <= self.stop <= self.start <= 1):
            raise ValueError(
                f"{self.name} needs a share in (0, 1], a sweep at least, and times 0 <= stop <= start <= 1; "
                f"got {self.share}, {self.sweeps} and {self.stop}, {self.start}"
            )

    def check(self, method: Method, process: TokenProcess, constraint: Constraint | None = None) -> None:
        super().check(method, process, constraint)
        if process.can_shuffle and not isinstance(method.parameterization, Bayes):
            raise ValueError(
                f"the sampler {self.name} needs leave-one-out predictions, which {method.name} does not give on a "
                "process that shuffles; use bayes, or sampler='analytic'"
            )

    def own_step(self, run: GridRun, x: Tensor, plain: PlainStep) -> GridStep:
        number = max(1, round(self.share * x.shape[1]))

        def step(x: Tensor, k: int, noise: Noise, earlier: Noise) -> Tensor:
            x = plain(x, k)
            if self.stop <= float(earlier.t) <= self.start:
                for sweep in range(self.sweeps):
                    x = redrawn(run, x, earlier, number, k * self.sweeps + sweep)
            return x

        return step


def redrawn(run: GridRun, x: Tensor, noise: Noise, number: int, step: int) -> Tensor:
    """x [B, L] after redrawing this number of positions per sequence at the time of `noise`."""
    order = run.uniform(Use.PLACE, step).masked_fill(~run.free, 2.0)
    chosen = run.free & (order.argsort(1).argsort(1) < number)
    if not run.process.can_shuffle:
        x = x.masked_fill(chosen, run.process.vocab_size)
    v = run.uniform(Use.REDRAW, step)

    def choose(outputs: Tensor, here: Tensor, rows: Tensor) -> Tensor:
        at = noise.like(here)
        log_probs = beliefs(run.affine, run.sharpening, outputs, here, at)
        return inverse_cdf(redrawing_law(log_probs.exp_(), at, run.sharpening), v.flatten()[rows])

    rows, tokens = run.evaluate(x, chosen & ~is_surely_mask(v, noise.a), noise, choose)
    if noise.has_mask:
        x = x.masked_fill(chosen, run.process.vocab_size)
    return put_at(x, rows, tokens)


def redrawing_law(probs: Tensor, noise: Noise, sharpening: Sharpening | None = None) -> Tensor:
    """The law [R, n] of positions at the time of noise [R], from distributions g [R, V] of x_0."""
    law = noise.b[:, None] + noise.keep[:, None] * probs
    if sharpening is not None and sharpening.excluded:  # the mask keeps its probability
        law = sharpening.without(law, 0.0)
        law = law * (noise.alive[:, None] / law.sum(-1, keepdim=True))
    return torch.cat([law, noise.a[:, None]], 1) if noise.has_mask else law
