"""CUDA graphs: a network whose features are recorded once for each of a few batch sizes.

Shapes: S sequences, L positions, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from cedd.device import model_device
from cedd.network import HasHead, with_rounded


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
