"""Choice of the parameter combinations that run by default."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def covering(rows: Iterable[Sequence[Any]], values: int = 1) -> list[Any]:
    """Test parameters: a subset of rows with every value of every column runs by default; all others are slow.

    With `values` = 2 the subset contains every pair of values (pairwise testing).
    """
    table = [tuple(row) for row in rows]
    contents = [set(itertools.combinations(enumerate(map(repr, row)), values)) for row in table]
    missing, chosen = set[Any]().union(*contents), set[int]()
    while missing:
        best = max(range(len(table)), key=lambda number: len(contents[number] & missing))
        missing -= contents[best]
        chosen.add(best)
    return [pytest.param(*row, marks=() if k in chosen else pytest.mark.slow) for k, row in enumerate(table)]
