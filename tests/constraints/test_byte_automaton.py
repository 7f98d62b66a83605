"""Automata over bytes: minimal, canonical, closed under intersection and prefixing; UTF-8 ranges."""

import itertools
import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cedd.constraints import choice, intersect, length, regex
from cedd.constraints.byte_automaton import _equivalent, _equivalent_by_rows, utf8_ranges
from cedd.constraints.syntax import characters

WORDS = ["".join(letters) for count in range(5) for letters in itertools.product("abc", repeat=count)]


@given(st.integers(0, 0x10FFFF), st.integers(0, 0x10FFFF))
@settings(max_examples=60, deadline=None)
def test_utf8_ranges_cover_exactly_the_code_points(one, two):
    first, last = min(one, two), max(one, two)
    parts = characters([(first, last)]).ranges  # without surrogates, which UTF-8 cannot write
    ranges = [each for part in parts for each in utf8_ranges(*part)]
    counted = sum(math.prod(high - low + 1 for low, high in each) for each in ranges)
    assert counted == sum(high - low + 1 for low, high in parts)  # none is written twice, since those below are found
    for code in {first, last, (first + last) // 2, min(last, first + 63), max(first, last - 64)}:
        if not 0xD800 <= code <= 0xDFFF:
            content = chr(code).encode()
            alike = [each for each in ranges if len(each) == len(content)]
            fits = [all(low <= b <= high for b, (low, high) in zip(content, each, strict=True)) for each in alike]
            assert sum(fits) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [("(a|b)*", "(a*b*)*"), ("aa*", "a+"), ("a|ab|abb", "ab{0,2}"), ("(ab)*a", "a(ba)*"), ("[ab]{2}", "aa|ab|ba|bb")],
)
def test_equal_languages_have_equal_automata(one, other):
    assert regex(one).automaton.fingerprint == regex(other).automaton.fingerprint
    assert regex(one).automaton.fingerprint != regex(one + "c").automaton.fingerprint


def test_sizes_are_minimal():
    # By hand: the residuals of the language, and the dead state.
    assert len(regex("a{3}").automaton) == 5
    assert len(regex("(a|b)*a(a|b){3}").automaton) == 17
    assert len(choice(["car", "bar", "cat", "bat"]).automaton) == 5
    assert len(regex("(?s).*").automaton) == 9  # one, and after each first byte of two, three or four, by its range


@given(
    st.sampled_from(["a*b*", "(ab|c)*", ".*c", "[^a]{1,3}", "(a|bc)+"]), st.sampled_from(["a+", ".{2,3}", "(b|c).*"])
)
@settings(deadline=None)
def test_intersection(one, other):
    both = regex(one).automaton.intersect(regex(other).automaton)
    for word in WORDS:
        assert both.matches(word.encode()) == bool(re.fullmatch(one, word) and re.fullmatch(other, word))


def test_empty_intersection_is_refused_when_it_is_compiled():
    with pytest.raises(ValueError, match=r"no text satisfies the constraint intersect\(regex\('a'\), regex\('b'\)\)"):
        _ = intersect(regex("a"), regex("b")).automaton


def test_texts_after_a_prefix():
    automaton = regex("(a|é)*b").automaton.after(b" x")
    for text, inside in ((" xb", True), (" xaéb", True), ("b", False), (" b", False), (" x", False), ("x xb", False)):
        assert automaton.matches(text.encode()) == inside
    assert regex("a").automaton.after(b"").fingerprint == regex("a").automaton.fingerprint


def test_lengths_are_in_characters():
    language = length(1, 2)
    for text, inside in (("", False), ("é", True), ("😀日", True), ("abc", False), ("\n", True)):
        assert language.matches(text) == inside
    assert length(2).matches("ab" * 50)
    assert not length(2).matches("a")


@pytest.mark.parametrize("bounds", [(3, 1), (-1, 2), (2.5,), (1, 2.5)])
def test_lengths_are_ordered_integers(bounds):
    with pytest.raises(ValueError, match="a length needs integers 0 <= least <= most"):
        length(*bounds)


def test_choices():
    language = choice(["yes", "no", "ne rien", ""])
    assert [text for text in ("yes", "no", "ne rien", "", "ye", "noo") if language.matches(text)] == [
        *("yes", "no", "ne rien", "")
    ]
    with pytest.raises(ValueError, match="must be a list of strings"):
        choice("yes")
    with pytest.raises(ValueError, match="non-empty list of strings"):
        choice([])
    with pytest.raises(ValueError, match="lone surrogate"):
        choice(["\ud800"])


@pytest.mark.parametrize(("least", "most"), [(-1, 2), (3, 2)])
def test_lengths_are_checked(least, most):
    with pytest.raises(ValueError, match="0 <= least <= most"):
        length(least, most)


def test_only_languages_are_intersected():
    with pytest.raises(ValueError, match="intersect takes languages"):
        intersect("a")  # type: ignore[arg-type]


def test_refinement_by_hashes_is_that_by_rows():
    for pattern in ("(a|b)*a(a|b){4}", "[a-m]{3}|[k-z]{2}é?", "(?s).*(cat|dog).*"):
        automaton = regex(pattern).automaton
        by_hash = _equivalent(automaton.table, automaton.accepting)
        by_rows = _equivalent_by_rows(automaton.table, automaton.accepting)
        assert len(set(by_hash.tolist())) == len(set(by_rows.tolist())) == len(automaton)
