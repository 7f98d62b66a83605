"""The books of the spelling benchmark, one character at a time, as GPT-2's tokens; and the tests on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from cells import CellHooks
from spelling_recipes import TEST_BOOKS, TRAINING_BOOK, Arguments

from cedd.data.corpora import open_corpus
from cedd.data.folders import data_folder
from cedd.data.packing import pack
from cedd.data.tokenizers import CharAsGPT2, GPT2Tokenizer, load_gpt2
from cedd.models.backbone import Backbone
from cedd.spelling.paper_protocol import restore
from cedd.storage import atomic_write
from cedd.training.loop import Trainer

SEEN = "wap"
SEEN_BLOCKS = 1000
"""Number of blocks of the training book that are tested too, to show how much of a score is memorization."""

_PRIVATE = 0xF0000
"""Where Unicode has room for 65,534 characters of one's own: the stand-in of token i is character _PRIVATE + i."""


def spelt(text: str, gpt2: GPT2Tokenizer, characters: dict[str, int]) -> str:
    """The text in characters that are one token each, which `characters` is extended to know.

    GPT-2 writes a curly quote, and a few accented letters, as two tokens: these become two stand-ins, one for each. So
    does a carriage return become one, for in a file of text it would not survive.
    """
    stand_ins: dict[int, str] = {}
    for character in set(text) - (set(characters) - {"\r"}):
        tokens = [int(token) for token in gpt2.encode(character)]
        characters.update({chr(_PRIVATE + token): token for token in tokens})
        stand_ins[ord(character)] = "".join(chr(_PRIVATE + token) for token in tokens)
    return text.translate(stand_ins)


def renumbered(characters: Mapping[str, int], size: int) -> dict[str, int]:
    """The characters as the first of `size` tokens, in their old order."""
    numbers = {token: number for number, token in enumerate(sorted(set(characters.values())))}
    if size < len(numbers):
        raise ValueError(f"--vocabulary must be at least {len(numbers)}, one for each character (got {size})")
    return {character: numbers[token] for character, token in characters.items()}


def prepare(arguments: Arguments) -> None:
    """Write the tokenizer and the books of one form, as its cells read them, next to the runs."""
    novels = data_folder("novels", arguments.data)
    gpt2 = load_gpt2(arguments.gpt2 or novels.parent / "gpt2-bpe")
    characters = dict(CharAsGPT2.from_gpt2(gpt2).characters)
    ending = ".txt" if arguments.form == "clean" else ".gutenberg.txt"
    for name in (TRAINING_BOOK, *TEST_BOOKS.values()):
        source = novels / f"{name}{ending}"
        text = as_shipped(source) if arguments.form == "crlf" else "".join(open_corpus(source).documents())
        atomic_write(arguments.book(name), spelt(text, gpt2, characters).encode())
    if arguments.vocabulary is None:
        tokenizer = CharAsGPT2(characters, gpt2.vocab_size)
    else:
        tokenizer = CharAsGPT2(renumbered(characters, arguments.vocabulary), arguments.vocabulary)
    tokenizer.save(arguments.tokenizer_folder)
    for name in (TRAINING_BOOK, *TEST_BOOKS.values()):
        pack(open_corpus(arguments.book(name)), tokenizer, arguments.length)  # so that no cell has to


def as_shipped(source: Path) -> str:
    """A text with its line ends of two characters, which a corpus reads as one."""
    text = "".join(open_corpus(source).documents())
    if b"\r\n" not in source.read_bytes():
        raise ValueError(f"{source} has no line ends of two characters: take the file as Gutenberg ships it")
    return text.replace("\n", "\r\n")


@dataclass
class SpellingHooks(CellHooks):
    """Test a cell by the paper's protocol; every cell of a process sees the same mistakes."""

    arguments: Arguments = field(default_factory=Arguments)
    books: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])

    def prepare(self, trainer: Trainer) -> None:
        for name, title in {**TEST_BOOKS, SEEN: TRAINING_BOOK}.items():
            packed = pack(open_corpus(self.arguments.book(title)), trainer.data.tokenizer, trainer.config.length)
            spread = slice(0, None, max(1, len(packed) // SEEN_BLOCKS)) if name == SEEN else slice(None)
            self.books[name] = torch.from_numpy(packed[spread][: self.arguments.blocks])

    def test(self, trainer: Trainer, model: Backbone) -> dict[str, Any]:
        books = {
            name: restore(model, trainer.process, trainer.method, blocks, seed=0).record()
            for name, blocks in self.books.items()
        }
        return {"books": books}

    def cost(self, figures: Mapping[str, Any]) -> float:
        return sum(1 - figures["books"][name]["all"]["share"] for name in TEST_BOOKS) / len(TEST_BOOKS)
