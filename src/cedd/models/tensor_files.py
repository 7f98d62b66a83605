"""Tensors by name from safetensors files, one or several shards, and from GGUF files, read one at a time.

A safetensors tensor is read straight into the memory of the parameter that it fills: loading a network takes its own
size and no more. Nothing is unpickled. A GGUF file, the format of llama.cpp, holds quantized matrices, a description of
the network and its tokenizer; the `gguf` package (pip install 'cedd[hub]') converts the matrices to float32.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cedd.models.locate import WEIGHTS_FILE
from cedd.names import nearest
from cedd.storage import read_json, reading

INDEX_FILE = f"{WEIGHTS_FILE}.index.json"
"""The list of the shards of a network: {"weight_map": {tensor: file}}."""
FLOATS: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Dtypes of weights, by their names in a safetensors file."""
GGUF_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
"""Types of GGUF tensors that are read; files of Q4_K hold a few tensors of Q6_K."""
UNUSED = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
"""Ends of the names of buffers, of any dtype: the rotary frequencies, which follow from the base, and GPT-2's causal
mask."""
_LARGEST_HEADER = 100_000_000


class TensorFiles(ABC):
    """Named floating-point tensors; `unread` are those that have not been read."""

    source: Path
    """The name in messages."""

    def __init__(self, source: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.source, self.shapes, self.unread = source, dict(shapes), set(shapes)

    def check(self, name: str, shape: Sequence[int], why: str = "") -> None:
        """Raise a ValueError if a tensor is missing or has another shape."""
        if name not in self.shapes:
            near = None if why else nearest(name, self.shapes)
            raise ValueError(f"{self.source} lacks {name}{why}" + ("" if near is None else f"; did you mean {near!r}?"))
        if self.shapes[name] != tuple(shape):
            raise ValueError(
                f"{self.source}: {name} is {list(self.shapes[name])}, but config.json requires {list(shape)}"
            )

    def take(self, name: str, out: Tensor) -> None:
        """Fill `out` with a tensor of its shape, which must consist of finite numbers."""
        self.check(name, out.shape)
        self.unread.discard(name)
        self.read(name, out)
        if out.numel() and not all(end.isfinite() for end in torch.aminmax(out)):  # which propagate NaN
            raise ValueError(f"{self.source}: {name} holds numbers that are not finite")

    def taken_out(self, name: str) -> Tensor | None:
        """A tensor in float32, which is then no longer among the others; None if there is none."""
        if name not in self.shapes:
            return None
        values = torch.empty(self.shapes[name])
        self.take(name, values)
        del self.shapes[name]
        return values

    @abstractmethod
    def read(self, name: str, out: Tensor) -> None:
        """Fill `out`, of the tensor's shape, converting to its dtype and device."""

    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The dtype of most of the weights, at most float32."""


# ----------------------------------------------------------------------------------------------------------------
# safetensors


class _Stored(NamedTuple):
    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    """The range of its bytes in the file."""


class SafetensorsFiles(TensorFiles):
    """The tensors of model.safetensors, or of the shards that model.safetensors.index.json lists."""

    def __init__(self, folder: Path) -> None:
        shards = shards_of(folder)
        self.stored: dict[str, _Stored] = {}
        for path, listed in shards.items():
            found = _header(path)
            check_shard(path, listed, found, self.stored)
            self.stored |= found
        source = next(iter(shards)) if len(shards) == 1 else folder / INDEX_FILE
        super().__init__(source, {name: one.shape for name, one in self.stored.items()})

    def dtype(self) -> torch.dtype:
        bytes_of = Counter[str]()
        for name, one in self.stored.items():
            if name.endswith(UNUSED):
                continue
            bytes_of[one.dtype] += math.prod(one.shape)
        most = bytes_of.most_common(1)[0][0]
        return torch.float32 if most == "F64" else FLOATS[most]

    def read(self, name: str, out: Tensor) -> None:
        one = self.stored[name]
        dtype = FLOATS[one.dtype]
        plain = out.device.type == "cpu" and out.dtype == dtype and out.is_contiguous()
        target = out.detach() if plain else torch.empty(one.shape, dtype=dtype)
        with one.path.open("rb") as file:
            file.seek(one.start)
            content = target.view(-1).view(torch.uint8).numpy()
            if file.readinto(content.data) != content.size:
                raise ValueError(f"{one.path} is not a complete safetensors file: {name} ends early")
        if not plain:
            with torch.no_grad():
                out.copy_(target)


def check_shard(path: Path, listed: Iterable[str], found: Collection[str], others: Collection[str]) -> Collection[str]:
    """The names of the tensors in a shard; refused unless they contain those that the index lists for it, and none of
    the other shards'."""
    if missing := sorted(set(listed) - set(found)):
        raise ValueError(f"{path} lacks {missing[0]}, which {INDEX_FILE} says it holds")
    if twice := sorted(set(found) & set(others)):
        raise ValueError(f"{path} holds {twice[0]}, which another shard holds too")
    return found


def shards_of(folder: Path) -> dict[Path, list[str]]:
    """The files, with the names that the index lists for each."""
    whole, index = folder / WEIGHTS_FILE, folder / INDEX_FILE
    if whole.is_file():
        return {whole: []}
    if not index.is_file():
        raise ValueError(f"{folder} has no {WEIGHTS_FILE} and no {INDEX_FILE}")
    with reading(index):
        listed = read_json(index).get("weight_map")
        if not isinstance(listed, Mapping) or not listed:
            raise ValueError(f"{index} has no weight_map")
    files: dict[Path, list[str]] = {}
    for name, file in listed.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(f"{index}: the file of {name} must be a name in its folder (got {file!r})")
        files.setdefault(folder / file, []).append(name)
    for path in files:
        if not path.is_file():
            raise ValueError(f"file not found: {path}, a shard that {INDEX_FILE} lists")
    return files


def _header(path: Path) -> dict[str, _Stored]:
    """The tensors of a safetensors file; raises a ValueError if the file is incomplete."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= min(_LARGEST_HEADER, size - 8):
            raise ValueError(f"{path} is not a complete safetensors file: it has no header")
        try:
            header = json.loads(file.read(length))
            entries = {name: one for name, one in header.items() if name != "__metadata__"}
            spans = {name: [8 + length + int(end) for end in one["data_offsets"]] for name, one in entries.items()}
            found = {
                name: _Stored(path, one["dtype"], tuple(map(int, one["shape"])), spans[name][0])
                for name, one in entries.items()
            }
            ends = {name: span[1] for name, span in spans.items()}
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"{path} is not a complete safetensors file: its header is damaged") from error
    if not found:
        raise ValueError(f"{path} contains no tensors")
    for name, one in found.items():
        if name.endswith(UNUSED):
            continue
        if one.dtype not in FLOATS:
            raise ValueError(f"{path}: {name} is of {one.dtype}; weights must be {', '.join(FLOATS)}")
        wanted = math.prod(one.shape) * FLOATS[one.dtype].itemsize
        if min(one.shape, default=0) < 0 or ends[name] - one.start != wanted or not 8 + length <= one.start:
            raise ValueError(f"{path} is not a complete safetensors file: {name} does not fit its header")
        if ends[name] > size:
            raise ValueError(f"{path} is not a complete safetensors file: {name} ends at byte {ends[name]} of {size}")
    return found


# ----------------------------------------------------------------------------------------------------------------
# GGUF


class GGUFFile(TensorFiles):
    """The tensors of a GGUF file by the names that Hugging Face's files have, and its description.

    Shapes: H heads, W head width.

    Its converter pairs neighbouring entries of q and k in files of the architecture llama, (2j, 2j + 1) instead of
    (j, j + W/2), which is undone here.
    """

    def __init__(self, path: Path) -> None:
        try:
            import gguf  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ValueError(f"{path} is read by the package gguf: pip install 'cedd[hub]' ({error})") from None
        self._dequantize = gguf.quants.dequantize
        try:
            reader: Any = gguf.GGUFReader(str(path))
        except Exception as error:  # noqa: BLE001 - the library raises whatever its parser meets
            raise ValueError(f"{path} is not a complete GGUF file: {error}") from None
        self.metadata: dict[str, Any] = dict(reader.fields.items())
        self.architecture = str(self.value("general.architecture", "none"))
        self.tensors: dict[str, Any] = {}
        for one in reader.tensors:
            if one.tensor_type.name not in GGUF_TYPES:
                raise ValueError(
                    f"{path}: {one.name} is of type {one.tensor_type.name}; supported are {', '.join(GGUF_TYPES)}"
                )
            self.tensors[_hugging_face_name(one.name)] = one
        super().__init__(path, {name: tuple(map(int, one.shape[::-1])) for name, one in self.tensors.items()})

    def value(self, name: str, default: object = None) -> Any:
        """An entry of the description."""
        field = self.metadata.get(name)
        return default if field is None else field.contents()

    def setting(self, name: str, default: object = None) -> Any:
        """An entry specific to the architecture."""
        return self.value(f"{self.architecture}.{name}", default)

    def dtype(self) -> torch.dtype:
        kinds = Counter[str]()
        for one in self.tensors.values():
            kinds[one.tensor_type.name] += int(one.n_elements)
        return FLOATS.get(kinds.most_common(1)[0][0], torch.float32)

    def read(self, name: str, out: Tensor) -> None:
        one = self.tensors[name]
        values = torch.from_numpy(self._dequantize(one.data, one.tensor_type).copy()).view(self.shapes[name])
        if self.architecture == "llama" and ".self_attn." in name and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = self.setting("attention.head_count")
            heads = heads if name.endswith("q_proj.weight") else self.setting("attention.head_count_kv", heads)
            values = values.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
        with torch.no_grad():
            out.copy_(values)


_GGUF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _hugging_face_name(name: str) -> str:
    """blk.3.attn_q.weight as model.layers.3.self_attn.q_proj.weight; unknown names are unchanged."""
    *prefix, stem, leaf = name.split(".")
    if prefix[:1] == ["blk"] and stem in _GGUF_NAMES:
        return f"model.layers.{prefix[1]}.{_GGUF_NAMES[stem]}.{leaf}"
    return f"{_GGUF_NAMES[stem]}.{leaf}" if not prefix and stem in _GGUF_NAMES else name
