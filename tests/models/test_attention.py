"""Attention with one Triton program per head, against plain torch with explicit rotation."""

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from cedd.models.kernels import EPSILON
from cedd.models.kernels import attention as attention_module
from cedd.models.kernels.attention import attend, project
from cedd.models.kernels.rotation import rotary_tables, rotate
from cedd.models.transformer import Transformer, config_from_preset
from cedd.network import AttentionPattern
from tests.interpreted import compile_for_hopper, run_interpreted

SHAPES = [(2, 7, 3, 32), (1, 16, 2, 64), (2, 1, 1, 32), (1, 33, 1, 128), (1, 128, 2, 64)]
"""B, L, H, W."""


def inputs(shape, dtype=torch.float32, device="cpu"):
    """Random q, k and v, their rotation tables, and a gradient of the output."""
    torch.manual_seed(0)
    batch, length, heads, width = shape
    qkv = (1.5 * torch.randn(batch, length, 3, heads, width, device=device)).to(dtype).requires_grad_()
    gradient = torch.randn(batch, length, heads, width, device=device).to(dtype)
    return qkv, [table.to(device) for table in rotary_tables(length, width)], gradient


def plain(qkv, cosine, sine, causal, largest_score=None):
    """Reference implementation in float64."""
    return plain_of_rotated(rotate(qkv, cosine, sine), causal, largest_score)


def plain_of_rotated(qkv, causal, largest_score=None):
    queries, keys, values = qkv.transpose(1, 3).unbind(2)
    scores = queries @ keys.transpose(-1, -2) / queries.shape[-1] ** 0.5
    if largest_score is not None:  # the cosine of the angle between a query and a key, times the largest score
        squares = [part.square().mean(-1) + EPSILON for part in (queries, keys)]
        scores = scores * largest_score / (values.shape[-1] * squares[0][..., None] * squares[1][..., None, :]) ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    return (scores.softmax(-1) @ values).transpose(1, 2)


def results(function, qkv, gradient):
    mixed = function(qkv)
    return mixed.detach().double(), torch.autograd.grad(mixed, qkv, gradient.to(mixed.dtype))[0].double()


def check_kernel(device, tolerance, dtype=torch.float32, shapes=SHAPES):
    from cedd.models.kernels.attention_triton import attend_short

    check_layouts(attend_short, device, dtype)
    for shape in shapes:
        for options in ((False, None), (True, None), (False, 12.0), (True, 5.0)):
            qkv, (cosine, sine), gradient = inputs(shape, dtype, device)
            exact = qkv.detach().double().requires_grad_()
            wanted = results(lambda x: plain(x, cosine.double(), sine.double(), *options), exact, gradient)  # noqa: B023
            got = results(lambda x: attend_short(x, cosine, sine, *options), qkv, gradient)  # noqa: B023
            for name, a, b in zip(("mixed", "d_qkv"), got, wanted, strict=True):
                error = (a - b).norm() / b.norm()
                assert error < tolerance, f"{name} {shape} causal, largest_score = {options}: {error}"


def check_layouts(attend_short, device, dtype):
    """Memory layouts other than the kernel's, and scores in the hundreds."""
    qkv, (cosine, sine), gradient = inputs((2, 9, 2, 32), dtype, device)
    wanted = results(lambda x: attend_short(x, cosine, sine, True), qkv, gradient)
    apart = qkv.detach().permute(4, 0, 3, 1, 2).contiguous().permute(1, 3, 4, 2, 0).requires_grad_()
    tables = [torch.stack((table, table), -1)[..., 0] for table in (cosine, sine)]
    assert not any(tensor.is_contiguous() for tensor in (apart, *tables))
    got = results(
        lambda x: attend_short(x, *tables, True), apart, gradient.transpose(0, 3).contiguous().transpose(0, 3)
    )
    for a, b in zip(got, wanted, strict=True):
        assert torch.equal(a, b)
    ones = results(lambda x: attend_short(x, cosine, sine, True), qkv, torch.ones_like(gradient))
    summed = results(lambda x: attend_short(x, cosine, sine, True).sum(), qkv, gradient.new_ones(()))
    assert torch.equal(summed[1], ones[1])
    for name, a in zip(
        ("mixed", "d_qkv"), results(lambda x: attend_short(16 * x, cosine, sine), qkv, gradient), strict=True
    ):
        assert a.isfinite().all(), name
    # After rotation, q and k are rounded to their type before multiplication, in torch too. In bfloat16 this changes
    # scores of 560 by 1.2, which matters between keys with close scores: the reference starts from rounded values.
    large = 16 * qkv.detach()
    exact = plain_of_rotated(rotate(large, cosine, sine).double(), False)
    assert (attend_short(large, cosine, sine).double() - exact).norm() < 8e-3 * exact.norm()


def check_network():
    """A network uses the kernel where it should, with the same results as torch's attention."""
    from cedd.models.kernels import attention_triton

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_module, "takes_kernels", lambda tensor: True)
        calls = recorded_calls(patch)
        for options in ((False, None), (True, None), (False, 12.0)):
            agree_with_torch(patch, "tiny", "cpu", torch.float16, 5e-3, *options)
        wanted = [(False, None), (True, None), (False, 12.0)]
        assert calls == [options for options in wanted for _ in range(2)], "one for each of two blocks"
        patch.setattr(attention_triton, "CHIP_FITS", False)
        agree_with_torch(patch, "tiny", "cpu", torch.float16, 0.0, False, None)
        assert len(calls) == 6, "another chip takes torch's"


def recorded_calls(patch):
    """A list of the kernel's calls: whether each is causal, and its largest score."""
    from cedd.models.kernels import attention_triton

    kernel, calls = attention_triton.attend_short, []

    def recording(qkv, cosine, sine, *options):
        calls.append(options)
        return kernel(qkv, cosine, sine, *options)

    patch.setattr(attention_triton, "attend_short", recording)
    return calls


def agree_with_torch(patch, preset, device, dtype, tolerance, causal, largest_score):
    torch.manual_seed(0)
    changes = {"dropout": 0.0, "causal": causal, "time_conditioning": not causal, "largest_score": largest_score}
    model = Transformer(config_from_preset(preset, vocab_size=50, has_mask=True, **changes)).to(device)
    x_t = torch.randint(51, (4, model.options.length - 3), device=device)
    with torch.no_grad():  # what starts at zero would hide the attention
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    sigma = None if causal else torch.rand(4, device=device)
    found = []
    for short in (128, 0):
        patch.setattr(attention_module, "SHORT", short)
        with torch.autocast(device, dtype=dtype):
            features = model.features(x_t, sigma)
        parameters = list(model.backbone.parameters())
        found.append((features, *torch.autograd.grad((features.float() ** 2).sum(), parameters)))
    for ours, torchs in zip(*found, strict=True):
        assert (ours.float() - torchs.float()).norm() <= tolerance * torchs.float().norm()


def check_rotation(device, tolerance, dtype=torch.float32):
    """In place, changing only q and k; also for widths that are not powers of two."""
    from cedd.models.kernels.rotation_triton import rotate_in_place

    for shape in ((2, 7, 3, 32), (1, 5, 1, 12), (2, 129, 12, 64)):
        qkv, (cosine, sine), _ = inputs(shape, dtype, device)
        wanted = rotate(qkv.detach().double(), cosine.double(), sine.double())
        got = qkv.detach().clone()
        rotate_in_place(got, cosine, sine)
        assert (got - wanted).abs().max() <= tolerance * wanted.abs().max()
        assert torch.equal(got[:, :, 2], qkv[:, :, 2])


def check_cached(device, tolerance, dtype=torch.float32):
    """New positions after a partly filled cache, and what is written into it; no other entry changes."""
    from cedd.models.kernels.cached_attention_triton import attend_cached

    for (batch, new, heads, width), past, room in (
        ((2, 16, 3, 32), 0, 16),
        ((2, 4, 2, 32), 70, 80),
        ((1, 33, 1, 64), 128, 200),
    ):
        for largest_score in (None, 12.0):
            qkv, tables, _ = inputs((batch, past + new, heads, width), torch.float64, device)
            cosine, sine = tables
            rotated = rotate(qkv.detach(), cosine.double(), sine.double())
            _, keys, values = (part.clone() for part in rotated.transpose(1, 3).unbind(2))
            if largest_score is not None:
                keys *= (keys.square().mean(-1, keepdim=True) + EPSILON).rsqrt()
            wanted = plain_of_rotated(rotated, False, largest_score)[:, past:]
            cache = [torch.full((batch, heads, room, width), torch.nan, dtype=dtype, device=device) for _ in range(2)]
            for part, known in zip(cache, (keys, values), strict=True):
                part[:, :, :past] = known[:, :, :past].to(dtype)
            part = qkv.detach()[:, past:].to(dtype)
            positions = torch.arange(past, past + new, device=device)
            got = attend_cached(part, cosine[past:], sine[past:], positions, *cache, largest_score)
            assert (got.double() - wanted).norm() < tolerance * wanted.norm()
            for written, known in zip(cache, (keys, values), strict=True):
                expected = known[:, :, past:]
                assert (written[:, :, past : past + new].double() - expected).norm() < tolerance * expected.norm()
                assert written[:, :, past + new :].isnan().all()


def check_network_after_a_cache():
    """The same features and cache as with torch's attention over the whole cache."""
    torch.manual_seed(0)
    changes = {"dropout": 0.0, "largest_score": 12.0, "length": 40}
    model = Transformer(config_from_preset("tiny", vocab_size=50, has_mask=True, **changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    x, sigma, found = torch.randint(51, (2, 24)), torch.rand(2), []
    with pytest.MonkeyPatch.context() as patch, torch.no_grad(), torch.autocast("cpu", torch.float16):
        for short in (128, 0):
            patch.setattr(attention_module, "takes_kernels", lambda tensor: True)
            patch.setattr(attention_module, "SHORT", short)
            cache, made = model.new_cache(2, 40), []
            for start in range(0, 24, 8):
                positions = torch.arange(start, start + 8)
                visible = (torch.arange(40) < start + 8).repeat(8, 1)
                here = {"cache": cache.at(positions), "attention": AttentionPattern(visible, positions)}
                made.append(model.features(x[:, start : start + 8], sigma, **here))
            found.append((torch.cat(made, 1), cache.keys, cache.values))
    for ours, torchs in zip(*found, strict=True):
        assert (ours.float() - torchs.float()).norm() <= 5e-3 * torchs.float().norm()
        assert not torch.equal(ours, torchs)


def test_cached_attention_interpreted():
    code = "from tests.models.test_attention import *; check_cached('cpu', 2e-6); check_network_after_a_cache()"
    run_interpreted(code)


def test_cached_attention_kernel_compiles():
    pytest.importorskip("triton")
    from cedd.models.kernels.cached_attention_triton import TILE, WARPS, _cached_kernel

    types = dict.fromkeys(("qkv", "output", "keys", "values"), "*bf16")
    types |= {"cosine": "*fp32", "sine": "*fp32", "positions": "*i64", "length": "i32", "room": "i32", "scale": "fp32"}
    for block, normed in itertools.product((16, 128), (False, True)):
        constants = {"NORMED": normed, "HALF": 32, "BLOCK": block, "TILE": TILE}
        aligned = [name for name in types if name not in ("scale", "positions")]
        assert compile_for_hopper(_cached_kernel, types, constants, WARPS, aligned)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 2e-3), (torch.bfloat16, 1.6e-2)])
def test_cached_attention_on_cuda(dtype, tolerance):
    check_cached("cuda", tolerance, dtype)


def test_rotation_interpreted():
    run_interpreted("from tests.models.test_attention import check_rotation; check_rotation('cpu', 1e-6)")


def test_rotation_kernel_compiles():
    pytest.importorskip("triton")
    from cedd.models.kernels.rotation_triton import WARPS, _rotate_kernel

    types = {"qkv": "*bf16", "cosine": "*fp32", "sine": "*fp32", "length": "i32", "heads": "i32", "half": "i32"}
    assert compile_for_hopper(_rotate_kernel, types, {"HEADS": 32, "HALF": 32}, WARPS)


def test_network_with_kernel_interpreted():
    run_interpreted("from tests.models.test_attention import check_network; check_network()")


def test_kernel_interpreted():
    run_interpreted("from tests.models.test_attention import check_kernel; check_kernel('cpu', 2e-6)")


@pytest.mark.parametrize("options", [(False, None), (True, None), (False, 12.0)])
def test_attention_without_kernel_matches_reference(options):
    torch.manual_seed(1)
    x, projection = torch.randn(2, 9, 12, dtype=torch.float64), nn.Linear(12, 36, bias=False).double()
    cosine, sine = (table.double() for table in rotary_tables(9, 4))
    wanted = plain(projection(x).unflatten(-1, (3, 3, -1)), cosine, sine, *options)
    torch.testing.assert_close(attend(x, projection, 3, (cosine, sine), *options), wanted)


def test_scores_do_not_exceed_largest_score():
    torch.manual_seed(2)
    x, projection = 100 * torch.randn(2, 9, 12), nn.Linear(12, 36, bias=False)
    queries, keys, _ = project(x, projection, 3, rotary_tables(9, 4), 7.0)
    scores = queries @ keys.transpose(-1, -2) / 2
    assert 6.0 < scores.abs().max() < 7.0 + 1e-4


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
def test_is_short_depends_on_length_heads_and_dtype(monkeypatch, length, heads, dtype, short):
    monkeypatch.setattr(attention_module, "takes_kernels", lambda tensor: True)
    monkeypatch.setattr(attention_module, "_chip_fits", lambda: True)
    assert attention_module.is_short(torch.zeros(2, length, 768, dtype=dtype), heads) == short
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = attention_module.is_short(torch.zeros(2, length, 768), heads)
    assert low == (short or dtype == torch.float32)
    assert not attention_module.is_short(torch.zeros(1, 1, 768, dtype=dtype).expand(2**16, length, -1), heads)
    monkeypatch.undo()
    assert not attention_module.is_short(torch.zeros(2, length, 768, dtype=dtype), heads), "there is no device"


def test_attention_kernels_compile():
    pytest.importorskip("triton")
    from cedd.models.kernels import attention_triton

    types = dict.fromkeys(("qkv", "output", "d_output", "d_qkv"), "*bf16")
    types |= {"cosine": "*fp32", "sine": "*fp32", "log_sums": "*fp32", "length": "i32", "scale": "fp32"}
    kernels: tuple[Any, ...] = (attention_triton._forward_kernel, attention_triton._backward_kernel)
    for kernel, normed in itertools.product(kernels, (False, True)):
        constants = {"CAUSAL": False, "NORMED": normed, "HALF": 32, "BLOCK": 128}
        aligned = [name for name in types if name in kernel.arg_names and name != "scale"]
        assert "wgmma" in compile_for_hopper(kernel, types, constants, attention_triton.WARPS, aligned)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 1e-3), (torch.bfloat16, 8e-3)])
def test_kernel_on_cuda(dtype, tolerance):
    check_kernel("cuda", tolerance, dtype, [*SHAPES, (32, 128, 12, 64), (3, 100, 12, 64)])


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
def test_rotation_on_cuda(dtype, tolerance):
    check_rotation("cuda", tolerance, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [(False, None), (True, None), (False, 12.0)])
def test_long_sequences_match_with_and_without_gradients(options):
    """The kernels without gradients agree with the others up to bfloat16 rounding."""
    causal, largest_score = options
    torch.manual_seed(0)
    changes = {"dropout": 0.0, "causal": causal, "time_conditioning": not causal, "largest_score": largest_score}
    config = config_from_preset("small", vocab_size=50, has_mask=True, depth=2, length=200, **changes)
    model = Transformer(config).cuda()
    x_t = torch.randint(51, (4, 150), device="cuda")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    sigma = None if causal else torch.rand(4, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        followed = model.features(x_t, sigma).detach().float()
        with torch.no_grad():
            alone = model.features(x_t, sigma).float()
    assert (alone - followed).norm() <= 0.02 * followed.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("options", [(False, None), (True, None), (False, 12.0)])
def test_network_on_cuda_matches_torch_attention(monkeypatch, options):
    """The same features and gradients as with torch's attention, up to bfloat16 rounding."""
    from cedd.models.kernels import attention_triton

    calls = recorded_calls(monkeypatch)
    agree_with_torch(monkeypatch, "char", "cuda", torch.bfloat16, 0.03, *options)
    assert calls == [options] * (4 if attention_triton.CHIP_FITS else 0)
