"""`cedd report`: a run as one self-contained page, or several runs compared."""

from __future__ import annotations

import json

from cedd.cli.arguments import PAGE_SUFFIXES, Report
from cedd.cli.progress import Stages
from cedd.models.locate import locate
from cedd.report.commands import comparison_command
from cedd.report.measure import compare_runs, describe_run
from cedd.report.pages import PAGE_FILE, comparison_page, write_page, write_report
from cedd.report.runs import open_run
from cedd.storage import check_writable


def run(arguments: Report) -> int:
    """Write the page and say where it is."""
    if not arguments.runs:
        raise ValueError("name at least one run: cedd report runs/first")
    arguments.effort.check()
    runs, effort, seed = arguments.runs, arguments.effort, arguments.seed
    path = arguments.out or locate(runs[0]) / (PAGE_FILE if len(runs) == 1 else "comparison.html")
    check_writable(path, PAGE_SUFFIXES)
    stages = Stages()
    with stages.bar:
        opened = [open_run(run, arguments.device) for run in runs]
        if len(opened) == 1:
            made = describe_run(opened[0], effort, seed, stages)
            write_report(made, path)
        else:
            made = compare_runs(opened, effort, seed, stages)
            write_page(comparison_page(made, comparison_command(runs, path, effort, seed)), path)
    print(json.dumps(made.record()) if arguments.json else f"open {path}")
    return 0
