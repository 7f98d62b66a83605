"""How often intervals hold the truth, cell by cell, as benchmarks/bound_coverage.py measures it."""

import json

import pytest

from tests.benchmarks.scripts import definitions

coverage = definitions("bound_coverage")
CELLS = list(coverage.cells(list(coverage.PROCESSES), repetitions=400))


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS, ids=[cell.name for cell in CELLS])
def test_coverage(cell) -> None:
    """400 repetitions, with a binomial error of 1.1%: of right 95% intervals one in 900 falls outside of 91.5% to
    98.5%, of those that cover 88% one in 60 is let pass.
    """
    found = coverage.measure(cell)
    assert 0.915 <= found["population"] <= 0.985, found
    assert 0.915 <= found["these"] <= 0.985, found


def test_cells_are_measured_and_written_and_not_measured_again(tmp_path, capsys) -> None:
    cells = [
        coverage.Cell("sedds", "uniform", "j1", sequences=8, networks=2, repetitions=4),
        coverage.Cell("cedd", "absorb", "tight", sequences=8, networks=1, repetitions=2),
    ]
    file = tmp_path / "coverage.json"
    coverage.run(cells, file, workers=1)
    assert len(capsys.readouterr().out.splitlines()) == 2
    found = json.loads(file.read_text())
    assert set(found) == {cell.name for cell in cells}
    first = found[cells[0].name]
    assert all(0 <= first[name] <= 1 for name in ("population", "these", "independent"))
    assert len(first["exact"]) == len(first["said_over_made"]) == 2
    coverage.run(cells, file, workers=1)
    assert not capsys.readouterr().out


def test_the_tables_of_the_page_are_those_of_the_results() -> None:
    page = coverage.PAGE.read_text(encoding="utf-8")
    for name, table in coverage.tables(coverage.results(coverage.RESULTS)).items():
        assert f"<!-- {name} -->\n\n{table}\n\n<!-- end of {name} -->" in page
