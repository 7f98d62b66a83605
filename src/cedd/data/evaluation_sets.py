"""The evaluation sets of the field, as a table: source, rows, detokenizer, packing.

Rows follow the hub's datasets, on which published numbers were measured: a line of WikiText is a document (even if
empty), and each document is followed by the end token. Published code packs in groups of a thousand rows and drops the
remainder of each group, so that its number of blocks depends on the grouping. Here one stream is packed in order, and
only the remainder of the whole set is dropped and reported.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cedd.data.corpora import READER, Corpus, FileCorpus, HubCorpus, Piece, cut_document
from cedd.data.detokenizers import LAMBADA, LM1B, PTB, WIKITEXT, Detokenizer
from cedd.data.folders import data_root
from cedd.data.packing import PackedDataset, PackingPolicy, pack
from cedd.data.tokenizers import Tokenizer
from cedd.names import suggestion
from cedd.storage import JSONMapping, JSONObject, file_sha256, json_sha256

Rows = Literal["lines with newline", "stripped lines", "jsonl text"]

# Datasets that are only a loading script on the hub are read from its automatic conversion.
CONVERTED = "refs/convert/parquet"


@dataclass(frozen=True)
class EvaluationSet:
    """One row of the table. `files`: split -> file name under the data root (or its `eval` folder)."""

    name: str
    title: str
    files: Mapping[str, str]
    hub: Callable[..., HubCorpus]
    """Makes the hub's corpus, given a split."""
    rows: Rows
    detokenizer: Detokenizer
    packing: PackingPolicy


def _wikitext(name: str, title: str, file: str, config: str) -> EvaluationSet:
    hub = partial(HubCorpus, "Salesforce/wikitext", config)
    return EvaluationSet(name, title, {"test": file}, hub, "lines with newline", WIKITEXT, PackingPolicy(text=""))


_TABLE = (
    _wikitext("wikitext2", "WikiText-2, raw", "wikitext2.test.raw.txt", "wikitext-2-raw-v1"),
    _wikitext(
        "wikitext103", "WikiText-103, tokenised form (rare words are <unk>)", "wikitext103.test.txt", "wikitext-103-v1"
    ),
    _wikitext(
        "wikitext103-raw",
        "WikiText-103, raw (its test split is that of WikiText-2)",
        "wikitext2.test.raw.txt",
        "wikitext-103-raw-v1",
    ),
    EvaluationSet(
        "ptb",
        "Penn Treebank, Mikolov's form",
        {"test": "ptb.test.txt", "validation": "ptb.valid.txt"},
        partial(HubCorpus, "ptb-text-only/ptb_text_only", field="sentence", revision=CONVERTED),
        "stripped lines",
        PTB,
        PackingPolicy(text="\n"),
    ),
    EvaluationSet(
        "lambada",
        "LAMBADA, OpenAI's form",
        {"test": "lambada.test.jsonl"},
        partial(HubCorpus, "EleutherAI/lambada_openai", "default"),
        "jsonl text",
        LAMBADA,
        PackingPolicy(text="\n"),
    ),
    EvaluationSet(
        "lm1b",
        "One Billion Words, held-out (local: shard 0 of 50; hub: all of them)",
        {"test": "lm1b.heldout-00000-of-00050.txt"},
        partial(HubCorpus, "billion-word-benchmark/lm1b", revision=CONVERTED),
        "stripped lines",
        LM1B,
        PackingPolicy(text="\n"),
    ),
)

EVALUATION_SETS: dict[str, EvaluationSet] = {entry.name: entry for entry in _TABLE}
_OTHER_NAMES = {"1bw": "lm1b", "wikitext-2": "wikitext2", "wikitext-103": "wikitext103"}


def find_evaluation_set(name: str) -> EvaluationSet:
    """The entry of that name."""
    key = _OTHER_NAMES.get(name.lower(), name.lower())
    if key not in EVALUATION_SETS:
        raise ValueError(f"unknown evaluation set {name!r}{suggestion(key, EVALUATION_SETS)}")
    return EVALUATION_SETS[key]


# --- rows -----------------------------------------------------------------------------------------------------


def _file_rows(path: Path, rows: Rows) -> Iterator[str]:
    """The rows of a local file, split exactly as the hub's loaders do."""
    with path.open(encoding="utf-8", newline="\n") as lines:
        for number, line in enumerate(lines, start=1):
            if rows == "jsonl text":
                try:
                    yield json.loads(line)["text"]
                except (ValueError, KeyError, TypeError):
                    raise ValueError(f"{path}, line {number} is not a JSON object with a 'text'") from None
            elif rows == "stripped lines":
                yield line.strip()
            else:
                yield line if line.strip() else ""


class EvaluationCorpus(Corpus):
    """The rows of an evaluation set, detokenized; each row, even if empty, is a document."""

    def __init__(self, entry: EvaluationSet, source: Path | HubCorpus) -> None:
        self.entry = entry
        self.source = source
        self.name = entry.name
        if isinstance(source, Path):
            FileCorpus([source])  # refuses an empty or binary file

    def content_sha256(self) -> str:
        source = file_sha256(self.source) if isinstance(self.source, Path) else self.source.content_sha256()
        return json_sha256(
            {"reader": READER, "rows": self.entry.rows, "source": source, "detokenizer": self.entry.detokenizer.sha256}
        )

    def is_still(self, content_sha256: str) -> bool:
        return isinstance(self.source, HubCorpus) or super().is_still(content_sha256)

    def pieces(self) -> Iterator[Piece]:
        rows = _file_rows(self.source, self.entry.rows) if isinstance(self.source, Path) else self.source.rows()
        for row in rows:
            yield from cut_document(self.entry.detokenizer(row))


def open_evaluation_set(name: str, split: str = "test", root: str | Path | None = None) -> EvaluationCorpus:
    """The corpus of an evaluation set, from the data root (the argument, or CEDD_DATA) or from the hub."""
    entry = find_evaluation_set(name)
    folder = data_root(root)
    if root is None and folder is not None and not folder.is_dir():
        raise ValueError(
            f"CEDD_DATA is not a folder: {folder}; correct it, or unset it to ask the hub for {entry.name}"
        )
    file_name = entry.files.get(split)
    if folder is not None and file_name is not None:
        for path in (folder / "eval" / file_name, folder / file_name):
            if path.is_file():
                return EvaluationCorpus(entry, path)
    if root is not None:
        if file_name is None:
            raise ValueError(f"{entry.name} is not read from {root}: no file of its {split!r} split is known")
        raise ValueError(f"{entry.name} ({split}) is not under {root} (no eval/{file_name})")
    return EvaluationCorpus(entry, entry.hub(split=split))


# --- the packed set with its protocol ---------------------------------------------------------------------------


@dataclass(frozen=True)
class EvaluationData:
    """Blocks to evaluate on, with their protocol: names, hashes and counts, as JSON."""

    packed: PackedDataset
    protocol: JSONObject

    def blocks(self, which: NDArray[np.integer]) -> NDArray[np.int64]:
        """These blocks, [N, L]."""
        return self.packed[which]

    def byte_counts(self, tokenizer: Tokenizer, blocks: NDArray[np.integer]) -> NDArray[np.float64]:
        """Bytes of text in blocks [N, L] of this set, [N].

        Tokens that begin or end documents count as no text. If tokens do not add up to the text (separators, a
        tokenizer that drops characters), counts are scaled so that the whole stream has the bytes of the text.
        """
        silent = (tokenizer.bos_id, tokenizer.eos_id, *tokenizer.silent)
        widths = tokenizer.widths.copy()
        widths[[token for token in silent if token is not None]] = 0
        total = self.packed.token_counts() @ widths
        return widths[blocks].sum(1) * (self.packed.header["utf8_bytes"] / total if total else 0.0)

    def text_counts(self, tokenizer: Tokenizer, blocks: NDArray[np.integer]) -> dict[str, float]:
        """Bytes, characters and words of the text of blocks [N, L] of this set.

        Words, and characters unless each token is one, are in proportion to the blocks' share of the bytes.
        """
        header, size = self.packed.header, float(self.byte_counts(tokenizer, blocks).sum())
        share = size / header["utf8_bytes"] if header["utf8_bytes"] else 0.0
        of_characters = share if tokenizer.characters is None else blocks.size / header["tokens"]
        return {"bytes": size, "characters": header["characters"] * of_characters, "words": header["words"] * share}

    def wrapped(self, first: int, last: int) -> EvaluationData:
        """The same blocks between two tokens, which count like others."""
        protocol = self.protocol | {
            "wrap": "bos-eos",
            "length": self.packed.length + 2,
            "tokens": self.protocol["tokens"] + 2 * self.protocol["blocks"],
            "protocol_sha256": json_sha256({"inner": self.protocol["protocol_sha256"], "ends": [first, last]}),
        }
        return EvaluationData(self.packed.wrapped(first, last), protocol)


def evaluation_data(packed: PackedDataset, described: JSONMapping) -> EvaluationData:
    """A packed set with its protocol: its description, the report of packing, and a hash of all that determines the
    tokens."""
    protocol = {**described, **packed.report()}
    hashed = ("content_sha256", "detokenizer_sha256", "policy_sha256", "tokenizer_fingerprint", "length")
    named = {key: protocol[key] for key in hashed if key in protocol}
    return EvaluationData(packed, protocol | {"protocol_sha256": json_sha256(named)})


def load_evaluation_set(
    name: str,
    tokenizer: Tokenizer,
    length: int,
    *,
    split: str = "test",
    root: str | Path | None = None,
    cache: str | Path | None = None,
    workers: int = 1,
) -> EvaluationData:
    """An evaluation set as blocks of `length` tokens, in the order of its text."""
    corpus = open_evaluation_set(name, split, root)
    entry = corpus.entry
    packed = pack(corpus, tokenizer, length, policy=entry.packing, cache=cache, workers=workers)
    protocol = {
        "set": entry.name,
        "title": entry.title,
        "split": split,
        "source": corpus.source.name,  # the file's name without its folder, or hf:...
        "rows": entry.rows,
        "detokenizer": entry.detokenizer.name,
        "detokenizer_sha256": entry.detokenizer.sha256,
    }
    return evaluation_data(packed, protocol)
