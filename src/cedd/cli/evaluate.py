"""`cedd evaluate`: the perplexity of a run on text, with an interval; or of two runs, compared."""

from __future__ import annotations

import json
import math
import time
from typing import Any

from rich.table import Table

from cedd.cli.arguments import Evaluate
from cedd.cli.console import PlainConsole
from cedd.cli.progress import progress_bar
from cedd.device import pick_device
from cedd.dynamics import Corrector
from cedd.evaluation.perplexity import (
    PLOT_SUFFIXES,
    VALUE_SUFFIXES,
    Comparison,
    Measurement,
    asked_bounds,
    check_comparable,
    choose_sequences,
    compare,
    comparison_record,
    load_data,
    measure,
    measurement_record,
    save_per_sequence,
    save_plot,
)
from cedd.models.folder import ModelFolder, load_folder
from cedd.storage import check_writable, json_sha256


def run(arguments: Evaluate) -> int:
    """Measure one run, or two and their difference."""
    tolerance = parse_share(arguments.tolerance)
    check_writable(arguments.plot, PLOT_SUFFIXES)
    check_writable(arguments.per_sequence, VALUE_SUFFIXES)
    if arguments.batch < 1:
        raise ValueError(f"a batch has at least one sequence; got {arguments.batch}")
    device = pick_device(arguments.device)
    paths = [path for path in (arguments.model, arguments.other) if path is not None]
    folders = [load_folder(path, device) for path in paths]
    for folder in folders:
        asked_bounds(folder, arguments.bound)
        check_comparable(folders[0], folder)
    started = time.perf_counter()
    where = {"split": arguments.split, "root": arguments.data_root, "workers": arguments.workers}
    loaded = load_data(arguments.data, folders[0].tokenizer, folders[0].length, **where)
    data, protocol = choose_sequences(loaded, arguments.max_sequences, folders[0].tokenizer, arguments.most_unknown)

    def measured(folder: ModelFolder) -> Measurement:
        with progress_bar(folder.path.name, not arguments.json) as progress:
            return measure(
                folder,
                data,
                protocol,
                bound=arguments.bound,
                draws=arguments.draws,
                tolerance=tolerance,
                sampling=arguments.sampling,
                time_floor=arguments.time_floor,
                corrector=None if arguments.corrector is None else Corrector(arguments.corrector),
                fixed_set=arguments.fixed_set,
                batch=arguments.batch,
                seed=arguments.seed,
                progress=progress,
            )

    results = [measured(folder) for folder in folders]
    comparison = compare(results[0].main, results[1].main) if len(results) > 1 else None
    seconds = time.perf_counter() - started
    if arguments.json:
        print(json.dumps(_record(arguments, results, comparison, protocol, seconds)))
    else:
        _print(PlainConsole(), results, comparison, protocol, tolerance)
    if arguments.per_sequence is not None:
        save_per_sequence(arguments.per_sequence, results)
    if arguments.plot is not None:
        save_plot(arguments.plot, results)
    return 0


def parse_share(text: str | None) -> float | None:
    """0.5% or 0.005 as a number; None as it is."""
    if text is None:
        return None
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        raise ValueError(f"a tolerance is a share such as 0.5% or 0.005; got {text!r}") from None
    if not 0 < value < 1:
        raise ValueError(f"a tolerance lies between 0 and 100%; got {text!r}")
    return value


# ----------------------------------------------------------------------------------------------------------------
# What is printed


def _record(
    arguments: Evaluate,
    results: list[Measurement],
    comparison: Comparison | None,
    protocol: dict[str, Any],
    seconds: float,
) -> dict[str, Any]:
    record: dict[str, Any] = {
        "data": protocol,
        "runs": [measurement_record(result) for result in results],
        "seed": arguments.seed,
        "device": arguments.device,
        "seconds": round(seconds, 3),
    }
    if comparison is not None:
        record["comparison"] = comparison_record(comparison)
    return record | {"record_sha256": json_sha256({"data": record["data"], "runs": record["runs"]})}


def _print(
    console: PlainConsole,
    results: list[Measurement],
    comparison: Comparison | None,
    protocol: dict[str, Any],
    tolerance: float | None,
) -> None:
    split = f" ({protocol['split']})" if protocol.get("split") else ""
    console.print(
        f"{protocol['set']}{split}: {protocol['evaluated_sequences']} of {protocol['blocks']} sequences of "
        f"{protocol['length']} tokens, {protocol['remainder_tokens']} tokens left over; {protocol['packing']}; "
        f"detokenizer {protocol['detokenizer']}; tokenizer {protocol['tokenizer']}; "
        f"protocol {protocol['protocol_sha256'][:12]}"
    )
    if protocol["unknown_share"] > 0:
        console.print(
            f"{protocol['unknown_share']:.2%} of the tokens stand for characters that the model does not know"
        )
    for result in results:
        console.print(_table(result))
        for note in _notes(result, tolerance):
            console.print(note)
    if comparison is not None:
        low, high = comparison.ci95
        ratio_low, ratio_high = comparison.perplexity_ratio_ci95
        console.print(
            f"{results[1].folder.name} less {results[0].folder.name} ({comparison.bound}, paired by sequence): "
            f"{comparison.difference:+.4f} nats per token [{low:+.4f}, {high:+.4f}], perplexity x "
            f"{comparison.perplexity_ratio:.4f} [{ratio_low:.4f}, {ratio_high:.4f}]"
        )


def _table(result: Measurement) -> Table:
    name = (result.folder.process.spec or {}).get("name", "")
    table = Table(title=f"{result.folder.name}: {result.folder.method.name} on {name}")
    table.add_column("")
    for bound in result.bounds:
        table.add_column(bound, justify="right")

    estimates = list(result.bounds.values())
    table.add_row("nats per token", *[f"{e.nats_per_token:.4f}" for e in estimates])
    table.add_row("  standard error", *[f"{e.stderr:.4f}" for e in estimates])
    table.add_row("  95% interval", *[_interval(e.ci95, 4) for e in estimates])
    table.add_row("  Monte Carlo standard error", *[f"{e.monte_carlo_stderr:.4f}" for e in estimates])
    table.add_row("  of which terminal", *[f"{e.terminal:.4f}" for e in estimates])
    table.add_row("bits per token", *[f"{e.bits_per_token:.4f}" for e in estimates])
    table.add_row("perplexity per token", *[f"{e.perplexity:.2f}" for e in estimates])
    table.add_row("  95% interval", *[_interval(e.perplexity_ci95, 2) for e in estimates])
    units = [result.per_unit(e) for e in estimates]
    for unit in units[0]:
        table.add_row(unit.replace("_", " "), *[f"{u[unit]:.4f}" if u[unit] < 1e4 else f"{u[unit]:.4g}" for u in units])
    table.add_row("network evaluations", *[f"{e.evaluations:,}" for e in estimates])
    return table


def _interval(ends: tuple[float, float], digits: int) -> str:
    return "none" if math.isnan(ends[0]) else f"[{ends[0]:.{digits}f}, {ends[1]:.{digits}f}]"


def _notes(result: Measurement, tolerance: float | None) -> list[str]:
    """What a reader must know to read the table."""
    estimate = result.main
    notes: list[str] = []
    if math.isinf(estimate.nats_per_token):
        notes.append(
            "The bound is infinite: the cost of clean tokens grows like 1/t. --time-floor 1e-3 stops the path there "
            "and counts what its last step costs: a finite bound that is as true."
        )
    elif tolerance is not None and not estimate.reached:
        notes.append(
            f"The interval is wider than {tolerance:.2%}: the sequences differ more than their draws scatter. "
            "More sequences narrow it; --fixed-set asks about these ones only."
        )
    if estimate.heavy_tailed:
        notes.append(
            "There is no interval: a few independent draws near t = 0 make up much of the estimate, and an estimate "
            "that missed them would look precise. --sampling stratified covers them."
        )
    if estimate.bound != "tight":
        notes.append(
            f"{estimate.bound} is the paper's and no bound: its terminal term and t < {estimate.earliest_time:g} are "
            "left out. tight keeps them."
        )
    elif estimate.earliest_time > 0:
        notes.append(f"The path ends at t = {estimate.earliest_time:g}; the last step's cost is part of the bound.")
    return notes
