"""The fused operation between residual branches: against plain autograd, and the kernel against the function."""

import pytest
import torch
import torch.nn.functional as F

from cedd.models.kernels.residual import add_and_norm, dropped_entries, modulated_norm
from tests.interpreted import compile_for_hopper, run_interpreted

SHAPES = [(2, 5, 16), (3, 1, 48), (1, 7, 10), (2, 150, 12)]
NAMES = ("x", "branch", "gate", "shift", "scale")


def inputs(shape, dtype=torch.float64, device="cpu"):
    """Random values; vectors are slices, as in the conditioning."""
    torch.manual_seed(0)
    batch, _, width = shape
    vectors = torch.randn(batch, 3, 1, width, dtype=dtype, device=device).unbind(1)
    made = (torch.randn(shape, dtype=dtype, device=device), torch.randn(shape, dtype=dtype, device=device), *vectors)
    return [value.detach().requires_grad_() for value in made]


def plain(x, branch, gate, shift, scale, factor):
    """Reference implementation; factor [B, L, D] is dropout's: 0 where it drops, the rescaling elsewhere."""
    added = x + gate * (branch * factor)
    return added, F.layer_norm(added, x.shape[-1:]) * (1 + scale) + shift


def results(function, values):
    """Outputs, and gradients of a loss with random weights for both outputs."""
    outputs = function(*values)
    torch.manual_seed(1)
    weights = [torch.randn(output.shape, dtype=torch.float64).to(output) for output in outputs]
    loss = torch.stack([(weight * output).sum() for weight, output in zip(weights, outputs, strict=True)]).sum()
    return [output.detach() for output in outputs], torch.autograd.grad(loss, values)


def agree(got, wanted, tolerance):
    for name, a, b in zip(("added", "normed"), got[0], wanted[0], strict=True):
        a = a.to(b.dtype)
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}")
    for name, a, b in zip(NAMES, got[1], wanted[1], strict=True):
        a = a.to(b.dtype)
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"d{name}: {m}")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dropped", [0, 26, 128])
def test_add_and_norm_matches_autograd(shape, dropped):
    values = inputs(shape)
    torch.manual_seed(7)
    entries = dropped_entries(values[0], dropped)
    kept = torch.ones(shape, dtype=torch.float64) if entries is None else (~entries).double()
    factor = kept * (256 / (256 - dropped))
    wanted = results(lambda *v: plain(*v, factor=factor), values)

    def ours(*v):
        torch.manual_seed(7)
        return add_and_norm(*v, dropped=dropped, seed=None)

    agree(results(ours, values), wanted, 1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_modulated_norm_matches_branch_of_zeros(shape):
    x, _, gate, shift, scale = inputs(shape)
    _, wanted = add_and_norm(x, torch.zeros_like(x), gate, shift, scale, dropped=0, seed=None)
    torch.testing.assert_close(modulated_norm(x, shift, scale), wanted)


def test_gradcheck():
    assert torch.autograd.gradcheck(lambda *v: add_and_norm(*v, dropped=0, seed=None), inputs((2, 3, 6)))


def test_dropped_share_matches_rate():
    """Of 2^18 bytes the share below 26 lies within 5 standard deviations of 26/256."""
    entries = dropped_entries(torch.zeros(2**10, 2**8), 26)
    assert entries is not None
    share = entries.double().mean().item()
    assert abs(share - 26 / 256) < 5 * (0.1016 * 0.8984 / 2**18) ** 0.5


# ----------------------------------------------------------------------------------------------------------------
# The kernel


def check_kernel(device, tolerance, dtype=torch.float32):
    from cedd.models.kernels.residual_triton import add_and_norm_kernel

    seed = torch.tensor(12345, dtype=torch.int32, device=device)
    for shape in SHAPES:
        for dropped in (0, 64):
            batch, _, width = shape
            one, zero = torch.ones(batch, 1, width, device=device), torch.zeros(batch, 1, width, device=device)
            blank = torch.zeros(shape, device=device)
            factor = add_and_norm_kernel(blank, torch.ones_like(blank), one, zero, zero, dropped, seed)[0]
            if dropped == 0:
                assert bool((factor == 1).all())
            values = inputs(shape, dtype, device)
            exact = [value.detach().float().requires_grad_() for value in values]
            wanted = results(lambda *v, factor=factor: plain(*v, factor=factor), exact)
            got = results(lambda *v, dropped=dropped: add_and_norm_kernel(*v, dropped=dropped, seed=seed), values)
            agree(got, wanted, tolerance)
    big = torch.zeros(8, 16, 256, device=device)
    one, zero = torch.ones(8, 1, 256, device=device), torch.zeros(8, 1, 256, device=device)
    masks = [add_and_norm_kernel(big, big + 1, one, zero, zero, 64, seed + i)[0] == 0 for i in range(2)]
    # 2^15 entries: the share dropped within 5 standard deviations of 1/4, two seeds independent within 5.
    for mask in masks:
        assert abs(mask.double().mean().item() - 0.25) < 5 * (3 / 16 / 2**15) ** 0.5
    both = (masks[0] & masks[1]).double().mean().item()
    assert abs(both - 1 / 16) < 5 * (15 / 256 / 2**15) ** 0.5


def check_norm_kernel(device, tolerance, dtype=torch.float32):
    from cedd.models.kernels.residual_triton import modulated_norm_kernel

    for shape in SHAPES:
        x, _, _, shift, scale = (value.detach() for value in inputs(shape, dtype, device))
        before, wide = x.clone(), [value.float() for value in (x, shift, scale)]
        got = modulated_norm_kernel(x, shift, scale)
        torch.testing.assert_close(got.float(), modulated_norm_by_torch(*wide), rtol=tolerance, atol=tolerance)
        assert torch.equal(x, before)


def modulated_norm_by_torch(x, shift, scale):
    with torch.enable_grad():  # without gradients it would be the kernel on a device
        return modulated_norm(x, shift, scale)


def test_kernel_interpreted():
    run_interpreted(
        "from tests.models.test_residual import *; check_kernel('cpu', 2e-5); check_norm_kernel('cpu', 2e-5)"
    )


@pytest.mark.parametrize("adds", [True, False])
def test_forward_kernel_compiles(adds):
    pytest.importorskip("triton")
    from cedd.models.kernels.residual_triton import FORWARD, _forward_kernel

    pointers = ("x", "branch", "gate", "shift", "scale", "added", "normed")
    sizes = ("length", "width", "chunk", "gate_stride", "shift_stride", "scale_stride")
    types = {
        **dict.fromkeys(pointers, "*bf16"), "seed": "*i32", "moments": "*fp32", **dict.fromkeys(sizes, "i32"),
        "rescale": "fp32", "epsilon": "fp32",
    }  # fmt: skip
    constants = {"ADDS": adds, "DROPPED": 0, "BLOCK": 1024, "ROWS": FORWARD.rows}
    assert compile_for_hopper(_forward_kernel, types, constants, FORWARD.warps)


def test_sum_over_chunks_kernel_compiles():
    pytest.importorskip("triton")
    from cedd.models.kernels.residual_triton import _sum_kernel

    types = {"parts": "*fp32", "sums": "*bf16", "chunks": "i32", "size": "i32"}
    assert compile_for_hopper(_sum_kernel, types, {"GROUP": 16, "BLOCK": 128}, warps=4)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 0.15)])
def test_kernel_on_cuda(dtype, tolerance):
    check_kernel("cuda", tolerance, dtype)
    check_norm_kernel("cuda", tolerance, dtype)
