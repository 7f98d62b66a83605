"""Train the model in the box: `english-char`, on books and Wikipedia.

    python benchmarks/english_char.py --corpus corpus --out runs/english-char

The corpus is a folder with `books.txt.xz` and `wikipedia.txt.xz` (or any other .txt, .txt.xz, .txt.gz files); the first
--megabytes of each become the training text, in a folder beside the run. The run is the preset `english-char`; more
settings go to it as they are (--steps 2000 --batch.size 64). A run that was stopped goes on. Then:

    cedd spelling runs/english-char --data pride_and_prejudice.txt --protocol user
    cedd export runs/english-char --out src/cedd/pretrained/english-char --weights int8
"""

from __future__ import annotations

import argparse
import gzip
import io
import lzma
import sys
from pathlib import Path
from typing import IO

from cedd.cli import main as cedd
from cedd.data.storage import atomic_write, data_folder

_OPENERS = {".xz": lzma.open, ".gz": gzip.open}


def beginning(path: Path, size: int) -> bytes:
    """The first `size` bytes of a text file, compressed or not, up to its last whole paragraph."""
    opened: IO[bytes] = _OPENERS[path.suffix](path, "rb") if path.suffix in _OPENERS else path.open("rb")  # pyright: ignore
    with io.BufferedReader(opened) as stream:  # pyright: ignore[reportArgumentType]
        text = stream.read(size)
    return text[: text.rfind(b"\n\n") + 1] if len(text) == size else text


def cut(corpus: Path, folder: Path, megabytes: int) -> None:
    """The beginnings of the corpus's files, as plain text in `folder`."""
    sources = sorted(path for pattern in ("*.txt", "*.txt.xz", "*.txt.gz") for path in corpus.glob(pattern))
    if not sources:
        raise SystemExit(f"there is no .txt, .txt.xz or .txt.gz file in {corpus}")
    folder.mkdir(parents=True, exist_ok=True)
    for source in sources:
        target = folder / (source.name.split(".")[0] + ".txt")
        if not target.exists():
            print(f"{target}: the first {megabytes} MB of {source.name}")
            atomic_write(target, beginning(source, megabytes * 1_000_000))


def main() -> int:
    """Cut the corpus, then train on it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, help="folder of the texts (default: CEDD_DATA/corpus)")
    parser.add_argument("--megabytes", type=int, default=90, help="of each file")
    parser.add_argument("--out", type=Path, default=Path("runs/english-char"))
    parser.add_argument("--text", type=Path, help="folder for the training text (default: OUT-text)")
    arguments, settings = parser.parse_known_args()
    folder = arguments.text or arguments.out.with_name(arguments.out.name + "-text")
    try:
        cut(data_folder("corpus", arguments.corpus), folder, arguments.megabytes)
    except ValueError as error:
        parser.error(str(error))
    return cedd(["train", "english-char", "--data", str(folder), "--out", str(arguments.out), *settings])


if __name__ == "__main__":
    sys.exit(main())
