"""Sums over the vocabulary: against float64 loops, and the kernels against the PyTorch implementations."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cedd import row_sums
from cedd.row_sums import log_sum_exp, score_sums, softplus_sum
from tests.interpreted import compile_for_hopper, run_interpreted

Sums = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]


def all_sums(outputs: Tensor, offset: Tensor, skip: Tensor) -> tuple[Tensor, ...]:
    return (
        log_sum_exp(outputs),
        log_sum_exp(outputs, skip),
        softplus_sum(outputs, offset, skip),
        *score_sums(outputs, offset, skip),
    )


def by_loops(outputs: Tensor, offset: Tensor, skip: Tensor) -> tuple[Tensor, ...]:
    """The same sums by their definitions, one number at a time."""
    results: list[list[float]] = []
    for row, shift, left_out in zip(outputs.double().tolist(), offset.tolist(), skip.tolist(), strict=True):
        others = [value for y, value in enumerate(row) if y != left_out]
        logs = [value + shift for value in others]
        largest, largest_other = max(row), max(others)
        results.append(
            [
                largest + math.log(math.fsum(math.exp(value - largest) for value in row)),
                largest_other + math.log(math.fsum(math.exp(value - largest_other) for value in others)),
                math.fsum(max(v, 0.0) + math.log1p(math.exp(-abs(v))) for v in logs),
                math.fsum(math.exp(v) for v in logs),
                math.fsum(logs),
            ]
        )
    return tuple(torch.tensor(results, dtype=torch.float64).unbind(1))


def random_rows(
    rows: int, size: int, dtype: torch.dtype, far: float = 0.0, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, offsets that make most of them negative, and a token to skip (none in a third of the rows).

    far: the distance of all outputs from 0.
    """
    generator = torch.Generator().manual_seed(size)
    outputs = (3 * torch.randn(rows, size, generator=generator) + far).to(dtype)
    offset = -outputs.double().logsumexp(-1) + torch.linspace(-12, 3, rows, dtype=torch.float64)
    skip = torch.randint(size, (rows,), generator=generator)
    skip[::3] = size
    skip[1::6] = size + 4
    return outputs.to(device), offset.to(device), skip.to(device)


@pytest.mark.parametrize("far", [0.0, 300.0, -300.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 7, 130])
def test_sums_match_loops(size: int, dtype: torch.dtype, far: float) -> None:
    rows = random_rows(13, size, dtype, far)
    close = 1e-12 if dtype == torch.float64 else 2e-5 if far else 2e-6
    for found, expected in zip(all_sums(*rows), by_loops(*rows), strict=True):
        assert found.dtype == torch.float64
        torch.testing.assert_close(found, expected, rtol=close, atol=close)


def test_sums_with_impossible_tokens() -> None:
    outputs = torch.tensor([[0.0, -math.inf, 1.0], [-math.inf] * 3])
    offset, skip = torch.zeros(2, dtype=torch.float64), torch.tensor([3, 3])
    assert log_sum_exp(outputs).tolist() == pytest.approx([math.log(1 + math.e), -math.inf])
    assert softplus_sum(outputs[:1], offset[:1], skip[:1]).item() == pytest.approx(math.log(2) + math.log(1 + math.e))
    scores, logs = score_sums(outputs[:1], offset[:1], skip[:1])
    assert (scores.item(), logs.item()) == (pytest.approx(1 + math.e), -math.inf)


def check_kernels(device: str) -> None:
    """The kernels match the PyTorch implementations in float64, up to float32 rounding."""
    from cedd.row_sums.kernels_triton import log_sum_exp_of_rows, score_sums_of_rows, softplus_sum_of_rows

    for size, dtype, far in (
        (5, torch.float32, 0.0),
        (70, torch.bfloat16, 300.0),
        (2048, torch.float16, 0.0),
        (5001, torch.float32, -300.0),
    ):
        outputs, offset, skip = random_rows(7, size, dtype, far, device)
        found = (
            log_sum_exp_of_rows(outputs, None),
            log_sum_exp_of_rows(outputs, skip),
            softplus_sum_of_rows(outputs, offset, skip),
            *score_sums_of_rows(outputs, offset, skip),
        )
        for one, expected in zip(found, all_sums(outputs.double(), offset, skip), strict=True):
            torch.testing.assert_close(one, expected, rtol=3e-6, atol=1e-9)
    impossible = torch.tensor([[0.0, -math.inf, 1.0], [-math.inf] * 3], device=device)
    nothing = torch.full((2,), 3, device=device)
    torch.testing.assert_close(log_sum_exp_of_rows(impossible, None), log_sum_exp(impossible.double()))
    empty = torch.empty(0, 9, device=device)
    assert log_sum_exp_of_rows(empty, nothing[:0]).shape == (0,)
    wide = torch.randn(4, 18, device=device)[:, ::2]  # whose columns are not contiguous
    torch.testing.assert_close(log_sum_exp_of_rows(wide, None), log_sum_exp(wide.double()), rtol=1e-6, atol=1e-9)


def test_interpreted_kernels_match_torch() -> None:
    run_interpreted("from tests.test_row_sums import check_kernels; check_kernels('cpu')")


@pytest.mark.parametrize("kernel", ["_log_sum_exp_kernel", "_softplus_kernel", "_score_kernel"])
def test_kernels_compile_with_vectorized_loads(kernel: str) -> None:
    pytest.importorskip("triton")
    from cedd.row_sums import kernels_triton

    types = {"outputs": "*bf16", "row_stride": "i32", "vocab_size": "i32", "whole": "i32", "skips": "*i64"}
    types |= {"highs": "*fp32", "lows": "*fp32", "results": "*fp64", "log_results": "*fp64"}
    constants, warps = {"BLOCK": kernels_triton.BLOCK}, kernels_triton.WARPS
    aligned = ("outputs", "row_stride", "whole")
    code = compile_for_hopper(getattr(kernels_triton, kernel), types, constants, warps, aligned)
    assert "ld.global.v4.b32" in code  # 16 bytes at once


@pytest.mark.gpu
def test_kernels_match_torch_on_gpu() -> None:
    check_kernels("cuda")
    outputs, offset, skip = random_rows(300, 50257, torch.bfloat16, 5.0, "cuda")
    with torch.no_grad():
        assert row_sums._takes_kernel(outputs)
        for found, expected in zip(
            all_sums(outputs, offset, skip), all_sums(outputs.double(), offset, skip), strict=True
        ):
            torch.testing.assert_close(found, expected, rtol=2e-6, atol=1e-9)
    assert not row_sums._takes_kernel(outputs)  # with gradients, torch's operations
