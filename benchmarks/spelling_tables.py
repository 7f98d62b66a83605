"""The tables and curves of the spelling benchmark, next to the paper's figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, cycle
from typing import TYPE_CHECKING, Any

import torch
from cells import different_seeds, last_shared_step, mean_with_interval, with_curves
from spelling_books import SEEN
from spelling_recipes import METHODS, OURS, PAPER, PROCESSES, TEST_BOOKS, own_settings, read_cell

from cedd.training.config import TrainConfig, from_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLES = ("--", ":", "-.", (0, (1, 3)), (0, (6, 2, 1, 2, 1, 2)))
"""Line styles of a method's curves, except the curve with the paper's settings, which is solid."""

SHOWN = {"": "", "half": ", half the learning rate", "50000": ""}
"""The recipes whose rows the page shows, and what their titles say of them."""
DEPENDENT_ON_RATE = ("sedd/roulette", "sedds/roulette")
"""The cells of which the page also shows runs of fewer than the most steps, because their learning rate matters."""


def tested(content: Mapping[str, Any]) -> list[str]:
    """The cells with results, in the paper's order, ours at the end."""
    order = [(process, method) for process in PROCESSES for method in METHODS]

    def place(name: str) -> tuple[bool, int, str]:
        cell = read_cell(name)
        return cell.highest_time < 1, order.index((cell.process, cell.method)), name

    return sorted(with_curves(content), key=place)


def curves_figure(content: Mapping[str, Any]) -> Figure:
    """The share of positions restored in the first test book over training steps, with a panel for each process.
    Crosses are the paper's figures."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    panels = dict(zip(PROCESSES, figure.subplots(1, len(PROCESSES), sharey=True), strict=True))
    colours = {method: f"C{number}" for number, method in enumerate(METHODS)}
    others = {f"{method}/{process}": cycle(STYLES) for process in PROCESSES for method in METHODS}
    for cell in tested(content):
        curve = content["cells"][cell]["curve"]
        method, process, _, _ = read_cell(cell)
        thousands = [point["step"] / 1000 for point in curve]
        shares = [100 * point["books"]["pap"]["all"]["share"] for point in curve]
        plain = f"{method}/{process}"
        style = "-" if cell == plain else next(others[plain])
        line = {"linestyle": style, "marker": "o", "markersize": 3, "linewidth": 1.2}
        panels[process].plot(thousands, shares, color=colours[method], label=cell.replace(f"/{process}", ""), **line)
        for step in PAPER:
            if step <= curve[-1]["step"] and (papers := of_the_paper(cell, content["cells"][cell], step)):
                panels[process].plot(step / 1000, papers[0], "x", color=colours[method])
    for process, axes in panels.items():
        axes.set_title(process)
        axes.set_xlabel("thousand steps")
        axes.grid(alpha=0.3)
        if axes.lines:
            below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.12), "ncols": 2}
            axes.legend(frameon=False, fontsize=8, handlelength=4, **below)
    panels[PROCESSES[0]].set_ylabel("restored in Pride and Prejudice, %  (×: the paper's)")
    return figure


def of_the_paper(cell: str, record: Mapping[str, Any], step: int) -> tuple[float, float] | None:
    """The paper's figures for this method and process after this many steps. None if the learning rate is still falling
    there, because such a run cannot be compared."""
    config = from_json(TrainConfig, record["config"])
    done = step == config.steps or config.optimizer.schedule == "constant"
    return PAPER[step].get(cell.partition("+")[0]) if done and step in PAPER else None


def tables(content: Mapping[str, Any]) -> dict[str, str]:
    """The measured shares next to the paper's, in Markdown, by the name of the marker. The page shows "summary". Runs
    shorter than the paper's are left out if there are longer ones."""
    cells = {cell: content["cells"][cell] for cell in tested(content)}
    long = {cell: record for cell, record in cells.items() if record["curve"][-1]["step"] >= min(PAPER)}
    if not cells:
        return dict.fromkeys(("summary", "measured"), "nothing was tested yet")
    return {"summary": _summary(long or cells), "measured": _measured(long or cells)}


def _summary(cells: Mapping[str, Any]) -> str:
    """The rows of the paper, with its figures, and ours."""
    lines = ["| method and process | steps | PAP / CAP, % | in the paper |", "|---|--:|--:|--:|"]
    most = max(record["curve"][-1]["step"] for record in cells.values())
    for cell, record in cells.items():
        plain, _, recipe = cell.partition("+")
        if cell != OURS and recipe not in SHOWN:
            continue
        if cell != OURS and read_cell(plain).highest_time < 1:
            continue
        last = record["curve"][-1]
        papers = of_the_paper(cell, record, last["step"])
        if papers is None and cell != OURS:
            continue
        if last["step"] < most and plain not in DEPENDENT_ON_RATE:
            continue
        scores = [f"{100 * last['books'][name]['all']['share']:.1f}" for name in TEST_BOOKS]
        title = "our settings (bayes-star/roulette)" if cell == OURS else f"{plain}{SHOWN[recipe]}"
        lines.append(f"| {title} | {last['step']:,} | {' / '.join(scores)} | {' / '.join(map(str, papers or ()))} |")
    return "\n".join(lines)


def _measured(cells: Mapping[str, Any]) -> str:
    heads = "method | process | steps | PAP, % | PAP in the paper | CAP, % | CAP in the paper"
    heads += " | masked, shuffled (PAP) | training book | ms per step"
    lines = [f"| {heads} |", "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|"]
    return "\n".join(lines + [_row(cell, record) for cell, record in cells.items()])


def by_step(record: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """The tests of a run by step and book."""
    return {point["step"]: point["books"] for point in record["curve"]}


def over_seeds(contents: Sequence[Mapping[str, Any]]) -> str:
    """The scores of the cells in all files, one column per seed, after the last step at which all were tested, in
    Markdown. Cells on the same process are compared by the mean difference with Student's 95% interval."""
    shared = [cell for cell in tested(contents[0]) if all(cell in tested(content) for content in contents[1:])]
    records = {cell: [content["cells"][cell] for content in contents] for cell in shared}
    step, seeds = last_shared_step(records), different_seeds(records, own_settings)
    scores = {
        cell: torch.tensor(
            [[100 * by_step(run)[step][name]["all"]["share"] for name in TEST_BOOKS] for run in runs],
            dtype=torch.float64,
        )
        for cell, runs in records.items()
    }  # [seeds, books]
    heads = " | ".join((*(f"seed {seed}" for seed in seeds), "mean"))
    lines = [f"| PAP / CAP, % after {step:,} steps | {heads} |", f"|---|{'--:|' * (len(seeds) + 1)}"]
    lines += [f"| {cell} | {' | '.join(map(_both, (*found, found.mean(0))))} |" for cell, found in scores.items()]
    for first, second in combinations(shared, 2):
        if read_cell(first).process == read_cell(second).process:
            ahead = scores[second] - scores[first]
            means = " / ".join(map(mean_with_interval, ahead.T))
            lines.append(f"| {second} − {first} | {' | '.join(map(_both, ahead))} | {means} |")
    return "\n".join(lines)


def _both(values: torch.Tensor) -> str:
    return " / ".join(f"{value:.2f}" for value in values.tolist())


def _row(cell: str, record: Mapping[str, Any]) -> str:
    """The last test of a cell with 95% intervals, next to the paper's figures after the same number of steps."""
    last = record["curve"][-1]
    paper = of_the_paper(cell, record, last["step"]) or ("", "")
    steps = f"{last['step']:,}" + ("" if record["finished"] else f" of {record['config']['steps']:,}")
    scores = [_with_interval(last["books"][name]["all"]) for name in TEST_BOOKS]
    kinds = [last["books"]["pap"][kind]["share"] for kind in ("masked", "shuffled")]
    parts = ", ".join("–" if share is None else f"{100 * share:.1f}" for share in kinds)
    method, process, highest_time, _ = read_cell(cell)
    process += f", t ≤ {highest_time:g}" if highest_time < 1 else ""
    process += "".join(f"; {name} {value}" for name, value in own_settings(cell, record).items())
    speed = record.get("seconds_per_step")
    seen = f"{100 * last['books'][SEEN]['all']['share']:.1f}" if SEEN in last["books"] else ""
    return (
        f"| {method} | {process} | {steps} | {scores[0]} | {paper[0]} | {scores[1]} | {paper[1]} "
        f"| {parts} | {seen} | {'' if speed is None else f'{1000 * speed:.1f}'} |"
    )


def _with_interval(share: Mapping[str, Any]) -> str:
    half = 50 * (share["high"] - share["low"])
    return f"{100 * share['share']:.1f} ± {half:.1f}"
