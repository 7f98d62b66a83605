"""The one way to run a network: what is asked of it, where it runs, and its outputs at chosen positions.

Shapes: B batch, L positions, V vocabulary, D width; R chosen positions in S chosen sequences.

    model(x_t [B, L] int64, sigma [B] float32, **extras) -> outputs [B, L, V]        any callable will do
    model.features(x_t, sigma, **extras) -> [B, L, D],   model.head([N, D]) -> [N, V]      a network in two halves

With two halves the network runs on the S sequences and its head on the R positions, a chunk at a time, so that
[B, L, V] outputs never exist. Extras (a label, another text) are tensors with one entry a sequence; they are handed to
the network as they are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeGuard, TypeVar

import torch
from torch import Tensor, nn

from cedd.device import has_float64, model_device

if TYPE_CHECKING:
    from typing_extensions import TypeIs

Module = TypeVar("Module", bound=nn.Module)

_ENTRIES_AT_ONCE = {"cpu": 1 << 24, "mps": 1 << 25}
_ENTRIES_ON_A_GPU = 1 << 25, 1 << 27

FEW = 4
"""Places are few if there are so many times as many positions: then a network need not finish the others."""


# ----------------------------------------------------------------------------------------------------------------
# What is asked of a network


def entries_at_once(device: torch.device) -> int:
    """Entries of [R, V] outputs that are held at once: 128 MiB, in float64 on a CPU, in float32 on MPS; on a GPU a
    128th of its memory in float64, from 256 MiB to 1 GiB: with fewer a large one waits for the host."""
    fewest, most = _ENTRIES_ON_A_GPU
    if device.type != "cuda":
        return _ENTRIES_AT_ONCE.get(device.type, fewest)
    return min(most, max(fewest, torch.cuda.get_device_properties(device).total_memory // 1024))


class HasHead(Protocol):
    """A network in two halves."""

    @property
    def head(self) -> Callable[[Tensor], Tensor]:
        """[N, D] -> [N, V]."""
        ...

    @property
    def features(self) -> Callable[..., Tensor]:
        """(x_t [B, L], sigma [B], **extras) -> [B, L, D], just before the vocabulary head."""
        ...


AnyModel = Callable[..., Tensor] | HasHead
"""A callable `(x_t [B, L], sigma [B]) -> [B, L, V]`, or a network in two halves."""


def knows_time(model: object) -> bool:
    """Whether what a network says depends on the noise level besides the text; unless it says that it does not."""
    return getattr(model, "knows_time", True)


def has_head(model: object) -> TypeIs[HasHead]:
    """Whether a network can be run in two halves.

    The object itself is asked: since Python 3.12 `isinstance` with a run-time protocol looks at the class, and misses
    a module's submodules.
    """
    return callable(getattr(model, "features", None)) and callable(getattr(model, "head", None))


class ScoreRows(NamedTuple):
    """What the score entropy of a row of outputs o comes down to, [N] each:

        sum s_y - common sum log s_y - extra log s_target,        log s_y = o_y + shift,

    with sums over all tokens y but `skip` (one of V or more: over all). `extra` is 0 where `skip` is the target.
    """

    target: Tensor
    skip: Tensor
    shift: Tensor
    common: Tensor
    extra: Tensor


class RowTotal(Protocol):
    """What a head's loss returns: the differentiable sum over rows."""

    @property
    def total(self) -> Tensor: ...


class SupportsRowLosses(Protocol):
    """A vocabulary head that costs chosen rows of features in chunks, without all outputs at once."""

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


class SupportsRows(Protocol):
    """A network that can leave out what only other rows than the chosen ones need, and whose head can be trained on
    those."""

    @property
    def head(self) -> SupportsRowLosses: ...

    @property
    def features(self) -> Callable[..., Tensor]:
        """(x_t [B, L], sigma [B], *, where=None, **extras) -> [B, L, D], just before the vocabulary head; only those
        at the distinct places `where` [C] of the flattened batch are asked for, if it is given."""
        ...

    def rows(self, features: Tensor, places: Tensor) -> Tensor:
        """[B, L, D] at distinct places [N] of the flattened batch -> [N, D]."""
        ...


def supports_rows(model: object) -> TypeGuard[SupportsRows]:
    """Whether a network has two halves, and a head that costs rows."""
    return has_head(model) and hasattr(model, "rows") and hasattr(model.head, "cross_entropy")


class Records(Protocol):
    """A network that records what is done at every step."""

    def recorded(
        self, function: Callable[..., tuple[Tensor, ...]], of_rows: Sequence[Tensor]
    ) -> tuple[Tensor, ...] | None:
        """function(*of_rows) of tensors [R, ...]; None if it does not record so many rows. What it returns may have
        more rows, and is overwritten by the next call."""
        ...


def records(model: object) -> TypeGuard[Records]:
    """Whether a network records what is done at every step."""
    return callable(getattr(model, "recorded", None))


class RowFunction(Protocol):
    """A function of outputs [R, V] and other tensors of those rows -> [R]. Functions that are equal do the same."""

    @property
    def of_tensors(self) -> bool:
        """Whether it is made of operations on tensors alone and never looks at their values, so that a GPU can record
        it."""
        ...

    def __call__(self, *inputs: Any, **_: Any) -> Tensor: ...


# ----------------------------------------------------------------------------------------------------------------
# Where and how it runs


@contextmanager
def evaluating(model: object) -> Generator[None]:
    """Without gradients, and with a module in evaluation mode for as long."""
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
    """Where outputs are wanted: flat positions [R] in the batch, and the same inside the `sequences` [S] alone."""

    rows: Tensor
    sequences: Tensor | None = None
    local: Tensor | None = None

    @property
    def index(self) -> Tensor:
        """The positions in what the network is run on."""
        return self.rows if self.local is None else self.local

    def __len__(self) -> int:
        return len(self.rows)


def flat_places(where: Tensor) -> Tensor:
    """The flat positions [R] at which `where` [B, L] holds. The host waits for a GPU to say how many."""
    return where.flatten().nonzero().squeeze(1)


def put_at(x: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    """x [B, L] with values [R] at the flat positions `rows` [R]."""
    return x.flatten().index_copy(0, rows, values.to(x)).view(x.shape)


class OutputCheck:
    """Checks outputs for nan and infinity: at once on a CPU; on a GPU in `settle`, to avoid a synchronization."""

    def __init__(self) -> None:
        self._totals: list[Tensor] = []

    def look_at(self, outputs: Tensor) -> None:
        """Outputs [.., V]."""
        if outputs.numel():
            self.add(_sum_of_largest(outputs))

    def add(self, total: Tensor) -> None:
        """Such a sum of outputs."""
        self._totals.append(total)
        if total.device.type == "cpu":
            self.settle()

    def settle(self) -> None:
        """Raise a ValueError if any output so far was nan or infinite."""
        totals, self._totals = self._totals, []
        if totals and not math.isfinite(totals[0] if len(totals) == 1 else torch.stack(totals).sum()):
            raise no_numbers()


def no_numbers() -> ValueError:
    """What is raised where a network's outputs are no numbers."""
    return ValueError(
        "the network returned nan, or infinity, or rows without any possible token: its weights may be damaged, or its "
        "training has diverged"
    )


def _sum_of_largest(outputs: Tensor) -> Tensor:
    """Of [.., V]: the largest of a row is nan if any is, and -inf if no token is possible; so is their sum."""
    return outputs.detach().amax(-1).sum(dtype=torch.float64)


def _chosen(values: Tensor, which: Tensor | slice) -> Tensor:
    """Some entries, wherever their index is."""
    return values[which.to(values.device) if isinstance(which, Tensor) else which]


@dataclass(frozen=True)
class Only:
    """Positions, [L] or [B, L] bool, at which only some tokens, [V] bool, are possible."""

    where: Tensor
    tokens: Tensor

    def of(self, which: Tensor | slice) -> Only:
        """Those of some sequences, or of some positions of one."""
        return replace(self, where=_chosen(self.where, which))

    def barred(self, rows: Tensor) -> Tensor:
        """Which tokens are not possible at the flat positions [R], [R, V]."""
        return self.where.to(rows.device).flatten()[rows, None] & ~self.tokens.to(rows.device)


@dataclass(frozen=True)
class Network:
    """A model as the mathematics runs it; make one with `Network.of`.

    `device` is where the arithmetic around the network is done. It is the model's own (`home`), or the CPU where that
    has no float64 (MPS).
    """

    model: AnyModel
    vocab_size: int
    home: torch.device
    sigma_dtype: torch.dtype = torch.float32
    double: bool = False
    """Whether outputs are turned into float64."""
    extras: Mapping[str, Tensor] | None = None
    only: Only | None = None
    """What is possible in some positions [B, L]; other tokens have no probability in `rows`."""
    one_by_one: bool = False
    """Whether `rows` runs the model on one sequence at a time, so that no bit of its outputs depends on the others."""
    check: OutputCheck = field(default_factory=OutputCheck, compare=False)

    @staticmethod
    def of(
        model: AnyModel,
        vocab_size: int,
        device: torch.device | str | None = None,
        extras: Mapping[str, Tensor] | None = None,
        sequences: int | None = None,
    ) -> Network:
        """A model on a device (where its parameters are, if none is given), with extras for so many sequences."""
        home = torch.device(device) if device is not None else model_device(model)
        check_extras(extras or {}, sequences)
        return Network(model, vocab_size, home, extras=extras or None)

    @property
    def device(self) -> torch.device:
        return self.home if has_float64(self.home) else torch.device("cpu")

    @property
    def in_halves(self) -> bool:
        return has_head(self.model)

    def of_sequences(self, which: Tensor | slice) -> Network:
        """The same network for some of the sequences that extras and `only` are of."""
        if self.extras is None and self.only is None:
            return self
        extras = None if self.extras is None else {name: _chosen(value, which) for name, value in self.extras.items()}
        return replace(self, extras=extras, only=self.only and self.only.of(which))

    def reading(self, deterministic: bool | None) -> Network:
        """The same network, one sequence at a time or not; by default so for modules on a CPU, where it costs little.

        Products of matrices are rounded otherwise for other numbers of rows.
        """
        if deterministic is None:
            deterministic = isinstance(self.model, nn.Module) and self.home.type == "cpu"
        return replace(self, one_by_one=deterministic)

    def outputs(self, x_t: Tensor, sigma: Tensor) -> Tensor:
        """All outputs [B, L, V] for x_t [B, L] and sigma [B] (or one for all)."""
        assert callable(self.model)
        outputs = self.checked(self._run(self.model, x_t, sigma), (*x_t.shape, self.vocab_size))
        return outputs.double() if self.double else outputs

    def given(self) -> dict[str, Tensor]:
        """The extras, where the network is."""
        return {name: value.to(self.home) for name, value in (self.extras or {}).items()}

    def checked(self, outputs: Tensor, expected: tuple[int, ...]) -> Tensor:
        """Outputs of the shape that was asked for, which are numbers."""
        self.check.look_at(checked_outputs(outputs, expected))
        return outputs

    def possible(self, outputs: Tensor, rows: Tensor) -> Tensor:
        """Outputs [R, V] of the flat positions [R], without those of tokens that are not possible there."""
        return outputs if self.only is None else outputs.masked_fill(self.only.barred(rows), -math.inf)

    def check_outputs(self) -> None:
        """Refuse outputs that were no numbers, if there were any since the last call."""
        self.check.settle()

    def rows(self, x_t: Tensor, sigma: Tensor, places: Places, *, full_precision: bool = False) -> OutputRows:
        """Run on x_t [B, L] at sigma [B] (or one for all), ready to give the outputs at `places`.

        full_precision: of the head, whatever autocast says. For few rows: three digits of the logits are worth more.
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
            raise ValueError(
                f"a network's features must be [B, L, D], {list(x_t.shape)} and D; got {list(hidden.shape)}"
            )
        hidden = hidden.flatten(0, 1).index_select(0, places.index)
        head = FullPrecisionHead(model.head) if full_precision else model.head
        return OutputRows(self, hidden, self._on_host(head), places.rows)

    def _each(self, x_t: Tensor, sigma: Tensor, rows: Tensor, full_precision: bool) -> Iterator[OutputRows]:
        """The outputs at ascending rows [R], of one sequence after the other."""
        length, start = x_t.shape[1], 0
        sequences, counts = torch.unique_consecutive(rows // length, return_counts=True)
        for i, count in zip(sequences.tolist(), counts.tolist(), strict=True):
            one, places = slice(i, i + 1), Places(rows[start : start + count] - i * length)
            level = sigma if sigma.dim() == 0 else sigma[one]
            yield self.of_sequences(one).rows(x_t[one], level, places, full_precision=full_precision)
            start += count

    def _run(self, half: Callable[..., Tensor], x_t: Tensor, sigma: Tensor) -> Tensor:
        level = sigma.to(self.sigma_dtype).expand(len(x_t))
        return _floats(half(x_t.to(self.home), level.to(self.home), **self.given())).to(self.device)

    def _on_host(self, head: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """The head as it is, or called from where the rows are."""
        if self.home == self.device and not self.double:
            return head
        return lambda rows: _floats(head(rows.to(self.home))).to(self.device, torch.float64 if self.double else None)


def _at_places(model: HasHead, places: Tensor, positions: int) -> Callable[..., Tensor]:
    """The features of a network in two halves, which need not be right but at few places [R] of so many positions."""
    if not supports_rows(model) or FEW * len(places) > positions:
        return model.features
    return partial(model.features, where=places)


def check_extras(extras: Mapping[str, Tensor], sequences: int | None) -> None:
    """Refuse what cannot be handed to a network: all but tensors with one entry a sequence."""
    for name, value in extras.items():
        if not isinstance(value, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"unknown argument {name!r}; extra arguments for the network must be tensors")
        if value.dim() == 0 or (sequences is not None and len(value) != sequences):
            raise ValueError(f"{name!r} needs one entry a sequence, {sequences}; got {list(value.shape)}")


@dataclass(frozen=True)
class FullPrecisionHead:
    """The head in the type of its weights, outside autocast."""

    head: Callable[[Tensor], Tensor]

    def __call__(self, rows: Tensor) -> Tensor:
        with torch.autocast(rows.device.type, enabled=False):
            weight = getattr(self.head, "weight", None)
            return self.head(rows.to(weight.dtype) if isinstance(weight, Tensor) else rows.float())


def _parts(rows: int, size: int, together: Sequence[int] | None) -> Iterator[slice]:
    """Rows in parts of at most `size`; or of as many of the groups `together` as fit, and of one that does not."""
    start = stop = 0
    for count in [min(size, rows - first) for first in range(0, rows, size)] if together is None else together:
        if start < stop and stop + count - start > size:
            yield slice(start, stop)
            start = stop
        stop += count
    if start < stop:
        yield slice(start, stop)


class OutputRows:
    """Outputs of some positions, made a chunk at a time."""

    def __init__(self, network: Network, hidden: Tensor, head: Callable[[Tensor], Tensor] | None, at: Tensor) -> None:
        self._network, self._hidden, self._head, self._at = network, hidden, head, at

    def chunks(self, together: Sequence[int] | None = None) -> Iterator[tuple[Tensor, slice]]:
        """Outputs [r, V], and which rows they are of.

        together: how many rows after one another belong together, and come in one chunk.
        """
        vocab_size = self._network.vocab_size
        size = max(1, entries_at_once(self._hidden.device) // vocab_size)
        for part in _parts(len(self._hidden), size, together):
            rows = self._hidden[part]
            made = rows if self._head is None else self._network.checked(self._head(rows), (len(rows), vocab_size))
            yield self._network.possible(made, self._at[part]), part

    def map(self, function: Callable[[Tensor, slice], Tensor]) -> Tensor:
        """function(outputs, which rows) of all chunks, put together; there must be a row."""
        return torch.cat([function(outputs, part) for outputs, part in self.chunks()])

    def apply(self, function: RowFunction, of_rows: Sequence[Tensor]) -> Tensor:
        """function(outputs [r, V], *of_rows [r, ...]) of all chunks, put together: [R].

        A network that records what is done at every step (`GraphedNetwork`) records the function with its head.
        """
        recorded = self._recorded(function, of_rows)
        if recorded is not None:
            return recorded
        return self.map(lambda outputs, part: function(outputs, *(value[part] for value in of_rows)))

    def _recorded(self, function: RowFunction, of_rows: Sequence[Tensor]) -> Tensor | None:
        model = self._network.model
        if self._head is None or self._network.only is not None or not records(model) or not function.of_tensors:
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
    """A function of the outputs of rows as one of their hidden values; and the sum by which outputs are checked."""

    function: RowFunction
    head: Callable[[Tensor], Tensor]
    vocab_size: int

    def __call__(self, hidden: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
        outputs = checked_outputs(self.head(hidden), (len(hidden), self.vocab_size))
        return self.function(outputs, *others), _sum_of_largest(outputs)


class RowsOneByOne(OutputRows):
    """Outputs of one sequence after the other, each of which is run when its rows are asked for."""

    def __init__(self, sequences: Iterator[OutputRows]) -> None:
        self._sequences = sequences

    def _recorded(self, function: RowFunction, of_rows: Sequence[Tensor]) -> None:
        """Nothing: each sequence has its own number of rows."""

    def chunks(self, together: Sequence[int] | None = None) -> Iterator[tuple[Tensor, slice]]:
        """As of other rows; what belongs together must be a sequence's."""
        start, counts = 0, itertools.repeat(None) if together is None else ([count] for count in together if count)
        for rows, count in zip(self._sequences, counts, strict=False):
            for outputs, _ in rows.chunks(count):
                yield outputs, slice(start, start + len(outputs))
                start += len(outputs)


def _floats(made: object) -> Tensor:
    """What a network returned, which must be a tensor of floats."""
    if isinstance(made, Tensor) and made.is_floating_point():
        return made
    kind = f"one of {made.dtype}" if isinstance(made, Tensor) else "None" if made is None else type(made).__name__
    raise TypeError(f"the network must return a tensor of floats, without anything around it; got {kind}")


def checked_outputs(outputs: object, expected: tuple[int, ...]) -> Tensor:
    """Outputs of the shape that was asked for."""
    outputs = _floats(outputs)
    if tuple(outputs.shape) != expected:
        form = "[B, L, V]" if len(expected) == 3 else "[N, V]"
        raise ValueError(
            f"the network must return {form} = {list(expected)}, without a mask column; got {list(outputs.shape)}"
        )
    return outputs


def with_rounded(model: Module, names: Collection[str], dtype: torch.dtype) -> Module:
    """The same network with copies in `dtype` of the parameters that are named, and its own parameters otherwise.

    Autocast would round each of them at every use, and widen its gradient again: two sweeps over all weights, in
    kernels of some microseconds each.
    """
    kept = {
        id(parameter): nn.Parameter(parameter.detach().to(dtype)) if name in names else parameter
        for name, parameter in model.named_parameters()
    }
    return deepcopy(model, kept)  # which takes from there what it finds there
