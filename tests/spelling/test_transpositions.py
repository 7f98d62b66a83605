"""Transposed letters: scored by the chain rule in few passes, and corrected together or not at all."""

import math
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cedd.data.tokenizers import BPETokenizer, CharTokenizer
from cedd.spelling.scores import TokenScores, leave_one_out, swap_gain
from cedd.spelling.transpositions import (
    APART,
    READINGS,
    Transpositions,
    far_apart,
    letter_groups,
    transposed,
    with_transpositions,
)
from cedd.tasks import correct
from tests.tasks.models import fixer

NOISE = 0.07  # the process's rate of wrong tokens in these tests


def posterior(g, x):
    """log p(x_0 | x_t) [R, V] from beliefs g [R, V] before x [R] is seen, by Bayes' rule."""
    likelihood = torch.full_like(g, NOISE / (g.shape[-1] - 1)).scatter(-1, x[:, None], 1 - NOISE)
    return torch.log(g * likelihood / (g * likelihood).sum(-1, keepdim=True))


def scores_of(gain, **given):
    count = len(gain)
    usual = {"best": np.zeros(count, int), "confidence": np.full(count, 1e-9), "own": np.ones(count)}
    return TokenScores(**{**usual, "surprise": np.zeros(count), "swap_gain": np.asarray(gain, float), **given})


@settings(max_examples=50, deadline=None)
@given(beliefs=st.lists(st.floats(0.01, 1.0), min_size=5, max_size=5), x=st.integers(0, 4))
def test_leave_one_out_recovers_prior_beliefs(beliefs, x):
    g = torch.tensor([beliefs], dtype=torch.float64)
    g = g / g.sum()
    tokens = torch.tensor([[x, *range(5)]])
    found = leave_one_out(posterior(g, torch.tensor([x])), tokens, NOISE)
    assert torch.allclose(found.exp(), g.gather(-1, tokens), atol=1e-9)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), share=st.floats(0.001, 0.5))
def test_log_odds_match_joint_probability(seed, share):
    """Of all texts of five letters, each with a probability: g is exact, and so is log p(ba) / p(ab)."""
    generator = np.random.default_rng(seed)
    joint, ids = generator.dirichlet(np.ones(3**5)).reshape([3] * 5) + 1e-6, generator.integers(0, 3, 5)

    def score(text, **_):
        g = [joint[tuple(slice(None) if j == i else text[j] for j in range(5))] for i in range(5)]
        beliefs, x = torch.from_numpy(np.stack(g)), torch.from_numpy(text)
        beliefs = beliefs / beliefs.sum(-1, keepdim=True)
        tokens = torch.stack([x, x.roll(1), x.roll(-1)], -1)
        return scores_of(swap_gain(leave_one_out(posterior(beliefs, x), tokens, NOISE)[None])[0].numpy())

    swaps = Transpositions(score, share, np.zeros(3, int), 5)
    swaps.weigh(ids, score(ids), np.ones(5, bool), np.zeros(5, bool))
    for i in np.flatnonzero(np.isfinite(swaps.log_odds)):
        odds = joint[tuple(transposed(ids, np.array([i])))] / joint[tuple(ids)] * share / (1 - share)
        assert swaps.log_odds[i] == pytest.approx(math.log(odds))
    assert np.isfinite(swaps.log_odds).sum() <= READINGS


def test_only_different_letters_of_same_case_are_candidates():
    tokenizer = CharTokenizer("abcABC 1é")
    swaps = Transpositions(scores_of, 0.1, letter_groups(tokenizer), 13)
    ids, free = tokenizer.encode("abb a1cBACéab")[:13], np.ones(13, bool)
    free[11] = False
    found = swaps.candidates(ids, scores_of(np.zeros(13)), free)
    assert np.flatnonzero(found).tolist() == [0, 7, 8]  # ab, BA, AC; é is not plain, and the last a is held
    assert not swaps.candidates(ids, scores_of(np.full(13, -99.0)), free).any()
    pieces = BPETokenizer.train(["the cat sat on the mat"] * 3, 270)
    assert (letter_groups(pieces) == -1).all()


@settings(max_examples=50, deadline=None)
@given(gains=st.lists(st.floats(-5, 5), min_size=1, max_size=80), data=st.data())
def test_pairs_of_one_pass_are_far_apart(gains, data):
    places = np.array(sorted(data.draw(st.sets(st.integers(0, len(gains) - 1)))), dtype=np.intp)
    groups = far_apart(places, np.array(gains))
    together = [place for group in groups for place in group.tolist()]
    assert len(groups) <= READINGS
    assert len(together) == len(set(together))
    assert set(together) <= set(places.tolist())
    for group in groups:
        assert (np.diff(np.sort(group)) >= APART).all()
    if len(places):
        assert max(places, key=lambda place: gains[place]) in together or gains.count(max(gains)) > 1


def test_transposition_competes_with_replacements_and_transpositions():
    own, confidence = np.array([0.9, 0.9, 0.9, 0.1, 0.9]), np.array([0.1, 0.1, 0.1, 0.9, 0.1])
    before, ids = scores_of(np.zeros(5), own=own, confidence=confidence), np.arange(5)
    nothing = -np.inf
    after, firsts = with_transpositions(before, ids, np.array([1.0, 3.0, 2.0, 1.5, nothing]))
    assert firsts.tolist() == [1]  # the most likely of the overlapping ones; the last is less likely than a replacement
    assert after.best[1:3].tolist() == [2, 1]
    assert after.log_odds[1:3] == pytest.approx([3.0, 3.0])
    assert (after.own[[0, 3, 4]] == own[[0, 3, 4]]).all()


def test_both_letters_of_a_pair_change_or_neither():
    """The pair (0, 1) has a stronger change within the reach of its second letter only."""
    own = np.array([0.1, 0.1, 0.9, 0.9, 0.01])
    scores = scores_of(np.zeros(5), own=own, confidence=1 - own)
    wanted = own < 0.5
    assert scores.strongest(wanted, 3).tolist() == [True, False, False, False, True]
    assert scores.strongest(wanted, 3, np.array([0])).tolist() == [False, False, False, False, True]
    assert scores.strongest(wanted, 2, np.array([0])).tolist() == [True, True, False, False, True]


def alphabetical(monkeypatch, length=32):
    """A model that predicts each letter from its position in the alphabet alone."""
    loaded = fixer("uniform", length, CharTokenizer("abcdefghijklmnopqrstuvwxyz"))

    def features(x_t, sigma):
        return torch.arange(x_t.shape[1]).expand(x_t.shape)[..., None].float() % 26

    monkeypatch.setattr(loaded.folder.model, "features", features)
    loaded.folder.model.get_buffer("table").copy_(torch.log(torch.eye(26) * 0.5 + 0.5 / 26))
    return loaded


def test_swap_is_reported_as_two_changes(monkeypatch):
    """Each letter alone is not suspicious enough: with an error rate of 1 in 2,000 it stays."""
    loaded = alphabetical(monkeypatch)
    given, meant = "abcdefghikjlmnopqrstuvwxyz", "abcdefghijklmnopqrstuvwxyz"
    usual: dict[str, Any] = {"rate": 0.0005, "t": 0.05}
    assert correct(loaded, given, **usual, swaps=0) == given
    now = correct(loaded, given, **usual, swaps=0.01)
    assert now == meant
    assert [(c.position, c.before, c.after) for c in now.changes] == [(9, "k", "j"), (10, "j", "k")]
    assert all(0.5 < c.confidence == c.error_probability < 1 for c in now.changes)
    assert correct(loaded, given, **usual, swaps=1e-9) == given
    with pytest.raises(ValueError, match="swaps must be in"):
        correct(loaded, given, swaps=1.0)


def test_swap_is_not_half_reverted(monkeypatch):
    loaded = alphabetical(monkeypatch)
    given = "abcdefghikjlmnopqrstuvwxyz"
    half = np.where(np.arange(26) < 10, 0.0, 9.0)  # surprising from the pair's second letter on
    monkeypatch.setattr(sys.modules["cedd.spelling.letter_engine"], "mean_surprise", lambda scores, left: half)
    now = correct(loaded, given, rate=0.0005, t=0.05, swaps=0.01, max_surprise=1.0)
    assert now == "abcdefghijklmnopqrstuvwxyz"
