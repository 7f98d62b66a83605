"""The speed of single kernels of training and of bounds, over their block sizes, relative to the memory bandwidth.

    python benchmarks/kernel_times.py

Needs a CUDA device and Triton. Prints milliseconds and gigabytes per second for each setting. The settings in the code
are the fastest ones on one NVIDIA H200, or within 1% of it. For the sums of a bound no setting is clearly the fastest.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from command_line import command

from cedd import row_sums
from cedd.cli import UserError
from cedd.device import pick_device, recorded_graph
from cedd.models.kernels.attention import attention
from cedd.models.kernels.rotation import rotary_tables
from cedd.network import ScoreRows

SHAPE = (512, 128, 768)
VOCABULARY = 50257


def milliseconds(run: Callable[[], object], repeats: int = 20) -> float:
    """The mean time of a call on the device."""
    for _ in range(3):
        run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats


def recorded(run: Callable[[], object], times: int = 20) -> float:
    """The same for work that is shorter than its launch: `calls` calls, recorded as one graph."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    with recorded_graph() as graph:
        for _ in range(times):
            run()
    return milliseconds(graph.replay) / times


def report(what: str, time: float, gigabytes: float) -> None:
    """One line."""
    print(f"{what}: {time:.3f} ms, {1000 * gigabytes / time:,.0f} GB/s", flush=True)


def time_residual() -> None:
    """Add and norm, forward (four sweeps) and backward (six)."""
    from cedd.models.kernels import residual_triton

    options = {"device": "cuda", "dtype": torch.bfloat16}
    x, branch, d_added, d_normed = (torch.randn(SHAPE, **options) for _ in range(4))
    gate, shift, scale = torch.randn(SHAPE[0], 3, 1, SHAPE[2], **options).unbind(1)
    seed = torch.tensor(3, device="cuda", dtype=torch.int32)
    moments = torch.rand(*SHAPE[:2], 2, device="cuda")
    gigabytes = x.numel() * x.itemsize / 1e9
    for rows, warps in itertools.product((1, 2, 4), (2, 4, 8)):
        residual_triton.FORWARD = residual_triton.BACKWARD = residual_triton.Launch(rows, warps)
        forward = milliseconds(lambda: residual_triton._forward(x, branch, gate, shift, scale, seed, 26))
        report(f"add and norm, {rows} rows, {warps} warps", forward, 4 * gigabytes)
        backward = milliseconds(
            lambda: residual_triton._backward(d_added, d_normed, x, moments, branch, gate, scale, seed, 26)
        )
        report(f"  and its gradient, {rows} rows, {warps} warps", backward, 6 * gigabytes)


def time_attention(batch: int) -> None:
    """Attention of short sequences with the rotation of q and k, each way, and torch's without it."""
    from cedd.models.kernels import attention_triton

    length, heads, width = SHAPE[1], 12, 64
    options = {"device": "cuda", "dtype": torch.bfloat16}
    qkv = torch.randn(batch, length, 3, heads, width, requires_grad=True, **options)
    gradient = torch.randn(batch, length, heads, width, **options)
    cosine, sine = (table.cuda() for table in rotary_tables(length, width))
    gigabytes = gradient.numel() * gradient.itemsize / 1e9
    held = qkv.detach()
    log_sums = attention_triton._forward(held, cosine, sine, False, None)[1]
    for warps in (4, 8, 16):
        attention_triton.WARPS = warps
        time = recorded(lambda: attention_triton._forward(held, cosine, sine, False, None))
        report(f"attention of {batch}, {warps} warps", time, 4 * gigabytes)
        time = recorded(lambda: attention_triton._backward(gradient, held, cosine, sine, log_sums, False, None))
        report(f"  and its gradient, {warps} warps", time, 7 * gigabytes)
    report(f"torch's, of {batch}", recorded(lambda: attention(*held.transpose(1, 3).unbind(2))), 4 * gigabytes)

    def both() -> None:
        torch.autograd.grad(attention(*qkv.transpose(1, 3).unbind(2)).transpose(1, 2), qkv, gradient)

    if batch * length >= 2**16:  # fewer take less time than their launches
        report(f"torch's, of {batch}, and its gradient", milliseconds(both), 12 * gigabytes)


def time_cross_entropy(rows: int = 8192) -> None:
    """Cross entropy in place: one sweep of reading, one of reading from the cache and writing."""
    from cedd.models.kernels import cross_entropy_triton

    outputs = torch.randn(rows, -(-VOCABULARY // 64) * 64, device="cuda", dtype=torch.bfloat16)[:, :VOCABULARY]
    weights, shifts = torch.rand(2, rows, device="cuda")
    targets = torch.randint(VOCABULARY, (rows,), device="cuda")
    for block, warps in itertools.product((2048, 4096, 8192), (4, 8, 16)):
        cross_entropy_triton.BLOCK, cross_entropy_triton.WARPS = block, warps
        time = milliseconds(
            lambda: cross_entropy_triton.cross_entropy_in_place(outputs, weights, True, targets, targets, shifts)
        )
        report(f"cross entropy, blocks of {block}, {warps} warps", time, 2 * rows * VOCABULARY * 2 / 1e9)


def time_score_entropy(rows: int = 8192) -> None:
    """Score entropy in place: one sweep that reads and writes."""
    from cedd.models.kernels import score_entropy_triton

    outputs = torch.zeros(rows, -(-VOCABULARY // 64) * 64, device="cuda", dtype=torch.bfloat16)[:, :VOCABULARY]
    weights = torch.rand(rows, device="cuda")
    targets, skips = torch.randint(VOCABULARY, (2, rows), device="cuda")
    zero, one = torch.tensor([[0.0], [1.0]], device="cuda", dtype=torch.float64).expand(2, rows)
    numbers = ScoreRows(targets, skips, shift=zero, common=one, extra=zero)  # outputs stay 0, call after call
    for block, warps in itertools.product((1024, 2048, 4096, 8192), (4, 8, 16)):
        score_entropy_triton.BLOCK, score_entropy_triton.WARPS = block, warps
        time = milliseconds(lambda: score_entropy_triton.score_entropy_in_place(outputs, weights, True, numbers))
        report(f"score entropy, blocks of {block}, {warps} warps", time, 2 * rows * VOCABULARY * 2 / 1e9)


def time_row_sums(rows: int = 2670) -> None:
    """Sums over a chunk of outputs, as a bound needs them: one fused pass, and the same in torch operations."""
    from cedd.row_sums import kernels_triton

    outputs = torch.randn(rows, -(-VOCABULARY // 64) * 64, device="cuda", dtype=torch.bfloat16)[:, :VOCABULARY]
    offset, skip = torch.zeros(rows, device="cuda", dtype=torch.float64), torch.zeros_like(outputs[:, 0]).long()
    sums: dict[str, Callable[[], object]] = {
        "log-sum-exp": lambda: row_sums.log_sum_exp(outputs),
        "softplus": lambda: row_sums.softplus_sum(outputs, offset, skip),
        "scores": lambda: row_sums.score_sums(outputs, offset, skip),
    }
    gigabytes = rows * VOCABULARY * 2 / 1e9
    for block, warps in ((1024, 4), (2048, 4), (2048, 8), (4096, 4), (4096, 8)):  # a warp has at least 256 outputs
        kernels_triton.BLOCK, kernels_triton.WARPS = block, warps
        with torch.no_grad():
            for what, run in sums.items():
                report(f"sums, {what}, blocks of {block}, {warps} warps", milliseconds(run, 200), gigabytes)
    for what, run in sums.items():  # with gradients
        report(f"sums, {what}, torch's", milliseconds(run), gigabytes)


def time_update() -> None:
    """AdamW and the average of a network of the `small` preset's size with copies, and the norm of its gradients."""
    from cedd.training import update_triton

    sizes = [(VOCABULARY + 1, 768), (VOCABULARY, 768), (74 * 768, 128)]
    sizes += [(2304, 768), (768, 768), (3072, 768), (768, 3072)] * 12
    values, first, second, averages = ([torch.rand(s, device="cuda") for s in sizes] for _ in range(4))
    copies, gradients = ([value.bfloat16() for value in values] for _ in range(2))
    count, one = torch.zeros((), device="cuda"), torch.ones((), device="cuda")
    settings = {"rate": 1e-4, "betas": (0.9, 0.999), "epsilon": 1e-8, "decay": 0.0}
    entries = sum(value.numel() for value in values) / 1e9
    for block, warps in itertools.product((512, 1024, 2048), (2, 4, 8)):
        update_triton.BLOCK, update_triton.WARPS, update_triton.NORM_WARPS = block, warps, warps
        table = update_triton.TensorTable(values, first, second, averages, copies)
        table.find(gradients)
        for what, pace, size in (("update", 1e-4, 36), ("  without the average", 0.0, 28)):
            time = milliseconds(lambda table=table, pace=pace: table.update(count, one, one, **settings, pace=pace))
            report(f"{what}, blocks of {block}, {warps} warps", time, size * entries)
        report(f"  and the norm, blocks of {block}, {warps} warps", milliseconds(table.norm), 2 * entries)


@dataclass
class Arguments:
    """The kernels of a training step and of a bound alone, over their block sizes, on a CUDA device with Triton.

    example: python benchmarks/kernel_times.py
    """


def main(arguments: Arguments) -> None:
    """All of them, one after the other."""
    del arguments  # there are none
    pick_device("cuda")
    if find_spec("triton") is None:
        raise UserError("the kernels need Triton: pip install triton")
    time_residual()
    time_attention(32)
    time_attention(512)
    time_cross_entropy()
    time_score_entropy()
    time_row_sums()
    time_update()


if __name__ == "__main__":
    sys.exit(command(__file__, Arguments, main))
