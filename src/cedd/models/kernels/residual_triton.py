"""Adding a branch to the residual stream and norming the sum, in one kernel each way; `residual.py` has the equations.

Shapes: B batch, L positions, D width, C chunks of a sequence. Imported only where there is a CUDA device.

A program processes a chunk of one sequence row by row. The vectors that all rows of the sequence share stay in
registers, and so do their gradients, which are sums over positions. Each program writes its own sums, and a small
kernel adds them over the chunks, so that the result does not depend on the order of the programs.

Dropout needs no memory: whether an entry is dropped is a function of (seed, row, column), computed again on the way
back. The function is lowbias32 (Wellons 2018), with a key that it computes from the seed and the row. Its eight integer
operations per entry are hidden by the loads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

from cedd.models.kernels import EPSILON, dropout_scale

PROGRAMS = 4096
"""Approximate number of programs: enough to fill the chip."""
CHUNK = 8
"""Smallest number of rows per program, because the sums of each program must be read again."""


@dataclass(frozen=True)
class Launch:
    """Rows that a program processes together, so that their sums do not wait for each other; and its warps."""

    rows: int
    warps: int

    def options(self, x: Tensor, dropped: int, **others: Any) -> dict[str, Any]:
        block = triton.next_power_of_2(x.shape[-1])
        return {"DROPPED": dropped, "BLOCK": block, "ROWS": self.rows, "num_warps": self.warps, **others}


# The fastest of `benchmarks/kernel_times.py` on an H200.
FORWARD = Launch(rows=4, warps=4)
BACKWARD = Launch(rows=2, warps=2)


@triton.jit
def _hashed(word):
    word ^= word >> 16
    word *= 0x7FEB352D
    word ^= word >> 15
    word *= 0x846CA68B
    word ^= word >> 16
    return word


@triton.jit
def _dropout(values, seed, rows, columns, DROPPED: tl.constexpr):
    """The values [R, D] with DROPPED of 256 set to zero."""
    if DROPPED:
        keys = _hashed(seed ^ _hashed(rows.to(tl.uint32)))
        words = _hashed(columns.to(tl.uint32)[None, :] * 0x9E3779B1 + keys[:, None])
        values = tl.where((words >> 24) < DROPPED, 0.0, values)
    return values


@triton.jit
def _vector(vectors, sequence, stride, columns, width):
    """One sequence's vector [D], in float32."""
    return tl.load(vectors + sequence * stride + columns, mask=columns < width, other=0.0).to(tl.float32)


@triton.jit
def _program(gate, scale, length, width, chunk, gate_stride, scale_stride, rescale, BLOCK: tl.constexpr):
    """A program's sequence, the first and the end of its positions, its columns, and the vectors that its rows share:
    the gate with dropout's scale, and 1 + scale."""
    sequence, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * chunk
    columns = tl.arange(0, BLOCK)
    gates = _vector(gate, sequence, gate_stride, columns, width) * rescale
    scales = _vector(scale, sequence, scale_stride, columns, width) + 1.0
    return sequence, first, tl.minimum(first + chunk, length), columns, gates, scales


@triton.jit
def _tile(sequence, position, end, columns, length, width, ROWS: tl.constexpr):
    """ROWS rows of the batch, the places [ROWS, D] of their entries, and which rows and entries there are."""
    positions = position + tl.arange(0, ROWS)
    rows = sequence * length + positions
    here = rows[:, None] * width + columns[None, :]
    return rows, here, positions < end, (positions < end)[:, None] & (columns < width)[None, :]


@triton.jit
def _sum_both(a, b, c, d):
    return a + c, b + d


@triton.jit
def _forward_kernel(
    x, branch, gate, shift, scale, seed, added, normed, moments, length, width, chunk,
    gate_stride, shift_stride, scale_stride, rescale, epsilon,
    ADDS: tl.constexpr, DROPPED: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Without ADDS, x is normalized as it is: branch, gate and seed are not read, and only h is written."""
    sequence, first, end, columns, gates, scales = _program(
        gate, scale, length, width, chunk, gate_stride, scale_stride, rescale, BLOCK
    )
    key = tl.load(seed).to(tl.uint32) if DROPPED else 0
    shifts = _vector(shift, sequence, shift_stride, columns, width)
    for position in range(first, end, ROWS):
        rows, here, is_row, is_entry = _tile(sequence, position, end, columns, length, width, ROWS)
        stream = tl.load(x + here, mask=is_entry, other=0.0).to(tl.float32)
        if ADDS:
            values = tl.load(branch + here, mask=is_entry, other=0.0).to(tl.float32)
            values = _dropout(values, key, rows, columns, DROPPED)
            # Normalize the stored, rounded sum, which the backward pass reads again.
            sums = (stream + gates[None, :] * values).to(added.dtype.element_ty)
            tl.store(added + here, sums, mask=is_entry)
            stream = sums.to(tl.float32)
        mean = tl.sum(stream, 1) / width
        centered = tl.where((columns < width)[None, :], stream - mean[:, None], 0.0)
        rstd = tl.rsqrt(tl.sum(centered * centered, 1) / width + epsilon)
        if ADDS:
            tl.store(moments + 2 * rows, mean, mask=is_row)
            tl.store(moments + 2 * rows + 1, rstd, mask=is_row)
        tl.store(normed + here, centered * rstd[:, None] * scales[None, :] + shifts[None, :], mask=is_entry)


@triton.jit
def _backward_kernel(
    d_added, d_normed, added, moments, branch, gate, scale, seed, d_x, d_branch, d_vectors, length, width, chunk,
    gate_stride, scale_stride, rescale,
    DROPPED: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    sequence, first, end, columns, gates, scales = _program(
        gate, scale, length, width, chunk, gate_stride, scale_stride, rescale, BLOCK
    )
    key = tl.load(seed).to(tl.uint32) if DROPPED else 0
    d_gate = tl.zeros([BLOCK], tl.float32)
    d_shift = tl.zeros([BLOCK], tl.float32)
    d_scale = tl.zeros([BLOCK], tl.float32)
    for position in range(first, end, ROWS):
        rows, here, is_row, is_entry = _tile(sequence, position, end, columns, length, width, ROWS)
        mean = tl.load(moments + 2 * rows, mask=is_row, other=0.0)
        rstd = tl.load(moments + 2 * rows + 1, mask=is_row, other=0.0)[:, None]
        stream = tl.load(added + here, mask=is_entry, other=0.0).to(tl.float32)
        gradient = tl.load(d_normed + here, mask=is_entry, other=0.0).to(tl.float32)
        passed = tl.load(d_added + here, mask=is_entry, other=0.0).to(tl.float32)
        values = tl.load(branch + here, mask=is_entry, other=0.0).to(tl.float32)
        normalized = (stream - mean[:, None]) * rstd
        d_shift += tl.sum(gradient, 0)
        d_scale += tl.sum(gradient * normalized, 0)  # the gradient is 0 where there is nothing
        gradient *= scales[None, :]
        total, along = tl.reduce((gradient, gradient * normalized), 1, _sum_both)
        d_stream = passed + rstd * (gradient - (total / width)[:, None] - normalized * (along / width)[:, None])
        tl.store(d_x + here, d_stream, mask=is_entry)
        d_gate += tl.sum(tl.where(is_entry, d_stream, 0.0) * _dropout(values, key, rows, columns, DROPPED), 0)
        tl.store(d_branch + here, _dropout(gates[None, :] * d_stream, key, rows, columns, DROPPED), mask=is_entry)
    place = sequence * tl.num_programs(1) + tl.program_id(1)
    out = d_vectors + place * 3 * width + columns
    tl.store(out, d_gate * rescale, mask=columns < width)
    tl.store(out + width, d_shift, mask=columns < width)
    tl.store(out + 2 * width, d_scale, mask=columns < width)


@triton.jit
def _sum_kernel(parts, sums, chunks, size, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """parts [B, C, size] -> sums [B, size], in the type of those; GROUP chunks are loaded at once."""
    sequence, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, chunks, GROUP):
        chunk = first + tl.arange(0, GROUP)
        there = (chunk < chunks)[:, None] & (columns < size)[None, :]
        place = (sequence * chunks + chunk)[:, None] * size + columns[None, :]
        total += tl.sum(tl.load(parts + place, mask=there, other=0.0), 0)
    tl.store(sums + sequence * size + columns, total, mask=columns < size)


def _summed(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, C, 3, D] float32 -> [B, 3, D]. One kernel; torch's sum and three roundings would be four."""
    batch, chunks, *vectors = parts.shape
    sums = torch.empty(batch, *vectors, dtype=dtype, device=parts.device)
    size, block = math.prod(vectors), 128
    grid = batch, triton.cdiv(size, block)
    with torch.cuda.device_of(parts):
        _sum_kernel[grid](  # pyright: ignore[reportIndexIssue]
            parts, sums, chunks, size, GROUP=16, BLOCK=block, num_warps=4
        )
    return sums


def _grid(x: Tensor) -> tuple[tuple[int, int], int]:
    """((B, C), rows of a chunk)."""
    batch, length, _ = x.shape
    rows = max(CHUNK, batch * length // PROGRAMS)
    chunks = triton.cdiv(length, min(rows, length))
    return (batch, chunks), triton.cdiv(length, chunks)


def _outputs(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Empty tensors for the sum and its norm [B, L, D], and the mean and 1/std of each row [B, L, 2]."""
    added = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return added, torch.empty_like(added), torch.empty(*x.shape[:2], 2, dtype=torch.float32, device=x.device)


@torch.library.custom_op("cedd::add_and_norm", mutates_args=())
def _forward(
    x: Tensor, branch: Tensor, gate: Tensor, shift: Tensor, scale: Tensor, seed: Tensor, dropped: int
) -> tuple[Tensor, Tensor, Tensor]:
    x, branch = x.contiguous(), branch.contiguous()
    added, normed, moments = _outputs(x)
    _launch_forward(x, branch, (gate, shift, scale), seed, added, normed, moments, dropped=dropped, ADDS=True)
    return added, normed, moments


@torch.library.custom_op("cedd::modulated_norm", mutates_args=())
def modulated_norm_kernel(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """As `cedd.models.kernels.residual.modulated_norm`, without a gradient."""
    x = x.contiguous()
    normed = torch.empty_like(x)
    # Unused arguments of the kernel are x.
    _launch_forward(x, x, (scale, shift, scale), x, x, normed, x, dropped=0, ADDS=False)
    return normed


def _launch_forward(
    x: Tensor, branch: Tensor, vectors: tuple[Tensor, ...], *others: Tensor, dropped: int, ADDS: bool
) -> None:
    grid, rows = _grid(x)
    vectors = tuple(map(_unit_stride, vectors))
    sizes = (*x.shape[1:], rows, *(vector.stride(0) for vector in vectors))
    with torch.cuda.device_of(x):
        _forward_kernel[grid](  # pyright: ignore[reportIndexIssue]
            *(x, branch, *vectors, *others), *sizes, dropout_scale(dropped), EPSILON,
            **FORWARD.options(x, dropped, ADDS=ADDS),
        )  # fmt: skip


@torch.library.custom_op("cedd::add_and_norm_backward", mutates_args=())
def _backward(
    d_added: Tensor,
    d_normed: Tensor,
    added: Tensor,
    moments: Tensor,
    branch: Tensor,
    gate: Tensor,
    scale: Tensor,
    seed: Tensor,
    dropped: int,
) -> tuple[Tensor, Tensor, Tensor]:
    d_added, d_normed, branch = d_added.contiguous(), d_normed.contiguous(), branch.contiguous()
    d_x, d_branch = torch.empty_like(added), torch.empty_like(branch)
    grid, rows = _grid(added)
    vectors = [_unit_stride(vector) for vector in (gate, scale)]
    d_vectors = torch.empty(*grid, 3, added.shape[2], dtype=torch.float32, device=added.device)
    tensors = (d_added, d_normed, added, moments, branch, *vectors, seed, d_x, d_branch, d_vectors)
    sizes = (*added.shape[1:], rows, *(vector.stride(0) for vector in vectors))
    with torch.cuda.device_of(added):
        _backward_kernel[grid](  # pyright: ignore[reportIndexIssue]
            *tensors, *sizes, dropout_scale(dropped), **BACKWARD.options(added, dropped)
        )
    return d_x, d_branch, _summed(d_vectors, gate.dtype)


def _unit_stride(vector: Tensor) -> Tensor:
    return vector if vector.stride(-1) == 1 else vector.contiguous()


@_forward.register_fake
def _(x: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return _outputs(x)


@_backward.register_fake
def _(
    d_added: Tensor, d_normed: Tensor, added: Tensor, moments: Tensor, branch: Tensor, gate: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    batch, width = added.shape[0], added.shape[2]
    vectors = torch.empty(batch, 3, width, dtype=gate.dtype, device=added.device)
    return torch.empty_like(added), torch.empty(branch.shape, dtype=branch.dtype, device=branch.device), vectors


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, branch, gate, _, scale, seed, dropped = inputs
    added, _, moments = output
    ctx.save_for_backward(added, moments, branch, gate, scale, seed)
    ctx.dropped = dropped


def _differentiate(ctx: Any, d_added: Tensor, d_normed: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    added, moments, branch, gate, scale, seed = ctx.saved_tensors
    d_x, d_branch, vectors = _backward(d_added, d_normed, added, moments, branch, gate, scale, seed, ctx.dropped)
    d_gate, d_shift, d_scale = (vector[:, None] for vector in vectors.unbind(1))
    return d_x, d_branch, d_gate, d_shift, d_scale, None, None


_forward.register_autograd(_differentiate, setup_context=_remember)


def add_and_norm_kernel(
    x: Tensor, branch: Tensor, gate: Tensor, shift: Tensor, scale: Tensor, dropped: int, seed: Tensor | None
) -> tuple[Tensor, Tensor]:
    """As `cedd.models.kernels.residual.add_and_norm`."""
    if seed is None:
        if dropped:
            raise ValueError("dropout needs a seed on the device")
        seed = torch.empty((), dtype=torch.int32, device=x.device)
    added, normed, _ = _forward(x, branch, gate, shift, scale, seed, dropped)
    return added, normed
