"""Regular expressions: the automaton matches what Python's `re` matches from beginning to end."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cedd.constraints import byte_automaton, regex
from cedd.constraints.byte_automaton import START, ByteAutomaton

LETTERS = "abA1_-. \né日"
CHARACTERS = st.sampled_from(
    [
        *("a", "b", "A", "1", "_", "-", r"\.", r"\n", r"\d", r"\w", r"\s", r"\W", ".", r"\x61", "é", "日", r"\u65e5"),
        *(r"\101", "[ab]", "[^a]", "[a-zé-]", r"[^\w\n]", "[]a]", r"[\]\-1]", "[A-a]", r"[\101-\103]"),
    ]
)
PATTERNS = st.recursive(
    CHARACTERS,
    lambda inner: st.one_of(
        st.lists(inner, min_size=2, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda options: f"(?:{'|'.join(options)})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{,2}", "{1,}", "*?", "{,}"])).map(
            lambda both: f"({both[0]}){both[1]}"
        ),
        inner.map(lambda each: f"(?i:{each})"),
    ),
    max_leaves=6,
)


def accepted(automaton: ByteAutomaton, choices: list[int], most: int = 12) -> bytes | None:
    """A text of the language: a walk by these choices, which stops at an accepting state once they are used up."""
    state, text, left = START, b"", list(choices)
    while len(text) < most:
        if automaton.accepting[state] and not left:
            return text
        bytes_ = [byte for byte in range(256) if automaton.table[state, byte]]
        if not bytes_:
            break
        byte = bytes_[(left.pop() if left else 0) % len(bytes_)]
        text, state = text + bytes([byte]), int(automaton.table[state, byte])
    return text if automaton.accepting[state] else None


@given(PATTERNS, st.lists(st.text(LETTERS, max_size=5), max_size=12), st.lists(st.integers(0, 255), max_size=8))
@settings(max_examples=150, deadline=None)
def test_matches_like_python_re(pattern, texts, choices):
    language, expected = regex(pattern), re.compile(pattern, re.ASCII)
    for text in texts:
        assert language.matches(text) == bool(expected.fullmatch(text)), (pattern, text)
    written = accepted(language.automaton, choices)
    if written is not None:
        assert expected.fullmatch(written.decode()), (pattern, written)


@pytest.mark.parametrize(
    ("pattern", "inside", "outside"),
    [
        ("^(a|b)$", ["a", "b"], ["ab", ""]),
        ("^a$|^b$", ["a", "b"], ["ab"]),
        ("(?s).", ["\n", "x", "😀"], ["", "xx"]),
        (".", ["x", "😀"], ["\n"]),
        ("(?i)ja", ["JA", "jA"], ["J"]),
        ("a(?#comment)*b", ["b", "aab"], ["a"]),
        ("(?P<year>[0-9]{4})", ["1999"], ["199"]),
        ("[^a]", ["é", "\U0010ffff", "\n"], ["a", "ab"]),
        ("", [""], ["a"]),
        (r"\d", ["1"], ["١"]),  # classes are ASCII
        ("a{0}", [""], ["a"]),
    ],
)
def test_regex_examples(pattern, inside, outside):
    language = regex(pattern)
    assert [text for text in inside if not language.matches(text)] == []
    assert [text for text in outside if language.matches(text)] == []


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("a(?=b)", "look-ahead"),
        ("a(?!b)", "look-ahead"),
        ("(?<=a)b", "look-behind"),
        ("(?<!a)b", "look-behind"),
        (r"(a)\1", "back-reference"),
        ("(?P<x>a)(?P=x)", "back-reference"),
        ("(a)?(?(1)b|c)", "condition"),
        ("(?>a)", "atomic"),
        ("a*+", "possessive"),
        (r"\bword\b", "word boundary"),
        ("a$b", "other than at the ends"),
        ("(^a)", "other than at the ends"),
        ("(?m)a", r"flag \(\?m\)"),
        ("(", "invalid regular expression"),
        ("a**", "invalid regular expression"),
        ("(" * 60 + "a" + ")" * 60, "nested groups"),
        ("a{20000}", "counts are at most"),
        (r"\ud800", "surrogate"),
        (r"[\ud800-\ue000]", "surrogate"),
        (3, "must be a string"),
    ],
)
def test_unsupported_patterns_give_one_line_errors(pattern, message):
    with pytest.raises(ValueError, match=message) as caught:
        regex(pattern)
    assert "\n" not in str(caught.value)


def test_oversized_expressions_are_rejected(monkeypatch):
    monkeypatch.setattr(byte_automaton, "MOST_STATES", 500)
    monkeypatch.setattr(byte_automaton, "MOST_NODES", 5000)
    with pytest.raises(ValueError, match="states; use smaller counts"):
        _ = regex("(a|b)*a(a|b){20}").automaton
    with pytest.raises(ValueError, match="parts; use smaller counts"):
        _ = regex("((a{100}){100}){100}").automaton


def test_empty_language_is_rejected():
    with pytest.raises(ValueError, match=r"no text satisfies the constraint regex\('\[\^"):
        _ = regex(r"[^\s\S]a").automaton
