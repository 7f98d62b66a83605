"""Batches of blocks, in an order that is a function of (seed, step).

The blocks, reshuffled in each epoch, form an infinite stream, of which global batch k takes the k-th group of B blocks.
A resume needs k only. Ranks take consecutive rows of a batch, so the blocks of batch k do not depend on the number of
ranks. With `cut_anew` the blocks of each epoch after the first begin a few tokens later: the same tokens, cut at other
positions.

Shapes: B blocks in a global batch, B/W on each of W ranks, L positions.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Generic, Protocol, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cedd.data.packing import PackedDataset
from cedd.data.permutation import derive_key, permute, uniform_integers

_AHEAD = 32
"""Batches whose blocks are computed at once."""
_CUT = -1
"""The key of offsets, in place of an epoch."""


@dataclass(eq=False)
class BatchSampler:
    """Infinite iterator over this rank's share [B/W, L] (int64, CPU) of each global batch.

    `position` is the number of batches drawn, and the only state. Set it to resume. With `cut_anew` the blocks of an
    epoch after the first begin 0..L-1 tokens later, at random; its last block ends with the tokens before its first.
    """

    dataset: PackedDataset
    batch_size: int
    _: KW_ONLY
    seed: int = 0
    rank: int = 0
    world_size: int = 1
    position: int = 0
    cut_anew: bool = False

    def __post_init__(self) -> None:
        size, ranks = self.batch_size, self.world_size
        if len(self.dataset) == 0:
            raise ValueError("there is no block to draw batches from")
        if size < 1 or size % ranks:
            raise ValueError(f"a global batch of {size} cannot be shared by {ranks} ranks: use a multiple of {ranks}")
        if not 0 <= self.rank < ranks:
            raise ValueError(f"rank {self.rank} is outside 0..{ranks - 1}")
        self._drawn: tuple[int, NDArray[np.int64]] | None = None

    @property
    def epoch(self) -> float:
        """Passes over the data so far."""
        return self.position * self.batch_size / len(self.dataset)

    def global_starts(self, step: int, steps: int = 1) -> NDArray[np.int64]:
        """First tokens of the blocks [steps * B] of global batches `step`, `step` + 1, ...

        Several batches at once, since the cost of a permutation is in the number of calls.
        """
        size, length = len(self.dataset), self.dataset.length
        epochs, slots = np.divmod(np.arange(step * self.batch_size, (step + steps) * self.batch_size), size)
        starts = np.empty(steps * self.batch_size, dtype=np.int64)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            starts[here] = length * permute(slots[here], size, derive_key(self.seed, int(epoch)))
        if self.cut_anew:
            starts += np.where(epochs > 0, uniform_integers(epochs, length, derive_key(self.seed, _CUT)), 0)
        return starts

    def starts(self, step: int) -> NDArray[np.int64]:
        """First tokens of this rank's blocks [B/W] of global batch `step`."""
        share = self.batch_size // self.world_size
        ahead, offset = divmod(step, _AHEAD)
        if self._drawn is None or self._drawn[0] != ahead:
            self._drawn = (ahead, self.global_starts(ahead * _AHEAD, _AHEAD).reshape(_AHEAD, -1))
        return self._drawn[1][offset, self.rank * share : (self.rank + 1) * share]

    def batch(self, step: int) -> Tensor:
        """This rank's share [B/W, L] of global batch `step`; changes no state."""
        return torch.from_numpy(self.dataset.from_starts(self.starts(step)))

    def labels(self, step: int) -> Tensor | None:
        """The labels of these sequences [B/W]; None if the data has none."""
        return torch.from_numpy(self.dataset.labels_of(self.starts(step))) if self.dataset.labels else None

    def __iter__(self) -> Iterator[Tensor]:
        return self

    def __next__(self) -> Tensor:
        batch = self.batch(self.position)
        self.position += 1
        return batch


class MovableBatch(Protocol):
    """A batch that can be pinned and moved to a device: a tensor, or a record of tensors."""

    def pin_memory(self) -> Self: ...

    def to(self, device: torch.device, *, non_blocking: bool) -> Self: ...


P = TypeVar("P", bound=MovableBatch, covariant=True)
B = TypeVar("B", bound=MovableBatch)


class BatchSource(Protocol[P]):
    """Batches by number; `position` is the number of the next one."""

    position: int

    def batch(self, step: int) -> P: ...


class Prefetcher(Generic[B]):
    """Draws a sampler's batches ahead of time in a thread, and returns them on `device`.

    On CUDA the thread pins them, so that copies overlap with computation. `position` counts the batches returned, not
    those drawn ahead, and is what to save. Use it as a context manager, or `close()` it.
    """

    def __init__(self, sampler: BatchSource[B], device: str | torch.device = "cpu", depth: int = 2) -> None:
        if depth < 1:
            raise ValueError(f"prefetching needs a depth of at least 1, not {depth}")
        self._sampler = sampler
        self._device = torch.device(device)
        if self._device.type == "cuda" and self._device.index is None:
            self._device = torch.device("cuda", torch.cuda.current_device())
        self.position = sampler.position
        self._ready: queue.Queue[B | Exception] = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cedd-prefetch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # threads start on GPU 0, and pinning would open a context there
            # One core is enough for a batch, and leaves the others to the thread that feeds the device.
            torch.set_num_threads(1)
        step = self.position
        item: B | Exception
        while not self._stop.is_set():
            try:
                item = self._sampler.batch(step)
                if self._device.type == "cuda":
                    item = item.pin_memory()
            except Exception as error:  # noqa: BLE001 - handed to the caller, whose thread can act on it
                item = error
            self._ready.put(item)  # waits for room, which `close` makes
            if isinstance(item, Exception):
                return
            step += 1

    def __iter__(self) -> Iterator[B]:
        return self

    def __next__(self) -> B:
        if self._stop.is_set():
            raise ValueError("this prefetcher is closed: make a new one from a sampler at the same position")
        item = self._ready.get()
        if isinstance(item, Exception):
            self.close()
            raise item
        self.position += 1
        self._sampler.position = self.position
        return item.to(self._device, non_blocking=True)

    @property
    def first_not_drawn(self) -> int:
        """A step whose batch, like all later ones, is not drawn yet, however far ahead the thread is."""
        return self.position + self._ready.maxsize + 1

    def close(self) -> None:
        self._stop.set()
        with contextlib.suppress(queue.Empty):  # for the one batch that may still be put there
            self._ready.get_nowait()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
