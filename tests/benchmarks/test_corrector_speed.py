"""The comparison of versions of the corrector: medians, ratios and differing changes."""

import json
from pathlib import Path

import pytest

from tests.benchmarks.scripts import definitions


@pytest.fixture(scope="module")
def scripts():
    return definitions("english_words", "corrector_speed")


def test_table_has_medians_and_ratios_to_first_version(scripts):
    runs = [{"start_s": seconds, "torch": False, "speed": {"without errors": 1000 * seconds}} for seconds in (3, 1, 2)]
    found = scripts.medians([{**run, "start_s": float(run["start_s"])} for run in runs])
    assert found == {"without errors": 2000, "start_s": 2}
    lines = scripts.table({"before": found, "after": {"without errors": 3000, "start_s": 1.0}}).splitlines()
    assert lines[2:] == [
        "| characters per CPU second, without errors | 2,000 | 3,000 (1.50) |",
        "| start_s | 2.00 | 1.00 (0.50) |",
    ]


def test_changes_that_only_one_version_makes_are_counted(scripts):
    one = {"changes": {"text": [[[0, 3, "the"], [4, 8, "form"]], []]}}
    other = {"changes": {"text": [[[0, 3, "the"], [4, 8, "from"]], [[1, 2, "a"]]]}}
    assert scripts.differing(one, one) == 0
    assert scripts.differing(one, other) == 3


@pytest.mark.slow
def test_process_reports_its_own_peak_memory(scripts, tmp_path):
    texts = tmp_path / "texts.json"
    texts.write_text(json.dumps({"text": ["He walked form the tabel to the door."]}))
    reserve = bytearray(600_000_000)
    reserve[::4096] = b"x" * len(reserve[::4096])
    found = scripts.measured(Path("src"), texts)
    assert 100 < found["start_mb"] <= found["peak_mb"] < 500
    assert found["changes"]["text"][0]
    assert not found["torch"]
