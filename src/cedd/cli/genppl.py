"""`cedd genppl`: generative perplexity under a judge."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
from rich.table import Table

from cedd.cli import UserError
from cedd.cli.arguments import PLOT_SUFFIXES, Genppl
from cedd.cli.console import PlainConsole
from cedd.cli.progress import progress_bar
from cedd.cli.sampling import sampling_options
from cedd.device import pick_device
from cedd.evaluation.frontier import (
    Compared,
    Frontier,
    Point,
    Setting,
    Sweep,
    common_entropy,
    compared,
    figures,
    interval,
    save_plot,
    text_weights,
)
from cedd.evaluation.generative import (
    BootstrapInterval,
    GenerativePerplexity,
    Samples,
    generative_perplexity,
    judge_label,
    judge_weights,
    load_samples,
    open_judge,
    save_samples,
)
from cedd.models.loaded import LoadedModel
from cedd.models.locate import is_model, locate
from cedd.samplers import Sharpening
from cedd.storage import check_writable, finite
from cedd.tasks import load
from cedd.tasks.generate import generate_ids


def run(arguments: Genppl) -> int:
    """Draw or read samples, judge them, print the table or JSON."""
    sampling_options(arguments.options, arguments.seed)
    if arguments.sweep.frontier is not None:
        return frontier(arguments)
    if len(arguments.models) + (arguments.samples is not None) != 1:
        raise UserError("give either a RUN to sample from or --samples FILE to judge again; several with --frontier")
    device = str(pick_device(arguments.device))
    given = load_samples(arguments.samples) if arguments.samples is not None else None
    out = None if given is not None else arguments.out or samples_of(arguments.models[0])
    check_writable(out)
    # The judge before the samples are drawn: it is what fails, and they take long.
    judge = open_judge(arguments.judge, device, arguments.judge_batch, arguments.gguf_file)
    samples = draw(arguments, arguments.models[0], out) if out is not None else given
    assert samples is not None
    report = generative_perplexity(samples, judge, seed=arguments.seed)
    if arguments.json:
        print(json.dumps(finite(asdict(report) | {"made_by": dict(samples.made_by)})))
    else:
        PlainConsole().print(table(report))
    return 0


def samples_of(name: str) -> Path:
    """Where samples of a model are kept: in its folder, or here if it comes with the package or from the hub."""
    if is_model(name):
        return Path(name).expanduser() / "samples.jsonl"
    locate(name)  # so that a name of nothing is refused before anything is loaded
    return Path(f"{name.rpartition('/')[2]}-samples.jsonl")


def draw(arguments: Genppl, name: str, out: Path) -> Samples:
    """Samples of the model, saved."""
    model = load(name, arguments.device)
    options = sampling_options(arguments.options, arguments.seed)
    options = model.settled(options, arguments.length or model.length)
    ids = generate_ids(model, arguments.n, arguments.length, options)
    texts = [model.tokenizer.decode(row.numpy()) for row in ids]
    made_by = {"model": name, "length": ids.shape[1], **asdict(options)}
    samples = Samples(texts, ids.tolist(), made_by)
    save_samples(out, samples)
    PlainConsole(stderr=True).print(f"samples: {out}", soft_wrap=True)
    return samples


def table(report: GenerativePerplexity) -> Table:
    """The report to read."""

    def shown(interval: BootstrapInterval) -> str:
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
    """Draw and judge the cells that are missing, print and plot what there is."""
    check_frontier(arguments)
    sweep, label = arguments.sweep, judge_label(arguments.judge, arguments.gguf_file)
    assert sweep.frontier is not None
    kept, runs = Frontier(sweep.frontier), frontier_runs(arguments)
    waiting = begin_frontier(arguments, kept, runs) if runs else []
    if not waiting and not kept.cells:
        raise UserError(f"there are no texts in {sweep.frontier}: give RUNs to draw some from")
    if not sweep.draw_only:
        kept.begin_judging(label, judge_weights(arguments.judge, arguments.gguf_file))
    unjudged = [] if sweep.draw_only else kept.unjudged(label)
    judge = None
    if not sweep.draw_only and (waiting or unjudged):
        device = str(pick_device(arguments.device))
        judge = open_judge(arguments.judge, device, arguments.judge_batch, arguments.gguf_file)
    options = sampling_options(arguments.options, None)
    with progress_bar("cells", not arguments.json) as move:
        for done, cell in enumerate([*unjudged, *waiting]):
            move(done, len(unjudged) + len(waiting))
            kept.refresh()  # others may have drawn or judged it meanwhile
            if isinstance(cell, Setting) and kept.waiting([cell], arguments.n):
                kept.draw(cell, runs[cell.run], arguments.n, options)
            if judge is not None:
                kept.judge(cell.name if isinstance(cell, Setting) else cell, judge, label)
    if not sweep.draw_only:
        show_frontier(arguments, kept.points(label), label)
    return 0


def check_frontier(arguments: Genppl) -> None:
    """Refuse options that mean nothing with a frontier, and files that could not be written."""
    sweep, given, usual = arguments.sweep, arguments.options, Genppl().options
    if arguments.samples is not None or arguments.out is not None:
        raise UserError("--frontier keeps samples in its folder; leave out --samples and --out")
    plural = {"sampler": "samplers", "steps": "step-counts", "temperature": "temperatures", "top_p": "top-ps"}
    for one, several in plural.items():
        if getattr(given, one) != getattr(usual, one):
            raise UserError(f"--frontier sweeps: give --{several} in the place of --{one.replace('_', '-')}")
    for name in sweep.samplers:
        sampling_options(replace(given, sampler=name), arguments.seed)
    for temperature, top_p in itertools.product(sweep.temperatures, sweep.top_ps):
        Sharpening(temperature, top_p)
    if sweep.step_counts and min(sweep.step_counts) < 1:
        raise UserError(f"steps must be at least 1; got {min(sweep.step_counts)}")
    if arguments.n < 1:
        raise UserError(f"at least one sample must be asked for; got {arguments.n}")
    if sweep.entropy is not None and not math.isfinite(sweep.entropy):
        raise UserError(f"--entropy must be a number of nats; got {sweep.entropy}")
    check_writable(sweep.plot, PLOT_SUFFIXES)


def frontier_runs(arguments: Genppl) -> dict[str, LoadedModel]:
    """The runs by the names of their folders."""
    runs = dict[str, LoadedModel]()
    for given in arguments.models:
        name = locate(given).name
        if name in runs:
            raise UserError(f"two of the runs are called {name}; rename the folder of one")
        runs[name] = load(given, arguments.device)
    return runs


def begin_frontier(arguments: Genppl, kept: Frontier, runs: Mapping[str, LoadedModel]) -> list[Setting]:
    """The cells that are to be drawn; the text that they are compared with is taken."""
    sweep, say = arguments.sweep, PlainConsole(stderr=True)
    length = arguments.length or min(run.length for run in runs.values())
    cells = Sweep(sweep.samplers, sweep.step_counts, sweep.temperatures, sweep.top_ps)
    settings = cells.settings(runs, length, lambda line: say.print(line, soft_wrap=True))
    if not settings:
        raise UserError("no run is left for any of these samplers")
    kept.begin(runs, length, arguments.seed)
    if sweep.text is not None:
        kept.take_text(sweep.text, next(iter(runs.values())), arguments.n)
    return kept.waiting(settings, arguments.n)


def show_frontier(arguments: Genppl, points: Sequence[Point], label: str) -> None:
    """Both tables, or all as JSON; and the picture."""
    sweep, seed = arguments.sweep, arguments.seed
    at = common_entropy(points) if sweep.entropy is None else sweep.entropy
    rows = [] if at is None else compared(points, at, seed)
    if arguments.json:
        cells = [figures(point, seed) for point in points]
        curves = [
            {"run": row.curve.run, "sampler": row.curve.sampler, "steps": row.curve.steps}
            | {name: asdict(row)[name] for name in ("perplexity", "over_most_steps", "over_first")}
            for row in rows
        ]
        print(json.dumps(finite({"judge": label, "cells": cells, "entropy": at, "at_equal_entropy": curves})))
    else:
        console = PlainConsole()
        console.print(cells_table(points, label, seed))
        if at is None:
            console.print("no entropy is reached by all curves: name one by --entropy")
        else:
            console.print(compared_table(rows, at))
    if sweep.plot is not None:
        save_plot(sweep.plot, points, label, seed)


def cells_table(points: Sequence[Point], label: str, seed: int) -> Table:
    """A row a cell."""
    swept = "t" if all(point.setting.top_p == 1 for point in points) else "t, top-p"
    columns = ("texts", "steps", swept, "perplexity", "entropy", "distinct 2")
    made = narrow_table(f"judged by {label}, with 95% intervals over texts", columns)
    for point in points:
        setting, weights = point.setting, text_weights(point.texts, seed)
        how = f"{setting.temperature:g}" + f", {setting.top_p:g}" * ("," in swept)
        made.add_row(
            *(setting.run, setting.sampler, f"{point.texts}"),
            *((f"{setting.steps}", how) if setting.sampler else ("", "")),
            brief(interval(np.exp(point.log_perplexity(weights)), point.texts)),
            brief(interval(point.entropy(weights), point.texts), 2),
            f"{point.distinct['2']:.2f}",
        )
    return made


def compared_table(rows: Sequence[Compared], entropy: float) -> Table:
    """A row a curve."""
    columns = ("steps", "perplexity", "over its most steps", "over the first")
    made = narrow_table(f"at a token entropy of {entropy:.3f} nats, interpolated", columns)
    for row in rows:
        curve = row.curve
        value = brief(row.perplexity) if row.perplexity is not None else "not reached"
        ratios = ("" if one is None else brief(one, 2) for one in (row.over_most_steps, row.over_first))
        made.add_row(curve.run, curve.sampler, f"{curve.steps}", value, *ratios)
    return made


def narrow_table(title: str, columns: Sequence[str]) -> Table:
    """Of runs and samplers, and columns of numbers, which fits a terminal: without lines, and nothing is cut off."""
    made = Table(title=title, box=None, padding=(0, 2, 0, 0), title_justify="left")
    for name in ("run", "sampler"):
        made.add_column(name, no_wrap=True, overflow="fold")
    for name in columns:
        made.add_column(name, justify="right", overflow="fold")
    return made


def brief(interval: BootstrapInterval, places: int | None = None) -> str:
    """A value with its interval, by default in three digits or all before the point."""
    ends = [one for one in (interval.value, interval.low, interval.high) if one is not None]
    value, *between = (f"{one:.{max(0, 2 - len(str(int(one))) + 1) if places is None else places}f}" for one in ends)
    return f"{value} [{', '.join(between)}]" if between else value
