"""`cedd report`: a run, or a model on a text, as one self-contained page; or several of them compared."""

from __future__ import annotations

import json
from pathlib import Path

from cedd.cli.arguments import PAGE_SUFFIXES, Report
from cedd.cli.progress import Stages
from cedd.models.locate import locate
from cedd.report.commands import comparison_command
from cedd.report.measure import compare_runs, describe_run
from cedd.report.pages import PAGE_FILE, comparison_page, write_page, write_report
from cedd.report.runs import Opened, open_model, open_run
from cedd.storage import check_writable


def run(arguments: Report) -> int:
    """Write the page and say where it is."""
    if not arguments.runs:
        raise ValueError("name at least one run: cedd report runs/first")
    arguments.effort.check()
    runs, effort, seed = arguments.runs, arguments.effort, arguments.seed
    if arguments.data is None and arguments.wrap != "none":
        raise ValueError("--wrap says how the text of --data is read; name one")
    path = arguments.out or _folder(runs[0]) / (PAGE_FILE if len(runs) == 1 else "comparison.html")
    check_writable(path, PAGE_SUFFIXES)
    stages = Stages()
    with stages.bar:
        opened = [_opened(run, arguments) for run in runs]
        if len(opened) == 1:
            made = describe_run(opened[0], effort, seed, stages)
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
    """Where its page goes: into a folder of the user's."""
    folder = locate(run)
    if not run.expanduser().is_dir():
        raise ValueError(f"{run} is no folder of yours to write its page to; say where: --out {run.name}.html")
    return folder
