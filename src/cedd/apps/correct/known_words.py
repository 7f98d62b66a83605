"""Correct words that are rare or missing in the lexicon: technical, recent and rare ones.

The file is gzipped text. A line `# KIND` begins the words of a kind, one per line in lower case.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from cedd.models.locate import KNOWN_WORDS_FILE as KNOWN_WORDS_FILE
from cedd.storage import atomic_write

DICTIONARY, LARGE, TECHNICAL = KINDS = "dictionary", "large dictionary", "technical"
"""Sources of the words: dictionaries of usual size; large ones, some of whose words are also misspellings of common
words; technical and recent texts."""


def save_known_words(path: Path, words: Mapping[str, Iterable[str]]) -> None:
    """Write the words of each kind."""
    lines = [line for kind in KINDS for line in (f"# {kind}", *sorted(words[kind]))]
    atomic_write(path, gzip.compress("\n".join(lines).encode(), 9, mtime=0))


def load_known_words(path: Path) -> dict[str, str]:
    """The kind of each word; nothing if there is no such file."""
    if not path.is_file():
        return {}
    try:
        first, *parts = gzip.decompress(path.read_bytes()).decode().split("# ")
        if first or not parts:
            raise ValueError("it has no words")
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise ValueError(f"{path} is not a list of known words, or is damaged: {error}") from error
    found: dict[str, str] = {}
    for part in parts:
        kind, *words = part.rstrip("\n").split("\n")
        found |= dict.fromkeys(words, kind)
    return found
