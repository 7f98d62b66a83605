"""Selection of the files of a folder to correct, and the settings of a project."""

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cedd.apps.correct.text_files import CorrectSettings, Patterns, read_settings, text_files

FILES = ("README", "a.md", "src/b.py", "src/gen/c.py", "build/d.md", "x/keep/e.txt", "x/f.log", ".hidden/g.md", "h.png")


@pytest.fixture
def project(tmp_path):
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("teh\n")
    return tmp_path


def names(folder, **changes):
    found = text_files(folder, CorrectSettings(folder, **changes))
    return [path.relative_to(folder).as_posix() for path in found]


def test_text_and_source_files_are_found_in_order(project):
    assert names(project) == ["README", "a.md", "build/d.md", "src/b.py", "src/gen/c.py", "x/keep/e.txt"]


def test_git_ignored_files_are_left_out(project):
    (project / ".git").mkdir()
    (project / ".gitignore").write_text("# built\nbuild/\n*.txt\n!e.txt\n")
    (project / "src" / ".gitignore").write_text("/gen\n")
    assert names(project) == ["README", "a.md", "src/b.py", "x/keep/e.txt"]
    assert names(project / "src") == ["b.py"]
    assert names(project / "x") == ["keep/e.txt"]  # according to the .gitignore of the parent folder


def test_settings_exclude_and_include(project):
    assert names(project, exclude=("src/gen", "*.txt"), include=("x/*.log",)) == [
        *("README", "a.md", "build/d.md", "src/b.py", "x/f.log")
    ]


def test_links_are_not_followed(project):
    (project / "again").symlink_to(project)
    (project / "b.md").symlink_to(project / "a.md")
    assert names(project)[:3] == ["README", "a.md", "build/d.md"]


PATTERN = st.lists(st.sampled_from(["a", "b", "*", "**", "/", "?", "[ab]", "[!a]", "!", ".md", "\\*"]), max_size=6)


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
@settings(max_examples=1, deadline=None)
@given(st.lists(PATTERN.map("".join), min_size=40, max_size=40))
def test_ignore_patterns_match_like_git(tmp_path_factory, lines):
    """Every pattern is compared alone, on every path."""
    folder = tmp_path_factory.mktemp("git")
    subprocess.run(["git", "init", "-q", folder], check=True)
    paths = [
        Path(*parts) for parts in (("a",), ("b.md",), ("a", "b"), ("b", "a", "b"), ("ab", "a.md"), ("b", "b", "*"))
    ]
    given = "".join(f"{path}\n" for path in paths)
    for line in lines:
        (folder / ".gitignore").write_text(line + "\n")
        command = ["git", "check-ignore", "--stdin", "--no-index", "--verbose", "--non-matching"]
        said = subprocess.run(command, cwd=folder, input=given, capture_output=True, text=True, check=False).stdout
        expected = [not answer.startswith("::") and ":!" not in answer.split("\t")[0] for answer in said.splitlines()]
        patterns = Patterns(folder, [line])
        found = [
            any(patterns.match(folder / part, is_folder=part != path) for part in (path, *path.parents[:-1]))
            for path in paths
        ]
        if "**" not in line or "/**/" in line or line.startswith("**/"):
            assert found == expected, line


def test_settings_come_from_nearest_config_table(tmp_path):
    (tmp_path / "pyproject.toml").write_text(
        '[tool.cedd.correct]\nignore-words = ["teh"]\nexclude = ["x"]\nengine = "words"\nthreshold = 1\n'
    )
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "pyproject.toml").write_text("[tool.other]\n")
    assert read_settings(inner) == CorrectSettings(tmp_path, frozenset(["teh"]), ("x",), (), "words", 1.0)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("ignore_words = []", "did you mean 'ignore-words'"),
        ('exclude = "x"', "must be a list of strings"),
        ('engine = "x"', "invalid engine: 'x'"),
        ("threshold = 2", r"must be in \[0, 1\]"),
        ("=", "is not valid TOML"),
    ],
)
def test_invalid_settings_are_rejected(tmp_path, line, message):
    (tmp_path / "pyproject.toml").write_text(f"[tool.cedd.correct]\n{line}\n")
    with pytest.raises(ValueError, match=message):
        read_settings(tmp_path)
