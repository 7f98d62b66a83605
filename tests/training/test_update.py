"""The fused kernel that updates all parameters, against torch.optim.AdamW and a plain average."""

import pytest
import torch
from torch import nn

from cedd.training.config import OptimizerConfig
from tests.interpreted import compile_for_hopper, run_interpreted
from tests.training.runs import updated

SIZES = [(3,), (64, 64), (5000,), (1,), (2, 4097)]
COPIED = [False, True, False, False, True]
CONFIG = OptimizerConfig(rate=1e-2, beta1=0.9, beta2=0.99, eps=1e-6, weight_decay=0.1, clip=0.1)


def check_table(device):
    """Compare five steps (the third not finite, the fourth not averaged) with torch, including averages and copies."""
    from cedd.training.update_triton import TensorTable

    torch.manual_seed(0)
    start = [torch.randn(size) for size in SIZES]
    theirs = [nn.Parameter(value.clone()) for value in start]
    averages = [value.clone() for value in start]
    textbook = torch.optim.AdamW(theirs, lr=CONFIG.rate, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.1)

    ours = [value.clone().to(device) for value in start]
    first, second = ([torch.zeros_like(value) for value in ours] for _ in range(2))
    shadow = [value.clone() for value in ours]
    copies = [value.bfloat16() if copied else None for value, copied in zip(ours, COPIED, strict=True)]
    table = TensorTable(ours, first, second, shadow, copies)
    count = torch.zeros((), device=device)
    for step in range(5):
        types = [torch.bfloat16 if copied else torch.float32 for copied in COPIED]
        low = [torch.randn(size).to(dtype) for size, dtype in zip(SIZES, types, strict=True)]
        gradients = [gradient.float() for gradient in low]
        norm = torch.stack([g.norm() for g in gradients]).norm()
        finite, excess, pace = step != 2, max(1.0, norm.item() / 20), 0.0 if step == 3 else 0.1 / (step + 1)
        if not finite:
            low[1][0, 0] = float("nan")
        if finite:
            for parameter, gradient in zip(theirs, gradients, strict=True):
                parameter.grad = gradient / excess
            textbook.step()
        for average, parameter in zip(averages, theirs, strict=True):
            average.lerp_(parameter.detach(), pace)
        moved = [gradient.to(device) for gradient in low]  # at a new address each time
        table.find(moved)
        if finite:
            torch.testing.assert_close(table.norm().cpu(), norm, rtol=1e-5, atol=0)
        else:
            assert not torch.isfinite(table.norm())
        good = torch.tensor(float(finite), device=device)
        settings = {"rate": CONFIG.rate, "betas": (0.9, 0.99), "epsilon": 1e-6, "decay": 0.1, "pace": pace}
        table.update(count, torch.tensor(excess, device=device), good, **settings)
        count += good
        for kind, found, wanted in (
            ("value", ours, [p.detach() for p in theirs]),
            ("average", shadow, averages),
            ("first", first, [textbook.state[p]["exp_avg"] for p in theirs]),
            ("second", second, [textbook.state[p]["exp_avg_sq"] for p in theirs]),
        ):
            for a, b in zip(found, wanted, strict=True):
                torch.testing.assert_close(a.cpu(), b, rtol=2e-5, atol=2e-6, msg=lambda m, kind=kind: f"{kind}: {m}")
        for value, copy in zip(ours, copies, strict=True):
            if copy is not None:  # the interpreter rounds towards zero, the device to the nearest
                ulp = 2.0**-7 if device == "cpu" else 0.0
                torch.testing.assert_close(copy.float(), value.bfloat16().float(), rtol=ulp, atol=0)


def test_kernel_interpreted():
    run_interpreted("from tests.training.test_update import check_table; check_table('cpu')")


BASE = {"table": "*i64", "which": "*i32", "starts": "*i64", "sizes": "*i64"}
SCALARS = ("rate", "beta1", "beta2", "log_beta1", "log_beta2", "epsilon", "decay", "pace", "keep")
POINTERS = ("partial", "count", "excess", "finite", "lengths")


@pytest.mark.parametrize("kernel", ["_squares_kernel", "_update_kernel", "_look_ahead_kernel", "_move_kernel"])
@pytest.mark.parametrize("copied", [True, False])
@pytest.mark.parametrize("averaged", [True, False])
def test_kernels_compile_with_wide_loads_and_stores(kernel: str, copied: bool, averaged: bool):
    pytest.importorskip("triton")
    from cedd.training import update_triton

    types = {**BASE, **dict.fromkeys(SCALARS, "fp32"), **dict.fromkeys(POINTERS, "*fp32"), "tensors": "i32"}
    constants = {"BLOCK": update_triton.BLOCK, "COPIED": copied, "AVERAGED": averaged}
    warps = update_triton.NORM_WARPS if kernel == "_squares_kernel" else update_triton.WARPS
    code = compile_for_hopper(getattr(update_triton, kernel), types, constants, warps)
    assert "ld.global.v4.b32" in code
    assert ("st.global.v4.b32" in code) == (kernel != "_squares_kernel")


@pytest.mark.gpu
def test_kernel_on_cuda():
    check_table("cuda")


def test_the_plain_update_skips_averages_and_keeps_copies():
    update = updated(CONFIG, "cpu", plain=False)
    assert all(optimizer.table is None for optimizer in update.optimizers)  # no kernel on a CPU
    assert update.ema.updates == 4
    assert {int(count) for optimizer in update.optimizers for count in optimizer.counts} == {3}
    for name, copy in update.sources.items():
        assert torch.equal(update.parameters[name].to(copy.dtype), copy)


@pytest.mark.gpu
def test_fused_and_plain_updates_agree_on_cuda():
    fused, plain = updated(CONFIG, "cuda", plain=False), updated(CONFIG, "cuda", plain=True)
    assert fused.swept
    for ours, theirs in (
        (fused.parameters, plain.parameters),
        (fused.ema.shadow, plain.ema.shadow),
        (fused.sources, plain.sources),
    ):
        for a, b in zip(ours.values(), theirs.values(), strict=True):
            low = a.dtype == torch.bfloat16
            torch.testing.assert_close(a, b, rtol=2**-7 if low else 1e-5, atol=1e-6)
