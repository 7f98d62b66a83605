"""Automata over bytes: minimal, canonical, closed under intersection and prefixing; UTF-8 ranges."""

import itertools
import math
import re
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cedd.constraints import choice, intersect, json_schema, length, regex
from cedd.constraints.byte_automaton import _equivalent, utf8_ranges
from cedd.constraints.syntax import characters, least_bytes

WORDS = ["".join(letters) for count in range(5) for letters in itertools.product("abc", repeat=count)]


@given(st.integers(0, 0x10FFFF), st.integers(0, 0x10FFFF))
@settings(max_examples=60, deadline=None)
def test_utf8_ranges_cover_exactly_given_code_points(one, two):
    first, last = min(one, two), max(one, two)
    parts = characters([(first, last)]).ranges  # without surrogates, which UTF-8 cannot encode
    ranges = [each for part in parts for each in utf8_ranges(*part)]
    counted = sum(math.prod(high - low + 1 for low, high in each) for each in ranges)
    assert counted == sum(high - low + 1 for low, high in parts)  # none is covered twice, since those below are found
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
    assert len(regex("(?s).*").automaton) == 9  # one, and after each first byte of 2, 3 or 4, by its range


@given(
    st.sampled_from(["a*b*", "(ab|c)*", ".*c", "[^a]{1,3}", "(a|bc)+"]), st.sampled_from(["a+", ".{2,3}", "(b|c).*"])
)
@settings(deadline=None)
def test_intersection_matches_texts_of_both(one, other):
    both = regex(one).automaton.intersect(regex(other).automaton)
    for word in WORDS:
        assert both.matches(word.encode()) == bool(re.fullmatch(one, word) and re.fullmatch(other, word))


def test_empty_intersection_is_rejected_at_compilation():
    with pytest.raises(ValueError, match=r"no text satisfies the constraint intersect\(regex\('a'\), regex\('b'\)\)"):
        _ = intersect(regex("a"), regex("b")).automaton


def test_automaton_after_prefix():
    automaton = regex("(a|é)*b").automaton.after(b" x")
    for text, inside in ((" xb", True), (" xaéb", True), ("b", False), (" b", False), (" x", False), ("x xb", False)):
        assert automaton.matches(text.encode()) == inside
    assert regex("a").automaton.after(b"").fingerprint == regex("a").automaton.fingerprint


def test_lengths_count_characters():
    language = length(1, 2)
    for text, inside in (("", False), ("é", True), ("😀日", True), ("abc", False), ("\n", True)):
        assert language.matches(text) == inside
    assert length(2).matches("ab" * 50)
    assert not length(2).matches("a")


@pytest.mark.parametrize("bounds", [(3, 1), (-1, 2), (2.5,), (1, 2.5)])
def test_lengths_must_be_ordered_integers(bounds):
    with pytest.raises(ValueError, match="a length needs integers 0 <= least <= most"):
        length(*bounds)


def test_choice_matches_its_texts():
    language = choice(["yes", "no", "ne rien", ""])
    assert [text for text in ("yes", "no", "ne rien", "", "ye", "noo") if language.matches(text)] == [
        *("yes", "no", "ne rien", "")
    ]
    with pytest.raises(ValueError, match="must be a list of strings"):
        choice("yes")
    with pytest.raises(ValueError, match="non-empty list of strings"):
        choice([])
    with pytest.raises(ValueError, match=r"the choices must be a non-empty list of strings \(got 3\)"):
        choice(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="lone surrogate"):
        choice(["\ud800"])


def test_intersect_rejects_non_languages():
    with pytest.raises(ValueError, match="intersect takes languages"):
        intersect("a")  # type: ignore[arg-type]


def classes_by_rows(table, accepting):
    """Moore's refinement, by whole rows."""
    block, count = accepting.astype(np.int64), 0
    while True:
        found, block = np.unique(np.concatenate([block[:, None], block[table]], 1), axis=0, return_inverse=True)
        if len(found) == count:
            return block.reshape(-1)
        count = len(found)


@given(
    st.integers(2, 40),
    st.integers(1, 4),
    st.integers(1, 40),
    st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    st.integers(0, 999),
)
@settings(max_examples=200, deadline=None)
def test_equivalent_states_match_refinement_by_rows(states, columns, reach, share, seed):
    rng = np.random.default_rng(seed)
    table = np.minimum(rng.integers(0, reach, (states, columns)) + seed % 2 * np.arange(states)[:, None], states - 1)
    accepting = rng.random(states) < share
    found, expected = _equivalent(table.astype(np.int32), accepting), classes_by_rows(table, accepting)
    same = set(zip(found.tolist(), expected.tolist(), strict=True))
    assert len(same) == len(set(found.tolist())) == len(set(expected.tolist()))


@pytest.mark.parametrize(
    ("language", "states"),
    [
        (regex("(ab ){4000}"), 12_002),
        pytest.param(regex("a{0,10000}"), 10_002, marks=pytest.mark.slow),
        pytest.param(json_schema({"type": "string", "maxLength": 1000}), 14_004, marks=pytest.mark.slow),
        (json_schema({"type": "string", "maxLength": 100}), 1404),
        (regex("((a{10}){10}){10}"), 1002),
    ],
)
def test_long_texts_are_compiled_in_seconds(language, states):
    """A refinement of all states in each round takes a minute for the first."""
    start = time.process_time()
    assert len(language.automaton) == states
    assert time.process_time() - start < 15


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("((a{0,100}){0,100}){0,100}", "too many ways"),
        ("((((a{30}){30}){30}){30}){30}", "more than 20,000 states"),
        ("(a{500}){500}", "more than 200,000 parts"),
        ("(a|b)*a(a|b){20}", "more than 20,000 states"),
        ("a|" * 20_000, "at most 20,000 characters"),
        pytest.param(".{9000}", "more than 20,000 states", marks=pytest.mark.slow),
    ],
)
def test_oversized_patterns_are_rejected_quickly(pattern, message):
    start = time.process_time()
    with pytest.raises(ValueError, match=message):
        _ = regex(pattern).automaton
    assert time.process_time() - start < 10


@pytest.mark.parametrize(
    ("language", "least"),
    [
        (regex("a{3}(b|é){2,}"), 5),
        (regex("(é|日)x*"), 2),
        (json_schema({"type": "array", "items": {"type": "null"}, "minItems": 2}), len("[null,null]")),
        (json_schema({"properties": {"a": {"type": "null"}, "b": {"type": "null"}}, "required": ["b"]}), 10),
        (intersect(regex("a+"), regex(".{4}")), 4),
        (regex("[^\\s\\S]|a{2}"), 2),
    ],
)
def test_length_of_shortest_text(language, least):
    assert least_bytes(language.expression) == least
