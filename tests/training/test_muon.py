"""Muon: directions with even singular values, torch's own steps, and what they leave alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from cedd.training.config import OptimizerConfig
from cedd.training.loop import Trainer
from cedd.training.muon import Muon, orthogonalized
from cedd.training.optimizer import norm_of
from tests.training.runs import final_log, run, updated

SHAPES = [(6, 4), (4, 6), (6, 4), (5, 5)]


def states_of(matrices: list[nn.Parameter]) -> list[dict[str, Tensor]]:
    return [{"exp_avg": torch.zeros_like(matrix), "step": torch.zeros(())} for matrix in matrices]


@settings(max_examples=50, deadline=None)
@given(rows=st.integers(1, 12), columns=st.integers(1, 12), scale=st.floats(1e-3, 1e3), seed=st.integers(0, 2**31))
def test_singular_vectors_stay_and_singular_values_become_about_one(rows: int, columns: int, scale: float, seed: int):
    generator = torch.Generator().manual_seed(seed)
    rank = min(rows, columns)
    left = torch.linalg.qr(torch.randn(rows, rank, generator=generator)).Q
    right = torch.linalg.qr(torch.randn(columns, rank, generator=generator)).Q
    values = 0.05 + 0.95 * torch.rand(rank, generator=generator)
    even = orthogonalized((scale * left * values @ right.mT)[None])[0]
    found = left.mT @ even @ right
    assert even.shape == (rows, columns)
    assert (found.diagonal() > 0.6).all()
    assert (found.diagonal() < 1.25).all()
    torch.testing.assert_close(found, found.diagonal().diag(), rtol=0, atol=2e-4)
    torch.testing.assert_close(left @ found @ right.mT, even, rtol=0, atol=2e-4)


def test_steps_are_torchs():
    """In bfloat16, as torch's own, one matrix at a time."""
    torch.manual_seed(0)
    ours, theirs = ([nn.Parameter(torch.zeros(shape)) for shape in SHAPES] for _ in range(2))
    with torch.no_grad():
        for mine, other in zip(ours, theirs, strict=True):
            other.copy_(mine.normal_())
    before = [mine.detach().clone() for mine in ours]
    muon = Muon(ours, states_of(ours), momentum=0.9, decay=0.1, dtype=torch.bfloat16)
    textbook = torch.optim.Muon(
        theirs, lr=0.05, weight_decay=0.1, momentum=0.9, nesterov=True, adjust_lr_fn="match_rms_adamw"
    )
    for _ in range(4):
        gradients = [torch.randn(shape) for shape in SHAPES]
        for other, gradient in zip(theirs, gradients, strict=True):
            other.grad = gradient.clone()
        textbook.step()
        muon.step([3 * gradient for gradient in gradients], torch.tensor(3.0), torch.tensor(True), 0.05)
    for mine, other, start in zip(ours, theirs, before, strict=True):
        moved, should = mine.detach() - start, other.detach() - start
        assert float((moved - should).norm() / should.norm()) < 1e-4
    assert all(int(count) == 4 for count in muon.counts)


def test_a_bad_gradient_changes_nothing():
    torch.manual_seed(0)
    matrices = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    states = states_of(matrices)
    muon = Muon(matrices, states, momentum=0.9, decay=0.1)
    muon.step([torch.randn(shape) for shape in SHAPES], torch.tensor(1.0), torch.tensor(True), 0.1)
    before = [tensor.clone() for tensor in (*muon.values, *muon.momenta, *muon.counts)]
    bad = [torch.full(shape, float("nan")) for shape in SHAPES]
    muon.step(bad, torch.tensor(float("nan")), torch.tensor(False), 0.1)
    assert all(map(torch.equal, before, (*muon.values, *muon.momenta, *muon.counts)))


def test_sharding_is_refused_before_any_work(config, monkeypatch):
    def work(_: Trainer) -> None:
        pytest.fail("the data was prepared")

    monkeypatch.setattr(Trainer, "_prepare_data", work)
    monkeypatch.setattr("cedd.training.loop.choose_strategy", lambda *_: "fsdp")
    with pytest.raises(ValueError, match="use --strategy ddp, or adamw"):
        run(config("run", {"optimizer.matrices": "muon"}))


def test_the_norm_of_rounded_gradients_is_not_rounded():
    gradients = [torch.randn(40, 30).bfloat16(), torch.randn(7, 5)]
    wanted = torch.cat([gradient.float().flatten() for gradient in gradients]).norm()
    torch.testing.assert_close(norm_of(gradients), wanted, rtol=1e-5, atol=0)


CONFIG = OptimizerConfig(matrices="muon", rate=1e-2, eps=1e-6, weight_decay=0.1, clip=0.1)


def test_the_matrices_of_blocks_are_muons_and_all_else_adamws():
    update = updated(CONFIG, "cpu", plain=True)
    names = [name for name, _ in update.model.named_parameters()]
    matrices = [names[i] for i in update.matrices]
    assert len(matrices) == 2 * 4
    assert all(name.startswith("backbone.blocks.") and name.endswith(".weight") for name in matrices)
    assert [("exp_avg_sq" in state) for state in update.states] == [name not in matrices for name in names]
    assert {int(state["step"]) for state in update.states} == {3}
    for parameter, copy, average in zip(update.parameters, update.copies, update.shadow, strict=True):
        assert copy is None or torch.equal(copy, parameter.detach().to(copy.dtype))
        assert not torch.equal(average, parameter)


@pytest.mark.gpu
def test_both_ways_to_update_agree_on_the_device():
    fused, plain = updated(CONFIG, "cuda", plain=False), updated(CONFIG, "cuda", plain=True)
    assert fused.found is not None
    for kind in ("parameters", "shadow", "copies"):
        for a, b in zip(getattr(fused, kind), getattr(plain, kind), strict=True):
            if a is not None:
                low = a.dtype == torch.bfloat16
                torch.testing.assert_close(a, b, rtol=2**-6 if low else 1e-3, atol=1e-4)


def test_a_run_learns_by_it(config, no_plot):
    """Fifty steps on words in random order, at a rate at which AdamW learns too."""
    done = run(config("run", {"optimizer.matrices": "muon", "steps": 50, "model.dropout": 0.0, "optimizer.rate": 5e-3}))
    assert done.finished
    losses = [record["loss"] for record in final_log(config("run").out) if record["kind"] == "train"]
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])
