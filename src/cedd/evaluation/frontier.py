"""Frontiers: generative perplexity against entropy, over temperature (or top-p), steps, samplers and runs.

Shapes: N texts, R resamples, P points of a curve.

Generative perplexity at one temperature can reverse a ranking: a sampler that repeats itself is cheap ("Generative
Frontiers", arXiv 2604.02718). So a run, a sampler and a number of steps are a curve, whose points are temperatures, and
curves are compared at equal entropy: log perplexity is interpolated linearly along entropy, never beyond the ends.

Intervals are 95% over texts, by the Bayesian bootstrap (Rubin 1981): resample r gives text i the weight w_ri ~ Exp(1),
the same in every cell. Text i of all cells has the same seed, so what cells have in common is not in their differences.

A folder holds what was drawn, `samples/CELL.jsonl`, and what is known of it, `frontier.json`, rewritten after each
cell: texts can be drawn on one machine and judged on another, and the same command goes on where it was stopped.
Several processes may do so at the same time: each reads the file again before it changes it, under the folder's lock.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from cedd.data.corpora import open_corpus
from cedd.data.packing import pack
from cedd.evaluation.generative import (
    BootstrapInterval,
    Floats,
    Judge,
    Samples,
    distinct,
    load_samples,
    save_samples,
    token_entropy,
)
from cedd.models.loaded import LoadedModel, SamplingOptions
from cedd.models.locate import WEIGHTS_FILE
from cedd.samplers.loop import check_sampler, steps_taken
from cedd.storage import atomic_file, file_sha256, locked, read_json, reading, write_json

FRONTIER_FILE, SAMPLES_FOLDER, FORMAT = "frontier.json", "samples", 1
REAL_TEXT = "real text"
"""The run that no model is: text of people, where a perfect model would be."""
RESAMPLES = 1000
NEXT_TOKEN = "next-token"
"""The sampler of models without noise."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Setting:
    """How the texts of a cell are drawn."""

    run: str
    sampler: str
    steps: int
    temperature: float = 1.0
    top_p: float = 1.0

    @property
    def name(self) -> str:
        """Also the name of its file."""
        if self.run == REAL_TEXT:
            return "real-text"
        return f"{self.run}.{self.sampler}.{self.steps}.t{self.temperature:g}.p{self.top_p:g}"

    @property
    def curve(self) -> tuple[str, str, int]:
        return self.run, self.sampler, self.steps


_PARTS = tuple(part.name for part in fields(Setting))


@dataclass(frozen=True)
class Sweep:
    """The cells of a frontier. Temperatures or top-p are swept, not both: a curve has one parameter."""

    samplers: Sequence[str]
    steps: Sequence[int]
    temperatures: Sequence[float]
    top_ps: Sequence[float]

    def __post_init__(self) -> None:
        if not (self.samplers and self.steps and self.temperatures and self.top_ps):
            raise ValueError("a frontier needs samplers, steps and temperatures, at least one of each")
        if len(self.temperatures) > 1 and len(self.top_ps) > 1:
            raise ValueError("sweep temperatures or top-p, not both: a curve has one parameter")

    def settings(self, runs: Mapping[str, LoadedModel], length: int, say: Say) -> list[Setting]:
        """Curve by curve, each number of steps for all samplers and runs; what makes no sense is said and left out."""
        found, refused = dict[Setting, None](), dict[str, None]()
        for steps, sampler, (name, run) in itertools.product(self.steps, self.samplers, runs.items()):
            if not run.method.dynamics.noisy:
                how, calls = NEXT_TOKEN, length
            else:
                try:
                    check_sampler(sampler, run.method, run.process)
                except ValueError as error:
                    refused[f"{name} is left out of {sampler}: {error}"] = None
                    continue
                how, calls = sampler, steps_taken(sampler, steps, length)
            for temperature, top_p in itertools.product(self.temperatures, self.top_ps):
                found[Setting(name, how, calls, temperature, top_p)] = None
        for line in refused:
            say(line)
        return list(found)


# ----------------------------------------------------------------------------------------------------------------
# What is drawn and judged


class Frontier:
    """The cells of a folder.

    Args:
        folder: where they are, and are kept.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._file = folder, folder / FRONTIER_FILE
        self.content: dict[str, Any] = {"format": FORMAT, "runs": {}, "judges": {}, "cells": {}}
        self._own: dict[str, Any] = {}
        self._own_runs: dict[str, dict[str, str]] = {}
        self._own_judges: dict[str, str] = {}
        self._read: tuple[int, ...] | None = None
        self.refresh()

    @property
    def cells(self) -> dict[str, dict[str, Any]]:
        return self.content["cells"]

    def refresh(self) -> None:
        """Read the file again if it is another than before: another process may have added cells."""
        if (version := self._version()) is not None and version != self._read:
            with reading(self._file):
                self.content, self._read = _checked(read_json(self._file)), version
            self._agree()

    def _version(self) -> tuple[int, ...] | None:
        """What tells the file from those before it, each of which was replaced by a new one."""
        if not self._file.is_file():
            return None
        found = self._file.stat()
        return found.st_ino, found.st_mtime_ns, found.st_size

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Around a change of the content as it is by now, which is written at the end; others wait for as long."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with locked(self.folder):
            self.refresh()
            yield
            write_json(self._file, self.content)
            self._read = self._version()

    def begin(self, runs: Mapping[str, LoadedModel], length: int, seed: int) -> None:
        """Refuse what cannot stand in one picture: other tokens, lengths or seeds, or a run that has changed."""
        first = next(iter(runs.values()))
        if any(run.tokenizer.fingerprint != first.tokenizer.fingerprint for run in runs.values()):
            raise ValueError("these runs have different tokenizers: entropies of different tokens cannot be compared")
        for run in runs.values():
            run.check_length(length)
        self._own = {"length": length, "seed": seed, "tokenizer": first.tokenizer.fingerprint}
        self._own_runs = {
            name: {"model": run.name, "weights": file_sha256(run.folder.path / WEIGHTS_FILE)}
            for name, run in runs.items()
        }
        self._agree()

    def begin_judging(self, label: str, weights: str | None) -> None:
        """Refuse another judge than the one that is called so here, as far as the hash of its weights is known."""
        if weights is not None:
            self._own_judges[label] = weights
        self._agree()

    def _agree(self) -> None:
        """Say in the content what this process draws and judges by; refuse one that says otherwise."""
        for name, value in self._own.items():
            if self.content.setdefault(name, value) != value:
                raise ValueError(f"{self.folder} has cells of another {name}; name another folder for these")
        for name, run in self._own_runs.items():
            if self.content["runs"].setdefault(name, run)["weights"] != run["weights"]:
                raise ValueError(f"{self.folder} has cells of another model called {name}; name another folder")
        for name, weights in self._own_judges.items():
            if self.content["judges"].setdefault(name, weights) != weights:
                raise ValueError(f"{self.folder} has figures of another judge called {name}; rename this one")

    def waiting(self, settings: Sequence[Setting], n: int) -> list[Setting]:
        """Those of which there are fewer than n texts."""
        return [one for one in settings if self.cells.get(one.name, {}).get("texts", 0) < n]

    def unjudged(self, judge: str) -> list[str]:
        """The cells that a judge has not read."""
        return [name for name, cell in self.cells.items() if judge not in cell["judged"]]

    def draw(self, setting: Setting, run: LoadedModel, n: int, options: SamplingOptions) -> None:
        """n texts of a cell, which replace what it had."""
        how = {name: value for name, value in asdict(setting).items() if name != "run"}
        if not run.method.dynamics.noisy:
            how = {"temperature": setting.temperature, "top_p": setting.top_p}
        length, began = self.content["length"], time.perf_counter()
        ids = run.draw((n, length), replace(options, **how, seed=self.content["seed"])).numpy()
        seconds = time.perf_counter() - began
        texts = [run.tokenizer.decode(row) for row in ids]
        made_by = {**asdict(setting), "length": length, "seed": self.content["seed"]}
        self._keep(setting, Samples(texts, ids.tolist(), made_by), seconds)

    def take_text(self, data: str, run: LoadedModel, n: int) -> None:
        """n stretches of a text, evenly spaced, in the run's tokens."""
        setting, length = Setting(REAL_TEXT, "", 0), self.content["length"]
        if self.waiting([setting], n):
            ids = pack(open_corpus(data), run.tokenizer, length).evenly_spaced(n)
            if not len(ids):
                raise ValueError(f"{data} has fewer than {length} tokens: there is no text to compare with")
            self._keep(setting, Samples([run.tokenizer.decode(row) for row in ids], ids.tolist(), {"text": data}), None)

    def _keep(self, setting: Setting, samples: Samples, seconds: float | None) -> None:
        """Unless another process has kept as many of them meanwhile, and may have judged those."""
        cell = {
            **asdict(setting),
            "texts": len(samples.texts),
            "seconds": seconds,
            "entropies": [token_entropy(ids) for ids in samples.ids],
            "distinct": {str(n): distinct(samples.ids, n) for n in (1, 2, 3)},
            "judged": {},
        }
        with self._changing():
            if self.waiting([setting], len(samples.texts)):
                file = self._samples_file(setting.name)
                file.parent.mkdir(parents=True, exist_ok=True)
                save_samples(file, samples)
                self.cells[setting.name] = cell

    def judge(self, name: str, judge: Judge, label: str) -> None:
        """Let a judge read the texts of a cell, and once more if another process has drawn others meanwhile."""
        while name in self.unjudged(label):
            texts = self._texts(name)
            read = judge.judge(texts)
            if not any(one.tokens for one in read):
                raise ValueError(f"no text of {name} has two tokens of the judge; there is nothing to judge")
            with self._changing():
                if self._texts(name) == texts:
                    self.cells[name]["judged"][label] = {
                        "precision": judge.precision,
                        "nats": [one.nats for one in read],
                        "tokens": [one.tokens for one in read],
                        "cut_off_tokens": sum(one.cut_off for one in read),
                    }

    def _texts(self, name: str) -> list[str]:
        """Those of a cell."""
        texts = load_samples(self._samples_file(name)).texts
        if len(texts) != self.cells[name]["texts"]:
            raise ValueError(f"{self._samples_file(name)} is not what {self._file} says of it; draw this cell again")
        return texts

    def _samples_file(self, name: str) -> Path:
        return self.folder / SAMPLES_FOLDER / f"{name}.jsonl"

    def points(self, judge: str) -> list[Point]:
        """What a judge has found, in the order in which the cells were drawn."""
        return [
            Point(
                Setting(*(cell[name] for name in _PARTS)),
                np.array(cell["judged"][judge]["nats"]),
                np.array(cell["judged"][judge]["tokens"], dtype=np.float64),
                np.array(cell["entropies"]),
                cell["distinct"],
                cell["seconds"],
            )
            for cell in self.cells.values()
            if judge in cell["judged"]
        ]


def _checked(content: dict[str, Any]) -> dict[str, Any]:
    """The content of a frontier's file, if it is one."""
    content.setdefault("judges", {})  # a file may be older than this
    parts = (content.get(name) for name in ("runs", "judges", "cells"))
    if content.get("format") != FORMAT or not all(isinstance(part, dict) for part in parts):
        raise ValueError("it is no frontier, or one of a newer cedd")
    for name, cell in content["cells"].items():
        lists = [cell["entropies"], *(read[kind] for read in cell["judged"].values() for kind in ("nats", "tokens"))]
        whole = all(
            len(values) == cell["texts"] and all(isinstance(v, int | float) for v in values) for values in lists
        )
        if not (whole and name == Setting(*(cell[part] for part in _PARTS)).name and cell["distinct"]["2"] >= 0):
            raise ValueError(f"the cell {name} is not what it says")
    return content


# ----------------------------------------------------------------------------------------------------------------
# Figures


def text_weights(n: int, seed: int = 0) -> Floats:
    """[1 + R, N]: of each resample the weights of n texts, after a row of ones. Text i's do not depend on n."""
    drawn = np.random.default_rng(seed).exponential(size=(n, RESAMPLES))
    return np.concatenate([np.ones((1, n)), drawn.T])


def interval(values: Floats, texts: int) -> BootstrapInterval:
    """The first of values [1 + R], which is the estimate, and the 95% interval of the others; one text has none."""
    if texts < 2:
        return BootstrapInterval(float(values[0]), None, None)
    low, high = np.quantile(values[1:], (0.025, 0.975))
    return BootstrapInterval(float(values[0]), float(low), float(high))


@dataclass(frozen=True)
class Point:
    """A cell that a judge has read: nats, tokens (the judge's) and entropies of its texts [N]."""

    setting: Setting
    nats: Floats
    tokens: Floats
    entropies: Floats
    distinct: Mapping[str, float]
    seconds: float | None

    @property
    def texts(self) -> int:
        return len(self.entropies)

    def log_perplexity(self, weights: Floats) -> Floats:
        """Of the corpus of texts: sum of nats / sum of tokens, [1 + R]."""
        own = weights[:, : self.texts]
        return (own @ self.nats) / (own @ self.tokens)

    def mean_perplexity(self, weights: Floats) -> Floats:
        """The mean of the texts' own, of those that have two of the judge's tokens, [1 + R]."""
        own, read = weights[:, : self.texts], self.tokens > 0
        each = np.exp(self.nats[read] / self.tokens[read])
        return (own[:, read] @ each) / own[:, read].sum(1)

    def entropy(self, weights: Floats) -> Floats:
        """The mean of the texts' token entropies, [1 + R]."""
        own = weights[:, : self.texts]
        return (own @ self.entropies) / own.sum(1)


@dataclass(frozen=True)
class Curve:
    """The points of one run, sampler and number of steps."""

    run: str
    sampler: str
    steps: int
    points: Sequence[Point]

    @property
    def texts(self) -> int:
        """How many all of its points have."""
        return min(point.texts for point in self.points)

    def reach(self) -> tuple[float, float]:
        """The least and the greatest entropy."""
        found = [float(point.entropies.mean()) for point in self.points]
        return min(found), max(found)

    def log_perplexity_at(self, entropy: float, weights: Floats) -> Floats | None:
        """Interpolated, [1 + R]; None where the curve does not reach so far. The curve of a resample may end a little
        before; its last piece is then continued, by its own length at most: one of nearly equal entropies would say
        anything."""
        low, high = self.reach()
        if len(self.points) < 2 or not low <= entropy <= high:
            return None
        entropies = np.stack([point.entropy(weights) for point in self.points], 1)
        logs = np.stack([point.log_perplexity(weights) for point in self.points], 1)
        order = entropies.argsort(1)
        entropies, logs = np.take_along_axis(entropies, order, 1), np.take_along_axis(logs, order, 1)
        right = (entropies < entropy).sum(1).clip(1, len(self.points) - 1)
        rows = np.arange(len(entropies))
        left_x, left_y = entropies[rows, right - 1], logs[rows, right - 1]
        right_x, right_y = entropies[rows, right], logs[rows, right]
        gap = right_x - left_x
        share = np.divide(entropy - left_x, gap, out=np.full_like(gap, 0.5), where=gap > 0)  # of equals, the middle
        return left_y + share.clip(-1, 2) * (right_y - left_y)


def curves_of(points: Sequence[Point]) -> list[Curve]:
    """The points as curves, in the order in which they began."""
    found: dict[tuple[str, str, int], list[Point]] = {}
    for point in points:
        if point.setting.run != REAL_TEXT:
            found.setdefault(point.setting.curve, []).append(point)
    return [Curve(*name, points) for name, points in found.items()]


def real_text(points: Sequence[Point]) -> Point | None:
    """The point of the text of people, if there is one."""
    return next((point for point in points if point.setting.run == REAL_TEXT), None)


def common_entropy(points: Sequence[Point]) -> float | None:
    """Where curves are compared if nobody says: at the entropy of real text, or in the middle of what all reach."""
    if (real := real_text(points)) is not None:
        return float(real.entropies.mean())
    reaches = [curve.reach() for curve in curves_of(points) if len(curve.points) > 1]
    if not reaches:
        return None
    low, high = max(low for low, _ in reaches), min(high for _, high in reaches)
    return (low + high) / 2 if low <= high else None


@dataclass(frozen=True)
class Compared:
    """A curve at one entropy; None where it does not reach that."""

    curve: Curve
    perplexity: BootstrapInterval | None
    over_most_steps: BootstrapInterval | None
    """The ratio to the same run and sampler with the most steps."""
    over_first: BootstrapInterval | None
    """The ratio to the first curve."""


def compared(points: Sequence[Point], entropy: float, seed: int = 0) -> list[Compared]:
    """All curves at one entropy."""
    curves = curves_of(points)
    weights = text_weights(max(point.texts for point in points), seed)
    logs = [curve.log_perplexity_at(entropy, weights) for curve in curves]

    def ratio(one: int, other: int) -> BootstrapInterval | None:
        mine, its = logs[one], logs[other]
        if mine is None or its is None or one == other:
            return None
        return interval(np.exp(mine - its), curves[one].texts)

    found = list[Compared]()
    for number, (curve, mine) in enumerate(zip(curves, logs, strict=True)):
        family = [i for i, one in enumerate(curves) if (one.run, one.sampler) == (curve.run, curve.sampler)]
        most = max(family, key=lambda i: curves[i].steps)
        perplexity = None if mine is None else interval(np.exp(mine), curve.texts)
        found.append(Compared(curve, perplexity, ratio(number, most), ratio(number, 0)))
    return found


def figures(point: Point, seed: int = 0) -> dict[str, Any]:
    """What is printed of a cell."""
    weights = text_weights(point.texts, seed)
    return {
        **asdict(point.setting),
        "texts": point.texts,
        "corpus_perplexity": asdict(interval(np.exp(point.log_perplexity(weights)), point.texts)),
        "mean_of_sample_perplexities": asdict(interval(point.mean_perplexity(weights), point.texts)),
        "token_entropy": asdict(interval(point.entropy(weights), point.texts)),
        "distinct": dict(point.distinct),
        "seconds": point.seconds,
    }


# ----------------------------------------------------------------------------------------------------------------
# The picture


_COLUMNS = 4


def save_plot(path: Path, points: Sequence[Point], judge: str, seed: int = 0) -> None:
    """A panel for each run and sampler, a curve for each number of steps: perplexity over entropy, with intervals."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    curves, real = curves_of(points), real_text(points)
    steps = sorted({curve.steps for curve in curves})
    colours = dict(zip(steps, colormaps["viridis"](np.linspace(0, 0.9, len(steps))), strict=True))
    panels: dict[tuple[str, str], list[Curve]] = {}
    for curve in sorted(curves, key=lambda one: one.steps):
        panels.setdefault((curve.run, curve.sampler), []).append(curve)
    names = list(dict.fromkeys((curve.run, curve.sampler) for curve in curves))
    columns = min(_COLUMNS, len(names))
    rows = -(-len(names) // columns)
    figure = Figure(figsize=(1.2 + 2.6 * columns, 1.0 + 2.5 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flat
    for name, axes in itertools.zip_longest(names, grid):
        if name is None:
            axes.set_axis_off()
            continue
        axes.set_yscale("log")
        axes.set_title(", ".join(name), fontsize=9)
        for curve in panels[name]:
            _draw(axes, curve.points, colours[curve.steps], f"{curve.steps} steps", seed)
        if real is not None:
            _draw(axes, [real], "black", REAL_TEXT, seed)
        axes.legend(fontsize=6)
    figure.supxlabel("token entropy of a text, nats", fontsize=9)
    figure.supylabel("generative perplexity", fontsize=9)
    figure.suptitle(f"judged by {judge}", fontsize=9)
    with atomic_file(path) as file:
        figure.savefig(file, format=path.suffix[1:], dpi=150)


def _draw(axes: Any, points: Sequence[Point], colour: Any, label: str, seed: int) -> None:
    """Points in order of entropy, with their intervals in both directions."""
    weights = text_weights(max(point.texts for point in points), seed)
    ordered = sorted(points, key=lambda point: point.entropies.mean())
    across = [interval(point.entropy(weights), point.texts) for point in ordered]
    up = [interval(np.exp(point.log_perplexity(weights)), point.texts) for point in ordered]
    (x, left_right), (y, below_above) = (_centres_and_arms(axis) for axis in (across, up))
    axes.errorbar(x, y, xerr=left_right, yerr=below_above, color=colour, label=label, marker=".", linewidth=1)


def _centres_and_arms(intervals: Sequence[BootstrapInterval]) -> tuple[list[float], Floats]:
    """Values [P], and how far their intervals reach to either side, [2, P]."""
    centres = [one.value for one in intervals]
    arms = [
        (0.0, 0.0) if one.low is None or one.high is None else (one.value - one.low, one.high - one.value)
        for one in intervals
    ]
    return centres, np.array(arms).T.clip(0.0)
