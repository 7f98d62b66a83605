"""The noisy batches of a step: a function of (seed, step) only, for any number of ranks and micro-batches.

Times are stratified over the global batch, and noise is drawn for all of it; a rank keeps its own sequences. In block
diffusion every block has its own time, and both complements of a text share its clean half. Batches are made on the
CPU, ahead of time, in the prefetcher's thread.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from cedd.data.batches import BatchSampler
from cedd.losses import NoiseDraws, NoisyBatch, draw_times, noisy_batch
from cedd.methods import Method
from cedd.network import UNKNOWN_LABEL
from cedd.process import TokenProcess
from cedd.training.config import AdaptConfig, BatchConfig, block_sizes
from cedd.training.state import ATTENTION, LABELS, NOISE, derived_seed


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
    """Adds noise to the batches of a sampler; `position` is the number of steps drawn. Complementary batches are twice
    as large as the sampler's.

    Args:
        sampler: the batches without noise.
        method: the training method.
        process: the noise process.
        config: how times are drawn.
        steps: total number of steps, for a highest time that changes, annealed attention and growing blocks; `end_at`
            changes it.
        adapt: annealed attention, growing blocks, and the weight of the next-token loss.
        label_dropout: the share of sequences whose label is not given.
    """

    def __init__(
        self,
        sampler: BatchSampler,
        method: Method,
        process: TokenProcess,
        config: BatchConfig,
        steps: int = 1,
        adapt: AdaptConfig | None = None,
        label_dropout: float = 0.0,
    ) -> None:
        share = (1 + config.complementary) * sampler.batch_size // sampler.world_size
        if share % config.accumulate:
            raise ValueError(
                f"a rank's share of {share} sequences cannot be cut into {config.accumulate} micro-batches: "
                f"use a batch size that is a multiple of {sampler.world_size * config.accumulate}"
            )
        self.sampler, self.method, self.process, self.config = sampler, method, process, config
        self._ends, self.adapt, self.label_dropout = [(0, steps)], adapt or AdaptConfig(), label_dropout
        self.blocks = method.blocks_of(len(sampler.dataset[0]))
        """Blocks of a sequence, each with a time of its own; in the last step, if they grow."""
        self.position = sampler.position
        self.capacity = self._capacity(share // config.accumulate)

    def end_at(self, step: int, steps: int) -> None:
        """From this step on, the total number of steps is another one."""
        self._ends = [*self._ends, (step, steps)]

    def steps_at(self, step: int) -> int:
        """The total number of steps that is planned at step 0, 1, ..."""
        return next(steps for first, steps in reversed(self._ends) if first <= step)

    def highest_time(self, step: int) -> float:
        """The highest time of step 0, 1, ...; it changes linearly from the first step to the last."""
        first, last = self.config.highest_time, self.config.last_highest_time
        return first if last is None else first + (last - first) * min(1.0, step / max(1, self.steps_at(step) - 1))

    def method_at(self, step: int) -> Method:
        """The method, in the blocks of step 0, 1, ..."""
        if self.method.block is None or self.adapt.first_block is None:
            return self.method
        sizes = block_sizes(self.adapt, self.method.block)
        growing = self.adapt.growth * self.steps_at(step)
        stage = len(sizes) - 1 if step >= growing else int((len(sizes) - 1) * step / growing)
        return replace(self.method, block=sizes[stage])

    def visible_at(self, step: int, length: int) -> torch.Tensor | None:
        """[L, L] bool, which keys a query attends to at a step, while attention is annealed from causal to full."""
        share = (step + 1) / (self.adapt.anneal * self.steps_at(step)) if self.adapt.anneal > 0 else 1.0
        if share >= 1.0:
            return None
        generator = torch.Generator().manual_seed(derived_seed(self.sampler.seed, step, ATTENTION))
        return (torch.rand(length, length, generator=generator) < share) | torch.ones(length, length).tril().bool()

    def labels(self, step: int) -> torch.Tensor | None:
        """The labels of this rank's sequences at a step, of which some are dropped at random; None without labels."""
        if (labels := self.sampler.labels(step)) is None:
            return None
        generator = torch.Generator().manual_seed(derived_seed(self.sampler.seed, step, LABELS))
        dropped = torch.rand(self.sampler.batch_size, generator=generator) < self.label_dropout
        mine = slice(self.sampler.rank * len(labels), (self.sampler.rank + 1) * len(labels))
        return labels.masked_fill(dropped[mine], UNKNOWN_LABEL)

    def batch(self, step: int) -> StepBatch:
        """The micro-batches of a step on this rank."""
        sampler, x0 = self.sampler, self.sampler.batch(step)
        generator = torch.Generator().manual_seed(derived_seed(sampler.seed, step, NOISE))
        method = self.method_at(step)
        blocks = method.blocks_of(x0.shape[1])
        times = draw_times(
            sampler.batch_size * blocks,
            generator,
            stratified=self.config.times == "stratified",
            low=self.config.lowest_time,
            high=self.highest_time(step),
        )
        times = times.reshape(-1, blocks) if blocks > 1 else times
        everyone = (sampler.batch_size, x0.shape[1])
        draws = NoiseDraws.make(everyone, self.process.vocab_size, x0.device, generator)
        mine = slice(sampler.rank * len(x0), (sampler.rank + 1) * len(x0))
        times, draws, labels = times[mine], draws.part(mine), self.labels(step)
        if self.config.complementary:
            x0, times, draws = self._twice(x0, times, draws, step)
            labels = None if labels is None else labels.repeat_interleave(2)
        micro = len(x0) // self.config.accumulate
        views = 2 if self.config.complementary and micro % 2 == 0 else 1
        visible = self.visible_at(step, x0.shape[1]) if method.block is None else None
        weight, parts = self.adapt.next_token_weight, list[NoisyBatch]()
        for start in range(0, len(x0), micro):
            here = slice(start, start + micro)
            noised = (x0[here], times[here], draws.part(here))
            made = noisy_batch(method, self.process, *noised, self.capacity, views=views)
            clean = made.clean if made.in_blocks or not weight else x0[here][::views].contiguous()
            label = None if labels is None else labels[here]
            parts.append(replace(made, clean=clean, visible=visible, next_token_weight=weight, label=label))
        return StepBatch(step, tuple(parts))

    def _twice(
        self, x0: torch.Tensor, times: torch.Tensor, draws: NoiseDraws, step: int
    ) -> tuple[torch.Tensor, torch.Tensor, NoiseDraws]:
        """Each sequence next to its complement: what u masks at t, 1 - u does not mask at 1 - t."""
        others = self.config.lowest_time + self.highest_time(step) - times
        u, redraw = (torch.stack(pair, 1).flatten(0, 1) for pair in ((draws.u, 1 - draws.u), (draws.redraw,) * 2))
        return x0.repeat_interleave(2, 0), torch.stack([times, others], 1).flatten(0, 1), NoiseDraws(u, redraw)

    def _capacity(self, sequences: int) -> int | None:
        """A number of rows that a micro-batch almost never exceeds: the mean plus five standard deviations, at the
        highest times of the run, rounded up to tiles of 64. None if it is over three quarters of all rows.

        With s(t) the probability that a position counts, m sequences of L positions, and one stratum of a global batch
        of n for each, the number of rows has variance m L E[s(1-s)], plus L² m/(12 n²) s'² for the time's place in its
        stratum. If the m are not all strata, or times are independent, the second term is m L² Var s. In block
        diffusion the m sequences are blocks.
        """
        total, length = (1 + self.config.complementary) * self.sampler.batch_size, len(self.sampler.dataset[0])
        sequences, total, length = sequences * self.blocks, total * self.blocks, length // self.blocks
        low, high = self.config.lowest_time, max(self.highest_time(0), self.highest_time(self.steps_at(0)))
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
        """s(t): the probability that a position is one of the loss's rows."""
        noise, counts = self.process.noise(times), self.method.dynamics.positions
        masked = torch.full(times.shape, self.process.num_states - 1)
        share = noise.alive * counts(torch.zeros_like(masked), noise)
        return share + (1 - noise.alive) * counts(masked, noise) if self.process.has_mask else share
