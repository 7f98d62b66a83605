"""Suggestions for unknown names."""

from pathlib import Path

import pytest

from cedd.names import nearest, nearest_path, suggestion


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("rolette", "; did you mean 'roulette'?"),
        ("ABSORB", "; did you mean 'absorb'?"),
        ("xyz", "; use one of absorb, roulette"),
        ("", "; use one of absorb, roulette"),
    ],
)
def test_suggestion_is_nearest_name_or_all_names(name: str, said: str) -> None:
    assert suggestion(name, {"absorb": 1, "roulette": 2}) == said


def test_nearest_of_empty_list_is_none() -> None:
    assert nearest("absorb", []) is None


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("boook.txt", "book.txt"),
        ("book.tx", "book.txt"),
        ("book.jsno", "book.json"),
        ("nope.txt", None),  # a common suffix alone is not a match
        ("Book", "book.txt"),
    ],
)
def test_nearest_path_ignores_matching_suffix(tmp_path: Path, name: str, near: str | None) -> None:
    for other in ("nofinal.txt", "x.txt", "bad.txt", "book.txt", "book.json"):
        (tmp_path / other).touch()
    assert nearest_path(tmp_path / name) == (None if near is None else tmp_path / near)


def test_nearest_path_in_missing_folder_is_none(tmp_path: Path) -> None:
    assert nearest_path(tmp_path / "nowhere" / "book.txt") is None
