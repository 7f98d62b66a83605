"""AdamW and the moving average of all parameters in one kernel, the gradients' norm in another; Muon in two.

Imported only where there is a CUDA device. A step of 32 x 128 tokens takes 7 ms on an H200, and torch's own kernels
(AdamW, then the average, a list of them each) took a quarter of that on top. The cost is memory traffic: a parameter of
four bytes needs 36 bytes read and written (value, gradient, two moments, average). Eight of them are the average's,
which need not be updated in every step (`EMA.every`).

A parameter may have a copy in bfloat16, which the network reads instead: its gradient is then bfloat16 too, and the
kernel that updates the parameter writes the copy.

The tensors are not moved: the kernels find them in a table of addresses. A program looks up its tensor and takes one
block of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

BLOCK = 1024
WARPS = 8
"""Block size of programs that update float32: a thread holds four entries of each tensor, 16 bytes."""

NORM_WARPS = 2
"""Block size of programs that only read, mostly bfloat16: two loads of 16 bytes per thread."""


@triton.jit
def _addresses(table, row, tensors, which, offsets, BLOCK: tl.constexpr, LOW: tl.constexpr):
    """Addresses of a block of tensor `which` of the table's row, bfloat16 if LOW, known to be aligned to 16 bytes."""
    address = tl.load(table + row * tensors + which)
    base = address.to(tl.pointer_type(tl.bfloat16)) if LOW else address.to(tl.pointer_type(tl.float32))
    return tl.max_contiguous(tl.multiple_of(base + offsets, [16]), [BLOCK])


@triton.jit
def _block(which, starts, sizes, BLOCK: tl.constexpr):
    """This program's tensor, the start of its block in it, the tensor's size, and the block's offsets."""
    program = tl.program_id(0)
    index = tl.load(which + program)
    start = tl.load(starts + program)
    return index, start, tl.load(sizes + index), start + tl.arange(0, BLOCK)


@triton.jit
def _read(addresses, inside, FULL: tl.constexpr):
    """A block in float32, 0 beyond the tensor's end; a FULL one needs no mask, and so is read 16 bytes at a time."""
    values = tl.load(addresses) if FULL else tl.load(addresses, mask=inside, other=0.0)
    return values.to(tl.float32)


@triton.jit
def _write(addresses, values, inside, FULL: tl.constexpr):
    if FULL:
        tl.store(addresses, values)
    else:
        tl.store(addresses, values, mask=inside)


@triton.jit
def _squares_kernel(table, which, starts, sizes, partial, tensors, BLOCK: tl.constexpr, COPIED: tl.constexpr):
    index, start, size, offsets = _block(which, starts, sizes, BLOCK)
    gradients = _addresses(table, 1, tensors, index, offsets, BLOCK, COPIED)
    if start + BLOCK <= size:
        values = _read(gradients, offsets < size, True)
    else:
        values = _read(gradients, offsets < size, False)
    tl.store(partial + tl.program_id(0), tl.sum(values * values, 0))


@triton.jit
def _update_block(places, inside, settings, COPIED: tl.constexpr, AVERAGED: tl.constexpr, FULL: tl.constexpr):
    """A block of AdamW where the step is finite, then of the average and of the copy."""
    values, gradients, firsts, seconds, averages, copies = places
    rate, beta1, beta2, epsilon, decay, pace, correction1, correction2, scale, finite = settings
    value, first, second = _read(values, inside, FULL), _read(firsts, inside, FULL), _read(seconds, inside, FULL)
    gradient = _read(gradients, inside, FULL) * scale
    average = _read(averages, inside, FULL) if AVERAGED else value
    new_first = first + (gradient - first) * (1 - beta1)
    new_second = beta2 * second + (1 - beta2) * gradient * gradient
    denominator = tl.sqrt(new_second) / tl.sqrt(correction2) + epsilon
    new_value = value * (1 - rate * decay) - rate / correction1 * new_first / denominator
    value = tl.where(finite, new_value, value)
    _write(values, value, inside, FULL)
    _write(firsts, tl.where(finite, new_first, first), inside, FULL)
    _write(seconds, tl.where(finite, new_second, second), inside, FULL)
    if AVERAGED:
        _write(averages, average + (value - average) * pace, inside, FULL)
    if COPIED:
        _write(copies, value.to(tl.bfloat16), inside, FULL)


@triton.jit
def _update_kernel(
    table,
    which,
    starts,
    sizes,
    count,
    excess,
    finite,
    rate,
    beta1,
    beta2,
    log_beta1,
    log_beta2,
    epsilon,
    decay,
    pace,
    tensors,
    BLOCK: tl.constexpr,
    COPIED: tl.constexpr,
    AVERAGED: tl.constexpr,
):
    index, start, size, offsets = _block(which, starts, sizes, BLOCK)
    steps = tl.load(count).to(tl.float64) + 1.0
    # In float64: 1 - 0.999 has lost four digits in float32.
    correction1 = (1.0 - tl.exp(steps * log_beta1)).to(tl.float32)
    correction2 = (1.0 - tl.exp(steps * log_beta2)).to(tl.float32)
    scale = 1.0 / tl.load(excess)
    good = tl.load(finite) != 0
    settings = (rate, beta1, beta2, epsilon, decay, pace, correction1, correction2, scale, good)
    values = _addresses(table, 0, tensors, index, offsets, BLOCK, False)
    gradients = _addresses(table, 1, tensors, index, offsets, BLOCK, COPIED)
    firsts = _addresses(table, 2, tensors, index, offsets, BLOCK, False)
    seconds = _addresses(table, 3, tensors, index, offsets, BLOCK, False)
    averages = _addresses(table, 4, tensors, index, offsets, BLOCK, False)
    copies = _addresses(table, 5, tensors, index, offsets, BLOCK, True)
    places = (values, gradients, firsts, seconds, averages, copies)
    if start + BLOCK <= size:
        _update_block(places, offsets < size, settings, COPIED, AVERAGED, True)
    else:
        _update_block(places, offsets < size, settings, COPIED, AVERAGED, False)


@triton.jit
def _look_ahead_block(momenta, gradients, directions, inside, keep, scale, finite, FULL: tl.constexpr):
    """A block of the new momentum and of the look ahead; if the step is not finite, the old momentum and 0."""
    momentum, gradient = _read(momenta, inside, FULL), _read(gradients, inside, FULL) * scale
    moved = gradient + (momentum - gradient) * keep
    ahead = gradient + (moved - gradient) * keep
    _write(momenta, tl.where(finite, moved, momentum), inside, FULL)
    _write(directions, tl.where(finite, ahead, 0.0).to(tl.bfloat16), inside, FULL)


@triton.jit
def _look_ahead_kernel(
    table, which, starts, sizes, excess, finite, keep, tensors, BLOCK: tl.constexpr, COPIED: tl.constexpr
):
    index, start, size, offsets = _block(which, starts, sizes, BLOCK)
    scale = 1.0 / tl.load(excess)
    good = tl.load(finite) != 0
    gradients = _addresses(table, 1, tensors, index, offsets, BLOCK, COPIED)
    momenta = _addresses(table, 2, tensors, index, offsets, BLOCK, False)
    directions = _addresses(table, 3, tensors, index, offsets, BLOCK, True)
    if start + BLOCK <= size:
        _look_ahead_block(momenta, gradients, directions, offsets < size, keep, scale, good, True)
    else:
        _look_ahead_block(momenta, gradients, directions, offsets < size, keep, scale, good, False)


@triton.jit
def _move_block(places, inside, settings, COPIED: tl.constexpr, AVERAGED: tl.constexpr, FULL: tl.constexpr):
    """A block of a matrix moved along its direction where the step is finite, then of its average and its copy."""
    values, directions, averages, copies = places
    length, shrink, pace, finite = settings
    value, direction = _read(values, inside, FULL), _read(directions, inside, FULL)
    average = _read(averages, inside, FULL) if AVERAGED else value
    value = tl.where(finite, value * shrink - length * direction, value)
    _write(values, value, inside, FULL)
    if AVERAGED:
        _write(averages, average + (value - average) * pace, inside, FULL)
    if COPIED:
        _write(copies, value.to(tl.bfloat16), inside, FULL)


@triton.jit
def _move_kernel(
    table,
    which,
    starts,
    sizes,
    lengths,
    finite,
    rate,
    decay,
    pace,
    tensors,
    BLOCK: tl.constexpr,
    COPIED: tl.constexpr,
    AVERAGED: tl.constexpr,
):
    index, start, size, offsets = _block(which, starts, sizes, BLOCK)
    settings = (rate * tl.load(lengths + index), 1.0 - rate * decay, pace, tl.load(finite) != 0)
    values = _addresses(table, 0, tensors, index, offsets, BLOCK, False)
    directions = _addresses(table, 3, tensors, index, offsets, BLOCK, True)
    averages = _addresses(table, 4, tensors, index, offsets, BLOCK, False)
    places = (values, directions, averages, _addresses(table, 5, tensors, index, offsets, BLOCK, True))
    if start + BLOCK <= size:
        _move_block(places, offsets < size, settings, COPIED, AVERAGED, True)
    else:
        _move_block(places, offsets < size, settings, COPIED, AVERAGED, False)


@dataclass
class _Group:
    """The tensors with a copy, or those without one, and their addresses."""

    members: list[int]
    """Their indices in the lists that the table was made from."""
    copied: bool
    addresses: Tensor
    """[6, members] int64: of values, gradients, moments, averages and copies."""
    sizes: Tensor
    which: Tensor
    """[programs]: a program's tensor, and the start of its block in it."""
    starts: Tensor
    partial: Tensor
    """[programs]: sums of squares."""

    def launch(self, kernel: Any, *arguments: Any, warps: int | None = None, **constants: Any) -> None:
        """Run a kernel over these tensors, with its other arguments."""
        places = self.addresses, self.which, self.starts, self.sizes
        constants |= {"BLOCK": BLOCK, "COPIED": self.copied, "num_warps": warps or WARPS}
        kernel[(len(self.which),)](*places, *arguments, len(self.sizes), **constants)


class _LaunchTable:
    """The addresses of the parameters, their gradients, two further tensors each, averages and copies.

    Lists of tensors of the same shapes, dense and float32; copies, where they are not None, are bfloat16, and so are
    the gradients of parameters with a copy.
    """

    def __init__(
        self,
        values: Sequence[Tensor],
        firsts: Sequence[Tensor],
        seconds: Sequence[Tensor],
        averages: Sequence[Tensor],
        copies: Sequence[Tensor | None] | None = None,
    ) -> None:
        copies = copies or [None] * len(values)
        device = values[0].device
        programs = [math.ceil(value.numel() / BLOCK) for value in values]
        self.partial = torch.empty(sum(programs), dtype=torch.float32, device=device)
        self._groups: list[_Group] = []
        self._gradients = [0] * len(values)
        first = 0
        for copied in (True, False):
            members = [i for i, copy in enumerate(copies) if (copy is not None) == copied]
            if not members:
                continue
            rows = [[row[i].data_ptr() for i in members] for row in (values, firsts, seconds, averages)]
            rows.insert(1, [0] * len(members))
            rows.append([0 if (copy := copies[i]) is None else copy.data_ptr() for i in members])
            blocks = [(number, BLOCK * block) for number, i in enumerate(members) for block in range(programs[i])]
            group = _Group(
                members,
                copied,
                addresses=torch.tensor(rows, dtype=torch.int64, device=device),
                sizes=torch.tensor([values[i].numel() for i in members], dtype=torch.int64, device=device),
                which=torch.tensor([number for number, _ in blocks], dtype=torch.int32, device=device),
                starts=torch.tensor([start for _, start in blocks], dtype=torch.int64, device=device),
                partial=self.partial[first : first + len(blocks)],
            )
            self._groups.append(group)
            first += len(blocks)

    def find(self, gradients: Sequence[Tensor]) -> None:
        """Enter the addresses of the gradients; they seldom change."""
        places = [gradient.data_ptr() for gradient in gradients]
        if places == self._gradients:
            return
        for group in self._groups:
            fresh = torch.tensor([places[i] for i in group.members], dtype=torch.int64)
            if group.addresses.is_cuda:
                fresh = fresh.pin_memory()
            group.addresses[1].copy_(fresh, non_blocking=True)
        self._gradients = places

    def norm(self) -> Tensor:
        """The norm of all gradients, []."""
        for group in self._groups:
            group.launch(_squares_kernel, group.partial, warps=NORM_WARPS)
        return self.partial.sum(dtype=torch.float64).sqrt().float()


class TensorTable(_LaunchTable):
    """AdamW's parameters; the two further tensors are their moments."""

    def update(
        self,
        count: Tensor,
        excess: Tensor,
        finite: Tensor,
        *,
        rate: float,
        betas: tuple[float, float],
        epsilon: float,
        decay: float,
        pace: float,
    ) -> None:
        """Gradients divided by excess []; step count [] + 1 of AdamW unless finite [] is 0; averages move by `pace`."""
        settings = (rate, *betas, *map(math.log, betas), epsilon, decay, pace)
        for group in self._groups:
            group.launch(_update_kernel, count, excess, finite, *settings, AVERAGED=pace > 0)


class MatrixTable(_LaunchTable):
    """Muon's matrices; the two further tensors are their momenta and, in bfloat16, their directions.

    lengths: how far each goes at a rate of 1. A step is `look_ahead`, which leaves N in the directions; then they are
    orthogonalized; then `move`.
    """

    def __init__(self, lengths: Sequence[float], *tensors: Any) -> None:
        super().__init__(*tensors)
        self._lengths = [
            torch.tensor([lengths[i] for i in group.members], dtype=torch.float32, device=self.partial.device)
            for group in self._groups
        ]

    def look_ahead(self, excess: Tensor, finite: Tensor, keep: float) -> None:
        """Momenta keep a share `keep` of themselves, gradients are divided by excess []; unless finite [] is 0."""
        for group in self._groups:
            group.launch(_look_ahead_kernel, excess, finite, keep)

    def move(self, finite: Tensor, *, rate: float, decay: float, pace: float) -> None:
        """Values shrink, and move by rate × length along directions, unless finite [] is 0; averages by `pace`."""
        for group, lengths in zip(self._groups, self._lengths, strict=True):
            group.launch(_move_kernel, lengths, finite, rate, decay, pace, AVERAGED=pace > 0)
