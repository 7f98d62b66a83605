"""A tokenizer of your own: frequent words, and single characters for the rest."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cedd.data.tokenizers import Tokenizer

WORD = re.compile(r" ?\w+|\s|[^\w\s]")


class Words(Tokenizer):
    """The most frequent words of the data, each with the space before it, and all characters."""

    kind = "words"

    def __init__(self, words: Sequence[str], name: str = "words") -> None:
        self.words, self.name, self.vocab_size = list(words), name, len(words)
        self.ids = {word: token for token, word in enumerate(words)}

    @classmethod
    def make(cls, size: str, texts: Iterable[str] | None) -> "Words":
        """`--text.tokenizer words:500`."""
        counts, characters = Counter[str](), set[str]()
        for text in texts or ():
            counts.update(WORD.findall(text))
            characters.update(text)
        frequent = [word for word, _ in counts.most_common(int(size or 500)) if len(word) > 1]
        return cls([*sorted(characters), *frequent])

    def encode(self, text: str) -> NDArray[np.int64]:
        if unknown := set(text) - self.ids.keys():
            raise ValueError(f"characters that are not in the training text: {''.join(sorted(unknown))}")
        parts = ([word] if word in self.ids else word for word in WORD.findall(text))
        return np.array([self.ids[part] for word in parts for part in word], dtype=np.int64)

    def decode_run(self, ids: NDArray[np.int64]) -> str:
        return "".join(self.words[token] for token in ids)

    def definition(self) -> dict[str, Any]:
        """The arguments of the constructor, as JSON values."""
        return {"words": self.words}
