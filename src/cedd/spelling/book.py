"""The text on which a model's spelling is tested."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cedd.data.corpora import open_corpus
from cedd.data.text import EncodedText, encode_text
from cedd.models.loaded_model import LoadedModel

Progress = Callable[[float, float], None]
"""Called with the amount done and the total."""


@dataclass(frozen=True)
class Book:
    """A text as tokens, in blocks of the model's length."""

    name: str
    length: int
    encoded: EncodedText

    @property
    def text(self) -> str:
        return self.encoded.text

    @property
    def unknown(self) -> int:
        """Characters that the tokenizer does not know, replaced by similar ones."""
        return int(self.encoded.protected.sum())

    @property
    def blocks(self) -> Tensor:
        """Its tokens [N, length] in order, without a partial last block."""
        ids = self.encoded.ids
        return torch.from_numpy(ids[: len(ids) // self.length * self.length].reshape(-1, self.length))


def read_book(loaded: LoadedModel, data: str, blocks: int) -> Book:
    """The middle `blocks` blocks of the data's text, or all of it."""
    corpus, length, tokenizer = open_corpus(data), loaded.length, loaded.tokenizer
    text, wanted = "\n\n".join(corpus.documents()), blocks * length
    if blocks == 0 or tokenizer.single_characters is not None:
        return Book(corpus.name, length, encode_text(tokenizer, text[_middle(len(text), wanted or len(text))]))
    ids = tokenizer.encode(text)  # a token is several characters
    ids = ids[_middle(len(ids), wanted)]
    encoded = EncodedText(tokenizer.decode(ids), tokenizer, ids, np.zeros(len(ids), dtype=np.bool_), None)
    return Book(corpus.name, length, encoded)


def _middle(size: int, wanted: int) -> slice:
    start = max(0, (size - wanted) // 2)
    return slice(start, start + wanted)
