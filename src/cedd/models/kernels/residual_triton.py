"""The seam between two branches in one kernel each way; `residual.py` has the equations and the twin.

Shapes: B batch, L positions, D width, C chunks of a sequence. Imported only where there is a CUDA device.

A program goes through a chunk of one sequence row by row. The vectors that all rows of the sequence share stay in its
registers, and so do the sums over positions that are their gradients: each program writes its own, and one small sum
over the chunks follows, so that the result does not depend on the order in which programs ran.

Dropout needs no memory: whether an entry is dropped is a function of (seed, row, column), computed again on the way
back. A word of lowbias32 (Wellons 2018) decides, over a key that the same function made of the seed and the row; at
eight integer operations an entry it hides behind the loads.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

from cedd.models.kernels.residual import EPSILON

WARPS = 4
PROGRAMS = 2048
"""About how many programs the rows are dealt out to: enough to fill the chip, few enough to make partial sums rare."""


@triton.jit
def _mixed(word):  # noqa: ANN001, ANN202
    word ^= word >> 16
    word *= 0x7FEB352D
    word ^= word >> 15
    word *= 0x846CA68B
    word ^= word >> 16
    return word


@triton.jit
def _kept(values, seed, row, columns, DROPPED: tl.constexpr):  # noqa: ANN001, ANN202
    """The values with DROPPED of 256 set to zero."""
    if DROPPED:
        key = _mixed(seed ^ _mixed(row.to(tl.uint32)))
        word = _mixed(columns.to(tl.uint32) * 0x9E3779B1 + key)
        values = tl.where((word >> 24) < DROPPED, 0.0, values)
    return values


@triton.jit
def _forward_kernel(  # noqa: ANN202
    x,  # noqa: ANN001
    branch,  # noqa: ANN001
    gate,  # noqa: ANN001
    shift,  # noqa: ANN001
    scale,  # noqa: ANN001
    seed,  # noqa: ANN001
    added,  # noqa: ANN001
    normed,  # noqa: ANN001
    length,  # noqa: ANN001
    width,  # noqa: ANN001
    rows,  # noqa: ANN001
    gate_stride,  # noqa: ANN001
    shift_stride,  # noqa: ANN001
    scale_stride,  # noqa: ANN001
    rescale,  # noqa: ANN001
    epsilon,  # noqa: ANN001
    DROPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    sequence, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * rows
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    gates = tl.load(gate + sequence * gate_stride + columns, mask=inside, other=0.0).to(tl.float32) * rescale
    shifts = tl.load(shift + sequence * shift_stride + columns, mask=inside, other=0.0).to(tl.float32)
    scales = tl.load(scale + sequence * scale_stride + columns, mask=inside, other=0.0).to(tl.float32) + 1.0
    key = tl.load(seed).to(tl.uint32) if DROPPED else 0
    for position in range(first, tl.minimum(first + rows, length)):
        row = sequence * length + position
        here = row * width + columns
        values = tl.load(branch + here, mask=inside, other=0.0).to(tl.float32)
        values = _kept(values, key, row, columns, DROPPED)
        stream = tl.load(x + here, mask=inside, other=0.0).to(tl.float32) + gates * values
        # What is normed is what is stored: the backward pass reads it again.
        stream = stream.to(added.dtype.element_ty)
        tl.store(added + here, stream, mask=inside)
        stream = stream.to(tl.float32)
        mean = tl.sum(stream, 0) / width
        apart = tl.where(inside, stream - mean, 0.0)
        inverse = tl.rsqrt(tl.sum(apart * apart, 0) / width + epsilon)
        tl.store(normed + here, apart * inverse * scales + shifts, mask=inside)


@triton.jit
def _backward_kernel(  # noqa: ANN202
    d_added,  # noqa: ANN001
    d_normed,  # noqa: ANN001
    added,  # noqa: ANN001
    branch,  # noqa: ANN001
    gate,  # noqa: ANN001
    scale,  # noqa: ANN001
    seed,  # noqa: ANN001
    d_x,  # noqa: ANN001
    d_branch,  # noqa: ANN001
    d_vectors,  # noqa: ANN001
    length,  # noqa: ANN001
    width,  # noqa: ANN001
    rows,  # noqa: ANN001
    gate_stride,  # noqa: ANN001
    scale_stride,  # noqa: ANN001
    rescale,  # noqa: ANN001
    epsilon,  # noqa: ANN001
    DROPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    sequence, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * rows
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    gates = tl.load(gate + sequence * gate_stride + columns, mask=inside, other=0.0).to(tl.float32) * rescale
    scales = tl.load(scale + sequence * scale_stride + columns, mask=inside, other=0.0).to(tl.float32) + 1.0
    key = tl.load(seed).to(tl.uint32) if DROPPED else 0
    d_gate = tl.zeros([BLOCK], tl.float32)
    d_shift = tl.zeros([BLOCK], tl.float32)
    d_scale = tl.zeros([BLOCK], tl.float32)
    for position in range(first, tl.minimum(first + rows, length)):
        row = sequence * length + position
        here = row * width + columns
        stream = tl.load(added + here, mask=inside, other=0.0).to(tl.float32)
        gradient = tl.load(d_normed + here, mask=inside, other=0.0).to(tl.float32)
        passed = tl.load(d_added + here, mask=inside, other=0.0).to(tl.float32)
        values = tl.load(branch + here, mask=inside, other=0.0).to(tl.float32)
        mean = tl.sum(stream, 0) / width
        apart = tl.where(inside, stream - mean, 0.0)
        inverse = tl.rsqrt(tl.sum(apart * apart, 0) / width + epsilon)
        hat = apart * inverse
        d_shift += gradient
        d_scale += gradient * hat
        gradient *= scales
        across = tl.sum(gradient, 0) / width
        along = tl.sum(gradient * hat, 0) / width
        total = passed + inverse * (gradient - across - hat * along)
        tl.store(d_x + here, total, mask=inside)
        d_gate += total * _kept(values, key, row, columns, DROPPED)
        tl.store(d_branch + here, _kept(gates * total, key, row, columns, DROPPED), mask=inside)
    chunk = sequence * tl.num_programs(1) + tl.program_id(1)
    out = d_vectors + chunk * 3 * width + columns
    tl.store(out, d_gate * rescale, mask=inside)
    tl.store(out + width, d_shift, mask=inside)
    tl.store(out + 2 * width, d_scale, mask=inside)


def _grid(x: Tensor) -> tuple[tuple[int, int], int]:
    """((B, C), rows of a chunk)."""
    batch, length, _ = x.shape
    rows = max(1, batch * length // PROGRAMS)
    chunks = triton.cdiv(length, min(rows, length))
    return (batch, chunks), triton.cdiv(length, chunks)


def _options(x: Tensor, dropped: int) -> dict[str, Any]:
    return {"DROPPED": dropped, "BLOCK": triton.next_power_of_2(x.shape[-1]), "num_warps": WARPS}


@torch.library.custom_op("cedd::add_and_norm", mutates_args=())
def _forward(
    x: Tensor, branch: Tensor, gate: Tensor, shift: Tensor, scale: Tensor, seed: Tensor, dropped: int
) -> tuple[Tensor, Tensor]:
    x, branch = x.contiguous(), branch.contiguous()
    added, normed = torch.empty_like(x), torch.empty_like(x)
    grid, rows = _grid(x)
    vectors = [_unit_stride(vector) for vector in (gate, shift, scale)]
    _forward_kernel[grid](  # pyright: ignore[reportIndexIssue]
        x,
        branch,
        *vectors,
        seed,
        added,
        normed,
        x.shape[1],
        x.shape[2],
        rows,
        *(vector.stride(0) for vector in vectors),
        256 / (256 - dropped),
        EPSILON,
        **_options(x, dropped),
    )
    return added, normed


@torch.library.custom_op("cedd::add_and_norm_backward", mutates_args=())
def _backward(
    d_added: Tensor,
    d_normed: Tensor,
    added: Tensor,
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
    _backward_kernel[grid](  # pyright: ignore[reportIndexIssue]
        d_added,
        d_normed,
        added,
        branch,
        *vectors,
        seed,
        d_x,
        d_branch,
        d_vectors,
        added.shape[1],
        added.shape[2],
        rows,
        *(vector.stride(0) for vector in vectors),
        256 / (256 - dropped),
        EPSILON,
        **_options(added, dropped),
    )
    return d_x, d_branch, d_vectors.sum(1)


def _unit_stride(vector: Tensor) -> Tensor:
    return vector if vector.stride(-1) == 1 else vector.contiguous()


@_forward.register_fake
def _(x: Tensor, branch: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    like = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return like, torch.empty_like(like)


@_backward.register_fake
def _(d_added: Tensor, d_normed: Tensor, added: Tensor, branch: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    batch, width = added.shape[0], added.shape[2]
    vectors = torch.empty(batch, 3, width, dtype=torch.float32, device=added.device)
    return torch.empty_like(added), torch.empty(branch.shape, dtype=branch.dtype, device=branch.device), vectors


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, branch, gate, _, scale, seed, dropped = inputs
    ctx.save_for_backward(output[0], branch, gate, scale, seed)
    ctx.dropped = dropped


def _differentiate(ctx: Any, d_added: Tensor, d_normed: Tensor) -> tuple[Tensor | None, ...]:
    added, branch, gate, scale, seed = ctx.saved_tensors
    d_x, d_branch, vectors = _backward(d_added, d_normed, added, branch, gate, scale, seed, ctx.dropped)
    d_gate, d_shift, d_scale = (vector[:, None].to(gate.dtype) for vector in vectors.unbind(1))
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
    return _forward(x, branch, gate, shift, scale, seed, dropped)
