"""The network as a sampler sees it: outputs at chosen positions of chosen sequences.

Shapes: B batch, L positions, D width, V vocabulary; R chosen positions in S chosen sequences.

A model that offers `features(x, sigma) -> [B, L, D]` and `head(features) -> [.., V]` runs on the S sequences in which
something happens, and its head on the R positions. Any other callable is run on the whole batch, as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from cedd.device import model_device
from cedd.network import HasHead, Model, has_head, with_rounded

CHUNK_ENTRIES = 1 << 24
"""Entries of [R, V] that are handled at once, in float64: 128 MiB."""


Network = Model | HasHead
"""What samplers take: any callable model(x_t [B, L], sigma [B]) -> [B, L, V], or a network in two halves."""


@dataclass(frozen=True)
class Places:
    """Where outputs are wanted: flat positions [R] in the batch, and the same inside the `sequences` [S] alone."""

    rows: Tensor
    sequences: Tensor | None
    local: Tensor

    def __len__(self) -> int:
        return len(self.rows)


class Rows:
    """Outputs of some positions, made a chunk at a time."""

    def __init__(self, hidden: Tensor, head: Callable[[Tensor], Tensor] | None, full_precision: bool) -> None:
        self._hidden, self._head, self._full_precision = hidden, head, full_precision

    def chunk(self, part: slice) -> Tensor:
        """Outputs [r, V] of the rows of a slice, float64."""
        rows = self._hidden[part]
        if self._head is None:
            return rows.double()
        if not self._full_precision:
            return self._head(rows).double()
        # Rows are few: the head is not worth the three digits that half-precision logits would cost.
        with torch.autocast(rows.device.type, enabled=False):
            weight = getattr(self._head, "weight", None)
            return self._head(rows.to(weight.dtype) if isinstance(weight, Tensor) else rows.float()).double()


def evaluate(model: Network, x: Tensor, sigma: Tensor, places: Places, *, full_precision: bool = True) -> Rows:
    """The network on x [B, L] at sigma [B] (or one for all), ready to give its outputs at `places`."""
    if has_head(model):
        part = x if places.sequences is None else x.index_select(0, places.sequences)
        sigma = sigma if sigma.dim() == 0 or places.sequences is None else sigma.index_select(0, places.sequences)
        hidden = model.features(part, sigma.to(torch.float32).expand(len(part)))
        return Rows(hidden.flatten(0, 1).index_select(0, places.local), model.head, full_precision)
    outputs = model(x, sigma.to(torch.float32).expand(len(x)))
    return Rows(outputs.flatten(0, 1).index_select(0, places.rows), None, full_precision)


def chunks(rows: int, vocab_size: int) -> list[slice]:
    """Slices of rows whose outputs fit CHUNK_ENTRIES."""
    size = max(1, CHUNK_ENTRIES // vocab_size)
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


class HostNetwork:
    """A network on a device without float64 (MPS): the sampler's own arithmetic is done on the host."""

    device = torch.device("cpu")

    def __init__(self, model: HasHead, device: torch.device) -> None:
        self._model, self._device = model, device

    def features(self, x_t: Tensor, sigma: Tensor) -> Tensor:
        return self._model.features(x_t.to(self._device), sigma.to(self._device)).cpu()

    def head(self, features: Tensor) -> Tensor:
        return self._model.head(features.to(self._device)).cpu()


# ----------------------------------------------------------------------------------------------------------------
# CUDA graphs


def _buckets(batch: int) -> list[int]:
    """Batch sizes to record: 1, 2, 3, 4, 6, 8, 12, 16, ... up to the batch itself."""
    sizes = {batch}
    power = 1
    while power < batch:
        sizes.update(size for size in (power, power + power // 2) if size < batch)
        power *= 2
    return sorted(sizes)


def _half_precision_copy(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The network whose blocks hold their matrices in half precision, so that autocast need not cast them at each call.

    What is outside the blocks (embedding, time conditioning, head) stays in float32.
    """
    modules = cast(Iterable[tuple[str, nn.Module]], model.named_modules())
    linear = [name for name, module in modules if isinstance(module, nn.Linear) and ".blocks." in f".{name}"]
    return with_rounded(model, {f"{name}.{leaf}" for name in linear for leaf in ("weight", "bias")}, dtype).eval()


class GraphedNetwork:
    """A network on a CUDA device whose features are recorded as CUDA graphs, one for each of a few batch sizes.

    A sampler calls the network hundreds of times on batches of varying size; a recorded graph launches in one call
    what takes a thousand kernel launches otherwise. A batch is padded to the next recorded size.
    Features are computed in `dtype` by autocast, the head in float32.
    """

    def __init__(
        self, model: nn.Module, batch: int, length: int, dtype: torch.dtype = torch.bfloat16, compiled: bool = False
    ) -> None:
        self.device = model_device(model)
        if self.device.type != "cuda":
            raise ValueError("CUDA graphs need a model on a CUDA device; use the model itself on the CPU")
        self._model: Any = _half_precision_copy(model, dtype)
        if compiled:
            self._model.compile()
        self.head: Callable[[Tensor], Tensor] = cast(HasHead, model).head
        self._dtype, self._length, self._sizes = dtype, length, _buckets(batch)
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._recorded: dict[int, _Recording] = {}

    def __call__(self, x_t: Tensor, sigma: Tensor) -> Tensor:
        return self.head(self.features(x_t, sigma).float())

    def features(self, x_t: Tensor, sigma: Tensor) -> Tensor:
        """[S, L] -> [S, L, D]; the result is overwritten by the next call."""
        size = next((size for size in self._sizes if size >= len(x_t)), None)
        if size is None or x_t.shape[1] != self._length:
            return self._run(x_t, sigma)
        if size not in self._recorded:
            self._recorded[size] = self._record(size)
        return self._recorded[size].replay(x_t, sigma)

    def _run(self, x_t: Tensor, sigma: Tensor) -> Tensor:
        # Casts are not cached: a cached cast would not outlive the context, and a recorded graph would.
        with torch.no_grad(), torch.autocast("cuda", dtype=self._dtype, cache_enabled=False):
            return self._model.features(x_t, sigma)

    def _record(self, size: int) -> _Recording:
        x_t = torch.zeros(size, self._length, dtype=torch.int64, device=self.device)
        sigma = torch.ones(size, dtype=torch.float32, device=self.device)
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._run(x_t, sigma)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            features = self._run(x_t, sigma)
        return _Recording(graph, x_t, sigma, features)


@dataclass(frozen=True)
class _Recording:
    """A graph with the tensors it reads and writes."""

    graph: Any
    x_t: Tensor
    sigma: Tensor
    features: Tensor

    def replay(self, x_t: Tensor, sigma: Tensor) -> Tensor:
        self.x_t[: len(x_t)].copy_(x_t)
        self.sigma[: len(x_t)].copy_(sigma)
        self.graph.replay()
        return self.features[: len(x_t)]
