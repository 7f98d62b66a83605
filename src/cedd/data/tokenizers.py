"""Tokenizers: text to token ids and back.

Ids are 0..V-1. The mask of a diffusion process is id V: no tokenizer has it, and `decode` shows it as a placeholder.
Every tokenizer is defined by a JSON value, its `definition`, whose SHA-256 is its fingerprint. Saving and loading
involves JSON only.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from cedd.data.folders import data_root
from cedd.names import hub_failure, suggestion
from cedd.storage import JSONMapping, JSONObject, atomic_write, expanded, json_sha256, read_json, reading, write_json

if TYPE_CHECKING:
    from cedd.constraints.token_automaton import TokenTexts

MASK_CHARACTER = "▒"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
END_OF_TEXT = "<|endoftext|>"
HEADER_FILE = "cedd_tokenizer.json"
BPE_FILE = "tokenizer.json"
GPT2_HUB_NAME = "openai-community/gpt2"
GPT2_VOCAB_SIZE = 50257
BERT_HUB_NAME = "google-bert/bert-base-uncased"
BERT_VOCAB_SIZE = 30522
MAX_SINGLE = 10_000
"""Characters of a text that is encoded without the library's threads, which are faster only for longer texts."""
NAMES = ("char", "char:SIZE", "byte", "gpt2", "gpt2-char", "bpe:SIZE")

Ids = Sequence[int] | NDArray[np.integer]


class Tokenizer(ABC):
    """The interface. A subclass provides `kind`, `definition`, `encode` and `decode_run`; with an entry in
    `TOKENIZER_KINDS` and `make`, `--text.tokenizer KIND` or KIND:SIZE makes one."""

    kind: ClassVar[str]
    name: str
    vocab_size: int
    eos_id: int | None = None
    """The token that ends a document, if there is one."""
    unknown: str | None = None
    """The character that stands for those outside `characters`, if there is one; it is never generated."""
    silent: Sequence[int] = ()
    """Tokens without text, such as padding."""
    words_begin_with_spaces: bool = False
    """Whether the space before a word is part of the word's first token, and rarely a token by itself."""
    lossless: bool = True
    """Whether decoding restores the text."""
    adds_bos: bool = True
    """Whether an autoregressive network reads the token that begins a document before a prompt."""

    @property
    def bos_id(self) -> int | None:
        """The token at the beginning of wrapped blocks; for most tokenizers the end token."""
        return self.eos_id

    @cached_property
    def widths(self) -> NDArray[np.float64]:
        """Bytes of text per token, [V], exact for most kinds, approximate for others. At least one."""
        lengths = [len(self.decode([token]).encode("utf-8", "surrogatepass")) for token in range(self.vocab_size)]
        lengths = np.array(lengths, dtype=np.float64)
        lengths[[token for token in (self.eos_id, *self.silent) if token is not None]] = 0
        return lengths.clip(1)

    @cached_property
    def spaced(self) -> NDArray[np.bool_]:
        """Which tokens begin with a space, [V]."""
        return np.array([self.decode([token]).startswith(" ") for token in range(self.vocab_size)])

    @cached_property
    def texts(self) -> TokenTexts:
        """The text of each token, for constraints."""
        from cedd.constraints.token_automaton import TokenTexts

        never = {*self.ends, *self.silent}

        def written(contents: Iterable[bytes | None]) -> list[bytes | None]:
            return [None if token in never else content for token, content in enumerate(contents)]

        beginnings = None if self._beginnings is None else written(self._beginnings)
        return TokenTexts(written(self._contents), beginnings, self.ends)

    @property
    def ends(self) -> tuple[int, ...]:
        """Tokens that end a text: the end token and padding."""
        return tuple(sorted({token for token in (self.eos_id, *self.silent) if token is not None}))

    @property
    def _contents(self) -> Iterable[bytes | None]:
        """The bytes that each token adds to a text, [V]; None if unknown, as for parts of characters."""
        return map(_known_bytes, map(self.decode, ([token] for token in range(self.vocab_size))))

    @property
    def _beginnings(self) -> Iterable[bytes | None] | None:
        """The same for the first token of a text, if that differs."""
        return None

    @property
    def characters(self) -> Mapping[str, int] | None:
        """The token of each character, if tokens are characters; None for other kinds of tokenizers."""
        return None

    @property
    def single_characters(self) -> Mapping[str, int] | None:
        """Tokens that are single characters, by character; None if tokens are pieces of words."""
        return self.characters

    def starts(self, text: str) -> NDArray[np.intp] | None:
        """Position in the text of each token's first character, [L]; None if only decoding can determine it."""
        return None if self.characters is None else np.arange(len(text))

    @abstractmethod
    def encode(self, text: str) -> NDArray[np.int64]:
        """Token ids [L]. A ValueError names an unknown character and its position."""

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Ids, mask: str | None = MASK_CHARACTER) -> str:
        """Text of ids [L]. The mask id V is shown as `mask`, or refused if `mask` is None."""
        array = self._checked(ids)
        masked = np.flatnonzero(array == self.vocab_size)
        if len(masked) == 0:
            return self.decode_run(array)
        if mask is None:
            raise ValueError(f"id {self.vocab_size} at position {masked[0]} is the mask, which has no text")
        runs = np.split(array, masked)
        return mask.join([self.decode_run(runs[0]), *(self.decode_run(run[1:]) for run in runs[1:])])

    def decode_after(self, ids: Ids) -> str:
        """What tokens add to a text that has begun, which some tokenizers write with a space before a word."""
        return self.decode(ids)

    @abstractmethod
    def decode_run(self, ids: NDArray[np.int64]) -> str:
        """Text of ids that are all in 0..V-1."""

    @abstractmethod
    def definition(self) -> JSONObject:
        """The JSON value that defines the meaning of each id."""

    @classmethod
    def from_definition(cls, definition: JSONMapping, name: str) -> Tokenizer:
        """The tokenizer of a definition, which by default contains the constructor's arguments."""
        return cls(**definition, name=name)  # pyright: ignore[reportCallIssue]

    @classmethod
    def make(cls, size: str, texts: Iterable[str] | None) -> Tokenizer:
        """The tokenizer that a name KIND or KIND:SIZE stands for.

        Args:
            size: what follows the colon; empty without one.
            texts: the data, which can be read once.
        """
        raise NotImplementedError

    @cached_property
    def fingerprint(self) -> str:
        return json_sha256({"kind": self.kind, "definition": self.definition()})

    def save(self, folder: str | Path) -> None:
        write_json(Path(folder) / HEADER_FILE, self._header() | {"definition": self.definition()})

    def _header(self) -> JSONObject:
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


def _known_bytes(text: str) -> bytes | None:
    """A token's text as bytes; None if part of a character is missing."""
    return None if REPLACEMENT in text or not text else text.encode("utf-8", "surrogatepass")


def _code_points(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")


class UnknownCharacter(ValueError):
    """A character that a tokenizer does not know, with the text around it, by which it can be found however the text
    was split."""


def _unknown_character(name: str, text: str, position: int, hint: str) -> UnknownCharacter:
    character, around = text[position], text[max(0, position - 20) : position + 20]
    return UnknownCharacter(
        f"character {character!r} (U+{ord(character):04X}) in {around!r} is not in the {name} vocabulary: {hint}"
    )


# --- characters ---------------------------------------------------------------------------------------------


class _CharacterTable(Tokenizer):
    """A one-to-one table from characters to ids: each character is one token."""

    _other = REPLACEMENT  # what an id that is no character decodes to

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
                hint = "train with a tokenizer that has room for others, such as char:96, or remove it from the text"
                raise _unknown_character(self.name, text, int(missing.argmax()), hint)
            ids[missing] = self.characters[self.unknown]
        return ids

    def decode_run(self, ids: NDArray[np.int64]) -> str:
        return self._code_of_id[ids].astype("<u4").tobytes().decode("utf-32-le", "surrogatepass")


class CharTokenizer(_CharacterTable):
    """Each character of an alphabet is a token; ids follow the order of code points."""

    kind = "char"

    def __init__(self, alphabet: Iterable[str], unknown: str | None = None, name: str = "char") -> None:
        letters = sorted({character for text in alphabet for character in text} | set(unknown or ""))
        if not letters:
            raise ValueError("a character tokenizer needs at least one character: the text given is empty")
        self.alphabet = "".join(letters)
        super().__init__({c: i for i, c in enumerate(letters)}, len(letters), unknown, name)

    @classmethod
    def from_texts(cls, texts: Iterable[str], unknown: str | None = None, size: int | None = None) -> CharTokenizer:
        """The alphabet of the data, from one pass over it, or its `size` most frequent characters.

        With a size, `unknown` (by default U+FFFD), which is one of the `size` characters, replaces all others.
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

    @classmethod
    def make(cls, size: str, texts: Iterable[str] | None) -> CharTokenizer:
        texts = _given(cls.kind, texts)
        return cls.from_texts(texts, size=_vocab_size(cls.kind, size) if size else None)

    def definition(self) -> JSONObject:
        return {"alphabet": self.alphabet, "unknown": self.unknown}


class CharAsGPT2(_CharacterTable):
    """The paper's spelling protocol: each character is its single-character GPT-2 token, V = 50257.

    A text has as many tokens as characters, but a wrong token is usually not a character. Such a token decodes to
    U+FFFD, so that positions of text and ids stay aligned.
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
    def from_gpt2(cls, gpt2: GPT2Tokenizer) -> CharAsGPT2:
        characters: dict[str, int] = {}
        for token, content in enumerate(gpt2.token_bytes):
            try:
                text = content.decode("utf-8")
            except UnicodeDecodeError:
                continue
            if len(text) == 1:
                characters[text] = token
        return cls(characters, gpt2.vocab_size)

    def definition(self) -> JSONObject:
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

    @property
    def _contents(self) -> Iterable[bytes]:
        return (bytes([token]) for token in range(self.vocab_size))

    def starts(self, text: str) -> NDArray[np.intp]:
        return np.repeat(np.arange(len(text)), [len(character.encode()) for character in text])

    def decode_run(self, ids: NDArray[np.int64]) -> str:
        return ids.astype(np.uint8).tobytes().decode("utf-8", "replace")

    def definition(self) -> JSONObject:
        return {"encoding": "utf-8"}

    @classmethod
    def from_definition(cls, definition: JSONMapping, name: str) -> ByteTokenizer:
        del definition, name
        return cls()

    @classmethod
    def make(cls, size: str, texts: Iterable[str] | None) -> ByteTokenizer:
        if size:
            raise ValueError(f"the tokenizer 'byte' has no size; use byte (got 'byte:{size}')")
        return cls()


def _utf8(name: str, text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise _unknown_character(name, text, error.start, "a lone surrogate is not text") from None


# --- byte-level BPE -----------------------------------------------------------------------------------------


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's visible characters for bytes: printable ones of Latin-1 stand for themselves, the others, in order, are
    the code points from 256 on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


_BYTE_OF = _byte_alphabet()


def _byte_level_bytes(token: str) -> bytes | None:
    """The bytes of a token that is written by visible characters; None if it has others."""
    try:
        return bytes(_BYTE_OF[character] for character in token)
    except KeyError:
        return None


def _byte_level(**model: Any) -> Any:
    """The library's byte-level BPE of a vocabulary and merges, or one to train."""
    import tokenizers  # slow to import, and few need it

    tokenizer: Any = tokenizers.Tokenizer(tokenizers.models.BPE(**model))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer


class _ByteLevelBPE(Tokenizer):
    """Byte-level BPE with the `tokenizers` library.

    Special tokens are not parsed from text: a document may contain the spelling of the end token.
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
        missing = [byte for character, byte in _BYTE_OF.items() if character not in self.vocab]
        if missing:
            raise ValueError(f"the {name} vocabulary lacks {len(missing)} of the 256 bytes: it is not byte-level")

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """The bytes of each id, [V]."""
        byte_of = _BYTE_OF
        content = [b""] * self.vocab_size
        for token, identity in self.vocab.items():
            plain = token == END_OF_TEXT or any(character not in byte_of for character in token)
            content[identity] = token.encode("utf-8") if plain else bytes(byte_of[c] for c in token)
        return content

    @property
    def _contents(self) -> Iterable[bytes]:
        return self.token_bytes

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
        if len(text) > MAX_SINGLE:
            return self.encode_batch([text])[0]
        if not text.isascii():
            _utf8(self.name, text)
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        for text in texts:
            if not text.isascii():
                _utf8(self.name, text)
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]

    def decode_run(self, ids: NDArray[np.int64]) -> str:
        content = self.token_bytes
        return b"".join([content[token] for token in ids.tolist()]).decode("utf-8", "replace")

    def definition(self) -> JSONObject:
        return {"vocab": self.vocab, "merges": [list(pair) for pair in self.merges]}

    def save(self, folder: str | Path) -> None:
        # `tokenizer.json` is the library's own format, which other programs read too.
        atomic_write(Path(folder) / BPE_FILE, self._tokenizer.to_str().encode("utf-8"))
        write_json(Path(folder) / HEADER_FILE, self._header())


def _from_hub(name: str, files: Sequence[str], folder: str) -> Path:
    """Download files; the folder that contains them."""
    from huggingface_hub import hf_hub_download

    try:
        paths = [Path(hf_hub_download(name, file)) for file in files]
    except Exception as error:  # noqa: BLE001 - no network, no such name: each is another exception
        raise ValueError(
            f"could not download {' and '.join(files)} of {name!r}: {hub_failure(error)}; give a folder that has "
            f"them, or set CEDD_DATA to a folder with {folder}/ in it"
        ) from None
    return paths[0].parent


class GPT2Tokenizer(_ByteLevelBPE):
    """GPT-2's byte-level BPE with 50,257 tokens; 50256 ends a document."""

    kind = "gpt2"

    @classmethod
    def from_folder(cls, folder: str | Path) -> GPT2Tokenizer:
        """From `vocab.json` and `merges.txt`, as published by OpenAI."""
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


class BPETokenizer(_ByteLevelBPE):
    """Byte-level BPE trained on the data; its first token ends a document and is never generated."""

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
            vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=sorted(_BYTE_OF), show_progress=False
        )
        tokenizer.train_from_iterator(texts, trainer)
        definition = _bpe_definition(json.loads(tokenizer.to_str()), "the trained BPE")
        return cls(**definition, name=f"bpe:{len(definition['vocab'])}")

    @classmethod
    def make(cls, size: str, texts: Iterable[str] | None) -> BPETokenizer:
        return cls.train(_given(cls.kind, texts), _vocab_size(cls.kind, size))


def _given(kind: str, texts: Iterable[str] | None) -> Iterable[str]:
    """The texts that a tokenizer is made from."""
    if texts is None:
        others = "byte, gpt2, gpt2-char or the folder of a saved one"
        raise ValueError(f"the tokenizer {kind!r} is made from a text, and none is given: use {others}")
    return texts


def _vocab_size(kind: str, size: str) -> int:
    """The number in KIND:SIZE."""
    if not size.isdigit() or int(size) < 2:
        raise ValueError(
            f"the tokenizer {kind!r} needs a vocabulary size of at least 2, as in {kind}:8000 (got {size!r})"
        )
    return int(size)


def _bpe_definition(content: JSONMapping, source: str) -> JSONObject:
    """The definition in a `tokenizer.json`; merges are pairs, or strings with a space in older files."""
    model = content.get("model", {})
    if model.get("type") != "BPE" or (content.get("pre_tokenizer") or {}).get("type") != "ByteLevel":
        raise ValueError(f"{source} is not a byte-level BPE, the only kind of tokenizer.json that is read here")
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    return {"vocab": model["vocab"], "merges": merges}


# --- of published networks ----------------------------------------------------------------------------------


def _is_special(token: str) -> bool:
    """Whether a WordPiece token is special, in brackets."""
    return len(token) > 2 and token.startswith("[") and token.endswith("]")


class BERTTokenizer(Tokenizer):
    """BERT's WordPiece with the `tokenizers` library. Text is lowercased and loses accents and line breaks, so decoding
    does not restore it exactly."""

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
        """From `vocab.txt`, with one token per line."""
        lines = (Path(folder) / "vocab.txt").read_text(encoding="utf-8").removesuffix("\n").split("\n")
        return cls(lines)  # splitlines would also split at other Unicode line ends

    @property
    def bos_id(self) -> int | None:
        return self.vocab.index("[CLS]") if "[CLS]" in self.vocab else self.eos_id

    @property
    def _contents(self) -> Iterable[bytes | None]:
        before = self.vocab.index(next(token for token in self.vocab if token.isalnum()))
        skipped = len(self.vocab[before])
        texts = (self.decode_run(np.array([before, token]))[skipped:] for token in range(self.vocab_size))
        return (
            None if _is_special(token) else _known_bytes(text) for token, text in zip(self.vocab, texts, strict=True)
        )

    @property
    def _beginnings(self) -> Iterable[bytes | None]:
        texts = (self.decode_run(np.array([token])) for token in range(self.vocab_size))
        inside = (_is_special(token) or token.startswith("##") for token in self.vocab)
        return (None if never else _known_bytes(text) for never, text in zip(inside, texts, strict=True))

    @cached_property
    def widths(self) -> NDArray[np.float64]:
        """Including the space before a word."""
        return np.array([len(token.removeprefix("##")) + (not token.startswith("##")) for token in self.vocab], float)

    def encode(self, text: str) -> NDArray[np.int64]:
        _utf8(self.name, text)
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    def decode_run(self, ids: NDArray[np.int64]) -> str:
        return self._tokenizer.decode(ids.tolist(), skip_special_tokens=False)

    def definition(self) -> JSONObject:
        return {"vocab": self.vocab}


class IdTokenizer(Tokenizer):
    """Token ids as text, separated by spaces."""

    kind = "ids"
    words_begin_with_spaces = True

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
            return self.decode_run(array)
        return " ".join(super(IdTokenizer, self).decode([token], mask) for token in array.tolist())

    def decode_after(self, ids: Ids) -> str:
        return " " + self.decode(ids) if len(ids) else ""

    def decode_run(self, ids: NDArray[np.int64]) -> str:
        return " ".join(map(str, ids.tolist()))

    @property
    def _contents(self) -> Iterable[bytes]:
        return (f" {token}".encode() for token in range(self.vocab_size))

    @property
    def _beginnings(self) -> Iterable[bytes]:
        return (str(token).encode() for token in range(self.vocab_size))

    @cached_property
    def widths(self) -> NDArray[np.float64]:
        """Including the space between numbers."""
        return np.array([len(str(token)) + 1 for token in range(self.vocab_size)], float)

    def definition(self) -> JSONObject:
        return {"vocab_size": self.vocab_size}


class PaddedTokenizer(Tokenizer):
    """Another tokenizer with one additional token, [PAD], which has no text."""

    kind = "padded"

    def __init__(self, base: Tokenizer, name: str | None = None) -> None:
        self.base, self.name = base, name or f"{base.name}+pad"
        self.vocab_size, self.eos_id, self.silent = base.vocab_size + 1, base.eos_id, (base.vocab_size,)
        self.lossless, self.words_begin_with_spaces = base.lossless, base.words_begin_with_spaces

    @property
    def bos_id(self) -> int | None:
        return self.base.bos_id

    @property
    def _contents(self) -> Iterable[bytes | None]:
        return (*self.base.texts.contents, None)

    @property
    def _beginnings(self) -> Iterable[bytes | None] | None:
        beginnings = self.base.texts.beginnings
        return None if beginnings is None else (*beginnings, None)

    @cached_property
    def widths(self) -> NDArray[np.float64]:
        return np.append(self.base.widths, 1.0)

    def encode(self, text: str) -> NDArray[np.int64]:
        return self.base.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        return self.base.encode_batch(texts)

    def decode_run(self, ids: NDArray[np.int64]) -> str:
        return self.base.decode(ids[ids < self.base.vocab_size])

    def definition(self) -> JSONObject:
        return {"kind": self.base.kind, "name": self.base.name, "base": self.base.definition()}

    @classmethod
    def from_definition(cls, definition: JSONMapping, name: str) -> PaddedTokenizer:
        return cls(tokenizer_from_definition(definition["kind"], definition["base"], definition["name"]), name)


# --- tokenizer.json of others -------------------------------------------------------------------------------


class JSONTokenizer(Tokenizer):
    """The tokenizer that a tokenizer.json describes, run by the `tokenizers` library, for a network of V tokens.

    Special tokens are recognized in text only by `encode_chat`. Ids that the tokenizer does not use have no text, and
    neither do special tokens except those that end a text.

    Args:
        content: the content of tokenizer.json.
        vocab_size: V, at least the tokenizer's number of ids.
        name: the name in messages.
        bos: the token that begins a document.
        stops: tokens that end a text; the first ends a document.
        mask: the id of the mask in the original network, where the tokenizer has one.
        chat_template: a Jinja template of messages.
        variables: variables of the template, such as bos_token.
        adds_bos: whether an autoregressive network reads the token that begins a document before a prompt.
        ends_turns: whether the special token that the template writes after an answer ends a text, too.
    """

    kind = "tokenizer.json"

    def __init__(
        self,
        content: JSONMapping,
        vocab_size: int,
        name: str,
        *,
        bos: int | None = None,
        stops: Sequence[int] = (),
        mask: int | None = None,
        chat_template: str | None = None,
        variables: Mapping[str, str] | None = None,
        adds_bos: bool = True,
        ends_turns: bool = False,
    ) -> None:
        import tokenizers  # slow to import, and few need it

        self.content, self.vocab_size, self.name = dict(content), vocab_size, name
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_str(json.dumps(self.content))
        except Exception as error:  # noqa: BLE001 - the library raises a bare Exception
            raise ValueError(f"{BPE_FILE} of {name} cannot be read: {error}") from None
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._tokenizer.encode_special_tokens = True
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        used = set(ids.values())
        if used and (largest := max(used)) >= vocab_size:
            raise ValueError(
                f"the tokenizer {name} has ids up to {largest}, and the network has {vocab_size} tokens: it is another "
                "network's"
            )
        self.bos, self.mask_token, self.adds_bos = bos, mask, adds_bos
        self.chat_template, self.variables = chat_template, dict(variables or {})
        added = self._tokenizer.get_added_tokens_decoder()
        special = {token for token, one in added.items() if one.special}
        turn = special.intersection(self._after_answer) if ends_turns else ()
        self.stops = tuple(dict.fromkeys((*stops, *turn)))
        self.eos_id = self.stops[0] if self.stops else None
        self.silent = tuple(sorted(special - set(self.stops) | set(range(vocab_size)) - used))
        parts = json.dumps([self.content.get("pre_tokenizer"), self.content.get("normalizer")])
        self.words_begin_with_spaces = "ByteLevel" in parts or "Metaspace" in parts or "\u2581" in parts
        self.lossless = "ByteLevel" in parts and self.content.get("normalizer") is None

    @classmethod
    def from_folder(
        cls,
        folder: str | Path,
        vocab_size: int | None = None,
        stops: Sequence[int] = (),
        bos: int | None = None,
        content: JSONMapping | None = None,
    ) -> JSONTokenizer:
        """From tokenizer.json, with the special tokens of tokenizer_config.json and special_tokens_map.json.

        Args:
            folder: where the files are.
            vocab_size: V; by default the tokenizer's number of ids.
            stops: tokens that end a text, by the network's configuration.
            bos: the token that begins a document, by the network's configuration.
            content: that of tokenizer.json, if the folder has the tokenizer in another form.
        """
        import tokenizers

        folder = Path(folder)
        content = read_json(folder / BPE_FILE) if content is None else content
        config, special = (
            read_json(folder / file) if (folder / file).is_file() else {}
            for file in ("tokenizer_config.json", "special_tokens_map.json")
        )
        try:
            ids = tokenizers.Tokenizer.from_str(json.dumps(content)).get_vocab(with_added_tokens=True)
        except Exception as error:  # noqa: BLE001 - the library raises a bare Exception
            raise ValueError(f"{folder / BPE_FILE} cannot be read: {error}") from None
        variables: dict[str, str] = {}
        for name in ("bos_token", "eos_token", "pad_token", "unk_token", "mask_token"):
            value = config.get(name, special.get(name))
            value = value.get("content") if isinstance(value, Mapping) else value
            if isinstance(value, str):
                variables[name] = value
        own = ids.get(variables.get("eos_token", ""))
        ends: list[int] = [*([] if own is None else [own]), *stops]
        template = config.get("chat_template")
        if isinstance(template, list):  # several, by name
            named = {one["name"]: one["template"] for one in template}
            template = named.get("default")
        if template is None and (folder / "chat_template.jinja").is_file():
            template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
        return cls(
            content,
            1 + max(ids.values()) if vocab_size is None else vocab_size,
            folder.resolve().name,
            bos=ids.get(variables.get("bos_token", ""), bos),
            stops=ends,
            mask=ids.get(variables.get("mask_token", "")),
            chat_template=template,
            variables=variables,
            adds_bos=config.get("add_bos_token") is not False,
            ends_turns=True,
        )

    @property
    def bos_id(self) -> int | None:
        return self.eos_id if self.bos is None else self.bos

    @cached_property
    def widths(self) -> NDArray[np.float64]:
        texts = self._tokenizer.decode_batch([[token] for token in range(self.vocab_size)], skip_special_tokens=False)
        lengths = np.array([len(text.encode("utf-8", "surrogatepass")) for text in texts], dtype=np.float64)
        lengths[[*self.stops, *self.silent]] = 0
        return lengths.clip(1)

    @property
    def ends(self) -> tuple[int, ...]:
        return tuple(sorted(self.stops))

    @property
    def _contents(self) -> Iterable[bytes | None]:
        tokens = (self._tokenizer.id_to_token(token) for token in range(self.vocab_size))
        if "ByteLevel" in json.dumps(self.content.get("decoder")):
            added = {one.content for one in self._tokenizer.get_added_tokens_decoder().values()}
            return (None if one is None else one.encode() if one in added else _byte_level_bytes(one) for one in tokens)
        return map(self._after_another, tokens, range(self.vocab_size))

    def decode_after(self, ids: Ids) -> str:
        if "ByteLevel" in json.dumps(self.content.get("decoder")):
            return self.decode(ids)
        before = [self._plain_token]
        return self.decode([*before, *ids])[len(self.decode(before)) :]

    def _after_another(self, name: str | None, token: int) -> bytes | None:
        """The bytes that a token adds to a text. Byte tokens are recognized by their names."""
        if name is None or token in self.silent:
            return None
        if byte := re.fullmatch("<0x([0-9A-F]{2})>", name):
            return bytes.fromhex(byte[1])
        return _known_bytes(self.decode_after([token]))

    @cached_property
    def _plain_token(self) -> int:
        """A token that is a word of letters."""
        names = (self._tokenizer.id_to_token(token) or "" for token in range(self.vocab_size))
        return next(token for token, name in enumerate(names) if name.isascii() and name.isalpha())

    @property
    def _beginnings(self) -> Iterable[bytes | None] | None:
        if "ByteLevel" in json.dumps(self.content.get("decoder")):
            return None
        contents = enumerate(self._contents)
        alone = ((content, self.decode_run(np.array([token]))) for token, content in contents)
        return (content if content is None or text == "\N{REPLACEMENT CHARACTER}" else _known_bytes(text)
                for content, text in alone)  # fmt: skip

    def encode(self, text: str) -> NDArray[np.int64]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        for text in texts:
            _utf8(self.name, text)
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]

    def encode_chat(self, messages: Sequence[JSONMapping]) -> NDArray[np.int64]:
        """Token ids of messages, {"role": ..., "content": ...} each, by the chat template. They end with the beginning
        of the assistant's answer."""
        return np.array(self._with_special_tokens(self.chat_text(messages)), dtype=np.int64)

    def _with_special_tokens(self, text: str) -> list[int]:
        self._tokenizer.encode_special_tokens = False
        try:
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        finally:
            self._tokenizer.encode_special_tokens = True

    @property
    def _after_answer(self) -> list[int]:
        """The token that the template writes after an assistant's message. Networks end their answers with it, and
        configurations may not list it (LLaDA, Dream)."""
        answer = "\N{SNOWMAN}"
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]
        with suppress(ValueError):
            _, found, after = self.chat_text(messages).rpartition(answer)
            return self._with_special_tokens(after.strip())[:1] if found else []
        return []

    def chat_text(self, messages: Sequence[JSONMapping]) -> str:
        """The messages as text, by the chat template."""
        if self.chat_template is None:
            raise ValueError(f"the tokenizer {self.name} has no chat template; give the prompt as text")
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(message: str) -> None:
            raise jinja2.TemplateError(message)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        try:
            template = environment.from_string(self.chat_template)
            absent = {"tools": None, "documents": None}
            return template.render(messages=list(messages), add_generation_prompt=True, **absent, **self.variables)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template of {self.name} is invalid, line {error.lineno}: {error}") from None
        except Exception as error:  # noqa: BLE001 - the template's own operations raise anything
            raise ValueError(f"the chat template of {self.name} refuses these messages: {error}") from None

    def decode_run(self, ids: NDArray[np.int64]) -> str:
        return self._tokenizer.decode(ids.tolist(), skip_special_tokens=False)

    def _settings(self) -> JSONObject:
        """The constructor's arguments except for the content of tokenizer.json and the name."""
        return {
            "vocab_size": self.vocab_size,
            "bos": self.bos,
            "stops": list(self.stops),
            "mask": self.mask_token,
            "chat_template": self.chat_template,
            "variables": self.variables,
            "adds_bos": self.adds_bos,
        }

    def definition(self) -> JSONObject:
        return {"content": self.content, **self._settings()}

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json, tokenizer_config.json for other programs, and the settings."""
        atomic_write(Path(folder) / BPE_FILE, json.dumps(self.content, ensure_ascii=False).encode("utf-8"))
        template = {} if self.chat_template is None else {"chat_template": self.chat_template}
        kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
        adds = {} if self.adds_bos else {"add_bos_token": False}
        write_json(Path(folder) / "tokenizer_config.json", {**kind, **adds, **self.variables, **template}, indent=2)
        write_json(Path(folder) / HEADER_FILE, self._header() | {"settings": self._settings()})


# --- saving, loading, making --------------------------------------------------------------------------------


TOKENIZER_KINDS: dict[str, type[Tokenizer]] = {
    tokenizer.kind: tokenizer
    for tokenizer in (
        *(CharTokenizer, ByteTokenizer, GPT2Tokenizer, BPETokenizer, CharAsGPT2),
        *(BERTTokenizer, IdTokenizer, PaddedTokenizer, JSONTokenizer),
    )
}
"""Classes by the kind in cedd_tokenizer.json, looked up when a tokenizer is made or loaded; add your own."""


def tokenizer_from_definition(kind: str, definition: JSONMapping, name: str) -> Tokenizer:
    """The tokenizer of this kind and `definition`."""
    if kind not in TOKENIZER_KINDS:
        raise ValueError(f"unknown tokenizer kind {kind!r}; use one of {', '.join(TOKENIZER_KINDS)}")
    return TOKENIZER_KINDS[kind].from_definition(definition, name)


def _is_plain_bpe(content: JSONMapping) -> bool:
    """Whether a tokenizer.json is a plain byte-level BPE, like those trained here."""
    kinds = [(content.get(part) or {}).get("type") for part in ("model", "pre_tokenizer", "normalizer")]
    return kinds == ["BPE", "ByteLevel", None] and len(content.get("added_tokens") or ()) < 2


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer saved in a folder (a run's, or one with vocab.json and merges.txt, or a tokenizer.json)."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"folder not found: {folder} (to load a tokenizer)")
    with reading(folder):
        header = read_json(folder / HEADER_FILE) if (folder / HEADER_FILE).is_file() else None
        if header is None and (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
            return GPT2Tokenizer.from_folder(folder)
        if header is None and (folder / "vocab.txt").is_file():
            return BERTTokenizer.from_folder(folder)
        if header is None and not (folder / BPE_FILE).is_file():
            raise ValueError(f"{folder} has no tokenizer (no {HEADER_FILE}, {BPE_FILE} or vocab.json)")
        definition = (header or {}).get("definition")
        if header is not None and header.get("kind") == JSONTokenizer.kind:
            definition = {"content": read_json(folder / BPE_FILE), **header["settings"]}
        elif header is None and not _is_plain_bpe(read_json(folder / BPE_FILE)):
            return JSONTokenizer.from_folder(folder)
        elif definition is None:
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
    return GPT2Tokenizer.from_folder(_from_hub(GPT2_HUB_NAME, ("vocab.json", "merges.txt"), "gpt2-bpe"))


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
"""Tokenizers of published networks by name: the number of tokens, and a function that loads the tokenizer."""


def fitting_tokenizer(name: str, vocab_size: int, *, required: bool = True) -> Tokenizer:
    """A tokenizer for a network with `vocab_size` tokens, with [PAD] if the network has one token more.

    name: gpt2, bert, a folder with a tokenizer, or none, for which texts are token ids. If the number of tokens differs
        from the network's, the result is that of none, or an error if `required`.
    """
    size, load = FITTING.get(name, (None, lambda: load_tokenizer(expanded(name))))
    if name == "none" or (not required and size is not None and vocab_size not in (size, size + 1)):
        return IdTokenizer(vocab_size)
    if size is None and not expanded(name).is_dir():
        raise ValueError(f"unknown tokenizer {name!r}; use {', '.join(FITTING)}, none, or a folder with a tokenizer")
    tokenizer = load()
    if tokenizer.vocab_size not in (vocab_size, vocab_size - 1):
        raise ValueError(f"the tokenizer {name} has {tokenizer.vocab_size} tokens, and the network {vocab_size}")
    return tokenizer if tokenizer.vocab_size == vocab_size else PaddedTokenizer(tokenizer)


def make_tokenizer(
    spec: str | Path, texts: Iterable[str] | None = None, *, gpt2_files: str | Path | None = None
) -> Tokenizer:
    """A tokenizer by name: "char", "char:96", "byte", "gpt2", "gpt2-char", "bpe:8000", a kind that you added to
    `TOKENIZER_KINDS`, or the folder of a saved one.

    texts: the data, read once, for those that are made from it, such as "char" (its alphabet), "char:SIZE" (its most
        frequent characters, and one that stands for the others) and "bpe:SIZE" (trained on it).
    gpt2_files: folder with vocab.json and merges.txt (default: CEDD_DATA/gpt2-bpe, then the hub).
    """
    name = str(spec)
    if name in ("gpt2", "gpt2-char"):
        gpt2 = load_gpt2(gpt2_files)
        return gpt2 if name == "gpt2" else CharAsGPT2.from_gpt2(gpt2)
    kind, _, size = name.partition(":")
    if kind in TOKENIZER_KINDS:
        with suppress(NotImplementedError):
            return TOKENIZER_KINDS[kind].make(size, texts)
    if (folder := expanded(name)).is_dir():
        return load_tokenizer(folder)
    raise ValueError(f"unknown tokenizer {name!r}{suggestion(name, (*NAMES, 'a folder with a tokenizer'))}")
