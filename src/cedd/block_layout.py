"""Block diffusion: texts as blocks of b tokens, each a separate diffusion given the clean blocks before it.

Shapes: B texts, L tokens per text, K = L / b blocks, v noisy views of each text, D width, V vocabulary.

    log p(x) = sum_k log p(x^k | x^<k)                                      (Arriola et al. 2025, arXiv 2503.09573)

One pass over [x_t + x_0], (v + 1) L tokens at positions 0..L-1 each, evaluates all blocks of v noisy views: a noisy
token attends to its own block of its view and to the clean tokens of earlier blocks, a clean one to the clean tokens of
its own and of earlier blocks. Two complementary views share the clean half: 3L tokens instead of 4L. Every block has
its own noise level; that of clean tokens is sigma = 0. In adapted autoregressive networks, clean tokens attend only to
tokens up to their own position (`Capabilities.causal_past`).

    InBlocks(model, b)             model(x_t [vB, L], sigma [vB, K], clean=x_0 [B, L]) -> [vB, L, V]
    BlockSequences(model, b, K)    model(x_t [B K, b], sigma [B K], clean=x_0 [B K, b]) -> [B K, b, V]
    GivenPast(model, b)            model(x_t [B, b], sigma [B], past=[B, P]) -> [B, b, V]
    FinishedText.of(network, b)    the same for texts that grow, whose keys and values are kept

Losses use the first. The second presents blocks as separate sequences, for bounds. The others are one block, the next
after P tokens, for samplers. Every network that takes an attention pattern (`Capabilities.attention`) works in blocks.
A plain function is called as model(x_t, sigma [B, L], clean=x_0), for texts of any number of blocks, and must follow
the pattern itself. With a single block (b = L), the network is called as without blocks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from cedd.device import model_device
from cedd.network import (
    AnyModel,
    AttentionPattern,
    Capabilities,
    HasCache,
    HasHead,
    Network,
    capabilities_of,
    check_token_times,
    has_cache,
    records_blocks,
    selects_rows,
)


def check_block(block: object) -> int:
    """Check the number of tokens per block."""
    if isinstance(block, bool) or not isinstance(block, int) or block < 1:
        raise ValueError(f"a block must have at least 1 token (got {block!r})")
    return block


def blocks_of(length: int, block: int | None) -> int:
    """The number of blocks K of a text; 1 without blocks."""
    if block is None:
        return 1
    if length % check_block(block):
        raise ValueError(f"blocks of {block} do not divide a length of {length}: use a block that divides it")
    return length // block


@dataclass(frozen=True)
class BlockLayout:
    """[x_t + x_0]: v noisy views of texts of L tokens, and the clean text after them.

    Args:
        length: L.
        block: b, which divides L.
        views: v.
        causal_past: whether clean tokens attend to those up to their own position only.
    """

    length: int
    block: int
    views: int = 1
    causal_past: bool = False

    def __post_init__(self) -> None:
        blocks_of(self.length, self.block)
        if self.views < 1:
            raise ValueError(f"a text has at least one noisy view (got {self.views})")

    @property
    def blocks(self) -> int:
        """K."""
        return self.length // self.block

    @property
    def noisy(self) -> int:
        """v L, the number of noisy tokens."""
        return self.views * self.length

    @property
    def total(self) -> int:
        """(v + 1) L."""
        return self.noisy + self.length

    def tokens(self, x_t: Tensor, clean: Tensor) -> Tensor:
        """The layout [B, (v + 1) L] of x_t [vB, L], where the views of a text are consecutive, and clean [B, L]."""
        return torch.cat([x_t.reshape(len(clean), self.noisy), clean.to(x_t)], 1)

    def levels(self, sigma: Tensor) -> Tensor:
        """Noise levels [B, (v + 1) K] from sigma [vB, K]: one per block, 0 for clean blocks."""
        noisy = sigma.reshape(-1, self.views * self.blocks)
        return torch.cat([noisy, noisy.new_zeros(len(noisy), self.blocks)], 1)

    def places(self, places: Tensor) -> Tensor:
        """Positions in [B, (v + 1) L] of positions in [vB, L], both flattened."""
        return places + places // self.noisy * self.length

    def noisy_part(self, features: Tensor) -> Tensor:
        """Features [vB, L, D] of the noisy tokens, from features [B, (v + 1) L, D]."""
        return features[:, : self.noisy].reshape(-1, self.length, features.shape[-1])

    def pattern(self, device: torch.device | str) -> AttentionPattern:
        """The attention pattern, cached for each device."""
        return _pattern(self, torch.device(device))


@lru_cache(maxsize=32)
def _pattern(layout: BlockLayout, device: torch.device) -> AttentionPattern:
    length, block, noisy = layout.length, layout.block, layout.noisy

    def rule(query: Tensor, key: Tensor) -> Tensor:
        own, other = query % length // block, key % length // block
        same_view = query // length == key // length  # the clean half is the last view
        seen = (same_view & (own == other)) | ((key >= noisy) & (other < own))
        return seen & ((query < noisy) | (key <= query)) if layout.causal_past else seen

    places = torch.arange(layout.total, device=device)
    return AttentionPattern(rule(places[:, None], places), places % length, rule)


def earlier_blocks(
    length: int, block: int, device: torch.device | str, causal: int = 0, start: int = 0
) -> AttentionPattern:
    """The pattern of a text whose blocks attend to themselves and to earlier blocks, for the tokens from `start` on.
    The first `causal` tokens attend only to tokens up to their own position."""
    places = torch.arange(length, device=device)
    queries = places[start:, None]
    return AttentionPattern((queries // block >= places // block) & ((queries >= causal) | (places <= queries)))


class InBlocks:
    """A network that reads noisy blocks given the clean text before them (see the top of the module).

    Args:
        model: a network that takes an attention pattern, or a function of x_t, sigma and clean.
        block: b.
    """

    def __init__(self, model: AnyModel, block: int) -> None:
        declared = capabilities_of(model)
        self.model, self.block = model, check_block(block)
        if declared.features and not declared.attention:
            raise ValueError(
                "block diffusion needs a network that takes an attention pattern, and this one does not declare "
                "Capabilities(attention=True)"
            )
        check_token_times(model)

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the network, without those for whole sequences."""
        changes = {"token_times": True, "attention": False, "cache": False, "cuda_graphs": False, "recorder": False}
        return replace(capabilities_of(self.model), **changes)

    @property
    def device(self) -> torch.device:
        return model_device(self.model)

    @property
    def head(self) -> Any:
        return cast(HasHead, self.model).head

    def __call__(self, x_t: Tensor, sigma: Tensor, *, clean: Tensor, **conditions: Tensor) -> Tensor:
        """Outputs [vB, L, V]."""
        if self.capabilities.features:
            return self.head(self.features(x_t, sigma, clean=clean, **conditions))
        views = len(x_t) // len(clean)
        levels = sigma.repeat_interleave(x_t.shape[1] // sigma.shape[1], 1)
        function = cast(Callable[..., Tensor], self.model)
        return function(x_t, levels, clean=clean.repeat_interleave(views, 0), **conditions)

    def features(
        self, x_t: Tensor, sigma: Tensor, *, clean: Tensor, where: Tensor | None = None, **conditions: Tensor
    ) -> Tensor:
        """[vB, L, D], the input of the head.

        Args:
            x_t: noisy tokens [vB, L].
            sigma: [vB, K].
            clean: the clean texts [B, L].
            where: distinct positions [N] of the flattened x_t, if only their features are needed.
            conditions: one entry per row of x_t, equal for all views of a text.
        """
        layout = self.layout(x_t, clean)
        if where is None and selects_rows(self.model):  # the last layer needs no clean tokens
            where = torch.arange(x_t.numel(), device=x_t.device)
        places = None if where is None else layout.places(where)
        return layout.noisy_part(self._both(layout, x_t, sigma, clean, places, conditions))

    def halves(
        self, x_t: Tensor, sigma: Tensor, *, clean: Tensor, where: Tensor | None = None, **conditions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The result of `features`, and the features of the clean texts, [B, L, D]."""
        layout, places = self.layout(x_t, clean), None
        if where is not None:
            texts = torch.arange(clean.numel(), device=where.device)
            places = torch.cat([layout.places(where), texts + (texts // layout.length + 1) * layout.noisy])
        made = self._both(layout, x_t, sigma, clean, places, conditions)
        return layout.noisy_part(made), made[:, layout.noisy :]

    def _both(
        self,
        layout: BlockLayout,
        x_t: Tensor,
        sigma: Tensor,
        clean: Tensor,
        places: Tensor | None,
        conditions: Mapping[str, Tensor],
    ) -> Tensor:
        """[B, (v + 1) L, D], the features of noisy and clean tokens."""
        options: dict[str, Any] = {name: value[:: layout.views] for name, value in conditions.items()}
        if places is not None:
            options["where"] = places
        tokens, levels = layout.tokens(x_t, clean), layout.levels(sigma)
        return cast(HasHead, self.model).features(tokens, levels, attention=layout.pattern(x_t.device), **options)

    def layout(self, x_t: Tensor, clean: Tensor) -> BlockLayout:
        """The layout of x_t [vB, L] and clean [B, L]."""
        causal = capabilities_of(self.model).causal_past
        return BlockLayout(x_t.shape[1], self.block, len(x_t) // len(clean), causal)

    def rows(self, features: Tensor, places: Tensor) -> Tensor:
        """The `rows` of the network."""
        return cast(Any, self.model).rows(features, places)


class BlockNetwork:
    """What networks whose rows are blocks share: device, head and `rows` of their `model`, and one time per row."""

    model: Any

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.model.capabilities, token_times=False)

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def head(self) -> Any:
        return self.model.head

    def rows(self, features: Tensor, places: Tensor) -> Tensor:
        """The `rows` of the network."""
        return self.model.rows(features, places)


class BlockSequences(BlockNetwork):
    """The blocks of texts as sequences of b tokens; their condition `clean` contains the texts.

    The blocks of a text are consecutive rows, so [B K, b] is a reshaped [B, L].

    Args:
        model: as `InBlocks` takes it.
        block: b.
        blocks: K.
    """

    def __init__(self, model: AnyModel, block: int, blocks: int) -> None:
        self.model: InBlocks = InBlocks(model, block)
        self.blocks = blocks

    def __call__(self, x_t: Tensor, sigma: Tensor, *, clean: Tensor, **conditions: Tensor) -> Tensor:
        """Outputs [B K, b, V]."""
        made = self.model(*self._texts(x_t, sigma), clean=self._text(clean), **self._each(conditions))
        return made.reshape(*x_t.shape, -1)

    def features(
        self, x_t: Tensor, sigma: Tensor, *, clean: Tensor, where: Tensor | None = None, **conditions: Tensor
    ) -> Tensor:
        """Features [B K, b, D] for x_t and clean [B K, b] and sigma [B K]; flattened positions are those of [B, L]."""
        options = {"clean": self._text(clean), "where": where, **self._each(conditions)}
        return self.model.features(*self._texts(x_t, sigma), **options).reshape(*x_t.shape, -1)

    def _texts(self, x_t: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
        """x_t [B, L] and sigma [B, K]."""
        return self._text(x_t), sigma.reshape(-1, self.blocks)

    def _text(self, tokens: Tensor) -> Tensor:
        """[B, L]."""
        return tokens.reshape(-1, self.blocks * tokens.shape[1])

    def _each(self, conditions: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """One entry for each text."""
        return {name: value[:: self.blocks] for name, value in conditions.items()}


def as_block_sequences(network: Network, data: Tensor, blocks: int) -> tuple[Network, Tensor]:
    """The blocks of texts [N, L] as sequences [N K, b], and the network for them."""
    each = data.reshape(len(data) * blocks, -1)
    own = {name: value.repeat_interleave(blocks, 0) for name, value in (network.conditions or {}).items()}
    model = BlockSequences(network.model, each.shape[1], blocks)
    return replace(network, model=model, conditions={**own, "clean": each}), each


class GivenPast(BlockNetwork):
    """A network for one block, the next after P clean tokens, which are the condition `past`.

    The last tokens of `past` may be given tokens of the block itself, as from a prompt. x_t is then the rest of the
    block or a part of it: [B, n] with P mod b + n <= b. (For a plain function it is a whole block.)

    Args:
        model: as `InBlocks` takes it.
        block: b.
    """

    def __init__(self, model: AnyModel, block: int) -> None:
        self.model: InBlocks = InBlocks(model, block)

    def __call__(self, x_t: Tensor, sigma: Tensor, *, past: Tensor, **conditions: Tensor) -> Tensor:
        """Outputs [B, b, V]."""
        if self.capabilities.features:
            return self.head(self.features(x_t, sigma, past=past, **conditions))
        self._check(x_t, past)
        text, known = torch.cat([past.to(x_t), x_t], 1), past.shape[1]
        levels = F.pad(sigma[:, None], (known // self.model.block, 0))
        clean = torch.cat([past.to(x_t), torch.zeros_like(x_t)], 1)
        return self.model(text, levels, clean=clean, **conditions)[:, known:]

    def features(
        self, x_t: Tensor, sigma: Tensor, *, past: Tensor, where: Tensor | None = None, **conditions: Tensor
    ) -> Tensor:
        """Features [B, b, D], from one pass over [past + x_t] in which each block attends to itself and to earlier
        blocks."""
        self._check(x_t, past)
        known, new, block = past.shape[1], x_t.shape[1], self.model.block
        text = torch.cat([past.to(x_t), x_t], 1)
        causal = known if capabilities_of(self.model.model).causal_past else 0
        pattern = earlier_blocks(known + new, block, x_t.device, causal)
        options: dict[str, Any] = {"attention": pattern, **conditions}
        if where is not None:
            options["where"] = where + (where // new + 1) * known
        before = known // block
        levels = F.pad(sigma[:, None], (before, 0))
        if (known + new) % block:  # all parts have equal length, so there is one level per token
            levels = torch.cat([levels[:, :-1].repeat_interleave(block, 1), sigma[:, None].expand(-1, known + new)], 1)
            levels = levels[:, : known + new]
        return cast(HasHead, self.model.model).features(text, levels, **options)[:, known:]

    def _check(self, x_t: Tensor, past: Tensor) -> None:
        inside, block = past.shape[1] % self.model.block, self.model.block
        if inside + x_t.shape[1] > block or (not self.capabilities.features and x_t.shape[1] < block):
            raise ValueError(
                f"a block has {block} tokens (got {x_t.shape[1]} after {past.shape[1]}, of which {inside} are its own)"
            )


def first_of_window(number: int, most: int) -> int:
    """The first block in the context of block `number`, whose context has at most `most` blocks including itself."""
    kept = most // 2
    dropped = most - kept
    return 0 if number < most else dropped * -(-(number - most + 1) // dropped)


class FinishedText(ABC):
    """Texts whose finished blocks a network has read, as a network for the next block.

    `conditions` have one entry per text. `begin` is the first block that is read; what is before it is not part of the
    text.
    """

    def __init__(self, block: int) -> None:
        self.block, self.begin = check_block(block), 0
        self._first = self._next = 0
        """The first block of the context, and the one after the last that was read."""

    @staticmethod
    def of(network: Network, block: int, batch: int, length: int, kept: bool = True) -> FinishedText:
        """`batch` texts of at most `length` tokens, including the last block. Keys and values are cached between calls
        if the network supports it; without `kept` they are recomputed in every call."""
        model, declared = network.model, capabilities_of(network.model)
        if has_cache(model) and declared.attention and not declared.causal:
            return _KeptKeys(network, block, batch, length, kept)
        return _WholeText(network, block, batch)

    @property
    @abstractmethod
    def conditions(self) -> Mapping[str, Tensor]:
        """Other inputs of the network, one entry per text."""

    @abstractmethod
    def __call__(self, x_t: Tensor, sigma: Tensor, **conditions: Tensor) -> Tensor:
        """Outputs [S, b, V] for noisy blocks x_t [S, b] of S of the texts."""

    @abstractmethod
    def read(self, tokens: Tensor) -> None:
        """Read further blocks [B, n] of all texts."""

    @abstractmethod
    def forget(self) -> None:
        """Clear the texts."""

    @abstractmethod
    def take(self, rows: Tensor) -> None:
        """Replace the texts by those with these numbers [B], of which some may be the same. Their conditions must be
        equal."""

    def read_up_to(self, number: int, x: Tensor, most: int) -> None:
        """Read the blocks of texts x before this one, in a window of at most `most` blocks including it."""
        number = max(number, self.begin)
        first = self.begin + first_of_window(number - self.begin, most)
        if first != self._first:
            self.forget()
            self._first = self._next = first
        if self._next < number:
            self.read(x[:, self._next * self.block : number * self.block])
            self._next = number


class _KeptKeys(FinishedText):
    """The implementation for networks with a cache of keys and values."""

    def __init__(self, network: Network, block: int, batch: int, length: int, kept: bool) -> None:
        super().__init__(block)
        check_token_times(network.model)
        self.model, self._network, self._kept = cast(HasCache, network.model), network, kept
        self._cache = self.model.new_cache(batch, length)
        self._recorder = network.model if kept and records_blocks(network.model) else None
        place = "cpu" if self._recorder is None else network.home
        self._read, self._texts = list[Tensor](), torch.arange(batch, device=place)
        timed = capabilities_of(self.model).time_conditioned
        self.capabilities = Capabilities(features=True, time_conditioned=timed, recorder=self._recorder is not None)

    @property
    def device(self) -> torch.device:
        return self._network.home

    @property
    def head(self) -> Callable[[Tensor], Tensor]:
        return self.model.head

    @property
    def conditions(self) -> Mapping[str, Tensor]:
        return {"text": self._texts}

    def read(self, tokens: Tensor) -> None:
        self._read.append(tokens.to(self._network.home))
        self._extend(self._read[-1])

    def forget(self) -> None:
        self._read.clear()
        self._cache.length = 0

    def take(self, rows: Tensor) -> None:
        rows = rows.to(self._network.home)
        self._read = [tokens[rows] for tokens in self._read]
        self._cache.take(rows)

    def _extend(self, tokens: Tensor) -> None:
        """Add finished blocks [B, n] to the cache."""
        clean, causal = torch.zeros(len(tokens), device=tokens.device), capabilities_of(self.model).causal_past
        conditions, total = self._network.condition_inputs(), self._cache.length + tokens.shape[1]
        if self._recorder is not None and tokens.shape[1] == self.block and not causal:
            self._recorder.next_block(self._cache, tokens, clean, **conditions)
            self._cache.length = total
            return
        pattern = self._pattern(tokens, total if causal else 0)
        self.model.features(tokens, clean, cache=self._cache, attention=pattern, **conditions)

    def _pattern(self, tokens: Tensor, causal: int = 0) -> AttentionPattern:
        """The attention pattern of the new tokens [B, n]."""
        past = self._cache.length
        return earlier_blocks(past + tokens.shape[1], self.block, tokens.device, causal, start=past)

    def features(self, x_t: Tensor, sigma: Tensor, *, text: Tensor, **conditions: Tensor) -> Tensor:
        """[S, b, D] for noisy blocks x_t [S, b] of the texts with these numbers [S], in ascending order."""
        if self._recorder is not None:
            return self._recorder.next_block(self._cache, x_t, sigma, text, **conditions)
        if not self._kept:
            self._cache.length = 0
            for tokens in self._read:
                self._extend(tokens)
        # For all texts, no synchronization with the device is needed.
        rows = range(len(text)) if len(text) == len(self._texts) else cast(list[int], text.tolist())
        pattern = self._pattern(x_t)
        return self.model.features(x_t, sigma, cache=self._cache.of_rows(rows), attention=pattern, **conditions)

    def recorded(self, function: Callable[..., tuple[Tensor, ...]], of_rows: Sequence[Tensor]) -> Any:
        """The `recorded` of the network."""
        assert self._recorder is not None
        return self._recorder.recorded(function, of_rows)

    def reveal_block(
        self, step: Callable[..., tuple[Tensor, ...]], x: Tensor, sigma: Tensor, when: Tensor, v: Tensor
    ) -> tuple[Tensor, ...] | None:
        """The `reveals` of the network for blocks x [B, b] of all texts; None if it makes no recordings."""
        if self._recorder is None or len(x) != len(self._texts) or self._network.conditions:
            return None
        return self._recorder.reveals(self._cache, step, x, sigma, when, v)

    def __call__(self, x_t: Tensor, sigma: Tensor, **conditions: Tensor) -> Tensor:
        return self.head(self.features(x_t, sigma, **conditions))


class _WholeText(BlockNetwork, FinishedText):
    """The implementation for other networks, which read the text again in every call."""

    def __init__(self, network: Network, block: int, batch: int) -> None:
        super().__init__(block)
        self.model: GivenPast = GivenPast(network.model, block)
        self._past = torch.zeros(batch, 0, dtype=torch.int64, device=network.device)

    @property
    def conditions(self) -> Mapping[str, Tensor]:
        return {"past": self._past}

    def read(self, tokens: Tensor) -> None:
        self._past = torch.cat([self._past, tokens], 1)

    def forget(self) -> None:
        self._past = self._past[:, :0]

    def take(self, rows: Tensor) -> None:
        self._past = self._past[rows.to(self._past.device)]

    def features(self, x_t: Tensor, sigma: Tensor, **options: Any) -> Tensor:
        """The network of `GivenPast`."""
        return self.model.features(x_t, sigma, **options)

    def __call__(self, x_t: Tensor, sigma: Tensor, **conditions: Tensor) -> Tensor:
        return self.model(x_t, sigma, **conditions)
