import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from cedd.spelling.corruption import corrupt_letters, swap_letters


@given(
    text=st.text(st.characters(exclude_categories=["Cs"]), max_size=200),
    rate=st.floats(0, 1),
    seed=st.integers(0, 1000),
)
def test_letters_change_only_to_other_letters_of_same_case(text: str, rate: float, seed: int) -> None:
    result = corrupt_letters(text, rate, seed)
    assert result.original == text
    assert len(result.text) == len(text)
    changed = [i for i, (a, b) in enumerate(zip(text, result.text, strict=True)) if a != b]
    assert changed == result.positions.tolist()
    letters = [c for c in text if c.isascii() and c.isalpha()]
    assert len(changed) == round(rate * len(letters))
    for i in changed:
        assert text[i].isascii()
        assert result.text[i].isascii()
        assert text[i].isalpha()
        assert result.text[i].isalpha()
        assert text[i].islower() == result.text[i].islower()


@given(text=st.text("abcAB 1é", max_size=80), rate=st.floats(0, 1), seed=st.integers(0, 1000))
def test_only_different_letters_of_same_case_are_swapped(text: str, rate: float, seed: int) -> None:
    result = swap_letters(text, rate, seed)
    changed = [i for i, (a, b) in enumerate(zip(text, result.text, strict=True)) if a != b]
    assert changed == result.positions.tolist()
    for i, j in zip(changed[::2], changed[1::2], strict=True):
        assert j == i + 1
        assert result.text[i] + result.text[j] == text[j] + text[i]
        assert text[i : j + 1].isascii()
        assert text[i : j + 1].isalpha()
        assert text[i].islower() == text[j].islower()


def test_number_of_swaps_matches_rate() -> None:
    """2% of 5,000 pairs, except for the few that would share a letter with another."""
    assert 2 * 95 <= len(swap_letters("abcdef " * 1000, 0.02, 1).positions) <= 2 * 100
    assert swap_letters("aa b, c1", 1.0).text == "aa b, c1"
    with pytest.raises(ValueError, match="must be in"):
        swap_letters("text", 5)


@pytest.mark.parametrize("corrupt", [corrupt_letters, swap_letters])
def test_corruption_is_determined_by_seed(corrupt) -> None:
    text = "It was the best of times, it was the worst of times. " * 20
    assert corrupt(text, seed=1).text == corrupt(text, seed=1).text
    assert corrupt(text, seed=1).text != corrupt(text, seed=2).text


def test_places_and_letters_are_uniform() -> None:
    """Chi-squared, false alarm 1e-4 each; the seeds are fixed, so this either always passes or never."""
    text = "a" * 40
    places, letters = np.zeros(40), np.zeros(26)
    for seed in range(2000):
        result = corrupt_letters(text, 0.25, seed)
        places[result.positions] += 1
        for position in result.positions:
            letters[ord(result.text[position]) - ord("a")] += 1
    assert letters[0] == 0
    assert stats.chisquare(places).pvalue > 1e-4
    assert stats.chisquare(letters[1:]).pvalue > 1e-4


def test_other_alphabets_and_bad_input() -> None:
    assert set(corrupt_letters("яяяя", 1.0, letters=("яю",)).text) == {"ю"}
    with pytest.raises(ValueError, match="must be in"):
        corrupt_letters("text", 5)
    with pytest.raises(ValueError, match="two different letters"):
        corrupt_letters("text", letters=("a",))
