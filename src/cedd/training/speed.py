"""Training speed: tokens per second, and model FLOPs utilization in dense bfloat16."""

from __future__ import annotations

import time

import torch

from cedd.models.backbone import Backbone
from cedd.training.config import TrainConfig
from cedd.training.distributed import Ranks

_PEAKS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
}
"""Peak FLOP/s of accelerators, from their datasheets."""


def peak_flops(device: torch.device) -> float | None:
    """Peak FLOP/s of the device in dense bfloat16; None if unknown."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in _PEAKS.items() if key in name), None)


class Meter:
    """Speed over the most recent steps, without pauses for evaluations and checkpoints."""

    def __init__(self, config: TrainConfig, model: Backbone, ranks: Ranks) -> None:
        self._tokens_per_step = config.batch.size * config.length
        self._flops_per_token = model.flops_per_token(config.length)
        self._peak = peak_flops(ranks.device)
        self._world = ranks.world_size
        self.seconds_per_step: float | None = None
        self._since: tuple[int, float] | None = None

    def pause(self) -> None:
        """Do not count the time until the next step."""
        self._since = None

    def tick(self, step: int) -> None:
        now = time.perf_counter()
        if self._since is None or step <= self._since[0]:
            self._since = (step, now)
            return
        steps, seconds = step - self._since[0], now - self._since[1]
        if seconds > 0:
            self.seconds_per_step = seconds / steps
        if seconds > 10:  # let old speeds go
            self._since = (step, now)

    def figures(self) -> dict[str, float]:
        if self.seconds_per_step is None:
            return {}
        rate = self._tokens_per_step / self.seconds_per_step
        figures = {"tokens_per_second": round(rate, 1)}
        if self._peak is not None:
            share = rate * self._flops_per_token / (self._peak * self._world)
            figures["share_of_peak"] = round(share, 4)
        return figures

    def text(self) -> str:
        figures = self.figures()
        parts = [f"{figures['tokens_per_second']:,.0f} tokens/s"] if figures else []
        if "share_of_peak" in figures:
            parts.append(f"{figures['share_of_peak']:.0%} of peak")
        return "  ".join(parts)
