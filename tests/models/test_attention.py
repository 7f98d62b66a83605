"""Attention by one program a head, against torch's with the turning written out."""

from typing import Any

import pytest
import torch
from torch import nn

from cedd.models.kernels import attention as attention_module
from cedd.models.kernels.attention import attend
from cedd.models.kernels.rotation import rotary_tables, rotate
from cedd.models.transformer import Transformer, config_from_preset
from tests.interpreted import compiled_for_a_chip, run_interpreted

SHAPES = [(2, 7, 3, 32), (1, 16, 2, 64), (2, 1, 1, 32), (1, 33, 1, 128), (1, 128, 2, 64)]
"""B, L, H, W."""


def inputs(shape, dtype=torch.float32, device="cpu"):
    """q, k and v in which nothing is special, their tables, and the gradient of what comes out."""
    torch.manual_seed(0)
    batch, length, heads, width = shape
    qkv = (1.5 * torch.randn(batch, length, 3, heads, width, device=device)).to(dtype).requires_grad_()
    gradient = torch.randn(batch, length, heads, width, device=device).to(dtype)
    return qkv, [table.to(device) for table in rotary_tables(length, width)], gradient


def plain(qkv, cosine, sine, causal):
    """Written out, in float64."""
    queries, keys, values = rotate(qkv, cosine, sine).transpose(1, 3).unbind(2)
    scores = queries @ keys.transpose(-1, -2) / queries.shape[-1] ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    return (scores.softmax(-1) @ values).transpose(1, 2)


def results(function, qkv, gradient):
    mixed = function(qkv)
    return mixed.detach().double(), torch.autograd.grad(mixed, qkv, gradient.to(mixed.dtype))[0].double()


def check_kernel(device, tolerance, dtype=torch.float32, shapes=SHAPES):
    from cedd.models.kernels.attention_triton import attend_short

    for shape in shapes:
        for causal in (False, True):
            qkv, (cosine, sine), gradient = inputs(shape, dtype, device)
            exact = qkv.detach().double().requires_grad_()
            wanted = results(lambda x: plain(x, cosine.double(), sine.double(), causal), exact, gradient)  # noqa: B023
            got = results(lambda x: attend_short(x, cosine, sine, causal), qkv, gradient)  # noqa: B023
            for name, a, b in zip(("mixed", "d_qkv"), got, wanted, strict=True):
                error = (a - b).norm() / b.norm()
                assert error < tolerance, f"{name} {shape} causal={causal}: {error}"


def test_kernel_interpreted():
    run_interpreted("from tests.models.test_attention import check_kernel; check_kernel('cpu', 2e-6)")


@pytest.mark.parametrize("causal", [False, True])
def test_without_a_kernel(causal):
    torch.manual_seed(1)
    x, projection = torch.randn(2, 9, 12, dtype=torch.float64), nn.Linear(12, 36, bias=False).double()
    cosine, sine = (table.double() for table in rotary_tables(9, 4))
    wanted = plain(projection(x).unflatten(-1, (3, 3, -1)), cosine, sine, causal)
    torch.testing.assert_close(attend(x, projection, 3, (cosine, sine), causal), wanted)


@pytest.mark.parametrize(
    ("length", "heads", "dtype", "short"),
    [
        (128, 12, torch.bfloat16, True),
        (1, 6, torch.float16, True),
        (129, 12, torch.bfloat16, False),  # S would not fit
        (128, 12, torch.float32, False),  # the products would be rounded
        (128, 16, torch.bfloat16, False),  # heads of 48
        (128, 48, torch.bfloat16, False),  # halves of 8
    ],
)
def test_which_sequences_are_short(monkeypatch, length, heads, dtype, short):
    monkeypatch.setattr(attention_module, "takes_kernels", lambda tensor: True)
    assert attention_module.is_short(torch.zeros(2, length, 768, dtype=dtype), heads) == short
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = attention_module.is_short(torch.zeros(2, length, 768), heads)
    assert low == (short or dtype == torch.float32)
    assert not attention_module.is_short(torch.zeros(1, 1, 768, dtype=dtype).expand(2**16, length, -1), heads)
    monkeypatch.undo()
    assert not attention_module.is_short(torch.zeros(2, length, 768, dtype=dtype), heads), "there is no device"


def test_the_kernels_compile_for_a_chip():
    pytest.importorskip("triton")
    from cedd.models.kernels import attention_triton

    types = dict.fromkeys(("qkv", "mixed", "d_mixed", "d_qkv"), "*bf16")
    types |= {"cosine": "*fp32", "sine": "*fp32", "levels": "*fp32", "length": "i32", "scale": "fp32", "slope": "fp32"}
    constants = {"CAUSAL": False, "HALF": 32, "BLOCK": 128}
    kernels: tuple[Any, ...] = (attention_triton._forward_kernel, attention_triton._backward_kernel)
    for kernel in kernels:
        aligned = [name for name in types if name in kernel.arg_names and name not in ("scale", "slope")]
        assert "wgmma" in compiled_for_a_chip(kernel, types, constants, attention_triton.WARPS, aligned)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 1e-3), (torch.bfloat16, 8e-3)])
def test_kernel_on_the_device(dtype, tolerance):
    check_kernel("cuda", tolerance, dtype, [*SHAPES, (32, 128, 12, 64), (3, 100, 12, 64)])


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_a_network_on_the_device(monkeypatch, causal):
    """The same features and gradients, up to bfloat16's rounding, as by torch's attention."""
    torch.manual_seed(0)
    changes = {"dropout": 0.0, "causal": causal, "time_conditioning": not causal, "length": 100}
    config = config_from_preset("char", vocab_size=50, has_mask=True, **changes)
    model, x_t = Transformer(config).cuda(), torch.randint(51, (4, 100), device="cuda")
    with torch.no_grad():  # what starts at zero would hide the attention
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    sigma = None if causal else torch.rand(4, device="cuda")
    found = []
    for short in (attention_module.SHORT, 0):
        monkeypatch.setattr(attention_module, "SHORT", short)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            features = model.features(x_t, sigma)
        found.append((features, *torch.autograd.grad((features.float() ** 2).sum(), list(model.backbone.parameters()))))
    for ours, torchs in zip(*found, strict=True):
        assert (ours.float() - torchs.float()).norm() < 0.03 * torchs.float().norm()
