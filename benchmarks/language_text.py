"""The texts of the language benchmark: the corpus without and with its held-out documents, and the five test sets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from language_cells import Arguments

from cedd.data.corpora import Corpus, FileCorpus, Piece
from cedd.data.evaluation_sets import EvaluationData, evaluation_data, load_evaluation_set, open_evaluation_set
from cedd.data.folders import data_root
from cedd.data.packing import PackedDataset, pack, select_documents
from cedd.data.tokenizers import Tokenizer, make_tokenizer
from cedd.data.training_data import TrainingData
from cedd.storage import json_sha256

SETS: Mapping[str, str] = {
    "lambada": "LAMBADA",
    "wikitext2": "WikiText-2",
    "ptb": "PTB",
    "wikitext103": "WikiText-103",
    "lm1b": "1BW",
}
"""The paper's test sets, in its order."""
BREAKS: Mapping[str, str] = {"wikipedia": "\n\n\n", "books": "\n\n\n\n"}
"""Document separators of text files, by file name. In other files it is three newlines."""
ENDINGS = (".txt", ".txt.xz", ".txt.gz", ".jsonl", ".jsonl.xz", ".jsonl.gz")


@dataclass(eq=False)
class Documents(Corpus):
    """The held-out documents of some files, a share of each file's, or all others."""

    files: Sequence[Path]
    holdout: float
    held_out: bool

    def __post_init__(self) -> None:
        self.name = ", ".join(map(stem, self.files))
        self._sources = [FileCorpus([file], document_break=BREAKS.get(stem(file), "\n\n\n")) for file in self.files]

    def content_sha256(self) -> str:
        sources = [source.content_sha256() for source in self._sources]
        return json_sha256({"sources": sources, "holdout": self.holdout, "held_out": self.held_out})

    def pieces(self) -> Iterator[Piece]:
        for source in self._sources:
            yield from select_documents(source, "validation" if self.held_out else "train", self.holdout)


def stem(file: Path) -> str:
    """The name of a file without its endings."""
    return file.name.partition(".")[0]


@dataclass(frozen=True)
class Texts:
    """All that the cells read, as the command line names it."""

    arguments: Arguments

    @property
    def root(self) -> Path:
        """The folder of corpus/, eval/ and gpt2-bpe/."""
        root = data_root(self.arguments.data)
        if root is None:
            raise ValueError("name the folder of corpus/, eval/ and gpt2-bpe/ by --data, or set CEDD_DATA to it")
        return root

    @property
    def sets(self) -> Sequence[str]:
        """The names of the test sets: all, or none where no data folder is named."""
        return () if data_root(self.arguments.data) is None else tuple(SETS)

    @property
    def files(self) -> list[Path]:
        """The files of the corpus, in the order of their names."""
        given = [Path(path).expanduser() for path in self.arguments.corpus]
        found = given or [path for path in (self.root / "corpus").glob("*") if path.name.endswith(ENDINGS)]
        if not found:
            raise ValueError(f"{self.root / 'corpus'} has no text to train on ({', '.join(ENDINGS)})")
        if missing := [path for path in found if not path.is_file()]:
            raise ValueError(f"there is no file {missing[0]} to train on")
        names = [stem(path) for path in found]
        if len(set(names)) < len(names):
            raise ValueError(f"the files of the corpus need names of their own (got {', '.join(names)})")
        return sorted(found, key=lambda path: path.name)

    @property
    def tokenizer(self) -> Tokenizer:
        arguments = self.arguments
        return _tokenizer(arguments.tokenizer, self.root / "gpt2-bpe" if arguments.tokenizer == "gpt2" else None)

    def packed(self, corpus: Corpus, length: int) -> PackedDataset:
        arguments = self.arguments
        return pack(corpus, self.tokenizer, length, cache=arguments.cache, workers=arguments.workers)

    def held_out(self, length: int) -> dict[str, EvaluationData]:
        """The held-out documents of each file."""
        made: dict[str, EvaluationData] = {}
        for file in self.files:
            packed = self.packed(Documents([file], self.arguments.holdout, held_out=True), length)
            made[stem(file)] = evaluation_data(packed, {"set": stem(file)})
        return made

    def test_sets(self, length: int) -> dict[str, EvaluationData]:
        options = {"cache": self.arguments.cache, "workers": self.arguments.workers}
        return {
            name: load_evaluation_set(name, self.tokenizer, length, root=self.root, **options) for name in self.sets
        }

    def training(self, length: int, batch: int) -> TrainingData:
        """The training data for cells of this length. The benchmark does not use the trainer's own validation."""
        share = self.arguments.holdout
        train = self.packed(Documents(self.files, share, held_out=False), length)
        if len(train) < batch:
            raise ValueError(
                f"the corpus has {len(train)} blocks of {length} tokens, fewer than a batch of {batch}: give more "
                "text, or fewer --tokens per step"
            )
        return TrainingData(self.tokenizer, train, self.packed(Documents(self.files[:1], share, held_out=True), length))

    def protocol(self) -> dict[str, Any]:
        """Names and hashes of the texts, independent of their location."""
        files, share = self.files, self.arguments.holdout
        return {
            "corpus": {stem(file): Documents([file], share, held_out=True).content_sha256() for file in files},
            "tokenizer": self.tokenizer.fingerprint,
            "test_sets": {name: open_evaluation_set(name, root=self.root).content_sha256() for name in self.sets},
        }


@cache
def _tokenizer(spec: str, gpt2_files: Path | None) -> Tokenizer:
    return make_tokenizer(spec, gpt2_files=gpt2_files)
