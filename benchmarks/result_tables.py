"""Every table of docs/results that comes from benchmarks/results, written into its page.

    python benchmarks/result_tables.py

The tables of samplers and of correctors are made here, those of language, spelling and intervals by the scripts that
measured them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import bound_coverage
import language_tables
import spelling_tables
from helps import parser_of
from language_cells import Arguments
from pages import write_page

from cedd.evaluation.frontier import CurveComparison, Frontier, Point, common_entropy, compare_curves, figures
from cedd.evaluation.intervals import IntervalEstimate

RESULTS = Path(__file__).parent / "results"
PAGES = Path(__file__).parents[1] / "docs" / "results"
JUDGE = "smollm2.gguf"
STEPS = (8, 16, 32, 64, 128, 1024)
LOW_ENTROPY = 4.1
RATIO = "its ratio to 1024 steps"
KINDS = ("replaced", "swapped", "extra", "missing", "several", "real word", "joined", "split")


def interval(estimate: IntervalEstimate | None, digits: int = 0) -> str:
    """A figure with its interval."""
    if estimate is None:
        return "not reached"
    assert estimate.low is not None
    assert estimate.high is not None
    return f"{estimate.value:.{digits}f} [{estimate.low:.{digits}f}, {estimate.high:.{digits}f}]"


def points(folder: str) -> list[Point]:
    """The judged cells of a kept frontier."""
    return Frontier(RESULTS / folder).points(JUDGE)


def by_steps(found: Sequence[CurveComparison], *, runs: bool, ratios: Sequence[tuple[str, str]]) -> str:
    """A row for each run and sampler, a column for each number of steps. `ratios`: those with a row of ratios."""
    lines = [f"| sampler | {' | '.join(map(str, STEPS))} |", "|---|" + "---|" * len(STEPS)]
    for run, sampler in dict.fromkeys((one.curve.run, one.curve.sampler) for one in found):
        row = {one.curve.steps: one for one in found if (one.curve.run, one.curve.sampler) == (run, sampler)}
        cells = [interval(row[steps].perplexity) if steps in row else "" for steps in STEPS]
        name = f"{run}, `{sampler}`" if runs else f"`{sampler}`"
        lines.append(f"| {name} | {' | '.join(cells)} |")
        if (run, sampler) in ratios:
            shares = [row[steps].over_most_steps if steps in row else None for steps in STEPS]
            cells = ["" if share is None else interval(share, 2) for share in shares]
            lines.append(f"| {RATIO} | {' | '.join(cells)} |")
    return "\n".join(lines)


def with_top_p(cells: Sequence[Point]) -> str:
    """Perplexity and entropy of each cell of the frontier that is swept by top-p, and the mean over texts."""
    lines = [
        "| text | perplexity of the corpus | mean of the texts' perplexities | token entropy |",
        "|---|--:|--:|--:|",
    ]
    for point in cells:
        found, setting = figures(point), point.setting
        name = f"{setting.steps} steps, top-p {setting.top_p:g}" if setting.steps else "held-out Wikipedia"
        perplexities = [found["corpus_perplexity"], found["mean_of_sample_perplexities"]]
        written = [interval(IntervalEstimate(**one)) for one in perplexities]
        lines.append(f"| {name} | {' | '.join(written)} | {interval(IntervalEstimate(**found['token_entropy']), 2)} |")
    return "\n".join(lines)


def sampler_tables() -> dict[str, str]:
    """The tables of the page on samplers."""
    english, others = points("frontier"), points("frontier-processes")
    real, real_of_others = common_entropy(english), common_entropy(others)
    assert real is not None
    assert real_of_others is not None
    first = [("english", "analytic")]
    of_others = [(run, "analytic") for run in ("roulette", "uniform", "hybrid")] + [("uniform", "stratified")]
    return {
        "frontier": by_steps(compare_curves(english, real), runs=False, ratios=first),
        "frontier-low": by_steps(compare_curves(english, LOW_ENTROPY), runs=False, ratios=first),
        "frontier-processes": by_steps(compare_curves(others, real_of_others), runs=True, ratios=of_others),
        "frontier-top-p": with_top_p(points("frontier-english")),
    }


def percent(share: Mapping[str, float], *, ends: bool = True) -> str:
    """A share in percent, with its interval."""
    if not ends:
        return f"{100 * share['share']:.1f}"
    return f"{100 * share['share']:.1f} [{100 * share['low']:.1f}, {100 * share['high']:.1f}]"


def correctors(file: str) -> str:
    """The shares of each corrector in a file of results."""
    tools: dict[str, Any] = json.loads((RESULTS / file).read_text("utf-8"))["tools"]
    names = ("fixed, %", "miscorrected, %", "error-free words changed, %", *KINDS, "characters per CPU second")
    lines = [f"| tool | {' | '.join(names)} |", "|---|" + "--:|" * len(names)]
    for tool, found in tools.items():
        groups = found["groups"]
        kinds = [percent(groups[kind]["fixed"], ends=False) if kind in groups else "" for kind in KINDS]
        changed = f"{100 * groups['clean']['broken']['share']:.2f}"
        cells = [percent(groups["real"]["fixed"]), percent(groups["real"]["altered"]), changed, *kinds]
        lines.append(f"| {tool} | {' | '.join(cells)} | {found['characters_per_cpu_s']:,} |")
    return "\n".join(lines)


def correction_tables() -> dict[str, str]:
    """The tables of the page on correction."""
    return {
        "unused": correctors("correctors-unused.json"),
        "all-tools": correctors("correctors.json"),
        "large": correctors("correctors-1003.json"),
    }


def block_tables() -> dict[str, str]:
    """The table of models with blocks of several sizes."""
    rows: dict[str, Any] = json.loads((RESULTS / "blocks.json").read_text("utf-8"))["rows"]
    names = {"128": "128 (no blocks)", "ar": "autoregressive"}
    lines = ["| tokens per block | tight | importance, K = 64 | exact | perplexity |", "|---|--:|--:|--:|--:|"]
    for block, found in rows.items():
        cells = ["", "", ""]
        for place, bound in enumerate(("tight", "importance", "exact")):
            if bound in found:
                (low, high), nats = found[bound]["ci95"], found[bound]["nats_per_token"]
                cells[place] = f"{nats:.3f} [{low:.3f}, {high:.3f}]"
        best = found["exact"] if "exact" in found else found["tight"]
        lines.append(f"| {names.get(block, block)} | {' | '.join(cells)} | {best['perplexity']:.1f} |")
    return {"blocks": "\n".join(lines)}


def all_tables() -> dict[str, dict[str, str]]:
    """Every table, by page and name."""
    language, spelling = (RESULTS / f"{name}.json" for name in ("language", "spelling"))
    read = json.loads(language.read_text("utf-8")), json.loads(spelling.read_text("utf-8"))
    coverage = json.loads((RESULTS / "bound-coverage.json").read_text("utf-8"))
    return {
        "language.md": language_tables.tables(read[0], Arguments(results=language)),
        "spelling.md": spelling_tables.tables(read[1]),
        "intervals.md": bound_coverage.tables(coverage),
        "samplers.md": sampler_tables(),
        "correction.md": correction_tables(),
        "blocks.md": block_tables(),
    }


def main() -> int:
    """Write them."""
    parser_of(__doc__).parse_args()
    for page, made in all_tables().items():
        write_page(PAGES / page, made)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
