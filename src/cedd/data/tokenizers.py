"""Text to token ids and back.

Ids are 0..V-1. The mask of a diffusion process is id V: no tokenizer has it, `decode` shows it as a placeholder.
Every tokenizer is defined by a JSON value, its `definition`; the sha256 of that is its fingerprint, and saving
or loading one reads and writes JSON only.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from cedd.data.folders import data_root
from cedd.names import suggestion
from cedd.storage import atomic_write, expanded, json_sha256, read_json, reading, write_json

MASK_CHARACTER = "▒"
END_OF_TEXT = "<|endoftext|>"
HEADER_FILE = "cedd_tokenizer.json"
BPE_FILE = "tokenizer.json"
GPT2_HUB_NAME = "openai-community/gpt2"
GPT2_VOCAB_SIZE = 50257
BERT_HUB_NAME = "google-bert/bert-base-uncased"
BERT_VOCAB_SIZE = 30522
NAMES = ("char", "char:SIZE", "byte", "gpt2", "gpt2-char", "bpe:SIZE")

Ids = Sequence[int] | NDArray[Any]


class Tokenizer(ABC):
    """The interface; a subclass gives `kind`, `definition`, `encode` and the meaning of single ids or runs."""

    kind: ClassVar[str]
    name: str
    vocab_size: int
    eos_id: int | None = None
    """The token that ends a document, where the vocabulary has one."""
    unknown: str | None = None
    """The character that stands for those outside `characters`, where there is one; it is never written."""
    silent: Sequence[int] = ()
    """Tokens that stand for no text, such as padding."""
    words_begin_with_spaces: bool = False
    """Whether the space before a word is part of the word's first token, and rarely a token of its own."""
    lossless: bool = True
    """Whether the text can be had back from its tokens."""

    @property
    def bos_id(self) -> int | None:
        """The token that blocks begin with where networks are trained so; that which ends them, for most."""
        return self.eos_id

    @cached_property
    def widths(self) -> NDArray[np.float64]:
        """About how many bytes of text each token stands for, [V]: for most kinds exactly. At least one."""
        lengths = [len(self.decode([token]).encode("utf-8", "surrogatepass")) for token in range(self.vocab_size)]
        lengths = np.array(lengths, dtype=np.float64)
        lengths[[token for token in (self.eos_id, *self.silent) if token is not None]] = 0
        return lengths.clip(1)

    @cached_property
    def spaced(self) -> NDArray[np.bool_]:
        """Which tokens begin with a space, [V]."""
        return np.array([self.decode([token]).startswith(" ") for token in range(self.vocab_size)])

    @property
    def characters(self) -> Mapping[str, int] | None:
        """The token of each character, where one position of text is one token; None for other kinds of tokenizer."""
        return None

    @property
    def single_characters(self) -> Mapping[str, int] | None:
        """The tokens that are one character each, by that character; None where tokens are pieces of words."""
        return self.characters

    def starts(self, text: str) -> NDArray[np.intp] | None:
        """Where each token begins in the text, in characters, [L]; None where only decoding can tell."""
        return None if self.characters is None else np.arange(len(text))

    @abstractmethod
    def encode(self, text: str) -> NDArray[np.int64]:
        """Token ids [L]; a character that cannot be written is a ValueError naming it and its position."""

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Ids, mask: str | None = MASK_CHARACTER) -> str:
        """Text of ids [L]; the mask id V is shown as `mask`, or refused when `mask` is None."""
        array = self._checked(ids)
        masked = np.flatnonzero(array == self.vocab_size)
        if len(masked) == 0:
            return self._decode_run(array)
        if mask is None:
            raise ValueError(f"id {self.vocab_size} at position {masked[0]} is the mask, which has no text")
        runs = np.split(array, masked)
        return mask.join([self._decode_run(runs[0]), *(self._decode_run(run[1:]) for run in runs[1:])])

    @abstractmethod
    def _decode_run(self, ids: NDArray[np.int64]) -> str:
        """Text of ids that are all in 0..V-1."""

    @abstractmethod
    def definition(self) -> dict[str, Any]:
        """The JSON value that says what each id means."""

    @classmethod
    def from_definition(cls, definition: Mapping[str, Any], name: str) -> Tokenizer:
        """The tokenizer again: what a definition holds is what the constructor takes."""
        return cls(**definition, name=name)  # pyright: ignore[reportCallIssue]

    @cached_property
    def fingerprint(self) -> str:
        return json_sha256({"kind": self.kind, "definition": self.definition()})

    def save(self, folder: str | Path) -> None:
        write_json(Path(folder) / HEADER_FILE, self._header() | {"definition": self.definition()})

    def _header(self) -> dict[str, Any]:
        return {"kind": self.kind, "name": self.name, "vocab_size": self.vocab_size, "fingerprint": self.fingerprint}

    def _checked(self, ids: Ids) -> NDArray[np.int64]:
        array = np.asarray(ids)
        if array.ndim != 1:
            raise ValueError(f"decode takes one sequence of ids, not an array of shape {array.shape}")
        array = array.astype(np.int64)
        bad = np.flatnonzero((array < 0) | (array > self.vocab_size))
        if len(bad):
            raise ValueError(
                f"id {array[bad[0]]} at position {bad[0]} is outside the {self.name} vocabulary of "
                f"{self.vocab_size} tokens: was this text encoded by another tokenizer?"
            )
        return array

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tokenizer) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, vocab_size={self.vocab_size})"


def _code_points(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")


class UnknownCharacter(ValueError):
    """A character of a text that a tokenizer does not know, and the text around it: by that it is found, however the
    text was cut before it was encoded."""


def _unknown_character(name: str, text: str, position: int, hint: str) -> UnknownCharacter:
    character, around = text[position], text[max(0, position - 20) : position + 20]
    return UnknownCharacter(
        f"character {character!r} (U+{ord(character):04X}) in {around!r} is not in the {name} vocabulary: {hint}"
    )


# --- characters ---------------------------------------------------------------------------------------------


class _CharacterTable(Tokenizer):
    """A one-to-one table from characters to ids; one position of text is one token."""

    _other = "\N{REPLACEMENT CHARACTER}"  # what an id that is no character decodes to

    def __init__(self, characters: Mapping[str, int], vocab_size: int, unknown: str | None, name: str) -> None:
        if unknown is not None and unknown not in characters:
            raise ValueError(f"the unknown character {unknown!r} must itself be in the {name} vocabulary")
        self._characters = dict(characters)
        self.vocab_size = vocab_size
        self.unknown = unknown
        self.name = name

    @property
    def characters(self) -> dict[str, int]:
        return self._characters

    @cached_property
    def _id_of_code(self) -> NDArray[np.int32]:
        table = np.full(max(map(ord, self.characters)) + 2, -1, dtype=np.int32)  # last entry: any higher code
        for character, token in self.characters.items():
            table[ord(character)] = token
        return table

    @cached_property
    def _code_of_id(self) -> NDArray[np.uint32]:
        table = np.full(self.vocab_size, ord(self._other), dtype="<u4")
        for character, token in self.characters.items():
            table[token] = ord(character)
        return table

    def encode(self, text: str) -> NDArray[np.int64]:
        codes = _code_points(text)
        ids = self._id_of_code[np.minimum(codes, len(self._id_of_code) - 1)].astype(np.int64)
        missing = ids < 0
        if missing.any():
            if self.unknown is None:
                hint = "train with a tokenizer that has room for others, such as char:96, or take it out of the text"
                raise _unknown_character(self.name, text, int(missing.argmax()), hint)
            ids[missing] = self.characters[self.unknown]
        return ids

    def _decode_run(self, ids: NDArray[np.int64]) -> str:
        return self._code_of_id[ids].astype("<u4").tobytes().decode("utf-32-le", "surrogatepass")


class CharTokenizer(_CharacterTable):
    """Each character of an alphabet is a token; ids follow the code points' order."""

    kind = "char"

    def __init__(self, alphabet: Iterable[str], unknown: str | None = None, name: str = "char") -> None:
        letters = sorted({character for text in alphabet for character in text} | set(unknown or ""))
        if not letters:
            raise ValueError("a character tokenizer needs at least one character: the text given is empty")
        self.alphabet = "".join(letters)
        super().__init__({c: i for i, c in enumerate(letters)}, len(letters), unknown, name)

    @classmethod
    def from_texts(cls, texts: Iterable[str], unknown: str | None = None, size: int | None = None) -> CharTokenizer:
        """The alphabet of the data, in one pass over it, or its `size` most frequent characters.

        With a size, U+FFFD stands for the others, unless `unknown` is given, and is one of the `size`.
        """
        if size is None:
            return cls({character for text in texts for character in set(text)}, unknown)
        counts = np.zeros(0x110000, dtype=np.int64)
        for text in texts:
            seen = np.bincount(_code_points(text))
            counts[: len(seen)] += seen
        stand_in = unknown or "\ufffd"
        counts[ord(stand_in)] = 0
        frequent = np.argsort(-counts, kind="stable")[: size - 1]
        return cls((chr(code) for code in frequent if counts[code]), stand_in)

    def definition(self) -> dict[str, Any]:
        return {"alphabet": self.alphabet, "unknown": self.unknown}


class CharAsGPT2(_CharacterTable):
    """The paper's spelling protocol: each character is written as its single-character GPT-2 token, V = 50257.

    Text is as long as it has characters, yet a wrong token is usually no character at all; such a token decodes
    to U+FFFD, so that positions of text and ids stay aligned.
    """

    kind = "gpt2-char"

    def __init__(
        self,
        characters: Mapping[str, int],
        vocab_size: int = GPT2_VOCAB_SIZE,
        unknown: str | None = None,
        name: str = "gpt2-char",
    ) -> None:
        super().__init__(characters, vocab_size, unknown, name)

    @classmethod
    def from_gpt2(cls, gpt2: GPT2Tokenizer, unknown: str | None = None) -> CharAsGPT2:
        characters: dict[str, int] = {}
        for token, content in enumerate(gpt2.token_bytes):
            try:
                text = content.decode("utf-8")
            except UnicodeDecodeError:
                continue
            if len(text) == 1:
                characters[text] = token
        return cls(characters, gpt2.vocab_size, unknown)

    def definition(self) -> dict[str, Any]:
        return {"characters": self.characters, "vocab_size": self.vocab_size, "unknown": self.unknown}


class ByteTokenizer(Tokenizer):
    """The 256 bytes of UTF-8."""

    kind = "byte"
    name = "byte"
    vocab_size = 256

    def encode(self, text: str) -> NDArray[np.int64]:
        return np.frombuffer(_utf8(self.name, text), dtype=np.uint8).astype(np.int64)

    @property
    def single_characters(self) -> Mapping[str, int]:
        return {chr(byte): byte for byte in range(128)}

    @cached_property
    def widths(self) -> NDArray[np.float64]:
        return np.ones(self.vocab_size)

    def starts(self, text: str) -> NDArray[np.intp]:
        return np.repeat(np.arange(len(text)), [len(character.encode()) for character in text])

    def _decode_run(self, ids: NDArray[np.int64]) -> str:
        return ids.astype(np.uint8).tobytes().decode("utf-8", "replace")

    def definition(self) -> dict[str, Any]:
        return {"encoding": "utf-8"}

    @classmethod
    def from_definition(cls, definition: Mapping[str, Any], name: str) -> ByteTokenizer:
        del definition, name
        return cls()


def _utf8(name: str, text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise _unknown_character(name, text, error.start, "a lone surrogate is not text") from None


# --- byte-level BPE -----------------------------------------------------------------------------------------


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's way to write bytes as visible characters: the printable ones of Latin-1 stand for themselves, the
    other bytes, in order, for the code points from 256 on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


def _byte_level(**model: Any) -> Any:
    """The library's byte-level BPE of a vocabulary and merges, or one to train."""
    import tokenizers  # slow to import, and few need it

    tokenizer: Any = tokenizers.Tokenizer(tokenizers.models.BPE(**model))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer


class _ByteLevelBPE(Tokenizer):
    """Byte-level BPE from a vocabulary and its merges, run by the `tokenizers` library.

    Text is only text: the end-of-document token is never read out of it, even if its spelling occurs there.
    """

    words_begin_with_spaces = True

    def __init__(self, vocab: Mapping[str, int], merges: Iterable[Iterable[str]], name: str) -> None:
        if sorted(vocab.values()) != list(range(len(vocab))):
            raise ValueError(f"the {name} vocabulary does not number its {len(vocab)} tokens 0..{len(vocab) - 1}")
        self.name = name
        self.vocab = dict(vocab)
        self.merges = [(left, right) for left, right in merges]
        self.vocab_size = len(vocab)
        self.eos_id = self.vocab.get(END_OF_TEXT)
        try:
            self._tokenizer = _byte_level(vocab=self.vocab, merges=self.merges)
        except Exception as error:  # noqa: BLE001 - the library raises a bare Exception
            raise ValueError(f"the {name} merges do not fit its vocabulary: {error}") from None
        missing = [byte for character, byte in _byte_alphabet().items() if character not in self.vocab]
        if missing:
            raise ValueError(f"the {name} vocabulary lacks {len(missing)} of the 256 bytes: it is not byte-level")

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """The bytes each id stands for, [V]."""
        byte_of = _byte_alphabet()
        content = [b""] * self.vocab_size
        for token, identity in self.vocab.items():
            plain = token == END_OF_TEXT or any(character not in byte_of for character in token)
            content[identity] = token.encode("utf-8") if plain else bytes(byte_of[c] for c in token)
        return content

    @cached_property
    def widths(self) -> NDArray[np.float64]:
        lengths = np.array([len(content) for content in self.token_bytes], dtype=np.float64)
        if self.eos_id is not None:
            lengths[self.eos_id] = 1
        return lengths.clip(1)

    @cached_property
    def spaced(self) -> NDArray[np.bool_]:
        return np.array([content.startswith(b" ") for content in self.token_bytes])

    def encode(self, text: str) -> NDArray[np.int64]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        for text in texts:
            if not text.isascii():
                _utf8(self.name, text)
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]

    def _decode_run(self, ids: NDArray[np.int64]) -> str:
        content = self.token_bytes
        return b"".join([content[token] for token in ids.tolist()]).decode("utf-8", "replace")

    def definition(self) -> dict[str, Any]:
        return {"vocab": self.vocab, "merges": [list(pair) for pair in self.merges]}

    def save(self, folder: str | Path) -> None:
        # `tokenizer.json` is the library's own format, which other programs read too.
        atomic_write(Path(folder) / BPE_FILE, self._tokenizer.to_str().encode("utf-8"))
        write_json(Path(folder) / HEADER_FILE, self._header())


def _from_hub(name: str, files: Sequence[str], folder: str) -> Path:
    """The folder of files that were downloaded."""
    from huggingface_hub import hf_hub_download

    try:
        paths = [Path(hf_hub_download(name, file)) for file in files]
    except Exception as error:  # noqa: BLE001 - no network, no such name: each is another exception
        raise ValueError(
            f"{' and '.join(files)} of {name!r} could not be had from the hub ({type(error).__name__}): give a folder "
            f"that has them, or set CEDD_DATA to a folder with {folder}/ in it"
        ) from None
    return paths[0].parent


class GPT2Tokenizer(_ByteLevelBPE):
    """GPT-2's byte-level BPE, 50,257 tokens; 50256 ends a document."""

    kind = "gpt2"

    @classmethod
    def from_folder(cls, folder: str | Path) -> GPT2Tokenizer:
        """From `vocab.json` and `merges.txt`, as OpenAI published them."""
        folder = Path(folder)
        for name in ("vocab.json", "merges.txt"):
            if not (folder / name).is_file():
                raise ValueError(f"{folder} has no {name}: GPT-2's tokenizer is vocab.json and merges.txt")
        vocab = read_json(folder / "vocab.json")
        lines = (folder / "merges.txt").read_text(encoding="utf-8").splitlines()
        pairs = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
        if any(len(pair) != 2 for pair in pairs):
            raise ValueError(f"{folder / 'merges.txt'} is damaged: a merge is not two tokens")
        return cls(vocab, pairs, "gpt2")

    @classmethod
    def from_hub(cls, name: str = GPT2_HUB_NAME) -> GPT2Tokenizer:
        return cls.from_folder(_from_hub(name, ("vocab.json", "merges.txt"), "gpt2-bpe"))


class BPETokenizer(_ByteLevelBPE):
    """Byte-level BPE trained on the data; its first token ends a document, and is no text that a model writes."""

    kind = "bpe"

    def __init__(self, vocab: Mapping[str, int], merges: Iterable[Iterable[str]], name: str) -> None:
        super().__init__(vocab, merges, name)
        self.silent = () if self.eos_id is None else (self.eos_id,)

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> BPETokenizer:
        smallest = 256 + 1  # the bytes, and the end of a document
        if vocab_size < smallest:
            raise ValueError(f"a byte-level BPE has at least {smallest} tokens, not {vocab_size}: use 'byte' instead")
        from tokenizers.trainers import BpeTrainer

        tokenizer = _byte_level()
        trainer = BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=sorted(_byte_alphabet()),
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        definition = _bpe_definition(json.loads(tokenizer.to_str()), "the trained BPE")
        return cls(**definition, name=f"bpe:{len(definition['vocab'])}")


def _bpe_definition(content: Mapping[str, Any], source: str) -> dict[str, Any]:
    """What a `tokenizer.json` defines; merges are pairs, or strings with a space in older files."""
    model = content.get("model", {})
    if model.get("type") != "BPE" or (content.get("pre_tokenizer") or {}).get("type") != "ByteLevel":
        raise ValueError(f"{source} is not a byte-level BPE, the only kind of tokenizer.json that is read here")
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    return {"vocab": model["vocab"], "merges": merges}


# --- of published networks ----------------------------------------------------------------------------------


class BERTTokenizer(Tokenizer):
    """BERT's WordPiece, run by the `tokenizers` library: text in small letters, without accents and line breaks, so
    that what is decoded is not quite what was encoded."""

    kind = "bert"
    lossless = False

    def __init__(self, vocab: Sequence[str], name: str = "bert") -> None:
        import tokenizers  # slow to import, and few need it

        if missing := [token for token in ("[UNK]", "[SEP]") if token not in vocab]:
            raise ValueError(f"the {name} vocabulary lacks {missing[0]}: it is not BERT's")
        self.vocab, self.name, self.vocab_size = list(vocab), name, len(vocab)
        self.eos_id = self.vocab.index("[SEP]")
        ids = {token: place for place, token in enumerate(self.vocab)}
        self._tokenizer: Any = tokenizers.Tokenizer(tokenizers.models.WordPiece(ids, unk_token="[UNK]"))
        self._tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
        self._tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
        self._tokenizer.decoder = tokenizers.decoders.WordPiece()

    @classmethod
    def from_folder(cls, folder: str | Path) -> BERTTokenizer:
        """From `vocab.txt`, a token a line."""
        lines = (Path(folder) / "vocab.txt").read_text(encoding="utf-8").removesuffix("\n").split("\n")
        return cls(lines)  # a token may be what else ends a line in Unicode

    @property
    def bos_id(self) -> int | None:
        return self.vocab.index("[CLS]") if "[CLS]" in self.vocab else self.eos_id

    @cached_property
    def widths(self) -> NDArray[np.float64]:
        """With the blank before a word."""
        return np.array([len(token.removeprefix("##")) + (not token.startswith("##")) for token in self.vocab], float)

    def encode(self, text: str) -> NDArray[np.int64]:
        _utf8(self.name, text)
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    def _decode_run(self, ids: NDArray[np.int64]) -> str:
        return self._tokenizer.decode(ids.tolist(), skip_special_tokens=False)

    def definition(self) -> dict[str, Any]:
        return {"vocab": self.vocab}


class IdTokenizer(Tokenizer):
    """No text at all: tokens are written as their numbers, with spaces between."""

    kind = "ids"

    def __init__(self, vocab_size: int, name: str = "ids") -> None:
        self.vocab_size, self.name = vocab_size, name

    def encode(self, text: str) -> NDArray[np.int64]:
        words = text.split()
        for position, word in enumerate(words):
            if not (word.isdecimal() and int(word) < self.vocab_size):
                raise ValueError(
                    f"word {position} is {word!r}: texts are numbers of tokens, 0 to {self.vocab_size - 1}"
                )
        return np.array([int(word) for word in words], dtype=np.int64)

    def decode(self, ids: Ids, mask: str | None = MASK_CHARACTER) -> str:
        array = self._checked(ids)
        if not (array == self.vocab_size).any():
            return self._decode_run(array)
        return " ".join(super(IdTokenizer, self).decode([token], mask) for token in array.tolist())

    def _decode_run(self, ids: NDArray[np.int64]) -> str:
        return " ".join(map(str, ids.tolist()))

    @cached_property
    def widths(self) -> NDArray[np.float64]:
        """With the blank between numbers."""
        return np.array([len(str(token)) + 1 for token in range(self.vocab_size)], float)

    def definition(self) -> dict[str, Any]:
        return {"vocab_size": self.vocab_size}


class PaddedTokenizer(Tokenizer):
    """Another tokenizer with one more token, [PAD], that stands for no text."""

    kind = "padded"

    def __init__(self, base: Tokenizer, name: str | None = None) -> None:
        self.base, self.name = base, name or f"{base.name}+pad"
        self.vocab_size, self.eos_id, self.silent = base.vocab_size + 1, base.eos_id, (base.vocab_size,)
        self.lossless, self.words_begin_with_spaces = base.lossless, base.words_begin_with_spaces

    @property
    def bos_id(self) -> int | None:
        return self.base.bos_id

    @cached_property
    def widths(self) -> NDArray[np.float64]:
        return np.append(self.base.widths, 1.0)

    def encode(self, text: str) -> NDArray[np.int64]:
        return self.base.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        return self.base.encode_batch(texts)

    def _decode_run(self, ids: NDArray[np.int64]) -> str:
        return self.base.decode(ids[ids < self.base.vocab_size])

    def definition(self) -> dict[str, Any]:
        return {"kind": self.base.kind, "name": self.base.name, "base": self.base.definition()}

    @classmethod
    def from_definition(cls, definition: Mapping[str, Any], name: str) -> PaddedTokenizer:
        return cls(tokenizer_from_definition(definition["kind"], definition["base"], definition["name"]), name)


# --- saving, loading, making --------------------------------------------------------------------------------


TOKENIZER_KINDS: dict[str, type[Tokenizer]] = {
    tokenizer.kind: tokenizer
    for tokenizer in (
        *(CharTokenizer, ByteTokenizer, GPT2Tokenizer, BPETokenizer, CharAsGPT2),
        *(BERTTokenizer, IdTokenizer, PaddedTokenizer),
    )
}


def tokenizer_from_definition(kind: str, definition: Mapping[str, Any], name: str) -> Tokenizer:
    """The tokenizer that a kind and its `definition` say."""
    if kind not in TOKENIZER_KINDS:
        raise ValueError(f"unknown kind of tokenizer {kind!r}: the kinds are {', '.join(TOKENIZER_KINDS)}")
    return TOKENIZER_KINDS[kind].from_definition(definition, name)


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer saved in a folder (a run's, or one with vocab.json and merges.txt, or a tokenizer.json)."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder} to load a tokenizer from")
    with reading(folder):
        header = read_json(folder / HEADER_FILE) if (folder / HEADER_FILE).is_file() else None
        if header is None and (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
            return GPT2Tokenizer.from_folder(folder)
        if header is None and (folder / "vocab.txt").is_file():
            return BERTTokenizer.from_folder(folder)
        if header is None and not (folder / BPE_FILE).is_file():
            raise ValueError(f"{folder} holds no tokenizer (no {HEADER_FILE}, {BPE_FILE} or vocab.json)")
        definition = (header or {}).get("definition")
        if definition is None:
            definition = _bpe_definition(read_json(folder / BPE_FILE), str(folder / BPE_FILE))
        if header is None:
            return BPETokenizer(**definition, name=f"bpe:{len(definition['vocab'])}")
        tokenizer = tokenizer_from_definition(header.get("kind", ""), definition, header["name"])
        if tokenizer.fingerprint != header["fingerprint"]:
            raise ValueError(f"the tokenizer in {folder} is damaged: its content does not match its fingerprint")
        return tokenizer


def load_gpt2(files: str | Path | None = None) -> GPT2Tokenizer:
    """GPT-2's tokenizer from the folder given, else CEDD_DATA/gpt2-bpe, else the hub."""
    if files is not None:
        return GPT2Tokenizer.from_folder(files)
    root = data_root()
    if root is not None and (root / "gpt2-bpe" / "vocab.json").is_file():
        return GPT2Tokenizer.from_folder(root / "gpt2-bpe")
    return GPT2Tokenizer.from_hub()


def load_bert() -> BERTTokenizer:
    """BERT's tokenizer, without capital letters: from CEDD_DATA/bert, else from the hub."""
    root = data_root()
    if root is not None and (root / "bert" / "vocab.txt").is_file():
        return BERTTokenizer.from_folder(root / "bert")
    return BERTTokenizer.from_folder(_from_hub(BERT_HUB_NAME, ("vocab.txt",), "bert"))


FITTING: dict[str, tuple[int, Callable[[], Tokenizer]]] = {
    "gpt2": (GPT2_VOCAB_SIZE, load_gpt2),
    "bert": (BERT_VOCAB_SIZE, load_bert),
}
"""Tokenizers of published networks, by name: how many tokens they have, and how they are had."""


def fitting_tokenizer(name: str, vocab_size: int, *, required: bool = True) -> Tokenizer:
    """A tokenizer for a network of so many tokens: with [PAD] where the network has one token more.

    name: gpt2, bert, a folder that has a tokenizer, or none, for which texts are numbers of tokens; so it is, unless
        `required`, where the number of tokens is another.
    """
    size, load = FITTING.get(name, (None, lambda: load_tokenizer(expanded(name))))
    if name == "none" or (not required and size is not None and vocab_size not in (size, size + 1)):
        return IdTokenizer(vocab_size)
    if size is None and not expanded(name).is_dir():
        raise ValueError(f"no tokenizer is called {name!r}; use {', '.join(FITTING)}, none, or a folder that has one")
    tokenizer = load()
    if tokenizer.vocab_size not in (vocab_size, vocab_size - 1):
        raise ValueError(f"the tokenizer {name} has {tokenizer.vocab_size} tokens, and the network {vocab_size}")
    return tokenizer if tokenizer.vocab_size == vocab_size else PaddedTokenizer(tokenizer)


def make_tokenizer(
    spec: str | Path,
    texts: Iterable[str] | None = None,
    *,
    gpt2_files: str | Path | None = None,
    unknown: str | None = None,
) -> Tokenizer:
    """A tokenizer by name: "char", "char:96", "byte", "gpt2", "gpt2-char", "bpe:8000", or the folder of a saved one.

    texts: the data, read once, for "char" (its alphabet), "char:SIZE" (its most frequent characters, and one that
        stands for the others) and "bpe:SIZE" (trained on it).
    gpt2_files: folder with vocab.json and merges.txt (default: CEDD_DATA/gpt2-bpe, then the hub).
    unknown: for the character tokenizers, the character that stands for those outside the alphabet.
    """
    name = str(spec)
    if name == "byte":
        return ByteTokenizer()
    if name in ("gpt2", "gpt2-char"):
        gpt2 = load_gpt2(gpt2_files)
        return gpt2 if name == "gpt2" else CharAsGPT2.from_gpt2(gpt2, unknown)
    kind, sized, size = name.partition(":")
    if name == "char" or (kind in ("char", "bpe") and sized):
        if texts is None:
            made = "byte, gpt2, gpt2-char or the folder of a saved one"
            raise ValueError(f"the tokenizer {name!r} is made from a text, and none is given: use {made}")
        if name == "char":
            return CharTokenizer.from_texts(texts, unknown)
        if not size.isdigit() or int(size) < 2:
            raise ValueError(f"{name!r} has no vocabulary size: write for example 'char:96' or 'bpe:8000'")
        if kind == "bpe":
            return BPETokenizer.train(texts, int(size))
        return CharTokenizer.from_texts(texts, unknown, int(size))
    if (folder := expanded(name)).is_dir():
        return load_tokenizer(folder)
    raise ValueError(f"unknown tokenizer {name!r}{suggestion(name, (*NAMES, 'a folder that has one'))}")
