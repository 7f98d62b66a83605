"""What commands are given: a model (by default the one that comes with the package), a text, and common options."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from cedd.cli import UserError
from cedd.models.locate import is_model, locate, packaged, pretrained_names

WRITER, CORRECTOR = "english", "english-char"
"""The models that write and that correct where a command names none: the package's (`packaged`), not folders of these
names where the user happens to be."""


@dataclass(frozen=True)
class Source:
    """Where a text comes from: typed, a file, or standard input."""

    name: str
    text: str | None = None
    path: Path | None = None

    @property
    def size(self) -> int | None:
        """In bytes, where that is known."""
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
        """The whole text; bytes that are no UTF-8 come through as lone surrogates."""
        if self.text is not None:
            return self.text
        with self.opened() as stream:
            return stream.read().decode("utf-8", "surrogateescape")


def model_and_text(words: Sequence[str], usual: str) -> tuple[str | Path, str | None]:
    """The model and the text of a command line that says [RUN] TEXT; the package's `usual` one where none is named.

    Of two words the first is the model. A single word is the text, unless it is a model's: then the text is missing.
    An empty one is an empty text, not the folder that one is in.
    """
    if len(words) > 2:
        raise UserError(f"put the text in quotes: got {len(words)} words, which are more than a RUN and a text")
    if len(words) == 2:
        try:
            return locate(words[0]), words[1]
        except ValueError as error:
            raise UserError(f"{error} (a text of several words is put in quotes)") from None
    if words and words[0] and (words[0] in pretrained_names() or is_model(words[0])):
        return words[0], None
    return packaged(usual), (words[0] if words else None)


def model_and_source(words: Sequence[str], file: Path | None, usual: str, example: str) -> tuple[str | Path, Source]:
    """The model and the text of a command line that says [RUN] TEXT or [RUN] FILE, or - or nothing for standard input,
    or --file."""
    name, given = model_and_text(words, usual)
    if given is not None and given != "-":
        if file is not None:
            raise UserError("give the text or a file of it, not both")
        return name, file_source(Path(given)) if is_file(given) else Source("text", text=given)
    if file is not None:
        return name, file_source(file)
    if given is None and sys.stdin.isatty():
        raise UserError(f"there is no text: {example}, - to type it, or a FILE")
    return name, Source("standard input")


def is_file(word: str) -> bool:
    """Whether a word names what can be read, a pipe included; a text may be too long for a name."""
    try:
        path = Path(word).expanduser()
        return path.exists() and not path.is_dir()
    except (OSError, ValueError, RuntimeError):
        return False


def file_source(path: Path) -> Source:
    """A file, if there is one."""
    path = path.expanduser()
    if path.is_dir():
        texts = sorted(path.glob("*.txt"))
        raise UserError(f"{path} is a folder; name a file of it{f', such as {texts[0]}' if texts else ''}")
    if not path.exists():
        raise FileNotFoundError(2, "there is no such file", str(path))
    return Source(str(path), path=path)
