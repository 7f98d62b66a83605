"""How often the 95% interval of a bound holds the truth: every method on every process, against enumeration.

    python benchmarks/bound_coverage.py                        # hours of one core; goes on where it was interrupted
    python benchmarks/bound_coverage.py --processes uniform    # some of the cells; --bounds tight, too
    python benchmarks/bound_coverage.py --table                # the table of docs/evaluation.md

A cell is a method, a process and a bound. Its network is random: a smooth function of noisy sequence and time, so bad
that costs are uneven and a few draws can make up much of the estimate, which is the hard case. V = 3 and L = 2, so that
the exact bound of each of the 9 sequences is known. Each repetition draws N = 64 sequences and estimates their bound by
4 draws of each. Counted are

    population     intervals (ci95) that hold the exact bound of the population the sequences are drawn from
    these          Monte Carlo intervals (fixed_set) that hold the exact bound of these N sequences
    independent    Student's intervals of the paper's independent draws that would hold the population's: not given

A share of R repetitions has the binomial error sqrt(p (1-p) / R): 2.2% for p = 95% and R = 100.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import cedd
from cedd.bounds.estimate import student_quantile
from cedd.dynamics import Bound
from cedd.storage import write_json

V, L = 3, 2
PROCESSES: dict[str, cedd.TokenProcess] = {
    "absorb": cedd.absorb(V),
    "uniform": cedd.uniform(V),
    "roulette .95": cedd.roulette(V, 0.95),
    "roulette .5": cedd.roulette(V, 0.5),
    "eroulette": cedd.eroulette(V, mask_share=cedd.PowerShare(0.2, 0.9)),
}
METHODS = ("sedd", "sedds", "cedd", "bayes", "dfm")
"""One for each parameterization: cedd-star and ceddt have cedd's bound, bayes-star has that of bayes."""
RESULTS = Path(__file__).with_name("results") / "bound-coverage.json"


@dataclass(frozen=True)
class Cell:
    """What is covered, and by how much it is measured."""

    method: str
    process: str
    bound: Bound
    sequences: int = 64
    draws: int = 4
    repetitions: int = 100
    seed: int = 0

    @property
    def name(self) -> str:
        return f"{self.method}, {self.process}, {self.bound}"


def cells(processes: list[str], repetitions: int, bounds: Sequence[Bound] = ("tight", "j1")) -> Iterator[Cell]:
    """Every method on every process that it takes. j2 is j1 and a constant: its intervals are the same."""
    for process in processes:
        for method in METHODS:
            if method == "dfm" and process != "absorb":
                continue
            for bound in bounds:
                if bound in cedd.get_method(method).dynamics.bounds:
                    yield Cell(method, process, bound, repetitions=repetitions)


def random_network(process: cedd.TokenProcess, seed: int) -> Callable[[Tensor, Tensor], Tensor]:
    """level + slope sin(sigma + phase), each standard normal, for every noisy sequence, position and token."""
    n = process.num_states
    generator = torch.Generator().manual_seed(seed)
    level, slope, phase = torch.randn(3, n**L, L, V, generator=generator, dtype=torch.float64)
    place = n ** torch.arange(L - 1, -1, -1)

    def model(x: Tensor, sigma: Tensor) -> Tensor:
        index = (x * place).sum(-1)
        return level[index] + slope[index] * torch.sin(sigma.double()[:, None, None] + phase[index])

    return model


def exact_values(model: Callable[..., Tensor], cell: Cell) -> Tensor:
    """The exact bound of each sequence, [V^L]: of a population that is that sequence alone."""
    only = torch.eye(V**L, dtype=torch.float64).reshape(-1, *[V] * L)
    process = PROCESSES[cell.process]
    exact = [cedd.exact_bound(model, process, p0, method=cell.method, bound=cell.bound) for p0 in only]
    return torch.tensor(exact, dtype=torch.float64)


def measure(cell: Cell) -> dict[str, Any]:
    """Shares of intervals that hold the truth, and the error that was said over that which was made."""
    process, started = PROCESSES[cell.process], time.perf_counter()
    model = random_network(process, seed=11)
    source = torch.Generator().manual_seed(cell.seed)
    p0 = torch.softmax(torch.randn(V**L, generator=torch.Generator().manual_seed(12), dtype=torch.float64), 0)
    exact = exact_values(model, cell)
    truth = float(p0 @ exact)
    population = these = independent = below = 0
    misses, errors = [], []
    for _ in range(cell.repetitions):
        index = torch.multinomial(p0, cell.sequences, replacement=True, generator=source)
        data = torch.stack(torch.unravel_index(index, (V,) * L), 1)
        options = {"method": cell.method, "bound": cell.bound, "draws": cell.draws, "batch": 8192}
        found = cedd.estimate_bound(model, process, data, generator=source, **options)
        low, high = found.sequence_ci95
        population += low <= truth <= high
        below += high < truth
        low, high = found.monte_carlo_ci95
        these += low <= float(exact[index].mean()) <= high
        if cell.bound == "j1":
            plain = cedd.estimate_bound(model, process, data, generator=source, sampling="independent", **options)
            half = student_quantile(cell.sequences - 1) * plain.stderr
            independent += abs(plain.nats_per_token - truth) <= half
        misses.append(found.nats_per_token - truth)
        errors.append(found.sequence_stderr)
    made = math.sqrt(sum(x**2 for x in misses) / len(misses))
    return {
        **asdict(cell),
        "exact": truth,
        "population": population / cell.repetitions,
        "population_below": below / cell.repetitions,
        "these": these / cell.repetitions,
        "independent": independent / cell.repetitions if cell.bound == "j1" else None,
        "said_over_made": math.sqrt(sum(x**2 for x in errors) / len(errors)) / made,
        "seconds": round(time.perf_counter() - started, 1),
    }


def results() -> dict[str, Any]:
    """The cells that have been measured, by name."""
    return json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}


def table() -> str:
    """The results as docs/evaluation.md shows them."""
    rows = ["| method | process | bound | exact | population | these sequences | independent draws |"]
    rows.append("|---|---|---|---|---|---|---|")
    for row in results().values():
        bound = "`tight`" if row["bound"] == "tight" else "`j1`, `j2`"
        shown = [row[name] for name in ("population", "these", "independent")]
        shares = " | ".join("" if share is None else f"{share:.1%}" for share in shown)
        rows.append(f"| `{row['method']}` | {row['process']} | {bound} | {row['exact']:.2f} | {shares} |")
    return "\n".join(rows)


def main() -> None:
    """Measure the cells that are missing, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", nargs="+", choices=PROCESSES, default=list(PROCESSES))
    parser.add_argument("--bounds", nargs="+", choices=("tight", "j1"), default=["tight", "j1"])
    parser.add_argument("--repetitions", type=int, default=100)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        print(table())
        return
    for cell in cells(options.processes, options.repetitions, options.bounds):
        if results().get(cell.name, {}).get("repetitions") == cell.repetitions:
            continue
        found = measure(cell)
        print(json.dumps(found), flush=True)
        merged = results() | {cell.name: found}
        order = [one.name for one in cells(list(PROCESSES), options.repetitions)]
        write_json(RESULTS, {name: merged[name] for name in order if name in merged}, indent=2)


if __name__ == "__main__":
    main()
