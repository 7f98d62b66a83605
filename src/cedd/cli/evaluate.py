"""`cedd evaluate`: the perplexity of a model on text, with an interval, or a table of several models."""

from __future__ import annotations

import json
import math
from functools import partial

from rich.table import Table

from cedd.bounds.estimate import BoundEstimate, cannot_narrow, exp_or_inf, shown
from cedd.bounds.importance import MOST_ORDERS, ImportanceEstimate, first_hitting_law
from cedd.bounds.order_weights import WEIGHT_SUFFIXES
from cedd.cli.arguments import Evaluate
from cedd.cli.console import PlainConsole
from cedd.cli.progress import progress_bar
from cedd.evaluation.evaluate import PLOT_SUFFIXES, VALUE_SUFFIXES, EvaluationResult, evaluate
from cedd.evaluation.perplexity import ModelEvaluation, lost_text
from cedd.evaluation.tokens import TOKEN_SUFFIXES
from cedd.methods import Method
from cedd.storage import JSONMapping, check_writable

DIFFERENCE = "difference from the first (bits per byte; positive is worse)"


def run(arguments: Evaluate) -> int:
    """Evaluate, print the table or JSON, and write the files."""
    tolerance = parse_share(arguments.tolerance)
    check_writable(arguments.plot, PLOT_SUFFIXES)
    check_writable(arguments.per_sequence, VALUE_SUFFIXES)
    check_writable(arguments.tokens, TOKEN_SUFFIXES)
    check_writable(arguments.options.checkpoint, WEIGHT_SUFFIXES)
    if arguments.tokens is not None and (arguments.options.bound != "importance" or len(arguments.models) > 1):
        raise ValueError("--tokens needs --bound importance and a single run")
    if not arguments.models:
        raise ValueError("name at least one MODEL: cedd evaluate MODEL [MODEL ...]")
    result = evaluate(
        arguments.models,
        arguments.data,
        tolerance=tolerance,
        device=arguments.device,
        progress=partial(progress_bar, visible=not arguments.json),
        same_sequences=arguments.per_sequence is not None,
        **vars(arguments.options),
    )
    if arguments.json:
        print(json.dumps(result.record()))
    else:
        print_result(PlainConsole(), result, tolerance)
    if arguments.per_sequence is not None:
        result.save_per_sequence(arguments.per_sequence)
    if arguments.tokens is not None:
        result.save_tokens(arguments.tokens)
    if arguments.plot is not None:
        result.save_plot(arguments.plot)
    return 0


def parse_share(text: str | None) -> float | None:
    """The number meant by 0.5% or 0.005; None for None."""
    if text is None:
        return None
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        raise ValueError(f"--tolerance must be a share such as 0.5% or 0.005 (got {text!r})") from None
    if not 0 < value < 1:
        raise ValueError(f"--tolerance must be between 0 and 100% (got {text!r})")
    return value


# ----------------------------------------------------------------------------------------------------------------
# Printing


def print_result(console: PlainConsole, result: EvaluationResult, tolerance: float | None) -> None:
    """Print the protocol, the table, and notes on how to read it."""
    evaluations, units = result.evaluations, result.units
    for evaluation in evaluations[:1] if units.shares is None else evaluations:
        _print_protocol(console, evaluation.protocol)
    console.print(_table(evaluations[0]) if len(evaluations) == 1 else _table_of_models(result))
    for evaluation in evaluations:
        for note in _notes(evaluation, tolerance):
            console.print(note if len(evaluations) == 1 else f"{evaluation.folder.name}: {note}")
    if len(evaluations) > 1:
        each = "" if units.shares is None else f" of {units.bytes:,.0f} bytes"
        console.print(f"Differences are paired over the same {result.pairs} {units.name}{each}. Intervals are 95%.")


def _print_protocol(console: PlainConsole, protocol: JSONMapping) -> None:
    split = f" ({protocol['split']})" if protocol.get("split") else ""
    wrapped = " between the tokens that begin and end a document" if protocol.get("wrap") else ""
    console.print(
        f"{protocol['set']}{split}: {protocol['evaluated_sequences']} of {protocol['blocks']} sequences of "
        f"{protocol['length']} tokens{wrapped}, {protocol['remainder_tokens']} tokens left over; "
        f"{protocol['packing']}; detokenizer {protocol['detokenizer']}; tokenizer {protocol['tokenizer']}; "
        f"protocol {protocol['protocol_sha256'][:12]}"
    )
    if protocol["unknown_share"] > 0:
        console.print(f"{protocol['unknown_share']:.2%} of the tokens stand for characters unknown to the tokenizer")


def _table_of_models(result: EvaluationResult) -> Table:
    """One row per model and bound, in units that do not depend on the tokenizer."""
    table = Table()
    columns = ("perplexity per token", "bits per byte", "perplexity per word", DIFFERENCE)
    for title in ("", "bound", *columns):
        table.add_column(title, justify="right" if title in columns else "left")
    for place, evaluation in enumerate(result.evaluations):
        folder = evaluation.folder
        name = f"{folder.name}\n{folder.method.name} on {(folder.process.spec or {}).get('name', '')}"
        for bound, estimate in evaluation.bounds.items():
            nats, difference = result.nats_per_byte(place, bound), result.difference(place, bound) if place else None
            bits, words = result.bits_per_byte(nats), result.per_word(nats)
            less = None if difference is None else result.bits_per_byte(difference)
            table.add_row(
                name if bound == next(iter(evaluation.bounds)) else "",
                _label(bound, estimate),
                f"{shown(estimate.perplexity, 2)}\n{_interval(estimate.perplexity_ci95, 2)}",
                f"{bits.value:.4f}\n{_interval(bits.ci95)}",
                f"{shown(words.value)}\n{_interval(words.ci95)}",
                "" if less is None else f"{less.value:+.4f}\n{_interval(less.ci95)}",
            )
    return table


def _table(result: ModelEvaluation) -> Table:
    name = (result.folder.process.spec or {}).get("name", "")
    table = Table(title=f"{result.folder.name}: {result.folder.method.name} on {name}")
    table.add_column("")
    for bound, estimate in result.bounds.items():
        table.add_column(_label(bound, estimate), justify="right")

    estimates = list(result.bounds.values())
    table.add_row("nats per token", *[f"{e.nats_per_token:.4f}" for e in estimates])
    if any(e.terminal for e in estimates):
        table.add_row("  of which terminal term", *[f"{e.terminal:.4f}" for e in estimates])
    table.add_row("  standard error", *[_error(e.stderr) for e in estimates])
    table.add_row("  95% interval", *[_interval(e.ci95) for e in estimates])
    table.add_row("  Monte Carlo standard error", *[_error(e.monte_carlo_stderr) for e in estimates])
    table.add_row("bits per token", *[f"{e.bits_per_token:.4f}" for e in estimates])
    table.add_row("perplexity per token", *[shown(e.perplexity, 2) for e in estimates])
    table.add_row("  95% interval", *[_interval(e.perplexity_ci95, 2) for e in estimates])
    units = [result.per_unit(e) for e in estimates]
    for unit in units[0]:
        table.add_row(unit.replace("_", " "), *[shown(u[unit]) for u in units])
    table.add_row("network evaluations", *[f"{e.evaluations:,}" for e in estimates])
    for estimate in estimates:
        if isinstance(estimate, ImportanceEstimate):
            _add_orders(table, estimate, len(estimates))
    return table


def _label(bound: str, estimate: BoundEstimate) -> str:
    """The name of a bound, with the number of orders if it has one."""
    return f"{bound}, K = {estimate.orders}" if isinstance(estimate, ImportanceEstimate) else bound


def _meaning(estimate: BoundEstimate, method: Method) -> list[str]:
    """What the estimate is a perplexity of, or what it omits."""
    law = (
        f"under {first_hitting_law(method)}. Samplers that reveal several positions per call have other distributions."
    )
    if not method.dynamics.noisy:
        return ["The perplexity is exact, because the model is autoregressive."]
    if isinstance(estimate, ImportanceEstimate):
        most = f"at most {shown(estimate.perplexity, 2)} (K = {estimate.orders}), in expectation"
        return [f"The perplexity is {most}, {law}", _from_below(estimate)]
    if estimate.bound == "exact":
        return [f"The perplexity is exact, by a sum over all orders, {law}"]
    if estimate.bound != "tight":
        left = f"its terminal term and t < {estimate.earliest_time:g} are left out. tight keeps them."
        return [f"{estimate.bound} is the paper's and not a bound: {left}"]
    if estimate.earliest_time > 0:
        return [f"The path ends at t = {estimate.earliest_time:g}; the cost of the last step is part of the bound."]
    return []


def _from_below(estimate: ImportanceEstimate) -> str:
    """The bound in the other direction, or why there is none."""
    both = estimate.two_sided() if estimate.orders >= 4 else None
    if both is not None and both.informative:
        nats = _with_error(both.at_least, math.nan if estimate.fixed_set else both.at_least_stderr)
        return f"It is at least {shown(exp_or_inf(both.at_least), 2)}, in expectation: {nats} nats per token."
    if estimate.orders < 16:
        return "A lower bound needs more orders: --orders 16 or more."
    least = f"{both.least_effective_sample_size:.1f}" if both is not None else "unknown"
    return (
        "There is no useful lower bound: it needs an effective sample size of at least 10 orders for every sequence "
        f"(the smallest is {least}). Use shorter texts, or more orders."
    )


def _add_orders(table: Table, estimate: ImportanceEstimate, columns: int) -> None:
    """The bound for fewer orders, from the same weights."""
    blank = [""] * (columns - 1)
    table.add_row("effective sample size", f"{estimate.effective_sample_size:.1f} of {estimate.orders}", *blank)
    for orders, nats in estimate.by_orders.items():
        error = estimate.of_orders(orders).stderr
        table.add_row(f"nats per token, K = {orders}", _with_error(nats, error), *blank)


def _error(value: float) -> str:
    """A standard error, or "none" if it cannot be estimated."""
    return "none" if math.isnan(value) else f"{value:.4f}"


def _with_error(value: float, error: float) -> str:
    """A value ± its standard error, if that can be estimated."""
    return f"{value:.4f}" if math.isnan(error) else f"{value:.4f} ± {error:.4f}"


def _interval(ends: tuple[float | None, float | None], digits: int = 4) -> str:
    low, high = ends
    if low is None or high is None or math.isnan(low):
        return "none"
    return f"[{shown(low, digits)}, {shown(high, digits)}]"


def _why_wide(estimate: BoundEstimate) -> str:
    """Why a tolerance was not reached."""
    weighted = isinstance(estimate, ImportanceEstimate)
    if not estimate.fixed_set and cannot_narrow(estimate):
        return (
            f"values differ more between sequences than between {'orders' if weighted else 'noise draws'}. More "
            "sequences narrow it; --fixed-set gives the interval for these sequences only."
        )
    if weighted:
        return f"{estimate.orders} orders are all that --orders (default: {MOST_ORDERS}) or --seconds allow."
    return f"the limit on draws was reached ({estimate.draws} per sequence)."


def _notes(result: ModelEvaluation, tolerance: float | None) -> list[str]:
    """Notes on how to read the table."""
    estimate = result.main
    notes: list[str] = []
    if math.isinf(estimate.nats_per_token):
        notes.append(f"The bound is infinite: {estimate.why_infinite or 'the network gives a token probability zero'}.")
        if estimate.why_infinite and estimate.earliest_time == 0:
            notes.append(
                "--time-floor 1e-3 stops the path there and adds the cost of the last step: an equally valid bound, "
                "finite unless the network gives the text probability zero."
            )
    elif tolerance is not None and not estimate.reached:
        notes.append(f"The interval is wider than {100 * tolerance:.3g}%, because {_why_wide(estimate)}")
    if estimate.heavy_tailed:
        notes.append(
            "There is no interval: a few independent draws near t = 0 make up much of the estimate, and an estimate "
            "that missed them would look precise. --sampling stratified covers them."
        )
    notes += _meaning(estimate, result.folder.method)
    for bound, exact in result.bounds.items():
        if not bound.endswith("-order"):
            continue
        notes.append(
            f"{bound} is the exact likelihood of a sampler, not of the process: the bound may be above or below it."
        )
        if math.isinf(exact.nats_per_token):
            notes.append(
                f"{bound} is infinite: the sampler never draws some of these tokens. --top-p 1 --temperature 1 keeps "
                "all that the model can write."
            )
    if lost := lost_text(result.folder.tokenizer):
        notes.append(lost)
    return notes
