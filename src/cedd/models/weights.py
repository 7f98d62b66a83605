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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from cedd.storage import atomic_file

Tensors = Mapping[str, Tensor]
STEP = ".step"
"""The suffix that names a matrix's steps [R]."""
CHECKSUM = "crc32"
"""What the checksum of the stored tensors is called in a file's metadata."""
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
    said = {**(metadata or {}), CHECKSUM: _checksum(ready)}
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
        stored = load_file(path, device=str(device))
    said = read_metadata(path).get(CHECKSUM, checksum)
    if said is not None and said != _checksum(stored):
        raise ValueError(f"{path} is damaged: its numbers do not match their checksum")
    try:
        return unpack(stored)
    except ValueError as error:
        raise ValueError(f"{path} is not stored as {form}: {error}") from None


def read_metadata(path: str | Path) -> dict[str, str]:
    """What a weights file says of itself; nothing, if it says nothing."""
    with reading_tensors(path), safe_open(path, framework="pt") as file:
        return file.metadata() or {}


@contextmanager
def reading_tensors(path: str | Path) -> Iterator[None]:
    """Around code that reads a safetensors file: what is wrong with it, in a line.

    safetensors calls every file that it cannot open one that is not there, so that it is opened here before.
    """
    Path(path).open("rb").close()
    try:
        yield
    except SafetensorError as error:
        raise ValueError(f"{path} is not a complete safetensors file: {error}") from error


def _checksum(stored: Tensors) -> str:
    """Of names and contents."""
    checksum = 0
    for name in sorted(stored):
        content = stored[name].cpu().contiguous().flatten().view(torch.uint8)
        checksum = zlib.crc32(content.numpy().data, zlib.crc32(name.encode(), checksum))
    return f"{checksum:08x}"


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


def _inflated(coded: Tensor, rows: int) -> Tensor:
    """The integers of so many rows."""
    decoder = zlib.decompressobj(-zlib.MAX_WBITS)
    plain = decoder.decompress(coded.cpu().numpy().tobytes(), 8 * len(coded) + 1)  # no code has less than a bit
    if not decoder.eof or not rows or len(plain) % rows:
        raise ValueError(f"{len(plain)} bytes for {rows} rows")
    return _bytes(plain).view(torch.int8).view(rows, -1).to(coded.device)


def _bytes(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.zeros(0, dtype=torch.uint8)


def _from_integers(tensors: Tensors) -> dict[str, Tensor]:
    """The matrices again, in float32."""
    unpacked: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if _is_matrix(tensor):
            raise ValueError(f"the matrix {name} is {tensor.dtype}")
        step = tensors.get(name + STEP)
        if tensor.dtype == torch.uint8 and tensor.ndim == 1 and step is not None:
            try:
                tensor = _inflated(tensor, len(step))
            except (ValueError, zlib.error) as error:
                raise ValueError(f"{name} is damaged ({error})") from None
        if tensor.dtype == torch.int8:
            if step is None or step.shape != tensor.shape[:1]:
                raise ValueError(f"{name} has no steps, one a row")
            unpacked[name] = tensor.float().mul_(step[:, None])
        elif not (name.endswith(STEP) and name.removesuffix(STEP) in tensors):
            unpacked[name] = tensor
    return unpacked


FORMS: Mapping[str, Form] = {
    "float32": Form(dict, dict),
    "bf16": Form(_in_bfloat16, dict),
    "int8": Form(partial(_in_integers, form="int8", store=eight_bits), _from_integers),
    "deflated": Form(partial(_in_integers, form="deflated", store=_deflated), _from_integers),
}
