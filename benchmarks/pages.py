"""Tables that a benchmark writes into a page of docs/."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from cedd.storage import atomic_write


def with_tables(page: Path, made: Mapping[str, str]) -> str:
    """The page with the tables that have markers there, `<!-- NAME -->` and `<!-- end of NAME -->`; all else stays."""
    text = page.read_text(encoding="utf-8")
    shown = re.findall(r"^<!-- end of ([\w-]+) -->$", text, re.MULTILINE)
    if not set(shown) & set(made):
        raise ValueError(f"{page} has no place for a table: it needs <!-- NAME --> and <!-- end of NAME -->")
    for name in shown:
        table = made.get(name)
        if table is not None:
            pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
            text = pattern.sub(lambda found, table=table: f"{found[1]}\n{table}\n\n{found[2]}", text)
    return text


def write_page(page: Path, made: Mapping[str, str]) -> None:
    """Write the tables into the page."""
    atomic_write(page, with_tables(page, made).encode())
