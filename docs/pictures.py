"""The pictures of the documentation, drawn from formulas, models and results.

    python docs/pictures.py                  # all of them, into docs/images; some minutes on two cores
    python docs/pictures.py clocks coverage  # only these

Drawings have no background, and their colours are readable on white and on black.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

import cedd
from cedd.data.packing import evenly_spaced
from cedd.evaluation.frontier import Frontier, Point, curves_of, real_text
from cedd.models.loaded_model import SamplingOptions
from cedd.network import Network
from cedd.tasks import LanguageModel, generate
from cedd.tasks.trajectory import Trajectory

IMAGES = Path(__file__).parent / "images"
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
JUDGE = "smollm2.gguf"
GREY, BLUE, ORANGE, GREEN, RED = "#7d8590", "#4a8fe7", "#e08a2e", "#2f9e6e", "#d9534f"
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "cedd",
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": GREY,
    "axes.edgecolor": GREY,
    "axes.labelcolor": GREY,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "legend.frameon": False,
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
}
TEXT = """\
Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: once or
twice she had peeped into the book her sister was reading, but it had no pictures or conversations in it, "and what is
the use of a book," thought Alice "without pictures or conversations?" So she was considering in her own mind (as well
as she could, for the hot day made her feel very sleepy and stupid), whether the pleasure of making a daisy-chain would
be worth the trouble of getting up and picking the daisies, when suddenly a White Rabbit with pink eyes ran close by
her."""
"""The text whose bound is drawn: the beginning of Alice's Adventures in Wonderland."""


def panels(count: int, columns: int, size: tuple[float, float], **shared: Any) -> tuple[Figure, list[Any]]:
    """A figure with `count` axes, each of this size in inches."""
    rows = -(-count // columns)
    figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False, **shared).flat)
    for unused in axes[count:]:
        unused.set_axis_off()
    return figure, axes[:count]


# ----------------------------------------------------------------------------------------------------------------
# From formulas


def clocks() -> Figure:
    """The share of tokens that are kept, redrawn and masked over time, for each process."""
    processes = {
        "absorb": cedd.absorb(27),
        "uniform": cedd.uniform(27),
        "roulette, p_m = 0.5": cedd.roulette(27, p_m=0.5),
        "eroulette, share t": cedd.eroulette(27, mask_share=lambda t: t),
        "hybrid, p_u = 0.3": cedd.hybrid(27, p_u=0.3),
    }
    figure, axes = panels(len(processes), 5, (1.9, 1.9), sharex=True, sharey=True)
    times = torch.linspace(0, 1, 61, dtype=torch.float64)
    for axis, (name, process) in zip(axes, processes.items(), strict=True):
        noise = process.noise(times)
        shares = (noise.keep, noise.alive - noise.keep, 1 - noise.alive)
        axis.stackplot(times, *shares, colors=(BLUE, ORANGE, GREY), alpha=0.85, labels=("kept", "redrawn", "masked"))
        axis.set_title(name, fontsize=9)
        axis.set_xlabel("time t")
        axis.margins(0)
    axes[0].set_ylabel("share of tokens")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


# ----------------------------------------------------------------------------------------------------------------
# From models


@cache
def model(name: str) -> LanguageModel:
    """A packaged model, loaded once."""
    return cedd.load(name, device="cpu")


def costs_over_time(name: str, times: NDArray[np.float64], draws: int) -> dict[str, NDArray[np.float64]]:
    """The mean cost of masked, replaced and unchanged tokens at each time, in nats per token and unit of time."""
    from cedd.dynamics.path import position_costs

    loaded = model(name)
    process, method = loaded.process, loaded.method
    path = method.dynamics.target(method.parameterization, process, "tight", with_entropy=True, low=0.0).path
    network = Network.of(loaded.model, process.vocab_size, "cpu")
    ids = torch.tensor(loaded.tokenizer.encode(TEXT.replace("\n", " ")))[None, : loaded.length].repeat(draws, 1)
    found = {part: np.zeros(len(times)) for part in ("masked", "replaced", "unchanged")}
    for place, t in enumerate(times):
        generator = torch.Generator().manual_seed(place)
        noise = process.noise(torch.full((draws,), t, dtype=torch.float64))
        x_t = process.sample(ids, noise.t, generator=generator)
        with torch.no_grad():
            costs = position_costs(network, path, ids, x_t, noise)
        masked = x_t == process.vocab_size
        groups = {"masked": masked, "replaced": ~masked & (x_t != ids), "unchanged": x_t == ids}
        for part, where in groups.items():
            found[part][place] = float(torch.where(where, costs, 0.0).mean())
    return found


def bound() -> Figure:
    """The integrand of the bound over time, split into masked, replaced and unchanged tokens."""
    times = np.linspace(0.02, 0.98, 25)
    names = {"english": "english, on absorb", "english-char": "english-char, on roulette"}
    figure, axes = panels(2, 2, (3.8, 2.6))
    for axis, (name, title) in zip(axes, names.items(), strict=True):
        parts = costs_over_time(name, times, draws=16)
        colours = (GREY, ORANGE, BLUE)
        axis.stackplot(times, *parts.values(), colors=colours, alpha=0.85, labels=tuple(parts))
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("time t")
        axis.set_xlim(0, 1)
    axes[0].set_ylabel("nats per token and unit of time")
    figure.legend(*axes[1].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


class Steps:
    """Remembers the tokens of the first text after every step."""

    def __init__(self) -> None:
        self.states: list[list[int]] = []

    def __call__(self, step: int, t: float, x: torch.Tensor) -> None:
        del t
        if step == 0:
            self.states.clear()
        self.states.append(x[0].tolist())


def trajectory() -> Figure:
    """The steps at which each position of a text is drawn, and drawn again, by sampler."""
    drawn: dict[str, tuple[str, dict[str, Any]]] = {
        "analytic, 32 steps": ("english", {"sampler": "analytic", "steps": 32}),
        "first-hitting": ("english", {"sampler": "first-hitting"}),
        "entropy, 32 steps": ("english", {"sampler": "entropy", "steps": 32}),
        "analytic, 64 steps, on roulette": ("english-char", {"sampler": "analytic", "steps": 64}),
    }
    figure, axes = panels(len(drawn), 4, (2.3, 2.4))
    for axis, (title, (name, options)) in zip(axes, drawn.items(), strict=True):
        steps = Steps()
        generate(model(name), 1, length=64, options=SamplingOptions(seed=1, callback=steps, **options))
        mask, places = model(name).process.vocab_size, ([], [])
        again: tuple[list[int], list[int]] = ([], [])
        for number, (before, after) in enumerate(zip(steps.states, steps.states[1:], strict=False), 1):
            for position, (old, new) in enumerate(zip(before, after, strict=True)):
                if old != new:
                    xs, ys = places if old == mask else again
                    xs.append(position)
                    ys.append(number)
        axis.scatter(*places, s=7, color=BLUE, label="revealed")
        axis.scatter(*again, s=9, color=ORANGE, marker="x", label="replaced or masked again")
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("position in the text")
        axis.invert_yaxis()
    axes[0].set_ylabel("step")
    figure.legend(*axes[-1].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


# ----------------------------------------------------------------------------------------------------------------
# From results


def coverage() -> Figure:
    """The share of intervals that contain the exact bound, for each setting with 64 sequences."""
    rows = json.loads((RESULTS / "bound-coverage.json").read_text("utf-8")).values()
    rows = [row for row in rows if row["sequences"] == 64 and row.get("kind", "random") == "random"]
    shares = {
        "for the population": (BLUE, [row["population"] for row in rows]),
        "for a fixed set": (GREEN, [row["these"] for row in rows]),
        "the paper's estimator": (ORANGE, [row["independent"] for row in rows if row["independent"] is not None]),
    }
    figure, (axis,) = panels(1, 1, (6.4, 2.2))
    for place, (name, (colour, values)) in enumerate(shares.items()):
        spread = place + np.linspace(-0.3, 0.3, len(values))
        axis.scatter(100 * np.sort(values), spread, s=9, color=colour)
        axis.text(58.5, place, name, va="center", ha="left", color=colour)
    axis.axvline(95, color=GREY, linewidth=1, linestyle="--")
    axis.set_xlim(58, 100)
    axis.set_yticks([])
    axis.invert_yaxis()
    axis.set_xlabel("intervals that contain the exact bound, %; a point for each setting")
    return figure


def coordinates(point: Point) -> tuple[float, float]:
    """Entropy and perplexity of a cell."""
    return float(point.entropies.mean()), float(np.exp(point.log_perplexity(point.texts)[0]))


def draw_frontier(points: Sequence[Point], shown: Mapping[tuple[str, str], str], size: tuple[float, float]) -> Figure:
    """Perplexity over entropy: a panel for each run and sampler, a curve for each number of steps."""
    curves, real = curves_of(points), real_text(points)
    steps = sorted({curve.steps for curve in curves})
    gradient = LinearSegmentedColormap.from_list("steps", [BLUE, GREEN, ORANGE, RED])
    colours = dict(zip(steps, gradient(np.linspace(0, 1, len(steps))), strict=True))
    figure, axes = panels(len(shown), len(shown), size, sharex=True, sharey=True)
    for axis, (which, title) in zip(axes, shown.items(), strict=True):
        for curve in sorted(curves, key=lambda one: one.steps):
            if (curve.run, curve.sampler) == which:
                found = sorted(
                    (float(p.entropies.mean()), float(np.exp(p.log_perplexity(p.texts)[0]))) for p in curve.points
                )
                axis.plot(*zip(*found, strict=True), marker=".", linewidth=1, color=colours[curve.steps])
        if real is not None:
            axis.plot(*coordinates(real), "*", color=GREY)
        axis.set_yscale("log")
        axis.set_title(title, fontsize=9)
    axes[0].set_ylabel("perplexity under the judge")
    figure.supxlabel("token entropy, nats (star: real text)", fontsize=9, color=GREY)
    handles = [Line2D([], [], color=colours[one], marker=".", label=f"{one} steps") for one in steps]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(steps), fontsize=8)
    return figure


def frontier() -> Figure:
    """Some samplers of the packaged model on absorb."""
    samplers = ("analytic", "entropy", "remask-capped", "gibbs")
    return draw_frontier(
        Frontier(RESULTS / "frontier").points(JUDGE), {("english", s): s for s in samplers}, (2.3, 2.8)
    )


def frontier_processes() -> Figure:
    """The analytic sampler on the processes that shuffle."""
    points = Frontier(RESULTS / "frontier-processes").points(JUDGE)
    return draw_frontier(points, {(run, "analytic"): run for run in ("roulette", "hybrid", "uniform")}, (2.6, 2.8))


def weighted_methods(text: str) -> tuple[dict[str, list[float]], float]:
    """The bounds of four methods for 1, 2, 4, ... orders on some sequences of a text, and the exact value of the
    autoregressive network on the same sequences."""
    first, second = benchmark("result_tables").language_seeds()
    records = {name.partition("/")[0]: second.finished(name)["rows"][""]["texts"][text] for name in second.cells}
    found = {name: [*record["importance"]["by_orders"].values()] for name, record in records.items()}
    exact = first.per_block("ar", "", text, "tight")
    (count,) = {record["importance"]["blocks"] for record in records.values()}
    return found, float(exact[evenly_spaced(len(exact), count)].mean())


def how_tight() -> Figure:
    """The importance-weighted bound over the number of orders: the packaged model with its interval, and models that
    were trained alike, of several methods and without and with blocks, above the exact value of an autoregressive one.
    """
    packaged = json.loads((RESULTS / "how-tight.json").read_text("utf-8"))
    rows = json.loads((RESULTS / "blocks.json").read_text("utf-8"))["rows"]
    methods, exact = weighted_methods("wikitext2")
    figure, (left, middle, right) = panels(3, 3, (2.9, 2.8))
    nested = packaged["importance"]["by_orders"]
    orders = [int(count) for count in nested]
    left.plot(orders, [one["nats_per_token"] for one in nested.values()], marker=".", color=BLUE, label="importance")
    lows, highs = zip(*(one["ci95"] for one in nested.values()), strict=True)
    left.fill_between(orders, lows, highs, alpha=0.15, color=BLUE, linewidth=0, label="95% interval over texts")
    left.axhline(packaged["tight"]["nats_per_token"], color=GREY, linestyle="--", label="tight (ELBO)")
    left.set_title("english", fontsize=9)
    for (name, found), colour in zip(methods.items(), (BLUE, GREEN, ORANGE, GREY), strict=True):
        middle.plot(orders, found, marker=".", color=colour, label=name)
    middle.axhline(exact, color=RED, linestyle=":", label="autoregressive, exact")
    middle.set_title("four methods, 5,000 steps each", fontsize=9)
    middle.set_ylim(top=5.85)  # room for the legend
    for name, label, colour in (("128", "no blocks", BLUE), ("16", "blocks of 16", ORANGE)):
        right.plot(orders, [*rows[name]["importance"]["by_orders"].values()], marker=".", color=colour, label=label)
    right.axhline(rows["ar"]["exact"]["nats_per_token"], color=RED, linestyle=":", label="autoregressive, exact")
    right.set_title("three models, 1,000 steps each", fontsize=9)
    for axis in (left, middle, right):
        axis.set_xscale("log", base=2)
        axis.set_xticks(orders, [str(count) for count in orders])
        axis.set_xlabel("orders per text, K")
        axis.legend(fontsize=8)
    left.set_ylabel("nats per token, at most")
    return figure


def benchmark(module: str) -> Any:
    """A module of the benchmarks."""
    sys.path.insert(0, str(RESULTS.parent))
    return importlib.import_module(module)


def training_curves(name: str) -> Figure:
    """The learning curves of `benchmarks/NAME.py`, from its stored results."""
    return benchmark(f"{name}_tables").curves_figure(json.loads((RESULTS / f"{name}.json").read_text("utf-8")))


PICTURES: Mapping[str, Callable[[], Figure]] = {
    "clocks": clocks,
    "bound": bound,
    "trajectory": trajectory,
    "coverage": coverage,
    "how-tight": how_tight,
    "frontier": frontier,
    "frontier-processes": frontier_processes,
    "language": partial(training_curves, "language"),
    "spelling": partial(training_curves, "spelling"),
}


def denoising(path: Path) -> None:
    """The packaged model writing the text of `cedd sample --seed 1 --length 48`."""
    trajectory = Trajectory(model("english").tokenizer)
    model("english").generate(1, length=48, seed=1, callback=trajectory)
    trajectory.save_gif(path)


ANIMATIONS: Mapping[str, Callable[[Path], None]] = {"denoising": denoising}


def save(name: str, folder: Path = IMAGES) -> Path:
    """Draw one picture."""
    if name in ANIMATIONS:
        path = folder / f"{name}.gif"
        ANIMATIONS[name](path)
        return path
    with mpl.rc_context(STYLE):
        path = folder / f"{name}.svg"
        PICTURES[name]().savefig(path, metadata={"Date": None})
    return path


def main() -> int:
    """Draw the named pictures, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"one of {', '.join([*PICTURES, *ANIMATIONS])}; all by default"
    )
    names = parser.parse_args().names or [*PICTURES, *ANIMATIONS]
    if unknown := [name for name in names if name not in {*PICTURES, *ANIMATIONS}]:
        parser.error(f"invalid choice: {unknown[0]!r} (choose from {', '.join([*PICTURES, *ANIMATIONS])})")
    for name in names:
        print(save(name), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
