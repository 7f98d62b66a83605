"""Correction: the assumed error rate, what may change, and what never changes."""

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
from tests.tasks.models import ALPHABET, fixer


def with_beliefs(loaded, beliefs):
    """The model, made certain that the keys stand for the values."""
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
def test_rate_is_share_of_wrong_tokens_among_unmasked_ones(rate, vocab_size, p_m, name):
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


def test_rate_matches_counted_errors():
    """60,000 tokens of roulette at the time of a rate of 0.05: 4 standard errors give one false alarm in 16,000."""
    process, x0 = cedd.roulette(97, p_m=0.6), torch.randint(97, (60, 1000), generator=torch.Generator().manual_seed(1))
    x_t = process.sample(x0, torch.full((60,), time_of_rate(process, 0.05)), torch.Generator().manual_seed(0))
    seen = x_t != process.mask_id
    wrong = float((x_t != x0)[seen].double().mean())
    assert wrong == pytest.approx(0.05, abs=4 * (0.05 * 0.95 / int(seen.sum())) ** 0.5)


# ---- options ----------------------------------------------------------------------------------------------------


def test_folder_defaults_are_used():
    loaded = fixer()
    loaded.folder = replace(loaded.folder, config={"correction": {"threshold": 0.3, "rate": 0.1, "passes": 2}})
    assert correct(loaded, "qz") == "az"
    assert correct(loaded, "qz", threshold=0.5) == "ay"
    assert correct(loaded, "qz", threshold=None) == "az"
    process = loaded.folder.process
    assert correction_options(loaded, {}).t == time_of_rate(process, 0.1)
    assert correction_options(loaded, {"rate": 0.2}).t == time_of_rate(process, 0.2)
    assert correction_options(loaded, {"t": 0.5}).t == 0.5
    assert correction_options(loaded, {}).passes == 2
    assert correction_options(fixer(), {}) == replace(CorrectionOptions(), t=time_of_rate(process, 0.05))


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
def test_invalid_options_are_rejected(options, message):
    with pytest.raises(ValueError, match=message):
        correct(fixer(), "teh", **options)


@pytest.mark.parametrize("text", [None, b"teh", 7])
def test_non_string_input_is_rejected(text):
    with pytest.raises(TypeError, match=rf"the text to correct must be a string \(got {type(text).__name__}\)"):
        correct(fixer(), text)


def test_invalid_folder_defaults_are_rejected():
    loaded = fixer()
    loaded.folder = replace(loaded.folder, config={"correction": {"strength": 0.3}})
    with pytest.raises(ValueError, match="'strength' in the correction options of the model's folder"):
        correct(loaded, "teh")


# ---- what may change ----------------------------------------------------------------------------------------------


def test_letters_change_only_into_letters_of_same_case():
    alphabet = ALPHABET + "AQZ0123456789\n"
    wishes = {"1": "l", " ": "e", ".": ",", "a": " ", "b": "T", "T": "t", "Q": "A", "q": "a", "c": "7"}
    loaded = with_beliefs(fixer(tokenizer=CharTokenizer(alphabet)), wishes)
    text = "1 .abTQqc 2\n"
    assert correct(loaded, text) == "1 .abTAac 2\n"
    assert correct(loaded, text, change="letters") == "1 .abTAac 2\n"
    assert correct(loaded, text, change="all") == "le, TtAa7e2\n"
    drawn = correct(loaded, text, steps=8, seed=0)
    kinds = token_groups(loaded.folder.tokenizer, None)
    tokens = [loaded.folder.tokenizer.encode(x) for x in (text, drawn)]
    assert (kinds[tokens[0]] == kinds[tokens[1]]).all()
    assert [a for a, b in zip(text, drawn, strict=True) if not b.isalpha()] == list("1 . 2\n")


def test_plain_letters_are_grouped_by_script_and_case():
    """Letters with accents, such as é and й (и with a breve), are left out; ω and ш are not Latin letters."""
    alphabet = "aszqéßÄAΑαωΩάшжйШ七八1 "
    groups = token_groups(CharTokenizer(alphabet), "letters")
    together: dict[int, str] = {}
    for letter, group in zip(alphabet, groups[CharTokenizer(alphabet).encode(alphabet)].tolist(), strict=True):
        together[group] = together.get(group, "") + letter
    assert together.pop(-1) == "éßÄάй1 "
    assert sorted(together.values()) == ["A", "aszq", "ΑΩ", "αω", "Ш", "шж", "七八"]


def test_accented_letters_are_kept_and_never_inserted():
    loaded = fixer(tokenizer=CharTokenizer(ALPHABET + "éü"))
    wishes = {"é": "a", "b": "é", "q": "a"}
    text, all_of_it = "q é b qe\u0301 e q\u0302 q", "a a é ae\u0301 e a\u0302 a"
    assert correct(with_beliefs(loaded, wishes), text) == "a é b ae\u0301 e q\u0302 a"
    assert correct(loaded, text, change="all") == all_of_it


NON_WORDS = (
    "q42 mp3q http://q.x/q user@q q/q q\\q snake_q q_2 __q__ tinyurl.q q.q.q fix-8-q (q7) a4-86-q \N{DEGREE SIGN}1q"
)
WORDS = "q _q_ _q, “q” q. q.. q...q .q q-q q--q q's Q&q q;q q:q _a q_ *q*"


@pytest.mark.parametrize("tokenizer", [CharTokenizer(ALPHABET + "éQ0123456789_@/\\:-()"), ByteTokenizer()])
def test_non_words_are_read_but_not_changed(tokenizer):
    loaded = fixer(tokenizer=tokenizer, length=64)
    text = f"{NON_WORDS} é {WORDS}\n{NON_WORDS}\t{WORDS}"
    fixed = WORDS.replace("q", "a")
    assert correct(loaded, text, reach=0) == f"{NON_WORDS} é {fixed}\n{NON_WORDS}\t{fixed}"
    drawn = correct(loaded, text, steps=4, seed=0)
    assert drawn.changes
    assert drawn.count(NON_WORDS) == 2
    assert correct(loaded, text, change="all", reach=0) == text.replace("q", "a")


@pytest.mark.slow
def test_non_words_are_found_in_linear_time():
    """200,000 characters without a blank take a twentieth of a second; in quadratic time they would take minutes."""
    for piece in ("a", ".", "a-", "_-", "\u0301", " `a", "<a ", "{% a"):
        started = time.process_time()
        assert not non_words(piece * (200_000 // len(piece))).any()
        assert time.process_time() - started < 5
    assert non_words("ab" * 200_000 + "7").all()


def test_token_groups_of_subwords_and_bytes():
    bpe = BPETokenizer.train(["the cat sat on the mat"] * 3, 270)
    assert (token_groups(bpe, None) == 0).all()
    with pytest.raises(ValueError, match="use change='all'"):
        token_groups(bpe, "letters")
    letters = token_groups(ByteTokenizer(), None)
    assert [chr(i) for i in range(256) if letters[i] >= 0] == [chr(i) for i in range(128) if chr(i).isalpha()]
    assert (token_groups(ByteTokenizer(), "all") == 0).all()


def ordered_model(monkeypatch):
    """A model of alphabetical order: after two letters in order, it predicts the next one."""
    loaded = fixer("uniform", tokenizer=CharTokenizer("abcdefghijklmnopqrstuvwxyz"))

    def features(x_t, sigma):
        before = torch.roll(x_t, 1, 1)
        settled = torch.roll(x_t, 2, 1) == before - 1
        settled[:, :2] = False
        return torch.where(settled, (before + 1) % 26, x_t)[..., None].float()

    monkeypatch.setattr(loaded.folder.model, "features", features)
    loaded.folder.model.get_buffer("table").copy_(torch.eye(26) * 20)
    return loaded


def test_later_passes_use_earlier_corrections(monkeypatch):
    """A chain of wrong letters, each of which can be corrected only after its left neighbour."""
    loaded = ordered_model(monkeypatch)
    assert correct(loaded, "abcxqefg", passes=1) == "abcdqefg"
    twice = correct(loaded, "abcxqefg", passes=2)
    assert twice == "abcdeefg"
    assert correct(loaded, "abcxqefg", passes=9) == "abcdefgh"
    assert [(c.position, c.before, c.after) for c in twice.changes] == [(3, "x", "d"), (4, "q", "e")]
    assert all(c.confidence > 0.9 and c.error_probability > 0.9 for c in twice.changes)


def test_second_pass_reads_only_changed_windows(monkeypatch):
    """One of 100 windows has a mistake, and the second pass reads only that window and those that overlap it."""
    loaded, text = fixer(length=16), "the cat sat. " * 92 + "q" + "the cat sat. " * 10
    read, features = [], loaded.folder.model.features
    monkeypatch.setattr(loaded.folder.model, "features", lambda x, s: read.append(len(x)) or features(x, s))
    assert correct(loaded, text, swaps=0) == text.replace("q", "a")
    assert sum(read) - len(windows(len(text), 16)) in (1, 2)


def test_only_most_confident_of_neighbouring_changes_is_made():
    """z (0.6 for y) next to q (0.9 for a) waits for the next pass, unless all changes are made at once."""
    assert correct(fixer(), "zqz  .  z", passes=1) == "zaz  .  y"
    assert correct(fixer(), "zqz  .  z", passes=1, reach=0) == "yay  .  y"
    assert correct(fixer(), "zqz  .  z", passes=2) == "yay  .  y"
    strength = np.array([1.0, 3.0, 2.0, -np.inf, 2.0, 2.0])
    assert local_maxima(strength, 0).all()
    assert local_maxima(strength, 1).tolist() == [False, True, False, False, True, True]
    assert local_maxima(strength, 9).tolist() == [False, True, False, False, False, False]


@given(strength=st.lists(st.integers(0, 9), min_size=1, max_size=40), reach=st.integers(0, 50))
def test_local_maxima_match_brute_force(strength, reach):
    found = local_maxima(np.array(strength, float), reach)
    assert found.tolist() == [
        value >= max(strength[max(0, i - reach) : i + reach + 1]) for i, value in enumerate(strength)
    ]


def test_reach_may_exceed_text_length():
    """Memory must not grow with the reach."""
    assert correct(fixer(), "zqz  .  z", passes=1, reach=10**15) == "zaz  .  z"


@settings(max_examples=50, deadline=None)
@given(
    beliefs=st.lists(st.floats(0.01, 1.0), min_size=6, max_size=6),
    noise_rate=st.floats(0.01, 0.9),
    rate=st.floats(0.01, 0.9),
    x=st.integers(0, 5),
)
def test_best_replacement_follows_bayes_rule(beliefs, noise_rate, rate, x):
    """Prior g before the token is seen; the network's posterior uses the process's likelihood, ours the typist's."""
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


def test_surprising_text_is_not_corrected():
    """A q among predictable letters is corrected; among z's, which are surprising but kept, it is not."""
    loaded = fixer(length=64)
    known, strange = "the cat sat on a mqt " * 10, "zzz zzz zzz zzz mqt " * 10
    assert correct(loaded, known + strange, threshold=0.3) == (known + strange).replace("q", "a")
    limited = correct(loaded, known + strange, max_surprise=3.2, threshold=0.3)
    assert limited[:150] == known.replace("q", "a")[:150]
    assert limited[-150:] == strange[-150:]
    assert all(change.position < 250 for change in limited.changes)


def test_surprising_text_is_not_corrected_in_several_steps():
    loaded = fixer(length=64)
    known, strange = "the cat sat on a mqt " * 10, "zzz zzz zzz zzz mqt " * 10
    steps: dict[str, Any] = {"steps": 8, "seed": 1, "threshold": 0.3}
    assert correct(loaded, known + strange, **steps) == (known + strange).replace("q", "a")
    limited = correct(loaded, known + strange, max_surprise=3.2, **steps)
    assert limited[:150] == known.replace("q", "a")[:150]
    assert limited[-150:] == strange[-150:]
    assert limited.changes
    assert all(change.position < 250 for change in limited.changes)


def test_mean_surprise_covers_only_unchanged_tokens():
    surprise = np.zeros(300)
    surprise[:100] = 1.0
    surprise[7] = 99.0
    left, nothing = np.ones(300, bool), np.zeros(300)
    scores = TokenScores(np.zeros(300, int), nothing, nothing, surprise, nothing)
    found = mean_surprise(scores, left)
    assert found[20] == pytest.approx((84 + 4) / 85)  # the most surprising one counts as 4
    assert found[299] == 0.0
    few = TokenScores(*(column[:4] for column in scores.columns))
    assert mean_surprise(few, left[:4]) == pytest.approx(4 / 32)
    left[7] = False
    assert mean_surprise(scores, left)[20] == pytest.approx(1.0)


# ---- what never changes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", " ", "\n\n  \n", "\r\n", "7", "日本語🙂", "\ud800"])
def test_texts_without_known_letters_are_unchanged(text):
    result = correct(fixer(), text)
    assert result == text
    assert result.changes == ()


def test_line_ends_and_unknown_characters_are_preserved():
    text = "A cqt\r\nnaïve “sqt” — 日本\tz\r\n\r\nno end"
    assert correct(fixer(length=8), text) == text.replace("q", "a").replace("z", "y")


@pytest.mark.parametrize("length", [8, 64])
def test_crlf_is_read_as_one_character(length, monkeypatch):
    """The network input is the same as for \\n alone; positions refer to the given text."""
    loaded = fixer(length=length, tokenizer=CharTokenizer(ALPHABET + "\n"))
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


def test_carriage_returns_that_are_known_or_end_no_line_are_read():
    known = CharTokenizer("ab \r\n")
    assert known.decode(encode_text(known, "a\r\nb").ids) == "a\r\nb"
    other = CharTokenizer("ab \n")
    encoded = encode_text(other, "a\rb\r\r\n")
    assert other.decode(encoded.ids) == "a b \n"
    assert encoded.protected.tolist() == [False, True, False, True, False]
    assert encoded.starts is not None
    assert encoded.starts.tolist() == [0, 1, 2, 3, 5]


def test_unknown_characters_are_read_as_similar_known_ones():
    tokenizer = CharTokenizer("abcdefghijklmnopqrstuvwxyz '\"-\n")
    encoded = encode_text(tokenizer, "naïve it’s “a” — b\r\n日🙂é")
    assert tokenizer.decode(encoded.ids) == 'naive it\'s "a" - b\n  e'
    assert encoded.protected.sum() == 8


def test_unknown_placeholder_is_read_but_never_inserted():
    tokenizer = CharTokenizer(ALPHABET, unknown="\ufffd")
    encoded = encode_text(tokenizer, "é日")
    assert tokenizer.decode(encoded.ids) == "e\ufffd"
    loaded = with_beliefs(fixer(tokenizer=tokenizer), {"b": "\ufffd"})
    assert correct(loaded, "q日b", change="all") == "a日b"


def test_invalid_bytes_do_not_split_the_context(monkeypatch):
    loaded, read = fixer(length=64), []
    features = loaded.folder.model.features
    monkeypatch.setattr(loaded.folder.model, "features", lambda x, s: read.append(x.shape) or features(x, s))
    assert correct(loaded, "a cqt \udcff sat \udce9 on \udcff") == "a cat \udcff sat \udce9 on \udcff"
    assert set(read) == {(1, 18)}


def test_long_text_is_corrected_completely():
    text = "the cqt sat on the mzt, ü\n" * 700
    result = correct(fixer(length=64), text)
    assert result == text.replace("q", "a").replace("z", "y")
    assert len(result.changes) == 1400


def test_correction_settings_match_options_of_both_engines() -> None:
    hints, by_name = get_type_hints(CorrectionOptions), get_type_hints(CorrectionSettings)
    assert set(by_name) == LETTER_OPTIONS | WORD_OPTIONS
    assert all(by_name[name] == hints[name] for name in LETTER_OPTIONS)
