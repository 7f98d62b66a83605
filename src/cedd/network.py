"""The adapter between networks and the mathematics: what a network declares, where it runs, its outputs at positions.

Shapes: B batch, L positions, V vocabulary, D width; R selected positions in S selected sequences.

    model(x_t [B, L] int64, sigma [B] float32, **conditions) -> outputs [B, L, V]           any callable
    model.features(x_t, sigma, **conditions) -> [B, L, D],  model.head([N, D]) -> [N, V]     a backbone with a head

A backbone runs on the S sequences and its head on the R positions, in chunks, so that [B, L, V] outputs never exist.
Conditions, such as a label, are tensors with one entry per sequence, which are passed to the network unchanged.
Networks declare what they offer in `capabilities`; `models/backbone.py` is the base class of those in this package.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeGuard, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from cedd.device import has_float64, model_device

if TYPE_CHECKING:
    from typing_extensions import TypeIs

Module = TypeVar("Module", bound=nn.Module)

_ENTRIES_AT_ONCE = {"cpu": 1 << 24, "mps": 1 << 25}
_ENTRIES_ON_A_GPU = 1 << 25, 1 << 27

_SIZES = 16
"""Number of batch sizes, counted in masks, for which a function of the outputs at all masks is recorded."""
MOST_TOGETHER = 64
"""Positions of blocks up to which several calls are recorded together: the head then runs at all of them."""
SPARSE = 4
"""A network skips other positions if there are at least this many times as many positions as selected ones."""


# ----------------------------------------------------------------------------------------------------------------
# What a network offers


def entries_at_once(device: torch.device) -> int:
    """Entries of [R, V] outputs that are held at once: 128 MiB, in float64 on a CPU and in float32 on MPS; on a GPU
    1/128 of its memory in float64, from 256 MiB to 1 GiB: with smaller chunks a large GPU waits for the host."""
    fewest, most = _ENTRIES_ON_A_GPU
    if device.type != "cuda":
        return _ENTRIES_AT_ONCE.get(device.type, fewest)
    return min(most, max(fewest, torch.cuda.get_device_properties(device).total_memory // 1024))


@dataclass(frozen=True)
class Capabilities:
    """What a network offers beyond `model(x_t, sigma) -> outputs`, declared as its attribute `capabilities`.

    A network without this attribute is treated as a plain callable, which is slower but correct.
    """

    features: bool = False
    """`model.features(x_t, sigma, **conditions) -> [B, L, D]` and `model.head([N, D]) -> [N, V]` (`HasHead`)."""
    selected_rows: bool = False
    """`features(..., where=places)` skips work that only other positions need, and `rows(features, places)` gathers
    the selected ones (`SelectsRows`)."""
    head_losses: bool = False
    """`head` has `loss`, `cross_entropy` and `score_entropy` of rows, computed in chunks (`HeadLosses`)."""
    cache: bool = False
    """`new_cache(batch, length)` and `features(..., cache=cache)`: keys and values of earlier tokens are kept
    (`HasCache`)."""
    attention: bool = False
    """`features(..., attention=pattern)` takes an `AttentionPattern`. Block diffusion needs this, and `token_times`
    unless the network has no time conditioning (`cedd.block_layout`)."""
    static_cache: bool = False
    """`cache.at(positions)` is the cache for a call whose tokens have these consecutive positions, and attend to each
    other and to all earlier positions. Such a call can be recorded as a CUDA graph. The attention pattern is passed
    too, over all positions for which the cache has room."""
    causal_past: bool = False
    """In block diffusion, clean tokens attend to positions up to their own only, not to their whole block."""
    causal: bool = False
    """The outputs at a position depend on the positions up to it only, as autoregressive methods need."""
    optional_start: bool = False
    """A causal network that reads the start symbol only if a text has no prompt."""
    time_conditioned: bool = True
    """Outputs depend on sigma, not on x_t alone."""
    token_times: bool = False
    """sigma may be [B, G], one noise level for each of G equal parts of a sequence; G = L is one per token."""
    any_length: bool = False
    """The network was trained on sequences of many lengths, so short ones need no padding."""
    cuda_graphs: bool = False
    """The forward pass can be compiled and recorded as a CUDA graph: tensor operations only, no synchronization."""
    max_length: int | None = None
    """The longest sequence that the network reads; None: any length."""
    recorder: bool = False
    """`recorded(function, rows)` runs a function of rows as a CUDA graph (`RecordsFunctions`)."""


def capabilities_of(model: object) -> Capabilities:
    """What a network declares; nothing for other callables."""
    declared = getattr(model, "capabilities", None)
    return declared if isinstance(declared, Capabilities) else Capabilities()


@dataclass(frozen=True)
class AttentionPattern:
    """Which positions a position attends to, where that is not all of them (or all earlier ones, if causal)."""

    visible: Tensor
    """[L, L] or [B, L, L] bool: whether query i attends to key j. With a cache of P tokens keys are [P + L]."""
    positions: Tensor | None = None
    """[L] for the positional encoding; by default 0..L-1, or with a cache those that follow its tokens."""
    rule: Callable[[Tensor, Tensor], Tensor] | None = None
    """The same as `visible`, [L, L], as a function of the numbers of query and key. Compiled networks on a GPU skip the
    tiles in which it is false everywhere."""


class HasHead(Protocol):
    """A network as a backbone and a vocabulary head: `Capabilities.features`."""

    @property
    def head(self) -> Callable[[Tensor], Tensor]:
        """[N, D] -> [N, V]."""
        ...

    @property
    def features(self) -> Callable[..., Tensor]:
        """(x_t [B, L], sigma [B], **conditions) -> [B, L, D], the input of the head."""
        ...


AnyModel = Callable[..., Tensor] | HasHead
"""A callable `(x_t [B, L], sigma [B]) -> [B, L, V]`, or a backbone with a head."""


def has_head(model: object) -> TypeIs[HasHead]:
    """Whether a network declares a backbone and a head."""
    return capabilities_of(model).features


class ScoreRows(NamedTuple):
    """The numbers that define the score entropy of a row of outputs o, [N] each:

        sum s_y - common sum log s_y - extra log s_target,        log s_y = o_y + shift,

    with sums over all tokens y except `skip` (V or more: over all). `extra` is 0 where `skip` is the target.
    """

    target: Tensor
    skip: Tensor
    shift: Tensor
    common: Tensor
    extra: Tensor


class RowTotal(Protocol):
    """The result of a head's loss: the differentiable sum over rows."""

    @property
    def total(self) -> Tensor: ...


class HeadLosses(Protocol):
    """A vocabulary head that computes losses of rows of features in chunks: `Capabilities.head_losses`."""

    def loss(
        self,
        features: Tensor,
        row_loss: Callable[..., Tensor],
        row_args: tuple[Tensor, ...],
        row_weights: Tensor | None,
    ) -> RowTotal:
        """The weighted sum of row_loss(outputs [R, V], *row_args [R]) over the rows of features [N, D]."""
        ...

    def cross_entropy(
        self, features: Tensor, targets: Tensor, row_weights: Tensor, *, shift: tuple[Tensor, Tensor]
    ) -> RowTotal:
        """The weighted sum of -log softmax(outputs + shift amounts at shift tokens)[targets]."""
        ...

    def score_entropy(self, features: Tensor, rows: ScoreRows, row_weights: Tensor) -> RowTotal:
        """The weighted sum of the rows' score entropies."""
        ...


class SelectsRows(Protocol):
    """A network that can skip work at positions that are not selected: `Capabilities.selected_rows`."""

    @property
    def features(self) -> Callable[..., Tensor]:
        """(x_t [B, L], sigma [B], *, where=None, **conditions) -> [B, L, D]; with `where`, distinct places [C] of the
        flattened batch, only the features there are defined."""
        ...

    def rows(self, features: Tensor, places: Tensor) -> Tensor:
        """[B, L, D] at distinct places [N] of the flattened batch -> [N, D]."""
        ...


class TrainsOnRows(SelectsRows, Protocol):
    """A network that selects rows and whose head computes their losses."""

    @property
    def head(self) -> HeadLosses: ...


def selects_rows(model: object) -> TypeGuard[SelectsRows]:
    """Whether a network declares that it can skip unselected positions."""
    declared = capabilities_of(model)
    return declared.features and declared.selected_rows


def trains_on_rows(model: object) -> TypeGuard[TrainsOnRows]:
    """Whether a network declares a head with losses of selected rows."""
    return selects_rows(model) and capabilities_of(model).head_losses


class HasCache(Protocol):
    """A network that continues from keys and values it has computed before: `Capabilities.cache`.

    Every call adds its tokens to the cache; to remove the last ones, set `cache.length` back.
    """

    @property
    def head(self) -> Callable[[Tensor], Tensor]: ...

    def new_cache(self, batch: int, length: int | None = None) -> Any:
        """An empty cache for `batch` sequences of at most `length` tokens. In block diffusion, its `of_rows(rows)` is a
        cache for some of the sequences, and `take(rows)` replaces the sequences by those with these numbers."""
        ...

    @property
    def features(self) -> Callable[..., Tensor]:
        """(new tokens [B, n], sigma=None, *, cache=None, **conditions) -> [B, n, D]; new tokens attend to those in the
        cache and to each other, to earlier ones only if the network is causal."""
        ...


def has_cache(model: object) -> TypeGuard[HasCache]:
    """Whether a network declares a cache of keys and values."""
    declared = capabilities_of(model)
    return declared.features and declared.cache


class RecordsFunctions(Protocol):
    """A network that runs functions of rows as CUDA graphs: `Capabilities.recorder`."""

    def recorded(
        self, function: Callable[..., tuple[Tensor, ...]], of_rows: Sequence[Tensor]
    ) -> tuple[Tensor, ...] | None:
        """function(*of_rows) of tensors [R, ...]; None if R is too large to be recorded. The result may have more rows
        and is overwritten by the next call."""
        ...


class RecordsCalls(HasHead, Protocol):
    """A network that also runs functions of outputs at all masks as CUDA graphs."""

    def records(self, function: Callable[..., tuple[Tensor, ...]], rooms: Sequence[int]) -> bool:
        """Whether `recorded_in` takes a function now: from its second use in these rooms, since recording takes as
        long as many calls."""
        ...

    def recorded_in(
        self, function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor], rooms: Sequence[int]
    ) -> tuple[Tensor, ...] | None:
        """function(*inputs), with each input [n, ...] padded to its room; None if it cannot be recorded. The result is
        overwritten by the next call."""
        ...


def records_functions(model: object) -> TypeGuard[RecordsFunctions]:
    """Whether a network declares that it records functions of rows."""
    return capabilities_of(model).recorder


def records_calls(model: object) -> TypeGuard[RecordsCalls]:
    """Whether a network records functions of outputs at all masks."""
    return records_functions(model) and hasattr(model, "recorded_in")


class RecordsBlocks(HasCache, RecordsFunctions, Protocol):
    """A network that runs a block after its cache as a CUDA graph, too: `Capabilities.recorder` and `cache`."""

    def next_block(
        self, cache: Any, x_t: Tensor, sigma: Tensor, text: Tensor | None = None, **conditions: Tensor
    ) -> Tensor:
        """Features [S, b, D] of tokens x_t [S, b] that attend to all in the cache and to each other; sigma [S]. Their
        keys and values are in the cache until the next call, beyond its length.

        Args:
            cache: made by `new_cache` for B sequences.
            text: which of them these are, [S] in ascending order; None: all.
        """
        ...

    def reveals(
        self,
        cache: Any,
        step: Callable[..., tuple[Tensor, ...]],
        x: Tensor,
        sigma: Tensor,
        when: Tensor,
        v: Tensor,
    ) -> tuple[Tensor, ...] | None:
        """Blocks x [B, b] after C calls as CUDA graphs, and the sum of the numbers that `step` returns; None if it
        cannot record them.

        Args:
            cache: as for `next_block`.
            step: (features [B * b, D], numbers [B * b]) -> tokens [B * b], and a number.
            x: the blocks.
            sigma: the noise level of each call, [C, B].
            when: the positions that each call reveals, [C, B * b] bool.
            v: the numbers of each call, [C, B * b].
        """
        ...


def records_blocks(model: object) -> TypeGuard[RecordsBlocks]:
    """Whether a network declares that it records functions of rows, and a cache."""
    return records_functions(model) and has_cache(model)


class RecordsReveals(HasHead, Protocol):
    """The network of a block that runs several calls as CUDA graphs."""

    def reveal_block(
        self, step: Callable[..., tuple[Tensor, ...]], x: Tensor, sigma: Tensor, when: Tensor, v: Tensor
    ) -> tuple[Tensor, ...] | None:
        """`RecordsBlocks.reveals` after what was read."""
        ...


def records_reveals(model: object) -> TypeGuard[RecordsReveals]:
    """Whether a network records several calls of a block."""
    return records_functions(model) and hasattr(model, "reveal_block")


class GraphNetwork(HasHead, Protocol):
    """A network that can be compiled and recorded: `Capabilities.cuda_graphs`."""

    def rounded_parameters(self) -> set[str]:
        """Names of the parameters that autocast rounds at every use."""
        ...


class RowFunction(Protocol):
    """A function of outputs [R, V] and other tensors of those rows -> [R]. Equal functions do the same."""

    @property
    def of_tensors(self) -> bool:
        """Whether it consists of tensor operations that never read values on the host, so that a GPU can record it."""
        ...

    def __call__(self, *inputs: Any, **_: Any) -> Tensor: ...


# ----------------------------------------------------------------------------------------------------------------
# Where and how it runs


@contextmanager
def evaluating(model: object) -> Generator[None]:
    """A context without gradients, in which a module, or the one that `model.model` is, is in evaluation mode."""
    while not isinstance(model, nn.Module) and hasattr(model, "model"):
        model = getattr(model, "model", None)
    module = model if isinstance(model, nn.Module) and model.training else None
    if module is not None:
        module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        if module is not None:
            module.train()


@dataclass(frozen=True)
class Places:
    """The positions at which outputs are computed."""

    rows: Tensor
    """[R], in the flattened batch [B * L]."""
    sequences: Tensor | None = None
    """[S], the sequences that the network runs on; by default all."""
    local: Tensor | None = None
    """[R], the same positions in the flattened batch [S * L] of these sequences."""

    host: HostPlaces | None = None
    """What is known of them on the host."""

    @property
    def index(self) -> Tensor:
        """[R], in the flattened batch that the network runs on."""
        return self.rows if self.local is None else self.local

    def __len__(self) -> int:
        return len(self.rows)


@dataclass
class HostPlaces:
    """Masks of a batch that are revealed in a call, as far as the host knows them without waiting for a GPU."""

    rows: NDArray[np.int64]
    """Those that are revealed, ascending flat positions [R]."""
    masks: NDArray[np.int64]
    """All masks before the call, ascending flat positions [M]."""
    sent: Tensor | None = None
    """The same on the device, if they were sent before."""

    def masks_on(self, device: torch.device) -> Tensor:
        """All masks on a device."""
        return torch.as_tensor(self.masks).to(device, non_blocking=True) if self.sent is None else self.sent


def flat_places(where: Tensor) -> Tensor:
    """The flat positions [R] at which `where` [B, L] is true. This synchronizes with a GPU, since R is needed."""
    return where.flatten().nonzero().squeeze(1)


def put_at(x: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    """x [B, L] with values [R] at the flat positions `rows` [R]."""
    return x.flatten().index_copy(0, rows, values.to(x)).view(x.shape)


class OutputCheck:
    """Checks outputs for NaN and infinity: immediately on a CPU, and in `settle` on a GPU, to avoid synchronization."""

    def __init__(self) -> None:
        self._totals: list[tuple[Tensor, Callable[[], ValueError]]] = []

    def look_at(self, outputs: Tensor) -> None:
        """Check outputs [..., V]."""
        if outputs.numel():
            self.add(_sum_of_largest(outputs))

    def add(self, total: Tensor, error: Callable[[], ValueError] | None = None) -> None:
        """Check the sum of the rows' largest outputs, [], or another number whose error is given."""
        self._totals.append((total, error or invalid_outputs))
        if total.device.type == "cpu":
            self.settle()

    def settle(self) -> None:
        """Raise a ValueError if any output so far was NaN or infinite."""
        added, self._totals = self._totals, []
        totals = [total for total, _ in added]
        if totals and not math.isfinite(totals[0] if len(totals) == 1 else torch.stack(totals).sum()):
            raise next((error() for total, error in added if not math.isfinite(total)), invalid_outputs())


def invalid_outputs() -> ValueError:
    """The error for outputs that are not finite."""
    return ValueError(
        "the network returned nan, or infinity, or rows without any possible token: its weights may be damaged, or its "
        "training has diverged"
    )


def _sum_of_largest(outputs: Tensor) -> Tensor:
    """The sum over rows [..., V] of their largest output: NaN if any output is, and -inf if a row allows no token."""
    return outputs.detach().amax(-1).sum(dtype=torch.float64)


def _chosen(values: Tensor, which: Tensor | slice) -> Tensor:
    """Entries of a tensor, by an index on any device."""
    return values[which.to(values.device) if isinstance(which, Tensor) else which]


UNKNOWN_LABEL = -1
"""The label of sequences without one."""


@dataclass(frozen=True)
class AllowedTokens:
    """Positions at which only some tokens are allowed."""

    where: Tensor
    """[L] or [B, L] bool, these positions."""
    tokens: Tensor
    """[V] bool, the tokens allowed there."""

    def of(self, which: Tensor | slice) -> AllowedTokens:
        """The same for some of the sequences, or for some positions of one."""
        return replace(self, where=_chosen(self.where, which))

    def barred(self, rows: Tensor) -> Tensor:
        """[R, V] bool: the tokens that are not allowed at the flat positions [R]."""
        return self.where.to(rows.device).flatten()[rows, None] & ~self.tokens.to(rows.device)


@dataclass(frozen=True)
class Network:
    """A model as bounds and samplers run it; construct it by `Network.of`.

    `home` is the device of the model. `device`, where the computation around it is done, is the same, or the CPU if
    `home` does not support float64 (MPS).
    """

    model: AnyModel
    vocab_size: int
    home: torch.device
    sigma_dtype: torch.dtype = torch.float32
    double: bool = False
    """Whether outputs are converted to float64."""
    conditions: Mapping[str, Tensor] | None = None
    only: AllowedTokens | None = None
    """Tokens that are allowed at some positions [B, L]; the others have probability 0 in `rows`."""
    one_by_one: bool = False
    """Whether `rows` runs the model on one sequence at a time, so that its outputs do not depend on the batch."""
    check: OutputCheck = field(default_factory=OutputCheck, compare=False)

    @staticmethod
    def of(
        model: AnyModel,
        vocab_size: int,
        device: torch.device | str | None = None,
        conditions: Mapping[str, Tensor] | None = None,
        sequences: int | None = None,
    ) -> Network:
        """A model on a device, by default that of its parameters, with conditions for this number of sequences."""
        home = torch.device(device) if device is not None else model_device(model)
        check_conditions(conditions or {}, sequences)
        return Network(model, vocab_size, home, conditions=conditions or None)

    @property
    def device(self) -> torch.device:
        return self.home if has_float64(self.home) else torch.device("cpu")

    @property
    def has_head(self) -> bool:
        """Whether the model is a backbone with a head."""
        return has_head(self.model)

    def of_sequences(self, which: Tensor | slice) -> Network:
        """The same network for some of the sequences: their conditions and allowed tokens."""
        if self.conditions is None and self.only is None:
            return self
        own = self.conditions
        conditions = None if own is None else {name: _chosen(value, which) for name, value in own.items()}
        return replace(self, conditions=conditions, only=self.only and self.only.of(which))

    def reading(self, deterministic: bool | None) -> Network:
        """The same network, run on one sequence at a time if `deterministic`; by default for modules on a CPU, where it
        costs little.

        Matrix products round differently for different numbers of rows.
        """
        if deterministic is None:
            deterministic = isinstance(self.model, nn.Module) and self.home.type == "cpu"
        return replace(self, one_by_one=deterministic)

    def outputs(self, x_t: Tensor, sigma: Tensor) -> Tensor:
        """All outputs [B, L, V] for x_t [B, L] and sigma [], [B] or [B, L]."""
        assert callable(self.model)
        outputs = self.checked(self._run(self.model, x_t, sigma), (*x_t.shape, self.vocab_size))
        return outputs.double() if self.double else outputs

    def condition_inputs(self) -> dict[str, Tensor]:
        """The conditions, on the device of the model."""
        return {name: value.to(self.home) for name, value in (self.conditions or {}).items()}

    def checked(self, outputs: Tensor, expected: tuple[int, ...]) -> Tensor:
        """The outputs, checked for their shape and for NaN."""
        self.check.look_at(checked_outputs(outputs, expected))
        return outputs

    def possible(self, outputs: Tensor, rows: Tensor) -> Tensor:
        """Outputs [R, V] at the flat positions [R], with -inf for tokens that are not allowed there."""
        return outputs if self.only is None else outputs.masked_fill(self.only.barred(rows), -math.inf)

    def check_outputs(self) -> None:
        """Raise a ValueError if outputs since the last call were NaN or infinite."""
        self.check.settle()

    def rows(self, x_t: Tensor, sigma: Tensor, places: Places, *, full_precision: bool = False) -> OutputRows:
        """Run the backbone on x_t [B, L] and sigma [], [B] or [B, L]; the result computes the outputs at `places`.

        full_precision: run the head outside autocast, whose three digits are too few for logits that are sampled from.
        """
        model = self.model
        if self.one_by_one and len(x_t) > 1:
            return RowsOneByOne(self._each(x_t, sigma, places.rows, full_precision))
        if not has_head(model):
            outputs = self.outputs(x_t, sigma).flatten(0, 1)
            return OutputRows(self, outputs.index_select(0, places.rows), None, places.rows)
        network = self
        if places.sequences is not None:
            x_t = x_t.index_select(0, places.sequences)
            sigma = sigma if sigma.dim() == 0 else sigma.index_select(0, places.sequences)
            network = self.of_sequences(places.sequences)
        hidden = network._run(_at_places(model, places.index.to(self.home), x_t.numel()), x_t, sigma)
        if hidden.dim() != 3 or hidden.shape[:2] != x_t.shape:
            raise ValueError(f"features must be [B, L, D] with [B, L] = {list(x_t.shape)} (got {list(hidden.shape)})")
        hidden = hidden.flatten(0, 1).index_select(0, places.index)
        head = FullPrecisionHead(model.head) if full_precision else model.head
        return OutputRows(self, hidden, self._on_host(head), places.rows)

    @cached_property
    def recorder(self) -> RecordsCalls | None:
        """The model, if `recorded` can use it."""
        model, is_whole = self.model, self.only is None and not self.one_by_one
        return model if is_whole and self.home == self.device and records_calls(model) else None

    def recorded(
        self, x_t: Tensor, sigma: Tensor, places: Tensor, function: Callable[..., tuple[Tensor, Tensor]], *given: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """function(outputs [M, V] at flat positions [M], x_t [B, L], *given) as one recording with the head, if the
        network makes recordings: a tensor and a number []."""
        model, unit = self.recorder, -(-x_t.numel() // _SIZES)
        room = max(1, -(-len(places) // unit)) * unit
        if model is None or room * self.vocab_size > entries_at_once(self.device):
            return None
        step = _HeadAnd(function, FullPrecisionHead(model.head), self.vocab_size)
        rooms = room, len(x_t), *map(len, given)
        if not model.records(step, rooms):
            return None
        hidden = self._run(_at_places(model, places, x_t.numel()), x_t, sigma).flatten(0, 1).index_select(0, places)
        recorded = model.recorded_in(step, (hidden, x_t, *given), rooms)
        if recorded is None:
            return None
        made, numbers = (each.clone() for each in recorded)  # the next call of the network may overwrite recordings
        total, number = numbers.unbind()
        self.check.add(total)
        return made, number

    @cached_property
    def reveal_recorder(self) -> RecordsReveals | None:
        """The model, if `reveals` can use it."""
        model, is_whole = self.model, self.only is None and not self.one_by_one
        return model if is_whole and records_reveals(model) else None

    def reveals(
        self, x: Tensor, sigma: Tensor, when: Tensor, v: Tensor, function: Callable[..., Tensor]
    ) -> Tensor | None:
        """x [B, L] after C calls at sigma [C, B], each of which reveals function(outputs [B * L, V], v [B * L]) at the
        positions `when` [C, B * L]; None if they are not recorded."""
        if (model := self.reveal_recorder) is None:
            return None
        step = _HeadAnd(function, FullPrecisionHead(model.head), self.vocab_size)
        recorded = model.reveal_block(step, x, sigma, when, v)
        if recorded is None:
            return None
        x, total = recorded
        self.check.add(total)
        return x

    def _each(self, x_t: Tensor, sigma: Tensor, rows: Tensor, full_precision: bool) -> Iterator[OutputRows]:
        """The outputs at ascending rows [R], one sequence at a time."""
        length, start = x_t.shape[1], 0
        sequences, counts = torch.unique_consecutive(rows // length, return_counts=True)
        for i, count in zip(sequences.tolist(), counts.tolist(), strict=True):
            one, places = slice(i, i + 1), Places(rows[start : start + count] - i * length)
            level = sigma if sigma.dim() == 0 else sigma[one]
            yield self.of_sequences(one).rows(x_t[one], level, places, full_precision=full_precision)
            start += count

    def _run(self, function: Callable[..., Tensor], x_t: Tensor, sigma: Tensor) -> Tensor:
        level = self._levels(sigma.to(self.sigma_dtype), x_t)
        return _floats(function(x_t.to(self.home), level.to(self.home), **self.condition_inputs())).to(self.device)

    def _levels(self, sigma: Tensor, x_t: Tensor) -> Tensor:
        """sigma as [B], or as [B, L] for a network that takes one noise level per token."""
        if sigma.dim() < 2:
            return sigma.expand(len(x_t))
        check_token_times(self.model)
        return sigma.expand(x_t.shape)

    def _on_host(self, head: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """The head, called with rows on `device`."""
        if self.home == self.device and not self.double:
            return head
        return lambda rows: _floats(head(rows.to(self.home))).to(self.device, torch.float64 if self.double else None)


def _at_places(model: HasHead, places: Tensor, positions: int) -> Callable[..., Tensor]:
    """The features of a backbone; if it can skip positions and few are selected, only those at `places` [R]."""
    if not selects_rows(model) or SPARSE * len(places) > positions:
        return model.features
    return partial(model.features, where=places)


def check_token_times(model: object) -> None:
    """Refuse sigma [B, L] for a network that declares its capabilities, but not that it takes one level per token."""
    declared = getattr(model, "capabilities", None)
    if isinstance(declared, Capabilities) and declared.time_conditioned and not declared.token_times:
        raise ValueError(
            "this network takes one noise level per sequence; one that takes sigma [B, L] declares "
            "Capabilities(token_times=True)"
        )


def check_conditions(conditions: Mapping[str, Tensor], sequences: int | None) -> None:
    """Refuse conditions that are not tensors with one entry per sequence."""
    for name, value in conditions.items():
        if not isinstance(value, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"unexpected argument {name!r}; conditions of the network must be tensors")
        if value.dim() == 0 or (sequences is not None and len(value) != sequences):
            raise ValueError(f"{name!r} must have one entry per sequence, {sequences} (got {list(value.shape)})")


@dataclass(frozen=True)
class FullPrecisionHead:
    """The head in the dtype of its weights, outside autocast. Make one before each call, also before a recording of it
    is replayed."""

    head: Callable[[Tensor], Tensor]

    def __post_init__(self) -> None:
        if (update := getattr(self.head, "update_parts", None)) is not None:
            update()

    def __call__(self, rows: Tensor) -> Tensor:
        with torch.autocast(rows.device.type, enabled=False):
            own = getattr(self.head, "full_precision", None)
            if own is not None:
                return own(rows)
            weight = getattr(self.head, "weight", None)
            exact = torch.promote_types(rows.dtype, weight.dtype if isinstance(weight, Tensor) else torch.float32)
            return self.head(rows.to(exact))


def _parts(rows: int, size: int, together: Sequence[int] | None) -> Iterator[slice]:
    """Slices of at most `size` rows; of whole groups, if `together` has their sizes, and of one that is larger."""
    start = stop = 0
    for count in [min(size, rows - first) for first in range(0, rows, size)] if together is None else together:
        if start < stop and stop + count - start > size:
            yield slice(start, stop)
            start = stop
        stop += count
    if start < stop:
        yield slice(start, stop)


class OutputRows:
    """Outputs at selected positions, computed in chunks."""

    def __init__(self, network: Network, hidden: Tensor, head: Callable[[Tensor], Tensor] | None, at: Tensor) -> None:
        self._network, self._hidden, self._head, self._at = network, hidden, head, at

    def chunks(self, together: Sequence[int] | None = None) -> Iterator[tuple[Tensor, slice]]:
        """Outputs [r, V] of a chunk, and the slice of rows that it covers.

        together: sizes of consecutive groups of rows, none of which is split.
        """
        vocab_size = self._network.vocab_size
        size = max(1, entries_at_once(self._hidden.device) // vocab_size)
        for part in _parts(len(self._hidden), size, together):
            rows = self._hidden[part]
            made = rows if self._head is None else self._network.checked(self._head(rows), (len(rows), vocab_size))
            yield self._network.possible(made, self._at[part]), part

    def map(self, function: Callable[[Tensor, slice], Tensor]) -> Tensor:
        """function(outputs, slice of rows) of all chunks, concatenated; there must be at least one row."""
        return torch.cat([function(outputs, part) for outputs, part in self.chunks()])

    def apply(self, function: RowFunction, of_rows: Sequence[Tensor]) -> Tensor:
        """function(outputs [r, V], *of_rows [r, ...]) of all chunks, concatenated to [R].

        A network that records functions (`GraphedNetwork`) records it together with its head.
        """
        recorded = self._recorded(function, of_rows)
        if recorded is not None:
            return recorded
        return self.map(lambda outputs, part: function(outputs, *(value[part] for value in of_rows)))

    def _recorded(self, function: RowFunction, of_rows: Sequence[Tensor]) -> Tensor | None:
        model = self._network.model
        if (
            self._head is None
            or self._network.only is not None
            or not records_functions(model)
            or not function.of_tensors
        ):
            return None
        step = _HeadAnd(function, self._head, self._network.vocab_size)
        recorded = model.recorded(step, (self._hidden, *of_rows))
        if recorded is None:
            return None
        values, total = recorded
        self._network.check.add(total.clone())
        return values[: len(self._hidden)]


@dataclass(frozen=True)
class _HeadAnd:
    """A function of outputs as a function of features, which also returns the sum that `OutputCheck` reads; together
    with the number that the function returns besides its tensor, if it does."""

    function: Callable[..., Tensor | tuple[Tensor, Tensor]]
    head: Callable[[Tensor], Tensor]
    vocab_size: int

    def __call__(self, hidden: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        outputs = checked_outputs(self.head(hidden), (len(hidden), self.vocab_size))
        made, total = self.function(outputs, *others), _sum_of_largest(outputs)
        return (made, total) if isinstance(made, Tensor) else (made[0], torch.stack([total, made[1].double()]))


class RowsOneByOne(OutputRows):
    """Outputs of one sequence at a time, each of which is run when its rows are reached."""

    def __init__(self, sequences: Iterator[OutputRows]) -> None:
        self._sequences = sequences

    def _recorded(self, function: RowFunction, of_rows: Sequence[Tensor]) -> None:
        """None: sequences have different numbers of rows."""

    def chunks(self, together: Sequence[int] | None = None) -> Iterator[tuple[Tensor, slice]]:
        """As in `OutputRows`; a group must lie within a sequence."""
        start, counts = 0, itertools.repeat(None) if together is None else ([count] for count in together if count)
        for rows, count in zip(self._sequences, counts, strict=False):
            for outputs, _ in rows.chunks(count):
                yield outputs, slice(start, start + len(outputs))
                start += len(outputs)


def _floats(made: object) -> Tensor:
    """The result of a network, which must be a floating-point tensor."""
    if isinstance(made, Tensor) and made.is_floating_point():
        return made
    kind = f"one of {made.dtype}" if isinstance(made, Tensor) else "None" if made is None else type(made).__name__
    raise TypeError(f"the network must return a floating-point tensor, not wrapped in anything (got {kind})")


def checked_outputs(outputs: object, expected: tuple[int, ...]) -> Tensor:
    """The outputs, which must have the expected shape."""
    outputs = _floats(outputs)
    if tuple(outputs.shape) != expected:
        form = "[B, L, V]" if len(expected) == 3 else "[N, V]"
        raise ValueError(
            f"the network must return {form} = {list(expected)}, without a mask column (got {list(outputs.shape)})"
        )
    return outputs


def with_parameters(model: Module, values: Mapping[str, Tensor]) -> Module:
    """A copy of the network with these tensors as the parameters that are named, and otherwise with the parameters and
    buffers of the network itself, not copies."""
    kept: dict[int, Any] = {id(buffer): buffer for buffer in model.buffers()}
    for name, parameter in model.named_parameters():
        kept[id(parameter)] = nn.Parameter(values[name], parameter.requires_grad) if name in values else parameter
    return deepcopy(model, kept)  # which takes from there what it finds there


def with_rounded(model: Module, names: Collection[str], dtype: torch.dtype) -> Module:
    """The same network with copies in `dtype` of the parameters that are named.

    Autocast would round each of them at every use, and widen its gradient again: two passes over all weights, in
    kernels of a few microseconds each.
    """
    parameters = dict(model.named_parameters())
    return with_parameters(model, {name: parameters[name].detach().to(dtype) for name in names})
