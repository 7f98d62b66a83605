"""GELU by its tanh form (Hendrycks and Gimpel 2016), and its derivative while the entries are in the cache.

With the tanh written as a sigmoid, and w = a + b x² for a = 2 sqrt(2/pi), b = 0.044715 a,

    gelu(x) = x s,    s = sigmoid(x w),        gelu'(x) = s + gelu(x) (1 - s) (3 w - 2 a).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from cedd.device import runs_alone
from cedd.models.kernels import at_least_float32
from cedd.models.kernels.rotation import Product, linear
from cedd.models.transformer_config import GELU

A, B = GELU

CHUNK = 2**17
"""Entries that a core processes at a time: with the intermediate results they fit its L2 cache."""


def gelu(x: Tensor) -> Tensor:
    """x sigmoid(x (a + b x²)), in the type of x."""
    if torch.compiler.is_compiling():
        wide = at_least_float32(x)
        return (wide * torch.sigmoid(wide * (A + B * wide**2))).to(x.dtype)
    if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.float64):
        return F.gelu(x, approximate="tanh")
    made = _Gelu.apply(x) if torch.is_grad_enabled() and x.requires_grad else _value(x)
    assert isinstance(made, Tensor)
    return made


def linear_gelu(x: Tensor, layer: nn.Linear, product: Product = linear) -> Tensor:
    """gelu(layer(x)). On a GPU, in half precision and without gradients, it is one kernel: cuBLAS applies the GELU to
    its sums before they are rounded, without another pass over [.., D]."""
    weight, bias = layer.weight, layer.bias
    if not (runs_alone() and x.is_cuda and x.dtype == weight.dtype and x.dtype.itemsize == 2):
        return gelu(product(x, layer))
    return product_with_gelu(x, weight, bias)


def product_with_gelu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """gelu(x weightᵀ + bias) as one operation; x [.., D]."""
    bias = _zeros(len(weight), weight.dtype, weight.device) if bias is None else bias
    product = torch.ops.aten._addmm_activation(bias, x.flatten(0, -2), weight.T, use_gelu=True)
    return product.unflatten(0, x.shape[:-1])


@functools.cache
def _zeros(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A bias of zeros, filled once instead of in every call."""
    return torch.zeros(size, dtype=dtype, device=device)


def _chunks(*tensors: Tensor) -> zip[tuple[Tensor, ...]]:
    size = CHUNK * torch.get_num_threads()
    return zip(*(tensor.view(-1).split(size) for tensor in tensors), strict=True)


def _value(x: Tensor) -> Tensor:
    x = x.contiguous()
    value = torch.empty_like(x)
    for x_, y in _chunks(x, value):
        torch.mul(x_, x_, out=y).mul_(B).add_(A).mul_(x_).sigmoid_().mul_(x_)
    return value


class _Gelu(torch.autograd.Function):
    """Saves the derivative instead of the input: the same memory, and a single product in the backward pass. torch's
    operator computes its tanh again, which takes five times as long as a sigmoid."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        value, derivative = torch.empty_like(x), torch.empty_like(x)
        for x_, y, s in _chunks(x, value, derivative):
            w = torch.mul(x_, x_).mul_(B).add_(A)
            torch.mul(w, x_, out=s).sigmoid_()
            torch.mul(x_, s, out=y)
            w.mul_(3).sub_(2 * A).mul_(y)
            s.add_(w.addcmul_(w, s, value=-1))
        ctx.save_for_backward(derivative)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (derivative,) = ctx.saved_tensors
        return gradient * derivative
