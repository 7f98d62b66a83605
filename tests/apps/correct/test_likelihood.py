"""Likelihoods of alternative texts under models that shuffle and models that mask."""

import numpy as np
import pytest
import torch

from cedd.apps.correct import left_to_right
from cedd.apps.correct.left_to_right import LeftToRight, load_left_to_right, reads_without_torch
from cedd.apps.correct.likelihood import LeaveOneOut, likelihoods
from cedd.models.locate import packaged
from cedd.models.transformer import Transformer
from cedd.storage import read_json
from cedd.tasks import load
from tests.tasks.models import save_random

TEXT = "the cat sat on the mat and the dog sat on the cat"
VERSIONS = [(4, 7, "cat"), (4, 7, "cot"), (4, 7, "cats"), (4, 7, "a dog"), (0, 3, "she"), (46, 49, "mat")]


@pytest.fixture(params=[{"time_input": "none"}, {"time_input": "sigma", "largest_score": 8.0}])
def filler(tmp_path, request):
    """A masked model."""
    folder = save_random(tmp_path / "absorb", "absorb", "cedd", depth=2, **request.param)
    model = load(folder, device="cpu")
    torch.manual_seed(0)
    assert isinstance(model.model, Transformer)
    assert model.model.backbone.conditioning is not None
    torch.nn.init.normal_(model.model.backbone.conditioning.modulation.bias, std=0.5)  # blocks begin as the identity
    return model


def judge_of(model) -> LeftToRight:
    judge = likelihoods(model, None)
    assert isinstance(judge, LeftToRight)
    return judge


def test_process_determines_scorer(filler, tmp_path):
    assert isinstance(likelihoods(filler, None), LeftToRight)
    assert isinstance(likelihoods(load(save_random(tmp_path / "u", "uniform"), device="cpu"), 0.1), LeaveOneOut)
    with pytest.raises(ValueError, match="autoregressive"):
        likelihoods(load(save_random(tmp_path / "ar", "absorb", "ar"), device="cpu"), None)


@torch.no_grad()
def chain_rule_log_prob(model, judge, version) -> float:
    """log p of an alternative's tokens in torch, with one call for each token and the whole window."""
    ((blank, middle),) = judge.located(TEXT, [version])
    read = model.tokenizer.decode(np.array(blank.before + middle + blank.after))
    assert read in TEXT[: version[0]] + version[2] + TEXT[version[1] :]
    total = 0.0
    for done, token in enumerate(middle):
        row = torch.tensor([[*blank.before, *middle[:done], *[judge.mask] * (len(middle) - done), *blank.after]])
        outputs = model.model(row, model.process.noise(0.1).sigma.expand(1).float())[0, len(blank.before) + done]
        total += float(outputs[: model.process.vocab_size].log_softmax(-1)[token])
    return total


def test_masks_are_filled_from_left_to_right(filler, monkeypatch):
    """Equal to the chain rule, for which the whole window is read again after every token; the score of a version does
    not depend on the others."""
    monkeypatch.setattr(left_to_right, "NEAR", 100)
    judge = judge_of(filler)
    found = judge(TEXT, VERSIONS)
    for version, (score, tokens) in zip(VERSIONS, found, strict=True):
        ((_, middle),) = judge.located(TEXT, [version])
        assert tokens == len(middle)
        assert score == pytest.approx(chain_rule_log_prob(filler, judge, version), abs=1e-4)
        assert judge(TEXT, [version])[0, 0] == pytest.approx(score, abs=1e-4)


def test_batch_size_is_limited(filler, monkeypatch):
    """Except for alternatives at one place; the scores do not change."""
    judge, read = judge_of(filler), list[tuple[int, int]]()

    def log_probs(blanks, questions, true=judge.log_probs):
        read.append((len(blanks), len(questions)))
        return true(blanks, questions)

    monkeypatch.setattr(judge, "log_probs", log_probs)
    whole = judge(TEXT, VERSIONS)
    ((places, questions),) = read
    assert places == 3
    monkeypatch.setattr(left_to_right, "QUERIES", 7)
    np.testing.assert_allclose(judge(TEXT, VERSIONS), whole, atol=1e-4)
    assert read[1:] == [(1, questions - 7), (2, 7)]


def test_one_token_is_exact_and_several_improve_with_neighbours(filler, monkeypatch):
    judge, single = judge_of(filler), [(3, 4, "T"), (7, 8, ".")]
    exact = [chain_rule_log_prob(filler, judge, version) for version in single]
    np.testing.assert_allclose(judge(TEXT, single), [[score, 1] for score in exact], atol=1e-4)
    exact, off = [chain_rule_log_prob(filler, judge, version) for version in VERSIONS], list[float]()
    for near in (0, 2, 8, 100):
        monkeypatch.setattr(left_to_right, "NEAR", near)
        off.append(np.abs(judge(TEXT, VERSIONS)[:, 0] - exact).mean())
    assert off[0] > off[1] > off[2] > off[3]
    assert off[3] < 1e-4


def test_scores_of_packaged_model_are_close_to_chain_rule(monkeypatch):
    """The network's weight is a third, so a few tenths of a nat are small compared with the differences."""
    judge = load_left_to_right(packaged("english"))
    text = "He was quite certain that the goverment would not agree to such an extrordinary plan."
    versions = [(30, 39, word) for word in ("goverment", "government", "governments", "governess", "covenant")]
    about = judge(text, versions)
    monkeypatch.setattr(left_to_right, "NEAR", 100)
    exact = judge(text, versions)
    assert exact[:, 1].tolist() == about[:, 1].tolist()
    assert exact[:, 1].max() > 1
    assert np.ptp(exact[:, 0]) > 10
    np.testing.assert_allclose(about[:, 0], exact[:, 0], atol=1.0)
    assert about[:, 0].argmax() == exact[:, 0].argmax() == 1


def test_alternatives_with_common_prefix_share_calls(filler, monkeypatch):
    judge, read = judge_of(filler), list[int]()
    network = judge.network.read
    monkeypatch.setattr(
        judge.network, "read", lambda *parts: read.extend(len(p.wanted) for p in parts) or network(*parts)
    )
    judge(TEXT, [(4, 7, "cat"), (4, 7, "car")])  # " ca_" is read once, and so is all before it
    ((_, middle),) = judge.located(TEXT, [(4, 7, "cat")])
    assert sum(read) == 1 + len(middle)  # the surrounding text with one mask is one more


def test_line_break_is_read_as_space_but_paragraph_break_is_not(filler):
    judge = judge_of(filler)
    plain = judge("the cat sat on the mat", [(8, 11, "sit")])
    for end in ("\n", "\r\n"):
        wrapped = f"the cat{end}sat on{end}the mat"
        start = wrapped.index("sat")
        assert np.array_equal(judge(wrapped, [(start, start + 3, "sit")]), plain)
    assert not np.array_equal(judge("the cat\n\nsat on the mat", [(9, 12, "sit")]), plain)


def test_packaged_model_gives_same_scores_without_torch():
    folder = packaged("english")
    assert reads_without_torch(read_json(folder / "config.json"))
    assert not reads_without_torch(read_json(packaged("english-char") / "config.json"))
    versions = [(10, 14, "form"), (10, 14, "from"), (19, 24, "table"), (19, 24, "tabel")]
    text, judges = "He walked form the tabel", (load_left_to_right(folder), judge_of(load(folder, "cpu")))
    alone, loaded = (judge(text, versions) for judge in judges)
    np.testing.assert_allclose(alone, loaded, atol=1e-4)
