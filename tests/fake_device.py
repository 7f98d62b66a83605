"""A simulated device without float64, like MPS: its tensors report that device but are computed on the CPU.

What fails on such a device fails here too: float64 numbers, and operations on tensors of two devices. It uses torch's
device type `lazy`, which no build supports.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

FAKE_DEVICE = torch.device("lazy", 0)
COPIES = ("copy_", "_to_copy", "index", "index_put", "index_put_")
"""Operations that accept tensors of two devices (an index may be on the CPU)."""
FLOAT64_CHECKS = ("cedd.device", "cedd.losses", "cedd.network", "cedd.process", "cedd.models.transformer")
"""The modules that check whether a device has float64."""


class DeviceTensor(Tensor):
    """A tensor on the simulated device, with the CPU tensor that holds its values."""

    plain: Tensor

    @staticmethod
    def __new__(cls, plain: Tensor) -> "DeviceTensor":
        if plain.dtype in (torch.float64, torch.complex128):
            raise TypeError("this device has no float64")
        shape: Any = plain.shape
        made = torch.Tensor._make_wrapper_subclass(
            cls, shape, strides=plain.stride(), dtype=plain.dtype, device=FAKE_DEVICE
        )
        made.plain = plain
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"DeviceTensor({self.plain})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among an operation's arguments, which are tensors, lists of tensors, and numbers."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (part for part in value if isinstance(part, Tensor))


def computed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of an operation, on the device of its tensors or the one named in its arguments."""
    tensors = list(_tensors((*args, *kwargs.values())))
    inside = any(isinstance(tensor, DeviceTensor) for tensor in tensors)
    outside = any(not isinstance(tensor, DeviceTensor) and tensor.dim() > 0 for tensor in tensors)
    name = func.overloadpacket.__name__
    if inside and outside and name not in COPIES:
        raise RuntimeError(f"{name} has tensors of two devices")
    named = kwargs.get("device")
    if not inside and named is None:
        return func(*args, **kwargs)
    if named is not None:
        inside = torch.device(named).type == FAKE_DEVICE.type
        kwargs = {**kwargs, "device": "cpu"}
    plain_args, plain_kwargs = tree_map_only(DeviceTensor, lambda tensor: tensor.plain, (args, kwargs))
    found = func(*plain_args, **plain_kwargs)
    if plain_args and found is plain_args[0]:  # an operation in place
        return args[0]
    return tree_map_only(Tensor, DeviceTensor, found) if inside else found


class _Device(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})


def _call_for_cpu(function: Callable[..., Any], kind: str, **options: Any) -> Any:
    return function("cpu" if kind == FAKE_DEVICE.type else kind, **options)


@contextmanager
def device_without_float64() -> Iterator[torch.device]:
    """Provide the simulated device while the context is open."""
    with pytest.MonkeyPatch.context() as patch:
        for module in FLOAT64_CHECKS:
            patch.setattr(f"{module}.has_float64", lambda device: torch.device(device).type != FAKE_DEVICE.type)
        for function in ("autocast", "is_autocast_enabled", "get_autocast_dtype"):  # which do not support the device
            patch.setattr(torch, function, partial(_call_for_cpu, getattr(torch, function)))
        with _Device():
            yield FAKE_DEVICE
