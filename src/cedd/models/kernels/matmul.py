"""The precision of matrix products: autocast's, float32 from three products of bfloat16 on a GPU, and bfloat16 on a CPU
with units for it (AMX).

On such a CPU, oneDNN can round both factors as it reads them and accumulate in float32: four times as fast, without
converting any tensor. The switch applies to the whole process and must be off in attention: torch's CPU kernel for
attention makes small products, and passing each to oneDNN takes ten times as long as computing it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_BF16 = "bf16"


def matmul_dtype(device_type: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which tensors of `dtype` are multiplied on a device: autocast's, if it is enabled."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else dtype


@functools.cache
def has_bf16_matmul() -> bool:
    """Whether this CPU has units that multiply bfloat16 matrices, and torch can enable them."""
    is_supported = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return _switch() is not None and is_supported is not None and bool(is_supported())


@contextmanager
def bf16_matmul() -> Iterator[None]:
    """Context in which matrices are rounded to bfloat16 for products, if the CPU has units for it."""
    if not has_bf16_matmul():
        yield
        return
    before = _set(_BF16)
    try:
        yield
    finally:
        _set(before)


def float32_matmul(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function of some tensors, with `bf16_matmul` switched off in its forward and in its backward pass."""

    def in_float32(*tensors: Tensor, **options: Any) -> Tensor:
        if torch.compiler.is_compiling() or not _is_on():
            return function(*tensors, **options)
        inside: Any = _Switch.apply("none", _BF16, *tensors)
        (result,) = cast("tuple[Tensor]", _Switch.apply(_BF16, "none", function(*inside, **options)))
        return result

    return in_float32


def _is_on() -> bool:
    switch = _switch()
    return switch is not None and switch.fp32_precision == _BF16


def _switch() -> Any:
    """torch's switch for products by oneDNN; None if there is none."""
    products = getattr(torch.backends.mkldnn, "matmul", None)
    return products if hasattr(products, "fp32_precision") else None


def _set(precision: str) -> str:
    """Set the switch; returns its previous value."""
    switch = _switch()
    before, switch.fp32_precision = switch.fp32_precision, precision
    return before


class Bfloat16Parts:
    """A float32 weight [V, D] as three bfloat16 numbers each, of which it is the sum: 3 times 8 of its 24 digits.

    A GPU multiplies bfloat16 ten times as fast as float32, and adds up in float32. The parts stay in the same memory,
    so that CUDA graphs can read them; `of` must be called before a graph is replayed.
    """

    def __init__(self) -> None:
        self._parts: Tensor | None = None
        self._known: tuple[int, int] | None = None

    def of(self, weight: Tensor) -> Tensor:
        """The parts of each row, [V, 3 D], one after the other."""
        parts, now = self._parts, (weight.data_ptr(), weight._version)
        if parts is not None and now == self._known:
            return parts
        with torch.inference_mode(False), torch.no_grad():
            (rows, width), device = weight.shape, weight.device
            if parts is None or parts.shape != (rows, 3 * width) or parts.device != device:
                self._parts = parts = torch.empty(rows, 3 * width, dtype=torch.bfloat16, device=device)
            rest = weight.detach()
            for part in parts.view(rows, 3, width).unbind(1):
                part.copy_(rest)
                rest = rest - part
        self._known = now
        return parts


class _Switch(torch.autograd.Function):
    """Returns the tensors unchanged; sets the switch in the forward pass to one value and in the backward pass to
    another."""

    @staticmethod
    def forward(ctx: Any, forward: str, backward: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.precision = backward
        _set(forward)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        _set(ctx.precision)
        return None, None, *gradients
