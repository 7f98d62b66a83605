"""Training and validation blocks from a user's data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from cedd.data.corpora import Corpus, LabelledCorpus, Piece, open_corpus
from cedd.data.data_config import DataConfig
from cedd.data.packing import CorpusPart, PackedDataset, PackingPolicy, ends_of_blocks, pack, select_documents
from cedd.data.tokenizers import Tokenizer, make_tokenizer


@dataclass(frozen=True)
class TrainingData:
    """The tokenizer, the training blocks and the validation blocks."""

    tokenizer: Tokenizer
    train: PackedDataset
    validation: PackedDataset


def prepare_training_data(
    data: str | Path,
    length: int,
    options: DataConfig | None = None,
    tokenizer: Tokenizer | None = None,
    labels: str | None = None,
) -> TrainingData:
    """Tokenizer, training blocks and validation blocks.

    A tokenizer that is made from the data is made from the training corpus without held-out documents. Only an alphabet
    ("char") must also have the characters of these. With `options.wrap`, two of the `length` tokens of a block are
    those around it.

    Args:
        data: a text file, a folder of text files, a .jsonl, hf:NAME, or python-manual.
        length: tokens per block.
        options: how the data is tokenized and split.
        tokenizer: a tokenizer that exists, instead of `options.tokenizer`.
        labels: the field of a .jsonl with the label of each document. The documents of each label are then joined, so
            that blocks have one label, and evenly spaced documents are held out, of every label.
    """
    options = options or DataConfig()
    corpus = open_corpus(data, field=options.field)
    if labels is not None:
        corpus = LabelledCorpus(corpus, labels)
        options = replace(options, holdout_by="documents")
    if tokenizer is None:
        name = options.tokenizer
        by_documents = options.validation is None and options.holdout_by == "documents"
        part: CorpusPart = "train" if by_documents and name != "char" else "all"
        pieces = select_documents(corpus, part, options.holdout)
        texts = (piece.text for piece in pieces) if name.startswith("bpe:") else _joined(pieces)
        tokenizer = make_tokenizer(name, texts, gpt2_files=options.gpt2_files)
    ends = ends_of_blocks(tokenizer, length) if options.wrap == "bos-eos" else None
    text_length = length if ends is None else length - 2

    def packed(corpus: Corpus, part: CorpusPart = "all") -> PackedDataset:
        cache, workers = options.cache, options.workers
        blocks = pack(corpus, tokenizer, text_length, part=part, holdout=options.holdout, cache=cache, workers=workers)
        return blocks if ends is None else blocks.wrapped(*ends)

    if options.validation is not None:
        held_out = open_corpus(options.validation, field=options.field)
        if isinstance(corpus, LabelledCorpus):
            held_out = LabelledCorpus(held_out, str(labels), corpus.labels)
        return TrainingData(tokenizer, packed(corpus), packed(held_out))
    if options.holdout_by == "tail":
        return TrainingData(tokenizer, *packed(corpus).split_tail(options.holdout))
    return TrainingData(tokenizer, packed(corpus, "train"), packed(corpus, "validation"))


def _joined(pieces: Iterator[Piece]) -> Iterator[str]:
    """The text as it is packed in characters, with the separators between documents, which an alphabet must contain."""
    between = False
    for piece in pieces:
        yield PackingPolicy().text + piece.text if between else piece.text
        between = piece.ends_document
