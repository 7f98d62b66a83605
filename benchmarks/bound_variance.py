"""How many network evaluations a bound needs: the paper's j1 and j2 with independent times, compared with `tight`.

    python benchmarks/bound_variance.py                                   # a few minutes on two CPU cores
    python benchmarks/bound_variance.py --device cuda --steps 2500 --length 128 --width 192 --depth 4

For each process a small character model is trained on the text of Python's manual, which comes with Python. The bound
on the same held-out sequences is then estimated in three ways with equal numbers of evaluations. The table has the
Monte Carlo standard errors (for fixed sequences; root mean square over repetitions), and how many times the
evaluations of `tight` the others need for its error: the squared ratio.
"""

from __future__ import annotations

import argparse
import json
import math
import time

import torch
from helps import parser_of
from torch import Tensor

import cedd
from cedd.bounds.options import Sampling
from cedd.data.corpora import python_manual_documents
from cedd.dynamics import Bound
from cedd.models.transformer import Transformer, TransformerConfig

ALPHABET = " ,.abcdefghijklmnopqrstuvwxyz"
WAYS: dict[Bound, Sampling] = {"j1": "independent", "j2": "independent", "tight": "stratified"}


def character_data(length: int, held_out: int) -> tuple[Tensor, Tensor]:
    """The manual in 29 characters: a training stream, and held-out sequences [held_out, L] spread over the rest."""
    text = "\n".join(python_manual_documents()).lower()
    plain = " ".join("".join(c if c in ALPHABET else " " for c in text).split())
    ids = torch.tensor([ALPHABET.index(c) for c in plain])
    test = ids[-60_000:]
    blocks = test[: len(test) // length * length].reshape(-1, length)
    return ids[:-60_000], blocks[:: max(1, len(blocks) // held_out)][:held_out]


def train(process: cedd.TokenProcess, method: str, stream: Tensor, options: argparse.Namespace) -> Transformer:
    """A small transformer, trained with a linear decay of the learning rate."""
    torch.manual_seed(options.seed)
    config = TransformerConfig(
        options.width,
        options.depth,
        heads=max(1, options.width // 32),
        conditioning_width=64,
        dropout=0.0,
        vocab_size=process.vocab_size,
        has_mask=process.has_mask,
        length=options.length,
    )
    model = Transformer(config).to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.0)
    stream, offsets = stream.to(options.device), torch.arange(options.length, device=options.device)
    for step in range(options.steps):
        for group in optimizer.param_groups:
            group["lr"] = 1.5e-3 * min(1.0, (step + 1) / 100) * max(0.03, 1 - step / options.steps)
        starts = torch.randint(len(stream) - options.length, (options.batch, 1), device=options.device)
        loss = cedd.loss(model, process, stream[starts + offsets], method=method)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.eval()


def errors(
    model: Transformer, process: cedd.TokenProcess, method: str, data: Tensor, options: argparse.Namespace
) -> dict[str, float]:
    """Root-mean-square Monte Carlo errors of the three, and the mean of tight."""
    found: dict[str, float] = {}
    for bound, sampling in WAYS.items():
        runs = [
            cedd.estimate_bound(
                model,
                process,
                data,
                method=method,
                bound=bound,
                sampling=sampling,
                draws=options.draws,
                batch=128,
                fixed_set=True,
                generator=torch.Generator().manual_seed(options.seed + repetition),
            )
            for repetition in range(options.repetitions)
        ]
        found[bound] = math.sqrt(sum(run.stderr**2 for run in runs) / len(runs))
        found[f"{bound}_nats"] = sum(run.nats_per_token for run in runs) / len(runs)
    return found


def main() -> None:
    """Train, measure, print."""
    parser = parser_of(__doc__)
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:1")
    parser.add_argument("--steps", type=int, default=500, help="training steps")
    parser.add_argument("--length", type=int, default=64, help="tokens per sequence")
    parser.add_argument("--width", type=int, default=96, help="width of the network")
    parser.add_argument("--depth", type=int, default=2, help="number of blocks")
    parser.add_argument("--batch", type=int, default=64, help="sequences per training step")
    parser.add_argument("--sequences", type=int, default=64, help="held-out sequences for the bound")
    parser.add_argument("--draws", type=int, default=16, help="noise draws per sequence")
    parser.add_argument("--repetitions", type=int, default=2, help="estimates per bound")
    parser.add_argument("--methods", nargs="+", default=["cedd-star"], help="methods to measure on each process")
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    parser.add_argument("--json", action="store_true", help="print one JSON object per row")
    options = parser.parse_args()
    stream, data = character_data(options.length, options.sequences)
    V = len(ALPHABET)
    if not options.json:
        print(f"{len(data)} sequences of {options.length}, {options.draws} draws each, {options.steps} training steps")
        print(
            f"{'process':<10}{'method':<12}{'nats':>8}{'j1':>11}{'j2':>11}{'tight':>11}{'j1/tight':>10}{'j2/tight':>10}"
        )
    for process in (cedd.absorb(V), cedd.uniform(V), cedd.roulette(V)):
        for method in options.methods:
            start = time.perf_counter()
            model = train(process, method, stream, options)
            found = errors(model, process, method, data, options)
            needs = {bound: (found[bound] / found["tight"]) ** 2 for bound in ("j1", "j2")}
            name = process.config()["name"]
            if options.json:
                row = {"process": name, "method": method, **found, "needs": needs}
                print(json.dumps(row | {"seconds": time.perf_counter() - start}), flush=True)
                continue
            print(
                f"{name:<10}{method:<12}{found['tight_nats']:>8.4f}{found['j1']:>11.5f}{found['j2']:>11.5f}"
                f"{found['tight']:>11.5f}{needs['j1']:>10.1f}{needs['j2']:>10.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
