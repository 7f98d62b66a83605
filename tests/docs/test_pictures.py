"""The pictures: each is shown on a page and drawn by a function, and the quick ones can be drawn."""

import re
from pathlib import Path

import pytest

from docs.pictures import ANIMATIONS, IMAGES, PICTURES, save
from docs.refresh import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def shown() -> set[str]:
    """The names of the images on all pages."""
    return {name for page in PAGES for name in re.findall(r"!\[[^\]]+\]\([\w/.]*images/([\w.-]+)\)", page.read_text())}


def test_every_image_is_shown_and_has_drawing_function():
    files = {path.name for path in IMAGES.iterdir()}
    assert files == shown()
    assert files == {*(f"{name}.svg" for name in PICTURES), *(f"{name}.gif" for name in ANIMATIONS)}


@pytest.mark.parametrize(
    "name", ["coverage", *(pytest.param(name, marks=pytest.mark.slow) for name in ("clocks", "how-tight"))]
)
def test_picture_can_be_drawn_without_background(name: str, tmp_path: Path):
    text = save(name, tmp_path).read_text("utf-8")
    assert "<svg" in text
    assert 'id="patch_1"' in text
    background = text.split('id="patch_1"')[1].split("</g>")[0]
    assert "fill: none" in background
