"""A network of the shape of LLaDA-8B with random weights: write it in shards, import it, bound a text, draw a sample.

    python benchmarks/large_model.py --folder /tmp/llada          # 16 GB of disk; a GPU of 80 GB
    python benchmarks/large_model.py --folder /tmp/llada --depth 2 --width 256 --rows 1000 --device cpu

Prints one JSON object: parameters and bytes, and for each step its seconds and the peak GPU memory so far. An existing
folder is imported without being written again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from command_line import command
from safetensors.torch import save_file
from torch import Tensor

import cedd

Result = TypeVar("Result")
SETTINGS: dict[str, Any] = {
    "model_type": "llada",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_sequence_length": 4096,
    "torch_dtype": "bfloat16",
}


@dataclass(frozen=True)
class Arguments:
    """example: python benchmarks/large_model.py --folder /tmp/llada

    Import a network of LLaDA-8B's shape with random weights, bound one text, and draw one sample.
    """

    folder: Path
    """Folder of the checkpoint."""
    width: int = 4096
    """Width of the residual stream."""
    depth: int = 32
    """Number of layers."""
    heads: int = 32
    """Attention heads."""
    mlp_width: int = 12288
    """Width of the gated MLP."""
    rows: int = 126464
    """Rows of the embedding."""
    length: int = 512
    """Tokens of the text and of the sample."""
    steps: int = 64
    """Steps of the sample."""
    device: str = "cuda"
    """Device."""


def layer_tensors(arguments: Arguments, i: int, random: Callable[..., Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a layer by the names of the released files."""
    D, M, at = arguments.width, arguments.mlp_width, f"model.transformer.blocks.{i}."
    for name in ("attn_norm", "ff_norm"):
        yield f"{at}{name}.weight", torch.ones(D, dtype=torch.bfloat16)
    for name in ("q_proj", "k_proj", "v_proj", "attn_out"):
        yield f"{at}{name}.weight", random(D, D)
    for name in ("ff_proj", "up_proj"):
        yield f"{at}{name}.weight", random(M, D)
    yield f"{at}ff_out.weight", random(D, M)


def write(arguments: Arguments) -> None:
    """The checkpoint, a shard per layer and one for the rest."""
    arguments.folder.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        made = torch.empty(shape, dtype=torch.bfloat16, device=device)
        return made.normal_(std=0.02, generator=generator).cpu()

    files: dict[str, str] = {}

    def save(name: str, tensors: dict[str, Tensor]) -> None:
        save_file(tensors, arguments.folder / name)
        files.update(dict.fromkeys(tensors, name))

    for i in range(arguments.depth):
        save(f"model-{i:05}.safetensors", dict(layer_tensors(arguments, i, random)))
    ends = {f"model.transformer.{name}.weight": random(arguments.rows, arguments.width) for name in ("wte", "ff_out")}
    ends["model.transformer.ln_f.weight"] = torch.ones(arguments.width, dtype=torch.bfloat16)
    save("model-ends.safetensors", ends)
    sizes = {
        "d_model": arguments.width,
        "n_layers": arguments.depth,
        "n_heads": arguments.heads,
        "n_kv_heads": arguments.heads,
        "mlp_hidden_size": arguments.mlp_width,
        "vocab_size": arguments.rows,
        "embedding_size": arguments.rows,
        "mask_token_id": arguments.rows - 128,
    }
    (arguments.folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    (arguments.folder / "config.json").write_text(json.dumps({**SETTINGS, **sizes}))


class Steps:
    """The duration and memory of each step."""

    def __init__(self, cuda: bool) -> None:
        self.cuda, self.record = cuda, dict[str, Any]()

    def timed(self, name: str, function: Callable[[], Result]) -> Result:
        """The result of a step, after recording its duration and memory."""
        started = time.perf_counter()
        result = function()
        if self.cuda:
            torch.cuda.synchronize()
        seconds = round(time.perf_counter() - started, 2)
        gibibytes = round(torch.cuda.max_memory_allocated() / 2**30, 2) if self.cuda else None
        self.record[name] = {"seconds": seconds, "gibibytes": gibibytes}
        return result


def run(arguments: Arguments) -> int:
    """Write, import, bound, sample, and print one JSON object."""
    steps = Steps(arguments.device.startswith("cuda"))
    if not (arguments.folder / "config.json").is_file():
        steps.timed("write", lambda: write(arguments))
    model = steps.timed("import", lambda: cedd.import_model(arguments.folder, device=arguments.device))
    data = torch.randint(arguments.rows - 128, (1, arguments.length), generator=torch.Generator().manual_seed(1))

    def bound() -> Any:
        how: dict[str, Any] = {"method": model.method, "draws": 8, "batch": 4}
        return cedd.estimate_bound(model.model, model.process, data.to(model.device), **how)

    estimate = steps.timed("bound", bound)
    options: dict[str, Any] = {"method": model.method, "sampler": "llada", "steps": arguments.steps, "seed": 0}
    shape = (1, arguments.length)
    drawn = steps.timed("sample", lambda: cedd.sample(model.model, model.process, shape, **options))
    size = sum(file.stat().st_size for file in arguments.folder.glob("*.safetensors"))
    parameters = model.model.num_parameters()
    facts = {"parameters": parameters, "bytes": size, "nats_per_token": round(estimate.nats_per_token, 3)}
    print(json.dumps({**facts, "distinct_tokens": len(drawn.unique()), **steps.record}))
    return 0


if __name__ == "__main__":
    raise SystemExit(command(__file__, Arguments, run))
