"""Log weights of reveal orders, and the file from which an interrupted evaluation resumes.

Shapes: R sequences (in block diffusion, blocks of them), K orders, L positions.
"""

from __future__ import annotations

import json
import math
import time
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from cedd.storage import JSONMapping, atomic_file, json_sha256

WEIGHT_SUFFIXES = (".npz",)


@dataclass
class OrderWeights:
    """The weights that are known so far: of `complete` orders, and of the first `passes` passes of the next ones.

    Args:
        log_weights: log w, [R, K] float64; NaN where it is not known yet.
        nats: the sum over known orders of -log f where a token is revealed, [R, L] float64.
    """

    log_weights: Tensor
    nats: Tensor
    complete: int = 0
    passes: int = 0

    @classmethod
    def none(cls, rows: int, length: int) -> OrderWeights:
        """No weights yet."""
        return cls(torch.empty(rows, 0, dtype=torch.float64), torch.zeros(rows, length, dtype=torch.float64))

    def grow(self, orders: int) -> None:
        """Make room for this number of orders."""
        more = orders - self.log_weights.shape[1]
        if more > 0:
            self.log_weights = torch.nn.functional.pad(self.log_weights, (0, more), value=math.nan)


@dataclass
class WeightFile:
    """A file of weights. It is written after a batch, at most once per `every` seconds, and at the end.

    Args:
        path: the .npz file.
        model: identifies the network, such as a hash of its weights.
        every: seconds between two writes.
    """

    path: Path
    model: str
    every: float = 30.0
    _written: float = field(default=-math.inf, init=False)

    def load(self, described: JSONMapping, rows: int, length: int, orders: int) -> OrderWeights:
        """The weights in the file, or none if there is no file; those of another evaluation are refused."""
        self._key = json_sha256({"model": self.model, **described})
        self._written = time.monotonic()
        if not self.path.exists():
            return OrderWeights.none(rows, length)
        try:
            with self.path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                header = json.loads(bytes(arrays["header"]))
                log_weights, nats = (torch.as_tensor(arrays[name]) for name in ("log_weights", "nats"))
            key, complete, passes = str(header["key"]), int(header["complete"]), int(header["passes"])
            if (len(log_weights), *nats.shape) != (rows, rows, length) and key == self._key:
                raise ValueError
        except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
            raise ValueError(
                f"{self.path} is not a file of order weights, or is damaged; delete it to start again"
            ) from None
        if key != self._key:
            raise ValueError(
                f"{self.path} belongs to another evaluation (model, data, labels, seed or block differs); choose "
                "another file"
            )
        if complete > orders or (passes and log_weights.shape[1] > orders):
            raise ValueError(
                f"{self.path} has the weights of {log_weights.shape[1]} orders already; ask for at least as many, or "
                "choose another file"
            )
        return OrderWeights(log_weights, nats, complete, passes)

    def save(self, weights: OrderWeights, final: bool = False) -> None:
        """Write the weights, unless they were written less than `every` seconds ago."""
        if not final and time.monotonic() < self._written + self.every:
            return
        header = json.dumps({"key": self._key, "complete": weights.complete, "passes": weights.passes})
        with atomic_file(self.path) as temporary, temporary.open("wb") as file:
            np.savez(
                file,
                header=np.frombuffer(header.encode(), np.uint8),
                log_weights=weights.log_weights.numpy(),
                nats=weights.nats.numpy(),
            )
        self._written = time.monotonic()
