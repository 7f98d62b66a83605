"""The dense bfloat16 peak of known accelerators, by their makers' datasheets, to say what share of it a run reaches."""

from __future__ import annotations

import torch

_PEAKS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
}


def peak_flops(device: torch.device) -> float | None:
    """FLOP/s of the device in dense bfloat16, or None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in _PEAKS.items() if key in name), None)
