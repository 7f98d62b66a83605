"""The text files of a folder, and the settings of `cedd correct` in pyproject.toml."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from cedd.apps.correct.prose import is_prose_file
from cedd.names import suggestion
from cedd.spelling.engines import ENGINE_NAMES

PYPROJECT, TABLE = "pyproject.toml", "tool.cedd.correct"
_EXTENSIONLESS = frozenset(("readme", "changes", "changelog", "contributing", "news", "todo", "history", "authors"))


@dataclass(frozen=True)
class CorrectSettings:
    """The table [tool.cedd.correct] of a pyproject.toml.

    Args:
        folder: the folder of the file; patterns are relative to it.
        ignore_words: correct words.
        exclude: patterns, as in .gitignore, of files in folders that are not corrected.
        include: patterns of files that are corrected although their suffix is not that of text.
        engine: words or letters.
        threshold: as --threshold.
    """

    folder: Path = Path()
    ignore_words: frozenset[str] = frozenset()
    exclude: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    engine: str | None = None
    threshold: float | None = None


def read_settings(start: Path) -> CorrectSettings:
    """The settings in the nearest pyproject.toml with this table, in a folder or above it; otherwise the defaults."""
    folder = start.resolve()
    for one in (folder, *folder.parents):
        file = one / PYPROJECT
        if file.is_file():
            try:
                content = tomllib.loads(file.read_text("utf-8"))
            except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
                raise ValueError(f"{file} is not valid TOML: {error}") from error
            table = content.get("tool", {}).get("cedd", {}).get("correct")
            if table is not None:
                return _settings(file, table)
    return CorrectSettings()


def _settings(file: Path, table: object) -> CorrectSettings:
    kinds = {"ignore-words": list, "exclude": list, "include": list, "engine": str, "threshold": float}
    if not isinstance(table, dict):
        raise ValueError(f"{file}: [{TABLE}] must be a table")
    for name, value in table.items():
        if name not in kinds:
            raise ValueError(f"{file}: unexpected key {name!r} in [{TABLE}]{suggestion(name, kinds)}")
        kind = kinds[name]
        value = float(value) if kind is float and type(value) is int else value
        if not isinstance(value, kind) or (isinstance(value, list) and not all(isinstance(one, str) for one in value)):
            said = {list: "a list of strings", str: "a string", float: "a number"}[kind]
            raise ValueError(f"{file}: {name} in [{TABLE}] must be {said} (got {value!r})")
    engine, threshold = table.get("engine"), table.get("threshold")
    if engine not in (None, *ENGINE_NAMES):
        raise ValueError(f"{file}: invalid engine: {engine!r} (choose from {', '.join(ENGINE_NAMES)})")
    if threshold is not None and not 0 <= threshold <= 1:
        raise ValueError(f"{file}: threshold in [{TABLE}] must be in [0, 1] (got {threshold!r})")
    return CorrectSettings(
        file.parent,
        frozenset(table.get("ignore-words", ())),
        tuple(table.get("exclude", ())),
        tuple(table.get("include", ())),
        engine,
        threshold,
    )


class Patterns:
    """Patterns of a .gitignore: the last that matches a path decides.

    Args:
        folder: the folder to which the patterns are relative.
        lines: the patterns; those that begin with ! include again.
    """

    def __init__(self, folder: Path, lines: Sequence[str]) -> None:
        self.folder = folder
        self._rules = [rule for line in lines if (rule := _rule(line)) is not None]

    def match(self, path: Path, is_folder: bool) -> bool | None:
        """Whether a path below the folder is ignored (True) or included again (False); None if no pattern matches."""
        name = path.relative_to(self.folder).as_posix()
        for pattern, negated, only_folders in reversed(self._rules):
            if (is_folder or not only_folders) and pattern.fullmatch(name):
                return not negated
        return None


@lru_cache(maxsize=1024)
def _rule(line: str) -> tuple[re.Pattern[str], bool, bool] | None:
    """(pattern of the whole relative path, whether it is negated, whether it matches only folders)."""
    line = re.sub(r"(?<!\\)[ \t\r\n]+\Z", "", line)
    if not line or line.startswith("#"):
        return None
    negated = line.startswith("!")
    line = line[negated:]
    only_folders = line.endswith("/")
    line = line.rstrip("/")
    anchored = "/" in line
    line = line.removeprefix("/")
    if not line:
        return None
    parts = list[str]()
    for part in re.findall(r"\*\*/|/\*\*\Z|\*+|\?|\[!?\]?[^\]/]*\]|\\.|.", line, re.DOTALL):
        if part == "**/":
            parts.append("(?:.*/)?")
        elif part == "/**":
            parts.append("/.*")
        elif part.startswith("*"):
            parts.append("[^/]*")
        elif part == "?":
            parts.append("[^/]")
        elif part.startswith("[") and len(part) > 2:
            body = part[1:-1].replace("\\", "\\\\").replace("[", "\\[")
            parts.append(f"(?!/)[{'^' + body[1:] if body.startswith('!') else body}]")
        else:
            parts.append(re.escape(part.removeprefix("\\") or part))
    try:
        return re.compile(("" if anchored else "(?:.*/)?") + "".join(parts), re.DOTALL), negated, only_folders
    except re.error:
        return None  # git treats an invalid pattern as one that matches nothing


def text_files(folder: Path, settings: CorrectSettings | None = None) -> Iterator[Path]:
    """The text files below a folder, sorted.

    Hidden files, links, files that .gitignore excludes and files that are not text by their names are left out. A
    folder that cannot be read is yielded like a file.
    """
    settings = settings or CorrectSettings()
    root = folder.resolve()
    exclude, include = (Patterns(settings.folder.resolve(), lines) for lines in (settings.exclude, settings.include))
    ignored = list[Patterns]()
    repository = next((one for one in (root, *root.parents) if (one / ".git").exists()), root)
    for one in reversed((root, *root.parents)):
        if one.is_relative_to(repository) and one != root:
            ignored += _gitignore(one)
    yield from (folder / path.relative_to(root) for path in _below(root, ignored, exclude, include))


def _gitignore(folder: Path) -> list[Patterns]:
    file = folder / ".gitignore"
    if not file.is_file():
        return []
    return [Patterns(folder, file.read_text("utf-8", errors="replace").split("\n"))]


def _below(folder: Path, ignored: Sequence[Patterns], exclude: Patterns, include: Patterns) -> Iterator[Path]:
    if not os.access(folder, os.R_OK | os.X_OK):
        yield folder
        return
    ignored = [*ignored, *_gitignore(folder)]
    with os.scandir(folder) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    for entry in entries:
        path, is_folder = Path(entry.path), entry.is_dir(follow_symlinks=False)
        if entry.is_symlink() or entry.name.startswith("."):
            continue
        if next((said for one in reversed(ignored) if (said := one.match(path, is_folder)) is not None), False):
            continue
        if path.is_relative_to(exclude.folder) and exclude.match(path, is_folder):
            continue
        if is_folder:
            yield from _below(path, ignored, exclude, include)
        elif entry.is_file() and (
            is_prose_file(entry.name)
            or entry.name.lower() in _EXTENSIONLESS
            or (path.is_relative_to(include.folder) and include.match(path, False))
        ):
            yield path
