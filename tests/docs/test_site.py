"""The documentation builds without a warning, has every page, and asks no other machine for anything."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import cedd
from docs.refresh import ROOT

mkdocs = pytest.importorskip("mkdocs.config", reason="mkdocs is not installed: pip install 'cedd[dev]'")

_FETCHED = (
    r'<(?:script|img|iframe|source)[^>]*\ssrc="([^"]+)"',
    r'<link(?=[^>]*rel="(?:stylesheet|icon|preconnect|preload)")[^>]*href="([^"]+)"',
    r"url\(['\"]?([^'\")]+)",
)


def build(site: Path) -> None:
    """What `make docs` does, in another folder."""
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def fetched(text: str) -> Iterator[str]:
    """The addresses of what a browser fetches for a page or a style sheet without being asked."""
    for pattern in _FETCHED:
        yield from re.findall(pattern, text)


def listed(nav: object) -> Iterator[str]:
    """The pages of a navigation, in order."""
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, dict):
        for part in nav.values():
            yield from listed(part)
    elif isinstance(nav, list):
        for part in nav:
            yield from listed(part)


def test_the_navigation_lists_each_page_once():
    pages = sorted(listed(mkdocs.load_config(str(ROOT / "mkdocs.yml")).nav))
    assert pages == sorted(path.name for path in (ROOT / "docs").glob("*.md"))


def test_the_site(tmp_path: Path):
    """One build for everything that is asked of it."""
    build(tmp_path)
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"}
    assert {path.parent.name for path in tmp_path.glob("*/index.html")} >= pages

    files = [path for path in tmp_path.rglob("*") if path.suffix in (".html", ".css")]
    addresses = {address for path in files for address in fetched(path.read_text("utf-8"))}
    assert any(address.endswith(".js") for address in addresses)
    assert not [address for address in addresses if re.match(r"(https?:)?//", address)]

    explained = re.sub(r"<[^>]+>", "", (tmp_path / "extend" / "index.html").read_text("utf-8"))
    for name in ("class Quadratic", "def towards_data", "def remasking", "def counting"):
        assert name in explained

    reference = (tmp_path / "api" / "index.html").read_text("utf-8")
    assert not [name for name in cedd.__all__ if f'id="cedd.{name}"' not in reference]


def test_what_comes_from_elsewhere_is_noticed():
    text = '<script src="https://a/b.js"></script><link href="//c/d.css" rel="stylesheet"> @font-face{src:url(//e/f)}'
    assert set(fetched(text)) == {"https://a/b.js", "//c/d.css", "//e/f"}
