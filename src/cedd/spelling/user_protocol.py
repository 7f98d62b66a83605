"""The user's spelling protocol: letters replaced or transposed at positions that the model does not know.

The original, the corrupted and the corrected text are compared letter by letter: mistakes are fixed, missed or altered
into other mistakes, and correct letters are kept or broken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from cedd.models.loaded_model import LoadedModel
from cedd.spelling.book import Book, Progress
from cedd.spelling.correct import CorrectionProgress, corrections
from cedd.spelling.corruption import MISTAKES
from cedd.spelling.options import CorrectionOptions, correction_options
from cedd.spelling.protocols import UserOptions
from cedd.spelling.shares import Share
from cedd.storage import JSONMapping, JSONObject, atomic_file


@dataclass(frozen=True)
class Outcomes:
    """The outcome of a correction; shares have blocks as units.

    Among mistakes: fixed, missed (unchanged), altered (changed into another mistake). Among correct characters: broken
    letters (of any alphabet), and broken others (spaces, digits, punctuation). Among all characters: wrong before, and
    wrong after correction.
    """

    fixed: Share
    missed: Share
    altered: Share
    broken: Share
    broken_others: Share
    before: Share
    after: Share

    def record(self) -> JSONObject:
        record = {field.name: getattr(self, field.name).record() for field in fields(self)}
        made = {name: record["before"][name] for name in ("share", "count", "total")}  # nothing that varies
        return record | {"before": made}


def outcomes(original: str, corrupted: str, corrected: str, unit: int = 128, span: int = 1) -> Outcomes:
    """Compare three texts of the same length letter by letter; `unit` characters make a block.

    A mistake is `span` wrong letters in a row (2: swapped neighbours). It is fixed if all of them are correct again,
    missed if none was changed, and counts in the block of its first letter.
    """
    if not len(original) == len(corrupted) == len(corrected):
        raise ValueError("the original, the corrupted and the corrected text must have the same length")
    if unit < 1 or not original:
        raise ValueError("the text and its blocks must have at least one character")
    was, seen, now = (np.frombuffer(text.encode("utf-32-le"), dtype="<u4") for text in (original, corrupted, corrected))
    letters = np.fromiter(map(str.isalpha, original), np.bool_, len(original))
    mistake, wrong, touched = seen != was, now != was, now != seen
    starts = np.arange(0, len(was), unit)
    first = np.zeros_like(mistake)
    first[np.flatnonzero(mistake)[::span]] = True
    any_wrong, any_touched = (_within(flags, span) for flags in (wrong, touched))

    def share(of: NDArray[np.bool_], what: NDArray[np.bool_]) -> Share:
        counts = (np.add.reduceat(hit.astype(np.int64), starts) for hit in (of & what, of))
        hits, totals = (torch.from_numpy(count) for count in counts)
        return Share(hits, totals)

    everywhere = np.ones_like(mistake)
    return Outcomes(
        fixed=share(first, ~any_wrong),
        missed=share(first, ~any_touched),
        altered=share(first, any_touched & any_wrong),
        broken=share(~mistake & letters, wrong),
        broken_others=share(~mistake & ~letters, wrong),
        before=share(everywhere, mistake),
        after=share(everywhere, wrong),
    )


def _within(flags: NDArray[np.bool_], span: int) -> NDArray[np.bool_]:
    """Whether a position or one of the span - 1 after it is flagged."""
    return np.logical_or.reduce(np.lib.stride_tricks.sliding_window_view(np.pad(flags, (0, span - 1)), span), axis=-1)


# ----------------------------------------------------------------------------------------------------------------
# Measuring


@dataclass(frozen=True)
class CorrectionResult:
    """One way to correct, with its options and outcomes."""

    way: str
    options: JSONMapping
    outcomes: Outcomes

    @property
    def threshold(self) -> float:
        return self.options["threshold"]

    def record(self) -> JSONObject:
        return {"way": self.way, "options": dict(self.options), **self.outcomes.record()}


@dataclass(frozen=True)
class UserProtocol(UserOptions):
    """The user's protocol."""

    def why_not(self, loaded: LoadedModel, book: Book, seed: int) -> str:
        """Why it cannot be measured; empty if it can."""
        tokenizer = loaded.tokenizer
        if tokenizer.characters is None:
            return f"the user's protocol compares letters: it needs a character tokenizer, not {tokenizer.name}"
        try:
            correction_options(loaded, {})
        except ValueError as error:
            return str(error)
        made = MISTAKES[self.mistakes]
        if not len(made.make(book.text, self.rate, seed).positions):
            return f"the text is too short: at a rate of {self.rate:g} there are no {made.counted}"
        return ""

    def measure(
        self, loaded: LoadedModel, book: Book, seed: int, progress: Progress = lambda done, planned: None
    ) -> list[CorrectionResult]:
        """Make mistakes and correct them in every requested way; the model's own way comes first."""
        mistake = MISTAKES[self.mistakes]
        corruption = mistake.make(book.text, self.rate, seed)
        ways = self.ways(loaded)
        unique = list(dict.fromkeys(options for _, options in ways))
        counter, seen = CorrectionProgress(unique, progress), dict[CorrectionOptions, Outcomes]()
        texts = corrections(loaded, corruption.text, unique, seed, counter.read)
        for options, text in zip(unique, texts, strict=True):
            seen[options] = outcomes(corruption.original, corruption.text, text, book.length, mistake.span)
            counter.finish()
        return [CorrectionResult(way, asdict(options), seen[options]) for way, options in ways]

    def ways(self, loaded: LoadedModel) -> list[tuple[str, CorrectionOptions]]:
        """The model's own way, and each requested one at every threshold, all of them checked."""
        asked = {"change": self.change, "swaps": self.swaps}
        planned = [("its own", correction_options(loaded, asked))]
        numbers = {f"{n} pass{'es' * (n != 1)}": {"steps": 1, "passes": n} for n in self.passes}
        numbers |= {f"{n} step{'s' * (n != 1)}": {"steps": n, "passes": 1} for n in self.steps}
        times = {f", t = {t:g}": {"t": t} for t in self.times} or {"": {}}
        for (way, given), (at, time) in product(numbers.items(), times.items()):
            options = correction_options(loaded, asked | given | time)
            planned += [(way + at, replace(options, threshold=threshold)) for threshold in self.thresholds]
        for _, options in planned:
            options.check()
        return planned


def save_plot(path: Path, corrections: Sequence[CorrectionResult]) -> None:
    """Plot mistakes fixed over letters broken, in percent with 95% intervals: one curve over the threshold per way."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for way in dict.fromkeys(c.way for c in corrections):
        curve = sorted((c for c in corrections if c.way == way), key=lambda c: c.threshold)
        broken, fixed = ([getattr(c.outcomes, name) for c in curve] for name in ("broken", "fixed"))
        x, y = ([100 * share.value for share in shares] for shares in (broken, fixed))
        axes.errorbar(x, y, xerr=_bars(broken), yerr=_bars(fixed), label=way, marker="o", ms=3, lw=1, elinewidth=0.6)
        for c, at in zip(curve, zip(x, y, strict=True), strict=True):
            axes.annotate(f"{c.threshold:g}", at, fontsize=7, textcoords="offset points", xytext=(4, -8))
    axes.set_xlabel("good letters broken, %")
    axes.set_ylabel("mistakes fixed, %")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, title="labels: threshold", title_fontsize=8)
    with atomic_file(path) as file:
        figure.savefig(file, format=path.suffix[1:], dpi=150)


def _bars(shares: Sequence[Share]) -> NDArray[np.float64]:
    """Distances to the ends of the intervals, in percent, [2, N]; 0 without an interval."""
    reach = [(share.value - share.ci95[0], share.ci95[1] - share.value) for share in shares]
    return 100 * np.nan_to_num(np.array(reach, dtype=np.float64).T.clip(0.0))
