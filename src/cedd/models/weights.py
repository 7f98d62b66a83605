"""Weights as safetensors files: written atomically, read strictly, never unpickled.

A file holds its tensors in one of four forms (`FORMS`): as they are, in bfloat16 (half the size), in int8 (a quarter),
or deflated (less than a fifth). In the last two each matrix W [R, C] is stored row by row in units of its own step,

    W_rc ≈ q_rc step_r,    q_rc = round(W_rc / step_r) in -127..127.

In int8, step_r = max_c |W_rc| / 127, so that no entry moves by more than step_r / 2. Deflated, it is that part of the
largest entry which is nearest to a sixteenth of the row's root mean square, so that an entry moves by 1.8% of this on
average: few of the integers are then large, and Huffman's code of them (zlib's) takes six bits each. All other tensors
(norms, biases) stay in float32. A model is filled with floating-point numbers of its own type: the form is one of
storage, not of computation.

A file says the CRC-32 of its tensors (of one of before, what stands beside it may), which finds every damage to 32
bits or fewer in a row and all but one of 4 billion others. It reads 1.5 GB a second where SHA-256, without instructions
for it, reads 0.2: a start may not wait for a proof against forgery, which a file that is not signed cannot give.
"""

from __future__ import annotations

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

from cedd.models.stored import CHECKSUM, STEP, check_sum, checksum_of, from_integers, reading_tensors, unpacking
from cedd.storage import atomic_file

Tensors = Mapping[str, Tensor]
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
    said = {**(metadata or {}), CHECKSUM: checksum_of(_contents(ready))}
    with atomic_file(Path(path)) as temporary:
        try:
            save_file(ready, temporary, metadata=said)
        except SafetensorError as error:  # which has the system's error in its words only
            if (number := re.search(r"\(os error (\d+)\)", str(error))) is None:
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def read_weights(
    path: str | Path, device: str | torch.device = "cpu", *, form: str = "float32", checksum: str | None = None
) -> dict[str, Tensor]:
    """The named tensors of a file that was stored in ``form``.

    They match their checksum, if the file has one; ``checksum`` is that of a file that has none.
    """
    path, unpack = Path(path), get_form(form).unpack
    if not path.is_file():
        raise ValueError(f"there is no weights file {path}")
    with reading_tensors(path):
        stored = load_file(path)
    check_sum(path, _contents(stored), checksum)
    with unpacking(path, form):
        return {name: tensor.to(device) for name, tensor in unpack(stored).items()}


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
    path, state = Path(path), model.state_dict()
    tensors = read_weights(path, form=form, checksum=checksum)
    if missing := sorted(state.keys() - tensors.keys()):
        raise ValueError(f"{path} lacks {len(missing)} of the model's tensors, first {missing[0]}")
    if unknown := sorted(tensors.keys() - state.keys()):
        raise ValueError(f"{path} holds {len(unknown)} tensors that the model does not have, first {unknown[0]}")
    for name, tensor in tensors.items():
        if tensor.shape != state[name].shape:
            raise ValueError(f"{path}: {name} is {list(tensor.shape)}, but the model's is {list(state[name].shape)}")
    model.load_state_dict(tensors)


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
