"""Tables that a benchmark writes into a page of docs/."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from cedd.storage import atomic_write


def with_tables(page: Path, made: Mapping[str, str]) -> str:
    """The page with the tables between their markers, `<!-- NAME -->` and `<!-- end of NAME -->`; all else stays."""
    text = page.read_text(encoding="utf-8")
    for name, table in made.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
        if not pattern.search(text):
            raise ValueError(f"{page} has no place for a table: it needs <!-- {name} --> and <!-- end of {name} -->")
        text = pattern.sub(lambda found, table=table: f"{found[1]}\n{table}\n\n{found[2]}", text)
    return text


def write_page(page: Path, made: Mapping[str, str]) -> None:
    """Write the tables into the page."""
    atomic_write(page, with_tables(page, made).encode())
