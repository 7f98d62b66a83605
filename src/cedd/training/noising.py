"""A step's noisy batches: a pure function of (seed, step), whatever the number of ranks and micro-batches.

The times are stratified over the global batch and the noise is drawn for all of it; a rank keeps its own sequences.
Made on the CPU, ahead of time, in the prefetcher's thread.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from cedd.data.batches import BatchSampler
from cedd.losses import Draws, NoisyBatch, draw_times, noisy_batch
from cedd.methods import Method
from cedd.process import TokenProcess
from cedd.training.config import BatchConfig
from cedd.training.state import NOISE, derived_seed


@dataclass(frozen=True)
class StepBatch:
    """The micro-batches of one step on one rank."""

    step: int
    parts: tuple[NoisyBatch, ...]

    def pin_memory(self) -> StepBatch:
        return StepBatch(self.step, tuple(part.map(torch.Tensor.pin_memory) for part in self.parts))

    def to(self, device: torch.device, non_blocking: bool = True) -> StepBatch:
        return StepBatch(self.step, tuple(part.to(device) for part in self.parts))


class NoisingSampler:
    """The batch sampler, with noise added; `position` is the number of steps drawn. Complementary batches are twice as
    large as the sampler's.

    steps: of the run; a highest time that changes depends on it.
    """

    def __init__(
        self, sampler: BatchSampler, method: Method, process: TokenProcess, config: BatchConfig, steps: int = 1
    ) -> None:
        share = (1 + config.complementary) * sampler.batch_size // sampler.world_size
        if share % config.accumulate:
            raise ValueError(
                f"a rank's share of {share} sequences cannot be cut into {config.accumulate} micro-batches: "
                f"use a batch size that is a multiple of {sampler.world_size * config.accumulate}"
            )
        self.sampler, self.method, self.process, self.config = sampler, method, process, config
        self.steps = steps
        self.position = sampler.position
        self.capacity = self._capacity(share // config.accumulate)

    def highest_time(self, step: int) -> float:
        """The highest time of step 0, 1, ...: it changes linearly from the first step to the last."""
        first, last = self.config.highest_time, self.config.last_highest_time
        return first if last is None else first + (last - first) * min(1.0, step / max(1, self.steps - 1))

    def batch(self, step: int) -> StepBatch:
        """The micro-batches of step `step` on this rank."""
        sampler, x0 = self.sampler, self.sampler.batch(step)
        generator = torch.Generator().manual_seed(derived_seed(sampler.seed, step, NOISE))
        times = draw_times(
            sampler.batch_size,
            generator,
            stratified=self.config.times == "stratified",
            low=self.config.lowest_time,
            high=self.highest_time(step),
        )
        everyone = (sampler.batch_size, x0.shape[1])
        draws = Draws.make(everyone, self.process.vocab_size, x0.device, generator)
        mine = slice(sampler.rank * len(x0), (sampler.rank + 1) * len(x0))
        times, draws = times[mine], draws.part(mine)
        if self.config.complementary:
            x0, times, draws = self._twice(x0, times, draws, step)
        micro = len(x0) // self.config.accumulate
        parts: list[NoisyBatch] = []
        for start in range(0, len(x0), micro):
            here = slice(start, start + micro)
            parts.append(noisy_batch(self.method, self.process, x0[here], times[here], draws.part(here), self.capacity))
        return StepBatch(step, tuple(parts))

    def _twice(
        self, x0: torch.Tensor, times: torch.Tensor, draws: Draws, step: int
    ) -> tuple[torch.Tensor, torch.Tensor, Draws]:
        """Each sequence beside its complement: where u masks at t, 1 - u does not at 1 - t."""
        others = self.config.lowest_time + self.highest_time(step) - times
        u, redraw = (torch.stack(pair, 1).flatten(0, 1) for pair in ((draws.u, 1 - draws.u), (draws.redraw,) * 2))
        return x0.repeat_interleave(2, 0), torch.stack([times, others], 1).flatten(), Draws(u, redraw)

    def _capacity(self, sequences: int) -> int | None:
        """The number of rows that a micro-batch nearly never exceeds: five standard deviations above their mean number,
        at the highest times of the run, rounded up to tiles of 64; None where it is over three quarters of all.

        With s(t) the chance that a position counts, m sequences of L positions and one stratum of a global batch of n
        for each, their number has variance m L E[s(1-s)], and L² m/(12 n²) s'² for the time's place in its stratum;
        where the m are not all strata, or times are independent, m L² Var s instead of the latter.
        """
        total, length = (1 + self.config.complementary) * self.sampler.batch_size, len(self.sampler.dataset[0])
        low, high = self.config.lowest_time, max(self.highest_time(0), self.highest_time(self.steps))
        times = low + (high - low) * (torch.arange(256.0).double() + 0.5) / 256
        share = self._share_that_counts(times)
        if share.mean() > 0.75:
            return None
        variance = sequences * length * (share * (1 - share)).mean()
        if self.config.times == "stratified" and sequences == total:
            variance += length**2 * sequences / (12 * total**2) * (256 * share.diff()).square().mean()
        else:
            variance += sequences * length**2 * share.var()
        enough = sequences * length * share.mean() + 5 * variance.sqrt()
        return min(64 * math.ceil(float(enough) / 64), sequences * length)

    def _share_that_counts(self, times: torch.Tensor) -> torch.Tensor:
        """s(t): the chance that a position is one of the loss's rows."""
        noise, counts = self.process.noise(times), self.method.dynamics.positions
        masked = torch.full(times.shape, self.process.num_states - 1)
        share = noise.alive * counts(torch.zeros_like(masked), noise)
        return share + (1 - noise.alive) * counts(masked, noise) if self.process.has_mask else share
