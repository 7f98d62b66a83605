"""CUDA graphs: the operations of a sampler's step, recorded once for each of a few sizes.

Shapes: S sequences, L positions, D width; R rows.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from cedd.device import model_device, recorded_graph
from cedd.network import (
    SPARSE,
    AttentionPattern,
    Capabilities,
    GraphNetwork,
    HasHead,
    capabilities_of,
    selects_rows,
    with_rounded,
)

MOST_ROWS = 128
"""Rows up to which a function of outputs is recorded: more keep the device busy, and a recording holds its memory."""
_MOST_CALLS = 8
_MOST_RECORDINGS = 128
_WARM_UPS = 2


@functools.cache
def _buckets(batch: int) -> tuple[int, ...]:
    """Batch sizes to record: 1, 2, 3, 4, 6, 8, 12, 16, ... up to the batch itself."""
    sizes = {batch}
    power = 1
    while power < batch:
        sizes.update(size for size in (power, power + power // 2) if size < batch)
        power *= 2
    return tuple(sorted(sizes))


def _room(size: int, sizes: Iterable[int]) -> int | None:
    """The smallest size that is large enough."""
    return next((room for room in sizes if room >= size), None)


def _half_precision_copy(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The network with half-precision copies of the parameters that autocast would cast at each call.

    The head, which runs in float32, keeps its own.
    """
    rounded = cast(GraphNetwork, model).rounded_parameters() if capabilities_of(model).cuda_graphs else set[str]()
    head = cast(HasHead, model).head
    exact = {id(parameter) for parameter in head.parameters()} if isinstance(head, nn.Module) else set[int]()
    names = {name for name, parameter in model.named_parameters() if name in rounded and id(parameter) not in exact}
    return with_rounded(model, names, dtype).eval()


# ----------------------------------------------------------------------------------------------------------------
# Recordings

Outputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class _Recording:
    """A graph with its input and output tensors."""

    replay: Callable[[], None]
    inputs: Outputs
    outputs: Outputs

    def __call__(self, inputs: Iterable[Tensor]) -> Outputs:
        for room, values in zip(self.inputs, inputs, strict=True):
            room[: len(values)].copy_(values)
        self.replay()
        return self.outputs


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of all recordings on a device. That of torch is on the device which was current when it was made, and
    recordings share a pool of memory only on one stream."""
    return torch.cuda.Stream(device)


def capture(function: Callable[..., Outputs], inputs: Outputs, pool: Any) -> _Recording:
    """Record function(*inputs), of tensors on a CUDA device, not necessarily the current one, whose contents may change
    later."""
    device = inputs[0].device
    with torch.cuda.device(device):
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                function(*inputs)
        current = torch.cuda.current_stream(device)
        current.wait_stream(stream)
        # The outer context returns to the current stream if a recording fails, which the inner one does not.
        with torch.cuda.stream(current), recorded_graph(pool=pool, stream=_capture_stream(device)) as graph:
            outputs = function(*inputs)
    return _Recording(graph.replay, inputs, outputs)


class Recorder:
    """Functions of tensors, each recorded once per input size; the oldest recordings are dropped.

    Args:
        capture: how to record, as `capture` does.
    """

    def __init__(self, capture: Callable[..., _Recording] = capture) -> None:
        self._capture = capture
        self._pool: Any = None
        self._recorded: dict[Hashable, _Recording] = {}

    def __call__(self, function: Callable[..., Outputs], inputs: Sequence[Tensor], rooms: Sequence[int]) -> Outputs:
        """function(*inputs), with inputs [n, ...] padded to [room, ...]; the next call overwrites what it returns.

        Functions are identified by their hash: equal ones must do the same. The padding contains values of earlier
        calls.
        """
        key = (function, tuple(rooms), tuple(value.shape[1:] for value in inputs))
        recording = self._recorded.get(key)
        if recording is None:
            if self._pool is None and inputs[0].is_cuda:
                self._pool = torch.cuda.graph_pool_handle()
            while len(self._recorded) >= _MOST_RECORDINGS:
                del self._recorded[next(iter(self._recorded))]
            with _for_later_calls():
                zeros = zip(inputs, rooms, strict=True)
                padded = tuple(value.new_zeros(room, *value.shape[1:]) for value, room in zeros)
                for room, values in zip(padded, inputs, strict=True):
                    room[: len(values)].copy_(values)
                recording = self._recorded[key] = self._capture(function, padded, self._pool)
        return recording(inputs)

    def of_rows(self, function: Callable[..., Outputs], of_rows: Sequence[Tensor]) -> Outputs | None:
        """function(*of_rows), of tensors [R, ...]; None for more rows than are recorded.

        It must be made of operations on tensors alone. What it returns has more rows, and the next call overwrites it.
        """
        room = _room(len(of_rows[0]), _buckets(MOST_ROWS))
        return None if room is None else self(function, of_rows, [room] * len(of_rows))


@contextmanager
def _for_later_calls() -> Generator[None]:
    """Tensors made here can be overwritten later: those made in torch's inference mode only within it."""
    with torch.inference_mode(False), torch.no_grad():
        yield


@dataclass(frozen=True, eq=False)
class _HalfPrecision:
    """A network under autocast to `dtype`, or as it is for None.

    Recorded functions hold this and not what holds their recordings, whose memory is then freed with the last use.
    """

    model: Any
    device: torch.device
    dtype: torch.dtype | None

    @contextmanager
    def precision(self) -> Generator[None]:
        # Casts are not cached: a cached cast would not outlive the context, and a recorded graph would.
        kind, enabled = self.device.type, self.dtype is not None
        with torch.no_grad(), torch.autocast(kind, self.dtype, enabled=enabled, cache_enabled=False):
            yield

    def features(self, x_t: Tensor, sigma: Tensor | None = None, **options: Any) -> Tensor:
        """Those of the network, not recorded."""
        with self.precision():
            return self.model.features(x_t, sigma, **options)

    def outputs_at(self, x_t: Tensor, sigma: Tensor, where: Tensor) -> Outputs:
        """The features at some places, as they are recorded."""
        return (self.features(x_t, sigma, where=where),)

    def outputs(self, x_t: Tensor, sigma: Tensor) -> Outputs:
        """All features, as they are recorded."""
        return (self.features(x_t, sigma),)


class GraphedNetwork:
    """A network on a CUDA device whose features are recorded as CUDA graphs, one for each of a few batch sizes.

    A sampler calls the network hundreds of times on batches of varying size; a recorded graph launches in one call
    what takes a thousand kernel launches otherwise. A batch is padded to the next recorded size.
    Features are computed in `dtype` by autocast, the head in float32.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: int,
        length: int,
        dtype: torch.dtype = torch.bfloat16,
        compiled: bool = False,
        capture: Callable[..., _Recording] = capture,
    ) -> None:
        self.device = model_device(model)
        if self.device.type != "cuda":
            raise ValueError("CUDA graphs need a model on a CUDA device; use the model itself on the CPU")
        self._half = _HalfPrecision(_half_precision_copy(model, dtype), self.device, dtype)
        if compiled:
            self._half.model.compile()
        self.head: Callable[[Tensor], Tensor] = cast(HasHead, model).head
        self._length, self._sizes = length, _buckets(batch)
        # A compiled network would be compiled again for each size of `where`.
        self._takes_places = selects_rows(self._half.model) and not compiled
        declared = capabilities_of(model)
        self.capabilities = Capabilities(
            features=True,
            selected_rows=True,
            time_conditioned=declared.time_conditioned,
            token_times=declared.token_times,
            recorder=True,
        )
        self._recorder, self._records, self._used = Recorder(capture), True, set[Hashable]()

    def __call__(self, x_t: Tensor, sigma: Tensor, label: Tensor | None = None) -> Tensor:
        return self.head(self.features(x_t, sigma, label=label).float())

    def features(self, x_t: Tensor, sigma: Tensor, where: Tensor | None = None, label: Tensor | None = None) -> Tensor:
        """[S, L] -> [S, L, D], of which only those at the distinct places `where` [R] of the flattened batch
        are defined, if it is given; the result is overwritten by the next call."""
        size = _room(len(x_t), self._sizes)
        if size is None or x_t.shape[1] != self._length or label is not None:  # labels are not recorded
            given = {name: value for name, value in {"where": where, "label": label}.items() if value is not None}
            return self._half.features(x_t, sigma, **given)
        inputs, rooms, function = [x_t, sigma], [size, size], self._half.outputs
        where = where if self._takes_places else None
        # Few sizes of `where`, because each is recorded for each batch size; otherwise all features are computed.
        rows = None if where is None else _room(len(where), (size * factor for factor in (1, 2, 4, 8, 16)))
        if where is not None and rows is not None and SPARSE * rows <= size * self._length:
            inputs, rooms, function = [*inputs, where], [*rooms, rows], self._half.outputs_at
        return self._recorder(function, inputs, rooms)[0][: len(x_t)]

    def rows(self, features: Tensor, places: Tensor) -> Tensor:
        """Features [S, L, D] at distinct places [R] of the flattened batch, [R, D]."""
        return features.flatten(0, 1).index_select(0, places)

    def recorded(self, function: Callable[..., Outputs], of_rows: Sequence[Tensor]) -> Outputs | None:
        """function(*of_rows) of tensors [R, ...], as `Recorder.of_rows` has it."""
        return self._recorder.of_rows(function, of_rows)

    def records(self, function: Callable[..., Outputs], rooms: Sequence[int]) -> bool:
        """See `network.RecordsFunctions`."""
        key = function, tuple(rooms)
        is_used = key in self._used
        self._used.add(key)
        return is_used and self._records

    def recorded_in(
        self, function: Callable[..., Outputs], inputs: Sequence[Tensor], rooms: Sequence[int]
    ) -> Outputs | None:
        """function(*inputs), each padded to its room; None from the first recording on that fails."""
        try:
            return self._recorder(function, inputs, rooms)
        except RuntimeError as error:
            self._records = False
            warn_of_failure("draws under a constraint", error)
            return None


class GraphedBlocks:
    """A network that writes blocks, on a CUDA device: a block after its cache is recorded as a CUDA graph.

    A recorded block attends to all positions for which the cache has room. A mask hides those that are not filled, so
    one graph serves all blocks of a run, and of later runs of the same size. Every call computes all texts of the
    cache. Features are computed in `dtype` by autocast. If a recording fails, all later calls are of the network
    itself.

    Args:
        model: a network with a cache (`Capabilities.static_cache`).
        dtype: of features, keys and values.
        capture: how to record, as `capture` does.
    """

    def __init__(
        self, model: nn.Module, dtype: torch.dtype = torch.bfloat16, capture: Callable[..., _Recording] = capture
    ) -> None:
        self.device, self._capture = model_device(model), capture
        rounded = dtype if self.device.type == "cuda" else None
        self._half = _HalfPrecision(_half_precision_copy(model, dtype), self.device, rounded)
        self.head: Callable[[Tensor], Tensor] = cast(HasHead, model).head
        unused = {"selected_rows": False, "head_losses": False, "cuda_graphs": False}
        self.capabilities = replace(capabilities_of(model), recorder=True, **unused)
        self._records, self._recorder, self._rooms = True, Recorder(capture), list[_Room]()

    def new_cache(self, batch: int, length: int | None = None) -> Any:
        """An empty cache, for which blocks will be recorded. It uses the memory of an earlier cache of the same size
        that is no longer used, if there is one."""
        size = batch, length
        room = next((one for one in self._rooms if one.size == size and one.user() is None), None)
        if room is None:
            with self._half.precision(), _for_later_calls():
                cache = self._half.model.new_cache(batch, length)
            if not self._records:
                return cache
            room = self._add(cache, size)
        given = replace(room.cache, length=0)
        room.user = weakref.ref(given)
        return given

    def _add(self, cache: Any, size: tuple[int, int | None]) -> _Room:
        """Room for recordings with this cache. The last two are kept, because guidance uses two."""
        self._rooms = [*self._rooms[-1:], _Room(replace(cache), size, weakref.ref(cache), Recorder(self._capture))]
        return self._rooms[-1]

    def features(self, x_t: Tensor, sigma: Tensor | None = None, **options: Any) -> Tensor:
        """The features of the network, not recorded."""
        return self._half.features(x_t, sigma, **options)

    def next_block(
        self, cache: Any, x_t: Tensor, sigma: Tensor, text: Tensor | None = None, **conditions: Tensor
    ) -> Tensor:
        """Features [S, b, D] of blocks x_t [S, b] after the cache (see `network.RecordsBlocks`); overwritten by the
        next call."""
        batch = cache.keys.shape[1]
        some = None if text is None or len(text) == batch else text
        if self._records:
            try:
                return self._recorded_block(cache, x_t, sigma, some, conditions)
            except RuntimeError as error:
                self._stop_recording(error)
        numbers: Any = range(batch) if some is None else some
        rows = [int(number) for number in numbers]
        return self.features(x_t, sigma, cache=cache.of_rows(rows), **conditions)

    def _recorded_block(
        self, cache: Any, x_t: Tensor, sigma: Tensor, some: Tensor | None, conditions: dict[str, Tensor]
    ) -> Tensor:
        # Other runs may have replaced its room meanwhile.
        room = next((one for one in self._rooms if one.user() is cache), None) or self._add(cache, (0, None))
        names, batch = tuple(conditions), cache.keys.shape[1]
        block = room.functions.setdefault(names, _NextBlock(self._half.features, room.cache, names))
        inputs = [x_t, sigma, *conditions.values()]
        if some is not None:
            inputs = [one.new_zeros(batch, *one.shape[1:]).index_copy_(0, some, one) for one in inputs]
        filled = torch.full((1,), cache.length, device=self.device)
        (made,) = room.recorder(block, [*inputs, filled], [*[batch] * len(inputs), 1])
        return made if some is None else made.index_select(0, some)

    def reveals(
        self, cache: Any, step: Callable[..., Outputs], x: Tensor, sigma: Tensor, when: Tensor, v: Tensor
    ) -> Outputs | None:
        """Blocks x [B, b] after the cache, after C calls (see `network.RecordsBlocks`)."""
        room = next((one for one in self._rooms if one.user() is cache), None)
        if not self._records or room is None:
            return None
        function = _Reveals(room.functions.setdefault((), _NextBlock(self._half.features, room.cache, ())), step)
        filled, totals, done = torch.full((1,), cache.length, device=self.device), list[Tensor](), 0
        try:
            while done < len(when):
                count = 1 << (min(_MOST_CALLS, len(when) - done).bit_length() - 1)  # few sizes, each recorded once
                parts = [value[done : done + count] for value in (sigma, when, v)]
                x, total = room.recorder(function, [x, *parts, filled], [len(x), count, count, count, 1])
                totals.append(total.clone())
                done += count
        except RuntimeError as error:
            self._stop_recording(error)
            return None
        return x.clone(), torch.stack(totals).sum()

    def _stop_recording(self, error: RuntimeError) -> None:
        """Free what was recorded, and record nothing from now on."""
        self._records, self._recorder, self._rooms = False, Recorder(self._capture), []
        warn_of_failure("blocks", error)

    def recorded(self, function: Callable[..., Outputs], of_rows: Sequence[Tensor]) -> Outputs | None:
        """function(*of_rows) of tensors [R, ...], as `Recorder.of_rows` has it; None if a recording has failed."""
        if not self._records:
            return None
        try:
            return self._recorder.of_rows(function, of_rows)
        except RuntimeError as error:
            self._stop_recording(error)
            return None


def warn_of_failure(what: str, error: RuntimeError) -> None:
    """Warn that a recording failed."""
    reason = str(error).partition("\n")[0]
    warnings.warn(f"{what} could not be recorded as a CUDA graph; sampling is slower ({reason})", stacklevel=3)


@dataclass(eq=False)
class _Room:
    """The memory of a cache, and what was recorded with it."""

    cache: Any
    size: tuple[int, int | None]
    """Sequences and tokens; (0, None): not to be used again."""
    user: weakref.ref[Any]
    """The cache that the current run holds."""
    recorder: Recorder
    functions: dict[tuple[str, ...], _NextBlock] = field(default_factory=dict[tuple[str, ...], Any])


@dataclass(frozen=True, eq=False)
class _NextBlock:
    """The features of blocks after a cache as a function of tensors alone: x_t [B, b], sigma [B], conditions [B, ...]
    in the order of their names, and the filled length of the cache [1]."""

    features: Callable[..., Tensor]
    cache: Any
    names: tuple[str, ...]

    def __call__(self, x_t: Tensor, sigma: Tensor, *others: Tensor) -> Outputs:
        *conditions, filled = others
        new, room = x_t.shape[1], self.cache.keys.shape[3]
        visible = torch.arange(room, device=x_t.device) < filled + new
        positions = filled + torch.arange(new, device=x_t.device)
        pattern = AttentionPattern(visible.repeat(new, 1), positions)
        named = zip(self.names, conditions, strict=True)
        return (self.features(x_t, sigma, cache=self.cache.at(positions), attention=pattern, **dict(named)),)


@dataclass(frozen=True)
class _Reveals:
    """C calls of a network that writes blocks, each of which reveals some masks."""

    block: _NextBlock
    step: Callable[..., Outputs]

    def __call__(self, x: Tensor, sigma: Tensor, when: Tensor, v: Tensor, filled: Tensor) -> Outputs:
        totals: list[Tensor] = []
        for own, here, numbers in zip(sigma, when, v, strict=True):
            (features,) = self.block(x, own, filled)
            tokens, total = self.step(features.flatten(0, 1), numbers)
            x = torch.where(here.view_as(x), tokens.to(x).view_as(x), x)
            totals.append(total)
        return x, torch.stack(totals).sum()
