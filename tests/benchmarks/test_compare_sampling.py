"""Two versions of the package are timed in turns."""

import math
from pathlib import Path

import pytest

from tests.benchmarks.scripts import definitions

compare = definitions("compare_sampling")
SOURCE = str(Path(__file__).parents[2] / "src")


def test_ratios_are_paired_by_round():
    row = compare.compared("row", 7, [1.0, 2.0, 4.0], [2.0, 4.0, 8.0])
    assert math.isclose(row.ratio, 2.0)
    assert row.ci95 == pytest.approx((2.0, 2.0))
    wide = compare.compared("row", 7, [1.0, 1.0], [1.0, 2.0])
    assert math.isclose(wide.ratio, math.sqrt(2))
    assert wide.ci95[0] < 1 < 2 < wide.ci95[1]
    assert compare.compared("row", 7, [1.0], [3.0]).ci95 is None


@pytest.mark.slow
def test_version_compared_with_itself(tmp_path):
    out = tmp_path / "compared.json"
    small = ["--device=cpu", "--preset=tiny", "--vocab=50", "--shape=2x16", "--steps=4", "--rounds=2"]
    rows = compare.main([SOURCE, SOURCE, *small, "--rows", *compare.ROWS, "--json", str(out)])
    assert [row.row for row in rows] == list(compare.ROWS)
    assert all(row.rounds == 2 and min(row.seconds) > 0 and 0 < row.calls <= 16 for row in rows)
    assert out.exists()
