"""Frontiers: generative perplexity against entropy, over temperature (or top-p), steps, samplers and models.

Shapes: N texts, P points of a curve.

Generative perplexity at one temperature can reverse a ranking: repetitive text has a low perplexity ("Generative
Frontiers", arXiv 2604.02718). Each model, sampler and number of steps therefore gives a curve, whose points are
temperatures, and curves are compared at equal entropy: log perplexity is interpolated linearly along entropy, never
beyond the ends.

Intervals are 95% intervals over texts, by the jackknife (`cedd.evaluation.intervals`). Text i has the same seed in all
cells and is left out of all of them together, so that common variation cancels in ratios.

A folder contains the texts, `samples/CELL.jsonl`, and the results, `frontier.json`, which is rewritten after each cell.
Texts can be drawn on one machine and scored on another, and the same command continues an interrupted sweep. Several
processes may work on a folder at the same time: each reads the file again before it changes it, holding the folder's
lock.
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
    Judge,
    Samples,
    distinct,
    load_samples,
    log_perplexity,
    mean_perplexity,
    save_samples,
    token_entropy,
)
from cedd.evaluation.intervals import Floats, IntervalEstimate, jackknife, leave_one_out_sums
from cedd.models.loaded_model import LoadedModel
from cedd.models.locate import WEIGHTS_FILE
from cedd.samplers import SamplingOptions, get_sampler
from cedd.storage import JSONObject, atomic_file, file_sha256, locked, read_json, reading, write_json

FRONTIER_FILE, SAMPLES_FOLDER, FORMAT = "frontier.json", "samples", 1
REAL_TEXT = "real text"
"""In place of a model's name: human text, which a perfect model would match."""

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
        """The name of the cell and its file."""
        if self.run == REAL_TEXT:
            return "real-text"
        return f"{self.run}.{self.sampler}.{self.steps}.t{self.temperature:g}.p{self.top_p:g}"

    @property
    def curve(self) -> tuple[str, str, int]:
        return self.run, self.sampler, self.steps


_PARTS = tuple(part.name for part in fields(Setting))


@dataclass(frozen=True)
class Sweep:
    """The cells of a frontier. Either temperatures or top-p are swept, since a curve has one parameter."""

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
        """All settings, curve by curve, each number of steps for all samplers and models. Invalid combinations are
        reported and left out."""
        found, refused = dict[Setting, None](), dict[str, None]()
        for steps, sampler, (name, run) in itertools.product(self.steps, self.samplers, runs.items()):
            chosen = get_sampler(sampler, run.method)
            try:
                chosen.check(run.method, run.process)
            except ValueError as error:
                why = str(error).partition("; use ")[0]
                refused[f"{name} is left out of {sampler}: {why}"] = None
                continue
            how = sampler if chosen.noisy else chosen.name
            for temperature, top_p in itertools.product(self.temperatures, self.top_ps):
                found[Setting(name, how, chosen.steps_taken(steps, length), temperature, top_p)] = None
        for line in refused:
            say(line)
        return list(found)


# ----------------------------------------------------------------------------------------------------------------
# Drawing and scoring


class Frontier:
    """The cells in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._file = folder, folder / FRONTIER_FILE
        self.content: JSONObject = {"format": FORMAT, "runs": {}, "judges": {}, "cells": {}}
        self._own: JSONObject = {}
        self._own_runs: dict[str, dict[str, str]] = {}
        self._own_judges: dict[str, str] = {}
        self._read: tuple[int, ...] | None = None
        self.refresh()

    @property
    def cells(self) -> dict[str, JSONObject]:
        return self.content["cells"]

    def refresh(self) -> None:
        """Read the file again if it has changed, since another process may have added cells."""
        if (version := self._version()) is not None and version != self._read:
            with reading(self._file):
                self.content, self._read = _checked(read_json(self._file)), version
            self._agree()

    def _version(self) -> tuple[int, ...] | None:
        """An identifier of the file's version; every change replaces the file."""
        if not self._file.is_file():
            return None
        found = self._file.stat()
        return found.st_ino, found.st_mtime_ns, found.st_size

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """A context for a change of the current content, which is written at the end; other processes wait."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with locked(self.folder):
            self.refresh()
            yield
            write_json(self._file, self.content)
            self._read = self._version()

    def begin(self, runs: Mapping[str, LoadedModel], length: int, seed: int) -> None:
        """Refuse to mix tokenizers, lengths or seeds, and models that have changed."""
        first = next(iter(runs.values()))
        if any(run.tokenizer.fingerprint != first.tokenizer.fingerprint for run in runs.values()):
            raise ValueError("these models have different tokenizers, so their entropies cannot be compared")
        for run in runs.values():
            run.check_length(length)
        self._own = {"length": length, "seed": seed, "tokenizer": first.tokenizer.fingerprint}
        self._own_runs = {
            name: {"model": run.name, "weights": file_sha256(run.folder.path / WEIGHTS_FILE)}
            for name, run in runs.items()
        }
        self._agree()

    def begin_judging(self, label: str, weights: str | None) -> None:
        """Refuse another judge of the same name, if the hash of its weights is known."""
        if weights is not None:
            self._own_judges[label] = weights
        self._agree()

    def _agree(self) -> None:
        """Record the settings of this process in the content, or refuse them if the content has others."""
        for name, value in self._own.items():
            if self.content.setdefault(name, value) != value:
                raise ValueError(f"{self.folder} has cells of another {name}; use another folder")
        for name, run in self._own_runs.items():
            if self.content["runs"].setdefault(name, run)["weights"] != run["weights"]:
                raise ValueError(f"{self.folder} has cells of another model named {name}; use another folder")
        for name, weights in self._own_judges.items():
            if self.content["judges"].setdefault(name, weights) != weights:
                raise ValueError(f"{self.folder} has scores of another judge named {name}; rename this one")

    def waiting(self, settings: Sequence[Setting], n: int) -> list[Setting]:
        """The settings with fewer than n texts."""
        return [one for one in settings if self.cells.get(one.name, {}).get("texts", 0) < n]

    def unjudged(self, judge: str) -> list[str]:
        """The cells that a judge has not scored."""
        return [name for name, cell in self.cells.items() if judge not in cell["judged"]]

    def draw(self, setting: Setting, run: LoadedModel, n: int, options: SamplingOptions) -> None:
        """Draw n texts for a cell, replacing existing ones."""
        how = {name: value for name, value in asdict(setting).items() if name != "run"}
        length, began = self.content["length"], time.perf_counter()
        ids = run.draw((n, length), replace(options, **how, seed=self.content["seed"])).numpy()
        seconds = time.perf_counter() - began
        texts = [run.tokenizer.decode(row) for row in ids]
        made_by = {**asdict(setting), "length": length, "seed": self.content["seed"]}
        self._keep(setting, Samples(texts, ids.tolist(), made_by), seconds)

    def take_text(self, data: str, run: LoadedModel, n: int) -> None:
        """Store n passages of a text, evenly spaced, in the model's tokens."""
        setting, length = Setting(REAL_TEXT, "", 0), self.content["length"]
        if self.waiting([setting], n):
            ids = pack(open_corpus(data), run.tokenizer, length).evenly_spaced(n)
            if not len(ids):
                raise ValueError(f"{data} has fewer than {length} tokens, too few for a comparison")
            self._keep(setting, Samples([run.tokenizer.decode(row) for row in ids], ids.tolist(), {"text": data}), None)

    def _keep(self, setting: Setting, samples: Samples, seconds: float | None) -> None:
        """Store a cell, unless another process has stored one with as many texts meanwhile, which may have been
        scored."""
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
        """Score the texts of a cell, and again if another process has replaced them meanwhile."""
        while name in self.unjudged(label):
            texts = self._texts(name)
            read = judge.judge(texts)
            if not any(one.tokens for one in read):
                raise ValueError(f"no text of {name} has two tokens of the judge")
            with self._changing():
                if self._texts(name) == texts:
                    self.cells[name]["judged"][label] = {
                        "precision": judge.precision,
                        "nats": [one.nats for one in read],
                        "tokens": [one.tokens for one in read],
                        **({"stderr": [one.stderr for one in read]} if any(one.stderr for one in read) else {}),
                        "cut_off_tokens": sum(one.cut_off for one in read),
                    }

    def _texts(self, name: str) -> list[str]:
        """The texts of a cell."""
        texts = load_samples(self._samples_file(name)).texts
        if len(texts) != self.cells[name]["texts"]:
            raise ValueError(
                f"{self._samples_file(name)} does not match its entry in {self._file}; draw this cell again"
            )
        return texts

    def _samples_file(self, name: str) -> Path:
        return self.folder / SAMPLES_FOLDER / f"{name}.jsonl"

    def points(self, judge: str) -> list[Point]:
        """The cells that a judge has scored, in the order in which they were drawn."""
        return [
            Point(
                Setting(*(cell[name] for name in _PARTS)),
                np.array(read["nats"]),
                np.array(read["tokens"], dtype=np.float64),
                np.array(read.get("stderr", np.zeros(cell["texts"]))),
                np.array(cell["entropies"]),
                cell["distinct"],
                cell["seconds"],
            )
            for cell in self.cells.values()
            if (read := cell["judged"].get(judge)) is not None
        ]


def _checked(content: JSONObject) -> JSONObject:
    """The content of a frontier's file, checked."""
    parts = (content.get(name) for name in ("runs", "judges", "cells"))
    if content.get("format") != FORMAT or not all(isinstance(part, dict) for part in parts):
        raise ValueError("it is not a frontier, or was written by a newer cedd")
    for name, cell in content["cells"].items():
        lists = [cell["entropies"]]
        for read in cell["judged"].values():
            lists += [read["nats"], read["tokens"], read.get("stderr", read["nats"])]
        whole = all(
            len(values) == cell["texts"] and all(isinstance(v, int | float) for v in values) for values in lists
        )
        if not (whole and name == Setting(*(cell[part] for part in _PARTS)).name and cell["distinct"]["2"] >= 0):
            raise ValueError(f"the cell {name} is inconsistent")
    return content


# ----------------------------------------------------------------------------------------------------------------
# Statistics


@dataclass(frozen=True)
class Point:
    """A scored cell: nats, tokens (the judge's) and the standard error of the nats, and entropies of its texts [n].

    The methods give a statistic for all texts, then with each of `texts` >= n texts left out: [1 + texts].
    """

    setting: Setting
    nats: Floats
    tokens: Floats
    stderr: Floats
    entropies: Floats
    distinct: Mapping[str, float]
    seconds: float | None

    @property
    def texts(self) -> int:
        return len(self.entropies)

    def log_perplexity(self, texts: int) -> Floats:
        """The log of the corpus perplexity."""
        return log_perplexity(self.nats, self.tokens, texts)

    def mean_perplexity(self, texts: int) -> Floats:
        """The mean of the texts' perplexities."""
        return mean_perplexity(self.nats, self.tokens, self.stderr, texts)

    def entropy(self, texts: int) -> Floats:
        """The mean of the texts' token entropies."""
        with np.errstate(invalid="ignore"):  # 0/0 without the only text
            return leave_one_out_sums(self.entropies, texts) / leave_one_out_sums(np.ones(self.texts), texts)


@dataclass(frozen=True)
class FrontierCurve:
    """The points of one model, sampler and number of steps."""

    run: str
    sampler: str
    steps: int
    points: Sequence[Point]

    @property
    def texts(self) -> int:
        """The number of texts of its largest cell."""
        return max(point.texts for point in self.points)

    def reach(self) -> tuple[float, float]:
        """The lowest and the highest entropy."""
        found = [float(point.entropies.mean()) for point in self.points]
        return min(found), max(found)

    def log_perplexity_at(self, entropy: float, texts: int) -> Floats | None:
        """Interpolated, [1 + texts]; None if the curve does not reach this entropy.

        With a text left out the curve may end a little earlier. Its last segment is then extrapolated, by at most its
        own length, since the slope between points of nearly equal entropy is arbitrary.
        """
        low, high = self.reach()
        if len(self.points) < 2 or not low <= entropy <= high:
            return None
        entropies = np.stack([point.entropy(texts) for point in self.points], 1)
        logs = np.stack([point.log_perplexity(texts) for point in self.points], 1)
        order = entropies.argsort(1)
        entropies, logs = np.take_along_axis(entropies, order, 1), np.take_along_axis(logs, order, 1)
        right = (entropies < entropy).sum(1).clip(1, len(self.points) - 1)
        rows = np.arange(len(entropies))
        left_x, left_y = entropies[rows, right - 1], logs[rows, right - 1]
        right_x, right_y = entropies[rows, right], logs[rows, right]
        gap = right_x - left_x
        share = np.divide(entropy - left_x, gap, out=np.full_like(gap, 0.5), where=gap > 0)  # of equals, the middle
        return left_y + share.clip(-1, 2) * (right_y - left_y)


def curves_of(points: Sequence[Point]) -> list[FrontierCurve]:
    """The points as curves, in the order in which they began."""
    found: dict[tuple[str, str, int], list[Point]] = {}
    for point in points:
        if point.setting.run != REAL_TEXT:
            found.setdefault(point.setting.curve, []).append(point)
    return [FrontierCurve(*name, points) for name, points in found.items()]


def real_text(points: Sequence[Point]) -> Point | None:
    """The point of human text, if there is one."""
    return next((point for point in points if point.setting.run == REAL_TEXT), None)


def common_entropy(points: Sequence[Point]) -> float | None:
    """Default entropy of comparison: that of human text, or the middle of the range that all curves reach."""
    if (real := real_text(points)) is not None:
        return float(real.entropies.mean())
    reaches = [curve.reach() for curve in curves_of(points) if len(curve.points) > 1]
    if not reaches:
        return None
    low, high = max(low for low, _ in reaches), min(high for _, high in reaches)
    return (low + high) / 2 if low <= high else None


@dataclass(frozen=True)
class CurveComparison:
    """A curve at one entropy; None if it does not reach that."""

    curve: FrontierCurve
    perplexity: IntervalEstimate | None
    over_most_steps: IntervalEstimate | None
    """Ratio to the same model and sampler with the most steps."""
    over_first: IntervalEstimate | None
    """Ratio to the first curve."""


def compare_curves(points: Sequence[Point], entropy: float) -> list[CurveComparison]:
    """All curves at one entropy."""
    curves = curves_of(points)
    texts = max((curve.texts for curve in curves), default=0)
    logs = [curve.log_perplexity_at(entropy, texts) for curve in curves]

    def ratio(one: int, other: int) -> IntervalEstimate | None:
        mine, its = logs[one], logs[other]
        if mine is None or its is None or one == other:
            return None
        return jackknife(mine - its, linear=False).exp()

    found = list[CurveComparison]()
    for number, (curve, mine) in enumerate(zip(curves, logs, strict=True)):
        family = [i for i, one in enumerate(curves) if (one.run, one.sampler) == (curve.run, curve.sampler)]
        most = max(family, key=lambda i: curves[i].steps)
        perplexity = None if mine is None else jackknife(mine, linear=False).exp()
        found.append(CurveComparison(curve, perplexity, ratio(number, most), ratio(number, 0)))
    return found


def figures(point: Point) -> JSONObject:
    """The printed results of a cell."""
    return {
        **asdict(point.setting),
        "texts": point.texts,
        "corpus_perplexity": asdict(jackknife(point.log_perplexity(point.texts)).exp()),
        "mean_of_sample_perplexities": asdict(jackknife(point.mean_perplexity(point.texts))),
        "token_entropy": asdict(jackknife(point.entropy(point.texts))),
        "distinct": dict(point.distinct),
        "seconds": point.seconds,
    }


# ----------------------------------------------------------------------------------------------------------------
# The plot


_COLUMNS = 4


def save_plot(path: Path, points: Sequence[Point], judge: str) -> None:
    """Plot perplexity over entropy with intervals: one panel per model and sampler, one curve per number of steps."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    curves, real = curves_of(points), real_text(points)
    steps = sorted({curve.steps for curve in curves})
    colours = dict(zip(steps, colormaps["viridis"](np.linspace(0, 0.9, len(steps))), strict=True))
    panels: dict[tuple[str, str], list[FrontierCurve]] = {}
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
            _draw(axes, curve.points, colours[curve.steps], f"{curve.steps} steps")
        if real is not None:
            _draw(axes, [real], "black", REAL_TEXT)
        axes.legend(fontsize=6)
    figure.supxlabel("token entropy of a text, nats", fontsize=9)
    figure.supylabel("generative perplexity", fontsize=9)
    figure.suptitle(f"judged by {judge}", fontsize=9)
    with atomic_file(path) as file:
        figure.savefig(file, format=path.suffix[1:], dpi=150)


def _draw(axes: Any, points: Sequence[Point], colour: Any, label: str) -> None:
    """Points in order of entropy, with their intervals in both directions."""
    ordered = sorted(points, key=lambda point: point.entropies.mean())
    across = [jackknife(point.entropy(point.texts)) for point in ordered]
    up = [jackknife(point.log_perplexity(point.texts)).exp() for point in ordered]
    (x, left_right), (y, below_above) = (_centres_and_arms(axis) for axis in (across, up))
    axes.errorbar(x, y, xerr=left_right, yerr=below_above, color=colour, label=label, marker=".", linewidth=1)


def _centres_and_arms(intervals: Sequence[IntervalEstimate]) -> tuple[list[float], Floats]:
    """Values [P], and the distances to the ends of their intervals, [2, P]."""
    centres = [one.value for one in intervals]
    arms = [
        (0.0, 0.0) if one.low is None or one.high is None else (one.value - one.low, one.high - one.value)
        for one in intervals
    ]
    return centres, np.array(arms).T.clip(0.0)
