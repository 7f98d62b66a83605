"""What is said of a name that is not known."""

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
def test_the_nearest_name_or_all(name: str, said: str) -> None:
    assert suggestion(name, {"absorb": 1, "roulette": 2}) == said


def test_none_is_near_where_none_is() -> None:
    assert nearest("absorb", []) is None


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("boook.txt", "book.txt"),
        ("book.tx", "book.txt"),
        ("book.jsno", "book.json"),
        ("nope.txt", None),  # an ending that every text has proves nothing
        ("Book", "book.txt"),
    ],
)
def test_a_file_is_near_by_its_name_and_not_by_its_ending(tmp_path: Path, name: str, near: str | None) -> None:
    for other in ("nofinal.txt", "x.txt", "bad.txt", "book.txt", "book.json"):
        (tmp_path / other).touch()
    assert nearest_path(tmp_path / name) == (None if near is None else tmp_path / near)


def test_nothing_is_near_a_file_in_a_folder_that_is_not_there(tmp_path: Path) -> None:
    assert nearest_path(tmp_path / "nowhere" / "book.txt") is None
