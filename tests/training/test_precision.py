"""The precision of matrix products in training steps."""

from collections.abc import Callable
from typing import ClassVar

import pytest
import torch

from cedd.models.kernels import matmul
from cedd.models.kernels.matmul import bf16_matmul, float32_matmul, has_bf16_matmul
from cedd.training.config import TrainConfig
from cedd.training.precision import Precision
from tests.training.runs import assert_resumes, final_log, run

Make = Callable[..., TrainConfig]
needs_units = pytest.mark.skipif(not has_bf16_matmul(), reason="this CPU has no units for bfloat16 matrices")


@pytest.mark.parametrize(
    ("wanted", "device", "low", "autocasts"),
    [
        ("auto", "cuda", True, True),
        ("auto", "cpu", has_bf16_matmul(), False),
        ("auto", "mps", False, False),
        ("bf16", "mps", True, True),
        ("bf16", "cpu", True, False),
        ("float32", "cuda", False, False),
    ],
)
def test_precision_is_chosen_by_option_and_device(wanted, device, low, autocasts):
    chosen = Precision.choose(wanted, device)
    assert (chosen.low, chosen.autocasts) == (low, autocasts)


def test_compiled_cpu_network_defaults_to_float32():
    assert not Precision.choose("auto", "cpu", compiled=True).low
    assert Precision.choose("auto", "cuda", compiled=True).low
    assert Precision.choose("bf16", "cpu", compiled=True).low


def product_error() -> float:
    """The largest error of a matrix product with entries of size 1."""
    a, b = torch.randn(2, 256, 256, generator=torch.Generator().manual_seed(0)).unbind()
    return float((a @ b - (a.double() @ b.double())).abs().max())


def switch() -> str:
    """The precision that torch uses for oneDNN matrix products."""
    return getattr(torch.backends.mkldnn, "matmul").fp32_precision  # noqa: B009 - unknown to type checkers


class Watched(torch.autograd.Function):
    """The identity, recording the precision of products in its forward and backward passes."""

    seen: ClassVar[list[str]] = []

    @staticmethod
    def forward(ctx, x):
        Watched.seen.append(switch())
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[override]
        Watched.seen.append(switch())
        return gradient


@pytest.mark.skipif(matmul._switch() is None, reason="this torch version lacks the setting")
def test_float32_matmul_applies_in_both_passes(monkeypatch):
    monkeypatch.setattr(matmul, "has_bf16_matmul", lambda: True)  # the switch can be set on any CPU
    Watched.seen.clear()
    x = torch.randn(3, requires_grad=True)
    with bf16_matmul():
        y = float32_matmul(Watched.apply)(Watched.apply(x) * 2)
        Watched.apply(y).sum().backward()
        assert switch() == "bf16"
    assert Watched.seen == ["bf16", "none", "bf16", "bf16", "none", "bf16"]
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((3,), 2.0))
    assert float32_matmul(torch.neg)(x).equal(-x)


@needs_units
def test_only_products_inside_context_are_rounded():
    before = switch()
    with Precision("cpu", low=True).both_passes():
        inside = product_error()
        with pytest.raises(RuntimeError), Precision("cpu", low=True).both_passes():
            raise RuntimeError
    assert 1e-3 < inside < 1.0  # 2^-9 of entries whose sums are 16 long
    assert product_error() < 1e-3
    assert switch() == before
    with Precision("cpu", low=False).both_passes():
        assert product_error() < 1e-3


@pytest.mark.slow
def test_bf16_cpu_run_learns_like_float32(config: Make):
    """Up to rounding on CPUs with bfloat16 units, exactly on others."""
    for precision in ("float32", "bf16"):
        run(config(precision, {"precision": precision, "steps": 40}))
    wide, low = ([r["loss"] for r in final_log(config(name).out) if "loss" in r] for name in ("float32", "bf16"))
    assert wide[-1] < 0.8 * wide[0]
    assert torch.tensor(low).sub(torch.tensor(wide)).abs().max() < (0.1 if has_bf16_matmul() else 1e-12)


@pytest.mark.slow
def test_resumed_bf16_run_is_bit_identical(config: Make):
    assert_resumes(config, {"precision": "bf16"})
