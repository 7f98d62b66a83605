"""The blocks to train and validate on, from the data that a user names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cedd.data.corpora import Corpus, Piece, open_corpus
from cedd.data.packing import PackedDataset, PackingPolicy, Part, ends_of_blocks, pack, select_documents
from cedd.data.tokenizers import Tokenizer, make_tokenizer


@dataclass(frozen=True)
class TrainingData:
    """What training needs: the tokenizer, the blocks to learn from, the blocks to validate on."""

    tokenizer: Tokenizer
    train: PackedDataset
    validation: PackedDataset


def prepare_training_data(
    data: str | Path,
    *,
    length: int,
    tokenizer: str | Path | Tokenizer = "char",
    validation: str | Path | None = None,
    holdout: float = 0.05,
    holdout_by: Literal["tail", "documents"] = "tail",
    field: str = "text",
    gpt2_files: str | Path | None = None,
    wrap: Literal["none", "bos-eos"] = "none",
    cache: str | Path | None = None,
    workers: int = 1,
) -> TrainingData:
    """Tokenizer, training blocks and validation blocks.

    validation: a corpus of its own; without one, `holdout` of `data` is held out, as its last blocks ("tail") or as
    evenly spread documents ("documents"). A tokenizer made from the data is made from the training corpus, without the
    documents that are held out; only an alphabet ("char") has to have their characters too.
    wrap: "bos-eos" puts each block between the tokens that begin and end a document, two of its `length` tokens.
    """
    corpus = open_corpus(data, field=field)
    if not isinstance(tokenizer, Tokenizer):
        by_documents = validation is None and holdout_by == "documents"
        part: Part = "train" if by_documents and str(tokenizer) != "char" else "all"
        pieces = select_documents(corpus, part, holdout)
        alphabet = str(tokenizer).split(":")[0] == "char"
        texts = _joined(pieces) if alphabet else (piece.text for piece in pieces)
        tokenizer = make_tokenizer(tokenizer, texts, gpt2_files=gpt2_files)
    ends = ends_of_blocks(tokenizer, length) if wrap == "bos-eos" else None
    text_length = length if ends is None else length - 2

    def packed(corpus: Corpus, **options: Any) -> PackedDataset:
        blocks = pack(corpus, tokenizer, text_length, cache=cache, workers=workers, **options)
        return blocks if ends is None else blocks.wrapped(*ends)

    if validation is not None:
        return TrainingData(tokenizer, packed(corpus), packed(open_corpus(validation, field=field)))
    if holdout_by == "tail":
        return TrainingData(tokenizer, *packed(corpus).split_tail(holdout))
    train, held_out = (packed(corpus, part=part, holdout=holdout) for part in ("train", "validation"))
    return TrainingData(tokenizer, train, held_out)


def _joined(pieces: Iterator[Piece]) -> Iterator[str]:
    """The text as it is packed in characters: with what stands between two documents, which an alphabet must have."""
    between = False
    for piece in pieces:
        yield PackingPolicy().text + piece.text if between else piece.text
        between = piece.ends_document
