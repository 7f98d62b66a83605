"""Stratified hazard sampling (Jang and Han, arXiv 2601.02799): a token changes when the sum of its probabilities of
change crosses a threshold, not by a separate draw in each step.

Shapes: B batch, L positions, V vocabulary; R rows.

With p_k the probability of a change in step k by the rule, and one phase u ~ U(0, 1) per position, the token of a
position changes in step k if an integer lies in (u + p_1 + ... + p_{k-1}, u + p_1 + ... + p_k]. The new token is drawn
as usual. Averaged over u, the probability in each step is p_k, but the number of changes of a token has the smallest
possible variance.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from cedd.dynamics import StepRule
from cedd.methods import Method
from cedd.network import flat_places, put_at
from cedd.process import Noise, TokenProcess
from cedd.samplers.choice import inverse_cdf, jump_weights, leap_of
from cedd.samplers.constraints import Constraint
from cedd.samplers.grid_sampler import BackwardSampler, GridRun, GridStep, PlainStep
from cedd.samplers.random_numbers import Use


@dataclass(frozen=True)
class Stratified(BackwardSampler):
    """Stratified hazard sampling: the changes of each position are spread evenly over time.

    Args:
        chances: the rule whose probabilities are summed; by default analytic.
    """

    chances: StepRule | None = None
    name: str = field(default="stratified", init=False)

    def check(self, method: Method, process: TokenProcess, constraint: Constraint | None = None) -> None:
        super().check(method, process, constraint)
        if process.has_mask:
            raise ValueError(
                f"{self.name} spaces out the changes of a token, but a mask is revealed only once; use it on uniform, "
                "or sampler='analytic'"
            )

    def own_step(self, run: GridRun, x: Tensor, plain: PlainStep) -> GridStep:
        law, reached = self.chances or run.rule, run.uniform(Use.JUMP).flatten()

        def step(x: Tensor, k: int, noise: Noise, earlier: Noise) -> Tensor:
            nonlocal reached
            v = run.uniform(Use.TARGET, k).flatten()

            def chosen(outputs: Tensor, here: Tensor, rows: Tensor) -> Tensor:
                now, next_ = noise.like(here), earlier.like(here)
                leap, probs = leap_of(law, run.affine, run.sharpening, outputs, here, now, next_)
                after = reached[rows] + (1 - leap.stay)
                # Few tokens change: only these need a distribution.
                few = flat_places(after.floor() > reached[rows].floor())
                from_ = here[few]
                weights = jump_weights(leap.at(few), probs[few], from_, noise.like(from_), run.sharpening)
                to = torch.where(weights.sum(-1) > 0, inverse_cdf(weights, v[rows[few]]), from_)
                return torch.stack([here.index_copy(0, few, to).double(), after], 1)

            rows, found = run.evaluate(x, run.free, noise, chosen)
            if len(rows):
                reached = reached.index_copy(0, rows, found[:, 1])
                x = put_at(x, rows, found[:, 0])
            return x

        return step
