"""`cedd evaluate`: the perplexity of a run on text, with an interval; or of several runs, in one table."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from typing import Any

from rich.table import Table
from torch import Tensor

from cedd.bounds.estimate import shown
from cedd.cli.arguments import Evaluate
from cedd.cli.console import PlainConsole
from cedd.cli.progress import progress_bar
from cedd.data.evaluation_sets import EvaluationData
from cedd.device import pick_device
from cedd.dynamics import Corrector
from cedd.evaluation.comparison import Reading, Scored, differences_record, figures_record, scored, units_of
from cedd.evaluation.perplexity import (
    PLOT_SUFFIXES,
    VALUE_SUFFIXES,
    Measurement,
    asked_bounds,
    compare,
    comparison_record,
    data_for,
    lost_text,
    measure,
    measurement_record,
    read_blocks,
    save_per_sequence,
    save_plot,
    with_order,
)
from cedd.models.folder import ModelFolder, load_folder
from cedd.samplers.orders import check_order
from cedd.storage import check_writable, json_sha256


def run(arguments: Evaluate) -> int:
    """Measure one run, or several and their differences."""
    tolerance = parse_share(arguments.tolerance)
    check_writable(arguments.plot, PLOT_SUFFIXES)
    check_writable(arguments.per_sequence, VALUE_SUFFIXES)
    if arguments.batch < 1:  # before the data are read
        raise ValueError(f"a batch has at least one sequence; got {arguments.batch}")
    if arguments.steps is not None and arguments.order is None:
        raise ValueError("--steps are those of a sampler's likelihood: add --order entropy, or another")
    if not arguments.models:
        raise ValueError("name at least one run: cedd evaluate RUN [RUN ...]")
    device = pick_device(arguments.device)
    folders = [load_folder(path, device) for path in arguments.models]
    for folder in folders:
        asked_bounds(folder, arguments.bound)
        if arguments.order is not None:
            check_order(arguments.order, folder.method, folder.process, arguments.steps)
    started = time.perf_counter()
    readings = [Reading(folder, _loaded(arguments, folder)) for folder in folders]
    units = units_of(readings, arguments.max_sequences)
    if arguments.per_sequence is not None and units.shares is not None:
        raise ValueError("these runs read different sequences; --per-sequence writes values of the same ones")
    chosen = [
        read_blocks(reading.data, blocks, reading.folder.tokenizer, arguments.most_unknown)
        for reading, blocks in zip(readings, units.blocks, strict=True)
    ]

    def measured(folder: ModelFolder, data: Tensor, protocol: dict[str, Any]) -> Measurement:
        with progress_bar(folder.path.name, not arguments.json) as progress:
            found = measure(
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
            if arguments.order is None:
                return found
            how = (arguments.order, arguments.steps, arguments.batch, arguments.fixed_set)
            return with_order(found, data, *how, progress)

    results = [measured(folder, *given) for folder, given in zip(folders, chosen, strict=True)]
    table = [scored(units, place, result) for place, result in enumerate(results)]
    seconds = time.perf_counter() - started
    if arguments.json:
        print(json.dumps(_record(arguments, table, seconds)))
    else:
        _print(PlainConsole(), table, tolerance)
    if arguments.per_sequence is not None:
        save_per_sequence(arguments.per_sequence, results)
    if arguments.plot is not None:
        save_plot(arguments.plot, results)
    return 0


def _loaded(arguments: Evaluate, folder: ModelFolder) -> EvaluationData:
    """The data as a run reads them."""
    options = {"split": arguments.split, "root": arguments.data_root, "workers": arguments.workers}
    return data_for(folder, arguments.data, wrap=arguments.wrap, **options)


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


def _record(arguments: Evaluate, table: list[Scored], seconds: float) -> dict[str, Any]:
    results = [run.measurement for run in table]
    record: dict[str, Any] = {
        "data": _in_common(results),
        "runs": [_run_record(run, _in_common(results)) for run in table],
        "seed": arguments.seed,
        "device": arguments.device,
        "seconds": round(seconds, 3),
    }
    if len(table) > 1:
        record["comparisons"] = [differences_record(run, table[0]) for run in table[1:]]
    if len(table) == 2 and table[0].units.shares is None:
        record["comparison"] = comparison_record(compare(results[0].main, results[1].main))
    return record | {"record_sha256": json_sha256({"data": record["data"], "runs": record["runs"]})}


def _in_common(results: list[Measurement]) -> dict[str, Any]:
    """What the protocols of all runs say."""
    first = results[0].protocol
    return {key: first[key] for key in first if all(result.protocol.get(key) == first[key] for result in results)}


def _run_record(run: Scored, common: dict[str, Any]) -> dict[str, Any]:
    """A run as JSON: on its own blocks, and, where these are not all runs' blocks, on the text in common."""
    record = measurement_record(run.measurement)
    if run.units.shares is None:
        return record
    own = {key: value for key, value in run.measurement.protocol.items() if key not in common}
    return record | {"data": own, "in_common": figures_record(run)}


def _print(console: PlainConsole, table: list[Scored], tolerance: float | None) -> None:
    results = [run.measurement for run in table]
    for protocol in (results[0].protocol,) if table[0].units.shares is None else [r.protocol for r in results]:
        _print_protocol(console, protocol)
    console.print(_table(results[0]) if len(table) == 1 else _table_of_runs(table))
    for result in results:
        for note in _notes(result, tolerance):
            console.print(note if len(results) == 1 else f"{result.folder.name}: {note}")
    if len(table) > 1:
        units, count = table[0].units, len(next(iter(table[0].values.values())))
        each = "" if units.shares is None else f" of {units.bytes:,.0f} bytes"
        console.print(f"Each run less the first, paired over the same {count} {units.name}{each}; 95% intervals.")


def _print_protocol(console: PlainConsole, protocol: Mapping[str, Any]) -> None:
    split = f" ({protocol['split']})" if protocol.get("split") else ""
    wrapped = " between the tokens that begin and end a document" if protocol.get("wrap") else ""
    console.print(
        f"{protocol['set']}{split}: {protocol['evaluated_sequences']} of {protocol['blocks']} sequences of "
        f"{protocol['length']} tokens{wrapped}, {protocol['remainder_tokens']} tokens left over; "
        f"{protocol['packing']}; detokenizer {protocol['detokenizer']}; tokenizer {protocol['tokenizer']}; "
        f"protocol {protocol['protocol_sha256'][:12]}"
    )
    if protocol["unknown_share"] > 0:
        console.print(
            f"{protocol['unknown_share']:.2%} of the tokens stand for characters that the model does not know"
        )


def _table_of_runs(runs: list[Scored]) -> Table:
    """A row for each run and bound, in units that do not depend on the tokenizer."""
    table = Table()
    for title in ("", "bound", "perplexity per token", "bits per byte", "perplexity per word", "bits less the first"):
        table.add_column(title, justify="left" if title in ("", "bound") else "right")
    for run in runs:
        folder = run.measurement.folder
        name = f"{folder.name}\n{folder.method.name} on {(folder.process.spec or {}).get('name', '')}"
        for bound, estimate in run.measurement.bounds.items():
            figure, less = run.figure(bound), None if run is runs[0] else run.less(runs[0], bound)
            table.add_row(
                name if bound == next(iter(run.values)) else "",
                bound,
                f"{shown(estimate.perplexity, 2)}\n{_interval(estimate.perplexity_ci95, 2)}",
                f"{figure.bits_per_byte:.4f}\n{_interval(figure.ci95)}",
                f"{shown(figure.per_word)}\n{_interval(figure.per_word_ci95)}",
                "" if less is None else f"{less.bits_per_byte:+.4f}\n{_interval(less.ci95)}",
            )
    return table


def _table(result: Measurement) -> Table:
    name = (result.folder.process.spec or {}).get("name", "")
    table = Table(title=f"{result.folder.name}: {result.folder.method.name} on {name}")
    table.add_column("")
    for bound in result.bounds:
        table.add_column(bound, justify="right")

    estimates = list(result.bounds.values())
    table.add_row("nats per token", *[f"{e.nats_per_token:.4f}" for e in estimates])
    table.add_row("  standard error", *[f"{e.stderr:.4f}" for e in estimates])
    table.add_row("  95% interval", *[_interval(e.ci95) for e in estimates])
    table.add_row("  Monte Carlo standard error", *[f"{e.monte_carlo_stderr:.4f}" for e in estimates])
    table.add_row("  of which terminal", *[f"{e.terminal:.4f}" for e in estimates])
    table.add_row("bits per token", *[f"{e.bits_per_token:.4f}" for e in estimates])
    table.add_row("perplexity per token", *[shown(e.perplexity, 2) for e in estimates])
    table.add_row("  95% interval", *[_interval(e.perplexity_ci95, 2) for e in estimates])
    units = [result.per_unit(e) for e in estimates]
    for unit in units[0]:
        table.add_row(unit.replace("_", " "), *[shown(u[unit]) for u in units])
    table.add_row("network evaluations", *[f"{e.evaluations:,}" for e in estimates])
    return table


def _interval(ends: tuple[float, float], digits: int = 4) -> str:
    low, high = (shown(end, digits) for end in ends)
    return "none" if math.isnan(ends[0]) else f"[{low}, {high}]"


def _notes(result: Measurement, tolerance: float | None) -> list[str]:
    """What a reader must know to read the table."""
    estimate = result.main
    notes: list[str] = []
    if math.isinf(estimate.nats_per_token):
        notes.append(f"The bound is infinite: {estimate.why_infinite or 'the network gives a token no chance'}.")
        if estimate.why_infinite and estimate.earliest_time == 0:
            notes.append(
                "--time-floor 1e-3 stops the path there and counts what its last step costs: a bound that is as true, "
                "and finite unless the network gives the text no chance."
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
    notes.extend(
        f"{bound} is the exact likelihood of a sampler, not of the process: the bound may be above or below it."
        for bound in result.bounds
        if bound.endswith("-order")
    )
    if lost := lost_text(result.folder.tokenizer):
        notes.append(lost)
    return notes
