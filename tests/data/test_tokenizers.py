import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cedd.data.tokenizers import (
    BPE_FILE,
    HEADER_FILE,
    BPETokenizer,
    ByteTokenizer,
    CharAsGPT2,
    CharTokenizer,
    GPT2Tokenizer,
    Tokenizer,
    load_tokenizer,
    make_tokenizer,
)

SAMPLE = "The quick brown fox jumps over the lazy dog, then naps.\n" * 20 + "Ünïcödé: 日本 🙂\n"
BPE = BPETokenizer.train([SAMPLE], 300)
ALPHABET = "abc xyz\n.é🙂"

any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
"""All of Unicode except lone surrogates; the codec utf-8 means the same, but takes Hypothesis longer."""


def assert_round_trip(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int64
    assert ids.ndim == 1
    assert len(ids) == 0 or (ids.min() >= 0 and ids.max() < tokenizer.vocab_size)
    assert tokenizer.decode(ids) == text


@given(st.text(alphabet=ALPHABET, max_size=60))
def test_char_round_trip(text: str) -> None:
    tokenizer = CharTokenizer(ALPHABET)
    assert_round_trip(tokenizer, text)
    assert len(tokenizer.encode(text)) == len(text)


@given(any_text)
def test_byte_round_trip(text: str) -> None:
    assert_round_trip(ByteTokenizer(), text)
    assert bytes(ByteTokenizer().encode(text).tolist()) == text.encode()


@given(any_text)
def test_trained_bpe_round_trip(text: str) -> None:
    assert_round_trip(BPE, text)


@settings(max_examples=50)
@given(text=any_text)
def test_gpt2_round_trip(gpt2: GPT2Tokenizer, text: str) -> None:
    assert_round_trip(gpt2, text)


@pytest.fixture(scope="module")
def characters_as_gpt2(gpt2: GPT2Tokenizer) -> CharAsGPT2:
    return CharAsGPT2.from_gpt2(gpt2)


@given(text=st.text(alphabet=st.characters(min_codepoint=32, max_codepoint=126), max_size=60))
def test_characters_as_gpt2_round_trip(characters_as_gpt2: CharAsGPT2, text: str) -> None:
    assert_round_trip(characters_as_gpt2, text)
    assert len(characters_as_gpt2.encode(text)) == len(text)


def test_gpt2_ids_match_published_values(gpt2: GPT2Tokenizer) -> None:
    assert gpt2.encode("Hello world").tolist() == [15496, 995]
    assert gpt2.vocab_size == 50257
    assert gpt2.eos_id == 50256
    assert gpt2.decode([50256]) == "<|endoftext|>"
    # The end token's spelling in a text is text: it must not end the document.
    assert 50256 not in gpt2.encode("a <|endoftext|> b")


def test_characters_as_gpt2_use_gpt2_ids(gpt2: GPT2Tokenizer, characters_as_gpt2: CharAsGPT2) -> None:
    tokenizer = characters_as_gpt2
    assert tokenizer.vocab_size == 50257
    assert set(map(chr, range(32, 127))) | {"\n", "é"} <= set(tokenizer.characters)
    for character, token in tokenizer.characters.items():
        assert gpt2.encode(character).tolist() == [token]
    with pytest.raises(ValueError, match=r"'🙂'.* in 'ab🙂'"):
        tokenizer.encode("ab🙂")
    # A token that is not a character keeps its position.
    assert tokenizer.decode([*tokenizer.encode("a"), 15496, *tokenizer.encode("b")]) == "a\N{REPLACEMENT CHARACTER}b"


def test_unknown_character_error_shows_context() -> None:
    with pytest.raises(ValueError, match=r"'q' \(U\+0071\) in 'abcqa' is not in the char vocabulary"):
        CharTokenizer(ALPHABET).encode("abcqa")
    for tokenizer in (ByteTokenizer(), BPE):
        with pytest.raises(ValueError, match=r"U\+D800\) in 'a\\ud800'"):
            tokenizer.encode("a\ud800")


def test_unknown_characters_may_have_a_placeholder() -> None:
    tokenizer = CharTokenizer("abc", unknown="?")
    assert tokenizer.decode(tokenizer.encode("aXb日c")) == "a?b?c"
    assert "?" in tokenizer.alphabet


def test_mask_decodes_to_placeholder_or_is_rejected() -> None:
    tokenizer = CharTokenizer("abc")
    assert tokenizer.decode([0, 3, 3, 2]) == "a▒▒c"
    assert tokenizer.decode([3, 0], mask="_") == "_a"
    assert ByteTokenizer().decode([256, 97, 256]) == "▒a▒"
    with pytest.raises(ValueError, match="position 1 is the mask"):
        tokenizer.decode([0, 3], mask=None)
    with pytest.raises(ValueError, match="id 4 at position 0 is outside"):
        tokenizer.decode([4])
    with pytest.raises(ValueError, match="shape"):
        tokenizer.decode(np.zeros((2, 2), dtype=int))


def test_limited_alphabet_keeps_most_frequent_characters() -> None:
    tokenizer = CharTokenizer.from_texts(["aaabbc", "abd"], size=4)
    assert tokenizer.alphabet == "abc\ufffd"  # c and d are equally frequent: the first is kept
    assert tokenizer.decode(tokenizer.encode("cabdé")) == "cab\ufffd\ufffd"
    assert CharTokenizer.from_texts(["ab"], size=50).alphabet == "ab\ufffd"
    assert CharTokenizer.from_texts(["ab?"], unknown="?", size=2).alphabet == "?a"


def test_alphabet_does_not_depend_on_data_order() -> None:
    assert CharTokenizer.from_texts(["ba", "c"]) == CharTokenizer.from_texts(["c", "ab"])


def all_kinds() -> list[Tokenizer]:
    characters_as_gpt2 = CharAsGPT2({"a": 64, "b": 65}, 50257, unknown="a")
    return [CharTokenizer(ALPHABET), CharTokenizer(ALPHABET, unknown="a"), ByteTokenizer(), BPE, characters_as_gpt2]


@pytest.mark.parametrize("tokenizer", all_kinds(), ids=lambda t: t.kind)
def test_saved_tokenizer_loads_unchanged(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "run")
    loaded = load_tokenizer(tmp_path / "run")
    assert type(loaded) is type(tokenizer)
    assert loaded.fingerprint == tokenizer.fingerprint
    assert (loaded.name, loaded.vocab_size, loaded.eos_id) == (tokenizer.name, tokenizer.vocab_size, tokenizer.eos_id)
    assert loaded.encode("abba").tolist() == tokenizer.encode("abba").tolist()
    assert make_tokenizer(tmp_path / "run") == tokenizer
    for file in (tmp_path / "run").iterdir():
        json.loads(file.read_text("utf-8"))


def test_saved_gpt2_tokenizer_loads_unchanged(gpt2: GPT2Tokenizer, tmp_path: Path) -> None:
    gpt2.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded == gpt2
    assert loaded.encode("Hello world").tolist() == [15496, 995]


def test_fingerprints_differ() -> None:
    fingerprints = [tokenizer.fingerprint for tokenizer in all_kinds()]
    fingerprints.append(CharTokenizer("abc").fingerprint)
    fingerprints.append(BPETokenizer.train([SAMPLE], 301).fingerprint)
    assert len(set(fingerprints)) == len(fingerprints)


def test_damaged_tokenizer_is_rejected(tmp_path: Path) -> None:
    CharTokenizer("abc").save(tmp_path)
    path = tmp_path / HEADER_FILE
    whole = path.read_text("ascii")
    path.write_text(whole.replace('"abc"', '"abd"'), "ascii")
    with pytest.raises(ValueError, match="damaged"):
        load_tokenizer(tmp_path)
    path.write_text(whole[:40], "ascii")
    with pytest.raises(ValueError, match="not JSON"):
        load_tokenizer(tmp_path)


def test_tokenizer_json_alone_can_be_loaded(tmp_path: Path) -> None:
    BPE.save(tmp_path)
    (tmp_path / HEADER_FILE).unlink()
    assert load_tokenizer(tmp_path) == BPE
    (tmp_path / BPE_FILE).write_text('{"model": {"type": "WordPiece"}}')
    with pytest.raises(ValueError, match=r"tokenizer.json cannot be read"):
        load_tokenizer(tmp_path)


def test_bpe_training_is_deterministic_across_processes() -> None:
    code = (
        "from cedd.data.tokenizers import BPETokenizer; from tests.data.test_tokenizers import SAMPLE; "
        "print(BPETokenizer.train([SAMPLE], 300).fingerprint)"
    )
    root = Path(__file__).resolve().parents[2]
    path = {"PYTHONPATH": f"{root}:{root / 'src'}", "PYTHONHASHSEED": "7", "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=path, check=True)
    assert done.stdout.strip() == BPE.fingerprint


def test_make_tokenizer_supports_every_name(
    gpt2: GPT2Tokenizer, shared_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert make_tokenizer("byte").kind == "byte"
    assert make_tokenizer("char", ["abc"]).vocab_size == 3
    assert make_tokenizer("char:3", ["aaabbc", "abd"]).decode(np.array([0, 1, 2])) == "ab\ufffd"
    assert make_tokenizer("bpe:280", [SAMPLE]).vocab_size == 280
    assert make_tokenizer("gpt2", gpt2_files=shared_data / "gpt2-bpe") == gpt2
    monkeypatch.setenv("CEDD_DATA", str(shared_data))
    assert make_tokenizer("gpt2") == gpt2
    assert make_tokenizer("gpt2-char").vocab_size == 50257


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("chars", "did you mean 'char'"),
        ("no/such/folder", "unknown tokenizer"),
        ("char", "'char' is made from a text, and none is given: use byte, gpt2, gpt2-char or the folder"),
        ("bpe:many", "as in bpe:8000"),
        ("bpe:", "vocabulary size"),
        ("byte:7", "has no size"),
        ("char:1", "at least 2"),
    ],
)
def test_invalid_name_gives_one_line_error(spec: str, message: str) -> None:
    texts = ["abc"] if ":" in spec else None
    with pytest.raises(ValueError, match=message) as caught:
        make_tokenizer(spec, texts)
    assert "\n" not in str(caught.value)


def test_other_invalid_input_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 257"):
        BPETokenizer.train([SAMPLE], 256)
    with pytest.raises(ValueError, match="empty"):
        CharTokenizer.from_texts([""])
    with pytest.raises(ValueError, match=r"has no vocab\.json"):
        GPT2Tokenizer.from_folder(tmp_path)
    with pytest.raises(ValueError, match="has no tokenizer"):
        load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="folder not found"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="not byte-level"):
        BPETokenizer({"a": 0}, [], "tiny")


def test_offline_error_suggests_cedd_data(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def offline(*_: object) -> str:
        raise ConnectionError("no network")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)
    with pytest.raises(ValueError, match="CEDD_DATA"):
        make_tokenizer("gpt2")
