"""Automata over tokens: they match the token sequences whose text is in the language."""

import itertools
import json

import numpy as np
import pytest

from cedd.constraints import ByteAutomaton, TokenTexts, choice, compile_tokens, regex, token_automaton
from cedd.data.text import never_written
from cedd.data.tokenizers import (
    BERTTokenizer,
    BPETokenizer,
    ByteTokenizer,
    CharAsGPT2,
    CharTokenizer,
    IdTokenizer,
    JSONTokenizer,
    PaddedTokenizer,
    Tokenizer,
)

PATTERNS = ("[ab]*", "(ab|é)+", ".{2,3}", "(?s).*b.*", "a b|b.", r"\d+( \d+)*", "(?i)AB?", r"(a|b)*\.")
WORDPIECES = (
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "a",
    "b",
    "##a",
    "##b",
    ".",
    "é",
    "##é",
    "1",
    "12",
    "[unused]",
)


def bpe() -> BPETokenizer:
    return BPETokenizer.train(["ab ab éa b. ab 12 é é ab aab b"] * 20, 270)


def llama() -> JSONTokenizer:
    """Pieces with ▁ for spaces, and named byte tokens; the first space of a text is not written."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    pieces = ["<unk>", "<s>", "</s>", "<0x0A>", "<0xC3>", "<0xA9>", "▁", "a", "b", "▁a", "▁b", "ab", "é", "1", "12"]
    made = Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace("▁", "first")
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(parts)
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return JSONTokenizer(json.loads(made.to_str()), 16, "llama", stops=[2])


def byte_level() -> JSONTokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    pieces = ["Ġ", "a", "b", "Ġa", "ab", "Ã", "©", "1", "2", "Ċ", "."]
    made = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens(["<s>", "</s>"])
    made.add_tokens(["é b"])
    return JSONTokenizer(json.loads(made.to_str()), 15, "bytes", stops=[12])


TOKENIZERS = {
    "char": lambda: CharTokenizer("ab .é1"),
    "unknown": lambda: CharTokenizer("ab .é1", unknown="\N{REPLACEMENT CHARACTER}"),
    "gpt2-char": lambda: CharAsGPT2({"a": 2, "b": 5, " ": 0, "é": 6}, vocab_size=8),
    "bert": lambda: BERTTokenizer(WORDPIECES),
    "ids": lambda: IdTokenizer(6),
    "llama": llama,
    "byte-level": byte_level,
    "padded": lambda: PaddedTokenizer(CharTokenizer("ab é")),
    "padded-bert": lambda: PaddedTokenizer(BERTTokenizer(WORDPIECES)),
}


def few_tokens(tokenizer: Tokenizer) -> list[int]:
    return list(range(min(tokenizer.vocab_size, 16)))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "padded-bert" else ()) for name in TOKENIZERS]
)
def test_matches_exactly_token_sequences_whose_text_matches(name):
    tokenizer = TOKENIZERS[name]()
    tokens, ends = few_tokens(tokenizer), set(tokenizer.texts.ends)
    special = {i for i, content in enumerate(tokenizer.texts.contents) if content is None}
    inside = {i for i, content in enumerate(tokenizer.texts.beginnings or ()) if content is None} - special
    texts = dict[tuple[int, ...], str | None]()
    for ids in itertools.chain.from_iterable(itertools.product(tokens, repeat=length) for length in range(4)):
        text = tokenizer.decode(ids, mask=None)
        allowed = not special & set(ids) and not (ids and ids[0] in inside)
        texts[ids] = text if allowed and "\N{REPLACEMENT CHARACTER}" not in text else None
    for pattern in PATTERNS:
        language = regex(pattern)
        exact = compile_tokens(language.automaton, tokenizer.texts, may_end=False)
        ending = compile_tokens(language.automaton, tokenizer.texts, may_end=True)
        for ids, text in texts.items():
            expected = text is not None and language.matches(text)
            assert exact.matches(ids) == expected, (pattern, ids)
            end = next((place for place, token in enumerate(ids) if token in ends), None)
            if end is not None:
                expected = exact.matches(ids[:end])
            assert ending.matches(ids) == expected, (pattern, ids)


def test_byte_tokens_match_encoded_texts():
    texts = ByteTokenizer().texts
    language = regex("[aé]{1,2}")
    automaton = compile_tokens(language.automaton, texts, may_end=True)
    for content in (b"a", "é".encode(), "aé".encode(), "éé".encode(), b"", b"aaa", "é".encode()[:1], "é".encode()[1:]):
        try:
            expected = language.matches(content.decode())
        except UnicodeDecodeError:
            expected = False
        assert automaton.matches(list(content)) == expected, content


def test_byte_level_bpe_allows_every_tokenization():
    tokenizer = bpe()
    ids = {content: token for token, content in enumerate(tokenizer.token_bytes)}
    assert b"ab" in ids
    assert b" ab" in ids
    automaton = compile_tokens(choice(["ab ab", "é"]).automaton, tokenizer.texts, may_end=True)
    a, b, space, end = (ids[each] for each in (b"a", b"b", b" ", b"<|endoftext|>"))
    for way in ([a, b, space, a, b], [ids[b"ab"], ids[b" ab"]], [a, b, ids[b" ab"]], [ids[b"ab"], space, ids[b"ab"]]):
        assert automaton.matches(way)
        assert automaton.matches([*way, end, a, end, b])
        assert not automaton.matches([*way, a])
        assert not automaton.matches(way[:-1])
    assert automaton.matches(list(tokenizer.encode("é")))
    assert not automaton.matches([end])
    assert end in never_written(tokenizer)  # as text; after the text's end it may be written


def test_tokens_with_equal_transitions_share_class():
    tokenizer = CharTokenizer("abcdefgh.")
    automaton = compile_tokens(regex(r"[a-g]{0,5}\.").automaton, tokenizer.texts, may_end=False)
    assert automaton.num_classes == 3  # letters, h and the point
    assert len(set(automaton.classes[tokenizer.encode("abcdefg")].tolist())) == 1
    assert automaton.num_states == 7
    assert len(automaton.transitions.source) == 5 + 6


def test_only_states_that_lead_to_acceptance_are_kept():
    """The tokenizer cannot write the last letter of one choice."""
    tokenizer = CharTokenizer("abc")
    automaton = compile_tokens(choice(["abcd", "ab"]).automaton, tokenizer.texts, may_end=False)
    assert automaton.num_states == 3
    nothing = compile_tokens(choice(["d"]).automaton, tokenizer.texts, may_end=False)
    assert nothing.lengths(5) == []
    assert not nothing.matches([0])
    assert not nothing.matches([])


def test_possible_lengths_in_tokens():
    tokenizer = CharTokenizer("ab")
    assert compile_tokens(regex("(aab)*b?").automaton, tokenizer.texts, may_end=False).lengths(7) == [0, 1, 3, 4, 6, 7]
    padded = PaddedTokenizer(tokenizer)
    assert compile_tokens(regex("a{3}").automaton, padded.texts, may_end=True).lengths(6) == [3, 4, 5, 6]
    assert compile_tokens(regex("a{3}").automaton, padded.texts, may_end=False).lengths(6) == [3]


@pytest.mark.parametrize(
    ("pattern", "infinite"), [("a*", True), ("(ab|b){0,5}", False), ("a|ab+", True), ("", False), ("c+", False)]
)
def test_is_infinite_for_languages_without_longest_text(pattern, infinite):
    assert compile_tokens(regex(pattern).automaton, CharTokenizer("ab").texts, may_end=False).is_infinite == infinite


def test_compilation_in_parts_gives_same_automaton(monkeypatch):
    texts, language = bpe().texts, regex("(?s).{0,40}").automaton
    whole = compile_tokens(language, texts, may_end=True)
    monkeypatch.setattr("cedd.constraints.token_automaton.PAIRS_AT_ONCE", 100)
    parts = compile_tokens(language, texts, may_end=True)
    assert sorted(map(sorted, grouped(whole.classes))) == sorted(map(sorted, grouped(parts.classes)))
    assert whole.num_states == parts.num_states
    assert len(whole.transitions.source) == len(parts.transitions.source)


def test_tokens_that_no_state_distinguishes_are_followed_once(monkeypatch):
    """From each state, all letters lead to the same next state, so only a token's length matters."""
    words = [bytes(word) for n in (1, 2, 3) for word in itertools.product(b"abcdefgh", repeat=n)]
    given = list[int]()
    walk = token_automaton._walk
    monkeypatch.setattr(
        token_automaton, "_walk", lambda a, contents, s: given.append(len(contents)) or walk(a, contents, s)
    )
    automaton = compile_tokens(regex("[a-h]{0,1000}").automaton, TokenTexts(words), may_end=False)
    assert given == [3]
    assert automaton.matches([0, 100, 500])


def test_every_byte_may_be_in_a_text():
    table = np.array([[0] * 256, [1] * 256], dtype=np.int32)
    texts = TokenTexts([bytes([byte]) for byte in range(256)])
    automaton = compile_tokens(ByteAutomaton(table, np.array([False, True])), texts, may_end=False)
    assert automaton.matches([0, 97, 255])


def grouped(classes: np.ndarray) -> list[list[int]]:
    return [np.flatnonzero(classes == label).tolist() for label in np.unique(classes)]


def test_too_many_transitions_are_rejected(monkeypatch):
    monkeypatch.setattr("cedd.constraints.token_automaton.MOST_TRANSITIONS", 100)
    with pytest.raises(ValueError, match="more than 100 transitions between tokens; shorten its counts"):
        compile_tokens(regex("[ab]{0,200}").automaton, CharTokenizer("ab").texts, may_end=False)


def test_token_texts_have_distinct_fingerprints():
    texts = [
        TokenTexts([b"a", b"b"]),
        TokenTexts([b"ab", b""]),
        TokenTexts([b"a", None]),
        TokenTexts([b"a", b"b"], [b"a", b"b"]),
        TokenTexts([b"a", b"b"], None, (1,)),
    ]
    assert len({each.fingerprint for each in texts}) == len(texts)
    assert TokenTexts([b"a", b"b"]).fingerprint == texts[0].fingerprint
