"""The sampling speed of two versions of the package, alternated on one machine, as a ratio with an interval.

    git worktree add /tmp/before COMMIT
    python benchmarks/compare_sampling.py /tmp/before/src src --steps 128 --json compared.json

One process per version holds the networks of `cedd bench sample`, which have random weights. Rounds measure all rows
with the first version before the second, then in the other order; the first rounds warm up and are dropped. The ratio
of a row is the geometric mean over rounds of second / first, with Student's 95% interval.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from helps import parser_of

ROWS = (
    "cedd-star/absorb:analytic",
    "cedd-star/absorb:first-hitting",
    "bayes/roulette:analytic",
    "bayes/uniform:analytic",
)


@dataclass(frozen=True)
class Compared:
    """A row of both versions: median seconds per batch, network calls, and the ratio of times with its interval."""

    row: str
    calls: int
    seconds: tuple[float, float]
    ratio: float
    ci95: tuple[float, float] | None
    rounds: int


def compared(row: str, calls: int, first: list[float], second: list[float]) -> Compared:
    """The times of both versions in the same rounds."""
    logs = [math.log(b / a) for a, b in zip(first, second, strict=True)]
    mean, interval = statistics.fmean(logs), None
    if len(logs) > 1:
        from cedd.bounds.estimate import student_quantile  # not for versions before it

        half = student_quantile(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
        interval = (math.exp(mean - half), math.exp(mean + half))
    seconds = (statistics.median(first), statistics.median(second))
    return Compared(row, calls, seconds, math.exp(mean), interval, len(logs))


# ----------------------------------------------------------------------------------------------------------------
# The process of a version: it reads rows and writes their seconds


def serve(options: argparse.Namespace) -> None:
    """Answer each row of the standard input with [seconds, calls of the network]."""
    import torch

    from cedd.apps.bench.sample import CountingNetwork, config_from_preset, random_network
    from cedd.process import PROCESSES
    from cedd.samplers import GraphedNetwork, sample

    batch, length = map(int, options.shape.split("x"))
    device, shape = torch.device(options.device), (batch, length)
    torch.set_num_threads(1)
    made: dict[str, tuple[Any, Any]] = {}
    for line in sys.stdin:
        pair, _, sampler = line.strip().partition(":")
        if pair not in made:
            process = PROCESSES[pair.partition("/")[2]](options.vocab)
            sizes = {"vocab_size": process.vocab_size, "has_mask": process.has_mask, "length": length}
            model = random_network(config_from_preset(options.preset, **sizes), device, 0)
            made[pair] = (GraphedNetwork(model, batch, length) if device.type == "cuda" else model), process
        network, process = made[pair]
        counting, generator = CountingNetwork(network), torch.Generator().manual_seed(0)
        how = {"method": pair.partition("/")[0], "sampler": sampler, "steps": options.steps}
        start = _now(device)
        sample(counting, process, shape, generator=generator, device=device, **how)
        print(json.dumps([_now(device) - start, counting.calls]), flush=True)


def _now(device: Any) -> float:
    """Seconds, once the device has done what it was given."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)
    return time.perf_counter()


def _refused(options: argparse.Namespace) -> str | None:
    """A one-line error that both versions would raise, if any."""
    import torch

    for source in options.source:
        if not (source / "cedd").is_dir():
            return f"{source} does not hold the package cedd; name a src folder of it"
    if re.fullmatch(r"[1-9]\d*x[1-9]\d*", options.shape) is None:
        return f"a shape is SEQUENCESxPOSITIONS, such as 64x128 (got {options.shape!r})"
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        return "there is no CUDA device here; use --device cpu"
    return None


class Version:
    """The process of one version of the package."""

    def __init__(self, source: Path, arguments: list[str]) -> None:
        paths = [str(source.resolve()), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, *arguments, "--serve"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)

    def time(self, row: str) -> tuple[float, int]:
        """Seconds per batch, and the number of network calls."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(row, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"a version ended at {row}; its message is above")
        seconds, calls = json.loads(answer)
        return seconds, calls

    def end(self) -> None:
        """Let the process end."""
        self._process.communicate()


# ----------------------------------------------------------------------------------------------------------------
# The rounds


def main(arguments: list[str] | None = None) -> list[Compared]:
    """Compare the versions, print a line per row, and write JSON after every round."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = parser_of(__doc__)
    parser.add_argument("source", nargs=2, type=Path, help="folders that hold the package `cedd`")
    parser.add_argument("--rows", nargs="+", default=ROWS, help="METHOD/PROCESS:SAMPLER")
    parser.add_argument("--device", default="cuda", help="cuda, cpu or cuda:1")
    parser.add_argument("--preset", default="small", help="the size of the network")
    parser.add_argument("--vocab", type=int, default=50257, help="tokens of the vocabulary")
    parser.add_argument("--shape", default="64x128", help="sequences x positions")
    parser.add_argument("--steps", type=int, default=1024, help="steps of the samplers")
    parser.add_argument("--rounds", type=int, default=10, help="rounds that count")
    parser.add_argument("--drop", type=int, default=1, help="rounds before them, which record graphs")
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        serve(options)
        return []
    if (why := _refused(options)) is not None:
        parser.exit(2, f"compare_sampling: {why}\n")
    versions = [Version(source, arguments) for source in options.source]
    times: dict[str, tuple[list[float], list[float]]] = {row: ([], []) for row in options.rows}
    calls, found = dict.fromkeys(options.rows, 0), list[Compared]()
    for number in range(options.drop + options.rounds):
        for row in options.rows:
            for which in (0, 1) if number % 2 == 0 else (1, 0):
                seconds, calls[row] = versions[which].time(row)
                if number >= options.drop:
                    times[row][which].append(seconds)
        if number < options.drop:
            continue
        found = [compared(row, calls[row], *times[row]) for row in options.rows]
        if options.json is not None:
            options.json.write_text(json.dumps([asdict(row) for row in found], indent=1))
    for version in versions:
        version.end()
    for row in found:
        interval = "" if row.ci95 is None else f" [{row.ci95[0]:.4f}, {row.ci95[1]:.4f}]"
        before, after = row.seconds
        print(f"{row.row}: {before:.4f} s, {after:.4f} s, {row.calls} calls; ratio {row.ratio:.4f}{interval}")
    return found


if __name__ == "__main__":
    main()
