"""Block diffusion: texts are written block by block, each by any sampler, given the blocks before it.

Shapes: B texts, L tokens of a text, b tokens of a block, N tokens that the network reads at once.

A block is a run of the sampler over b tokens, with the network of the next block after a text (`FinishedText`), whose
keys and values are kept (`Capabilities.cache`): they do not depend on what follows, so that nothing is approximated.
A prompt may end anywhere; blocks that it fills are read, and not drawn. The last block is drawn whole and cut.

Texts may be of any length. When the N tokens are full, the older half of the blocks is dropped and the rest is read
again from position 0: every block is written after at least N/2 - b and at most N - b tokens. Keys and values that had
seen dropped tokens are not kept.

With guidance by a label, the probabilities of every block are those of `guidance`, each of the two given the text
before the block, with and without the label.

A text that has ended, with one of the options' `stop` tokens, is not continued.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from cedd.block_layout import FinishedText
from cedd.network import AllowedTokens, Network, capabilities_of
from cedd.samplers.constraints import Constraint, Fixed, JointConstraint
from cedd.samplers.guidance import guided_text
from cedd.samplers.languages import BlockLanguages, LanguageConstraint
from cedd.samplers.options import Callback, default_steps
from cedd.samplers.random_numbers import text_seeds
from cedd.samplers.sampler import Sampler, SamplingRun


def first_of_window(number: int, most: int) -> int:
    """The first block in the context of block `number`, whose context has at most `most` blocks including itself."""
    kept = most // 2
    dropped = most - kept
    return 0 if number < most else dropped * -(-(number - most + 1) // dropped)


def reach_of(model: object, context: int | None) -> int | None:
    """N: what is given, or what the network declares; None: any."""
    return capabilities_of(model).max_length if context is None else context


def is_one_block(block: int, length: int, model: object, context: int | None) -> bool:
    """Whether a block is the whole context: the network then reads the text as if there were no blocks."""
    return block == length and reach_of(model, context) in (None, block)


def sample_in_blocks(sampler: Sampler, run: SamplingRun) -> Tensor:
    """The sequences of a run, [B, L]."""
    return _Writing(sampler, run).sample()


@dataclass
class _Writing:
    """The texts of a run and what they are written with."""

    sampler: Sampler
    run: SamplingRun

    def __post_init__(self) -> None:
        run, (batch, length) = self.run, self.run.shape
        assert run.method.block is not None
        self.block = run.method.block
        self.count = -(-length // self.block)
        """Blocks."""
        self.total = self.count * self.block
        if isinstance(run.constraint, JointConstraint) and not isinstance(run.constraint, LanguageConstraint):
            raise ValueError(
                "block diffusion models take languages and fixed tokens as constraints "
                f"(got a {type(run.constraint).__name__})"
            )
        if run.options.particles is not None:
            raise ValueError(
                "particles are whole texts, which are resampled while they are drawn; a block diffusion model "
                f"draws {self.block} tokens at a time and keeps what came before: use a model without blocks"
            )
        if run.options.x_start is not None and self.total != length:
            raise ValueError(f"x_start needs whole blocks of {self.block} tokens (got {length})")
        self.held = F.pad(run.held, (0, self.total - length))
        _check_prompts(self.held.view(batch, self.count, self.block))
        self.x = torch.full((batch, self.total), run.process.vocab_size, device=run.device)
        if isinstance(run.constraint, Fixed):
            tokens = F.pad(run.constraint.tokens.expand(run.shape), (0, self.total - length)).to(self.x)
            self.x = torch.where(self.held.to(self.x.device), tokens, self.x)
        most = reach_of(run.network.model, run.options.context) or self.total
        self.most = max(1, most // self.block)
        """Blocks of a context."""
        size = batch, min(self.most, self.count) * self.block
        self.text = guided_text(
            run.network,
            run.options.guidance,
            lambda network: FinishedText.of(network, self.block, *size, kept=run.options.cache),
        )
        self.seeds = [text_seeds(seed, self.count) for seed in run.seeds]
        self.ended = torch.zeros(batch, dtype=torch.bool)
        self.first = self.read = 0
        """The first block of the context, and the one after the last that was read."""
        self.shown = itertools.count()

    def sample(self) -> Tensor:
        length = self.run.length
        for number in range(self.count):
            here = slice(number * self.block, (number + 1) * self.block)
            rows = (~(self.ended | self.held[:, here].all(1))).nonzero().squeeze(1)
            if not len(rows):
                if bool(self.ended.all()):
                    break
                continue
            self._read_up_to(number)
            drawn = self.sampler.sample(self._run_of(number, here, rows))
            self.x[rows.to(self.x.device), here] = drawn
            self._end(here, rows)
        self._fill_ends()
        return self.x[:, :length]

    def _read_up_to(self, number: int) -> None:
        """Let the network read the blocks before this one, of its context."""
        first = first_of_window(number, self.most)
        if first != self.first:
            self.text.forget()
            self.first = self.read = first
        if self.read < number:
            self.text.read(self.x[:, self.read * self.block : number * self.block])
            self.read = number

    def _run_of(self, number: int, here: slice, rows: Tensor) -> SamplingRun:
        """The run of one block of some of the texts [R]."""
        run, options = self.run, self.run.options
        x_start = None if options.x_start is None else options.x_start[:, here][rows]
        callback = None if options.callback is None else self._watched(options.callback, number, here, rows)
        steps = default_steps(self.block, self.block) if options.steps is None else options.steps
        return replace(
            run,
            network=self._network_of(here).of_sequences(rows),
            method=run.method.of_one_block,
            length=self.block,
            seeds=[self.seeds[row][number] for row in _numbers(rows)],
            options=replace(options, x_start=x_start, callback=callback, steps=steps),
            constraint=self._constraint_of(here, rows),
            is_block=True,
        )

    def _network_of(self, here: slice) -> Network:
        """The network of the block after what was read, and the tokens that are allowed in it."""
        network, only = self.run.network, self.run.network.only
        if only is not None:
            where = F.pad(only.where.expand(self.run.shape), (0, self.total - self.run.length))
            only = AllowedTokens(where[:, here], only.tokens)
        conditions = {**(network.conditions or {}), **self.text.conditions}
        return replace(network, model=self.text, conditions=conditions, only=only)

    def _constraint_of(self, here: slice, rows: Tensor) -> Constraint | None:
        constraint = self.run.constraint
        if constraint is None:
            return None
        if isinstance(constraint, Fixed):
            where = self.held[:, here][rows]
            tokens = torch.where(where, self.x[:, here].cpu()[rows], 0)
            if isinstance(constraint, LanguageConstraint):
                before = self.x[rows.to(self.x.device), : here.start]
                return BlockLanguages(tokens, where, None, before, constraint.up_to(here.stop))
            return Fixed(tokens, where) if bool(where.any()) else None
        texts = self.x[rows.to(self.x.device)]

        def of_block(part: Tensor) -> Tensor:
            whole = texts.clone()
            whole[:, here] = part
            changed = F.pad(constraint(whole[:, : self.run.length]), (0, self.total - self.run.length))
            changed[:, self.run.length :] = whole[:, self.run.length :]
            return changed[:, here]

        return of_block

    def _watched(self, callback: Callback, number: int, here: slice, rows: Tensor) -> Callback:
        """A callback that is shown whole texts, as of one run whose time goes from 1 to 0 over all blocks."""
        place = rows.to(self.x.device)

        def show(step: int, t: float, part: Tensor) -> None:
            del step
            self.x[place, here] = part
            done = (number + 1 - t) / self.count
            callback(next(self.shown), max(0.0, 1 - done), self.x[:, : self.run.length])

        return show

    def _end(self, here: slice, rows: Tensor) -> None:
        """Note which texts [R] have ended in this block."""
        if self.run.options.stop:
            self.ended[rows] = self._stops(here)[rows].any(1)

    def _stops(self, here: slice) -> Tensor:
        """Where a text was ended by what was drawn, [B, b]."""
        stop = torch.tensor(self.run.options.stop)
        return torch.isin(self.x[:, here].cpu(), stop) & ~self.held[:, here]

    def _fill_ends(self) -> None:
        """Repeat the token that a text ended with."""
        if not self.run.options.stop:
            return
        for row in _numbers(self.ended.nonzero().squeeze(1)):
            first = int(self._stops(slice(None))[row].nonzero()[0])
            self.x[row, first:] = self.x[row, first].clone()


def _numbers(rows: Tensor) -> list[int]:
    return cast(list[int], rows.tolist())  # pyright: ignore[reportUnknownMemberType]


def _check_prompts(held: Tensor) -> None:
    """Refuse tokens [B, K, b] that are held after a block that is to be written."""
    free = ~held.all(2)
    after = free.cumsum(1) - free.long() > 0  # a block before is written
    if bool((held.any(2) & after).any()):
        raise ValueError("a block diffusion model takes a prompt, not text in a later block than a blank")
