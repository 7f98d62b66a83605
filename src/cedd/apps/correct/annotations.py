"""Changes as lines for people, annotations for GitHub Actions, and SARIF."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from cedd.spelling.changes import Change, Corrected
from cedd.storage import JSONObject

RULE = "spelling"
SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


@dataclass(frozen=True)
class Located:
    """A change with its place in the original text; lines and columns count from 1."""

    change: Change
    line: int
    column: int


def located(corrected: Corrected, changes: Iterable[Change]) -> Iterator[Located]:
    """The changes of a correction with their lines and columns, in order. A byte order mark is no column."""
    text, line, at = corrected.original, 1, 0
    mark = text.startswith("\ufeff")
    for change in sorted(changes, key=lambda change: change.position):
        line += text.count("\n", at, change.position)
        at = change.position
        yield Located(change, line, at - text.rfind("\n", 0, at) - (mark and line == 1))


def message(change: Change) -> str:
    """What is wrong, and the replacement."""
    return f"{change.before!r} should be {change.after!r}"


def github_annotation(file: str, one: Located) -> str:
    """A workflow command, which GitHub shows next to the line."""

    def escaped(value: object, more: Mapping[str, str]) -> str:
        text = str(value)
        for character, code in {"%": "%25", "\r": "%0D", "\n": "%0A", **more}.items():
            text = text.replace(character, code)
        return text

    values = {"file": file, "line": one.line, "col": one.column, "endColumn": one.column + len(one.change.before)}
    properties = ",".join(f"{k}={escaped(v, {':': '%3A', ',': '%2C'})}" for k, v in values.items())
    return f"::warning {properties},title=spelling::{escaped(message(one.change), {})}"


def sarif(files: Sequence[tuple[str, Sequence[Located]]], version: str) -> str:
    """A SARIF 2.1.0 log, by this version of the program, with the changes of several files."""
    driver = {
        "name": "cedd correct",
        "version": version,
        "rules": [{"id": RULE, "shortDescription": {"text": "A word is misspelled."}}],
    }
    results = [_result(file, one) for file, found in files for one in found]
    run = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}
    return json.dumps({"$schema": SARIF_SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1)


def _result(file: str, one: Located) -> JSONObject:
    change = one.change
    end_line, end_column = one.line + change.before.count("\n"), one.column + len(change.before)
    if end_line > one.line:
        end_column = len(change.before) - change.before.rfind("\n")
    region = {"startLine": one.line, "startColumn": one.column, "endLine": end_line, "endColumn": end_column}
    artifact = {"uri": quote(Path(file).as_posix(), errors="surrogateescape")}
    replacement = {"deletedRegion": region, "insertedContent": {"text": change.after}}
    return {
        "ruleId": RULE,
        "level": "warning",
        "message": {"text": message(change)},
        "locations": [{"physicalLocation": {"artifactLocation": artifact, "region": region}}],
        "fixes": [{"artifactChanges": [{"artifactLocation": artifact, "replacements": [replacement]}]}],
    }
