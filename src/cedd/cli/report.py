"""`cedd report`: a run as one self-contained page, or several runs compared."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from cedd.cli.given import CommonArguments
from cedd.cli.progress import Stages
from cedd.cli.sampling import PAGE_SUFFIXES
from cedd.report.commands import comparison_command
from cedd.report.measure import compare_runs, describe_run
from cedd.report.pages import PAGE_FILE, comparison_page, write_page, write_report
from cedd.report.records import Effort
from cedd.report.runs import open_run
from cedd.storage import check_writable


@dataclass(frozen=True)
class Arguments(CommonArguments):
    """example: cedd report runs/quickstart

    Write a run's curves, its bound beside simple models, samples and corrections as one page, RUN/report.html (the
    example: after cedd quickstart).
    Of several runs, a comparison with paired intervals: cedd report runs/first runs/second --out comparison.html
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]")]
    """Folders of cedd train or cedd quickstart."""
    out: Path | None = None
    """The page; by default report.html (beside it the figures, report.json), or comparison.html, in the (first) run's
    folder."""
    effort: Annotated[Effort, tyro.conf.arg(name="")] = field(default_factory=Effort)
    seed: int = 0
    """Of everything random."""


def run(arguments: Arguments) -> int:
    """Write the page and say where it is."""
    if not arguments.runs:
        raise ValueError("name at least one run: cedd report runs/first")
    arguments.effort.check()
    check_writable(arguments.out, PAGE_SUFFIXES)
    runs, effort, seed = arguments.runs, arguments.effort, arguments.seed
    stages = Stages()
    with stages.bar:
        opened = [open_run(run, arguments.device) for run in runs]
        if len(opened) == 1:
            path = arguments.out or runs[0] / PAGE_FILE
            made = describe_run(opened[0], effort, seed, stages)
            write_report(made, path)
        else:
            path = arguments.out or runs[0] / "comparison.html"
            made = compare_runs(opened, effort, seed, stages)
            write_page(comparison_page(made, comparison_command(runs, path, effort, seed)), path)
    print(json.dumps(made.record()) if arguments.json else f"open {path}")
    return 0
