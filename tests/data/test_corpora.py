import gzip
import io
import json
import lzma
import sys
import time
import types
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cedd.data.corpora import PIECE_CHARACTERS, HubCorpus, TextCorpus, cut_document, open_corpus, stream_documents
from cedd.data.tokenizers import BPETokenizer

BPE = BPETokenizer.train(["the cat's hat, the dog's bone:  12 and 345!\n\n  the end\n" * 9], 300)

spaced_text = st.text(alphabet="ab'st 1\n\t.,\u00a0é\r", max_size=200)


@settings(max_examples=200)
@given(spaced_text, st.integers(1, 30))
def test_pieces_encode_like_whole_text(text: str, size: int) -> None:
    pieces = list(cut_document(text, size))
    assert "".join(piece.text for piece in pieces) == text
    assert [piece.ends_document for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    # Where a cut falls before a blank that follows visible text, BPE gives the same tokens.
    clean = all(p.text[:1] in (" ", "\n") and not q.text[-1].isspace() for q, p in pairwise(pieces))
    if clean:
        joined = [token for piece in pieces for token in BPE.encode(piece.text).tolist()]
        assert joined == BPE.encode(text).tolist()


@settings(max_examples=200)
@given(st.lists(st.text(alphabet="ab \n", max_size=40), max_size=6), st.integers(1, 30))
def test_streamed_documents_match_split(documents: list[str], size: int) -> None:
    text = "<->".join(documents)
    expected = [document for document in documents if document.strip()]
    parts, found = [], []
    for piece in stream_documents(io.StringIO(text), "<->", size):
        parts.append(piece.text)
        if piece.ends_document:
            found.append("".join(parts))
            parts = []
    assert found == expected
    assert not parts


@settings(max_examples=100)
@given(spaced_text.filter(str.strip), st.integers(1, 30))
def test_stream_without_breaks_is_one_document(text: str, size: int) -> None:
    pieces = list(stream_documents(io.StringIO(text, newline=""), None, size))
    assert "".join(piece.text for piece in pieces) == text
    assert sum(piece.ends_document for piece in pieces) == 1


def test_long_file_is_read_in_small_pieces(tmp_path: Path) -> None:
    text = "word " * PIECE_CHARACTERS
    (tmp_path / "long.txt").write_text(text)
    pieces = list(open_corpus(tmp_path / "long.txt").pieces())
    assert max(len(piece.text) for piece in pieces) <= 2 * PIECE_CHARACTERS
    assert "".join(piece.text for piece in pieces) == text


def test_text_file_is_one_or_several_documents(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffone\r\ntwo\n\n\nthree".encode())
    assert list(open_corpus(path).documents()) == ["one\ntwo\n\n\nthree"]
    assert list(open_corpus(path, document_break="\n\n\n").documents()) == ["one\ntwo", "three"]


def test_folder_is_read_in_sorted_order(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "sub" / "c.jsonl").write_text('{"text": "third"}\n\n{"text": "fourth"}\n')
    (tmp_path / "picture.png").write_bytes(b"\0\1")
    assert list(open_corpus(tmp_path).documents()) == ["first", "second", "third", "fourth"]


@pytest.mark.parametrize(("ending", "opener"), [(".xz", lzma.open), (".gz", gzip.open)])
def test_compressed_files_are_read_by_their_inner_type(tmp_path: Path, ending: str, opener) -> None:
    with opener(tmp_path / f"a.txt{ending}", "wt", encoding="utf-8") as file:
        file.write("häuser\n")
    with opener(tmp_path / f"b.jsonl{ending}", "wt", encoding="utf-8") as file:
        file.write(json.dumps({"body": "x"}) + "\n" + json.dumps({"body": "y"}))
    assert list(open_corpus(tmp_path / f"a.txt{ending}").documents()) == ["häuser\n"]
    assert list(open_corpus(tmp_path / f"b.jsonl{ending}", field="body").documents()) == ["x", "y"]


def test_content_hash_depends_only_on_content_and_break(tmp_path: Path) -> None:
    for name, text in (("a.txt", "same"), ("b.txt", "same"), ("c.txt", "other")):
        (tmp_path / name).write_text(text)
    hashes = [open_corpus(tmp_path / f"{name}.txt").content_sha256() for name in "abc"]
    assert hashes[0] == hashes[1] != hashes[2]
    assert open_corpus(tmp_path / "a.txt", document_break="|").content_sha256() != hashes[0]


def test_long_whitespace_is_read_in_linear_time(tmp_path: Path) -> None:
    """As in a table padded with blanks, or in lines that were emptied."""
    text = "before" + " " * 300_000 + "\n" * 300_000 + "after"
    (tmp_path / "a.txt").write_text(text)
    began = time.process_time()
    assert list(open_corpus(tmp_path / "a.txt").documents()) == [text]
    assert time.process_time() - began < 3  # quadratic time takes 15


BAD_FILES = {
    "empty.txt": (b"", "empty.txt is empty"),
    "binary.txt": (b"MZ\0\0\1", "binary file"),
    "latin.txt": ("caf\xe9 au lait".encode("latin-1"), "not UTF-8 text .byte 0xe9 at offset 3"),
    "torn.txt.xz": (lzma.compress(b"text " * 1000)[:40], "cannot be read"),
    "notxz.txt.xz": (b"plain text", "cannot be read"),
    "notgz.txt.gz": (b"plain text", "cannot be read"),
    "empty.txt.xz": (lzma.compress(b""), "is empty"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_invalid_file_gives_one_line_error(tmp_path: Path, name: str) -> None:
    content, message = BAD_FILES[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        open_corpus(tmp_path / name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a"', "line 2 is not JSON"),
        ('{"body": "a"}', "line 2 has no text field 'text' .it has 'body'"),
        ('["a"]', "line 2 has no text field"),
        ('{"text": 3}', r"line 2 has no text field 'text' .it has 'text' of type int"),
    ],
)
def test_invalid_row_gives_one_line_error(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' + line)
    with pytest.raises(ValueError, match=message) as caught:
        list(open_corpus(tmp_path / "a.jsonl").documents())
    assert "\n" not in str(caught.value)


def test_damage_beyond_the_start_is_found_while_reading(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"good " * 40000 + b"\xff")
    with pytest.raises(ValueError, match="not UTF-8"):
        list(open_corpus(tmp_path / "a.txt").pieces())
    packed = lzma.compress(bytes(range(32, 127)) * 40000, preset=0)
    (tmp_path / "b.txt.xz").write_bytes(packed[: len(packed) // 2])
    try:
        corpus = open_corpus(tmp_path / "b.txt.xz")
    except ValueError as error:
        assert "cannot be read" in str(error)  # noqa: PT017 - either place may be the first to see it
    else:
        with pytest.raises(ValueError, match="damaged"):
            list(corpus.pieces())


def test_missing_path_suggests_nearest_name(tmp_path: Path) -> None:
    (tmp_path / "war_and_peace.txt").write_text("text")
    with pytest.raises(ValueError, match=r"war_and_piece.txt; did you mean .*/war_and_peace.txt\?"):
        open_corpus(tmp_path / "war_and_piece.txt")
    with pytest.raises(ValueError, match=r"file not found: .*/nope.txt; give a text file"):
        open_corpus(tmp_path / "nope.txt")
    with pytest.raises(ValueError, match="file not found"):
        open_corpus(tmp_path / "nowhere" / "a.txt")
    (tmp_path / "hollow").mkdir()
    with pytest.raises(ValueError, match=r"contains no \.txt or \.jsonl files"):
        open_corpus(tmp_path / "hollow")
    for nothing in ("", "  "):
        with pytest.raises(ValueError, match="data must not be empty"):
            open_corpus(nothing)
    with pytest.raises(ValueError, match="empty document break"):
        open_corpus(tmp_path / "war_and_peace.txt", document_break="")
    with pytest.raises(ValueError, match="text is empty"):
        TextCorpus([" "])


def test_python_manual_is_available() -> None:
    corpus = open_corpus("python-manual")
    text = "".join(corpus.documents())
    assert len(text) > 300_000
    assert set(text) <= {"\n", *map(chr, range(32, 127))}
    assert 'The "assert" statement' in text


def fake_datasets(rows: list[dict[str, str]], calls: list[tuple]) -> types.ModuleType:
    module = types.ModuleType("datasets")

    def load_dataset(name, config, *, split, streaming, revision):
        calls.append((name, config, split, streaming, revision))
        return iter(rows)

    module.__dict__["load_dataset"] = load_dataset
    return module


class Torn(list[dict[str, str]]):
    """Rows, followed by a network failure."""

    def __iter__(self) -> Iterator[dict[str, str]]:
        yield from super().__iter__()
        raise RuntimeError("timed out")


def hub_is_at(monkeypatch: pytest.MonkeyPatch, commit: str) -> types.SimpleNamespace:
    """A fake hub at this commit, which tests may change."""
    import huggingface_hub

    info = types.SimpleNamespace(sha=commit)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: info)
    return info


def test_hub_dataset_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple] = []
    rows = [{"text": "one"}, {"text": ""}, {"text": "two"}]
    monkeypatch.setitem(sys.modules, "datasets", fake_datasets(rows, calls))
    hub_is_at(monkeypatch, "1")
    assert list(open_corpus("hf:owner/name").documents()) == ["one", "two"]
    list(open_corpus("hf:owner/name:config:test").documents())
    list(open_corpus("hf:owner/name::test").documents())
    assert calls == [
        ("owner/name", None, "train", True, "1"),
        ("owner/name", "config", "test", True, "1"),
        ("owner/name", None, "test", True, "1"),
    ]
    with pytest.raises(ValueError, match=r"no text field 'body' \(it has 'text'"):
        list(open_corpus("hf:owner/name", field="body").documents())
    monkeypatch.setitem(sys.modules, "datasets", fake_datasets(Torn(rows), calls))
    with pytest.raises(ValueError, match=r"hf:owner/name::train could not be read further \(RuntimeError\): timed out"):
        list(open_corpus("hf:owner/name").documents())
    for bad in ("hf:", "hf:a:b:c:d"):
        with pytest.raises(ValueError, match="is not a hub dataset"):
            open_corpus(bad)


def test_hub_dataset_hash_depends_on_commit_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", fake_datasets([], []))
    commit = hub_is_at(monkeypatch, "1")
    first = HubCorpus("owner/name").content_sha256()
    assert first == HubCorpus("owner/name").content_sha256() != HubCorpus("owner/name", split="test").content_sha256()
    commit.sha = "2"
    assert first != HubCorpus("owner/name").content_sha256()


def test_hub_dataset_is_read_at_the_hashed_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The branch moves between the two reads and the hash; all three use the first commit."""
    calls: list[tuple] = []
    monkeypatch.setitem(sys.modules, "datasets", fake_datasets([{"text": "one"}], calls))
    hub = hub_is_at(monkeypatch, "1")
    known, corpus = HubCorpus("owner/name").content_sha256(), HubCorpus("owner/name", revision="branch")
    list(corpus.documents())
    hub.sha = "2"
    assert corpus.content_sha256() == known
    list(corpus.documents())
    assert [revision for *_, revision in calls] == ["1", "1"]


def test_missing_hub_extra_names_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"pip install 'cedd\[hub\]'"):
        open_corpus("hf:owner/name")
