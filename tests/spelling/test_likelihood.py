"""How likely versions of a text are: by a model that shuffles, and by one that fills masks."""

import numpy as np
import pytest
import torch

from cedd.models.integers import has_integer_products
from cedd.spelling import likelihood
from cedd.spelling.likelihood import LeaveOneOut, LeftToRight, likelihoods
from cedd.tasks import load
from tests.tasks.models import save_random

TEXT = "the cat sat on the mat and the dog sat on the cat"
VERSIONS = [(4, 7, "cat"), (4, 7, "cot"), (4, 7, "cats"), (4, 7, "a dog"), (0, 3, "she"), (46, 49, "mat")]


@pytest.fixture
def filler(tmp_path, monkeypatch):
    """A model that fills masks, in float32 wherever it runs."""
    monkeypatch.setattr(likelihood, "has_integer_products", lambda: False)
    return load(save_random(tmp_path / "absorb", "absorb", "cedd", told="nothing"), device="cpu")


def test_the_way_is_that_of_the_process(filler, tmp_path):
    assert isinstance(likelihoods(filler, None), LeftToRight)
    assert isinstance(likelihoods(load(save_random(tmp_path / "u", "uniform"), device="cpu"), 0.1), LeaveOneOut)


def test_masks_are_filled_from_left_to_right(filler):
    """As the chain rule says, one reading after another; a version's score does not depend on the others."""
    judge = LeftToRight(filler, 0.1)
    found = judge(TEXT, VERSIONS)
    for version, (score, tokens) in zip(VERSIONS, found, strict=True):
        before, middle, after = judge.window(TEXT, *version)
        read = filler.tokenizer.decode(np.array(before + middle + after))
        assert read in TEXT[: version[0]] + version[2] + TEXT[version[1] :]
        assert tokens == len(middle)
        expected = 0.0
        for done, token in enumerate(middle):
            row = torch.tensor([[*before, *middle[:done], *[judge.mask] * (len(middle) - done), *after]])
            outputs = filler.model(row, filler.process.noise(0.1).sigma.expand(1))[0, len(before) + done]
            expected += float(outputs[: filler.process.vocab_size].log_softmax(-1)[token])
        assert score == pytest.approx(expected, abs=1e-4)
        assert judge(TEXT, [version])[0, 0] == pytest.approx(score, abs=1e-4)


def test_versions_that_begin_alike_share_readings(filler, monkeypatch):
    judge, read = LeftToRight(filler, 0.1), list[int]()
    first = judge.first_masks
    monkeypatch.setattr(judge, "first_masks", lambda ids: read.append(len(ids)) or first(ids))
    judge(TEXT, [(4, 7, "cat"), (4, 7, "car")])  # " ca_" is read once, and so is all before it
    assert sum(read) == len(judge.window(TEXT, 4, 7, "cat")[1])


def test_a_line_end_is_a_space_and_a_paragraphs_end_is_not(filler):
    judge = LeftToRight(filler, 0.1)
    plain = judge("the cat sat on the mat", [(8, 11, "sit")])
    for end in ("\n", "\r\n"):
        wrapped = f"the cat{end}sat on{end}the mat"
        start = wrapped.index("sat")
        assert np.array_equal(judge(wrapped, [(start, start + 3, "sit")]), plain)
    assert not np.array_equal(judge("the cat\n\nsat on the mat", [(9, 12, "sit")]), plain)


@pytest.mark.skipif(not has_integer_products(), reason="this CPU has no units for products of int8")
def test_a_reading_in_int8_is_about_the_same_and_the_model_stays_as_it_is(filler, monkeypatch):
    """Half a percent of each factor is rounded off: sums of log-probabilities move by less than a hundredth."""
    torch.manual_seed(0)
    torch.nn.init.normal_(filler.model.backbone.conditioning.modulation.bias, std=0.5)  # blocks begin as the identity
    whole = LeftToRight(filler, 0.1)(TEXT, VERSIONS)
    monkeypatch.setattr(likelihood, "has_integer_products", lambda: True)
    judge = LeftToRight(filler, 0.1)
    rounded = judge(TEXT, VERSIONS)
    assert judge.network.model is LeftToRight(filler, 0.1).network.model is not filler.model
    assert not np.array_equal(rounded, whole)
    np.testing.assert_allclose(rounded, whole, rtol=0.01)
    for version, score in zip(VERSIONS, rounded, strict=True):  # which does not depend on what is read beside it
        np.testing.assert_allclose(judge(TEXT, [version])[0], score, atol=1e-5)
    monkeypatch.setattr(likelihood, "has_integer_products", lambda: False)
    np.testing.assert_array_equal(LeftToRight(filler, 0.1)(TEXT, VERSIONS), whole)
