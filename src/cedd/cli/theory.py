"""`cedd theory`: check every theorem, proposition and erratum on small chains."""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict

import torch
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from cedd.cli.arguments import Theory
from cedd.cli.console import PlainConsole
from cedd.device import pick_device
from cedd.theory import CLAIMS, Finding, ToyProblem

SIGNS = {"at most": "≤", "equals": "=", "erratum": "vs"}


def run(arguments: Theory) -> int:
    """Check all claims and print the results; 1 if one fails."""
    pick_device(arguments.device)  # checked as in every command, although the computation is small
    problem = ToyProblem(vocab_size=arguments.vocab, length=arguments.length, seed=arguments.seed)
    started, threads = time.perf_counter(), torch.get_num_threads()
    torch.set_num_threads(1)  # with thousands of tiny tensors, more threads are slower
    try:
        findings = _check_all(problem)
    finally:
        torch.set_num_threads(threads)
    seconds = time.perf_counter() - started
    passed = all(finding.holds for found in findings.values() for finding in found)
    if arguments.json:
        claims = [
            {"claim": name, "statement": CLAIMS[name].statement, **_plain(finding)}
            for name, found in findings.items()
            for finding in found
        ]
        asked = {"vocab": arguments.vocab, "length": arguments.length, "seed": arguments.seed}
        print(json.dumps({**asked, "passed": passed, "seconds": round(seconds, 3), "claims": claims}))
    else:
        _print_table(findings, seconds)
    return 0 if passed else 1


def _check_all(problem: ToyProblem) -> dict[str, list[Finding]]:
    """The findings of every claim, with progress on standard error."""
    console = PlainConsole(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TextColumn("{task.completed}/{task.total}"))
    findings: dict[str, list[Finding]] = {}
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        task = progress.add_task("claims", total=len(CLAIMS))
        for name, claim in CLAIMS.items():
            progress.update(task, description=name)
            findings[name] = list(claim.check(problem))
            progress.advance(task)
    return findings


def _plain(finding: Finding) -> dict[str, object]:
    """A finding as JSON, with null for numbers that are not finite."""
    record = {**asdict(finding), "slack": finding.slack, "holds": finding.holds}
    return {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in record.items()}


def _print_table(findings: dict[str, list[Finding]], seconds: float) -> None:
    console = PlainConsole(markup=True)
    if not console.is_terminal:
        console = PlainConsole(markup=True, width=110)
    for name, found in findings.items():
        console.print(f"\n[bold]{name}[/bold]  {escape(CLAIMS[name].statement)}")
        table = Table(box=None, expand=True, padding=(0, 1), header_style="dim")
        table.add_column("", ratio=1)
        erratum = found[0].relation == "erratum"
        for heading in ("printed" if erratum else "left", "", "ours" if erratum else "right", "slack or error", ""):
            table.add_column(heading, justify="right", no_wrap=True, min_width=10 if heading else 2)
        for finding in found:
            table.add_row(*_cells(finding))
        console.print(table)
    total = sum(map(len, findings.values()))
    failed = [f"{name}: {finding.case}" for name, found in findings.items() for finding in found if not finding.holds]
    console.print(f"\n{total - len(failed)} of {total} comparisons hold ({seconds:.1f} s)")
    for line in failed:
        console.print(f"[red]failed[/red]  {escape(line)}")


def _cells(finding: Finding) -> tuple[str, ...]:
    verdict = "[green]holds[/green]" if finding.holds else "[bold red]FAILS[/bold red]"
    left, right, slack = (f"{value:.5g}" for value in (finding.left, finding.right, finding.slack))
    return escape(finding.case), left, SIGNS[finding.relation], right, slack, verdict
