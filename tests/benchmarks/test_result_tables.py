"""The tables on the result pages match the committed results."""

import re

import pytest

from tests.benchmarks.scripts import BENCHMARKS, definitions

PAGES = BENCHMARKS.parent / "docs" / "results"


@pytest.fixture(scope="module")
def script():
    return definitions("pages", "result_tables")


def check(script, page: str, made: dict[str, str]) -> None:
    """Check that every table placeholder of a page has a table, and that it is up to date."""
    text = (PAGES / page).read_text("utf-8")
    places = set(re.findall(r"^<!-- end of ([\w-]+) -->$", text, re.MULTILINE))
    assert places
    assert places <= set(made)
    assert script.with_tables(PAGES / page, made) == text, "run python benchmarks/result_tables.py"


def test_correction_tables_match_results(script):
    check(script, "correction.md", script.correction_tables())


def test_no_table_placeholder_is_empty():
    for page in PAGES.glob("*.md"):
        assert not re.search(r"<!-- ([\w-]+) -->\s*<!-- end of \1 -->", page.read_text("utf-8")), page.name


@pytest.mark.slow
def test_all_tables_match_results(script):
    for page, made in script.all_tables().items():
        check(script, page, made)


def test_stale_table_is_detected(script, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- one -->\n\n| 1 |\n\n<!-- end of one -->\n")
    assert script.with_tables(page, {"one": "| 2 |"}) != page.read_text()
    assert script.with_tables(page, {"one": "| 1 |"}) == page.read_text()
    with pytest.raises(ValueError, match="has no place"):
        script.with_tables(page, {"other": "| 1 |"})
