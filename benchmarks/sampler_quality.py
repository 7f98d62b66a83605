"""Do fewer network calls cost quality? Samplers of one model, judged without any bound and without another network.

    cedd train char --data python-manual --process.name absorb --method cedd-star --length 64 --out runs/absorb
    python benchmarks/sampler_quality.py runs/absorb -n 256

The judge is a character n-gram model (Witten and Bell's interpolation) of the corpus the model was trained on. It has
never seen the model: what a sampler adds to the samples' bits per token is the sampler's error. Beside it stand the
entropy of the samples' own 3-grams, which falls when a sampler repeats itself, the network calls a batch needed, and
the judge's opinion of held-out text, which is where a perfect model would be. Intervals are 95%, over samples.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

import cedd
from cedd.bench.sample import CountingNetwork
from cedd.data.corpora import open_corpus
from cedd.evaluation.baselines import NGram
from cedd.evaluation.generative import token_entropy
from cedd.models.folder import load_folder

RUNS = ("first-hitting", "analytic:1024", "analytic:256", "analytic:64", "analytic:16", "analytic:4")
HELD_OUT = 0.05


@dataclass(frozen=True)
class Row:
    """One sampler's samples as the judge sees them."""

    what: str
    bits_per_token: float
    halfwidth: float
    trigram_entropy: float
    network_calls: int | None
    seconds: float | None


def judged(
    what: str, judge: NGram, ids: NDArray[np.int64], calls: int | None = None, seconds: float | None = None
) -> Row:
    """Mean bits per token of ids [N, L] with its 95% halfwidth, and the entropy of their 3-grams in bits."""
    each = judge.bits(ids)[-1].mean(1)
    numbers = ids[:, :-2] * judge.vocab_size**2 + ids[:, 1:-1] * judge.vocab_size + ids[:, 2:]
    entropy = token_entropy(numbers.ravel().tolist()) / np.log(2)
    return Row(what, float(each.mean()), float(1.96 * each.std(ddof=1) / len(each) ** 0.5), entropy, calls, seconds)


def compare(path: str, data: str, runs: Sequence[str], n: int, order: int, seed: int) -> list[Row]:
    """A row for the held-out text and one for each SAMPLER:STEPS."""
    folder = load_folder(path)
    text = np.concatenate([folder.tokenizer.encode(document) for document in open_corpus(data).documents()])
    cut = int(len(text) * (1 - HELD_OUT))
    judge = NGram(text[:cut], folder.process.vocab_size, order)
    blocks = text[cut:][: (len(text) - cut) // folder.length * folder.length].reshape(-1, folder.length)
    rows = [judged("held-out text", judge, blocks[:: max(1, len(blocks) // n)][:n])]
    print(line(rows[-1]), flush=True)
    for run in runs:
        sampler, _, steps = run.partition(":")
        network, start = CountingNetwork(folder.model), time.perf_counter()
        drawn = cedd.sample(
            network,
            folder.process,
            (n, folder.length),
            method=folder.method,
            sampler=sampler,
            steps=int(steps or 1),
            generator=torch.Generator().manual_seed(seed),
        )
        rows.append(judged(run, judge, drawn.numpy(), network.calls, time.perf_counter() - start))
        print(line(rows[-1]), flush=True)
    return rows


def line(row: Row) -> str:
    """A row of a Markdown table."""
    calls = "" if row.network_calls is None else f"{row.network_calls:,}"
    bits = f"{row.bits_per_token:.3f} ± {row.halfwidth:.3f}"
    return f"| {row.what} | {bits} | {row.trigram_entropy:.2f} | {calls} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="a run's folder")
    parser.add_argument("--data", default="python-manual", help="the corpus it was trained on")
    parser.add_argument("--samplers", nargs="+", default=RUNS, metavar="SAMPLER:STEPS")
    parser.add_argument("-n", type=int, default=256, help="samples of each")
    parser.add_argument("--order", type=int, default=3, help="the judge's n")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="also write the rows to this file")
    options = parser.parse_args()
    print(f"| samples | bits per token ({options.order}-gram judge) | 3-gram entropy, bits | network calls |")
    print("|---|--:|--:|--:|")
    rows = compare(options.run, options.data, options.samplers, options.n, options.order, options.seed)
    if options.json:
        Path(options.json).write_text(json.dumps([asdict(row) for row in rows]), encoding="utf-8")


if __name__ == "__main__":
    main()
