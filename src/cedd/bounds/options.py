"""How a bound is estimated: the options that the functions of `cedd.bounds` pass on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import torch

from cedd.bounds.estimate import check_tolerance
from cedd.bounds.order_weights import WeightFile
from cedd.dynamics import Corrector
from cedd.names import check_at_least_one, check_positive

Sampling = Literal["stratified", "independent"]
Progress = Callable[[int, int], None]
"""Called after each batch with the number of evaluations done and the number planned so far."""


@dataclass(frozen=True, kw_only=True)
class BoundOptions:
    """The options of `cedd.estimate_bound`, which describes them."""

    block: int | None = None
    orders: int | None = None
    draws: int = 16
    tolerance: float | None = None
    seconds: float | None = None
    generator: torch.Generator | None = None
    sampling: Sampling | None = None
    time_floor: float | None = None
    corrector: Corrector | None = None
    fixed_set: bool = False
    nested: bool = False
    max_draws: int = 4096
    batch: int | None = None
    device: torch.device | str | None = None
    checkpoint: WeightFile | None = None
    progress: Progress | None = None

    def __post_init__(self) -> None:
        for name in ("orders", "draws", "max_draws", "batch"):
            check_at_least_one(name, getattr(self, name))
        check_tolerance(self.tolerance)
        check_positive("seconds", self.seconds)
        if not isinstance(self.checkpoint, WeightFile | None):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"checkpoint must be a cedd.bounds.order_weights.WeightFile (got {self.checkpoint!r})")
        if self.sampling not in (None, *get_args(Sampling)):
            raise ValueError(f"sampling must be {' or '.join(get_args(Sampling))} (got {self.sampling!r})")
        if self.tolerance is not None and self.sampling == "independent":
            raise ValueError("a tolerance needs an interval, which independent draws do not have; use stratified")

    @staticmethod
    def and_conditions(arguments: dict[str, Any]) -> tuple[BoundOptions, dict[str, Any]]:
        """Keyword arguments as options, and the others as conditions of the network."""
        own = {field.name: arguments.pop(field.name) for field in fields(BoundOptions) if field.name in arguments}
        return BoundOptions(**own), arguments
