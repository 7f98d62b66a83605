"""The types in which matrices are multiplied: autocast's, and on a CPU with units for bfloat16 ones (AMX) theirs.

There, oneDNN can round the factors of a product as it reads them and add up in float32: four times as fast, and no
tensor changes its type. The switch is one for the whole process, and attention must not see it: torch's kernel for
that is made of products so small that to hand each to oneDNN takes ten times as long as to compute it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_LOW = "bf16"


def product_type(device_type: str, dtype: torch.dtype) -> torch.dtype:
    """The type of a product of tensors in `dtype` on such a device: autocast's, where it is on."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else dtype


@functools.cache
def has_low_products() -> bool:
    """Whether this CPU has units that multiply bfloat16 matrices, and torch a way to ask for them."""
    is_supported = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return _switch() is not None and is_supported is not None and bool(is_supported())


@contextmanager
def low_products() -> Iterator[None]:
    """Products inside have their factors rounded to bfloat16, where the CPU has units for it."""
    if not has_low_products():
        yield
        return
    before = _set(_LOW)
    try:
        yield
    finally:
        _set(before)


def exact_products(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function of some tensors, with low products turned off for its forward and for its backward pass."""

    def exact(*tensors: Tensor, **options: Any) -> Tensor:
        if torch.compiler.is_compiling() or not _are_low():
            return function(*tensors, **options)
        inside: Any = _Leave.apply(*tensors)
        result: Any = _Enter.apply(function(*inside, **options))
        return result

    return exact


def _are_low() -> bool:
    switch = _switch()
    return switch is not None and switch.fp32_precision == _LOW


def _switch() -> Any:
    """torch's switch for products by oneDNN, where there is one."""
    products = getattr(torch.backends.mkldnn, "matmul", None)
    return products if hasattr(products, "fp32_precision") else None


def _set(precision: str) -> str:
    """Set the switch, and say what it was."""
    switch = _switch()
    before, switch.fp32_precision = switch.fp32_precision, precision
    return before


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        _set("none")
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        _set(_LOW)
        return gradients


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        _set(_LOW)
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        _set("none")
        return gradient
