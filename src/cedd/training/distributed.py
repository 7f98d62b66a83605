"""Ranks: one process per device, started by torchrun, or a single process.

The network and its loss are one module, so that DDP and FSDP2 see a forward pass from the batch to the loss.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from inspect import signature
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from cedd.device import pick_device
from cedd.losses import NoisyBatch, batch_loss
from cedd.methods import Method
from cedd.models.backbone import Backbone
from cedd.training.config import TrainConfig

Strategy = Literal["single", "ddp", "fsdp"]


class FirstRankFailed(Exception):
    """A function that the first rank ran for all has failed there, with its own error message."""


@dataclass(frozen=True)
class Ranks:
    """The rank of this process, the number of ranks, and its device."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()

    def sum(self, values: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def from_first(self, function: Callable[[], float | None]) -> float:
        """Run a function on the first rank and return its result on all ranks.

        If it fails, the first rank raises its error and the others raise `FirstRankFailed`, instead of waiting for a
        rank that has ended.
        """
        if self.world_size == 1:
            return function() or 0.0
        number, error = None, None
        if self.is_first:
            try:
                number = function()
            except Exception as happened:  # noqa: BLE001 - raised below, once the other ranks know
                error = happened
        shared = torch.tensor([number or 0.0, error is not None], dtype=torch.float64, device=self.device)
        dist.broadcast(shared, src=0)
        if error is not None:
            raise error
        number, failed = shared.tolist()
        if failed:
            raise FirstRankFailed("the first rank has failed; see its message")
        return number

    @contextmanager
    def first_goes_first(self) -> Iterator[None]:
        """Run the block on rank 0 before the others, which read the cache that it fills."""
        if not self.is_first:
            self.barrier()
        try:
            yield
        finally:
            if self.is_first:
                self.barrier()


@contextmanager
def joined_ranks(device: str) -> Iterator[Ranks]:
    """Join the ranks that torchrun started (RANK, WORLD_SIZE, LOCAL_RANK), or be the only one."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1:
        yield Ranks(0, 1, pick_device(device))
        return
    if "LOCAL_RANK" not in os.environ:
        raise ValueError(f"WORLD_SIZE is {world_size}, but LOCAL_RANK is not set: start the ranks by torchrun")
    chosen = pick_device(device, int(os.environ["LOCAL_RANK"]))
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo")
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size(), chosen)
    finally:
        dist.destroy_process_group()


class LossModule(nn.Module):
    """The network with its loss: batch in, nats per token out."""

    def __init__(self, model: Backbone, method: Method) -> None:
        super().__init__()
        self.model, self.method = model, method

    def forward(self, batch: NoisyBatch) -> Tensor:
        return batch_loss(self.method, self.model, batch)


def choose_strategy(config: TrainConfig, ranks: Ranks) -> Strategy:
    """The strategy; auto is ddp."""
    if ranks.world_size == 1:
        return "single"
    return "fsdp" if config.strategy == "fsdp" else "ddp"


def distribute(module: LossModule, strategy: Strategy) -> nn.Module:
    """The module with gradients averaged over ranks. FSDP shards the parameters in place."""
    if strategy == "single":
        return module
    if strategy == "ddp":
        # The loss depends on every parameter at every step; buffers are constant and need no synchronization.
        known = signature(DistributedDataParallel).parameters
        sync = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"  # before torch 2.13
        options: dict[str, Any] = {sync: False}
        return DistributedDataParallel(module, gradient_as_bucket_view=True, **options)
    from torch.distributed.fsdp import fully_shard

    for block in module.model.shard_units():
        fully_shard(block)
    fully_shard(module)
    return module


def without_sync(module: nn.Module, last: bool) -> AbstractContextManager[None]:
    """A context in which gradients stay local, for all micro-batches but the last."""
    if isinstance(module, DistributedDataParallel):
        return nullcontext() if last else module.no_sync()  # pyright: ignore[reportReturnType]
    if hasattr(module, "set_requires_gradient_sync"):
        module.set_requires_gradient_sync(last)  # pyright: ignore[reportCallIssue]
    return nullcontext()


def gather_full(tensor: Tensor) -> Tensor:
    """A sharded tensor gathered from all ranks (a collective call); any other unchanged."""
    gather = getattr(tensor, "full_tensor", None)
    return gather() if gather is not None else tensor


def local_part(tensor: Tensor) -> Tensor:
    """A sharded tensor's part on this rank, in the same memory; any other unchanged."""
    part = getattr(tensor, "to_local", None)
    return part() if part is not None else tensor


def with_full_matrices(function: Callable[[Tensor], Tensor], parts: Tensor, like: Tensor) -> Tensor:
    """This rank's part of function(matrices [n, R, C]), given its parts of n matrices that are all sharded like `like`
    [R, C]; a collective call. Matrices that are not sharded are passed unchanged."""
    if not hasattr(like, "full_tensor"):
        return function(parts)
    from torch.distributed.tensor import DTensor, Replicate, Shard  # slow to import

    assert isinstance(like, DTensor)
    mesh, rows = like.device_mesh, [Shard(1)]  # FSDP shards a matrix by its rows
    assert like.placements == (Shard(0),)
    shape, stride = torch.Size((len(parts), *like.shape)), (like.numel(), like.shape[1], 1)
    full = DTensor.from_local(parts, mesh, rows, run_check=False, shape=shape, stride=stride).full_tensor()
    made = DTensor.from_local(function(full), mesh, [Replicate()], run_check=False)
    return made.redistribute(mesh, rows).to_local()
