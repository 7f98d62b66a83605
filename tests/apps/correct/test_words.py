"""Word correction: tokens and case, the noise model, candidates, the lexicon's file, decisions."""

import itertools
import math
import os
import subprocess
import sys
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cedd.apps.correct import candidates, channel, decisions
from cedd.apps.correct import reader as reader_module
from cedd.apps.correct.candidates import (
    ENDINGS,
    Neighbours,
    RoughCosts,
    homophones,
    inflections,
    ones,
    rough_log_channel,
    same_without_a_letter,
)
from cedd.apps.correct.channel import Channel, alignment, learn_edits
from cedd.apps.correct.decisions import decide
from cedd.apps.correct.forms import FORMS, FORMS_KEPT, is_derived, same_word, sound, sounds, variant
from cedd.apps.correct.known_words import DICTIONARY, KINDS, LARGE, TECHNICAL, load_known_words, save_known_words
from cedd.apps.correct.lexicon import Lexicon, gram_table, hashes, load_lexicon, save_lexicon
from cedd.apps.correct.reader import Reader, TokenizedText
from cedd.apps.correct.suspects import FEATURES, Option, Suspect, is_accepted
from cedd.apps.correct.word_by_word import word_by_word
from cedd.apps.correct.words import LONGEST, acronyms, like, tokens_of

WORDS = [
    ".",
    ",",
    "#",
    "the",
    "a",
    "of",
    "and",
    "to",
    "letter",
    "received",
    "he",
    "was",
    "in",
    "government",
    "cat",
    "sat",
    "on",
    "mat",
    "together",
    "lot",
    "house",
    "home",
    "went",
]
SENTENCES = (
    ". he received the letter .",
    ". the cat sat on the mat .",
    ". he went to the government .",
    ". he was in the house .",
    ". he went home .",
    ". a lot of the government .",
    ". the cat and the mat together .",
)
PAIRS = [("recieved", "received"), ("hoem", "home"), ("leter", "letter"), ("goverment", "government"), ("teh", "the")]
PAIRS += [("lettter", "letter"), ("lettar", "letter")]


@pytest.fixture(scope="module")
def lexicon():
    """A lexicon counted on a few sentences."""
    index = {word: number for number, word in enumerate(WORDS)}
    counts = np.full(len(WORDS), 60_000)
    grams: dict[tuple[int, ...], int] = {}
    for sentence in SENTENCES:
        numbers = [index[word] for word in sentence.split()]
        for size in (2, 3):
            for start in range(len(numbers) - size + 1):
                gram = tuple(numbers[start : start + size])
                grams[gram] = grams.get(gram, 0) + 15_000
    twos, threes = ([g for g in grams if len(g) == size] for size in (2, 3))
    h = np.concatenate([hashes(np.array(twos)), hashes(np.array(threes))])
    table = gram_table(h, np.array([grams[g] for g in twos + threes]), 200)
    channel = Channel(learn_edits([(*pair, 1.0) for pair in PAIRS], least=1.0))
    weights = {"channel": 0.8, "context": 0.5, "kept": 3.0, "kept rare capital": 9.0}
    weights |= {"split": -2.0, "kept unknown": -5.0, "kept acronym": 9.0}
    rows = {"alone": weights, "network": weights}
    assert weights.keys() <= set(FEATURES)
    V = len(WORDS)
    return Lexicon(list(WORDS), np.log(counts), np.zeros(V, bool), np.full(V, 0.5), table, channel, rows)


def corrected(lexicon, text, **options):
    made = text
    for one in reversed(decide(Reader(lexicon), text, 0.5, **options)):
        made = made[: one.start] + one.text + made[one.stop :] if one.accepted else made
    return made


# ---- kinds of edits ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("he recieved the letter.", "he received the letter."),  # swapped
        ("he received the leter.", "he received the letter."),  # missing
        ("he received the lettter.", "he received the letter."),  # extra
        ("he received the lettar.", "he received the letter."),  # replaced
        ("he received theletter.", "he received the letter."),  # joined
        ("the cat and the mat to gether.", "the cat and the mat together."),  # split
        ("Teh cat sat on teh mat.", "The cat sat on the mat."),
        ("HE RECIEVED THE LETER.", "HE RECEIVED THE LETTER."),
        ("he recieved, the\r\nleter\u00a0\u2014 hoem.", "he received, the\r\nletter\u00a0\u2014 home."),
    ],
)
def test_every_kind_of_edit_is_corrected(lexicon, written, meant):
    assert corrected(lexicon, written) == meant
    assert corrected(lexicon, meant) == meant


@pytest.mark.parametrize(
    "text",
    [
        "he went to leter.com and me@leter and leter_x and leter9",
        "he received `leter` and leter() and leter[x] and $leter",
        "he went to the Leterman of the house",  # a name
        "he received the naïve lettér",
        "he received the LETER in the house",  # an acronym
        "he received the lEter",
        "x" * 5000,
        "",
        "he received the letter\n```\nhe received the leter\n```\n",
        "he went home\n\n~~~~ text\nhe received the leter\n~~~\nthe leter\n~~~~\n",
        "he went home\n```\nhe received the leter\r\n",  # unclosed
        "he received `the leter and the` letter, ``the leter of the`` house",
        "he received <a class='the leter and'>the letter</a>",
        "he received {{ the leter }} and {% the leter of %}",
        "he went home\n  $ the leter and the letter\n",
        "he received --leter and the letter",
    ],
)
def test_code_names_and_unusual_words_are_unchanged(lexicon, text):
    assert corrected(lexicon, text) == text


@pytest.mark.parametrize(
    "text",
    [
        "`he received the leter,' he went, `and the letter'",  # quotations
        "he went home\n```\ncode\n```\nhe received the leter\n```\ncode\n```\n",
        "```\nhe received the leter\n``` text\ncode\n```\n",  # the text starts inside a code block
        "he < the house and the leter > home",
        "the house--leter",
        "he went to the house. A $ of the leter",
    ],
)
def test_words_next_to_code_are_corrected(lexicon, text):
    assert corrected(lexicon, text) == text.replace("leter", "letter")


@pytest.mark.parametrize(
    ("text", "ignored"),
    [
        ("he received the leter", "leter"),
        ("the cat and the mat to gether", "gether"),  # and not to be joined
        ("he received the Leter-hoem", "leter-hoem"),
    ],
)
def test_ignored_words_are_not_changed(lexicon, text, ignored):
    def by_words(ignored):
        return word_by_word(Reader(lexicon), text, None, threshold=0.5, ignored=ignored)

    assert by_words([ignored]) == text != by_words([])
    with pytest.raises(TypeError, match="list of texts"):
        by_words(ignored)  # whose letters would be ignored


def test_other_language_is_unchanged(lexicon):
    """Even if it contains some words of the lexicon."""
    foreign = "lecter was hlecht und cattus in domo leter on mattus en huis a sattu hoem " * 3
    assert corrected(lexicon, foreign) == foreign


def test_text_with_many_errors_is_not_taken_for_other_language(lexicon, monkeypatch):
    """Also if some of the errors are in the lexicon, as names are, in contexts that the corpus does not have."""
    monkeypatch.setattr("cedd.apps.correct.reader.CONFUSED", len(WORDS))
    rare = ["hoem", "catt", "leter"]
    weights = lexicon.weights["alone"] | {"kept unknown": 0.0, "kept rare": -9.0}
    more = replace(
        lexicon,
        weights={"alone": weights},
        words=[*WORDS, *rare],
        log_counts=np.append(lexicon.log_counts, np.full(len(rare), 2.0)),
        named=np.zeros(len(WORDS) + len(rare), bool),
        left=np.full(len(WORDS) + len(rare), 0.5),
    )
    written = "he recieved the leter. teh catt and the mat togehter. he wnet to the goverment. he went hoem."
    assert corrected(more, written) == (
        "he received the letter. the cat and the mat together. he went to the government. he went home."
    )


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from([*WORDS, "leter", "zqxjkv", "und", "naïvement"]), min_size=1, max_size=40))
def test_english_evidence_is_mean_around_every_token(lexicon, words):
    tokens = tokens_of(" ".join(words).replace("#", "9"))
    reach, (low, high) = reader_module.LANGUAGE_REACH, reader_module.EVIDENCE
    found = Reader(lexicon).english(tokens, lexicon.numbers([token.key for token in tokens]))
    known = math.log(60_000 / lexicon.total) + reader_module.END
    for place, value in enumerate(found):
        near = [t.key for t in tokens[max(0, place - reach) : place + reach + 1] if t.key.isalpha() and t.key != "a"]
        if "leter" not in near:
            of = [
                low if key not in lexicon.index else high if len(key) > 2 else known + reader_module.LETTER * len(key)
                for key in near
            ]
            assert value == pytest.approx((reader_module.PRIOR_EVIDENCE + sum(of)) / max(1, len(near)))


def test_misspelling_is_evidence_for_english_and_foreign_word_against(lexicon):
    reader = Reader(lexicon)

    def evidence(word, number=reader_module.UNKNOWN):
        return reader.word_evidence(tokens_of(word)[0], number)

    assert evidence("leter") > reader_module.ENGLISH["rare"] > 0 > evidence("nicht") == evidence("zqxjkvw")
    assert evidence("the", WORDS.index("the")) > reader_module.ENGLISH["rare"]
    assert Reader(replace(lexicon, known={"zqxjkvw": TECHNICAL})).word_evidence(tokens_of("zqxjkvw")[0], -1) > 0


@pytest.mark.parametrize(("text", "counted"), [("leter", 1), ("he met Zqxjkv", 2), ("`zqxjkv` leter", 1), ("9 . ,", 0)])
def test_names_and_code_do_not_count_as_evidence(lexicon, monkeypatch, text, counted):
    seen = []
    monkeypatch.setattr(Reader, "word_evidence", lambda self, token, number: seen.append(token.key) or 5.0)
    tokens = tokens_of(text)
    Reader(lexicon).english(tokens, lexicon.numbers([token.key for token in tokens]))
    assert len(seen) == counted


def test_network_decides_undecided_words(lexicon):
    """It scores the most probable options in the text, and its scores change the decision."""
    asked = []

    def likes(word):
        def scores(text, spans):
            asked.extend(text[:start] + new + text[stop:] for start, stop, new in spans)
            return np.array([[10.0 * (new == word), 1.0] for _, _, new in spans])

        return scores

    alone, network = lexicon.weights["alone"] | {"kept": 12.5}, lexicon.weights["network"] | {"network": 5.0}
    unsure = replace(lexicon, weights={"alone": alone, "network": network})
    text = "he received the leter."
    assert corrected(unsure, text, likelihoods=likes("letter")) == "he received the letter."
    assert corrected(unsure, text, likelihoods=likes("leter")) == text
    assert "he received the letter." in asked


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from([*WORDS[3:], "leter", "hoem", "Teh", "to gether", "9", "\r\n", ". "]), max_size=12))
def test_changes_do_not_overlap_and_repeated_correction_is_stable(lexicon, words):
    text = " ".join(words)
    made = [one for one in decide(Reader(lexicon), text, 0.5) if one.accepted]
    assert all(first.stop <= second.start for first, second in itertools.pairwise(made))
    assert all(text[one.start : one.stop] != one.text for one in made)
    assert all(0 <= p <= 1 for one in made for _, p in one.candidates)
    once = corrected(lexicon, text)
    assert corrected(lexicon, once) == corrected(lexicon, corrected(lexicon, once))


# ---- parts --------------------------------------------------------------------------------------------------------


def slow_distance(a, b):
    cost = {(i, 0): i for i in range(len(a) + 1)} | {(0, j): j for j in range(len(b) + 1)}
    for i, j in itertools.product(range(1, len(a) + 1), range(1, len(b) + 1)):
        cost[i, j] = min(cost[i - 1, j] + 1, cost[i, j - 1] + 1, cost[i - 1, j - 1] + (a[i - 1] != b[j - 1]))
        if i > 1 and j > 1 and a[i - 2 : i] == b[j - 2 : j][::-1]:
            cost[i, j] = min(cost[i, j], cost[i - 2, j - 2] + 1)
    return cost[len(a), len(b)]


letters = st.text("abc", min_size=1, max_size=6)


def coded(words):
    """Letters as numbers, [N, width], and lengths."""
    rows = np.zeros((len(words), max(map(len, words))), np.uint8)
    for row, word in enumerate(words):
        rows[row, : len(word)] = [ord(c) - ord("a") + 1 for c in word]
    return rows, np.array([len(word) for word in words], np.int8)


@settings(max_examples=50, deadline=None)
@given(st.lists(letters, min_size=1, max_size=6), letters)
def test_rough_probability_with_equal_costs_is_edit_distance(words, written):
    same = RoughCosts(1 - np.eye(28, dtype=np.float32), doubled=1.0, undoubled=1.0, swapped=1.0)
    found = rough_log_channel(*coded(words), coded([written])[0][0], same)
    assert (-found).tolist() == [slow_distance(word, written) for word in words]


@settings(max_examples=50, deadline=None)
@given(st.lists(letters, min_size=1, max_size=9, unique=True))
def test_words_equal_without_one_letter_are_confused(words):
    without = [{word, *(word[:i] + word[i + 1 :] for i in range(len(word) if len(word) > 1 else 0))} for word in words]
    wanted = {(i, j) for i, j in itertools.permutations(range(len(words)), 2) if without[i] & without[j]}
    assert {divmod(pair, len(words)) for pair in same_without_a_letter(*coded(words)).tolist()} == wanted


def spelt(words):
    """A lexicon of words without counts."""
    flat = np.ones(len(words))
    return Lexicon(words, flat, flat > 1, flat, np.zeros((1, 8), np.uint16), Channel({}), {})


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text(st.sampled_from("abé'"), min_size=1, max_size=26), min_size=1, max_size=9, unique=True))
def test_letters_of_words_are_encoded_in_rows(words):
    """Words with other characters, or longer than LONGEST, have only zeros."""
    found = Neighbours(spelt(words)).letters
    codes = {"a": 1, "b": 2, "'": 27}
    for row, word in zip(found.tolist(), words, strict=True):
        coded = [codes[c] for c in word] if set(word) <= codes.keys() and len(word) <= LONGEST else []
        assert row == coded + [0] * (LONGEST - len(coded))


@given(st.lists(letters, min_size=1, max_size=9, unique=True))
def test_letter_surprise_is_that_of_trigrams(words):
    counts = np.full((28, 28, 28), 0.5)
    for word in words:
        code = [0, 0, *(ord(c) - 96 if c != "'" else 27 for c in word), 0]
        for a, b, c in zip(code, code[1:], code[2:], strict=False):
            counts[a, b, c] += 1
    expected = -np.log(counts / counts.sum(-1, keepdims=True))
    np.testing.assert_allclose(Neighbours(spelt(words)).letter_surprise, expected)


def test_decision_between_limits_is_undecided():
    """Decided if it is almost certainly right or one option almost certainly meant; undecided if two are likely."""
    right, almost, meant, unclear = [0.98, 0.02], [0.96, 0.04], [0.04, 0.96], [0.04, 0.48, 0.48]
    assert [decisions.is_undecided(np.array(p)) for p in (right, almost, meant, unclear)] == [False, True, False, True]


SPELT = ["might", "mite", "meet", "met", "walk", "walked", "live", "lived", "living", "occasional", "occasionally"]
SPELT += ["go", "goes", "john", "john's", "right", "write", "which", "witch", "night", "knight", "cat", "cats"]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from(SPELT), min_size=1, unique=True))
def test_homophones_and_inflections_are_confused(words):
    """Compared with a search over all pairs."""
    pairs = list(itertools.combinations(range(len(words)), 2))
    heard = {(i, j) for i, j in pairs if sound(words[i]) == sound(words[j])}
    ended = {
        frozenset(pair)
        for pair in pairs
        for one, other in (pair, pair[::-1])
        if any(words[one] + ending == words[other] for ending in ENDINGS)
    }
    assert set(homophones(words)) == heard
    assert {frozenset(pair) for pair in inflections(words)} == ended


def test_sounds_of_many_words_match_single_words(lexicon):
    words = [*lexicon.words, "knight", "lamb", "lambs", "o'clock", "aardvark", "a", "why", "accommodation", "ghost"]
    assert sounds(words) == [sound(word) for word in words]
    assert sounds([]) == []


def test_homophones_are_confused_in_both_directions(lexicon):
    both = replace(lexicon, words=[*WORDS[:-2], "might", "mite"])
    first, other = Neighbours(both).confused
    for one, another in itertools.permutations((len(WORDS) - 2, len(WORDS) - 1)):
        assert another in other[first[one] : first[one + 1]]


def test_compound_of_content_words_is_less_likely_to_be_split(lexicon, monkeypatch):
    """A short one is not split, unless its words often occur in a row."""
    monkeypatch.setattr("cedd.apps.correct.reader.SMALL_WORDS", 8)
    reader, column = Reader(lexicon), FEATURES.index("split derived")
    for written, compound in (("wentgovernment", [1.0]), ("thecat", [0.0]), ("catmat", []), ("catsat", [1.0])):
        found = (d for d in reader.suspects("", tokens_of(f"he was {written}.")) if d.place == 2)
        split = [
            (row[column], suspect.features[0, column])
            for suspect in found
            for option, row in zip(suspect.options, suspect.features, strict=True)
            if len(option.words) == 2
        ]
        assert split == [(value, 0.0) for value in compound]


def test_known_words_have_feature_of_their_kind(lexicon):
    for kind in KINDS:
        listed = replace(lexicon, known={"leter": kind})
        for written in ("leter", "leter's"):
            (suspect,) = Reader(listed).suspects(text := f"he received the {written}.", tokens_of(text))
            found = {one: suspect.features[0, FEATURES.index(f"kept {one}")] for one in KINDS}
            assert found == {one: one == kind for one in KINDS}


@pytest.mark.parametrize(
    ("text", "joined"),
    [("the mat to gether.", True), ("the opt-to gether.", False), ("the mat to gether-mat.", False)],
)
def test_parts_of_hyphenated_word_are_not_joined(lexicon, text, joined):
    tokens = tokens_of(text)
    place = next(at for at, token in enumerate(tokens) if token.key == "to")
    assert (Reader(lexicon).joined_word(text, tokens[place], tokens[place + 1]) == "together") == joined


def test_can_not_is_not_joined(lexicon):
    reader = Reader(replace(lexicon, words=[*WORDS[:-2], "cannot", "can"]))
    first, second = tokens_of("can not")
    assert reader.joined_word("can not", first, second) is None


@pytest.mark.parametrize(("text", "joined"), [("opted in to", None), ("moving on to", None), ("walked in to", "into")])
def test_verb_particle_is_not_joined_with_to(lexicon, text, joined):
    V = len(WORDS)
    words = replace(lexicon, words=[*WORDS[:-2], "into", "onto"], named=np.zeros(V, bool))
    before, first, second = tokens_of(text)
    assert Reader(words).joined_word(text, first, second, before.key) == joined


def test_network_does_not_score_words_with_little_context(lexicon, monkeypatch):
    monkeypatch.setattr(decisions, "is_undecided", lambda p: True)
    read = list[str]()

    def scores(text, replacements):
        read.append(text)
        return np.zeros((len(replacements), 2))

    for text in ("leter.", "the leter was, 3.", "the leter was here."):
        decide(Reader(lexicon), text, 0.5, scores)
    assert read == ["the leter was here."]


@settings(max_examples=50, deadline=None)
@given(letters, letters)
def test_alignment_spells_both_words_with_fewest_edits(written, meant):
    steps = alignment(written, meant)
    assert "".join(a for a, _ in steps) == meant
    assert "".join(b for _, b in steps) == written
    assert sum(a != b for a, b in steps) == slow_distance(meant, written)


def test_ones_counts_set_bits():
    numbers = np.array([0, 1, 3, 2**63 + 7, 2**64 - 1], np.uint64)
    assert ones(numbers).tolist() == [0, 1, 2, 4, 64]


def test_edits_are_learned_in_fixed_order():
    """Independent of the hash seed, so that a lexicon is reproducible."""
    pairs = f"[(*p, 1.0) for p in {PAIRS}]"
    code = f"from cedd.apps.correct.channel import learn_edits; print(list(learn_edits({pairs}, 1.0)))"
    made = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in "12"
    }
    assert len(made) == 1


def test_seen_edits_are_more_probable_than_unseen_ones(lexicon):
    channel = lexicon.channel
    assert channel.log_probability("recieved", "received") > channel.log_probability("reveiced", "received")
    assert channel.log_probability("the", "the") > -0.2
    assert -math.inf < channel.log_probability("xqzz", "letter") < -15


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(PAIRS), st.floats(-30, 0))
def test_log_probability_stops_early_below_lower_limit(lexicon, pair, least):
    exact, found = (lexicon.channel.log_probability(*pair, bound) for bound in (-math.inf, least))
    assert found == exact if exact > least else found >= exact


def meant(neighbours, written):
    """The words that were most probably meant, in a context in which all words are equally probable."""
    near = neighbours.near(written)
    return neighbours.meant(written, near, np.zeros(len(near[0])))


def test_context_decides_which_similar_words_are_scored(lexicon, monkeypatch):
    """In "the cat sat on the m?t", the context decides which of mat, cat and sat is scored."""
    monkeypatch.setattr(candidates, "SCORED", 1)
    tokens = tokens_of("the cat sat on the aat. the aat sat on the mat.")
    page, reader = TokenizedText("", tokens), Reader(lexicon)
    places = [place for place, token in enumerate(tokens) if token.text == "aat"]
    assert [found[0].words for found in reader.near_words(page, places)] == [("mat",), ("cat",)]


@pytest.mark.parametrize("text", ["he was in the ho me.", "he went h ome."])
def test_two_words_that_are_far_more_often_joined_are_suspicious(lexicon, text):
    """Also if one of them is a letter."""
    assert corrected(replace(lexicon, weights={"alone": {"join": 9.0}, "network": {}}), text).endswith(" home.")


def test_words_next_to_error_are_scored_in_corrected_text(lexicon):
    """The last word has the same features in the text with the error and in the corrected text."""
    reader, last = Reader(lexicon), {}
    for text in ("he recieved teh leter.", "he received the leter."):
        tokens = tokens_of(text)
        scored = [(suspect, suspect.probabilities(reader.alone)) for suspect in reader.suspects(text, tokens)]
        last[text] = [one[-1][0].features for one in (scored, reader.rescored(text, tokens, scored, 0.5))]
    (before, after), (alone, same) = last.values()
    assert not np.array_equal(before, alone)
    assert np.array_equal(after, alone)
    assert np.array_equal(same, alone)


def test_misspellings_of_training_lists_are_remembered(lexicon, tmp_path):
    """Also if they are far from the intended word, or are words themselves."""
    knowing = replace(lexicon, memory={"ltr": ("letter",), "mat": ("home", "unheard")})
    assert ("letter",) not in {c.words for c in meant(Neighbours(lexicon), "ltr")}
    assert ("letter",) in {c.words for c in meant(Neighbours(knowing), "ltr")}
    first, other = Neighbours(knowing).confused
    mat = lexicon.index["mat"]
    assert {lexicon.words[i] for i in other[first[mat] : first[mat + 1]]} == {"cat", "sat", "home"}
    save_lexicon(tmp_path / "w.safetensors", knowing)
    assert load_lexicon(tmp_path / "w.safetensors").memory == knowing.memory
    assert corrected(knowing, "he received the ltr.") == "he received the letter."


def test_repeated_misspelling_of_training_lists_stays_suspicious(lexicon, monkeypatch):
    """Other words that a long text repeats are intended."""
    monkeypatch.setattr("cedd.apps.correct.reader.REPEAT_LOG_ODDS", math.inf)
    weights = {"alone": lexicon.weights["alone"] | {"kept repeated": 9.0}}
    knowing = replace(lexicon, weights=weights, memory={"leter": ("letter",)})
    text = "he received the leter. he went home. " * 20
    assert corrected(replace(knowing, memory={}), text) == text
    assert corrected(knowing, text) == text.replace("leter", "letter")
    name = text.replace("leter", "Leter")
    assert corrected(knowing, name) == name


def test_repeated_word_is_misspelling_if_one_other_word_fits_everywhere(lexicon):
    """If different words fit at different places, it is a word."""
    always, now_and_then = (
        "he received the leter. he went home. " * 20,
        "the zat sat on the zat. a zat of the government. " * 20,
    )
    meaning = replace(lexicon, weights={"alone": lexicon.weights["alone"] | {"kept repeated": 9.0}})
    assert corrected(meaning, always) == corrected(lexicon, always) == always.replace("leter", "letter")
    assert corrected(meaning, now_and_then) == now_and_then
    name = always.replace("leter", "Leter")
    assert corrected(meaning, name) == name
    assert corrected(lexicon, now_and_then) == now_and_then.replace("the zat sat on the zat", "the cat sat on the mat")


def test_common_word_is_suspicious_where_another_fits_far_better(lexicon, monkeypatch):
    """The limits are lowered, since the lexicon is small."""
    monkeypatch.setattr("cedd.apps.correct.reader.MAX_SURPRISE", {"rare": 2.0, "common": 2.0})
    monkeypatch.setattr("cedd.apps.correct.reader.MIN_GAIN", 2.0)
    reader, tokens = Reader(lexicon), tokens_of("the sat sat on the mat. the cat sat on the mat.")
    (suspect,) = reader.suspects("", tokens)
    assert suspect.place == 1
    assert [option.text for option in suspect.options] == ["sat", "cat", "mat"]


def suspect_of(rare):
    """A suspect with the features that decisions use."""
    features = np.zeros((2, len(FEATURES)))
    features[0, FEATURES.index("kept rare")] = rare
    return Suspect(0, tuple(Option(0, 1, (word,), word) for word in ("this", "that")), features)


def test_change_requires_option_that_stands_out():
    suspect = suspect_of(rare=True)
    assert is_accepted(suspect, np.array([0.1, 0.8, 0.1]), 0.5)
    assert not is_accepted(suspect, np.array([0.1, 0.3, 0.3, 0.3]), 0.5)
    assert not is_accepted(suspect, np.array([0.9, 0.1]), 0.5)


def test_p_keep_of_common_word_is_doubled():
    """p_keep / (p_keep + p_best) = 0.45 is below a threshold of 0.5; with p_keep doubled it is 0.62."""
    p = np.array([0.45, 0.55])
    assert is_accepted(suspect_of(rare=True), p, 0.5)
    assert not is_accepted(suspect_of(rare=False), p, 0.5)
    assert is_accepted(suspect_of(rare=False), np.array([0.3, 0.7]), 0.5)


@pytest.mark.parametrize(
    ("written", "sure", "read"),
    [
        ("he recieved, the leter to gether", True, "he received, the {} to gether"),
        ("he recieved, the leter to gether", False, "he recieved, the {} to gether"),  # undecided itself
        ("HE RECIEVED, THE LETER TO GETHER", True, "he received, the {} to gether"),
    ],
)
def test_network_reads_text_with_accepted_changes(written, sure, read):
    tokens, seen = tokens_of(written), []

    def suspect(place, *options):
        made = (Option(place, place + 1, (word,), like(tokens[place].text, word)) for word in options)
        features = np.zeros((len(options), len(FEATURES)))
        features[0, FEATURES.index("kept rare")] = 1
        return Suspect(place, tuple(made), features)

    def scores(text, spans):
        seen.extend((text[:start] + "{}" + text[stop:], text[start:stop], word) for start, stop, word in spans)
        return np.zeros((len(spans), 2))

    even, due = np.array([0.5, 0.5]), np.array([0.01, 0.99])
    scored = [(suspect(1, "recieved", "received"), due if sure else even), (suspect(4, "leter", "letter"), even)]
    decisions.rescore_undecided(written, tokens, scored, np.zeros(len(FEATURES)), scores, 0.9)
    assert seen[-2:] == [(read, "leter", "leter"), (read, "leter", "letter")]
    assert len(seen) == (2 if sure else 4)


@pytest.mark.parametrize(("words", "asked"), [(8, 8), (200, 8 + 200 * 9 // 128), (4000, 8 + 4000 * 9 // 128)])
def test_number_of_words_scored_by_network_is_limited(words, asked):
    """To the least certain ones."""
    text, seen = "his leter " * words, []
    tokens = tokens_of(text)

    def scores(text, spans):
        seen.extend(start for start, _, _ in spans)
        return np.zeros((len(spans), 2))

    def suspect(place):
        options = tuple(Option(place, place + 1, (word,), word) for word in ("leter", "letter"))
        return Suspect(place, options, np.zeros((2, len(FEATURES))))

    own = np.linspace(0.5, 0.6, words)
    scored = [(suspect(2 * i + 1), np.array([p, 1 - p])) for i, p in enumerate(own)]
    decisions.rescore_undecided(text[: 9 * words], tokens, scored, np.zeros(len(FEATURES)), scores, 0.0)
    assert seen[::2] == [tokens[2 * i + 1].start for i in range(asked)]


@pytest.mark.parametrize(
    ("written", "p", "read"),
    [
        ("teh cat, teh dog", [0.3, 0.6, 0.1], ["{} cat, the dog", "the cat, {} dog"]),
        ("teh cat, hte dog", [0.3, 0.6, 0.1], ["{} cat, hte dog", "teh cat, {} dog"]),  # another mistake
        ("teh cat, teh dog", [0.6, 0.35, 0.05], ["{} cat, teh dog", "teh cat, {} dog"]),  # accepted, but less likely
        ("teh cat, teh dog", [0.3, 0.4, 0.3], ["{} cat, teh dog", "teh cat, {} dog"]),  # no option stands out
    ],
)
def test_network_does_not_read_other_places_of_same_error(written, p, read):
    """A repeated error would become more probable."""
    tokens, seen = tokens_of(written), []

    def scores(text, spans):
        seen.extend((text[:start] + "{}" + text[stop:], word) for start, stop, word in spans)
        return np.zeros((len(spans), 2))

    def suspect(place):
        options = (tokens[place].text, "the", "tea")
        features = np.zeros((len(options), len(FEATURES)))
        features[0, FEATURES.index("kept rare")] = 1
        return Suspect(place, tuple(Option(place, place + 1, (o,), o) for o in options), features)

    scored = [(suspect(0), np.array(p)), (suspect(3), np.array(p))]
    decisions.rescore_undecided(written, tokens, scored, np.zeros(len(FEATURES)), scores, 0.9)
    assert [text for text, word in seen if word == "the"] == read


def test_regional_spellings_of_known_words_are_unchanged(lexicon):
    """An unknown one may be an error."""
    words = [*WORDS[:-3], "theatre", "theater", "home"]
    reader = Reader(replace(lexicon, words=words))
    for spelt, free in (("theatre", False), ("theather", True)):
        page = TokenizedText("", tokens_of(f"he went to the {spelt}"))
        options = {option.text for option in reader.suspects_at(page, {4: None})[0].options}
        assert ("theater" in options) == free


def test_unknown_words_in_ise_are_regional_spellings():
    assert same_word("amortisation", "amortization", known=False)
    for written, meant in (
        ("citisen", "citizen"),
        ("amased", "amazed"),
        ("speling", "spelling"),
        ("behavor", "behavior"),
    ):
        assert not same_word(written, meant, known=False)
    assert same_word("labeling", "labelling", known=True)


def test_possessives_of_common_words_are_not_suspicious(lexicon):
    """Also if the lexicon does not have them; possessives of rare words are suspicious."""
    rare = replace(lexicon, log_counts=np.where(np.array(WORDS) == "mat", 4.0, lexicon.log_counts))
    for of, doubted in ((lexicon, ["leter's"]), (rare, ["mat's", "leter's"])):
        text = "the cat's house and the mat's house and the leter's house"
        tokens = tokens_of(text)
        found = Reader(of).suspicious(tokens, of.numbers(TokenizedText(text, tokens).keys))
        assert [tokens[place].key for place, near in found.items() if near is None] == doubted


def test_capitalized_word_is_not_joined_to_previous_word(lexicon):
    for second, free in (("gether", True), ("Gether", False), ("GETHER", False)):
        text = f"he went to {second}"
        first, last = tokens_of(text)[2:]
        assert (Reader(lexicon).joined_word(text, first, last) is not None) == free
    text = "HE WENT TO GETHER"
    first, last = tokens_of(text)[2:]
    assert Reader(lexicon).joined_word(text, first, last) == "together"


def test_is_derived_recognizes_words_made_of_known_words(lexicon):
    derived = [
        word
        for word in ("rehouse", "houses", "cathouse", "houseletter", "lettar", "xhouse")
        if is_derived(lexicon, word)
    ]
    assert derived == ["rehouse", "houses", "houseletter"]
    assert is_derived(replace(lexicon, known={"symlink": TECHNICAL}), "symlinks")
    assert not is_derived(replace(lexicon, known={"symlink": TECHNICAL}), "symlinkhouse")


@pytest.mark.parametrize(
    ("form", "alike", "other"),
    [
        ("inflected", ("cat", "cats"), ("cat", "mat")),
        ("inflected", ("cats", "cat"), ("cats", "catss's")),
        ("apostrophe", ("dont", "don't"), ("dont", "donut")),
        ("another first letter", ("cat", "mat"), ("cat", "cap")),
        ("another last letter", ("cat", "cap"), ("cat", "mat")),
        ("same sound", ("fisiks", "physics"), ("physics", "fists")),
        ("same sound", ("nock", "knock"), ("nock", "lock")),
        ("same sound", ("ocasional", "occasional"), ("occasional", "conditional")),
        ("variant", ("colour", "color"), ("colour", "colony")),
        ("variant", ("romanticised", "romanticized"), ("romanticised", "romantic")),
        ("variant", ("centre", "center"), ("there", "theer")),
        ("variant", ("traveller", "traveler"), ("filled", "filed")),
        ("variant", ("defence", "defense"), ("sence", "sense")),
        ("variant", ("neighbours", "neighbors"), ("four", "for")),
        ("variant", ("mediaeval", "medieval"), ("shoes", "shes")),
    ],
)
def test_forms_relate_words(form, alike, other):
    assert FORMS[form](*alike)
    assert not FORMS[form](*other)


def test_elided_words_are_recognized_by_apostrophe():
    assert [t.text for t in tokens_of("the 'umble man was risin' and don't rest") if t.elided] == ["umble", "risin"]


@pytest.mark.slow
def test_caches_are_bounded(lexicon, monkeypatch):
    """After 30 unknown words, 80 more take no additional memory."""
    monkeypatch.setattr(candidates, "CACHED_STRINGS", 4)
    monkeypatch.setattr(channel, "WRITTEN_KEPT", 4)
    fresh = replace(lexicon, channel=Channel(lexicon.channel.edits))  # with empty caches
    reader, drawn, used = Reader(fresh), np.random.default_rng(0), list[int]()
    tracemalloc.start()
    try:
        for number in range(FORMS_KEPT):
            sound(f"a{number}")
            variant(f"a{number}")
        for words in (30, 80):
            for _ in range(words):
                word_by_word(
                    reader, f"the letter of the government and the {''.join(drawn.choice(list('aenrt'), 7))}", None
                )
            used.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert used[1] < used[0] + 50_000, used  # of 90,000 if all near words were kept, of 800,000 if all strings were
    for kept in (reader.neighbours.near, reader.neighbours.scored, fresh.channel.written):
        assert kept.cache_info().currsize == kept.cache_info().maxsize


def test_nearest_words_and_splits(lexicon):
    near = Neighbours(lexicon)
    assert meant(near, "leter")[0].words == ("letter",)
    assert {c.words for c in near.splits("alot")} == {("a", "lot")}


def test_lexicon_stores_ngram_counts(lexicon):
    numbers = lexicon.numbers(["the", "cat", "sat", "mat"])
    known, unknown = lexicon.gram_counts(np.stack([numbers[:2], numbers[2:]]))
    assert 10_000 < known / 3 < 21_000 or 10_000 < known < 45_000
    assert unknown == 0
    text = np.stack([lexicon.numbers(s.split()) for s in (". the cat sat on", ". the cat mat on")])
    good, bad = lexicon.log_probabilities(text).sum(-1)
    assert good > bad


@pytest.mark.parametrize(("pair", "triple"), [(60_000, 20_000), (60_000, 60_000), (20_000, 60_000)])
def test_count_exceeding_those_of_its_parts_is_hash_collision(lexicon, pair, triple):
    """It belongs to another n-gram with the same fingerprint: no n-gram is more frequent than its parts."""
    words = lexicon.numbers(["cat", "sat", "mat"])
    pairs, counts = np.stack([words[:2], words[1:]]), np.array([pair, 40, triple])
    table = gram_table(np.concatenate([hashes(pairs), hashes(words[None])]), counts, 200)
    rare = replace(lexicon, table=table, log_counts=np.log(np.where(np.arange(len(WORDS)) == words[0], 400, 60_000)))
    assert rare.gram_counts(pairs)[0] == rare.gram_counts(words[None])[0] == 0
    common = replace(lexicon, table=table)
    assert common.gram_counts(pairs)[0] > 0
    nothing = replace(lexicon, table=gram_table(hashes(pairs), counts[:2], 200))
    assert common.log_probabilities(words[None]) == nothing.log_probabilities(words[None])


def test_lexicon_round_trips_through_file(lexicon, tmp_path):
    save_lexicon(tmp_path / "w.safetensors", lexicon)
    again = load_lexicon(tmp_path / "w.safetensors")
    assert again.words == lexicon.words
    assert np.array_equal(again.table, lexicon.table)
    np.testing.assert_allclose(again.log_counts, lexicon.log_counts, atol=0.05)
    assert again.weights == lexicon.weights
    assert again.channel.edits.keys() == lexicon.channel.edits.keys()
    assert again.confused is None
    computed = Neighbours(lexicon).confused_pairs()
    save_lexicon(tmp_path / "c.safetensors", replace(lexicon, confused=computed))
    stored = load_lexicon(tmp_path / "c.safetensors").confused
    assert stored is not None
    np.testing.assert_array_equal(stored, computed)
    content = (tmp_path / "w.safetensors").read_bytes()
    flipped = content[:-1] + bytes([content[-1] ^ 1])
    for damaged in (content[:-50], content[:100], b"", content[:8] + b"x" * 200, flipped):
        (tmp_path / "w.safetensors").write_bytes(damaged)
        with pytest.raises(ValueError, match="damaged"):
            load_lexicon(tmp_path / "w.safetensors")


def test_known_words_round_trip_through_file(tmp_path):
    words = {DICTIONARY: {"shallot", "slaw"}, LARGE: set(), TECHNICAL: {"symlink"}}
    path = tmp_path / "known.txt.gz"
    assert load_known_words(path) == {}
    save_known_words(path, words)
    assert load_known_words(path) == {word: kind for kind, some in words.items() for word in some}
    content = path.read_bytes()
    for damaged in (content[:-5], b"", b"x" * 50, content[:-6] + bytes([content[-6] ^ 1]) + content[-5:]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="damaged"):
            load_known_words(path)


def test_replacements_keep_case_of_original():
    assert [like(a, "it's") for a in ("teh", "Teh", "TEH", "I", "te’h")] == ["it's", "It's", "IT'S", "It's", "it’s"]
    assert [like(a, "i'm") for a in ("im", "Im", "i’m")] == ["I'm", "I'm", "I’m"]
    assert acronyms(tokens_of("He saw NASA there")) == [False, False, True, False]
    assert acronyms(tokens_of("HE SAW NASA THERE")) == [False] * 4
