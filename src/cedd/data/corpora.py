"""Sources of text: files, folders, jsonl, compressed or not, hub datasets, and Python's own manual.

A corpus is a stream of pieces of at most about 65,000 characters. They are cut where no tokenizer of this package joins
two characters, so that pieces can be encoded one by one, or in parallel, to the same tokens as the whole. Text is
UTF-8; a byte-order mark is dropped, CRLF becomes LF, and lone surrogates, which JSON can contain but UTF-8 cannot,
become U+FFFD.
"""

from __future__ import annotations

import ast
import gzip
import io
import json
import lzma
import re
import sys
import sysconfig
import unicodedata
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import IO, Any, NamedTuple, TextIO, cast

from cedd.names import hub_failure, nearest_path
from cedd.storage import expanded, file_sha256, json_sha256

PIECE_CHARACTERS = 1 << 16
READER = "utf-8, no byte-order mark, LF"  # part of every content hash: another reader would read another text
PYTHON_MANUAL = "python-manual"
_HEAD_BYTES = 1 << 16
_COMPRESSIONS: dict[str, Any] = {".xz": lzma.open, ".gz": gzip.open}
UNREADABLE = (OSError, EOFError, lzma.LZMAError, zlib.error)
"""Exceptions of damaged or unreadable files."""
_HALF_PAIR = re.compile("[\ud800-\udfff]")
_FOLDER_ENDINGS = tuple(ending + packed for ending in (".txt", ".jsonl") for packed in ("", *_COMPRESSIONS))


class Piece(NamedTuple):
    """Part of a document, and whether the document ends with it."""

    text: str
    ends_document: bool
    label: int = 0
    """Of a labelled corpus, an index into its labels."""


class Corpus(ABC):
    """Documents in a fixed order, which can be read any number of times."""

    name: str

    @abstractmethod
    def content_sha256(self) -> str:
        """A hash that changes whenever the text does, and does not depend on the text's location."""

    def is_still(self, content_sha256: str) -> bool:
        """Whether the text still has this hash, after it was read."""
        return self.content_sha256() == content_sha256

    @abstractmethod
    def pieces(self) -> Iterator[Piece]:
        """The text in order; each document ends with a piece that says so."""

    def texts(self) -> Iterator[str]:
        """The text of the pieces, to make a tokenizer from."""
        return (piece.text for piece in self.pieces())

    def documents(self) -> Iterator[str]:
        parts: list[str] = []
        for piece in self.pieces():
            parts.append(piece.text)
            if piece.ends_document:
                yield "".join(parts)
                parts = []


# --- cutting ------------------------------------------------------------------------------------------------


def _cut_before(text: str, end: int) -> int:
    """The last position <= end at which text may be cut: before a space or newline that follows visible text; 0 if
    there is none.

    Byte-level BPE never joins these two, and the whole run of white space stays on the right.
    """
    while True:
        end = max(text.rfind(" ", 0, end + 1), text.rfind("\n", 0, end + 1))
        if end <= 0:
            return 0
        start = len(text[:end].rstrip())  # of the run of white space, at once: it may be as long as the text
        if start and text[start] in " \n":
            return start
        end = start - 1


def cut_document(text: str, size: int = PIECE_CHARACTERS) -> Iterator[Piece]:
    """A document as pieces of about `size` characters."""
    start = 0
    while len(text) - start > size:
        window = text[start : start + size + 1]
        cut = _cut_before(window, size) or size  # so long a text without a blank is cut anywhere
        yield Piece(window[:cut], False)
        start += cut
    yield Piece(text[start:], True)


def stream_documents(stream: TextIO, document_break: str | None, size: int = PIECE_CHARACTERS) -> Iterator[Piece]:
    """A text stream as pieces, with about one piece in memory.

    `document_break` is the string between documents, which is dropped; None if the whole stream is one document.
    Documents that contain only white space are skipped.
    """
    buffer, inside = "", False  # inside: a part of the current document has been given out
    while True:
        read = stream.read(size)
        buffer += read
        if document_break:
            *complete, buffer = buffer.split(document_break)
            for document in complete:
                if inside or document.strip():
                    yield from cut_document(document, size)
                inside = False
        if not read:
            break
        # A break may lie across the end of what has been read, so its length is kept back.
        end = len(buffer) - len(document_break or "")
        cut = _cut_before(buffer, end) if len(buffer) > size else 0
        if cut == 0 and end > 4 * size:
            cut = end
        if cut and (inside or buffer[:cut].strip()):
            yield Piece(buffer[:cut], False)
            buffer, inside = buffer[cut:], True
    if inside or buffer.strip():
        yield from cut_document(buffer, size)


# --- files --------------------------------------------------------------------------------------------------


def _open_bytes(path: Path) -> IO[bytes]:
    return cast(IO[bytes], _COMPRESSIONS.get(path.suffix, open)(path, "rb"))


def _is_jsonl(path: Path) -> bool:
    inner = path.with_suffix("") if path.suffix in _COMPRESSIONS else path
    return inner.suffix in (".jsonl", ".ndjson")


def _check_file(path: Path) -> None:
    """Refuse an empty, binary or damaged file before work is done on it, and a pipe, which can be read only once."""
    if not path.is_file():
        raise ValueError(f"{path} is not a regular file, and the data is read more than once; save it to a file first")
    try:
        with _open_bytes(path) as file:
            head = file.read(_HEAD_BYTES)
    except UNREADABLE as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not head:
        raise ValueError(f"{path} is empty: use a file with text in it")
    if b"\0" in head:
        raise ValueError(f"{path} is a binary file (it contains null bytes): use UTF-8 text, .jsonl, .xz or .gz")
    try:
        head.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start < len(head) - 4:  # nearer the end, the character may be cut off by the read
            byte = head[error.start]
            raise ValueError(
                f"{path} is not UTF-8 text (byte 0x{byte:02x} at offset {error.start}): convert it to UTF-8 first"
            ) from None


def _jsonl_rows(path: Path, stream: TextIO, field: str, label_field: str | None = None) -> Iterator[tuple[str, str]]:
    """The label, if there is a field for it, and the text of each row that has any."""
    for number, line in enumerate(stream, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line {number} is not JSON: {error}") from None
        text = row.get(field) if isinstance(row, dict) else None
        if not isinstance(text, str):
            kinds = {name: type(value).__name__ for name, value in row.items()} if isinstance(row, dict) else {}
            named = (repr(name) if kind == "str" else f"{name!r} of type {kind}" for name, kind in kinds.items())
            found = f"it has {', '.join(named)}" if kinds else f"it is of type {type(row).__name__}"
            raise ValueError(f"{path}, line {number} has no text field {field!r} ({found})")
        label = "" if label_field is None else row.get(label_field)
        if isinstance(label, bool) or not isinstance(label, str | int):
            found = f"{label_field!r} is {json.dumps(label)[:40]}" if label_field in row else f"it has {', '.join(row)}"
            raise ValueError(f"{path}, line {number} has no label {label_field!r}, a string or an integer ({found})")
        if text:
            yield str(label), whole_characters(text)


def whole_characters(text: str) -> str:
    """Replace lone surrogates, which JSON can contain and UTF-8 cannot, by U+FFFD."""
    return _HALF_PAIR.sub("\N{REPLACEMENT CHARACTER}", text)


class FileCorpus(Corpus):
    """One or more files. A text file is one document (or several, split at `document_break`), a jsonl row is one."""

    def __init__(
        self, paths: Iterable[Path], *, name: str = "", field: str = "text", document_break: str | None = None
    ) -> None:
        self.paths = tuple(paths)
        self.field = field
        self.document_break = document_break
        self.name = name or ", ".join(str(path) for path in self.paths)
        for path in self.paths:
            _check_file(path)

    def content_sha256(self) -> str:
        files = [
            [("jsonl", self.field) if _is_jsonl(p) else "text", p.suffix in _COMPRESSIONS, file_sha256(p)]
            for p in self.paths
        ]
        return json_sha256({"reader": READER, "files": files, "document_break": self.document_break})

    def pieces(self) -> Iterator[Piece]:
        for path in self.paths:
            with _text_of(path) as stream:
                if _is_jsonl(path):
                    for _, text in _jsonl_rows(path, stream, self.field):
                        yield from cut_document(text)
                else:
                    yield from stream_documents(stream, self.document_break)


@contextmanager
def _text_of(path: Path) -> Iterator[TextIO]:
    """The text of a file; one that is damaged is refused while it is read."""
    try:
        with io.TextIOWrapper(_open_bytes(path), encoding="utf-8-sig", newline=None) as stream:
            yield stream
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise ValueError(f"{path} is not UTF-8 text (byte 0x{byte:02x}): convert it to UTF-8 first") from None
    except UNREADABLE as error:
        raise ValueError(f"{path} is damaged: {error}") from None


class LabelledCorpus(Corpus):
    """The rows of .jsonl files label by label, in the order of `labels`, so that blocks of text have one label each.

    Args:
        corpus: the files.
        field: the field of the labels.
        labels: the labels in their order; by default those of the files, sorted.
    """

    def __init__(self, corpus: Corpus, field: str, labels: Sequence[str] | None = None) -> None:
        if not isinstance(corpus, FileCorpus) or not all(map(_is_jsonl, corpus.paths)):
            raise ValueError(f"labels are a field of the rows of .jsonl files; {corpus.name} is not one")
        self._corpus, self._field, self.name = corpus, field, corpus.name
        found = sorted({label for label, _ in self._rows()})
        if labels is None and len(found) < 2:
            raise ValueError(f"{self.name} must have at least two labels {field!r} (got {', '.join(found) or 'none'})")
        if unknown := set(found) - set(labels or found):
            raise ValueError(f"{self.name} has labels that the training data does not have: {', '.join(unknown)}")
        self.labels = tuple(labels or found)

    def content_sha256(self) -> str:
        return json_sha256([self._corpus.content_sha256(), self._field, self.labels])

    def _rows(self) -> Iterator[tuple[str, str]]:
        for path in self._corpus.paths:
            with _text_of(path) as stream:
                yield from _jsonl_rows(path, stream, self._corpus.field, self._field)

    def pieces(self) -> Iterator[Piece]:
        by_label: dict[str, list[str]] = {label: [] for label in self.labels}
        for label, text in self._rows():
            by_label[label].append(text)
        for number, label in enumerate(self.labels):
            for text in by_label[label]:
                for piece in cut_document(text):
                    yield piece._replace(label=number)


def _missing_path(path: Path) -> ValueError:
    kinds = f"give a text file, a folder of them, a .jsonl, hf:NAME, or {PYTHON_MANUAL}"
    near = nearest_path(path)
    return ValueError(f"file not found: {path}; {kinds if near is None else f'did you mean {near}?'}")


def _folder_files(folder: Path) -> list[Path]:
    found = [p for p in folder.rglob("*") if p.is_file() and p.name.endswith(_FOLDER_ENDINGS)]
    if not found:
        raise ValueError(f"the folder {folder} contains no .txt or .jsonl files (which may be compressed: .xz, .gz)")
    return sorted(found, key=lambda p: p.relative_to(folder).as_posix())


# --- the hub ------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class HubCorpus(Corpus):
    """A Hugging Face dataset, streamed: `hf:NAME[:config][:split]`, with one document per row."""

    dataset: str
    config: str | None = None
    split: str = "train"
    _: KW_ONLY
    field: str = "text"
    revision: str | None = None

    def __post_init__(self) -> None:
        self.name = f"hf:{self.dataset}:{self.config or ''}:{self.split}"
        self._library()

    @staticmethod
    def _library() -> Any:
        try:
            import datasets  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise ValueError(
                "data sets of the hub need pip install 'cedd[hub]'; evaluation sets are also read from CEDD_DATA"
            ) from None
        return datasets

    @cached_property
    def commit(self) -> str | None:
        """The hub's commit of the revision, fetched once, so that the tokenizer and the packed blocks are made from the
        same text even if the branch moves."""
        from huggingface_hub import HfApi

        try:
            return HfApi().dataset_info(self.dataset, revision=self.revision).sha
        except Exception as error:  # noqa: BLE001 - no network, no such name: each is another exception
            raise ValueError(f"could not download {self.name}: {hub_failure(error)}") from None

    def content_sha256(self) -> str:
        """A hash of the hub's commit, which identifies the content without reading it."""
        return json_sha256({"hub": [self.dataset, self.config, self.split, self.field, self.commit]})

    def is_still(self, content_sha256: str) -> bool:
        """True: the commit is fixed, and the hub may be unreachable hours later."""
        return True

    def rows(self) -> Iterator[str]:
        commit = self.commit
        try:
            stream = self._library().load_dataset(
                self.dataset, self.config, split=self.split, streaming=True, revision=commit
            )
        except Exception as error:  # noqa: BLE001 - as above
            raise ValueError(f"{self.name} could not be opened ({type(error).__name__}): {error}") from None
        for row in self._received(stream):
            if not isinstance(row.get(self.field), str):
                raise ValueError(f"{self.name} has no text field {self.field!r} (it has {', '.join(map(repr, row))})")
            yield row[self.field]

    def _received(self, stream: Iterable[Any]) -> Iterator[Any]:
        """The rows received from the hub; an error if the network fails."""
        try:
            yield from stream
        except Exception as error:  # noqa: BLE001 - as above
            raise ValueError(f"{self.name} could not be read further ({type(error).__name__}): {error}") from None

    def pieces(self) -> Iterator[Piece]:
        for text in self.rows():
            if text:
                yield from cut_document(text)


def _hub_corpus(spec: str, field: str) -> HubCorpus:
    dataset, *rest = spec.removeprefix("hf:").split(":")
    if not dataset or len(rest) > 2:
        raise ValueError(f"{spec!r} is not a hub dataset: write hf:NAME, hf:NAME:config or hf:NAME:config:split")
    config, split, *_ = *rest, "", ""
    return HubCorpus(dataset, config or None, split or "train", field=field)


# --- text in memory, and text that every machine has ----------------------------------------------------------


class TextCorpus(Corpus):
    """Documents in memory."""

    def __init__(self, documents: Iterable[str], name: str = "text") -> None:
        self._documents = tuple(documents)
        self.name = name
        if not any(document.strip() for document in self._documents):
            raise ValueError(f"{name} is empty: give some text")

    def content_sha256(self) -> str:
        return json_sha256({"documents": self._documents})

    def pieces(self) -> Iterator[Piece]:
        for document in self._documents:
            yield from cut_document(document)


# The few typographic characters of the manual, as typewriters write them.
_TYPEWRITER = str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'", "´": "'", "–": "-", "—": "--", "…": "..."})


def _plain_ascii(text: str) -> str:
    """Printable ASCII and newlines only, so that a character model of the manual has a small alphabet."""
    return re.sub(r"[^\n -~]", "", unicodedata.normalize("NFKD", text.translate(_TYPEWRITER).expandtabs()))


def _docstrings(source: Path) -> str:
    """All docstrings of a module in source order; the module is parsed, not imported."""
    with_docstrings = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    statements: list[ast.AST] = [ast.parse(source.read_text(encoding="utf-8"))]
    for statement in statements:  # of expressions none has a docstring, and they are most of a module
        for name in ("body", "handlers", "orelse", "finalbody", "cases"):
            statements += getattr(statement, name, ())
    nodes = [node for node in statements if isinstance(node, with_docstrings)]
    nodes.sort(key=lambda node: getattr(node, "lineno", 0))
    return "\n\n".join(filter(None, (ast.get_docstring(node) for node in nodes)))


@lru_cache(maxsize=1)
def python_manual_documents() -> tuple[str, ...]:
    """The topics of Python's manual, then the docstrings of each public module of the standard library.

    The same on every machine with the same Python release; about 1.2 million characters.
    """
    from pydoc_data import topics

    documents = [topics.topics[topic] for topic in sorted(topics.topics)]
    library = Path(sysconfig.get_path("stdlib"))
    for module in sorted(sys.stdlib_module_names):
        sources = (library / f"{module}.py", library / module / "__init__.py")
        source = next((path for path in sources if path.is_file()), None)
        if source is not None and not module.startswith("_"):
            documents.append(_docstrings(source))
    plain = (_plain_ascii(document).strip() for document in documents)
    return tuple(document + "\n" for document in plain if document)


def open_corpus(spec: str | Path | Corpus, *, field: str = "text", document_break: str | None = None) -> Corpus:
    """The corpus of a user's specification: a file, a folder, a .jsonl (its `field`), .xz/.gz of those,
    hf:NAME[:config][:split], or "python-manual". `document_break` splits text files into documents (such as
    "\\n\\n\\n")."""
    if isinstance(spec, Corpus):
        return spec
    name = str(spec)
    if document_break == "":
        raise ValueError("an empty document break cuts nowhere: leave it out")
    if name.startswith("hf:"):
        return _hub_corpus(name, field)
    path = expanded(name)
    if name == PYTHON_MANUAL and not path.exists():
        return TextCorpus(python_manual_documents(), PYTHON_MANUAL)
    if not name.strip():
        raise ValueError(
            f"data must not be empty; give a text file, a folder of them, a .jsonl, hf:NAME, or {PYTHON_MANUAL}"
        )
    if not path.exists():
        raise _missing_path(path)
    paths = _folder_files(path) if path.is_dir() else [path]
    return FileCorpus(paths, name=name, field=field, document_break=document_break)
