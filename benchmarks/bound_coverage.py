"""Coverage of the 95% intervals of a bound: every method on every process, against enumeration.

    python benchmarks/bound_coverage.py --workers 10           # continues where it was interrupted
    python benchmarks/bound_coverage.py --processes uniform    # some cells; also --methods and --bounds
    python benchmarks/bound_coverage.py --processes "roulette .05" "hybrid .99" --bounds tight    # the hard ones
    python benchmarks/bound_coverage.py --networks sharp near-zero --repetitions 400 --sequences 500    # overconfident
    python benchmarks/bound_coverage.py --table                # prints every table, writes docs/results/intervals.md

A cell is a method, a process, a bound and a number of sequences N. Its networks are random smooth functions of noisy
sequence and time. They are bad, so that costs are uneven and a few draws can dominate the estimate, which is the hard
case. With V = 3 and L = 2 the exact bound of each of the 9 sequences is known. Each repetition draws N sequences and
estimates their bound from 4 draws per sequence.

Overconfident networks of `bayes` have V = 7 and L = 5 and read the token of each position only, so that the exact bound
of a sequence is the mean of those of its tokens. `sharp`: random outputs times 6, with many probabilities of e^-20.
`near-zero`: one token of seven has a probability of about e^-15 for every input.

Each row counts

    population     intervals (ci95) that contain the exact bound of the population of the sequences
    these          Monte Carlo intervals (fixed_set) that contain the exact bound of these N sequences
    independent    Student's intervals from the paper's independent draws that contain the population's (cedd prints
                   no such interval)

and the mean half-widths of the first two for each network.

A share of R repetitions has the binomial error sqrt(p (1-p) / R): 0.7% for p = 95% and R = 1000. A repetition takes
about 0.2 s on a slow core with N = 64.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from helps import parser_of
from pages import write_page
from torch import Tensor

import cedd
from cedd.bounds.estimate import student_quantile
from cedd.dynamics import Bound
from cedd.storage import write_json

V, L = 3, 2
WIDE_V, WIDE_L = 7, 5
PROCESSES: dict[str, cedd.TokenProcess] = {
    "absorb": cedd.absorb(V),
    "uniform": cedd.uniform(V),
    "roulette .95": cedd.roulette(V, 0.95),
    "roulette .5": cedd.roulette(V, 0.5),
    "eroulette": cedd.eroulette(V, mask_share=cedd.PowerShare(0.2, 0.9)),
}
HARD: dict[str, cedd.TokenProcess] = {"roulette .05": cedd.roulette(V, 0.05), "hybrid .99": cedd.hybrid(V, 0.99)}
"""Processes that shuffle nearly every token before they mask one. Rare draws dominate the cost of ratio methods."""
_SCHEDULES = {"cosine": cedd.Cosine(), "geometric": cedd.Geometric(1e-4, 20.0), "cubic": cedd.Polynomial(3.0)}
WIDE: dict[str, cedd.TokenProcess] = {
    f"{name}, {kind}": process
    for kind, schedule in _SCHEDULES.items()
    for name, process in (
        ("uniform", cedd.uniform(WIDE_V, schedule)),
        ("roulette .3", cedd.roulette(WIDE_V, 0.3, schedule)),
    )
}
"""The processes of the overconfident networks."""
ALL = PROCESSES | HARD | WIDE
OVERCONFIDENT = ("sharp", "near-zero")
METHODS = ("sedd", "sedds", "cedd", "bayes", "dfm")
"""One method per parameterization: cedd-star and ceddt have the bound of cedd, bayes-star that of bayes."""
RESULTS = Path(__file__).with_name("results") / "bound-coverage.json"
PAGE = Path(__file__).parents[1] / "docs" / "results" / "intervals.md"


@dataclass(frozen=True)
class Cell:
    """What is measured, and with how many repetitions."""

    method: str
    process: str
    bound: Bound
    sequences: int = 64
    draws: int = 4
    networks: int = 5
    repetitions: int = 1000
    """The total over all networks."""
    kind: str = "random"

    @property
    def name(self) -> str:
        kind = "" if self.kind == "random" else f", {self.kind}"
        return f"{self.method}, {self.process}{kind}, {self.bound}, N = {self.sequences}"


def cells(
    processes: Sequence[str],
    bounds: Sequence[Bound] = ("tight", "j1"),
    sequences: int = 64,
    repetitions: int = 1000,
    methods: Sequence[str] = METHODS,
) -> Iterator[Cell]:
    """Every method on every process that it supports. j2 is j1 plus a constant, so its intervals cover alike."""
    for process in processes:
        for method in methods:
            if method == "dfm" and process != "absorb":
                continue
            for bound in bounds:
                if bound in cedd.get_method(method).dynamics.bounds:
                    yield Cell(method, process, bound, sequences, repetitions=repetitions)


def overconfident_cells(
    kinds: Sequence[str], processes: Sequence[str], sequences: int, repetitions: int
) -> Iterator[Cell]:
    """Overconfident networks of `bayes` on each process, `tight`."""
    for process in processes:
        for kind in kinds:
            yield Cell("bayes", process, "tight", sequences, repetitions=repetitions, kind=kind)


def overconfident_network(process: cedd.TokenProcess, kind: str, seed: int) -> Callable[[Tensor, Tensor], Tensor]:
    """A network with the same outputs [n, V] for the current token at every position and time."""
    generator = torch.Generator().manual_seed(seed)
    outputs = torch.randn(process.num_states, WIDE_V, generator=generator, dtype=torch.float64)
    if kind == "sharp":
        outputs = 6 * outputs
    else:
        outputs[:, 0] -= 15

    return lambda x, sigma: outputs[x]


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
    """The exact bound of each sequence, [V] * L, from populations that contain only that sequence."""
    process = ALL[cell.process]

    def of_each(vocab_size: int, length: int) -> Tensor:
        only = torch.eye(vocab_size**length, dtype=torch.float64).reshape(-1, *[vocab_size] * length)
        exact = [cedd.exact_bound(model, process, p0, method=cell.method, bound=cell.bound) for p0 in only]
        return torch.tensor(exact, dtype=torch.float64).reshape([vocab_size] * length)

    if cell.kind == "random":
        return of_each(V, L)
    of_token = of_each(WIDE_V, 1)
    by_position = [of_token.reshape([WIDE_V if axis == i else 1 for axis in range(WIDE_L)]) for i in range(WIDE_L)]
    return sum(by_position, torch.zeros([WIDE_V] * WIDE_L, dtype=torch.float64)) / WIDE_L


@dataclass
class Count:
    """The counts of the repetitions with one network."""

    exact: float
    population: int = 0
    below: int = 0
    these: int = 0
    independent: int = 0
    squared_miss: float = 0.0
    squared_error: float = 0.0
    population_width: float = 0.0
    these_width: float = 0.0


def count(cell: Cell, network: int, repetitions: int) -> Count:
    """Repetitions with one network: intervals that contain the truth, actual errors and reported errors."""
    process = ALL[cell.process]
    if cell.kind == "random":
        model = random_network(process, seed=network)
    else:
        model = overconfident_network(process, cell.kind, seed=network)
    source = torch.Generator().manual_seed(1000 + network)
    by_sequence = exact_values(model, cell)
    shape, exact = by_sequence.shape, by_sequence.reshape(-1)
    p0 = torch.softmax(torch.randn(len(exact), generator=torch.Generator().manual_seed(12), dtype=torch.float64), 0)
    truth = float(p0 @ exact)
    options = {"method": cell.method, "bound": cell.bound, "draws": cell.draws, "batch": 8192, "generator": source}
    seen = Count(truth)
    for _ in range(repetitions):
        index = torch.multinomial(p0, cell.sequences, replacement=True, generator=source)
        data = torch.stack(torch.unravel_index(index, shape), 1)
        found = cedd.estimate_bound(model, process, data, **options)
        low, high = found.sequence_ci95
        seen.population += low <= truth <= high
        seen.below += high < truth
        seen.population_width += high - low
        low, high = found.monte_carlo_ci95
        seen.these += low <= float(exact[index].mean()) <= high
        seen.these_width += high - low
        if cell.bound == "j1":
            plain = cedd.estimate_bound(model, process, data, sampling="independent", **options)
            half = student_quantile(cell.sequences - 1) * plain.stderr
            seen.independent += abs(plain.nats_per_token - truth) <= half
        seen.squared_miss += (found.nats_per_token - truth) ** 2
        seen.squared_error += found.sequence_stderr**2
    return seen


def measure(cell: Cell) -> dict[str, Any]:
    """Shares of intervals that contain the truth, and the ratio of reported to actual error."""
    started = time.perf_counter()
    each = -(-cell.repetitions // cell.networks)
    counts = [count(cell, network, each) for network in range(cell.networks)]

    def share(name: str) -> float:
        return sum(getattr(seen, name) for seen in counts) / (each * cell.networks)

    return {
        "name": cell.name,
        **asdict(cell),
        "exact": [seen.exact for seen in counts],
        "population": share("population"),
        "population_below": share("below"),
        "population_of_networks": [seen.population / each for seen in counts],
        "these": share("these"),
        "these_of_networks": [seen.these / each for seen in counts],
        "independent": share("independent") if cell.bound == "j1" else None,
        "population_half_widths": [seen.population_width / 2 / each for seen in counts],
        "these_half_widths": [seen.these_width / 2 / each for seen in counts],
        "said_over_made": [math.sqrt(seen.squared_error / seen.squared_miss) for seen in counts],
        "seconds": round(time.perf_counter() - started, 1),
    }


def results(file: Path) -> dict[str, Any]:
    """The measured cells, by name."""
    return json.loads(file.read_text()) if file.is_file() else {}


SHARES = {"population": "population", "these": "fixed set", "independent": "independent draws"}
"""The shares of intervals, with their column headings."""


def table(rows: Sequence[dict[str, Any]], wanted: Sequence[str]) -> str:
    """The shares wanted, in Markdown: a row per method, process and bound, and columns for each number of sequences."""
    numbers = sorted({row["sequences"] for row in rows})
    heads = [f"{SHARES[share]}, N = {number}" for number in numbers for share in wanted]
    lines = [f"| method | process | bound | {' | '.join(heads)} |", f"|---|---|---|{'--:|' * len(heads)}"]
    found: dict[tuple[str, ...], dict[int, dict[str, Any]]] = {}
    for row in rows:
        bound = "`tight`" if row["bound"] == "tight" else "`j1`, `j2`"
        kind = "" if row.get("kind", "random") == "random" else f", {row['kind']}"
        found.setdefault((f"`{row['method']}`", f"{row['process']}{kind}", bound), {})[row["sequences"]] = row
    for names, by_number in found.items():
        shares = [by_number.get(number, {}).get(share) for number in numbers for share in wanted]
        lines.append(f"| {' | '.join((*names, *('' if share is None else f'{share:.1%}' for share in shares)))} |")
    return "\n".join(lines)


def summary(places: Mapping[str, Sequence[dict[str, Any]]]) -> str:
    """The lowest and highest shares for 64 sequences, in Markdown: a row per kind of network and bound."""
    lines = [f"| networks | bound | settings | {' | '.join(SHARES.values())} |"]
    lines.append(f"|---|---|--:|{'--:|' * len(SHARES)}")
    names = {"random": "random", "hard": "random, hardest processes", "overconfident": "overconfident"}
    for place, rows in places.items():
        for bound in dict.fromkeys(row["bound"] for row in rows):
            group = [row for row in rows if row["bound"] == bound and row["sequences"] == 64]
            cells: list[str] = []
            for share in SHARES:
                found = [row[share] for row in group if row[share] is not None]
                cells.append(f"{min(found):.1%} to {max(found):.1%}" if found else "")
            shown = "`tight`" if bound == "tight" else "`j1`, `j2`"
            lines.append(f"| {names[place]} | {shown} | {len(group)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def tables(found: dict[str, Any]) -> dict[str, str]:
    """Every table of the results by its name. docs/results/intervals.md shows "coverage"."""
    places: dict[str, list[dict[str, Any]]] = {}
    for row in found.values():
        overconfident = row.get("kind", "random") != "random"
        place = "overconfident" if overconfident else "hard" if row["process"] in HARD else "random"
        places.setdefault(place, []).append(row)
    intervals = ("population", "these")
    return {"coverage": summary(places)} | {
        f"coverage-{place}": table(rows, (*SHARES,) if place == "random" else intervals)
        for place, rows in places.items()
    }


def measured(missing: Sequence[Cell], workers: int) -> Iterator[dict[str, Any]]:
    """Results of the cells in any order, from this process or from processes with one thread each."""
    if workers == 1:
        yield from map(measure, missing)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for done in as_completed([pool.submit(measure, cell) for cell in missing]):
            yield done.result()


def run(wanted: Sequence[Cell], file: Path, workers: int) -> None:
    """Measure the cells that are missing or have too few repetitions, and save the file after each."""
    known = results(file)
    missing = [cell for cell in wanted if known.get(cell.name, {}).get("repetitions", 0) < cell.repetitions]
    order = [cell.name for n in (64, 1000) for cell in cells([*PROCESSES, *HARD], sequences=n)]
    order += [cell.name for n in (64, 500) for cell in overconfident_cells(OVERCONFIDENT, list(WIDE), n, 1)]
    for found in measured(missing, workers):
        print(json.dumps(found), flush=True)
        known[found["name"]] = found
        ordered = sorted(known, key=lambda name: order.index(name) if name in order else len(order))
        write_json(file, {name: known[name] for name in ordered}, indent=2)


def main() -> None:
    """Measure the cells that are missing, or write the tables."""
    parser = parser_of(__doc__)
    parser.add_argument("--processes", nargs="+", choices=ALL, help="processes of the cells")
    parser.add_argument(
        "--networks", nargs="+", choices=OVERCONFIDENT, help="overconfident networks of bayes instead of random ones"
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, help="methods of the cells")
    parser.add_argument(
        "--bounds",
        nargs="+",
        choices=("tight", "j1"),
        default=["tight", "j1"],
        help="bounds of the cells; the intervals of j2 cover like those of j1",
    )
    parser.add_argument("--sequences", type=int, default=64, help="sequences per repetition (N)")
    parser.add_argument("--repetitions", type=int, default=1000, help="repetitions per cell (R)")
    parser.add_argument("--workers", type=int, default=1, help="worker processes, one core each")
    parser.add_argument("--results", type=Path, default=RESULTS, help="results file")
    parser.add_argument(
        "--table", action="store_true", help="only print the tables, and write docs/results/intervals.md"
    )
    options = parser.parse_args()
    if options.table:
        made = tables(results(options.results))
        print("\n\n".join(made.values()))
        write_page(PAGE, made)
        return
    number, repetitions = options.sequences, options.repetitions
    if options.networks:
        wanted = overconfident_cells(options.networks, options.processes or list(WIDE), number, repetitions)
    else:
        wanted = cells(options.processes or list(PROCESSES), options.bounds, number, repetitions, options.methods)
    # Processes that shuffle take longest, so they run first.
    run(sorted(wanted, key=lambda cell: not ALL[cell.process].can_shuffle), options.results, options.workers)


if __name__ == "__main__":
    main()
