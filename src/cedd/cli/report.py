"""`cedd report`: a report on a run or model as one HTML page, or a comparison of several."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cedd.apps.report.commands import comparison_command
from cedd.apps.report.measure import compare_runs, describe_run
from cedd.apps.report.pages import PAGE_FILE, comparison_page, write_page, write_report
from cedd.apps.report.runs import Opened, open_model, open_run
from cedd.cli.arguments import PAGE_SUFFIXES, Report
from cedd.cli.progress import Stages
from cedd.cli.unused import refuse_unused
from cedd.evaluation.tokens import read_tokens
from cedd.models.locate import locate
from cedd.storage import check_writable

MOST_SEQUENCES = 8
"""Sequences whose tokens are shown."""


def run(arguments: Report) -> int:
    """Write the page and print its path."""
    runs: Sequence[Path] = tuple(arguments.runs)
    if len(runs) == 0:
        raise ValueError("name at least one MODEL: cedd report runs/first")
    arguments.effort.check()
    effort, seed = arguments.effort, arguments.seed
    if arguments.data is None and arguments.wrap != "none":
        raise ValueError("--wrap has no effect without --data")
    if len(runs) > 1:
        refuse_unused(effort, ("samples",), "on a comparison of several runs")
    path = arguments.out or _folder(runs[0]) / (PAGE_FILE if len(runs) == 1 else "comparison.html")
    check_writable(path, PAGE_SUFFIXES)
    if arguments.tokens is not None and len(runs) > 1:
        raise ValueError("--tokens needs a single MODEL")
    tokens = () if arguments.tokens is None else read_tokens(arguments.tokens, MOST_SEQUENCES)
    stages = Stages()
    with stages.bar:
        opened = [_opened(run, arguments) for run in runs]
        if len(opened) == 1:
            made = replace(describe_run(opened[0], effort, seed, stages), tokens=tokens)
            write_report(made, path)
        else:
            made = compare_runs(opened, effort, seed, stages)
            write_page(comparison_page(made, comparison_command(opened, path, effort, seed)), path)
    print(json.dumps(made.record()) if arguments.json else f"open {path}")
    return 0


def _opened(run: Path, arguments: Report) -> Opened:
    if arguments.data is None:
        return open_run(run, arguments.device)
    return open_model(run, arguments.device, arguments.data, arguments.wrap)


def _folder(run: Path) -> Path:
    """The folder for the page, which must be the user's own."""
    folder = locate(run)
    if not run.expanduser().is_dir():
        raise ValueError(f"{run} is not a folder; choose where to write the page with --out {run.name}.html")
    return folder
