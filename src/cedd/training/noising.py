"""A step's batches, noised: a pure function of (seed, step), whatever the number of ranks and micro-batches.

The times are strata of the global batch and the noise is drawn for all of it; a rank keeps the sequences that are its
own. Made on the CPU, ahead of time, in the prefetcher's thread.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cedd.data.batches import BatchSampler
from cedd.objectives.loss import Draws, NoisyBatch, noisy_batch
from cedd.objectives.methods import Method
from cedd.objectives.times import draw_times
from cedd.process import TokenProcess
from cedd.training.config import BatchConfig
from cedd.training.state import derived_seed

_NOISE = 1  # separates this use of the seed from others


@dataclass(frozen=True)
class StepBatch:
    """The micro-batches of one step on one rank."""

    step: int
    parts: tuple[NoisyBatch, ...]

    @property
    def rows(self) -> int:
        return sum(len(part.places) for part in self.parts)

    def pin_memory(self) -> StepBatch:
        return StepBatch(self.step, tuple(part.map(torch.Tensor.pin_memory) for part in self.parts))

    def to(self, device: torch.device, non_blocking: bool = True) -> StepBatch:
        return StepBatch(self.step, tuple(part.to(device) for part in self.parts))


class NoisingSampler:
    """The batch sampler with noise on top; `position` is the number of steps drawn."""

    def __init__(self, sampler: BatchSampler, method: Method, process: TokenProcess, config: BatchConfig) -> None:
        share = sampler.batch_size // sampler.world_size
        if share % config.accumulate:
            raise ValueError(
                f"a rank's share of {share} sequences cannot be cut into {config.accumulate} micro-batches: "
                f"use a batch size that is a multiple of {sampler.world_size * config.accumulate}"
            )
        self.sampler, self.method, self.process, self.config = sampler, method, process, config
        self.position = sampler.position

    def batch(self, step: int) -> StepBatch:
        """The micro-batches of step `step` on this rank."""
        sampler, x0 = self.sampler, self.sampler.batch(step)
        generator = torch.Generator().manual_seed(derived_seed(sampler.seed, step, _NOISE))
        times = draw_times(
            sampler.batch_size,
            generator,
            stratified=self.config.times == "stratified",
            low=self.config.lowest_time,
        )
        everyone = (sampler.batch_size, x0.shape[1])
        draws = Draws.make(everyone, self.process.vocab_size, x0.device, generator)
        micro = len(x0) // self.config.accumulate
        parts: list[NoisyBatch] = []
        for start in range(0, len(x0), micro):
            first = sampler.rank * len(x0) + start
            mine = slice(first, first + micro)
            part = x0[start : start + micro]
            parts.append(noisy_batch(self.method, self.process, part, times[mine], draws.part(mine)))
        return StepBatch(step, tuple(parts))
