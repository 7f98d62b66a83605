"""The documentation builds without warnings, has every page, and requests nothing from other hosts."""

import html
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import cedd
from cedd.cli.arguments import ARGUMENTS
from cedd.cli.parser import options_of
from docs.commands import spelled
from docs.refresh import ROOT

mkdocs = pytest.importorskip("mkdocs.config", reason="mkdocs is not installed: pip install 'cedd[dev]'")

_FETCHED = (
    r'<(?:script|img|iframe|source)[^>]*\ssrc="([^"]+)"',
    r'<link(?=[^>]*rel="(?:stylesheet|icon|preconnect|preload)")[^>]*href="([^"]+)"',
    r"url\(['\"]?([^'\")]+)",
)


def build(site: Path, config: Path = ROOT / "mkdocs.yml") -> None:
    """Build the site as `make docs` does, in another folder. (With --quiet, warnings would not fail a strict build.)"""
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(config), "--site-dir", str(site)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def fetched(text: str) -> Iterator[str]:
    """The addresses that a browser fetches automatically for a page or a style sheet."""
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


def test_navigation_lists_each_page_once():
    pages = sorted(listed(mkdocs.load_config(str(ROOT / "mkdocs.yml")).nav))
    assert pages == sorted(path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md"))


def test_site_builds_completely_and_fetches_nothing_external(tmp_path: Path):
    """One build for all checks."""
    build(tmp_path)
    pages = {path.relative_to(ROOT / "docs").with_suffix("") for path in (ROOT / "docs").rglob("*.md")} - {
        Path("index")
    }
    assert {path.parent.relative_to(tmp_path) for path in tmp_path.rglob("index.html")} >= pages

    files = [path for path in tmp_path.rglob("*") if path.suffix in (".html", ".css")]
    addresses = {address for path in files for address in fetched(path.read_text("utf-8"))}
    assert any(address.endswith(".js") for address in addresses)
    assert not [address for address in addresses if re.match(r"(https?:)?//", address)]

    explained = re.sub(r"<[^>]+>", "", (tmp_path / "guides" / "extend" / "index.html").read_text("utf-8"))
    for name in ("def shuffle_first", "def towards_data", "def remasking"):
        assert name in explained

    options = html.unescape(
        re.sub(r"<[^>]+>", "", (tmp_path / "reference" / "commands" / "index.html").read_text("utf-8"))
    )
    for name, kind in ARGUMENTS.items():
        assert f"cedd {name}" in options
        assert not [one.name for one in options_of(kind) if spelled(one) not in options], name

    reference = (tmp_path / "reference" / "api" / "index.html").read_text("utf-8")
    assert not [name for name in cedd.__all__ if f'id="cedd.{name}"' not in reference]


def test_external_addresses_are_detected():
    text = '<script src="https://a/b.js"></script><link href="//c/d.css" rel="stylesheet"> @font-face{src:url(//e/f)}'
    assert set(fetched(text)) == {"https://a/b.js", "//c/d.css", "//e/f"}


@pytest.mark.slow
def test_broken_link_fails_build(tmp_path: Path):
    """With the validation rules of the real configuration, on a separate page."""
    rules = yaml.safe_dump(
        {"validation": dict(mkdocs.load_config(str(ROOT / "mkdocs.yml")).user_configs[0]["validation"])}
    )
    (tmp_path / "mkdocs.yml").write_text(
        f"site_name: x\nstrict: true\ntheme: {{name: null, custom_dir: theme}}\n{rules}"
    )
    (tmp_path / "theme").mkdir()
    (tmp_path / "theme" / "main.html").write_text("{{ page.content }}")
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "index.md"
    for text in ("[a](nowhere.md)", "[a](index.md#nowhere)", "![a](nowhere.png)"):
        page.write_text(f"# Title\n\n{text}\n")
        with pytest.raises(AssertionError, match="nowhere"):
            build(tmp_path / "site", tmp_path / "mkdocs.yml")
    page.write_text("# Title\n\n[a](index.md#title)\n")
    build(tmp_path / "site", tmp_path / "mkdocs.yml")
