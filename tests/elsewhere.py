"""A device without float64, as MPS: its tensors say that they are there and are computed on the CPU.

What fails on such a device fails here too: a number in float64, and an operation on tensors of two devices. Torch names
a device `lazy`, which no build of it has.
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

ELSEWHERE = torch.device("lazy", 0)
COPIES = ("copy_", "_to_copy", "index", "index_put", "index_put_")
"""What takes tensors of two devices (an index may be on the CPU)."""
ASKING = ("cedd.device", "cedd.losses", "cedd.network", "cedd.process", "cedd.models.transformer")
"""The modules that ask whether a device has float64."""


class There(Tensor):
    """A tensor of this device, with the one on the CPU that it stands for."""

    plain: Tensor

    @staticmethod
    def __new__(cls, plain: Tensor) -> "There":
        if plain.dtype in (torch.float64, torch.complex128):
            raise TypeError("this device has no float64")
        shape: Any = plain.shape
        made = torch.Tensor._make_wrapper_subclass(
            cls, shape, strides=plain.stride(), dtype=plain.dtype, device=ELSEWHERE
        )
        made.plain = plain
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"There({self.plain})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Those among the arguments of an operation, which are tensors, lists of them, and numbers."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (part for part in value if isinstance(part, Tensor))


def computed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an operation gives, on the device of its tensors, or on that which it names."""
    tensors = list(_tensors((*args, *kwargs.values())))
    inside = any(isinstance(tensor, There) for tensor in tensors)
    outside = any(not isinstance(tensor, There) and tensor.dim() > 0 for tensor in tensors)
    name = func.overloadpacket.__name__
    if inside and outside and name not in COPIES:
        raise RuntimeError(f"{name} has tensors of two devices")
    named = kwargs.get("device")
    if not inside and named is None:
        return func(*args, **kwargs)
    if named is not None:
        inside = torch.device(named).type == ELSEWHERE.type
        kwargs = {**kwargs, "device": "cpu"}
    plain_args, plain_kwargs = tree_map_only(There, lambda tensor: tensor.plain, (args, kwargs))
    found = func(*plain_args, **plain_kwargs)
    if plain_args and found is plain_args[0]:  # an operation in place
        return args[0]
    return tree_map_only(Tensor, There, found) if inside else found


class _Device(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})


def _as_on_the_cpu(function: Callable[..., Any], kind: str, **options: Any) -> Any:
    return function("cpu" if kind == ELSEWHERE.type else kind, **options)


@contextmanager
def a_device_without_float64() -> Iterator[torch.device]:
    """Inside, there is one."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ASKING:
            patch.setattr(f"{module}.has_float64", lambda device: torch.device(device).type != ELSEWHERE.type)
        for function in ("autocast", "is_autocast_enabled", "get_autocast_dtype"):  # which do not know the device
            patch.setattr(torch, function, partial(_as_on_the_cpu, getattr(torch, function)))
        with _Device():
            yield ELSEWHERE
