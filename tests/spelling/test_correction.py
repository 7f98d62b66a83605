"""Correction: what is expected of the text, what may change, and what never does."""

import time
from dataclasses import replace
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cedd
from cedd.data.text import encode_text
from cedd.data.tokenizers import BPETokenizer, ByteTokenizer, CharTokenizer
from cedd.spelling.options import LETTER_OPTIONS, WORD_OPTIONS, CorrectionSettings, correction_options
from cedd.spelling.scores import TokenScores, best_replacement, local_maxima, mean_surprise, windows
from cedd.spelling.token_groups import non_words, token_groups
from cedd.tasks import CorrectionOptions, correct, time_of_rate
from tests.tasks.models import ALPHABET, mending


def believing(loaded, beliefs):
    """A model, convinced that the keys were meant as the values."""
    table, tokenizer = loaded.folder.model.get_buffer("table"), loaded.folder.tokenizer
    for seen, meant in beliefs.items():
        table[int(tokenizer.encode(seen)[0])] = -9.0
        table[int(tokenizer.encode(seen)[0]), int(tokenizer.encode(meant)[0])] = 9.0
    return loaded


# ---- the rate ---------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(
    rate=st.floats(0.001, 0.4),
    vocab_size=st.integers(2, 7),
    p_m=st.floats(0.05, 0.9),
    name=st.sampled_from(["uniform", "roulette", "eroulette"]),
)
def test_a_rate_is_the_share_of_wrong_tokens_among_those_not_masked(rate, vocab_size, p_m, name):
    """Compared with the dense transition matrix: the share of unmasked tokens that have changed."""
    process = {
        "uniform": lambda: cedd.uniform(vocab_size),
        "roulette": lambda: cedd.roulette(vocab_size, p_m=p_m),
        "eroulette": lambda: cedd.eroulette(vocab_size, mask_share=cedd.PowerShare(p_m, 0.95)),
    }[name]()
    column = process.transition_matrix(1.0)[:vocab_size, 0]
    most = float(1 - column[0] / column.sum())
    if rate >= most:
        with pytest.raises(ValueError, match="rate must be in"):
            time_of_rate(process, rate)
        return
    t = time_of_rate(process, rate)
    column = process.transition_matrix(t)[:vocab_size, 0]
    assert float(1 - column[0] / column.sum()) == pytest.approx(rate, abs=1e-6)


def test_a_rate_by_counting():
    """60,000 tokens of roulette at the time of a rate of 0.05: 4 standard errors are a false alarm in 16,000."""
    process, x0 = cedd.roulette(97, p_m=0.6), torch.randint(97, (60, 1000), generator=torch.Generator().manual_seed(1))
    x_t = process.sample(x0, torch.full((60,), time_of_rate(process, 0.05)), torch.Generator().manual_seed(0))
    seen = x_t != process.mask_id
    wrong = float((x_t != x0)[seen].double().mean())
    assert wrong == pytest.approx(0.05, abs=4 * (0.05 * 0.95 / int(seen.sum())) ** 0.5)


# ---- options ----------------------------------------------------------------------------------------------------


def test_a_folder_has_defaults_of_its_own():
    loaded = mending()
    loaded.folder = replace(loaded.folder, config={"correction": {"threshold": 0.3, "rate": 0.1, "passes": 2}})
    assert correct(loaded, "qz") == "az"
    assert correct(loaded, "qz", threshold=0.5) == "ay"
    assert correct(loaded, "qz", threshold=None) == "az"
    process = loaded.folder.process
    assert correction_options(loaded, {}).t == time_of_rate(process, 0.1)
    assert correction_options(loaded, {"rate": 0.2}).t == time_of_rate(process, 0.2)
    assert correction_options(loaded, {"t": 0.5}).t == 0.5
    assert correction_options(loaded, {}).passes == 2
    assert correction_options(mending(), {}) == replace(CorrectionOptions(), t=time_of_rate(process, 0.05))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"t": 0.0}, "t must be in"),
        ({"rate": 0.0}, r"rate must be in \(0, 1\)"),
        ({"rate": 0.99}, r"rate must be in \(0, 0.966\) for this model's process unless t is given \(got 0.99"),
        ({"threshold": 2.0}, "threshold"),
        ({"change": "spaces"}, "must be letters or all \\(got 'spaces'"),
        ({"passes": 0}, "passes must be at least 1"),
        ({"reach": -1}, "reach must be at least 0"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"max_surprise": -1.0}, r"max_surprise must be at least 0 \(nats per letter\) \(got -1"),
        ({"temperature": -1.0}, "temperature must be at least 0 and finite \\(got -1"),
        *(({name: float("nan")}, name) for name in ("rate", "t", "threshold", "max_surprise", "swaps", "temperature")),
        ({"trust": 1}, "unexpected argument 'trust' in the options of correction"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        correct(mending(), "teh", **options)


@pytest.mark.parametrize("text", [None, b"teh", 7])
def test_what_is_no_text_is_said(text):
    with pytest.raises(TypeError, match=rf"the text to correct must be a string \(got {type(text).__name__}\)"):
        correct(mending(), text)


def test_a_folder_whose_defaults_mean_nothing_is_refused():
    loaded = mending()
    loaded.folder = replace(loaded.folder, config={"correction": {"strength": 0.3}})
    with pytest.raises(ValueError, match="'strength' in the correction options of the model's folder"):
        correct(loaded, "teh")


# ---- what may change ----------------------------------------------------------------------------------------------


def test_only_letters_change_and_only_into_letters_of_their_case():
    alphabet = ALPHABET + "AQZ0123456789\n"
    wishes = {"1": "l", " ": "e", ".": ",", "a": " ", "b": "T", "T": "t", "Q": "A", "q": "a", "c": "7"}
    loaded = believing(mending(tokenizer=CharTokenizer(alphabet)), wishes)
    text = "1 .abTQqc 2\n"
    assert correct(loaded, text) == "1 .abTAac 2\n"
    assert correct(loaded, text, change="letters") == "1 .abTAac 2\n"
    assert correct(loaded, text, change="all") == "le, TtAa7e2\n"
    drawn = correct(loaded, text, steps=8, seed=0)
    kinds = token_groups(loaded.folder.tokenizer, None)
    tokens = [loaded.folder.tokenizer.encode(x) for x in (text, drawn)]
    assert (kinds[tokens[0]] == kinds[tokens[1]]).all()
    assert [a for a, b in zip(text, drawn, strict=True) if not b.isalpha()] == list("1 . 2\n")


def test_letters_are_plain_ones_of_a_script_and_a_case():
    """é is what the writer made it, and й, which is и with a breve, too; ω and ш are no Latin letters."""
    alphabet = "aszqéßÄAΑαωΩάшжйШ七八1 "
    groups = token_groups(CharTokenizer(alphabet), "letters")
    together: dict[int, str] = {}
    for letter, group in zip(alphabet, groups[CharTokenizer(alphabet).encode(alphabet)].tolist(), strict=True):
        together[group] = together.get(group, "") + letter
    assert together.pop(-1) == "éßÄάй1 "
    assert sorted(together.values()) == ["A", "aszq", "ΑΩ", "αω", "Ш", "шж", "七八"]


def test_letters_with_accents_stay_and_are_never_written():
    loaded = mending(tokenizer=CharTokenizer(ALPHABET + "éü"))
    wishes = {"é": "a", "b": "é", "q": "a"}
    text, all_of_it = "q é b qe\u0301 e q\u0302 q", "a a é ae\u0301 e a\u0302 a"
    assert correct(believing(loaded, wishes), text) == "a é b ae\u0301 e q\u0302 a"
    assert correct(loaded, text, change="all") == all_of_it


NO_WORDS = (
    "q42 mp3q http://q.x/q user@q q/q q\\q snake_q q_2 __q__ tinyurl.q q.q.q fix-8-q (q7) a4-86-q \N{DEGREE SIGN}1q"
)
WORDS = "q _q_ _q, “q” q. q.. q...q .q q-q q--q q's Q&q q;q q:q _a q_ *q*"


@pytest.mark.parametrize("tokenizer", [CharTokenizer(ALPHABET + "éQ0123456789_@/\\:-()"), ByteTokenizer()])
def test_what_is_visibly_no_word_is_read_but_not_changed(tokenizer):
    loaded = mending(tokenizer=tokenizer, length=64)
    text = f"{NO_WORDS} é {WORDS}\n{NO_WORDS}\t{WORDS}"
    fixed = WORDS.replace("q", "a")
    assert correct(loaded, text, reach=0) == f"{NO_WORDS} é {fixed}\n{NO_WORDS}\t{fixed}"
    drawn = correct(loaded, text, steps=4, seed=0)
    assert drawn.changes
    assert drawn.count(NO_WORDS) == 2
    assert correct(loaded, text, change="all", reach=0) == text.replace("q", "a")


@pytest.mark.slow
def test_words_are_told_apart_in_linear_time():
    """200,000 characters without a blank take a twentieth of a second; in quadratic time they would take minutes."""
    for piece in ("a", ".", "a-", "_-", "\u0301", " `a", "<a ", "{% a"):
        started = time.process_time()
        assert not non_words(piece * (200_000 // len(piece))).any()
        assert time.process_time() - started < 5
    assert non_words("ab" * 200_000 + "7").all()


def test_tokens_that_are_no_characters():
    bpe = BPETokenizer.train(["the cat sat on the mat"] * 3, 270)
    assert (token_groups(bpe, None) == 0).all()
    with pytest.raises(ValueError, match="use change='all'"):
        token_groups(bpe, "letters")
    letters = token_groups(ByteTokenizer(), None)
    assert [chr(i) for i in range(256) if letters[i] >= 0] == [chr(i) for i in range(128) if chr(i).isalpha()]
    assert (token_groups(ByteTokenizer(), "all") == 0).all()


def counting(monkeypatch):
    """A model that believes in alphabetical order: a letter after two in order should be the next one."""
    loaded = mending("uniform", tokenizer=CharTokenizer("abcdefghijklmnopqrstuvwxyz"))

    def features(x_t, sigma):
        before = torch.roll(x_t, 1, 1)
        settled = torch.roll(x_t, 2, 1) == before - 1
        settled[:, :2] = False
        return torch.where(settled, (before + 1) % 26, x_t)[..., None].float()

    monkeypatch.setattr(loaded.folder.model, "features", features)
    loaded.folder.model.get_buffer("table").copy_(torch.eye(26) * 20)
    return loaded


def test_later_passes_see_what_earlier_ones_have_mended(monkeypatch):
    """A chain of wrong letters, each of which can be corrected only after its left neighbour."""
    loaded = counting(monkeypatch)
    assert correct(loaded, "abcxqefg", passes=1) == "abcdqefg"
    twice = correct(loaded, "abcxqefg", passes=2)
    assert twice == "abcdeefg"
    assert correct(loaded, "abcxqefg", passes=9) == "abcdefgh"
    assert [(c.position, c.before, c.after) for c in twice.changes] == [(3, "x", "d"), (4, "q", "e")]
    assert all(c.confidence > 0.9 and c.error_probability > 0.9 for c in twice.changes)


def test_only_what_changed_is_read_again(monkeypatch):
    """Of 100 windows one has a mistake, and only it and those that overlap it are read in the second pass."""
    loaded, text = mending(length=16), "the cat sat. " * 92 + "q" + "the cat sat. " * 10
    read, features = [], loaded.folder.model.features
    monkeypatch.setattr(loaded.folder.model, "features", lambda x, s: read.append(len(x)) or features(x, s))
    assert correct(loaded, text, swaps=0) == text.replace("q", "a")
    assert sum(read) - len(windows(len(text), 16)) in (1, 2)


def test_of_neighbouring_changes_only_the_surest_is_made():
    """z (0.6 for y) beside q (0.9 for a) waits for a pass of its own, unless all are made at once."""
    assert correct(mending(), "zqz  .  z", passes=1) == "zaz  .  y"
    assert correct(mending(), "zqz  .  z", passes=1, reach=0) == "yay  .  y"
    assert correct(mending(), "zqz  .  z", passes=2) == "yay  .  y"
    strength = np.array([1.0, 3.0, 2.0, -np.inf, 2.0, 2.0])
    assert local_maxima(strength, 0).all()
    assert local_maxima(strength, 1).tolist() == [False, True, False, False, True, True]
    assert local_maxima(strength, 9).tolist() == [False, True, False, False, False, False]


@given(strength=st.lists(st.integers(0, 9), min_size=1, max_size=40), reach=st.integers(0, 50))
def test_the_surest_by_looking_at_every_neighbour(strength, reach):
    found = local_maxima(np.array(strength, float), reach)
    assert found.tolist() == [
        value >= max(strength[max(0, i - reach) : i + reach + 1]) for i, value in enumerate(strength)
    ]


def test_a_reach_beyond_the_text_is_all_of_it():
    """It took as much memory as it was long: 10^15 of anything fit nowhere."""
    assert correct(mending(), "zqz  .  z", passes=1, reach=10**15) == "zaz  .  z"


@settings(max_examples=50, deadline=None)
@given(
    beliefs=st.lists(st.floats(0.01, 1.0), min_size=6, max_size=6),
    noise_rate=st.floats(0.01, 0.9),
    rate=st.floats(0.01, 0.9),
    x=st.integers(0, 5),
)
def test_a_judgement_by_bayes_rule_written_out(beliefs, noise_rate, rate, x):
    """Belief g before the token is seen; the process's likelihood in the network's posterior, the typist's in ours."""
    g, groups = np.array(beliefs), np.array([0, 0, 0, 1, 1, -1])
    process = np.full(6, noise_rate / 5)
    process[x] = 1 - noise_rate
    network = torch.from_numpy(g * process / (g * process).sum()).log()[None]
    scored = best_replacement(network, torch.tensor([x]), torch.from_numpy(groups), noise_rate, rate)
    best, confidence, own = (value.item() for value in scored)
    likeliest = max((h for h in range(6) if h != x), key=lambda h: g[h])
    if groups[x] < 0 or groups[likeliest] != groups[x]:
        assert (best, confidence, own) == (x, 0.0, 1.0)
        return
    group = np.flatnonzero(groups == groups[x]).tolist()
    typist = {h: 1 - rate if h == x else rate / (len(group) - 1) for h in group}
    weights = {h: typist[h] * g[h] for h in group}
    total = sum(weights.values())
    assert own == pytest.approx(weights[x] / total)
    assert confidence == pytest.approx(max(w for h, w in weights.items() if h != x) / total)
    assert weights[int(best)] == pytest.approx(confidence * total)


def test_a_surprising_text_is_left_alone():
    """A q among letters that the model predicts is corrected; among z's, which surprise it but are kept, it is not."""
    loaded = mending(length=64)
    known, strange = "the cat sat on a mqt " * 10, "zzz zzz zzz zzz mqt " * 10
    assert correct(loaded, known + strange, threshold=0.3) == (known + strange).replace("q", "a")
    limited = correct(loaded, known + strange, max_surprise=3.2, threshold=0.3)
    assert limited[:150] == known.replace("q", "a")[:150]
    assert limited[-150:] == strange[-150:]
    assert all(change.position < 250 for change in limited.changes)


def test_a_surprising_text_is_left_alone_in_several_steps_too():
    loaded = mending(length=64)
    known, strange = "the cat sat on a mqt " * 10, "zzz zzz zzz zzz mqt " * 10
    steps: dict[str, Any] = {"steps": 8, "seed": 1, "threshold": 0.3}
    assert correct(loaded, known + strange, **steps) == (known + strange).replace("q", "a")
    limited = correct(loaded, known + strange, max_surprise=3.2, **steps)
    assert limited[:150] == known.replace("q", "a")[:150]
    assert limited[-150:] == strange[-150:]
    assert limited.changes
    assert all(change.position < 250 for change in limited.changes)


def test_the_mean_surprise_is_that_of_what_was_left():
    surprise = np.zeros(300)
    surprise[:100] = 1.0
    surprise[7] = 99.0
    left, nothing = np.ones(300, bool), np.zeros(300)
    scores = TokenScores(np.zeros(300, int), nothing, nothing, surprise, nothing)
    found = mean_surprise(scores, left)
    assert found[20] == pytest.approx((84 + 4) / 85)  # the one that surprises most counts for 4
    assert found[299] == 0.0
    few = TokenScores(*(column[:4] for column in scores.columns))
    assert mean_surprise(few, left[:4]) == pytest.approx(4 / 32)
    left[7] = False
    assert mean_surprise(scores, left)[20] == pytest.approx(1.0)


# ---- what never changes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", " ", "\n\n  \n", "\r\n", "7", "日本語🙂", "\ud800"])
def test_texts_without_a_known_letter(text):
    result = correct(mending(), text)
    assert result == text
    assert result.changes == ()


def test_line_ends_and_unknown_characters_stay():
    text = "A cqt\r\nnaïve “sqt” — 日本\tz\r\n\r\nno end"
    assert correct(mending(length=8), text) == text.replace("q", "a").replace("z", "y")


@pytest.mark.parametrize("length", [8, 64])
def test_line_ends_of_two_characters_are_read_as_one(length, monkeypatch):
    """The network sees what it would of \\n alone; positions are those of the text that was given."""
    loaded = mending(length=length, tokenizer=CharTokenizer(ALPHABET + "\n"))
    read, features = [], loaded.folder.model.features
    monkeypatch.setattr(loaded.folder.model, "features", lambda x, s: read.append(x.tolist()) or features(x, s))
    short = correct(loaded, "a cqt\nsqt\n\n on z\n")
    seen = read.copy()
    read.clear()
    text = "a cqt\r\nsqt\r\n\r\n on z\r\n"
    long = correct(loaded, text)
    assert read == seen
    assert long == short.replace("\n", "\r\n") == text.replace("q", "a").replace("z", "y")
    assert [(c.position, c.before) for c in long.changes] == [(i, text[i]) for i in range(len(text)) if text[i] in "qz"]


def test_a_return_that_is_known_or_ends_no_line_is_read():
    known = CharTokenizer("ab \r\n")
    assert known.decode(encode_text(known, "a\r\nb").ids) == "a\r\nb"
    other = CharTokenizer("ab \n")
    encoded = encode_text(other, "a\rb\r\r\n")
    assert other.decode(encoded.ids) == "a b \n"
    assert encoded.protected.tolist() == [False, True, False, True, False]
    assert encoded.starts is not None
    assert encoded.starts.tolist() == [0, 1, 2, 3, 5]


def test_unknown_characters_are_read_as_what_they_look_like():
    tokenizer = CharTokenizer("abcdefghijklmnopqrstuvwxyz '\"-\n")
    encoded = encode_text(tokenizer, "naïve it’s “a” — b\r\n日🙂é")
    assert tokenizer.decode(encoded.ids) == 'naive it\'s "a" - b\n  e'
    assert encoded.protected.sum() == 8


def test_what_stands_for_unknown_characters_is_read_but_never_written():
    tokenizer = CharTokenizer(ALPHABET, unknown="\ufffd")
    encoded = encode_text(tokenizer, "é日")
    assert tokenizer.decode(encoded.ids) == "e\ufffd"
    loaded = believing(mending(tokenizer=tokenizer), {"b": "\ufffd"})
    assert correct(loaded, "q日b", change="all") == "a日b"


def test_bytes_that_are_no_text_cost_no_context(monkeypatch):
    loaded, read = mending(length=64), []
    features = loaded.folder.model.features
    monkeypatch.setattr(loaded.folder.model, "features", lambda x, s: read.append(x.shape) or features(x, s))
    assert correct(loaded, "a cqt \udcff sat \udce9 on \udcff") == "a cat \udcff sat \udce9 on \udcff"
    assert set(read) == {(1, 18)}


def test_a_long_text_is_read_in_one_go_and_comes_back_whole():
    text = "the cqt sat on the mzt, ü\n" * 700
    result = correct(mending(length=64), text)
    assert result == text.replace("q", "a").replace("z", "y")
    assert len(result.changes) == 1400


def test_the_settings_by_name_are_the_options_of_both_engines() -> None:
    hints, by_name = get_type_hints(CorrectionOptions), get_type_hints(CorrectionSettings)
    assert set(by_name) == LETTER_OPTIONS | WORD_OPTIONS
    assert all(by_name[name] == hints[name] for name in LETTER_OPTIONS)
