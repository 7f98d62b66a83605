"""Inputs of commands: a model (by default a pretrained one) and a text, typed, in a file or on standard input."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from cedd.cli import UserError
from cedd.models.locate import is_model, locate, packaged, pretrained_names
from cedd.names import nearest_path

DEFAULT_MODEL, DEFAULT_CORRECTOR = "english", "english-char"
"""The pretrained models that generate and correct when a command names none, wherever it is run."""

TEXT_SUFFIXES = (".txt", ".text", ".md", ".markdown", ".rst", ".adoc", ".org", ".tex", ".html", ".htm", ".xml", ".csv")
TEXT_SUFFIXES += (".tsv", ".json", ".jsonl", ".log", ".srt", ".vtt", ".po", ".py", ".yaml", ".yml", ".toml")
TEXT_SUFFIXES += (".rtf", ".odt", ".docx", ".pdf")
LONGEST_TEXT = 1 << 24
"""Bytes of a text that is read whole."""


@dataclass(frozen=True)
class TextSource:
    """Where a text comes from: the command line, a file, or standard input."""

    name: str
    text: str | None = None
    path: Path | None = None

    @property
    def size(self) -> int | None:
        """Size in bytes, if known."""
        if self.text is not None:
            return len(self.text.encode("utf-8", "surrogateescape"))
        return None if self.path is None else self.path.stat().st_size

    @contextmanager
    def opened(self) -> Iterator[BinaryIO]:
        if self.text is not None:
            yield io.BytesIO(self.text.encode("utf-8", "surrogateescape"))
        elif self.path is None:
            yield sys.stdin.buffer
        else:
            with self.path.open("rb") as file:
                yield file

    def read(self) -> str:
        """The whole text. Bytes that are not UTF-8 become lone surrogates."""
        if self.text is not None:
            return self.text
        with self.opened() as stream:
            content = stream.read(LONGEST_TEXT + 1)
        if len(content) > LONGEST_TEXT:
            raise UserError(f"{self.name} is longer than {LONGEST_TEXT:,} bytes")
        return content.decode("utf-8", "surrogateescape")


def model_and_text(words: Sequence[str], default: str) -> tuple[str | Path, str | None]:
    """The model and the text of a command line [MODEL] TEXT; without a MODEL, the pretrained model `default`.

    With two words the first is the model. A single word is the text, unless it names a model: then the text is missing.
    An empty word is an empty text, not the current folder.
    """
    if len(words) > 2:
        raise UserError(f"unexpected argument {words[2]!r}; put a text of several words in quotes")
    if len(words) == 2:
        try:
            return locate(words[0]), words[1]
        except ValueError as error:
            raise UserError(f"{error} (put a text of several words in quotes)") from None
    if words and words[0] and (words[0] in pretrained_names() or is_model(words[0])):
        return words[0], None
    return packaged(default), (words[0] if words else None)


def model_and_source(
    words: Sequence[str], file: Path | None, default: str, example: str
) -> tuple[str | Path, TextSource]:
    """The model and the text of a command line [MODEL] TEXT|FILE, where - or nothing means standard input, or
    --file."""
    name, given = model_and_text(words, default)
    if given is not None and given != "-":
        if file is not None:
            raise UserError("give either a text or --file, not both")
        named = is_file(given) or looks_like_path(given)
        return name, file_source(Path(given)) if named else TextSource("text", text=given)
    if file is not None:
        return name, file_source(file)
    if given is None and sys.stdin.isatty():
        raise UserError(f"no text was given: {example}, a FILE, or - to type it")
    return name, TextSource("standard input")


def is_file(word: str) -> bool:
    """Whether a word names a readable file or pipe. (A text may be too long for a file name.)"""
    try:
        path = Path(word).expanduser()
        return path.exists() and not path.is_dir()
    except (OSError, ValueError, RuntimeError):
        return False


def looks_like_path(word: str) -> bool:
    """Whether a word that names no file was probably meant as a path: a folder, a broken link, a name with the suffix
    of a text file, or a single word with a separator. (Such a text can be read from standard input.)"""
    if not word or "\n" in word:
        return False
    try:
        path = Path(word).expanduser()
        there = path.is_dir() or path.is_symlink()
    except (OSError, ValueError, RuntimeError):
        return False
    separators = {os.sep, os.altsep or os.sep}
    return there or path.suffix.lower() in TEXT_SUFFIXES or (len(word.split()) == 1 and bool(separators & set(word)))


def file_source(path: Path) -> TextSource:
    """The file at a path, if it exists."""
    path = path.expanduser()
    if path.is_dir():
        texts = sorted(path.glob("*.txt"))
        raise UserError(f"{path} is a folder; name a file in it{f', such as {texts[0]}' if texts else ''}")
    if not path.exists():
        if path.is_symlink():
            raise UserError(f"{path} is a broken link")
        near = nearest_path(path)
        hint = "if it is text, give it on standard input (-)" if near is None else f"did you mean {near}?"
        raise UserError(f"file not found: {path}; {hint}")
    return TextSource(str(path), path=path)
