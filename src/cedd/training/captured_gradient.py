"""Forward pass, loss and backward pass of a batch as one CUDA graph.

A step on 32 x 128 tokens is about a thousand kernels of a few microseconds each. Launched one by one, they wait for the
host; recorded in a graph, they are launched by one call. All tensors of a graph keep their addresses: batches are
copied into the tensors of the recording, and the gradients keep the addresses that the graph writes to.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from cedd.device import recorded_graph
from cedd.losses import NoisyBatch

Gradient = Callable[[NoisyBatch], Tensor]
"""Runs forward and backward pass on a batch, leaves the gradients in the parameters, and returns the loss []."""


class CapturedGradient:
    """A gradient function that is recorded after some batches. Batches of other shapes run without the graph, which is
    recorded anew after several of them in a row: when blocks grow, or attention is no longer annealed."""

    WARM_UP = 3
    """Batches before the recording, in which kernels are compiled and selected."""

    def __init__(self, gradient: Gradient, parameters: list[nn.Parameter]) -> None:
        self._gradient, self._parameters = gradient, parameters
        self._graph: torch.cuda.CUDAGraph | None = None
        self._left = self.WARM_UP
        self._others, self._other_shapes = 0, list[torch.Size]()

    def __call__(self, batch: NoisyBatch) -> Tensor:
        """The loss of a batch. The gradients in the parameters are valid until the next call."""
        if self._graph is None:
            if self._left > 0 or (batch.counts is None and len(batch.places) != batch.tokens):
                self._left -= 1
                return self._run(batch)
            self._capture(batch)
        if (shapes := _shapes(batch)) != self._captured_shapes:
            self._others = self._others + 1 if shapes == self._other_shapes else 1
            self._other_shapes = shapes
            if self._others > self.WARM_UP:
                self._graph, self._others, self._left = None, 0, 0
                return self(batch)
            return self._run(batch)
        self._others = 0
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
        """Record both passes, while other threads may use the device."""
        static = batch.map(torch.clone)
        self._inputs, self._captured_shapes = _tensors(static), _shapes(static)
        with recorded_graph(capture_error_mode="thread_local") as graph:
            self._loss = self._run(static)
        gradients = [parameter.grad for parameter in self._parameters]
        assert all(gradient is not None for gradient in gradients)
        self._gradients = gradients
        self._graph = graph


def _tensors(batch: NoisyBatch) -> list[Tensor]:
    """All tensors of a batch, in a fixed order."""
    tensors: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    batch.map(keep)
    return tensors


def _shapes(batch: NoisyBatch) -> list[torch.Size]:
    return [tensor.shape for tensor in _tensors(batch)]
