"""The tables and curves of the language benchmark, next to the paper's figures."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from cells import with_curves
from language_cells import BLOCK_CELLS, LONG, LONG_CELLS, MAIN, METHODS, RECIPES, SHARES, Arguments, read_cell
from language_measure import OWN_JUDGE, key, stored
from language_text import SETS

from cedd.bounds.estimate import exp_or_inf, mean_and_stderr, student_quantile

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOT_YET = "not yet"
PAGE_TEXT = "wikitext2"
"""The text whose bounds the page shows."""
BLOCKS = {
    "blocks-bounds": """## With the recipe of Language

Rows are METHOD/PROCESS/BLOCK, trained and measured as those of [Language](language.md#setup); `@1024` marks sequences
of 1,024 tokens instead of 128. Perplexity bounds (`tight`, ± half of the 95% interval), and the exact perplexity for
blocks of at most 8 tokens:""",
    "blocks-samples": "Generative perplexity and token entropy, with one network call per token:",
    "blocks-speed": "Training step, and sampling with cached keys and values, one network call per token:",
}
"""The text above each table of blocks. Without rows there is neither."""
Figures = tuple[float | None, ...]
PAPER: Mapping[str, Figures] = {
    "sedd/absorb": (70.07, 75.20, 240.43, 74.79, 88.99),
    "sedds/absorb": (67.05, 69.37, 208.69, 69.17, 83.87),
    "cedd/absorb": (65.18, 65.66, 199.69, 65.62, 79.83),
    "cedd-star/absorb": (64.60, 65.04, 192.99, 64.69, 79.81),
    "sedd/roulette": (72.07, 80.13, 230.74, 79.68, 93.45),
    "sedds/roulette": (69.10, 74.38, 209.12, 74.16, 88.02),
    "cedd/roulette": (69.77, 72.91, 227.16, 72.49, 86.55),
    "cedd-star/roulette": (67.84, 70.54, 216.91, 70.18, 86.76),
    "sedd/uniform": (80.74, 91.79, 252.81, 91.40, 102.75),
    "sedds/uniform": (81.13, 89.21, 228.37, 88.56, 100.80),
    "cedd/uniform": (80.27, 87.91, 279.65, 87.46, 99.34),
    "cedd-star/uniform": (82.54, 89.68, 289.09, 88.90, 106.32),
    "ceddt/absorb": (68.24, 68.61, 204.76, 68.10, 81.81),
    "dfm/kappa-t": (71.90, 71.20, 221.15, 70.84, 82.63),
    "dfm/kappa-t2": (72.31, 72.87, 215.30, 72.55, 85.82),
    "dfm/kappa-t, corrector": (114.40, 113.05, 352.32, 112.87, 130.41),
    "sedds/absorb@1024": (52.18, 42.02, 117.00, 41.83, 80.79),
    "cedd-star/absorb@1024": (52.70, 41.57, 115.99, 41.31, 77.96),
    "ceddt/absorb@1024": (53.20, 42.24, 121.05, 42.07, 78.10),
    "ar@1024": (49.02, 37.68, 134.13, 37.55, 58.92),
}
"""The paper's perplexities by j1 (dfm's by its own bound, ar's exact), in the order of SETS, after 400,000 steps of 512
sequences of OpenWebText."""
QUOTED: Mapping[str, Figures] = {
    "D3PM@1024": (93.47, 77.28, 200.82, 75.16, 138.92),
    "PLAID@1024": (57.28, 51.80, 142.60, 50.86, 91.12),
}
"""Perplexities of other models that the paper quotes."""
PAPER_GENERATIVE: Mapping[str, float] = {
    "sedd/absorb": 172.35,
    "sedds/absorb": 166.35,
    "cedd/absorb": 148.21,
    "cedd-star/absorb": 143.86,
    "sedd/roulette": 178.94,
    "sedds/roulette": 172.93,
    "cedd/roulette": 167.67,
    "cedd-star/roulette": 158.56,
    "sedd/uniform": 169.66,
    "sedds/uniform": 163.88,
    "cedd/uniform": 161.84,
    "cedd-star/uniform": 175.42,
    "ceddt/absorb": 154.04,
    "dfm/kappa-t": 145.48,
    "dfm/kappa-t2": 152.70,
    "dfm/kappa-t, corrector": 143.38,
    "sedds/absorb@1024": 105.27,
    "cedd-star/absorb@1024": 101.83,
    "ceddt/absorb@1024": 108.88,
    "ar@1024": 41.02,
}
"""The paper's generative perplexities: 1024 steps, GPT-2 large, the mean over samples."""
PAPER_SHARES = {"cedd-star/roulette": 72.31, "cedd-star/roulette-0.65": 85.72}
PAPER_SHARES |= {"cedd-star/roulette-0.35": 124.19, "cedd-star/roulette-0.05": 284.55}
"""The paper's generative perplexities for p_m = .95, .65, .35, .05, sampled in float32."""
ORDER = ("cedd-star", "cedd", "sedds", "sedd")
"""The methods in the paper's order, best first."""
ON = ("absorb", "roulette", "uniform")
OTHERS = ("ceddt/absorb", "ar", "cedd-star/absorb@1024", "ar@1024")
"""The rows that the page shows in addition to the methods on these processes."""
WITHOUT_BLOCKS = ("ar", "cedd-star/absorb", "bayes-star/roulette", "ar@1024", "cedd-star/absorb@1024")
"""The cells that those in blocks are compared with."""
BLOCKS_AND_FULL = (
    *(WITHOUT_BLOCKS[0], *BLOCK_CELLS[:4], WITHOUT_BLOCKS[1], BLOCK_CELLS[4], WITHOUT_BLOCKS[2]),
    *(WITHOUT_BLOCKS[3], BLOCK_CELLS[5], WITHOUT_BLOCKS[4]),
)
CHANCE = {"": 0.03, "lm1b": 0.05, "ptb": 0.1}
"""The largest difference between two trainings of one method, in nats per token, by test set. Intervals over blocks do
not cover it. (The largest of three pairs were those of ar@1024: 0.041 on 1BW, 0.087 on PTB.)"""


class Rows:
    """The rows of a results file. A row is a cell, or one way to use the network of a cell."""

    def __init__(self, content: Mapping[str, Any], arguments: Arguments) -> None:
        self.cells: Mapping[str, Any] = content["cells"]
        self.protocol: Mapping[str, Any] = content.get("protocol", {})
        self.held_out_texts: Mapping[str, Any] = content.get("held_out", {})
        self.arguments = arguments

    def finished(self, cell: str) -> Mapping[str, Any] | None:
        """The final measurements of a cell, if it has them."""
        return self.cells.get(cell, {}).get("final")

    def of(self, cells: Sequence[str]) -> Iterator[tuple[str, str, Mapping[str, Any] | None]]:
        """(title, cell, measurements) of every row of these cells. Each is followed by its rows with other recipes."""
        for cell in cells:
            for name in (cell, *(f"{cell}+{recipe}" for recipe in RECIPES)):
                final = self.finished(name)
                if final is None and name != cell:
                    continue
                for way, row in ({"": None} if final is None else final["rows"]).items():
                    yield f"{name}, {way}" if way else name, name, row

    @property
    def sets(self) -> Mapping[str, str]:
        """Names and titles of the test sets that were measured."""
        measured = self.protocol.get("test_sets", SETS)
        return {name: title for name, title in SETS.items() if name in measured}

    @property
    def held_out(self) -> list[str]:
        """The names of the held-out texts."""
        return list(self.protocol.get("corpus", {"wikipedia": None, "books": None}))

    @property
    def titles(self) -> dict[str, str]:
        """Names and titles of all texts."""
        return {**self.sets, **{name: f"held-out {name}" for name in self.held_out}}

    def per_block(self, cell: str, way: str, text: str, bound: str = "tight") -> torch.Tensor:
        """The bound of every block; NaN where it was not stored."""
        blocks = self.cells[cell]["final"]["rows"][way]["texts"][text][bound]["blocks"]
        kind = "bounds" if bound == "tight" else bound
        found = stored(self.arguments.extras(cell), key(kind, way, text), blocks)
        return torch.full((blocks,), math.nan) if found is None else torch.from_numpy(found.astype(np.float64))


def tables(content: Mapping[str, Any], arguments: Arguments) -> dict[str, str]:
    """Every table in Markdown by its name. The page shows the first three."""
    rows = Rows(content, arguments)
    return {
        "methods": _methods(rows),
        "others": _others(rows),
        "differences": _differences(rows),
        "protocol": _protocol(rows),
        "bounds": _bounds(rows, MAIN),
        "weighted": weighted_bounds(rows, (*MAIN, *LONG_CELLS)),
        "paper-bounds": _paper_bounds(rows, MAIN),
        "order": _paired(rows, PAPERS_ORDER),
        "bayes": _paired(rows, LEAVE_ONE_OUT),
        "generative": _generative(rows, MAIN, PAPER_GENERATIVE) + _real(rows, rows.protocol.get("length")),
        "shares": _shares(rows),
        "long": _bounds(rows, LONG_CELLS) + "\n" + _quoted(rows),
        "long-order": _paired(rows, LONG_ORDER),
        "long-paper-bounds": _paper_bounds(rows, LONG_CELLS),
        "long-generative": _generative(rows, LONG_CELLS, PAPER_GENERATIVE) + _real(rows, LONG),
        **_blocks(rows),
        "curves": _curves(rows),
    }


# ----------------------------------------------------------------------------------------------------------------
# The page


def _beside_the_paper(title: str, row: Mapping[str, Any] | None) -> str:
    """The bound on the text of the page, and the paper's j1 in parentheses."""
    if row is None:
        return NOT_YET
    paper = PAPER.get(_without_recipe(title), (None,) * len(SETS))[[*SETS].index(PAGE_TEXT)]
    found = _perplexity(row["texts"][PAGE_TEXT]["tight"]) if PAGE_TEXT in row["texts"] else NOT_YET
    return found if paper is None else f"{found} ({_plain(paper)})"


def _methods(rows: Rows) -> str:
    """The best bound of every method on every process."""
    lines = [f"| method | {' | '.join(ON)} |", f"|---|{'--:|' * len(ON)}"]
    for method in METHODS[:5]:
        found: list[str] = []
        for process in ON:
            best = _best(rows, f"{method}/{process}")
            final = None if best is None else rows.finished(best)
            found.append(_beside_the_paper(f"{method}/{process}", None if final is None else final["rows"][""]))
        lines.append(f"| {method} | {' | '.join(found)} |")
    return "\n".join(lines)


def _others(rows: Rows) -> str:
    """The bounds of other rows that the page compares."""
    lines = ["| row | perplexity, at most |", "|---|--:|"]
    return "\n".join(lines + [f"| {title} | {_beside_the_paper(title, row)} |" for title, _, row in rows.of(OTHERS)])


def _differences(rows: Rows) -> str:
    """The paired differences on the text of the page, with the number of texts on which they hold."""
    pairs = [*pairwise(ORDER), ("bayes-star", "cedd-star")]
    lines = [f"| difference in nats per token | {' | '.join(ON)} |", f"|---|{'--:|' * len(ON)}"]
    for better, worse in pairs:
        found: list[str] = []
        for process in ON:
            first, second = (_best(rows, f"{method}/{process}") for method in (better, worse))
            if first is None or second is None:
                found.append(NOT_YET)
                continue
            texts = {text: _difference(rows, first, second, text) for text in (*rows.sets, *rows.held_out)}
            verdict = _verdict({text: interval for text, (_, interval) in texts.items()})
            found.append(f"{texts[PAGE_TEXT][0] if PAGE_TEXT in texts else NOT_YET}, {verdict}")
        lines.append(f"| {better} − {worse} | {' | '.join(found)} |")
    return "\n".join(lines)


# ----------------------------------------------------------------------------------------------------------------
# Bounds


def _bounds(rows: Rows, cells: Sequence[str], only: Sequence[str] = ()) -> str:
    """Perplexities by `tight` with their intervals, and the exact ones of cells in short blocks, on all texts or `only`
    on those of these that were measured."""
    titles = rows.titles
    texts = [text for text in titles if text in only] or [*titles]
    heads = [titles[text] for text in texts]
    lines = [f"| perplexity, at most | {' | '.join(heads)} |", f"|---|{'--:|' * len(heads)}"]
    for title, _, row in rows.of(cells):
        found = [NOT_YET if row is None else _perplexity(row["texts"][text]["tight"]) for text in texts]
        lines.append(f"| {title} | {' | '.join(found)} |")
        if row is not None and all("exact" in row["texts"][text] for text in texts):
            found = [_perplexity(row["texts"][text]["exact"]) for text in texts]
            lines.append(f"| {title}, exact | {' | '.join(found)} |")
    return "\n".join(lines)


def _blocks(rows: Rows) -> dict[str, str]:
    """The tables of the cells in blocks that have results, and of the cells without blocks of the same lengths."""
    done = [cell for cell in BLOCK_CELLS if rows.finished(cell) is not None]
    if not done:
        return dict.fromkeys(BLOCKS, "")
    lengths = dict.fromkeys(read_cell(cell).length for cell in done)
    others = [cell for cell in WITHOUT_BLOCKS if read_cell(cell).length in lengths and rows.finished(cell)]
    shown = [cell for cell in BLOCKS_AND_FULL if cell in done or cell in others]
    real = "".join(_real(rows, length or rows.protocol.get("length"), one_by_one=True) for length in lengths)
    found = {
        "blocks-bounds": _bounds(rows, shown, (PAGE_TEXT, "wikipedia")),
        "blocks-samples": _generative(rows, shown, one_by_one=True) + real,
        "blocks-speed": _speed(rows, done),
    }
    page = {name: f"{BLOCKS[name]}\n\n{table}" for name, table in found.items()}
    return {**page, "blocks-all-texts": _bounds(rows, shown)}


def weighted_bounds(rows: Rows, cells: Sequence[str]) -> str:
    """`tight` and the importance-weighted bound on the same blocks, for rows that have both."""
    texts, heads = [*rows.titles], [*rows.titles.values()]
    lines = [f"| nats per token: tight, importance (difference) | K | blocks | {' | '.join(heads)} |"]
    lines.append(f"|---|--:|--:|{'--:|' * len(heads)}")
    for title, _, row in rows.of(cells):
        found = {text: row["texts"][text].get("importance") for text in texts} if row is not None else {}
        if measured := [record for record in found.values() if record]:
            shown = [", ".join(map(str, sorted({one[name] for one in measured}))) for name in ("orders", "blocks")]
            shown += [_both_bounds(record) for record in found.values()]
            lines.append(f"| {title} | {' | '.join(shown)} |")
    return "\n".join(lines) if len(lines) > 2 else "No row has an importance-weighted bound yet."


def _both_bounds(record: Mapping[str, Any] | None) -> str:
    if record is None:
        return NOT_YET
    if None in (record["nats_per_token"], record["tight_of_blocks"]):
        return "∞"
    if record["less_tight"] == 0:
        return f"{record['nats_per_token']:.4f}, exact"
    less, error = record["less_tight"], record["less_tight_stderr"]
    difference = f"{less:+.4f}" + ("" if error is None else f" ± {error:.4f}")
    return f"{record['tight_of_blocks']:.4f}, {record['nats_per_token']:.4f} ({difference})"


def _quoted(rows: Rows) -> str:
    """Rows for the models that the paper quotes, in a table of bounds."""
    lines: list[str] = []
    for name, figures in QUOTED.items():
        shown = [_plain(value) for text, value in zip(SETS, figures, strict=True) if text in rows.sets]
        lines.append(f"| {' | '.join([f'{name} (as the paper quotes it)', *shown, *('' for _ in rows.held_out)])} |")
    return "\n".join(lines)


def _perplexity(record: Mapping[str, Any]) -> str:
    """exp of an estimate ± half of the width of its interval, for the population of the sequences."""
    nats, error = record["nats_per_token"], record.get("stderr_of_blocks")
    if nats is None:
        return "∞"
    if error is None:
        return _exp(nats)
    half = student_quantile(record["blocks"] - 1) * error
    low, high = nats - half, nats + half
    if low == high or math.isinf(exp_or_inf(high)):
        return _exp(nats)
    return f"{_exp(nats)} ± {_plain((exp_or_inf(high) - exp_or_inf(low)) / 2)}"


def _exp(nats: float) -> str:
    """exp(nats), or "e^nats" if that overflows."""
    value = exp_or_inf(nats)
    return _plain(value) if math.isfinite(value) else f"e^{nats:,.0f}"


def _plain(value: float | None) -> str:
    if value is None:
        return ""
    if not math.isfinite(value):
        return "∞"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _paper_bounds(rows: Rows, cells: Sequence[str]) -> str:
    """j1 next to the paper's j1."""
    heads = " | ".join(f"{title} | {title}, paper" for title in rows.sets.values())
    lines = [f"| perplexity by j1 | {heads} |", f"|---|{'--:|--:|' * len(rows.sets)}"]
    for title, _, row in rows.of(cells):
        found: list[str] = []
        papers = PAPER.get(_without_recipe(title), (None,) * len(SETS))
        for text, paper in zip(SETS, papers, strict=True):
            if text not in rows.sets:
                continue
            found += [NOT_YET if row is None else _j1(row["texts"][text]), _plain(paper)]
        lines.append(f"| {title} | {' | '.join(found)} |")
    return "\n".join(lines)


def _without_recipe(title: str) -> str:
    """The title without its recipe: "CELL, way" for "CELL+RECIPE, way"."""
    return re.sub(r"\+[^,]*", "", title)


def _j1(bounds: Mapping[str, Any]) -> str:
    """The perplexity by j1, or by the only bound that a method has."""
    nats = bounds.get("j1", bounds["tight"])["nats_per_token"]
    return "∞" if nats is None else _exp(nats)


# ----------------------------------------------------------------------------------------------------------------
# The paper's order


PAPERS_ORDER = [(*pair, process) for process in ON for pair in pairwise(ORDER)]
"""Neighbours in the paper's order."""
LEAVE_ONE_OUT = [("bayes-star", "cedd-star", process) for process in ON]
"""The effect of Bayes' rule for visible tokens; on absorb, where it changes nothing, the effect of chance."""
LONG_ORDER = [("cedd-star", other, f"absorb@{LONG}") for other in ("sedds", "ceddt")]
"""Long sequences; CEDD* is the paper's best method on most sets."""


def _paired(rows: Rows, pairs: Sequence[tuple[str, str, str]]) -> str:
    """A line for each (better, worse, process): the paired difference on every text, the number of texts on which the
    first one is ahead by more than chance, and the number of sets on which it is ahead in the paper."""
    texts, heads = [*rows.titles], [*rows.titles.values()]
    lines = [f"| difference in nats per token | {' | '.join(heads)} | texts where the first is better | in the paper |"]
    lines.append(f"|---|{'--:|' * len(heads)}---|--:|")
    for better, worse, process in pairs:
        names = [f"{method}/{process}" for method in (better, worse)]
        pair, paper = [_best(rows, name) for name in names], _ahead_in_paper(*names)
        if None in pair:
            lines.append(f"| {better} − {worse}, {process} |{f' {NOT_YET} |' * len(heads)} | {paper} |")
            continue
        first, second = (str(cell) for cell in pair)
        found = {text: _difference(rows, first, second, text) for text in texts}
        verdict = _verdict({text: interval for text, (_, interval) in found.items()})
        shown = " | ".join(difference for difference, _ in found.values())
        lines.append(f"| {first} − {second} | {shown} | {verdict} | {paper} |")
    return "\n".join(lines)


def _ahead_in_paper(better: str, worse: str) -> str:
    """The number of sets on which the first one has the lower j1 in the paper."""
    if better not in PAPER or worse not in PAPER:
        return ""
    pairs = [(a, b) for a, b in zip(PAPER[better], PAPER[worse], strict=True) if a is not None and b is not None]
    return f"{sum(a < b for a, b in pairs)} of {len(pairs)}"


def _best(rows: Rows, cell: str) -> str | None:
    """The recipe with the lowest bound on held-out text."""
    found = {name: row for _, name, row in rows.of([cell]) if row is not None}

    def mean(name: str) -> float:
        nats = [found[name]["texts"][text]["tight"]["nats_per_token"] for text in rows.held_out]
        return math.inf if None in nats else sum(nats) / len(nats)

    return min(found, key=mean, default=None)


def _difference(rows: Rows, first: str, second: str, text: str) -> tuple[str, tuple[float, float]]:
    """The mean difference with its 95% interval, over blocks."""
    values = rows.per_block(first, "", text) - rows.per_block(second, "", text)
    if not bool(torch.isfinite(values).all()) or len(values) < 2:
        return "–", (-math.inf, math.inf)
    mean, error = mean_and_stderr(values)
    half = student_quantile(len(values) - 1) * error
    return f"{mean:+.4f} ± {half:.4f}", (mean - half, mean + half)


def _verdict(intervals: Mapping[str, tuple[float, float]]) -> str:
    """The number of texts on which the first one is ahead, or behind, by more than CHANCE."""
    intervals = {text: ends for text, ends in intervals.items() if all(map(math.isfinite, ends))}
    chance = {text: CHANCE.get(text, CHANCE[""]) for text in intervals}
    ahead = sum(high < -chance[text] for text, (_, high) in intervals.items())
    behind = sum(low > chance[text] for text, (low, _) in intervals.items())
    return f"{ahead} of {len(intervals)}" + (f", behind on {behind}" if behind else "")


# ----------------------------------------------------------------------------------------------------------------
# Generative perplexity


def _generative(
    rows: Rows, cells: Sequence[str], papers: Mapping[str, float] | None = None, one_by_one: bool = False
) -> str:
    """Entropy and mean perplexity of the samples drawn in the most steps, by each judge, and in the paper; if
    `one_by_one`, of those drawn in as many steps as tokens, without the judge `ar`."""
    names = _judges(rows, one_by_one)
    heads = " | ".join((*(f"by {name} [95%]" for name in names), *(["paper"] if papers else [])))
    lines = [f"| generative perplexity | entropy | {heads} |", f"|---|--:|{'--:|' * (len(names) + bool(papers))}"]
    for title, cell, row in rows.of(cells):
        paper = [f" {_plain(papers.get(_without_recipe(title)))} |"] if papers else []
        if row is None:
            lines.append(f"| {title} | {NOT_YET} |{f' {NOT_YET} |' * len(names)}{''.join(paper)}")
            continue
        steps = max(row["samples"], key=int)
        of_length = str(read_cell(cell).length or rows.protocol["length"])
        steps = of_length if one_by_one and of_length in row["samples"] else steps
        sampled, paper = row["samples"][steps], paper if steps == "1024" else ["  |"] * len(paper)
        found = "".join(f" {_judged(sampled['judges'].get(name))} |" for name in names)
        lines.append(f"| {title} | {sampled['token_entropy']:.2f} |{found}{''.join(paper)}")
    return "\n".join(lines)


def _speed(rows: Rows, cells: Sequence[str]) -> str:
    """Time and memory of training and sampling."""
    found = {cell: final for cell in cells if (final := rows.finished(cell))}
    batches = list(dict.fromkeys(batch for final in found.values() for batch in final["speed"]))
    heads = "".join(f" tokens/s, batch {batch} | GiB |" for batch in batches)
    lines = [f"| | ms per training step | GiB |{heads}", f"|---|--:|--:|{'--:|--:|' * len(batches)}"]
    for cell, final in found.items():
        milliseconds = rows.cells[cell].get("seconds_per_step")
        values = [None if milliseconds is None else 1000 * milliseconds, final["training_gibibytes"]]
        for batch in batches:
            one = final["speed"].get(batch, {})
            values += [one.get("tokens_per_second"), one.get("gibibytes")]
        lines.append(f"| {cell} | {' | '.join(map(_plain, values))} |")
    return "\n".join(lines)


def _real(rows: Rows, length: int | None, one_by_one: bool = False) -> str:
    """Lines for held-out text of this length, in a table of samples."""
    lines, of_length = "", "" if length == rows.protocol.get("length") else f"@{length}"
    for name, text in rows.held_out_texts.get(str(length), {}).items():
        found = [_judged(text["judges"].get(judge)) for judge in _judges(rows, one_by_one)]
        lines += f"\n| held-out {name}{of_length} | {text['token_entropy']:.2f} | {' | '.join(found)} |"
        lines += "" if one_by_one else " |"
    return lines


def _judges(rows: Rows, independent: bool = False) -> list[str]:
    """The judges of samples; without `ar`, which is a row itself, if `independent`."""
    found = ["smollm2"] if independent else [OWN_JUDGE, "smollm2"]
    for record in rows.cells.values():
        for row in record.get("final", {}).get("rows", {}).values():
            found += [name for sampled in row["samples"].values() for name in sampled["judges"]]
    return [name for name in dict.fromkeys(found) if not (independent and name == OWN_JUDGE)]


def _judged(record: Mapping[str, Any] | None) -> str:
    if record is None:
        return NOT_YET
    mean = record["mean"]
    ends = "" if mean["low"] is None else f" [{_plain(mean['low'])}, {_plain(mean['high'])}]"
    return f"{_plain(mean['value'])}{ends}"


def _shares(rows: Rows) -> str:
    """Bound and generative perplexity for each p_m."""
    heads = " | ".join(f"held-out {name}" for name in rows.held_out)
    bounds = [f"| perplexity, at most | {heads} |", f"|---|{'--:|' * len(rows.held_out)}"]
    for title, _, row in rows.of(SHARES):
        found = [NOT_YET if row is None else _perplexity(row["texts"][text]["tight"]) for text in rows.held_out]
        bounds.append(f"| {title} | {' | '.join(found)} |")
    return "\n".join(bounds) + "\n\n" + _generative(rows, SHARES, PAPER_SHARES)


# ----------------------------------------------------------------------------------------------------------------
# Curves and the protocol


def _curves(rows: Rows) -> str:
    """Held-out bounds of cedd-star and sedds during training."""
    wanted = ["sedds/absorb", "cedd-star/absorb", "sedds/absorb@1024", "cedd-star/absorb@1024"]
    steps = sorted({point["step"] for cell in wanted for point in rows.cells.get(cell, {}).get("curve", [])})
    if not steps:
        return f"| held-out bound, nats per token, at step | |\n|---|--:|\n| all | {NOT_YET} |"
    lines = [f"| held-out bound, nats per token, at step | {' | '.join(f'{step:,}' for step in steps)} |"]
    lines.append(f"|---|{'--:|' * len(steps)}")
    for cell in wanted:
        points = {point["step"]: point for point in rows.cells.get(cell, {}).get("curve", [])}
        found = [f"{_held_out_nats(points[step]):.3f}" if step in points else NOT_YET for step in steps]
        lines.append(f"| {cell} | {' | '.join(found)} |")
    return "\n".join(lines)


def _held_out_nats(point: Mapping[str, Any]) -> float:
    """The mean over the held-out texts."""
    nats = [record["nats_per_token"] for record in point["held_out"].values()]
    return math.inf if None in nats else sum(nats) / len(nats)


def _protocol(rows: Rows) -> str:
    """The settings that all rows share."""
    if not rows.protocol:
        return f"{NOT_YET}: no row has been trained."
    titles = {
        "size": "preset",
        "steps": "training steps",
        "tokens": "tokens per training step",
        "blocks": "test blocks per text, at most",
        "draws": "noisy versions per block",
        "sampled_tokens": "sampled tokens per number of steps",
        "sampler_steps": "sampling steps",
        "holdout": "share of held-out documents",
    }
    lines = ["| all rows | |", "|---|---|", *(f"| {title} | {rows.protocol[name]} |" for name, title in titles.items())]
    done = sum("final" in record for record in rows.cells.values())
    lines.append(f"| recipe | {', '.join(f'{name} {value}' for name, value in _notable(rows.protocol['recipe']))} |")
    lines.append(f"| rows with results | {done} |")
    return "\n".join(lines)


def _notable(recipe: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The main settings of a recipe."""
    names = ("matrices", "matrix_rate", "rate", "embedding_rate", "head_rate", "beta2", "schedule", "decay_share")
    others = (
        "optimizer.warmup",
        "optimizer.ema",
        "model.dropout",
        "model.largest_score",
        "batch.size",
        "batch.complementary",
    )
    for name in (*(f"optimizer.{name}" for name in names), *others):
        yield name.partition(".")[2], recipe[name]
    yield "times", f"[{recipe['batch.lowest_time']}, {recipe['batch.highest_time']}]"


def curves_figure(content: Mapping[str, Any]) -> Figure:
    """Held-out bounds over training steps, with a panel for each group of rows that has results: absorb with 128
    tokens, the other processes, roulette by its share of masking, and 1,024 tokens."""
    from matplotlib.figure import Figure

    curves = with_curves(content)
    cells = {name: read_cell(name) for name in curves}
    shares = [name for name in SHARES if name in curves]
    short = [name for name in curves if cells[name].length is None and name not in SHARES[1:]]
    shuffling = [name for name in short if cells[name].process in ON[1:]]
    panels = {
        "128 tokens, absorb": [name for name in short if name not in shuffling],
        "128 tokens, roulette and uniform": shuffling,
        "128 tokens, roulette by its share of masking": shares if len(shares) > 1 else [],
        "1024 tokens": [name for name in curves if cells[name].length == LONG],
    }
    drawn = {title: names for title, names in panels.items() if names}
    columns = min(2, len(drawn))
    lines = -(-len(drawn) // columns)
    figure = Figure(figsize=(0.5 + 4.2 * columns, 4.5 * lines), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False)
    for axes in grid.flat[len(drawn) :]:
        axes.remove()
    for axes, (title, names) in zip(grid.flat, drawn.items(), strict=False):
        for number, name in enumerate(names):
            cell, curve = cells[name], content["cells"][name]["curve"]
            style = "--" if cell.process in ("uniform", "kappa-t2") or cell.recipe else "-"
            colour = f"C{number if names is shares else METHODS.index(cell.method)}"
            line = {"color": colour, "linestyle": style, "marker": "o", "markersize": 3}
            axes.plot([point["step"] for point in curve], [*map(_held_out_nats, curve)], label=name, **line)
        axes.set_title(title)
        axes.set_xlabel("steps")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=7, handlelength=4)  # long enough for dashes
    for axes in grid[:, 0]:
        axes.set_ylabel("held-out bound, nats per token")
    return figure
