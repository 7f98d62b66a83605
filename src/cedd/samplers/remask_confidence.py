"""ReMDM's confidence schedule (Wang et al. 2025): the less probable a token was when it was drawn, the likelier it is
masked again.

Shapes: B batch, L positions; R rows.

With psi_i the probability with which token i was drawn, and r_max = min(1, a_s / alive_t) as in `remask_capped`,

    r_i = r_max min(1, tokens exp(-psi_i) / sum_j exp(-psi_j)),        the sum over the tokens of the sequence,

so that about `tokens` of a sequence are masked again in a step. Masks are revealed sooner in turn, so that the expected
number of masks is that of the process: p(stays) = (a_s - alive_t mean_i r_i) / a_t. Given tokens have psi_i = 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from cedd.methods import Method
from cedd.network import flat_places, put_at
from cedd.process import Noise, TokenProcess
from cedd.samplers.constraints import Constraint
from cedd.samplers.grid_sampler import BackwardSampler, GridRun, GridStep, PlainStep
from cedd.samplers.random_numbers import Use


@dataclass(frozen=True)
class RemaskByConfidence(BackwardSampler):
    """ReMDM's confidence schedule: tokens that were drawn with a low probability are masked again more often.

    Args:
        tokens: the largest expected number of tokens per sequence that are masked again in a step.
    """

    tokens: float = 1.0
    name: str = field(default="remask-confidence", init=False)
    draws_jointly: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.tokens >= 0:
            raise ValueError(
                f"{self.name}: the number of tokens to mask again must not be negative (got {self.tokens})"
            )

    def check(self, method: Method, process: TokenProcess, constraint: Constraint | None = None) -> None:
        super().check(method, process, constraint)
        if not process.has_mask:
            raise ValueError(f"{self.name} masks tokens again, and this process has no masks; use sampler='analytic'")
        if process.can_shuffle:
            raise ValueError(f"the sampler {self.name} needs a process that only masks (absorb); use 'analytic'")

    def own_step(self, run: GridRun, x: Tensor, plain: PlainStep) -> GridStep:
        confidence = torch.ones_like(x, dtype=torch.float64)
        mask = run.process.vocab_size

        def step(x: Tensor, k: int, noise: Noise, earlier: Noise) -> Tensor:
            masked = x == mask
            stay, again = confidence_chances(confidence, masked, run.free, noise, earlier, self.tokens)
            u, v = run.uniform(Use.JUMP, k), run.uniform(Use.TARGET, k).flatten()
            rows = flat_places(masked & run.free & (u >= stay))
            tokens, probs = run.reveal_with_confidence(x, noise.sigma.to(torch.float32), rows, v[rows])
            confidence.view(-1).index_copy_(0, rows, probs)
            return put_at(x.masked_fill(~masked & run.free & (u < again), mask), rows, tokens)

        return step


def confidence_chances(
    confidence: Tensor, masked: Tensor, free: Tensor, noise: Noise, earlier: Noise, tokens: float
) -> tuple[Tensor, Tensor]:
    """The probability that a mask stays [B, 1], and that a token is masked again [B, L]; see the top of this file."""
    possible = (earlier.a / noise.alive).clamp_max(1.0)
    shares = torch.softmax((-confidence).masked_fill(masked | ~free, -torch.inf), 1).nan_to_num(0.0)
    again = possible * (tokens * shares).clamp_max(1.0)
    count = (~masked & free).sum(1, keepdim=True).clamp_min(1)
    return (earlier.a - noise.alive * again.sum(1, keepdim=True) / count) / noise.a, again
