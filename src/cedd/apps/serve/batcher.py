"""Batching forward passes across concurrent requests.

Shapes: B sequences, L positions, D width, R rows of the head.

Samplers and correctors are plain functions that call a network many times. The server runs each in its own thread, a
`Fiber`, and lets one fiber run at a time. A fiber runs until it needs `features(x_t [B, L], sigma [B])` and then waits.
`Batcher.step` takes the oldest pending request, adds every pending request for the same network and length, makes one
forward pass, and resumes each fiber with its own rows. Fibers can therefore start at any time and differ in steps,
temperature and task. An abandoned fiber is cancelled at its next request.

A fiber that waits for something else, such as another process, does so in `Fiber.blocking`: the other fibers run
meanwhile. A fiber that computes for long gives up its turn at the vocabulary head (`Fiber.yield_turn`). If forward
passes run in a thread of their own, fibers that do not wait for one run at the same time.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from cedd.apps.correct.numpy_network import Floats, Inside, Passage, PassageReader
from cedd.models.loaded_model import LoadedModel
from cedd.network import (
    UNKNOWN_LABEL,
    AnyModel,
    Capabilities,
    HasCache,
    HasHead,
    capabilities_of,
    has_head,
    records_functions,
)
from cedd.samplers.feature_cache import FeatureCache

Result = TypeVar("Result")
MAX_CALL_TOKENS = 1024
"""Tokens per forward pass. Larger batches are no faster on a CPU and delay the other fibers."""

TURN_SECONDS = 0.05
"""Seconds after which a fiber gives up its turn at the next opportunity."""


_BLOCK_CAPABILITIES = ("attention", "cache", "causal", "causal_past", "time_conditioned", "token_times")
"""Capabilities of a network that block diffusion uses."""


class Cancelled(BaseException):
    """Raised inside a fiber to end it. A BaseException, so that no `except Exception` on the way catches it."""


@dataclass(frozen=True)
class ForwardRequest:
    """A pending forward pass: x_t [B, L], sigma [B] and labels [B], if any."""

    network: HasHead
    x_t: Tensor
    sigma: Tensor
    label: Tensor | None = None


@dataclass(frozen=True)
class ConditionedNetwork:
    """A network with inputs that belong to one request, such as a cache. No other request has the same one, so its
    forward pass is not batched."""

    network: HasHead
    conditions: dict[str, Any]

    @property
    def head(self) -> Callable[[Tensor], Tensor]:
        return self.network.head

    def features(self, x_t: Tensor, sigma: Tensor) -> Tensor:
        return self.network.features(x_t, sigma, **self.conditions)


class Fiber:
    """A function in a thread of its own that runs only during its turns.

    Args:
        work: the function; it gets this fiber and calls the network through it.
        ended: called at the end, in this thread, with the exception that `work` raised or None.
    """

    def __init__(self, work: Callable[[Fiber], None], ended: Callable[[BaseException | None], None]) -> None:
        self.request: ForwardRequest | None = None
        self._result: Tensor | BaseException | None = None
        self._turn_began = 0.0
        self._go, self._done_turn = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._done_turn.acquire()
        self._work, self._ended = work, ended
        self.on_return: Callable[[Fiber], None] | None = None
        """Called when `blocking` has finished and the fiber waits for a turn."""
        threading.Thread(target=self._run, daemon=True, name="cedd-fiber").start()

    def resume(self, result: Tensor | BaseException | None = None) -> None:
        """Run until the next request or the end. `result` answers the last request; an exception is raised there."""
        self.request, self._result, self._turn_began = None, result, time.monotonic()
        self._go.release()
        self._done_turn.acquire()

    def forward(self, request: ForwardRequest) -> Tensor:
        """The features [B, L, D] of a request. Called by the work."""
        self.request = request
        self._done_turn.release()
        self._go.acquire()
        result = self._take_result()
        assert result is not None
        return result

    def blocking(self, wait: Callable[[], Result]) -> Result:
        """Call a blocking function outside this fiber's turn and return its result. Called by the work."""
        assert self.on_return is not None
        self._done_turn.release()
        try:
            return wait()
        finally:
            self.on_return(self)
            self._go.acquire()
            self._take_result()

    def yield_turn(self) -> None:
        """Give up a turn that has lasted longer than `TURN_SECONDS`. Called by the work."""
        if time.monotonic() - self._turn_began > TURN_SECONDS:
            self.blocking(lambda: None)

    def _take_result(self) -> Tensor | None:
        result, self._result = self._result, None
        if isinstance(result, BaseException):
            raise result
        return result

    def _run(self) -> None:
        self._go.acquire()
        torch.set_num_threads(1)  # for this thread, whose own tensors are small
        error: BaseException | None = None
        try:
            self._take_result()
            self._work(self)
        except BaseException as raised:  # noqa: BLE001 - passed to `ended`
            error = raised
        try:
            self._ended(error)
        finally:
            self._done_turn.release()

    def batched(self, loaded: LoadedModel, memory: FeatureCache | None = None) -> BatchedModel:
        """The model with its forward passes batched. `memory` holds features that need no forward pass."""
        return BatchedModel(loaded, self, memory)


@dataclass
class LastForward:
    """The input x_t [B, L] and the features of a network's most recent forward pass."""

    x_t: Tensor
    features: Tensor
    head: Callable[[Tensor], Tensor]

    def outputs(self, sequence: Tensor, places: Tensor) -> Tensor | None:
        """The outputs [R, V] at some positions of a sequence [L]; None if the sequence was not in the batch."""
        found = (self.x_t == sequence.to(self.x_t.device)).all(-1).nonzero()
        if not len(found):
            return None
        return self.head(self.features[int(found[0, 0])].index_select(0, places.to(self.x_t.device))).cpu()


class YieldingHead:
    """A vocabulary head that gives up the fiber's turn between chunks of rows.

    Args:
        head: the head.
        fiber: the fiber that calls it.
    """

    def __init__(self, head: Callable[[Tensor], Tensor], fiber: Fiber) -> None:
        self._head, self._fiber = head, fiber
        self.weight = getattr(head, "weight", None)

    def __call__(self, rows: Tensor) -> Tensor:
        self._fiber.yield_turn()
        return self._head(rows)


class BatchedNetwork:
    """A network whose forward passes up to the head are batched with those of other fibers.

    Args:
        network: the network.
        fiber: the fiber that calls it.
        memory: features that need no forward pass.
        on_forward: called after each forward pass without other inputs.
        in_blocks: whether it declares what block diffusion needs: attention patterns and a cache.
    """

    def __init__(
        self,
        network: HasHead,
        fiber: Fiber,
        memory: FeatureCache | None = None,
        on_forward: Callable[[LastForward], None] | None = None,
        in_blocks: bool = False,
    ) -> None:
        own = capabilities_of(network)
        blocks = {name: getattr(own, name) for name in _BLOCK_CAPABILITIES} if in_blocks else {}
        self.capabilities = Capabilities(features=True, **blocks)
        self._network, self._fiber, self._memory, self._on_forward = network, fiber, memory, on_forward
        self.head = YieldingHead(network.head, fiber)

    def new_cache(self, batch: int, length: int | None = None) -> Any:
        """The network's cache of keys and values."""
        return cast(HasCache, self._network).new_cache(batch, length)

    def features(self, x_t: Tensor, sigma: Tensor, label: Tensor | None = None, **conditions: Any) -> Tensor:
        """[B, L, D]"""
        if conditions:
            conditions |= {} if label is None else {"label": label}
            return self._fiber.forward(ForwardRequest(ConditionedNetwork(self._network, conditions), x_t, sigma))
        if self._memory is not None and label is None:
            return self._memory.read(self._network, x_t, sigma, self._forward)
        features = self._forward(x_t, sigma, label)
        if self._on_forward is not None:
            self._on_forward(LastForward(x_t, features, self.head))
        return features

    def _forward(self, x_t: Tensor, sigma: Tensor, label: Tensor | None = None) -> Tensor:
        return self._fiber.forward(ForwardRequest(self._network, x_t, sigma, label))


class BatchedModel(LoadedModel):
    """A model whose forward passes are batched with those of other fibers.

    Args:
        loaded: the model.
        fiber: the fiber that calls it.
        memory: features that need no forward pass.
    """

    def __init__(self, loaded: LoadedModel, fiber: Fiber, memory: FeatureCache | None = None) -> None:
        batched = cast(Any, BatchedNetwork(loaded.model, fiber, memory, in_blocks=loaded.writes_blocks))
        super().__init__(replace(loaded.folder, model=batched), loaded.device)
        self._loaded, self._fiber, self._memory = loaded, fiber, memory
        self.last_forward: LastForward | None = None
        """Of the network that is sampled from."""

    def network(self, batch: int, length: int) -> AnyModel:
        del batch
        shared, blocks = shared_network(self._loaded, length), self._loaded.writes_blocks
        return BatchedNetwork(shared, self._fiber, on_forward=self._note, in_blocks=blocks)

    def _note(self, last: LastForward) -> None:
        self.last_forward = last


class ConcurrentPassageReader:
    """A NumPy network that runs outside the fiber's turn, at the same time as other fibers.

    Args:
        network: the network.
        fiber: the fiber that calls it.
    """

    def __init__(self, network: PassageReader, fiber: Fiber) -> None:
        self._network, self._fiber = network, fiber

    def read(self, text: Passage, inside: Inside | None = None) -> Floats:
        """Like the network's own `read`."""
        return self._fiber.blocking(lambda: self._network.read(text, inside))


@lru_cache(maxsize=256)
def shared_network(loaded: LoadedModel, length: int) -> HasHead:
    """The network for sequences of this length, the same object for every fiber. A network with a CUDA graph is not
    used: the graph is for one batch size, and batches here have any."""
    made = loaded.network(1, length)
    return loaded.model if records_functions(made) or not has_head(made) else made


class Batcher:
    """Batches the forward passes of fibers and resumes the fibers.

    Args:
        max_tokens_per_call: tokens per forward pass.
        wake: called, in the thread where it happens, when a fiber can be resumed.
        submit: runs a forward pass, at once or in another thread.
        is_abandoned: whether nobody waits for a fiber any more, so that it is cancelled instead of resumed.
    """

    def __init__(
        self,
        max_tokens_per_call: int = MAX_CALL_TOKENS,
        wake: Callable[[], None] = lambda: None,
        submit: Callable[[Callable[[], None]], object] = lambda call: call(),
        is_abandoned: Callable[[Fiber], bool] = lambda fiber: False,
    ) -> None:
        self.pending: list[Fiber] = []
        """Fibers that wait for a forward pass, oldest request first."""
        self.in_call: Sequence[Fiber] = ()
        """Fibers in the forward pass that is running."""
        self.resumable: deque[tuple[Fiber, Tensor | BaseException | None]] = deque()
        """Fibers with a result and fibers that have left `blocking`."""
        self.calls = self.sequences = 0
        """Forward passes so far, and the sequences in them."""
        self._max_tokens, self._wake, self._submit = max_tokens_per_call, wake, submit
        self._is_abandoned = is_abandoned

    @property
    def ready(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self.resumable or (self.pending and not self.in_call))

    def start(self, fiber: Fiber) -> None:
        """Run a new fiber up to its first request."""
        fiber.on_return = self._on_return
        self._resume(fiber)

    def abort(self, fiber: Fiber, error: BaseException) -> None:
        """Raise an error in a fiber that waits for a forward pass."""
        self.pending.remove(fiber)
        self._resume(fiber, error)

    def step(self) -> None:
        """Resume fibers that can run; then make one forward pass for the oldest request and those like it."""
        self._resume_all()
        if self.pending and not self.in_call:
            batch = self.in_call = self._next_batch()
            try:
                self._submit(partial(self._call, batch))
            except BaseException:
                self.in_call = ()  # the fibers are still pending and can be aborted
                raise
            self.pending = [fiber for fiber in self.pending if fiber not in batch]
            self._resume_all()

    def _resume_all(self) -> None:
        for _ in range(len(self.resumable)):  # not until empty: a fiber that only yields is resumable at once
            fiber, result = self.resumable.popleft()
            self._resume(fiber, Cancelled() if self._is_abandoned(fiber) else result)

    def _call(self, batch: Sequence[Fiber]) -> None:
        results = self._forward([_request(fiber) for fiber in batch])
        self.resumable.extend(zip(batch, results, strict=True))
        self.in_call = ()
        self._wake()

    def _on_return(self, fiber: Fiber) -> None:
        self.resumable.append((fiber, None))
        self._wake()

    def _resume(self, fiber: Fiber, result: Tensor | BaseException | None = None) -> None:
        fiber.resume(result)
        if fiber.request is not None:
            self.pending.append(fiber)

    def _next_batch(self) -> list[Fiber]:
        """Fibers with the oldest request or one like it, up to `max_tokens_per_call` tokens but at least one fiber."""
        first = _request(self.pending[0])
        length, found, tokens = first.x_t.shape[1], list[Fiber](), 0
        for fiber in self.pending:
            request = _request(fiber)
            if request.network is first.network and request.x_t.shape[1] == length:
                tokens += request.x_t.numel()
                if found and tokens > self._max_tokens:
                    break
                found.append(fiber)
        return found

    @torch.no_grad()
    def _forward(self, requests: list[ForwardRequest]) -> Sequence[Tensor | BaseException]:
        sizes = [len(request.x_t) for request in requests]
        self.calls, self.sequences = self.calls + 1, self.sequences + sum(sizes)
        try:
            x_t = torch.cat([request.x_t for request in requests])
            sigma = torch.cat([request.sigma for request in requests])
            labels: dict[str, Tensor] = {}
            if any(request.label is not None for request in requests):
                labels["label"] = torch.cat([_labels(request) for request in requests])
            return list(requests[0].network.features(x_t, sigma, **labels).split(sizes))
        except Exception as error:  # noqa: BLE001 - each fiber reports it
            return [error] * len(requests)


def _labels(request: ForwardRequest) -> Tensor:
    if request.label is not None:
        return request.label
    return torch.full((len(request.x_t),), UNKNOWN_LABEL, device=request.x_t.device)


def _request(fiber: Fiber) -> ForwardRequest:
    assert fiber.request is not None
    return fiber.request
