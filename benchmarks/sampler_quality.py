"""Whether fewer network calls cost quality: samplers of one model, judged by an n-gram model.

    cedd train char --data python-manual --process absorb --method cedd-star --length 64 --out runs/absorb
    python benchmarks/sampler_quality.py runs/absorb -n 256

The judge is a character n-gram model (Witten-Bell interpolation) of the corpus that the model was trained on. It is
independent of the model, so differences in the samples' bits per token are due to the sampler. The table also has the
difference from the first sampler, the share of the samples' words that occur in the corpus, the entropy of the samples'
own 3-grams, which is lower when a sampler repeats itself, the network calls per batch, and the bits per token of
held-out text, which a perfect model would reach. Intervals are 95%, over samples.

How many steps `english-char` needs (on a GPU; half a minute):

    mkdir text && for part in books wikipedia; do xzcat corpus/$part.txt.xz | head -c 12000000 > text/$part.txt; done
    python benchmarks/sampler_quality.py english-char --data text --order 6 -n 512 --device cuda \
        --samplers analytic:1024 analytic:256 analytic:128 analytic:64 analytic:32 analytic:16
"""

from __future__ import annotations

import json
import math
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helps import parser_of
from numpy.typing import NDArray

import cedd
from cedd.apps.bench.sample import CountingNetwork
from cedd.cli import run_command
from cedd.data.corpora import open_corpus
from cedd.evaluation.baselines import NGram
from cedd.evaluation.generative import token_entropy
from cedd.models.folder import load_folder
from cedd.samplers import GraphedNetwork, get_sampler

RUNS = ("first-hitting", "analytic:1024", "analytic:256", "analytic:64", "analytic:16", "analytic:4")
HELD_OUT, STRETCHES = 0.05, 50


@dataclass(frozen=True)
class Row:
    """One sampler's samples as the judge sees them."""

    what: str
    bits_per_token: float
    halfwidth: float
    known_words: float
    """The share of words, less the first and last of each text, that occur in the judge's text."""
    known_words_halfwidth: float
    trigram_entropy: float
    network_calls: int | None
    seconds: float | None


@dataclass(frozen=True)
class Judge:
    """What was learnt from the corpus: n-grams of tokens, and words."""

    grams: NGram
    words: frozenset[str]
    decode: Callable[[list[int]], str]

    def row(self, what: str, ids: NDArray[np.int64], calls: int | None = None, seconds: float | None = None) -> Row:
        """Means over texts ids [N, L] with their 95% halfwidths, and the entropy of all 3-grams in bits."""
        size = self.grams.vocab_size
        numbers = ids[:, :-2] * size**2 + ids[:, 1:-1] * size + ids[:, 2:]
        entropy = token_entropy(numbers.ravel().tolist()) / np.log(2)
        texts = [words_of(self.decode(text.tolist()))[1:-1] for text in ids]
        known = np.array([sum(word in self.words for word in words) / len(words) for words in texts if words])
        bits = mean_and_halfwidth(self.grams.bits(ids)[-1].mean(1))
        return Row(what, *bits, *mean_and_halfwidth(known), entropy, calls, seconds)


def mean_and_halfwidth(values: NDArray[np.float64]) -> tuple[float, float]:
    """Of the 95% interval."""
    return float(values.mean()), float(1.96 * values.std(ddof=1) / len(values) ** 0.5)


def words_of(text: str) -> list[str]:
    """Runs of letters, without capitals."""
    return re.findall(r"[^\W\d_]+", text.lower())


def split(text: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Most of the text, and the end of each of its stretches, which is held out."""
    parts = [np.split(part, [int(len(part) * (1 - HELD_OUT))]) for part in np.array_split(text, STRETCHES)]
    return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])


def compare(path: str, data: str, runs: Sequence[str], n: int, order: int, seed: int, device: str) -> list[Row]:
    """A row for the held-out text and one for each SAMPLER:STEPS."""
    folder = load_folder(path, device)
    for run in runs:
        get_sampler(run.partition(":")[0], folder.method).check(folder.method, folder.process)
    encode, decode = folder.tokenizer.encode, folder.tokenizer.decode
    text = np.concatenate([encode(document) for document in open_corpus(data).documents()])
    learnt, held_out = split(text)
    judge = Judge(NGram(learnt, folder.process.vocab_size, order), frozenset(words_of(decode(learnt.tolist()))), decode)
    blocks = held_out[: len(held_out) // folder.length * folder.length].reshape(-1, folder.length)
    rows = [judge.row("held-out text", blocks[:: max(1, len(blocks) // n)][:n])]
    print(line(rows[-1], None), flush=True)
    model: Any = folder.model
    if torch.device(device).type == "cuda":
        model = GraphedNetwork(folder.model, n, folder.length)
    for run in runs:
        sampler, _, steps = run.partition(":")
        network, start = CountingNetwork(model), time.perf_counter()
        drawn = cedd.sample(
            network,
            folder.process,
            (n, folder.length),
            method=folder.method,
            sampler=sampler,
            steps=int(steps or 1),
            generator=torch.Generator().manual_seed(seed + len(rows)),
            device=device,
        )
        seconds = time.perf_counter() - start
        rows.append(judge.row(run, drawn.cpu().numpy(), network.calls, seconds))
        print(line(rows[-1], rows[1] if len(rows) > 2 else None), flush=True)
    return rows


def line(row: Row, first: Row | None) -> str:
    """A row of a Markdown table, compared with the first sampler's: its samples are independent of these."""
    calls = "" if row.network_calls is None else f"{row.network_calls:,}"
    bits = f"{row.bits_per_token:.3f} ± {row.halfwidth:.3f}"
    over = ""
    if first is not None:
        over = f"{row.bits_per_token - first.bits_per_token:+.3f} ± {math.hypot(row.halfwidth, first.halfwidth):.3f}"
    words = f"{row.known_words:.1%} ± {row.known_words_halfwidth:.1%}"
    return f"| {row.what} | {bits} | {over} | {words} | {row.trigram_entropy:.2f} | {calls} |"


def main() -> None:
    """Print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("run", help="a run's folder, or a model by its name")
    parser.add_argument("--data", default="python-manual", help="the corpus it was trained on")
    parser.add_argument(
        "--samplers",
        nargs="+",
        default=RUNS,
        metavar="SAMPLER:STEPS",
        help="the first is compared with; first-hitting is for absorb only",
    )
    parser.add_argument("-n", type=int, default=256, help="samples of each")
    parser.add_argument("--order", type=int, default=3, help="the judge's n")
    parser.add_argument("--seed", type=int, default=0, help="of the samples")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:1")
    parser.add_argument("--json", help="also write the rows to this file")
    options = parser.parse_args()
    judge = f"bits per token ({options.order}-gram judge)"
    print(f"| samples | {judge} | over the first | known words | 3-gram entropy, bits | network calls |")
    print("|---|--:|--:|--:|--:|--:|")
    rows = compare(options.run, options.data, options.samplers, options.n, options.order, options.seed, options.device)
    if options.json:
        Path(options.json).write_text(json.dumps([asdict(row) for row in rows]), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(run_command("sampler_quality", main))
