"""The chunked head: results equal the dense formula, and memory stays within one chunk."""

import functools
import itertools
import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cedd.models.head import VocabularyHead
from cedd.models.kernels import head_loss
from cedd.models.kernels.head_loss import (
    any_pass,
    chunked_loss,
    cross_entropy_in_place_torch,
    cross_entropy_pass,
    default_chunk_rows,
    score_entropy_in_place_torch,
)
from cedd.models.kernels.rows import gather_rows
from cedd.network import FullPrecisionHead, ScoreRows
from tests.combinations import covering
from tests.interpreted import compile_for_hopper

WIDTH = 6
TOLERANCE: dict[torch.dtype, dict[str, Any]] = {
    torch.float32: {"rtol": 2e-4, "atol": 2e-5},
    torch.float64: {"rtol": 1e-10, "atol": 1e-12},
}


Leaves = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def problem(
    rows: int, vocabulary: int, dtype: torch.dtype, weights: str = "random", bias: bool = True
) -> tuple[Leaves, torch.Tensor, torch.Tensor]:
    """Features, weight and bias that require gradients; targets; row weights."""
    generator = torch.Generator().manual_seed(rows + vocabulary)
    draw = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    features = draw(rows, WIDTH).to(dtype).requires_grad_()
    weight = (draw(vocabulary, WIDTH) / 2).to(dtype).requires_grad_()
    offset = draw(vocabulary).to(dtype).requires_grad_() if bias else None
    targets = torch.randint(vocabulary, (rows,), generator=generator)
    row_weights = torch.rand(rows, generator=generator, dtype=torch.float64)
    if weights == "some zero":
        row_weights[::3] = 0.0
    return (features, weight, offset), targets, row_weights


def score_like(outputs, targets, rate):
    """Shaped like score entropy: a sum of exponentials, a mean of the outputs, and one selected output."""
    scores = outputs.exp().sum(1) * rate.to(outputs.dtype)
    return scores - outputs.mean(1) - outputs.gather(1, targets[:, None]).squeeze(1)


def dense(leaves, row_loss, row_args, row_weights):
    outputs = F.linear(*leaves)
    losses = row_loss(outputs, *row_args)
    return (losses if row_weights is None else losses * row_weights.to(losses.dtype)).sum(), losses


def gradients(total, leaves):
    return torch.autograd.grad(total, [leaf for leaf in leaves if leaf is not None])


def nll(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="none")


GRID = list(
    itertools.product(
        [1, 7, 24], [2, 33], [1, 5, 24, 100], ["none", "random", "some zero"], [torch.float32, torch.float64]
    )
)


@pytest.mark.parametrize(
    ("name", "bias"), covering(itertools.product(("cross entropy", "shifted cross entropy", "any loss"), (True, False)))
)
def test_chunked_loss_matches_dense_formula(name, bias):
    for rows, vocabulary, chunk, weights, dtype in GRID:
        leaves, targets, drawn = problem(rows, vocabulary, dtype, weights, bias=bias)
        row_weights = None if weights == "none" else drawn
        amounts, tokens = torch.linspace(0.0, 3.0, rows), targets.flip(0)
        if name == "any loss":
            args = (targets, amounts)
            result = chunked_loss(*leaves, any_pass(score_like), args, row_weights, chunk)
            expected, losses = dense(leaves, score_like, args, row_weights)
        elif name == "cross entropy":
            result = chunked_loss(*leaves, cross_entropy_pass, (targets,), row_weights, chunk)
            expected, losses = dense(leaves, nll, (targets,), row_weights)
        else:
            result = chunked_loss(*leaves, cross_entropy_pass, (targets, tokens, amounts), row_weights, chunk)
            raised = amounts.to(dtype)[:, None] * F.one_hot(tokens, vocabulary)
            expected, losses = dense(leaves, lambda o, t, r: nll(o + r, t), (targets, raised), row_weights)
        counts = torch.ones(rows, dtype=torch.bool) if row_weights is None else row_weights != 0
        torch.testing.assert_close(result.total, expected, **TOLERANCE[dtype])
        torch.testing.assert_close(result.rows, torch.where(counts, losses, 0.0).detach(), **TOLERANCE[dtype])
        assert not result.rows.requires_grad
        # Scaled, as a mean or gradient accumulation would: the backward pass must scale.
        found = gradients(0.3 * result.total, leaves)
        for got, wanted in zip(found, gradients(0.3 * expected, leaves), strict=True):
            torch.testing.assert_close(got, wanted, **TOLERANCE[dtype])


@pytest.mark.parametrize("vocabulary", [2, 9])
def test_gradcheck(vocabulary):
    (features, weight, bias), targets, row_weights = problem(5, vocabulary, torch.float64)
    assert bias is not None

    def cross_entropy(*leaves: Any):
        return chunked_loss(leaves[0], leaves[1], leaves[2], cross_entropy_pass, (targets,), row_weights, 2).total

    def any_loss(*leaves: Any):
        return chunked_loss(
            leaves[0], leaves[1], leaves[2], any_pass(score_like), (targets, row_weights), row_weights, 2
        ).total

    assert torch.autograd.gradcheck(cross_entropy, (features, weight, bias))
    assert torch.autograd.gradcheck(any_loss, (features, weight, bias))


def test_extreme_outputs_stay_finite():
    (features, weight, bias), targets, _ = problem(6, 9, torch.float32)
    result = chunked_loss(1e5 * features, weight, bias, cross_entropy_pass, (targets,))
    assert torch.isfinite(result.rows).all()
    assert all(torch.isfinite(gradient).all() for gradient in gradients(result.total, [features, weight, bias]))


def test_rows_with_zero_weight_may_hold_anything():
    """A padding row must not affect the others, even if its own loss is infinite."""

    def explosive(outputs, targets):
        return (outputs * torch.where(targets == 0, torch.inf, 1.0)[:, None]).logsumexp(1)

    leaves, _, _ = problem(4, 9, torch.float64)
    targets, row_weights = torch.tensor([0, 1, 1, 0]), torch.tensor([0.0, 1.0, 2.0, 0.0])
    result = chunked_loss(*leaves, any_pass(explosive), (targets,), row_weights, 3)
    assert torch.isfinite(result.total)
    assert result.rows[[0, 3]].tolist() == [0.0, 0.0]
    assert all(torch.isfinite(gradient).all() for gradient in gradients(result.total, leaves))


@pytest.mark.parametrize("operands", ["float32 features", "bfloat16 features"])
def test_bfloat16_autocast_is_close_and_accumulates_in_float32(operands):
    leaves, targets, row_weights = problem(64, 33, torch.float32)
    features, weight, bias = leaves
    expected, _ = dense(leaves, nll, (targets,), row_weights)
    wanted = gradients(expected, leaves)
    read = features if operands == "float32 features" else features.bfloat16()
    for chunk in (1, 16, 64):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result = chunked_loss(read, weight, bias, cross_entropy_pass, (targets,), row_weights, chunk)
        assert result.total.dtype == torch.float32
        torch.testing.assert_close(result.total, expected, rtol=1e-2, atol=0.0)
        for got, exact in zip(gradients(result.total, leaves), wanted, strict=True):
            assert got.dtype == torch.float32
            assert (got - exact).norm() / exact.norm() < 2e-2


def test_gradients_accumulate_over_batches_and_backward_may_run_twice():
    leaves, targets, _ = problem(10, 7, torch.float64)
    features, weight, bias = leaves
    whole = gradients(chunked_loss(*leaves, cross_entropy_pass, (targets,)).total, leaves)
    for half in (slice(0, 4), slice(4, 10)):
        chunked_loss(features[half], weight, bias, cross_entropy_pass, (targets[half],)).total.backward()
    for leaf, wanted in zip(leaves, whole, strict=True):
        assert leaf is not None
        torch.testing.assert_close(leaf.grad, wanted)
    total = chunked_loss(*leaves, cross_entropy_pass, (targets,)).total
    first = torch.autograd.grad(total, weight, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(total, weight)[0])


class Allocations(TorchDispatchMode):
    """Bytes of each new storage an operation returns."""

    def __init__(self):
        super().__init__()
        self.sizes, self.seen = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        known = {a.untyped_storage()._cdata for a in tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)}
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in known:
                self.sizes.append(tensor.untyped_storage().nbytes())
                self.seen.append(tensor)  # kept, so that no storage's address is used again
        return result


@pytest.mark.parametrize("gradient", [True, False])
def test_cross_entropy_allocates_one_chunk_of_outputs(gradient):
    rows, vocabulary, chunk = 96, 4000, 8
    leaves, targets, row_weights = problem(rows, vocabulary, torch.float32)
    with torch.set_grad_enabled(gradient), Allocations() as allocations:
        result = chunked_loss(*leaves, cross_entropy_pass, (targets,), row_weights, chunk)
        if gradient:
            result.total.backward()
    buffer = chunk * vocabulary * 4
    assert max(allocations.sizes) == buffer
    assert sum(size > 0.9 * buffer for size in allocations.sizes) == 1


def test_any_loss_allocates_nothing_larger_than_a_chunk():
    rows, vocabulary, chunk = 96, 4000, 8
    leaves, targets, row_weights = problem(rows, vocabulary, torch.float32)
    with Allocations() as allocations:
        chunked_loss(*leaves, any_pass(score_like), (targets, row_weights), row_weights, chunk).total.backward()
    assert max(allocations.sizes) == chunk * vocabulary * 4


def test_padding_does_not_change_results(monkeypatch):
    """CUDA pads the vocabulary to aligned rows; here by hand."""

    def padded(parameter, dtype):
        missing = -parameter.shape[0] % 64
        return F.pad(parameter.detach().to(dtype), (0, 0) * (parameter.dim() - 1) + (0, missing))

    leaves, targets, row_weights = problem(9, 50, torch.float64, "some zero")
    for loss in (
        lambda: chunked_loss(*leaves, cross_entropy_pass, (targets,), row_weights, 4).total,
        lambda: chunked_loss(*leaves, any_pass(score_like), (targets, row_weights), row_weights, 4).total,
    ):
        plain = loss()
        with monkeypatch.context() as patch:
            patch.setattr(head_loss, "_padded", padded)
            aligned = loss()
        torch.testing.assert_close(plain, aligned)
        for a, b in zip(gradients(plain, leaves), gradients(aligned, leaves), strict=True):
            torch.testing.assert_close(a, b)


def test_default_chunk_sizes():
    assert default_chunk_rows(65536, 50257, torch.bfloat16, "cuda") == 9472  # 7 chunks of up to 952 MB
    assert default_chunk_rows(32800, 50257, torch.bfloat16, "cuda") == 8320  # 4 equal chunks, not 3 and a remainder
    assert default_chunk_rows(100, 50257, torch.bfloat16, "cuda") == 100
    assert default_chunk_rows(10**6, 50257, torch.float32, "cpu") == 256
    assert default_chunk_rows(10, 10**9, torch.float32, "cpu") == 1
    assert default_chunk_rows(0, 50, torch.float32, "cpu") == 1


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.sampled_from(["cpu", "cuda"]))
def test_chunks_stay_within_memory_budget(count, vocabulary, device_type):
    rows = default_chunk_rows(count, vocabulary, torch.bfloat16, device_type)
    assert 1 <= rows <= count
    assert rows * vocabulary * 2 <= (2**26 if device_type == "cpu" else 2**30)


def test_gather_rows_gradcheck():
    features = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda f: gather_rows(f, torch.tensor([4, 0, 3])), (features,))


@pytest.mark.parametrize("places", [[0, 3, 7, 11], [4], []])
@pytest.mark.parametrize("weighted", [True, False])
def test_head_on_selected_rows_matches_dense(places, weighted):
    """Selected rows of a batch [3, 4], possibly none, match the dense outputs."""
    torch.manual_seed(0)
    head = VocabularyHead(WIDTH, 9).double()
    torch.nn.init.normal_(head.weight)
    features = torch.randn(3, 4, WIDTH, dtype=torch.float64, requires_grad=True)
    chosen = torch.tensor(places, dtype=torch.int64)
    targets = torch.randint(9, (len(places),))
    weights = torch.rand(len(places), dtype=torch.float64) if weighted else None
    losses = nll(head(features).flatten(0, 1)[chosen], targets)
    expected = (losses if weights is None else losses * weights).sum()
    wanted = torch.autograd.grad(expected, (features, head.weight))
    for loss in (
        lambda rows: head.cross_entropy(rows, targets, weights),
        lambda rows: head.loss(rows, nll, (targets,), weights),
    ):
        result = loss(gather_rows(features.flatten(0, 1), chosen))
        torch.testing.assert_close(result.total, expected)
        torch.testing.assert_close(result.rows, losses.detach())
        for got, exact in zip(torch.autograd.grad(result.total, (features, head.weight)), wanted, strict=True):
            torch.testing.assert_close(got, exact)


def shifted_by(amount, outputs, targets):
    return nll(outputs + amount, targets)


def in_chunks(head: VocabularyHead, features, row_loss, args, weights):
    row_pass = any_pass(row_loss, fused=head.fused)
    return chunked_loss(features, head.weight, head.bias, row_pass, args, weights, chunk_rows=8)


@pytest.mark.slow
def test_fused_row_losses_are_compiled_and_equal():
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    limit = torch._dynamo.config.cache_size_limit
    head = VocabularyHead(WIDTH, 33).double()
    torch.nn.init.normal_(head.weight)
    features = torch.randn(20, WIDTH, dtype=torch.float64, requires_grad=True)
    targets, rate = torch.randint(33, (20,)), torch.rand(20, dtype=torch.float64)
    for row_loss, args in ((score_like, (targets, rate)), (functools.partial(shifted_by, 0.5), (targets,))):
        results = []
        for fused in (False, True):
            head.fused = fused
            result = in_chunks(head, features, row_loss, args, rate)
            results.append((result.total, *torch.autograd.grad(result.total, (features, head.weight))))
            with torch.no_grad():
                torch.testing.assert_close(in_chunks(head, features, row_loss, args, rate).rows, result.rows)
        for plain, compiled in zip(*results, strict=True):
            torch.testing.assert_close(plain, compiled)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs > 0
    for rows in (13, 15, 18):  # an unseen number of rows in the last chunk is not compiled anew
        in_chunks(head, features[:rows], score_like, (targets[:rows], rate[:rows]), rate[:rows])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    assert not torch._dynamo.utils.counters["graph_break"]
    assert torch._dynamo.config.cache_size_limit == limit  # raised for these calls only


def twins_agree(device, dtype, shape, gradient, shifted):
    from cedd.models.kernels.cross_entropy_triton import cross_entropy_in_place

    rows, vocabulary, _ = shape
    torch.manual_seed(0)
    targets, tokens = torch.randint(vocabulary, (2, rows), device=device)
    shift = (tokens, 3 * torch.rand(rows, device=device)) if shifted else (None, None)
    passes = cross_entropy_in_place, cross_entropy_in_place_torch
    passes_agree(*passes, device, dtype, shape, 5.0, gradient, targets, *shift)


def score_twins_agree(device, dtype, shape, gradient):
    from cedd.models.kernels.score_entropy_triton import score_entropy_in_place

    rows, vocabulary, _ = shape
    torch.manual_seed(0)
    targets, skips = torch.randint(vocabulary, (2, rows), device=device)
    skips[1], skips[2] = vocabulary, targets[2]  # a mask; a token that is the clean one
    shifts, commons, extras = torch.randn(3, rows, device=device, dtype=torch.float64)
    numbers = ScoreRows(targets, skips, shifts, commons.exp(), extras.exp() * (targets != skips))
    passes = score_entropy_in_place, score_entropy_in_place_torch
    ignored = 2, int(skips[2])
    passes_agree(*passes, device, dtype, shape, 1.0, gradient, numbers, infinite=ignored)


def passes_agree(kernel, twin_, device, dtype, shape, spread, gradient, *arguments, infinite=None):
    """The same losses, the same gradient in place, and nothing beyond the vocabulary touched."""
    rows, vocabulary, stride = shape
    buffer = torch.full((rows, stride), 77.0, device=device, dtype=dtype)
    buffer[:, :vocabulary] = spread * torch.randn(rows, vocabulary, device=device)
    if infinite is not None:
        buffer[infinite] = float("inf")
    weights = torch.rand(rows, device=device)
    weights[::4] = 0.0
    ours, twin = buffer.clone(), buffer.clone()
    found = kernel(ours[:, :vocabulary], weights, gradient, *arguments)
    wanted = twin_(twin[:, :vocabulary], weights, gradient, *arguments)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    if gradient:
        tolerance = 1e-5 if dtype == torch.float32 else 8e-3
        torch.testing.assert_close(ours, twin, rtol=tolerance, atol=1e-6)
        assert torch.equal(ours[:, vocabulary:], buffer[:, vocabulary:])
    else:
        assert torch.equal(ours, buffer)


TYPES, SHAPES = [torch.float32, torch.bfloat16], [(5, 7, 8), (6, 8192, 8192), (4, 20001, 20032)]
SCORE_TWINS = list(itertools.product(TYPES, SHAPES, [True, False]))
TWINS = [(*twins, shifted) for twins in SCORE_TWINS for shifted in (True, False)]


@pytest.mark.skipif("TRITON_INTERPRET" not in os.environ, reason="needs Triton's interpreter: TRITON_INTERPRET=1")
@pytest.mark.parametrize(("dtype", "shape", "gradient", "shifted"), TWINS)
def test_triton_kernel_interpreted(dtype, shape, gradient, shifted):
    pytest.importorskip("triton")
    twins_agree("cpu", dtype, shape, gradient, shifted)


@pytest.mark.skipif("TRITON_INTERPRET" not in os.environ, reason="needs Triton's interpreter: TRITON_INTERPRET=1")
@pytest.mark.parametrize(("dtype", "shape", "gradient"), SCORE_TWINS)
def test_score_kernel_interpreted(dtype, shape, gradient):
    pytest.importorskip("triton")
    score_twins_agree("cpu", dtype, shape, gradient)


@pytest.mark.parametrize("gradient", [True, False])
@pytest.mark.parametrize("which", ["cross", "score"])
def test_kernels_compile_with_wide_loads_and_stores(which, gradient):
    pytest.importorskip("triton")
    from cedd.models.kernels import cross_entropy_triton as cross
    from cedd.models.kernels import score_entropy_triton as score

    types = {
        "outputs": "*bf16",
        **dict.fromkeys(("weights", "losses"), "*fp32"),
        **dict.fromkeys(("row_stride", "vocab_size", "whole"), "i32"),
        **dict.fromkeys(("targets", "skips", "shift_tokens"), "*i64"),
        **dict.fromkeys(("shifts", "commons", "extras"), "*fp32" if which == "cross" else "*fp64"),
    }
    aligned = ("outputs", "row_stride", "whole")
    if which == "cross":
        sizes = {"HAS_SHIFT": True, "LANES": cross.BLOCK // cross.VECTOR, "VECTOR": cross.VECTOR}
        kernel, warps = cross._cross_entropy_kernel, cross.WARPS
    else:
        sizes, kernel, warps = {"BLOCK": score.BLOCK}, score._score_entropy_kernel, score.WARPS
    code = compile_for_hopper(kernel, types, {"WANT_GRADIENT": gradient, **sizes}, warps, aligned)
    assert "ld.global.v4.b32" in code
    assert ("st.global.v4.b32" in code) == gradient


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "shape", "gradient"), [*SCORE_TWINS, (torch.bfloat16, (64, 50257, 50304), True)])
def test_score_kernel_on_cuda(dtype, shape, gradient):
    score_twins_agree("cuda", dtype, shape, gradient)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "shape", "gradient", "shifted"), [*TWINS, (torch.bfloat16, (64, 50257, 50304), True, True)]
)
def test_triton_kernel_on_cuda(dtype, shape, gradient, shifted):
    twins_agree("cuda", dtype, shape, gradient, shifted)


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("vocabulary", [1000, 50257])
def test_head_on_cuda(vocabulary, fused):
    """bfloat16 autocast on CUDA against float64 on the same device, with padding and several chunks."""
    torch.manual_seed(0)
    features = torch.randn(300, 64, device="cuda", dtype=torch.float64, requires_grad=True)
    weight = (torch.randn(vocabulary, 64, device="cuda", dtype=torch.float64) / 8).requires_grad_()
    bias = torch.randn(vocabulary, device="cuda", dtype=torch.float64, requires_grad=True)
    targets, rate = torch.randint(vocabulary, (300,), device="cuda"), torch.rand(300, device="cuda")
    exact: Leaves = features, weight, bias
    low: Leaves = (
        features.detach().float().requires_grad_(),
        weight.detach().float().requires_grad_(),
        bias.detach().float().requires_grad_(),
    )
    for name in ("cross entropy", "any loss"):
        row_loss, args = (nll, (targets,)) if name == "cross entropy" else (score_like, (targets, rate / vocabulary))
        expected, _ = dense(exact, row_loss, args, rate)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            if name == "cross entropy":
                result = chunked_loss(*low, cross_entropy_pass, (targets,), rate, 128)
            else:
                result = chunked_loss(*low, any_pass(score_like, fused=fused), args, rate, 128)
        torch.testing.assert_close(result.total.double(), expected, rtol=1e-2, atol=0.0)
        for got, wanted in zip(gradients(result.total, low), gradients(expected, exact), strict=True):
            assert (got - wanted).norm() / wanted.norm() < 2e-2


def check_parts(device: str, width: int = 40, vocabulary: int = 300) -> None:
    """Outputs from bfloat16 parts are those of float32, also after the weight has changed."""
    torch.manual_seed(0)
    head = VocabularyHead(width, vocabulary).to(device)
    features = torch.randn(128, width, device=device).bfloat16()
    with torch.no_grad():
        for _ in range(2):
            for parameter in head.parameters():
                parameter.normal_()
            expected = F.linear(features.double(), head.weight.double(), head.bias.double())
            found = FullPrecisionHead(head)(features)
            assert found.dtype == torch.float32
            assert (found - expected).norm() < 3e-7 * expected.norm()
        assert head._parts is not None
        parts = head._parts.of(head.weight)
        assert torch.equal(parts.view(vocabulary, 3, width).double().sum(1), head.weight.double())
        before = parts.data_ptr(), parts.clone()
        head.weight.mul_(2)
        FullPrecisionHead(head)  # before a recording is replayed, whose memory this is
        assert parts.data_ptr() == before[0]
        assert torch.equal(parts, 2 * before[1])


def test_head_in_bfloat16_parts(monkeypatch):
    monkeypatch.setattr(VocabularyHead, "_takes_parts", lambda *_: True)
    check_parts("cpu")


@pytest.mark.gpu
def test_head_in_bfloat16_parts_on_cuda():
    check_parts("cuda")
    check_parts("cuda", 768, 50257)
