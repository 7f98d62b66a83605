"""The time and memory of importing a published network: one of 170 million parameters with random weights.

    python benchmarks/import_speed.py                 # writes such a folder, imports it in a separate process
    python benchmarks/import_speed.py --family gidd --width 384 --depth 4

Prints one JSON object: the size of the file, the seconds of `cedd.import_model` and of `cedd import` (which also writes
the new folder), and the peak memory of both processes, also relative to the size of the file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from helps import parser_of
from safetensors.torch import save_file

GPT2 = 50257
CONFIGS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "sedd": (1, "", {"tokens": GPT2, "graph": {"type": "absorb"}, "noise": {"type": "loglinear"}}),
    "mdlm": (1, "backbone.", {"model_type": "mdlm", "vocab_size": GPT2 + 1, "time_conditioning": False}),
    "duo": (1, "backbone.", {"model_type": "duo", "vocab_size": GPT2 + 1}),
    "gidd": (2, "", {"vocab_size": GPT2 + 2, "p_uniform": 0.1, "t_eps": 1e-4}),
}
"""By family: the number of rows beyond GPT-2's tokens, the prefix of tensor names, and the entries of config.json."""


def shapes(rows: int, width: int, depth: int, conditioning: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors of the transformer that the families share."""
    yield "vocab_embed.embedding", (rows, width)
    layers = {"sigma_map.mlp.0": (conditioning, 256), "sigma_map.mlp.2": (conditioning, conditioning)}
    for i in range(depth):
        yield from ((f"blocks.{i}.{norm}.weight", (width,)) for norm in ("norm1", "norm2"))
        yield f"blocks.{i}.attn_qkv.weight", (3 * width, width)
        yield f"blocks.{i}.attn_out.weight", (width, width)
        layers |= {f"blocks.{i}.mlp.0": (4 * width, width), f"blocks.{i}.mlp.2": (width, 4 * width)}
        layers[f"blocks.{i}.adaLN_modulation"] = (6 * width, conditioning)
    yield "output_layer.norm_final.weight", (width,)
    layers |= {"output_layer.adaLN_modulation": (2 * width, conditioning), "output_layer.linear": (rows, width)}
    for name, shape in layers.items():
        yield f"{name}.weight", shape
        yield f"{name}.bias", shape[:1]


def write_folder(folder: Path, family: str, width: int = 768, depth: int = 12, conditioning: int = 128) -> Path:
    """A folder as the hub has it; its weights are random."""
    more, prefix, config = CONFIGS[family]
    sizes = {"hidden_size": width, "n_blocks": depth, "n_heads": 12, "cond_dim": conditioning, "length": 1024}
    folder.mkdir(parents=True)
    inner = {"model": sizes | {"scale_by_sigma": True}} if family == "sedd" else sizes
    (folder / "config.json").write_text(json.dumps(config | inner), encoding="utf-8")
    made = {
        f"{prefix}{name}": torch.empty(shape).normal_()
        for name, shape in shapes(GPT2 + more, width, depth, conditioning)
    }
    save_file(made, folder / "model.safetensors")
    return folder


def measured(code: str, *words: str) -> dict[str, float]:
    """Run a program in a separate process; the JSON that it prints."""
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


PEAK = "resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == 'darwin' else 1024)"
IN_PYTHON = f"""
import json, resource, sys, time
import cedd, cedd.tasks
before, started = {PEAK}, time.perf_counter()
model = cedd.import_model(sys.argv[1], "none", device="cpu")
print(json.dumps(dict(seconds=time.perf_counter() - started, peak={PEAK}, before=before)))
"""
AS_COMMAND = f"""
import json, resource, sys, time
started = time.perf_counter()
from cedd.cli import main
assert main(["import", sys.argv[1], "--out", sys.argv[2], "--tokenizer", "none", "--json"]) == 0
print(json.dumps(dict(seconds=time.perf_counter() - started, peak={PEAK})))
"""


def main() -> None:
    """Write, import, and print one line of JSON."""
    parser = parser_of(__doc__)
    parser.add_argument("--family", choices=sorted(CONFIGS), default="sedd", help="family of the network")
    parser.add_argument("--width", type=int, default=768, help="width of the network")
    parser.add_argument("--depth", type=int, default=12, help="number of blocks")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_folder(Path(temporary) / "theirs", options.family, options.width, options.depth)
        size = (folder / "model.safetensors").stat().st_size
        time.sleep(1)
        python = measured(IN_PYTHON, str(folder))
        command = measured(AS_COMMAND, str(folder), str(Path(temporary) / "ours"))
    record = {
        "family": options.family,
        "file_mb": round(size / 1e6),
        "import_model_seconds": round(python["seconds"], 2),
        "import_model_peak_mb": round(python["peak"] / 1e6),
        "import_model_peak_over_file": round(python["peak"] / size, 2),
        "cedd_import_seconds": round(command["seconds"], 2),
        "cedd_import_peak_mb": round(command["peak"] / 1e6),
        "cedd_import_peak_over_file": round(command["peak"] / size, 2),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main()
