"""From what a user names on the command line to blocks to train and validate on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cedd.data.corpora import open_corpus
from cedd.data.packing import PackedDataset, PackingPolicy, pack
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
    policy: PackingPolicy | None = None,
    field: str = "text",
    document_break: str | None = None,
    gpt2_files: str | Path | None = None,
    unknown: str | None = None,
    cache: str | Path | None = None,
    workers: int = 1,
) -> TrainingData:
    """Tokenizer, training blocks and validation blocks.

    validation: a corpus of its own; without one, `holdout` of `data` is held out, as its last blocks ("tail") or as
    evenly spread documents ("documents"). A tokenizer made from the data is made from the training corpus.
    """
    corpus = open_corpus(data, field=field, document_break=document_break)
    if not isinstance(tokenizer, Tokenizer):
        tokenizer = make_tokenizer(tokenizer, corpus.texts(), gpt2_files=gpt2_files, unknown=unknown)
    if validation is not None:
        other = open_corpus(validation, field=field, document_break=document_break)
        train = pack(corpus, tokenizer, length, policy=policy, cache=cache, workers=workers)
        held_out = pack(other, tokenizer, length, policy=policy, cache=cache, workers=workers)
    elif holdout_by == "tail":
        whole = pack(corpus, tokenizer, length, policy=policy, cache=cache, workers=workers)
        train, held_out = whole.split_tail(holdout)
    else:
        train = pack(
            corpus, tokenizer, length, policy=policy, cache=cache, workers=workers, part="train", holdout=holdout
        )
        held_out = pack(
            corpus, tokenizer, length, policy=policy, cache=cache, workers=workers, part="validation", holdout=holdout
        )
    return TrainingData(tokenizer, train, held_out)
