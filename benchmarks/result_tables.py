"""Every table that comes from benchmarks/results. The short ones are written into the pages of docs/results.

    python benchmarks/result_tables.py                   # writes the pages
    python benchmarks/result_tables.py --print samplers  # prints all tables of a page, also those that it does not show

The tables of samplers and of correctors are made here, those of language, spelling and intervals by the scripts that
measured them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import adaptation
import bound_coverage
import language_tables
import spelling_tables
from helps import parser_of
from language_cells import Arguments
from language_seeds import distance_table, short_order
from pages import write_page

from cedd.evaluation.frontier import CurveComparison, Frontier, Point, common_entropy, compare_curves, figures
from cedd.evaluation.intervals import IntervalEstimate

RESULTS = Path(__file__).parent / "results"
PAGES = Path(__file__).parents[1] / "docs" / "results"
JUDGE = "smollm2.gguf"
STEPS = (8, 16, 32, 64, 128, 1024)
SHOWN_SAMPLERS = (*("analytic", "first-hitting", "gibbs", "remask-capped"), "probability")
SHOWN_STEPS = (16, 32, 128)
SHOWN_STEPS_AT_LOW_ENTROPY = (64,)
LOW_ENTROPY = 4.1
RATIO = "its ratio to 1024 steps"
KINDS = ("replaced", "swapped", "extra", "missing", "several", "real word", "joined", "split")
SHOWN_KINDS = ("real word",)


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


def ratios_to_most_steps(found: Sequence[CurveComparison]) -> str:
    """The perplexity of the analytic sampler over that of 1024 steps, with a row for each run."""
    steps = [one for one in STEPS if one < max(STEPS)]
    lines = [f"| process | {' | '.join(map(str, steps))} |", "|---|" + "---|" * len(steps)]
    for run in dict.fromkeys(one.curve.run for one in found):
        row = {one.curve.steps: one.over_most_steps for one in found if one.curve.run == run}
        name = "absorb" if run == "english" else run
        lines.append(f"| {name} | {' | '.join(interval(row[step], 2) for step in steps)} |")
    return "\n".join(lines)


def by_sampler(real: Sequence[CurveComparison], low: Sequence[CurveComparison]) -> str:
    """A row for each shown sampler, a column for each shown number of steps and each of two entropies."""
    heads = [f"{steps} steps" for steps in SHOWN_STEPS]
    heads += [f"{steps:,} steps, at {LOW_ENTROPY} nats" for steps in SHOWN_STEPS_AT_LOW_ENTROPY]
    lines = [f"| sampler | {' | '.join(heads)} |", "|---|" + "--:|" * len(heads)]
    for sampler in SHOWN_SAMPLERS:
        cells: list[str] = []
        for found, shown in ((real, SHOWN_STEPS), (low, SHOWN_STEPS_AT_LOW_ENTROPY)):
            row = {one.curve.steps: one.perplexity for one in found if one.curve.sampler == sampler}
            cells += [interval(row[steps]) if steps in row else "" for steps in shown]
        lines.append(f"| `{sampler}` | {' | '.join(cells)} |")
    return "\n".join(lines)


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
    """Perplexity and entropy of each cell of the frontier that is swept by top-p."""
    lines = ["| text | perplexity | token entropy |", "|---|--:|--:|"]
    for point in cells:
        found, setting = figures(point), point.setting
        name = f"{setting.steps} steps, top-p {setting.top_p:g}" if setting.steps else "held-out Wikipedia"
        perplexity, entropy = (IntervalEstimate(**found[one]) for one in ("corpus_perplexity", "token_entropy"))
        lines.append(f"| {name} | {interval(perplexity)} | {interval(entropy, 2)} |")
    return "\n".join(lines)


def at_the_default_entropy(by_top_p: Sequence[Point], by_temperature: Sequence[Point]) -> str:
    """Perplexities at the entropy of the default of `english`, 64 steps with top-p 0.8."""
    (default,) = (one for one in by_top_p if one.setting.steps == 64 and one.setting.top_p == 0.8)
    entropy = figures(default)["token_entropy"]["value"]
    by_steps = {one.curve.steps: one for one in compare_curves(by_top_p, entropy)}
    rows = [(f"{steps} steps, top-p", by_steps[steps].perplexity) for steps in (64, 128)]
    rows += [
        ("128 steps, temperature", one.perplexity)
        for one in compare_curves(by_temperature, entropy)
        if one.curve.sampler == "analytic" and one.curve.steps == 128
    ]
    rows.append(("64 over 128 steps, top-p", by_steps[64].over_most_steps))
    lines = [f"| at {entropy:.3f} nats | perplexity |", "|---|--:|"]
    return "\n".join(lines + [f"| {name} | {interval(found, 2 if 'over' in name else 0)} |" for name, found in rows])


def sampler_tables() -> dict[str, str]:
    """The tables of the page on samplers."""
    english, others, of_top_p = points("frontier"), points("frontier-processes"), points("frontier-english")
    real, real_of_others = common_entropy(english), common_entropy(others)
    assert real is not None
    assert real_of_others is not None
    first = [("english", "analytic")]
    of_others = [(run, "analytic") for run in ("roulette", "uniform", "hybrid")] + [("uniform", "stratified")]
    at_real, at_low = compare_curves(english, real), compare_curves(english, LOW_ENTROPY)
    of_processes = compare_curves(others, real_of_others)
    analytic = [one for one in (*at_real, *of_processes) if one.curve.sampler == "analytic"]
    return {
        "steps": ratios_to_most_steps(analytic),
        "samplers": by_sampler(at_real, at_low),
        "frontier": by_steps(at_real, runs=False, ratios=first),
        "frontier-low": by_steps(at_low, runs=False, ratios=first),
        "frontier-processes": by_steps(of_processes, runs=True, ratios=of_others),
        "top-p": with_top_p([one for one in of_top_p if one.setting.steps != 128]),
        "frontier-top-p": with_top_p(of_top_p),
        "default-entropy": at_the_default_entropy(of_top_p, english),
    }


def percent(share: Mapping[str, float], digits: int = 1, *, ends: bool = True) -> str:
    """A share in percent, with its interval."""
    value, low, high = (f"{100 * share[name]:.{digits}f}" for name in ("share", "low", "high"))
    return f"{value} [{low}, {high}]" if ends else value


def correctors(file: str, kinds: Sequence[str] = KINDS) -> str:
    """The shares of each corrector in a file of results, with columns for these kinds of errors."""
    tools: dict[str, Any] = json.loads((RESULTS / file).read_text("utf-8"))["tools"]
    names = ("fixed, %", "miscorrected, %", "error-free words changed, %", *kinds, "characters per CPU second")
    lines = [f"| tool | {' | '.join(names)} |", "|---|" + "--:|" * len(names)]
    for tool, found in tools.items():
        groups = found["groups"]
        shares = [percent(groups[kind]["fixed"], ends=False) if kind in groups else "" for kind in kinds]
        changed = percent(groups["clean"]["broken"], 2)
        cells = [percent(groups["real"]["fixed"]), percent(groups["real"]["altered"]), changed, *shares]
        lines.append(f"| {tool} | {' | '.join(cells)} | {found['characters_per_cpu_s']:,} |")
    return "\n".join(lines)


def correction_sets() -> str:
    """The shares of cedd correct on the sets of errors that are not held out."""
    files = {"seen during development": "correctors.json", "seen during development, larger": "correctors-1003.json"}
    lines = ["| errors | number | fixed, % | miscorrected, % | error-free words changed, % |", "|---|--:|--:|--:|--:|"]
    for title, file in files.items():
        groups = json.loads((RESULTS / file).read_text("utf-8"))["tools"]["cedd correct"]["groups"]
        real, clean = groups["real"], groups["clean"]["broken"]
        cells = [f"{real['fixed']['total']:,}", percent(real["fixed"]), percent(real["altered"]), percent(clean, 2)]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def correction_tables() -> dict[str, str]:
    """The tables of the page on correction."""
    return {
        "tools": correctors("correctors-unused.json", SHOWN_KINDS),
        "sets": correction_sets(),
        "unused": correctors("correctors-unused.json"),
        "all-tools": correctors("correctors.json"),
        "large": correctors("correctors-1003.json"),
    }


def adaptation_tables() -> dict[str, str]:
    """The table of adapted models, on held-out text and on all texts."""
    records = json.loads((RESULTS / "adaptation.json").read_text("utf-8"))
    return {"adapted": adaptation.table(records, (adaptation.HELD_OUT,)), "all-texts": adaptation.table(records)}


def block_tables() -> dict[str, str]:
    """The table of models with blocks of several sizes."""
    rows: dict[str, Any] = json.loads((RESULTS / "blocks.json").read_text("utf-8"))["rows"]
    names = {"128": "128 (no blocks)", "ar": "autoregressive"}
    lines = ["| tokens per block | tight | importance, K = 64 | exact |", "|---|--:|--:|--:|"]
    for block, found in rows.items():
        cells = ["", "", ""]
        for place, bound in enumerate(("tight", "importance", "exact")):
            if bound in found:
                (low, high), nats = found[bound]["ci95"], found[bound]["nats_per_token"]
                cells[place] = f"{nats:.3f} [{low:.3f}, {high:.3f}]"
        lines.append(f"| {names.get(block, block)} | {' | '.join(cells)} |")
    return {"blocks": "\n".join(lines)}


def language_seeds() -> list[language_tables.Rows]:
    """The results of the language benchmark, by seed."""
    paths = [RESULTS / "language.json", *sorted(RESULTS.glob("language-seed*.json"))]
    return [language_tables.Rows(json.loads(path.read_text("utf-8")), Arguments(results=path)) for path in paths]


def all_tables() -> dict[str, dict[str, str]]:
    """Every table, by page and name."""
    spelling = json.loads((RESULTS / "spelling.json").read_text("utf-8"))
    coverage = json.loads((RESULTS / "bound-coverage.json").read_text("utf-8"))
    seeds, language = language_seeds(), json.loads((RESULTS / "language.json").read_text("utf-8"))
    rows = language_tables.tables(language, seeds[0].arguments)
    return {
        "language.md": rows | {"seeds": short_order(seeds, "wikitext2"), "distance": distance_table(seeds)},
        "spelling.md": spelling_tables.tables(spelling),
        "intervals.md": bound_coverage.tables(coverage),
        "samplers.md": sampler_tables(),
        "correction.md": correction_tables(),
        "adaptation.md": adaptation_tables(),
        "blocks.md": block_tables() | {name: rows[name] for name in rows if name.startswith("blocks-") and rows[name]},
    }


def main() -> int:
    """Write the pages, or print the tables of one."""
    parser = parser_of(__doc__)
    names = ("language", "spelling", "intervals", "samplers", "correction", "blocks", "adaptation")
    parser.add_argument("--print", dest="page", choices=names, help="only print all tables of this page")
    arguments = parser.parse_args()
    made = all_tables()
    if arguments.page is not None:
        print("\n\n".join(f"{name}\n\n{table}" for name, table in made[f"{arguments.page}.md"].items()))
        return 0
    for page, found in made.items():
        write_page(PAGES / page, found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
