"""Packing text into blocks of L tokens, once; the result is memory-mapped from then on.

A packed set is a folder of two files: `tokens.bin`, all tokens in order, little-endian; and `header.json`, with the
numbers of documents, tokens, blocks and remaining tokens, the inputs, and the SHA-256 of `tokens.bin` and of itself.
The folder's name is the hash of (content, tokenizer, L, packing policy), so that an equal request finds it. Neither
file depends on the number of worker processes.

A set that is damaged, or does not match its name, is packed again. Several processes may do so at the same time: a
complete set is never moved, and the first process to finish makes it for all.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import multiprocessing
import os
import warnings
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import floor
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from cedd.data.corpora import Corpus, LabelledCorpus, Piece
from cedd.data.folders import cache_root
from cedd.data.tokenizers import Tokenizer, UnknownCharacter, tokenizer_from_definition
from cedd.storage import (
    JSONObject,
    atomic_folder,
    canonical_json,
    file_sha256,
    json_sha256,
    locked,
    read_sealed,
    remove_folder,
    remove_leftovers,
    sealed,
    write_durably,
)

FORMAT = "cedd-packed-2"
TOKENS_FILE = "tokens.bin"
HEADER_FILE = "header.json"
_CHUNK_CHARACTERS = 1 << 20  # the unit of work, the same for any number of workers
_CHUNKS_PER_START = 16  # encoded in the time that a worker takes to start; a text of fewer chunks needs no workers
_VERIFY_BYTES = 2 << 30  # up to this size the checksum is verified at every opening, beyond it only the size

CorpusPart = Literal["all", "train", "validation"]
REMAINDER = {"remainder": "drop"}
"""What protocols say of the tokens after the last full block."""


@dataclass(frozen=True)
class PackingPolicy:
    """How documents become blocks: joined in order into one stream, which is cut every L tokens. The tokens after the
    last full block are counted and left out.

    Args:
        separator: "eos" puts the tokenizer's end token after each document; "text" puts `text` between documents;
            "auto" is "eos" if the tokenizer has such a token, otherwise "text".
        text: the separator of "text"; may be empty.
    """

    separator: Literal["auto", "eos", "text"] = "auto"
    text: str = "\n\n"

    def resolve(self, tokenizer: Tokenizer) -> PackingPolicy:
        """The same policy with "auto" decided."""
        if self.separator == "eos" and tokenizer.eos_id is None:
            raise ValueError(f"the tokenizer {tokenizer.name!r} has no end-of-document token: use separator='text'")
        if self.separator == "eos" or (self.separator == "auto" and tokenizer.eos_id is not None):
            return replace(self, separator="eos", text="")
        return replace(self, separator="text")

    @property
    def name(self) -> str:
        separators = {
            "eos": "end token after each document",
            "text": f"{self.text!r} between documents" if self.text else "nothing between documents",
            "auto": f"end token after each document, or else {self.text!r} between them",
        }
        return f"joined in order, {separators[self.separator]}, remainder dropped"

    @property
    def sha256(self) -> str:
        return json_sha256(asdict(self) | REMAINDER)


# --- the packed set -------------------------------------------------------------------------------------------


class PackedDataset:
    """Blocks [N, L] of token ids, memory-mapped.

    `blocks` is the memory map in its stored type; indexing returns int64 copies. Views from `split_tail` and `wrapped`
    share the map.

    Args:
        tokens: all tokens of the set.
        header: the contents of header.json.
        start: first block of this view.
        stop: end of this view; by default all blocks.
        ends: tokens put before and after each block when it is read; neither `blocks` nor `length` includes them.
    """

    def __init__(
        self,
        tokens: NDArray[np.integer],
        header: JSONObject,
        start: int = 0,
        stop: int | None = None,
        ends: tuple[int, int] | None = None,
    ) -> None:
        self.header, self.ends = header, ends
        self.length: int = header["length"]
        self._tokens, self._start, self._stop = tokens, start, header["blocks"] if stop is None else stop
        part = tokens[self._start * self.length : self._stop * self.length]
        self.blocks: NDArray[np.integer] = part.reshape(-1, self.length)

    @property
    def vocab_size(self) -> int:
        return self.header["vocab_size"]

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def labels(self) -> list[str]:
        """The labels of the corpus; none if it has none."""
        return self.header.get("labels", [])

    def labels_of(self, starts: NDArray[np.integer]) -> NDArray[np.int64]:
        """The labels of the blocks [B] that begin at these tokens, as indices into `labels`; -1 for a block with text
        of more than one."""
        begins, offset, size = self.header["label_starts"], self._start * self.length, self.blocks.size
        first, last = (
            np.searchsorted(begins, offset + places % size, side="right") - 1
            for places in (starts, starts + self.length - 1)
        )
        return np.where(first == last, first, -1).astype(np.int64)

    def token_counts(self) -> NDArray[np.int64]:
        """Counts of each token [V] in the full packed stream, including the remainder."""
        counts = np.zeros(self.vocab_size, np.int64)
        for start in range(0, len(self._tokens), 1 << 20):
            counts += np.bincount(self._tokens[start : start + (1 << 20)], minlength=self.vocab_size)
        return counts

    @overload
    def __getitem__(self, index: int) -> NDArray[np.int64]: ...
    @overload
    def __getitem__(self, index: slice | NDArray[np.integer]) -> NDArray[np.int64]: ...
    def __getitem__(self, index: int | slice | NDArray[np.integer]) -> NDArray[np.int64]:
        return self._between_ends(np.asarray(self.blocks[index]).astype(np.int64))

    def _between_ends(self, text: NDArray[np.int64]) -> NDArray[np.int64]:
        """Blocks [..., L] as they are read, [..., L + 2] with ends."""
        if self.ends is None:
            return text
        return np.pad(text, [(0, 0)] * (text.ndim - 1) + [(1, 1)], constant_values=(self.ends,))

    def wrapped(self, first: int, last: int) -> PackedDataset:
        """The same blocks between two tokens."""
        return PackedDataset(self._tokens, self.header, self._start, self._stop, (first, last))

    def evenly_spaced(self, most: int | None) -> NDArray[np.int64]:
        """At most `most` blocks [N, L] (None: all), evenly spaced over the set and in order.

        A set is often several texts one after another, of which the first blocks are only the first text.
        """
        return self[evenly_spaced(len(self), most)]

    def evenly_spaced_labels(self, most: int | None) -> NDArray[np.int64] | None:
        """The labels [N] of these blocks; None if the set has none."""
        return self.labels_of(evenly_spaced(len(self), most) * self.length) if self.labels else None

    def from_starts(self, starts: NDArray[np.integer]) -> NDArray[np.int64]:
        """Blocks [B, L] of L tokens beginning at these tokens [B]; the last block is followed by the first."""
        if not (starts % self.length).any():  # a third of the time
            return self[starts // self.length]
        tokens = self.blocks.reshape(-1)
        return self._between_ends(tokens[(starts[:, None] + np.arange(self.length)) % len(tokens)].astype(np.int64))

    def split_tail(self, holdout: float) -> tuple[PackedDataset, PackedDataset]:
        """(train, validation): the last blocks, a share of `holdout` but at least one, are held out."""
        _check_holdout(holdout)
        if len(self) < 2:
            raise ValueError(
                f"the data has only {len(self)} block of {self.length} tokens, too few to hold some out: "
                "give more text, a smaller --length, or a validation file of its own"
            )
        middle = self._stop - min(max(1, round(holdout * len(self))), len(self) - 1)
        return (
            PackedDataset(self._tokens, self.header, self._start, middle, self.ends),
            PackedDataset(self._tokens, self.header, middle, self._stop, self.ends),
        )

    def report(self) -> JSONObject:
        """Counts, and the hashes of text, tokenizer and policy.

        Counts are of the full packed stream; only `blocks` is of this view.
        """
        header, policy = self.header, PackingPolicy(**self.header["policy"])
        counts = ("documents", "characters", "utf8_bytes", "words", "tokens", "length", "blocks", "remainder_tokens")
        hashes = ("tokenizer", "policy_sha256", "content_sha256", "tokenizer_fingerprint", "tokens_sha256")
        report = (
            {name: header[name] for name in counts}
            | REMAINDER
            | {"packing": policy.name}
            | {name: header[name] for name in hashes}
        )
        return report | {"blocks": len(self)}


def ends_of_blocks(tokenizer: Tokenizer, length: int) -> tuple[int, int]:
    """The tokens around blocks of `length` tokens: those that begin and end a document."""
    first, last = tokenizer.bos_id, tokenizer.eos_id
    if first is None or last is None or length < 3:
        raise ValueError(
            f"blocks of {length} tokens of the tokenizer {tokenizer.name!r} cannot be wrapped: that takes a token "
            "that ends documents, and room for it at both ends"
        )
    return first, last


def evenly_spaced(count: int, most: int | None) -> NDArray[np.int64]:
    """At most `most` of 0..count-1 (None: all), evenly spaced."""
    chosen = count if most is None else min(most, count)
    return np.arange(chosen) * count // max(1, chosen)


def _check_holdout(holdout: float) -> None:
    if not 0.0 < holdout < 1.0:
        raise ValueError(f"text.holdout must be between 0 and 1 (got {holdout})")


def open_packed(folder: str | Path, verify: bool | None = None) -> PackedDataset:
    """Open a packed set; a ValueError if it is damaged. `verify`: whether to verify the checksum of the tokens
    (default: up to 2 GiB)."""
    folder = Path(folder)
    file = folder / TOKENS_FILE
    try:
        header = read_sealed(folder / HEADER_FILE)
        _check_header(header)
        dtype = np.dtype(header["dtype"])
        size, expected = file.stat().st_size, header["tokens"] * dtype.itemsize
        if size != expected:
            raise ValueError(f"{TOKENS_FILE} has {size} bytes, not {expected}")
        if (verify or (verify is None and size <= _VERIFY_BYTES)) and file_sha256(file) != header["tokens_sha256"]:
            raise ValueError(f"{TOKENS_FILE} does not match its checksum")
        return PackedDataset(np.memmap(file, dtype=dtype, mode="r"), header)
    except FileNotFoundError:
        raise ValueError(f"the packed set {folder} is damaged: {TOKENS_FILE} is missing") from None
    except (KeyError, TypeError):
        raise ValueError(f"the packed set {folder} is damaged: {HEADER_FILE} is incomplete") from None
    except ValueError as error:
        raise ValueError(f"the packed set {folder} is damaged: {error}") from None


def _check_header(header: JSONObject) -> None:
    """Refuse another format, and inconsistent counts."""
    if header.get("format") != FORMAT:
        raise ValueError(f"its format is {header.get('format')!r}, not {FORMAT!r}")
    length, blocks, remainder, tokens = (header[name] for name in ("length", "blocks", "remainder_tokens", "tokens"))
    if length < 1 or (blocks, remainder) != divmod(tokens, length):
        raise ValueError(f"{tokens} tokens are not {blocks} blocks of {length} and {remainder} more")


# --- encoding, in order ---------------------------------------------------------------------------------------


class _Encoded(NamedTuple):
    """A chunk of pieces as tokens; the ids of piece i end at ends[i]."""

    ids: NDArray[np.integer]
    ends: NDArray[np.int64]
    counts: dict[str, int]


def _encode_chunk(tokenizer: Tokenizer, dtype: str, texts: list[str]) -> _Encoded:
    pieces = tokenizer.encode_batch(texts)
    counts = {
        "characters": sum(map(len, texts)),
        "utf8_bytes": sum(len(text.encode("utf-8", "surrogatepass")) for text in texts),
        "words": sum(len(text.split()) for text in texts),
    }
    return _Encoded(np.concatenate(pieces).astype(dtype), np.cumsum([len(ids) for ids in pieces]), counts)


_worker_tokenizer: Tokenizer | None = None


def _start_worker(kind: str, definition: JSONObject, name: str) -> None:
    global _worker_tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism here
    _worker_tokenizer = tokenizer_from_definition(kind, definition, name)


def _encode_in_worker(dtype: str, texts: list[str]) -> _Encoded:
    assert _worker_tokenizer is not None
    return _encode_chunk(_worker_tokenizer, dtype, texts)


def _chunks(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Pieces grouped into chunks of about a million characters."""
    chunk: list[Piece] = []
    size = 0
    for piece in pieces:
        chunk.append(piece)
        size += len(piece.text) + 1
        if size >= _CHUNK_CHARACTERS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _encode_in_order(
    pieces: Iterator[Piece], tokenizer: Tokenizer, dtype: str, workers: int
) -> Iterator[tuple[list[Piece], _Encoded]]:
    """The pieces of each chunk, in order, and their tokens. A bounded number of chunks is in flight."""
    chunks = _chunks(pieces)
    begin = list(itertools.islice(chunks, 0 if workers == 1 else _CHUNKS_PER_START))
    chunks = itertools.chain(begin, chunks)
    if len(begin) < _CHUNKS_PER_START:
        for chunk in chunks:
            yield chunk, _encode_chunk(tokenizer, dtype, [p.text for p in chunk])
        return
    start = (tokenizer.kind, tokenizer.definition(), tokenizer.name)
    # "spawn": forking a process that already has threads (torch, the tokenizers library) can hang.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=start) as pool:
        waiting: deque[tuple[list[Piece], Future[_Encoded]]] = deque()
        try:
            for chunk in chunks:
                job = pool.submit(_encode_in_worker, dtype, [p.text for p in chunk])
                waiting.append((chunk, job))
                if len(waiting) > 2 * workers:
                    first, job = waiting.popleft()
                    yield first, job.result()
            for chunk, job in waiting:
                yield chunk, job.result()
        except BrokenProcessPool:
            why = (
                f"one of {workers} processes that encode text was ended, perhaps for want of memory; take fewer workers"
            )
            raise OSError(errno.ENOMEM, why) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def select_documents(corpus: Corpus, part: CorpusPart, holdout: float) -> Iterator[Piece]:
    """Document i is held out if floor((i+1) h) > floor(i h): evenly spaced, the exact share, not random."""
    if part != "all":
        _check_holdout(holdout)
    index, none = 0, True
    for piece in corpus.pieces():
        if part == "all" or (floor((index + 1) * holdout) > floor(index * holdout)) == (part == "validation"):
            yield piece
            none = False
        index += piece.ends_document
    if part == "validation" and index and none:
        raise ValueError(
            f"a share of {holdout:g} of the {index} document{'s' * (index > 1)} of {corpus.name} leaves none for "
            "validation: hold out a larger share, or give more documents"
        )


# --- packing --------------------------------------------------------------------------------------------------


class _TokenWriter:
    """Joins encoded chunks into one stream on disk, counting and hashing."""

    def __init__(self, file: BinaryIO, tokenizer: Tokenizer, policy: PackingPolicy, dtype: str) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self._tokenizer, self._policy, self._dtype = tokenizer, policy, dtype
        self._document_open = False
        self.label_starts: list[int] = []
        """The first token of each label so far."""
        self.counts: dict[str, int] = dict.fromkeys(("documents", "characters", "utf8_bytes", "words", "tokens"), 0)

    @cached_property
    def _separator(self) -> NDArray[np.integer]:
        """Encoded when the second document begins, since a corpus of one document needs no separator."""
        try:
            return self._tokenizer.encode(self._policy.text).astype(self._dtype)
        except ValueError as error:
            raise ValueError(f"the separator {self._policy.text!r} cannot be encoded: {error}") from None

    def add(self, pieces: list[Piece], encoded: _Encoded) -> None:
        parts: list[NDArray[np.integer]] = []
        start = 0
        with_end_token = self._policy.separator == "eos"
        end_token = np.array([self._tokenizer.eos_id if with_end_token else 0], dtype=self._dtype)
        for end, (_, ends, label) in zip(encoded.ends.tolist(), pieces, strict=True):
            if not self._document_open and not with_end_token and self.counts["documents"]:
                parts.append(self._separator)
            while len(self.label_starts) <= label:
                self.label_starts.append(self.counts["tokens"] + sum(map(len, parts)))
            parts.append(encoded.ids[start:end])
            if ends and with_end_token:
                parts.append(end_token)
            start = end
            self._document_open = not ends
            self.counts["documents"] += ends
        tokens = np.concatenate(parts)
        content = tokens.tobytes()
        self._file.write(content)
        self._digest.update(content)
        self.counts["tokens"] += len(tokens)
        for name, count in encoded.counts.items():
            self.counts[name] += count

    def finish(self) -> str:
        """Flush to disk; the SHA-256 of what was written."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._digest.hexdigest()


def _write_tokens(
    path: Path, pieces: Iterator[Piece], tokenizer: Tokenizer, policy: PackingPolicy, workers: int
) -> JSONObject:
    """Write all tokens of the pieces to one file; the part of the header about them."""
    dtype = "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4"
    with path.open("wb") as file:
        writer = _TokenWriter(file, tokenizer, policy, dtype)
        for chunk, encoded in _encode_in_order(pieces, tokenizer, dtype, workers):
            writer.add(chunk, encoded)
        made = {**writer.counts, "dtype": dtype, "tokens_sha256": writer.finish()}
        return made | {"label_starts": writer.label_starts}


def _find(folder: Path, identity: JSONObject) -> PackedDataset | None:
    """The set in a folder of the cache, if it is complete and has this identity; any other there is removed."""
    if not folder.parent.is_dir():
        return None
    remove_leftovers(folder.parent)
    if not folder.exists():
        return None
    with suppress(ValueError):
        return _open_as(folder, identity)
    with locked(folder.parent):  # and looked at again: another process may have put it right meanwhile
        if folder.exists():
            try:
                return _open_as(folder, identity)
            except ValueError as error:
                warnings.warn(f"{error}; packing again", stacklevel=3)
                remove_folder(folder)
    return None


def _open_as(folder: Path, identity: JSONObject) -> PackedDataset:
    """The packed set, checked to have this identity."""
    packed = open_packed(folder)
    if other := [name for name in identity if packed.header.get(name) != identity[name]]:
        raise ValueError(f"the packed set {folder} is of another request: {other[0]} differs")
    return packed


def pack(
    corpus: Corpus,
    tokenizer: Tokenizer,
    length: int,
    *,
    policy: PackingPolicy | None = None,
    part: CorpusPart = "all",
    holdout: float = 0.05,
    cache: str | Path | None = None,
    workers: int = 1,
) -> PackedDataset:
    """The corpus as blocks of `length` tokens, from the cache if it has been packed before.

    Args:
        corpus: the text.
        tokenizer: its tokenizer.
        length: tokens per block.
        policy: how documents are joined and cut.
        part: "train" or "validation" packs only documents that are not, or are, held out.
        holdout: the share of documents held out.
        cache: folder of packed sets (default: CEDD_CACHE or ~/.cache/cedd).
        workers: processes for tokenization; the result does not depend on it. (With one, BPE still uses all cores.)
    """
    if length < 1:
        raise ValueError(f"a block has at least one token, not {length}")
    if workers < 1:
        raise ValueError(f"workers must be at least 1 (got {workers})")
    policy = (policy or PackingPolicy()).resolve(tokenizer)
    identity: JSONObject = {
        "content_sha256": corpus.content_sha256(),
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "length": length,
        "policy": asdict(policy),
        "part": part,
    }
    if part != "all":
        _check_holdout(holdout)
        identity["holdout"] = holdout
    if isinstance(corpus, LabelledCorpus):
        identity["labels"] = list(corpus.labels)
    folder = cache_root(cache) / "packed" / json_sha256([FORMAT, identity])[:32]
    if (found := _find(folder, identity)) is not None:
        return found
    pieces = select_documents(corpus, part, holdout)
    source = corpus.name if part == "all" else f"the {part} part of {corpus.name}"
    with suppress(FileExistsError), atomic_folder(folder) as temporary:
        try:
            written = _write_tokens(temporary / TOKENS_FILE, pieces, tokenizer, policy, workers)
        except UnknownCharacter as error:
            raise UnknownCharacter(f"{source}: {error}") from None
        if "labels" not in identity:
            del written["label_starts"]
        if not corpus.is_still(identity["content_sha256"]):  # or others would be found by the name of what was there
            raise ValueError(
                f"{source} was changed by another program while it was read; try again when it is complete"
            )
        blocks, remainder = divmod(tokens := written["tokens"], length)
        if blocks == 0:
            raise ValueError(
                f"{source} has {tokens} tokens, fewer than one block of {length}: give more text or a smaller --length"
            )
        made = {"format": FORMAT, "blocks": blocks, "remainder_tokens": remainder, "policy_sha256": policy.sha256}
        made |= {"tokenizer": tokenizer.name, "vocab_size": tokenizer.vocab_size}
        write_durably(temporary / HEADER_FILE, canonical_json(sealed(identity | written | made)) + b"\n")
    return open_packed(folder)
