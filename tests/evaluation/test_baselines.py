"""The baselines: hand-computed probabilities, sums to one, and bits per character of real compressors."""

import gzip
import lzma
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cedd.evaluation.baselines import NGram, compressed_bits, measure_baselines


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int64)


def test_unigram_matches_hand_computation():
    """Text 0 0 1 over three tokens: C = 3, T = 2, so p(c) = (C(c) + 2/3) / 5."""
    model = NGram(ids(0, 0, 1), 3, 1)
    assert model.probabilities(ids(0, 1, 2)[None])[0] == pytest.approx([8 / 15, 1 / 3, 2 / 15])


def test_bigram_matches_hand_computation():
    """Text 0 1 0 1 0 2: after 0 came 1, 1, 2, so p(1 | 0) = (2 + 2 p(1)) / 5 with p(1) = (2 + 3/3) / 9."""
    model = NGram(ids(0, 1, 0, 1, 0, 2), 3, 2)
    first, second = model.probabilities(ids(0, 1)[None])[0]
    assert first == pytest.approx((3 + 1) / 9)
    assert second == pytest.approx((2 + 2 * (2 + 1) / 9) / 5)
    # 2 was never followed by anything: its context backs off to the unigram.
    assert model.probabilities(ids(2, 1)[None])[0, 1] == pytest.approx(3 / 9)


@given(
    text=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    past=st.lists(st.integers(0, 3), max_size=5),
    order=st.integers(1, 4),
)
@settings(max_examples=60, deadline=None)
def test_next_token_probabilities_sum_to_one(text: list[int], past: list[int], order: int):
    model = NGram(ids(*text), 4, order)
    continued = np.array([[*past, token] for token in range(4)], dtype=np.int64)
    probabilities = model.probabilities(continued)[:, -1]
    assert (probabilities > 0).all()
    assert probabilities.sum() == pytest.approx(1, abs=1e-12)


def test_bits_cover_every_lower_order():
    text, blocks = np.random.default_rng(0).integers(0, 5, 300), np.random.default_rng(1).integers(0, 5, (4, 9))
    nested = NGram(text, 5, 3).bits(blocks)
    for order, bits in enumerate(nested, 1):
        assert bits == pytest.approx(-np.log2(NGram(text, 5, order).probabilities(blocks)))


def test_deterministic_text_needs_few_bits():
    text = np.tile(ids(0, 1, 2, 3), 500)
    bits = NGram(text, 4, 2).bits(ids(0, 1, 2, 3, 0)[None])[-1][0]
    assert bits[0] == pytest.approx(2, abs=0.01)
    assert (bits[1:] < 0.01).all()


def test_invalid_orders_are_rejected():
    with pytest.raises(ValueError, match="smaller order"):
        NGram(ids(0, 1), 50257, 5)
    with pytest.raises(ValueError, match="at least 1"):
        NGram(ids(0, 1), 2, 0)


def test_compressed_bits_match_compressors():
    text = "the cat sat on the mat. " * 20
    assert compressed_bits("gzip", text) == 8 * len(gzip.compress(text.encode(), 9, mtime=0))
    letters = np.random.default_rng(0).integers(97, 123, 3000).astype(np.uint8).tobytes().decode()
    for long in (text, letters, (text + letters) * 30):  # as short as with the longer window of the preset
        preset = lzma.compress(long.encode(), preset=9 | lzma.PRESET_EXTREME)
        assert compressed_bits("xz", long) == 8 * len(preset)
    assert compressed_bits("xz", letters) > math.log2(26) * len(letters)  # nothing beats the entropy of random letters
    assert compressed_bits("xz", letters, given=letters) < 0.3 * len(letters)  # only a reference to the given ones


def test_baselines_are_in_bits_per_character():
    """With two characters per token, each character has half of the token's bits."""
    train, held_out = np.tile(ids(0, 1), 400), np.tile(ids(0, 1), 8).reshape(2, 8)
    pairs = ["ab", "cd"]
    found = measure_baselines(
        train, held_out, vocab_size=2, decode=lambda block: "".join(pairs[i] for i in block), orders=(2,)
    )
    table = {row.name: row for row in found}
    assert list(table) == ["unigram", "2-gram", "gzip", "bz2", "xz", "primed xz"]
    assert table["unigram"].bits_per_character == pytest.approx(0.5, abs=1e-3)
    assert table["2-gram"].bits_per_character < 0.1
    assert table["gzip"].bits_per_character == compressed_bits("gzip", "abcd" * 8) / 32
    assert table["unigram"].stderr == pytest.approx(0, abs=1e-9)
    assert table["xz"].stderr is None


def test_without_training_text_each_half_is_scored_by_the_other():
    """If the halves share no tokens, the model of the other half predicts nothing; if they are equal, everything."""

    def letters(block):
        return "".join("abcd"[i] for i in block)

    unlike, alike = np.repeat(ids(0, 1, 2, 3), 8).reshape(4, 8), np.tile(ids(0, 0, 0, 0), 8).reshape(4, 8)
    options = {"vocab_size": 4, "decode": letters, "orders": (2,)}
    table = {row.name: row for row in measure_baselines(None, unlike, **options)}
    first, second = (
        measure_baselines(unlike[train], unlike[test], **options)[0].bits_per_character
        for train, test in ((slice(2, 4), slice(2)), (slice(2), slice(2, 4)))
    )
    assert table["unigram"].bits_per_character == pytest.approx((first + second) / 2)
    assert table["unigram"].bits_per_character > 2
    assert "the other half" in table["unigram"].detail
    table = {row.name: row for row in measure_baselines(None, alike, **options)}
    assert table["unigram"].bits_per_character < 0.2
    assert table["primed xz"].bits_per_character < table["xz"].bits_per_character
    assert [row.name for row in measure_baselines(None, alike[:1], **options)] == ["gzip", "bz2", "xz"]
    (twice,) = [row for row in measure_baselines(None, alike, characters=64, **options) if row.name == "gzip"]
    assert twice.bits_per_character == table["gzip"].bits_per_character / 2
