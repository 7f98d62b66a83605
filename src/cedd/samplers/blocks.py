"""Block diffusion: texts are written block by block, each by any sampler, given the blocks before it.

Shapes: B texts, L tokens of a text, b tokens of a block, N tokens that the network reads at once.

A block is a run of the sampler over b tokens, with the network of the next block after a text (`FinishedText`), whose
keys and values are kept (`Capabilities.cache`): they do not depend on what follows, so that nothing is approximated.
A prompt may end anywhere; blocks that it fills are read, and not drawn. The last block is drawn whole and cut.

Texts may be of any length. When the N tokens are full, the older half of the blocks is dropped and the rest is read
again from position 0: every block is written after at least N/2 - b and at most N - b tokens. Keys and values that had
seen dropped tokens are not kept.

With guidance, the probabilities of every block are those of `guidance`, each of the two given its text before the
block: with and without the label, or with and without the blocks of the prompt.

A text that has ended, with one of the options' `stop` tokens, is not continued. Particles are the texts of one run:
resampling replaces their tokens, their keys and values, and whether they have ended.
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
            self.held,
            run.process.mask_id,
            lambda network: FinishedText.of(network, self.block, *size, kept=run.options.cache),
        )
        self.seeds = [text_seeds(seed, self.count) for seed in run.seeds]
        self.ended = torch.zeros(batch, dtype=torch.bool)
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
            if self.sampler.draws_together:
                rows = torch.arange(len(self.x))
            self.text.read_up_to(number, self.x, self.most)
            drawn = self.sampler.sample(self.run_of(number, here, rows))
            self.x[rows.to(self.x.device), here] = drawn
            if self.run.options.stop:
                self.ended |= self._stops(self.x)[:, here].any(1).cpu()
                self.x = self.filled(self.x)
        return self.x[:, :length]

    def run_of(self, number: int, here: slice, rows: Tensor) -> SamplingRun:
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
            part=_BlockOfTexts(self, number, here),
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
        if constraint is None or isinstance(constraint, Fixed):
            where = (self.held[:, here] | self.ended[:, None])[rows]
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

    def _stops(self, texts: Tensor) -> Tensor:
        """Where texts [G B, n] were ended by what was drawn, [G B, n]."""
        stop, held = torch.tensor(self.run.options.stop), self.held[:, : texts.shape[1]]
        return torch.isin(texts, stop.to(texts)) & ~held.repeat(len(texts) // len(held), 1).to(texts.device)

    def filled(self, texts: Tensor) -> Tensor:
        """Texts [G B, n] in which the token that ended a text is repeated."""
        if not self.run.options.stop:
            return texts
        stops = self._stops(texts)
        count = stops.cumsum(1)
        token = texts.masked_fill(~(stops & (count == 1)), 0).sum(1, keepdim=True)
        return torch.where(count > 0, token, texts)


@dataclass(frozen=True)
class _BlockOfTexts:
    """A block as a part of texts (see `BlockPlace`)."""

    writing: _Writing
    number: int
    here: slice

    def texts(self, x: Tensor) -> Tensor:
        """The texts up to this block, with tokens x [G B, b] in it."""
        writing = self.writing
        before = writing.x[:, : self.here.start]
        texts = torch.cat([before.repeat(len(x) // len(before), 1), x], 1)
        return writing.filled(texts[:, : writing.run.length])

    def of_ancestors(self, rows: Tensor) -> SamplingRun:
        """The run of the block after the texts with these numbers [B]."""
        writing = self.writing
        writing.x, writing.ended = writing.x[rows], writing.ended[rows.cpu()]
        writing.text.take(rows)
        return writing.run_of(self.number, self.here, torch.arange(len(rows)))


def _numbers(rows: Tensor) -> list[int]:
    return cast(list[int], rows.tolist())  # pyright: ignore[reportUnknownMemberType]


def _check_prompts(held: Tensor) -> None:
    """Refuse tokens [B, K, b] that are held after a block that is to be written."""
    free = ~held.all(2)
    after = free.cumsum(1) - free.long() > 0  # a block before is written
    if bool((held.any(2) & after).any()):
        raise ValueError(
            "block diffusion models generate from left to right, so text cannot be given in a later block than a blank"
            "; use a model without blocks"
        )
