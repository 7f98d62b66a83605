"""The gradient of a batch as one CUDA graph: forward pass, loss and backward pass, launched as a whole.

A step of 32 x 128 tokens is about a thousand kernels of a few microseconds each; launched one by one, they wait for the
host. Recorded once, they are launched by one call. All tensors of a graph must keep their addresses: batches are copied
into the tensors that it was recorded on, and the gradients stay where it writes them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from cedd.device import recorded_graph
from cedd.losses import NoisyBatch

Gradient = Callable[[NoisyBatch], Tensor]
"""Runs both passes over a batch, leaves the gradients in the parameters, and returns the loss []."""


class CapturedGradient:
    """A gradient, recorded after some batches; a batch of other shapes is run without the graph."""

    WARM_UP = 3
    """Batches run without the graph, while kernels are compiled and chosen."""

    def __init__(self, gradient: Gradient, parameters: list[nn.Parameter]) -> None:
        self._gradient, self._parameters = gradient, parameters
        self._graph: torch.cuda.CUDAGraph | None = None
        self._left = self.WARM_UP

    def __call__(self, batch: NoisyBatch) -> Tensor:
        """The loss of a batch; the gradients are in the parameters, and stay valid until the next call."""
        if self._graph is None:
            if self._left > 0 or (batch.counts is None and len(batch.places) != batch.tokens):
                self._left -= 1
                return self._run(batch)
            self._capture(batch)
        if _shapes(batch) != self._captured_shapes:
            return self._run(batch)
        for place, tensor in zip(self._inputs, _tensors(batch), strict=True):
            place.copy_(tensor, non_blocking=True)
        assert self._graph is not None
        self._graph.replay()
        if self._parameters[0].grad is not self._gradients[0]:  # the last batch was run without the graph
            for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
                parameter.grad = gradient
        return self._loss

    def _run(self, batch: NoisyBatch) -> Tensor:
        for parameter in self._parameters:
            parameter.grad = None
        return self._gradient(batch)

    def _capture(self, batch: NoisyBatch) -> None:
        """Record both passes; other threads may go on using the device."""
        static = batch.map(torch.clone)
        self._inputs, self._captured_shapes = _tensors(static), _shapes(static)
        with recorded_graph(capture_error_mode="thread_local") as graph:
            self._loss = self._run(static)
        gradients = [parameter.grad for parameter in self._parameters]
        assert all(gradient is not None for gradient in gradients)
        self._gradients = gradients
        self._graph = graph


def _tensors(batch: NoisyBatch) -> list[Tensor]:
    """All tensors of a batch, in one order."""
    tensors: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    batch.map(keep)
    return tensors


def _shapes(batch: NoisyBatch) -> list[torch.Size]:
    return [tensor.shape for tensor in _tensors(batch)]
