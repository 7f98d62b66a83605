"""Weights as safetensors files: written atomically, read strictly, never unpickled.

A file holds its tensors in one of four forms (`FORMS`): as they are, in bfloat16 (half the size), in int8 (a quarter),
or deflated (less than a fifth). In the last two each matrix W [R, C] is stored row by row in units of its own step,

    W_rc ≈ q_rc step_r,    q_rc = round(W_rc / step_r) in -127..127.

In int8, step_r = max_c |W_rc| / 127, so that no entry moves by more than step_r / 2. Deflated, it is that part of the
largest entry which is nearest to a sixteenth of the row's root mean square, so that an entry moves by 1.8% of this on
average: few of the integers are then large, and Huffman's code of them (zlib's) takes six bits each. All other tensors
(norms, biases) stay in float32. A model is filled with floating-point numbers of its own type: the form is one of
storage, not of computation.

The file's metadata, or config.json next to it, has the CRC-32 of the names, dtypes, shapes and bytes of its tensors.
It detects every error burst of up to 32 bits, and misses one in 4 billion other errors. It runs at 1.5 GB per second
where SHA-256 without hardware support runs at 0.2, and forgery cannot be detected without a signature anyway.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from cedd.models.backbone import stored_tensors
from cedd.models.numpy_weights import (
    CHECKSUM,
    RECORD,
    STEP,
    Layout,
    check_sum,
    checksum_of,
    from_integers,
    read_layouts,
    reading_tensors,
    unpacking,
)
from cedd.storage import atomic_file

Tensors = Mapping[str, Tensor]
DTYPES: Mapping[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
}
"""The dtypes that are stored and read, with their names in a safetensors file."""
DEFLATED_STEPS = 16
"""To a row's root mean square, where it is deflated."""


@dataclass(frozen=True)
class Form:
    """How tensors are stored: what is written for them, and what is read back."""

    pack: Callable[[Tensors], dict[str, Tensor]]
    unpack: Callable[[Tensors], dict[str, Tensor]]


def get_form(name: str) -> Form:
    """The form of this name."""
    if name not in FORMS:
        raise ValueError(f"weights are stored as {', '.join(FORMS)}, not as {name!r}")
    return FORMS[name]


def save_weights(
    path: str | Path, tensors: Tensors, *, form: str = "float32", metadata: Mapping[str, str] | None = None
) -> None:
    """Replace ``path`` by named tensors in one of the ``FORMS``; float32 writes them as they are."""
    ready = get_form(form).pack({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    layouts = {name: Layout(_dtype_name(name, tensor), tuple(tensor.shape)) for name, tensor in ready.items()}
    complete = {**(metadata or {}), CHECKSUM: checksum_of(layouts, _contents(ready))}
    with atomic_file(Path(path)) as temporary:
        try:
            # One entry: safetensors writes several in random order, and equal weights would be different files.
            save_file(ready, temporary, metadata={RECORD: json.dumps(complete, sort_keys=True)})
        except SafetensorError as error:  # which has the system's error in its words only
            if (number := re.search(r"\(os error (\d+)\)", str(error))) is None:
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def weights_checksum(model: nn.Module) -> str:
    """The checksum that a file of this model's tensors would have, as they are in memory."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in stored_tensors(model).items()}
    layouts = {name: Layout(_dtype_name(name, tensor), tuple(tensor.shape)) for name, tensor in tensors.items()}
    return checksum_of(layouts, _contents(tensors))


def read_weights(path: str | Path, *, form: str = "float32", checksum: str | None = None) -> dict[str, Tensor]:
    """The named tensors of a file that was stored in ``form``.

    They must match ``checksum``, or else the one in the file's metadata; a file of another program may have neither.
    """
    path, unpack = Path(path), get_form(form).unpack
    if not path.is_file():
        raise ValueError(f"there is no weights file {path}")
    layouts = read_layouts(path, DTYPES.values())
    with reading_tensors(path):
        stored = load_file(path)
    check_sum(path, layouts, _contents(stored), checksum)
    with unpacking(path, form):
        return dict(unpack(stored))


def _dtype_name(name: str, tensor: Tensor) -> str:
    if tensor.dtype not in DTYPES:
        raise ValueError(f"{name} has the unsupported dtype {tensor.dtype}; use {', '.join(map(str, DTYPES))}")
    return DTYPES[tensor.dtype]


def _contents(stored: Tensors) -> dict[str, NDArray[np.uint8]]:
    """As bytes."""
    return {name: tensor.contiguous().flatten().view(torch.uint8).numpy() for name, tensor in stored.items()}


class SkipInitialization(TorchFunctionMode):
    """Modules built inside do not initialize their parameters at random: a file overwrites them.

    Drawing 22 million numbers takes longer than reading them. (The meta device skips it too, but torch takes more than
    a second to prepare its random number generator there.)
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


def load_weights(model: nn.Module, path: str | Path, *, form: str = "float32", checksum: str | None = None) -> None:
    """Fill the model with a file's weights (see `read_weights`), which must be exactly its own names and shapes.

    Types may differ: a file stored in bfloat16 loads into float32 parameters.
    """
    path, state = Path(path), stored_tensors(model)
    tensors = read_weights(path, form=form, checksum=checksum)
    if missing := sorted(state.keys() - tensors.keys()):
        raise ValueError(f"{path} lacks {len(missing)} of the model's tensors, first {missing[0]}")
    if unknown := sorted(tensors.keys() - state.keys()):
        raise ValueError(f"{path} holds {len(unknown)} tensors that the model does not have, first {unknown[0]}")
    for name, tensor in tensors.items():
        if tensor.shape != state[name].shape:
            raise ValueError(f"{path}: {name} is {list(tensor.shape)}, but the model's is {list(state[name].shape)}")
    model.load_state_dict(tensors, strict=False)  # tied parameters are stored once


# ----------------------------------------------------------------------------------------------------------------
# Forms


def _in_bfloat16(tensors: Tensors) -> dict[str, Tensor]:
    return {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def _is_matrix(tensor: Tensor) -> bool:
    return tensor.ndim == 2 and tensor.is_floating_point()


def _in_integers(tensors: Tensors, form: str, store: Callable[[Tensor], tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Matrices as integer multiples of their rows' steps, with the steps."""
    packed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not _is_matrix(tensor):
            packed[name] = tensor.float() if tensor.is_floating_point() else tensor
            continue
        if not tensor.isfinite().all():
            raise ValueError(f"{name} holds numbers that are not finite, which {form} cannot store; use bf16")
        packed[name], packed[name + STEP] = store(tensor.float())
    return packed


def eight_bits(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Multiples of a 127th of the largest entry."""
    return _multiples(rows, rows.abs().amax(1) / 127)


def _multiples(rows: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """The integers [R, C] nearest to the rows in units of their steps [R], and these."""
    return torch.where(step[:, None] > 0, rows / step[:, None], 0).round().clamp(-127, 127).to(torch.int8), step


def _deflated(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Multiples of a part of the root mean square, in Huffman's code: [bytes]."""
    largest = rows.abs().amax(1)
    most = (DEFLATED_STEPS * largest / rows.square().mean(1).sqrt()).nan_to_num(1.0).round().clamp(1, 127)
    for other in (most - 1, most + 1):  # what was deflated before has these multiples still, whatever its mean is now
        units = rows * (other / largest)[:, None]
        most = torch.where((units - units.round()).abs().amax(1) < 1e-3, other, most)
    integers, step = _multiples(rows, largest / most)
    coder = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS, 9, zlib.Z_HUFFMAN_ONLY)
    return _bytes(coder.compress(integers.numpy().tobytes()) + coder.flush()), step


def _bytes(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.zeros(0, dtype=torch.uint8)


def _from_integers(tensors: Tensors) -> dict[str, Tensor]:
    """The matrices again, in float32."""
    others = {name: tensor for name, tensor in tensors.items() if tensor.dtype == torch.bfloat16}
    for name, tensor in others.items():
        if _is_matrix(tensor):
            raise ValueError(f"the matrix {name} is {tensor.dtype}")
    arrays = from_integers({name: tensor.numpy() for name, tensor in tensors.items() if name not in others})
    return {**others, **{name: torch.from_numpy(array) for name, array in arrays.items()}}


FORMS: Mapping[str, Form] = {
    "float32": Form(dict, dict),
    "bf16": Form(_in_bfloat16, dict),
    "int8": Form(partial(_in_integers, form="int8", store=eight_bits), _from_integers),
    "deflated": Form(partial(_in_integers, form="deflated", store=_deflated), _from_integers),
}
