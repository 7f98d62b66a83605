import errno
import json
import multiprocessing
import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cedd.data import packing as packing_module
from cedd.data.corpora import TextCorpus, open_corpus
from cedd.data.data_config import DataConfig
from cedd.data.packing import HEADER_FILE, TOKENS_FILE, PackedDataset, PackingPolicy, open_packed, pack
from cedd.data.tokenizers import BPETokenizer, ByteTokenizer, CharAsGPT2, CharTokenizer, Tokenizer, load_tokenizer
from cedd.data.training_data import prepare_training_data
from cedd.storage import read_sealed, sealed

BPE = BPETokenizer.train(["the cat sat on the mat\n" * 20], 270)
BYTES = ByteTokenizer()


def cached_folders(cache: Path) -> list[Path]:
    return sorted((cache / "packed").iterdir())


@settings(max_examples=50)
@given(
    documents=st.lists(st.text(alphabet="ab \n", min_size=1, max_size=50), min_size=1, max_size=8),
    length=st.integers(1, 20),
)
def test_blocks_are_the_token_stream_cut_to_length(documents: list[str], length: int) -> None:
    corpus = TextCorpus(["a", *documents])
    ends = [token for text in corpus.documents() for token in (*BPE.encode(text).tolist(), BPE.eos_id)]
    between = list(b"\n\n".join(text.encode() for text in corpus.documents()))
    for tokenizer, stream in ((BPE, ends), (BYTES, between)):
        if len(stream) < length:
            continue
        packed = pack(corpus, tokenizer, length)
        assert packed.blocks.shape == (len(stream) // length, length)
        assert packed.blocks.reshape(-1).tolist() == stream[: len(stream) // length * length]
        report = packed.report()
        assert report["documents"] == len(documents) + 1
        assert report["tokens"] == len(stream) == report["blocks"] * length + report["remainder_tokens"]
        assert report["characters"] == sum(map(len, corpus.documents()))
        assert report["words"] == sum(len(text.split()) for text in corpus.documents())


def test_indexing_gives_int64_copies() -> None:
    packed = pack(TextCorpus(["abcdefgh"]), BYTES, 2)
    assert isinstance(packed.blocks.base, np.memmap) or isinstance(packed.blocks, np.memmap)
    assert packed.blocks.dtype == np.uint16
    assert len(packed) == 4
    assert packed[1].tolist() == [99, 100]
    assert packed[1:3].tolist() == [[99, 100], [101, 102]]
    assert packed[np.array([3, 0])].tolist() == [[103, 104], [97, 98]]
    assert packed[0].dtype == np.int64
    assert packed[-1].tolist() == [103, 104]
    packed[0][0] = 0  # a copy: the file is not touched
    assert packed[0].tolist() == [97, 98]


def test_large_vocabulary_is_stored_in_four_bytes() -> None:
    wide = CharAsGPT2({"a": 0, "b": 70_000}, vocab_size=70_001)
    packed = pack(TextCorpus(["abab"]), wide, 2)
    assert packed.blocks.dtype == np.uint32
    assert packed[0].tolist() == [0, 70_000]


def test_policy_separator_depends_on_tokenizer() -> None:
    assert PackingPolicy().resolve(BPE).separator == "eos"
    assert PackingPolicy().resolve(BYTES) == PackingPolicy("text", "\n\n")
    with pytest.raises(ValueError, match="no end-of-document token: use separator='text'"):
        PackingPolicy("eos").resolve(BYTES)
    letters = CharTokenizer("ab")
    assert len(pack(TextCorpus(["abab"]), letters, 2)) == 2  # one document needs no separator
    with pytest.raises(ValueError, match=r"separator '\\n\\n' cannot be encoded"):
        pack(TextCorpus(["abab", "ba"]), letters, 2)
    assert len(pack(TextCorpus(["abab", "ba"]), letters, 2, policy=PackingPolicy(text=""))) == 3


def test_number_of_workers_does_not_change_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing_module, "_CHUNK_CHARACTERS", 1000)  # many chunks from little text
    monkeypatch.setattr(packing_module, "_CHUNKS_PER_START", 2)
    draw = random.Random(0)
    documents = [" ".join(draw.choices(["the", "cat", "sat", "on.\n"], k=draw.randint(1, 300))) for _ in range(60)]
    contents = []
    for workers in (1, 3):
        pack(TextCorpus(documents), BPE, 16, cache=tmp_path / str(workers), workers=workers)
        (folder,) = cached_folders(tmp_path / str(workers))
        contents.append((folder.name, *((folder / name).read_bytes() for name in (TOKENS_FILE, HEADER_FILE))))
    assert contents[0] == contents[1]


def test_short_text_is_encoded_without_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing_module, "ProcessPoolExecutor", None)
    assert len(pack(TextCorpus(["ab" * 10]), BYTES, 2, cache=tmp_path, workers=2)) == 10


def test_worker_error_has_the_usual_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing_module, "_CHUNKS_PER_START", 1)
    with pytest.raises(ValueError, match=r"^text: character 'z'.* in 'abz'"):
        pack(TextCorpus(["abz"]), CharTokenizer("ab"), 2, cache=tmp_path, workers=2)
    assert cached_folders(tmp_path) == []


def _kill_worker(dtype: str, texts: list[str]) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_killed_worker_is_reported_as_out_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the system does when memory runs out."""
    monkeypatch.setattr(packing_module, "_encode_in_worker", _kill_worker)
    monkeypatch.setattr(packing_module, "_CHUNKS_PER_START", 1)
    with pytest.raises(OSError, match="one of 2 processes that encode text was ended") as caught:
        pack(TextCorpus(["ab" * 10]), BYTES, 2, cache=tmp_path, workers=2)
    assert caught.value.errno == errno.ENOMEM
    assert cached_folders(tmp_path) == []


class CountingCorpus(TextCorpus):
    reads = 0

    def pieces(self):
        self.reads += 1
        return super().pieces()


def test_cache_hits_only_on_equal_requests(tmp_path: Path) -> None:
    corpus = CountingCorpus(["some text to pack", "and more of it"])

    def reads(tokenizer: Tokenizer = BYTES, length: int = 4, **options) -> int:
        before = corpus.reads
        pack(corpus, tokenizer, length, cache=tmp_path, **options)
        return corpus.reads - before

    assert reads() == 1
    assert reads() == 0
    assert reads(length=5) == 1
    assert reads(tokenizer=BPE) == 1
    assert reads(policy=PackingPolicy(text="")) == 1
    assert reads(part="train", holdout=0.5) == 1
    assert reads(part="train", holdout=0.5) == 0
    assert len(cached_folders(tmp_path)) == 5
    other = CountingCorpus(["some text to pack", "and more of it!"])
    pack(other, BYTES, 4, cache=tmp_path)
    assert other.reads == 1


@pytest.mark.parametrize("damage", ["truncate", "flip", "header", "half header", "no tokens"])
def test_damaged_set_is_detected_and_repacked(tmp_path: Path, damage: str) -> None:
    corpus = TextCorpus(["some text to pack"])
    whole = pack(corpus, BYTES, 4, cache=tmp_path)[:]
    (folder,) = cached_folders(tmp_path)
    content = (folder / TOKENS_FILE).read_bytes()
    if damage == "truncate":
        (folder / TOKENS_FILE).write_bytes(content[:-2])
    elif damage == "flip":
        (folder / TOKENS_FILE).write_bytes(bytes([content[0] ^ 1]) + content[1:])
    elif damage == "header":
        (folder / HEADER_FILE).write_text(json.dumps({"format": "other"}))
    elif damage == "half header":
        (folder / HEADER_FILE).write_text((folder / HEADER_FILE).read_text()[:30])
    else:
        (folder / TOKENS_FILE).unlink()
    with pytest.raises(ValueError, match="the packed set"):
        open_packed(folder)
    with pytest.warns(UserWarning, match="packing again"):
        again = pack(corpus, BYTES, 4, cache=tmp_path)
    assert (again[:] == whole).all()
    assert (open_packed(folder, verify=True)[:] == whole).all()


def test_flipped_bits_in_header_are_detected(tmp_path: Path) -> None:
    pack(TextCorpus(["some text to pack"]), BYTES, 4, cache=tmp_path)
    (folder,) = cached_folders(tmp_path)
    header, chance = (folder / HEADER_FILE).read_bytes(), random.Random(0)
    for place in range(0, len(header), 3):
        flipped = bytearray(header)
        flipped[place] ^= 1 << chance.randrange(8)
        (folder / HEADER_FILE).write_bytes(flipped)
        with pytest.raises(ValueError, match=f"the packed set .* is damaged: {HEADER_FILE}"):
            open_packed(folder)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"length": 2}, "17 tokens are not 4 blocks of 2 and 1 more"),
        ({"length": 0}, "17 tokens are not 4 blocks of 0"),
        ({"length": "4"}, "header.json is incomplete"),
        ({"length": 2, "blocks": 8, "remainder_tokens": 1}, "is of another request: length differs"),
        ({"tokenizer_fingerprint": "other"}, "is of another request: tokenizer_fingerprint differs"),
    ],
)
def test_inconsistent_header_with_valid_checksum_is_repacked(tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    whole = pack(corpus := TextCorpus(["some text to pack"]), BYTES, 4, cache=tmp_path)[:]
    (folder,) = cached_folders(tmp_path)
    header = read_sealed(folder / HEADER_FILE)
    (folder / HEADER_FILE).write_text(json.dumps(sealed(header | changes)))
    with pytest.warns(UserWarning, match=f"{why}.*; packing again"):
        assert (pack(corpus, BYTES, 4, cache=tmp_path)[:] == whole).all()


def test_set_without_header_checksum_is_repacked(tmp_path: Path) -> None:
    """As written by earlier versions: its integrity cannot be verified."""
    whole = pack(corpus := TextCorpus(["some text to pack"]), BYTES, 4, cache=tmp_path)[:]
    (folder,) = cached_folders(tmp_path)
    (folder / HEADER_FILE).write_text(json.dumps(read_sealed(folder / HEADER_FILE)))
    with pytest.warns(UserWarning, match="header.json has no checksum; packing again"):
        assert (pack(corpus, BYTES, 4, cache=tmp_path)[:] == whole).all()
    assert (pack(corpus, BYTES, 4, cache=tmp_path)[:] == whole).all()  # only once


def test_swapped_sets_are_repacked(tmp_path: Path) -> None:
    corpora = [TextCorpus(["some text to pack"]), TextCorpus(["other text to pack"])]
    whole = [pack(corpus, BYTES, 4, cache=tmp_path)[:] for corpus in corpora]
    first, second = cached_folders(tmp_path)
    first.rename(tmp_path / "aside")
    second.rename(first)
    (tmp_path / "aside").rename(second)
    for corpus, blocks in zip(corpora, whole, strict=True):
        with pytest.warns(UserWarning, match="of another request: content_sha256 differs; packing again"):
            assert (pack(corpus, BYTES, 4, cache=tmp_path)[:] == blocks).all()


@pytest.mark.filterwarnings("ignore:.*packing again")
def test_concurrent_readers_of_damaged_set_succeed(tmp_path: Path) -> None:
    """Threads stand in for processes: locks belong to open files, so threads exclude each other too."""
    whole = pack(corpus := TextCorpus(["some text to pack " * 2000]), BYTES, 4, cache=tmp_path)[:]
    (folder,) = cached_folders(tmp_path)
    with ThreadPoolExecutor(4) as threads:
        for damaged in (HEADER_FILE, TOKENS_FILE) * 10:
            (folder / damaged).write_bytes((folder / damaged).read_bytes()[:-2])
            for found in threads.map(lambda _: pack(corpus, BYTES, 4, cache=tmp_path)[:], range(4)):
                assert (found == whole).all()
            assert cached_folders(tmp_path) == [folder]


def test_failure_midway_leaves_nothing_behind(tmp_path: Path) -> None:
    class Failing(TextCorpus):
        def pieces(self):
            yield from super().pieces()
            raise ValueError("the disk went away")

    with pytest.raises(ValueError, match="went away"):
        pack(Failing(["text"]), BYTES, 2, cache=tmp_path)
    assert cached_folders(tmp_path) == []


def _pack_slowly(cache: Path) -> None:
    class Slow(TextCorpus):
        def pieces(self):
            for piece in super().pieces():
                yield piece
                (cache / "writing").touch()
                time.sleep(60)

    pack(Slow(["text " * 300_000, "more"]), BYTES, 2, cache=cache)


def test_process_killed_while_packing_leaves_no_set(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=_pack_slowly, args=(tmp_path,))
    process.start()
    deadline = time.monotonic() + 60
    while not (tmp_path / "writing").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    left = cached_folders(tmp_path)
    assert all(folder.name.endswith(".tmp") for folder in left)
    assert len(left) == 1  # it was indeed killed while writing
    corpus = TextCorpus(["text " * 300_000, "more"])
    assert len(pack(corpus, BYTES, 2, cache=tmp_path)) == (5 * 300_000 + 2 + 4) // 2
    assert left[0] not in cached_folders(tmp_path)
    assert len(cached_folders(tmp_path)) == 1


def test_concurrently_packed_set_is_kept(tmp_path: Path) -> None:
    documents = ["some text to pack"]

    class Raced(TextCorpus):
        def pieces(self):
            pack(TextCorpus(documents), BYTES, 4, cache=tmp_path)  # another process is faster
            return super().pieces()

    assert pack(Raced(documents), BYTES, 4, cache=tmp_path)[0].tolist() == list(b"some")
    assert len(cached_folders(tmp_path)) == 1


def test_unknown_character_error_shows_context(tmp_path: Path) -> None:
    """A long document is encoded in pieces, so a position within a piece would not be one in the file."""
    (tmp_path / "long.txt").write_text("ab " * 400_000 + "abcdé" + "ab " * 100)
    corpus, tokenizer = open_corpus(tmp_path / "long.txt"), CharTokenizer("abcd ")
    with pytest.raises(ValueError, match=r"long.txt: character 'é' \(U\+00E9\) in '[ab ]*abcdéab ab [ab ]*' is not in"):
        pack(corpus, tokenizer, 8, cache=tmp_path)


def test_too_little_text_or_bad_options_give_clear_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="text has 3 tokens, fewer than one block of 8: give more text") as caught:
        pack(TextCorpus(["abc"]), BYTES, 8, cache=tmp_path)
    assert "\n" not in str(caught.value)
    assert cached_folders(tmp_path) == []
    bad: list[dict[str, Any]] = [
        {"length": 0},
        {"length": 2, "workers": 0},
        {"length": 2, "part": "train", "holdout": 1.0},
    ]
    for options in bad:
        with pytest.raises(ValueError, match=r"at least (one|1)|between 0 and 1"):
            pack(TextCorpus(["abc"]), BYTES, **options)


@given(blocks=st.integers(2, 200), holdout=st.floats(0.001, 0.999))
@settings(max_examples=50)
def test_tail_split_partitions_the_blocks(blocks: int, holdout: float) -> None:
    header = {"length": 3, "blocks": blocks}
    packed = PackedDataset(np.arange(3 * blocks + 1, dtype=np.uint16), header)
    train, validation = packed.split_tail(holdout)
    assert len(train) >= 1
    assert len(validation) >= 1
    assert np.concatenate([train[:], validation[:]]).tolist() == packed[:].tolist()
    assert abs(len(validation) - holdout * blocks) <= 1


def test_evenly_spaced_blocks_cover_the_whole_set() -> None:
    data = pack(TextCorpus([chr(97 + i) * 4 for i in range(10)]), BYTES, 4, policy=PackingPolicy("text", ""))
    assert [BYTES.decode(block)[0] for block in data.evenly_spaced(4)] == ["a", "c", "f", "h"]
    assert len(data.evenly_spaced(99)) == len(data.evenly_spaced(None)) == 10


def test_document_split_is_exact_and_disjoint() -> None:
    corpus = TextCorpus([f"{i:03}" for i in range(100)])
    policy = PackingPolicy(text="")
    texts = {}
    for part in ("train", "validation"):
        packed = pack(corpus, BYTES, 3, policy=policy, part=part, holdout=0.05)
        texts[part] = [BYTES.decode(block) for block in packed[:]]
    assert len(texts["validation"]) == 5
    assert sorted(texts["train"] + texts["validation"]) == list(corpus.documents())


def test_prepare_training_data(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the cat sat on the mat. " * 50)
    (tmp_path / "b.txt").write_text("the mat sat. " * 10)
    data = prepare_training_data(tmp_path / "a.txt", 16, DataConfig(holdout=0.1))
    assert data.tokenizer.kind == "char"
    assert len(data.train) + len(data.validation) == 24 * 50 // 16
    assert len(data.validation) == round(0.1 * (24 * 50 // 16))
    assert data.tokenizer.decode(data.train[0]) == "the cat sat on t"
    own = prepare_training_data(tmp_path / "a.txt", 16, DataConfig(validation=str(tmp_path / "b.txt")), data.tokenizer)
    assert len(own.validation) == 130 // 16
    (tmp_path / "c.jsonl").write_text("\n".join(json.dumps({"text": f"document {i}"}) for i in range(40)))
    by_document = prepare_training_data(
        tmp_path / "c.jsonl", 8, DataConfig("byte", holdout=0.25, holdout_by="documents")
    )
    assert by_document.train.report()["documents"] == 30
    assert by_document.validation.report()["documents"] == 10
    with pytest.raises(ValueError, match="too few to hold some out"):
        prepare_training_data(tmp_path / "b.txt", 100)


def test_bpe_is_not_trained_on_held_out_documents(tmp_path: Path) -> None:
    """Otherwise its merges would be fitted to the evaluation text; an alphabet, however, must cover that text."""
    documents = [("zebra " if i % 4 == 3 else "horse ") * 9 + "\n" for i in range(40)]
    (tmp_path / "c.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in documents))

    def of(tokenizer: str) -> Tokenizer:
        options = DataConfig(tokenizer, holdout=0.25, holdout_by="documents")
        return prepare_training_data(tmp_path / "c.jsonl", 8, options).tokenizer

    pieces = of("bpe:300")
    assert len(pieces.encode(" horse")) == 1
    assert len(pieces.encode(" zebra")) > 4
    assert {*"zebra"} <= {*(of("char").characters or ())}


@pytest.mark.parametrize("alphabet", ["char", "char:6"])
@pytest.mark.parametrize("holdout_by", ["tail", "documents"])
def test_alphabet_includes_document_separator(alphabet: str, holdout_by: Any, tmp_path: Path) -> None:
    """Single-line documents contain no line end."""
    (tmp_path / "c.jsonl").write_text("\n".join(json.dumps({"text": "a b" * 3}) for _ in range(40)))
    data = prepare_training_data(tmp_path / "c.jsonl", 11, DataConfig(alphabet, holdout=0.1, holdout_by=holdout_by))
    assert data.tokenizer.decode(data.train[0]) == "a ba ba b\n\n"
    (tmp_path / "one.jsonl").write_text(json.dumps({"text": "a b" * 30}))
    alone = prepare_training_data(tmp_path / "one.jsonl", 11).tokenizer
    assert alone.characters == {" ": 0, "a": 1, "b": 2}


def test_lone_surrogates_are_replaced(tmp_path: Path) -> None:
    """As written by programs that cut a text within a character. JSON joins two adjacent halves into one character, so
    an alphabet of halves could not be read back."""
    (tmp_path / "c.jsonl").write_text('{"text": "cut\\ud83d\\n"}\n{"text": "\\ude00, and \\ud83d\\ude00"}\n')
    for name in ("char", "byte", "bpe:300"):
        tokenizer = prepare_training_data(tmp_path / "c.jsonl", 2, DataConfig(name)).tokenizer
        tokenizer.save(tmp_path / name)
        assert load_tokenizer(tmp_path / name).vocab_size == tokenizer.vocab_size
    assert list(open_corpus(tmp_path / "c.jsonl").documents()) == ["cut\ufffd\n", "\ufffd, and \U0001f600"]


def test_file_changed_while_reading_is_not_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cached under its old content's name, it would be found once the file has that content again."""
    file, cache = tmp_path / "a.txt", tmp_path / "cache"
    file.write_text("before " * 20)
    corpus = open_corpus(file)
    pieces = corpus.pieces
    monkeypatch.setattr(corpus, "pieces", lambda: (file.write_text("after " * 20), pieces())[1])
    with pytest.raises(ValueError, match=r"a\.txt was changed by another program while it was read"):
        pack(corpus, BYTES, 7, cache=cache)
    assert cached_folders(cache) == []
    file.write_text("before " * 20)
    assert BYTES.decode(pack(open_corpus(file), BYTES, 7, cache=cache)[0]) == "before "


def test_python_manual_can_be_packed(tmp_path: Path) -> None:
    data = prepare_training_data("python-manual", 128)
    assert data.tokenizer.vocab_size <= 96
    assert len(data.train) * 128 > 300_000
    whole = open_corpus("python-manual")
    assert data.train.report()["documents"] == sum(1 for _ in whole.documents())


def test_policies_have_distinct_hashes() -> None:
    policy = PackingPolicy()
    others = [replace(policy, separator="text"), replace(policy, text="\n")]
    assert len({p.sha256 for p in (policy, *others)}) == 3
    assert policy.sha256 == PackingPolicy().sha256
