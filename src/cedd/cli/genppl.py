"""`cedd genppl`: generative perplexity under a judge."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.table import Table

from cedd.cli import UserError
from cedd.cli.arguments import PLOT_SUFFIXES, Genppl
from cedd.cli.console import PlainConsole
from cedd.cli.progress import progress_bar
from cedd.cli.sampling import check_names, refuse_unused_sampling
from cedd.cli.unused import refuse_unused
from cedd.device import pick_device
from cedd.evaluation.frontier import (
    CurveComparison,
    Frontier,
    Point,
    Setting,
    Sweep,
    common_entropy,
    compare_curves,
    figures,
    save_plot,
)
from cedd.evaluation.generative import (
    GenerativePerplexity,
    Samples,
    generative_perplexity,
    judge_label,
    judge_weights,
    load_samples,
    open_judge,
    save_samples,
)
from cedd.evaluation.intervals import IntervalEstimate, jackknife
from cedd.models.loaded_model import LoadedModel
from cedd.models.locate import is_model, locate
from cedd.samplers import Sharpening
from cedd.samplers.random_numbers import check_count
from cedd.storage import check_writable, finite
from cedd.tasks import load
from cedd.tasks.generate import generate_ids


def run(arguments: Genppl) -> int:
    """Draw or read samples, score them, and print the table or JSON."""
    check(arguments)
    check_count(arguments.n)
    if arguments.sweep.frontier is not None:
        return frontier(arguments)
    if len(arguments.models) + (arguments.samples is not None) != 1:
        raise UserError(
            "give either one MODEL to sample from or --samples FILE to score; several MODELs need --frontier"
        )
    device = str(pick_device(arguments.device))
    given = load_samples(arguments.samples) if arguments.samples is not None else None
    out = None if given is not None else arguments.out or samples_of(arguments.models[0])
    check_writable(out)
    # Load the judge first: it may fail, and drawing samples takes long.
    judge = open_judge(arguments.judge, device, arguments.judge_batch, arguments.gguf_file)
    samples = draw(arguments, arguments.models[0], out) if out is not None else given
    assert samples is not None
    report = generative_perplexity(samples, judge)
    if arguments.json:
        print(json.dumps(finite(asdict(report) | {"made_by": dict(samples.made_by)})))
    else:
        PlainConsole().print(table(report))
    return 0


def check(arguments: Genppl) -> None:
    """Refuse options that are invalid or have no effect."""
    check_names(arguments.options)
    sweep, usual = arguments.sweep, Genppl()
    swept = ("samplers", "step_counts", "temperatures", "top_ps", "text")
    if sweep.frontier is None:
        refuse_unused(sweep, (*swept, "entropy", "draw_only", "plot"), "without --frontier")
    elif sweep.draw_only:
        refuse_unused(sweep, ("entropy", "plot"), "with --draw-only")
    reason = "with --samples, whose texts are only scored" if arguments.samples is not None else "without a MODEL"
    if arguments.samples is not None or (sweep.frontier is not None and not arguments.models):
        refuse_unused(arguments, ("n", "length", "seed"), reason)
        refuse_unused(arguments.options, vars(arguments.options), reason, usual.options)
        refuse_unused(sweep, (*swept, "draw_only"), reason)
    if arguments.samples is not None:
        refuse_unused(arguments, ("out",), reason)


def samples_of(name: str) -> Path:
    """The file for a model's samples: in its folder, or in the current one for a pretrained model or one from the
    hub."""
    if is_model(name):
        return Path(name).expanduser() / "samples.jsonl"
    locate(name)  # refuses unknown names before anything is loaded
    return Path(f"{name.rpartition('/')[2]}-samples.jsonl")


def draw(arguments: Genppl, name: str, out: Path) -> Samples:
    """Samples of the model, saved."""
    model = load(name, arguments.device)
    refuse_unused_sampling(model, arguments.options, Genppl().options)
    options = replace(arguments.options, seed=arguments.seed)
    options = model.with_defaults(options, arguments.length or model.length)
    ids = generate_ids(model, arguments.n, arguments.length, options)
    texts = [model.tokenizer.decode(row.numpy()) for row in ids]
    made_by = {"model": name, "length": ids.shape[1], **options.record()}
    samples = Samples(texts, ids.tolist(), made_by)
    save_samples(out, samples)
    PlainConsole(stderr=True).print(f"samples: {out}", soft_wrap=True)
    return samples


def table(report: GenerativePerplexity) -> Table:
    """The report as a table."""

    def shown(interval: IntervalEstimate) -> str:
        if interval.low is None or interval.high is None:
            return f"{interval.value:.2f}  [one sample]"
        return f"{interval.value:.2f}  [{interval.low:.2f}, {interval.high:.2f}]"

    made = Table(title=f"{report.samples} samples judged by {report.judge} ({report.judge_precision})")
    made.add_column("measure")
    made.add_column("value  [95% interval]", justify="right")
    made.add_row("mean of the samples' perplexities (the paper's)", shown(report.mean_of_sample_perplexities))
    made.add_row("perplexity of the corpus of samples", shown(report.corpus_perplexity))
    made.add_row("token entropy of a sample, nats", f"{report.token_entropy:.3f}")
    for n, share in report.distinct.items():
        made.add_row(f"distinct {n}-grams", f"{share:.3f}")
    made.add_row("judged tokens", f"{report.judged_tokens:,}")
    if report.cut_off_tokens:
        made.add_row("tokens beyond the judge's context", f"{report.cut_off_tokens:,}")
    return made


# ----------------------------------------------------------------------------------------------------------------
# The frontier


def frontier(arguments: Genppl) -> int:
    """Draw and score the missing cells, and print and plot the results."""
    check_frontier(arguments)
    sweep, label = arguments.sweep, judge_label(arguments.judge, arguments.gguf_file)
    assert sweep.frontier is not None
    kept, runs = Frontier(sweep.frontier), frontier_runs(arguments)
    waiting = begin_frontier(arguments, kept, runs) if runs else []
    if not waiting and not kept.cells:
        raise UserError(f"no texts in {sweep.frontier}; name a MODEL to draw some")
    if not sweep.draw_only:
        kept.begin_judging(label, judge_weights(arguments.judge, arguments.gguf_file))
    unjudged = [] if sweep.draw_only else kept.unjudged(label)
    judge = None
    if not sweep.draw_only and (waiting or unjudged):
        device = str(pick_device(arguments.device))
        judge = open_judge(arguments.judge, device, arguments.judge_batch, arguments.gguf_file)
    with progress_bar("cells", not arguments.json) as move:
        for done, cell in enumerate([*unjudged, *waiting]):
            move(done, len(unjudged) + len(waiting))
            kept.refresh()  # others may have drawn or judged it meanwhile
            if isinstance(cell, Setting) and kept.waiting([cell], arguments.n):
                kept.draw(cell, runs[cell.run], arguments.n, arguments.options)
            if judge is not None:
                kept.judge(cell.name if isinstance(cell, Setting) else cell, judge, label)
    if not sweep.draw_only:
        show_frontier(arguments, kept.points(label), label)
    return 0


def check_frontier(arguments: Genppl) -> None:
    """Refuse options that have no effect with a frontier, and files that cannot be written."""
    sweep, given, usual = arguments.sweep, arguments.options, Genppl().options
    if arguments.samples is not None or arguments.out is not None:
        raise UserError("--frontier keeps samples in its folder; leave out --samples and --out")
    plural = {"sampler": "samplers", "steps": "step-counts", "temperature": "temperatures", "top_p": "top-ps"}
    for one, several in plural.items():
        if getattr(given, one) != getattr(usual, one):
            raise UserError(f"--frontier sweeps: use --{several} instead of --{one.replace('_', '-')}")
    for name in sweep.samplers:
        check_names(replace(given, sampler=name))
    for temperature, top_p in itertools.product(sweep.temperatures, sweep.top_ps):
        Sharpening(temperature, top_p)
    if sweep.step_counts and min(sweep.step_counts) < 1:
        raise UserError(f"steps must be at least 1 (got {min(sweep.step_counts)})")
    if arguments.n < 1:
        raise UserError(f"-n must be at least 1 (got {arguments.n})")
    if sweep.entropy is not None and not math.isfinite(sweep.entropy):
        raise UserError(f"--entropy must be a finite number of nats (got {sweep.entropy})")
    check_writable(sweep.plot, PLOT_SUFFIXES)


def frontier_runs(arguments: Genppl) -> dict[str, LoadedModel]:
    """The models, by the names of their folders."""
    runs = dict[str, LoadedModel]()
    for given in arguments.models:
        name = locate(given).name
        if name in runs:
            raise UserError(f"two of the models are named {name}; rename the folder of one")
        runs[name] = load(given, arguments.device)
    return runs


def begin_frontier(arguments: Genppl, kept: Frontier, runs: Mapping[str, LoadedModel]) -> list[Setting]:
    """The cells that have yet to be drawn; the text to compare with is stored."""
    sweep, say = arguments.sweep, PlainConsole(stderr=True)
    length = arguments.length or min(run.length for run in runs.values())
    cells = Sweep(sweep.samplers, sweep.step_counts, sweep.temperatures, sweep.top_ps)
    settings = cells.settings(runs, length, lambda line: say.print(line, soft_wrap=True))
    if not settings:
        raise UserError("no model supports any of these samplers")
    kept.begin(runs, length, arguments.seed)
    if sweep.text is not None:
        kept.take_text(sweep.text, next(iter(runs.values())), arguments.n)
    return kept.waiting(settings, arguments.n)


def show_frontier(arguments: Genppl, points: Sequence[Point], label: str) -> None:
    """Print both tables or JSON, and write the plot."""
    sweep = arguments.sweep
    at = common_entropy(points) if sweep.entropy is None else sweep.entropy
    rows = [] if at is None else compare_curves(points, at)
    if arguments.json:
        cells = [figures(point) for point in points]
        curves = [
            {"run": row.curve.run, "sampler": row.curve.sampler, "steps": row.curve.steps}
            | {name: asdict(row)[name] for name in ("perplexity", "over_most_steps", "over_first")}
            for row in rows
        ]
        print(json.dumps(finite({"judge": label, "cells": cells, "entropy": at, "at_equal_entropy": curves})))
    else:
        console = PlainConsole()
        console.print(cells_table(points, label))
        if at is None:
            console.print("no entropy is reached by all curves: name one by --entropy")
        else:
            console.print(comparison_table(rows, at))
    if sweep.plot is not None:
        save_plot(sweep.plot, points, label)


def cells_table(points: Sequence[Point], label: str) -> Table:
    """One row per cell."""
    swept = "t" if all(point.setting.top_p == 1 for point in points) else "t, top-p"
    columns = ("texts", "steps", swept, "perplexity", "entropy", "distinct 2")
    made = narrow_table(f"judged by {label}, with 95% intervals over texts", columns)
    for point in points:
        setting = point.setting
        how = f"{setting.temperature:g}" + f", {setting.top_p:g}" * ("," in swept)
        made.add_row(
            *(setting.run, setting.sampler, f"{point.texts}"),
            *((f"{setting.steps}", how) if setting.sampler else ("", "")),
            brief(jackknife(point.log_perplexity(point.texts)).exp()),
            brief(jackknife(point.entropy(point.texts)), 2),
            f"{point.distinct['2']:.2f}",
        )
    return made


def comparison_table(rows: Sequence[CurveComparison], entropy: float) -> Table:
    """One row per curve."""
    columns = ("steps", "perplexity", "over its most steps", "over the first")
    made = narrow_table(f"at a token entropy of {entropy:.3f} nats, interpolated", columns)
    for row in rows:
        curve = row.curve
        value = brief(row.perplexity) if row.perplexity is not None else "not reached"
        ratios = ("" if one is None else brief(one, 2) for one in (row.over_most_steps, row.over_first))
        made.add_row(curve.run, curve.sampler, f"{curve.steps}", value, *ratios)
    return made


def narrow_table(title: str, columns: Sequence[str]) -> Table:
    """A table of models, samplers and numbers that fits a terminal: no lines, nothing cut off."""
    made = Table(title=title, box=None, padding=(0, 2, 0, 0), title_justify="left")
    for name in ("run", "sampler"):
        made.add_column(name, no_wrap=True, overflow="fold")
    for name in columns:
        made.add_column(name, justify="right", overflow="fold")
    return made


def brief(interval: IntervalEstimate, places: int | None = None) -> str:
    """A value with its interval, by default in three digits or all digits before the decimal point."""

    def shown(number: float) -> str:
        if not math.isfinite(number):
            return str(number)
        return f"{number:.{max(0, 3 - len(str(int(number)))) if places is None else places}f}"

    if interval.low is None or interval.high is None:
        return shown(interval.value)
    return f"{shown(interval.value)} [{shown(interval.low)}, {shown(interval.high)}]"
