"""Muon: orthogonalized updates, agreement with torch.optim.Muon, and which parameters it updates."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from cedd.training.config import OptimizerConfig
from cedd.training.muon import Muon, orthogonalized
from tests.interpreted import run_interpreted
from tests.training.runs import final_log, run, updated

SHAPES = [(6, 4), (4, 6), (6, 4), (5, 5)]


STEADY = OptimizerConfig(momentum=0.9, weight_decay=0.1)


def muon_of(matrices: list[nn.Parameter], dtype: torch.dtype | None = None) -> Muon:
    return Muon({str(i): matrix for i, matrix in enumerate(matrices)}, STEADY, dtype)


def step(muon: Muon, gradients: list[Tensor], norm: float, finite: bool, rate: float) -> None:
    """One step with these gradients, clipped to a norm of 1."""
    for parameter, gradient in zip(muon.parameters.values(), gradients, strict=True):
        parameter.grad = gradient
    muon.step(rate, torch.tensor(norm), 1.0, torch.tensor(finite))


@settings(max_examples=50, deadline=None)
@given(rows=st.integers(1, 12), columns=st.integers(1, 12), scale=st.floats(1e-3, 1e3), seed=st.integers(0, 2**31))
def test_orthogonalization_keeps_singular_vectors_and_evens_values(rows: int, columns: int, scale: float, seed: int):
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


def test_steps_match_torch_muon():
    """In bfloat16, as in torch.optim.Muon, one matrix at a time."""
    torch.manual_seed(0)
    ours, theirs = ([nn.Parameter(torch.zeros(shape)) for shape in SHAPES] for _ in range(2))
    with torch.no_grad():
        for mine, other in zip(ours, theirs, strict=True):
            other.copy_(mine.normal_())
    before = [mine.detach().clone() for mine in ours]
    muon = muon_of(ours, torch.bfloat16)
    textbook = torch.optim.Muon(
        theirs, lr=0.05, weight_decay=0.1, momentum=0.9, nesterov=True, adjust_lr_fn="match_rms_adamw"
    )
    for _ in range(4):
        gradients = [torch.randn(shape) for shape in SHAPES]
        for other, gradient in zip(theirs, gradients, strict=True):
            other.grad = gradient.clone()
        textbook.step()
        step(muon, [3 * gradient for gradient in gradients], 3.0, True, 0.05)
    for mine, other, start in zip(ours, theirs, before, strict=True):
        moved, should = mine.detach() - start, other.detach() - start
        assert float((moved - should).norm() / should.norm()) < 1e-4
    assert all(int(count) == 4 for count in muon.counts)


def test_matrix_rate_may_differ_from_adamw_rate():
    moved: list[Tensor] = []
    for rate in (None, 3 * STEADY.rate):
        matrix = nn.Parameter(torch.zeros(4, 6))
        muon = Muon({"matrix": matrix}, replace(STEADY, matrix_rate=rate, weight_decay=0.0))
        step(muon, [torch.eye(4, 6)], 1.0, True, STEADY.rate)
        moved.append(matrix.detach())
    torch.testing.assert_close(moved[1], 3 * moved[0])


def test_nonfinite_gradient_changes_nothing():
    torch.manual_seed(0)
    matrices = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    muon = muon_of(matrices)
    step(muon, [torch.randn(shape) for shape in SHAPES], 1.0, True, 0.1)
    before = [tensor.clone() for tensor in (*muon.values, *muon.momenta, *muon.counts)]
    bad = [torch.full(shape, float("nan")) for shape in SHAPES]
    step(muon, bad, float("nan"), False, 0.1)
    assert all(map(torch.equal, before, (*muon.values, *muon.momenta, *muon.counts)))


SWEPT = [(48, 32), (32, 48), (48, 32), (40, 40)]
COPIED = [True, False, True, False]


def check_sweeps(device: str):
    """Compare five kernel steps, the third not finite, with `Muon.step` in bfloat16, including copies and averages.

    Different rounding of the orthogonalized matrix changes the steps by about a percent.
    """
    torch.manual_seed(0)
    theirs = [nn.Parameter(torch.randn(shape)) for shape in SWEPT]
    ours = [nn.Parameter(other.detach().clone().to(device)) for other in theirs]
    averages = [other.detach().clone() for other in theirs]
    shadow = [mine.detach().clone() for mine in ours]
    copies = [mine.detach().bfloat16() if low else None for mine, low in zip(ours, COPIED, strict=True)]
    plain, swept = muon_of(theirs, torch.bfloat16), muon_of(ours)
    swept.use_kernels(shadow, copies)
    start = [average.clone() for average in averages]
    for number in range(5):
        gradients = [torch.randn(shape).bfloat16() for shape in SWEPT]
        finite, pace = number != 2, 0.0 if number == 3 else 0.1 / (number + 1)
        if not finite:
            gradients[0][0, 0] = float("nan")
        step(plain, [gradient.float() for gradient in gradients], 3.0, finite, 0.05)
        for average, value in zip(averages, plain.values, strict=True):
            average.lerp_(value, pace)
        moved = [
            g.to(device, torch.bfloat16 if low else torch.float32) for g, low in zip(gradients, COPIED, strict=True)
        ]
        swept.table.find(moved)
        swept.sweep(0.05, torch.tensor(3.0, device=device), torch.tensor(float(finite), device=device), pace)
    for mine, other, before in zip(swept.values, plain.values, start, strict=True):
        assert float((mine.cpu() - other).norm() / (other - before).norm()) < 0.03
    for mine, other in zip(swept.momenta, plain.momenta, strict=True):
        torch.testing.assert_close(mine.cpu(), other, rtol=1e-4, atol=1e-5)
    for mine, other, before in zip(shadow, averages, start, strict=True):
        assert float((mine.cpu() - other).norm() / (other - before).norm()) < 0.03
    for value, copy in zip(swept.values, copies, strict=True):
        if copy is not None:  # the interpreter rounds towards zero, the device to the nearest
            ulp = 2.0**-7 if device == "cpu" else 0.0
            torch.testing.assert_close(copy.float(), value.bfloat16().float(), rtol=ulp, atol=0)
    assert {int(count) for count in (*swept.counts, *plain.counts)} == {4}


def test_sweep_kernels_interpreted():
    run_interpreted("from tests.training.test_muon import check_sweeps; check_sweeps('cpu')")


@pytest.mark.gpu
def test_sweep_kernels_on_cuda():
    check_sweeps("cuda")


CONFIG = OptimizerConfig(matrices="muon", rate=1e-2, eps=1e-6, weight_decay=0.1, clip=0.1)


def test_muon_updates_block_matrices_and_adamw_everything_else():
    update = updated(CONFIG, "cpu", plain=True)
    adamw, muon = update.optimizers
    assert len(muon.parameters) == 2 * 4
    assert all(name.startswith("backbone.blocks.") and name.endswith(".weight") for name in muon.parameters)
    assert {*adamw.parameters, *muon.parameters} == {name for name, _ in update.model.named_parameters()}
    assert not adamw.parameters.keys() & muon.parameters.keys()
    moments = ("exp_avg", "exp_avg_sq")
    assert adamw.tensors().keys() == {f"{moment}/{name}" for moment in moments for name in adamw.parameters}
    assert muon.tensors().keys() == {f"exp_avg/{name}" for name in muon.parameters}
    assert {int(count) for count in (*adamw.counts, *muon.counts)} == {3}
    for name, parameter in update.parameters.items():
        copy = update.copies[name]
        assert copy is None or torch.equal(copy, parameter.detach().to(copy.dtype))
        assert not torch.equal(update.ema.shadow[name], parameter)


@pytest.mark.gpu
def test_fused_and_plain_updates_agree_on_cuda():
    """AdamW agrees up to rounding; Muon within 5% of its three steps of 2e-3 per entry, as N may round differently."""
    fused, plain = updated(CONFIG, "cuda", plain=False), updated(CONFIG, "cuda", plain=True)
    assert fused.swept
    for ours, theirs in (
        (fused.parameters, plain.parameters),
        (fused.ema.shadow, plain.ema.shadow),
        (fused.copies, plain.copies),
    ):
        for name, a in ours.items():
            if a is not None:
                low, room = a.dtype == torch.bfloat16, 3e-4 if name in fused.optimizers[1].parameters else 1e-4
                torch.testing.assert_close(a, theirs[name], rtol=2**-6 if low else 1e-3, atol=room)


def test_training_run_learns_with_muon(config):
    """Fifty steps on words in random order, at a rate at which AdamW learns too."""
    done = run(config("run", {"optimizer.matrices": "muon", "steps": 50, "model.dropout": 0.0, "optimizer.rate": 5e-3}))
    assert done.finished
    losses = [record["loss"] for record in final_log(config("run").out) if record["kind"] == "train"]
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])
