"""Noise schedules: how much noise sigma(t) a token has seen by time t, its rate sigma'(t), and the time t(sigma).

A schedule is a frozen record of numbers with three functions of a tensor. All arithmetic is float64, whatever
the input, and goes through expm1/log1p, because the interesting end is t -> 0 where sigma is of order t.

    LogLinear    sigma = -log(1 - (1-eps) t)                       so that exp(-sigma) falls linearly to eps
    Polynomial   sigma = -k log(1 - (1-eps) t)                     so that exp(-sigma) falls like its k-th power
    Cosine       sigma = -log(1 - (1-eps) (1 - cos(pi t / 2)))     gentle at both ends
    Geometric    sigma = sigma_min^(1-t) sigma_max^t               starts at sigma_min, not at zero
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from cedd.device import has_float64
from cedd.parts import Part, Table
from cedd.storage import JSONMapping

Time = Tensor | float
_LARGEST_SIGMA = 700.0
"""The largest sigma_max: exp(-sigma) underflows in float64 above 745."""
_SMALLEST_EPS = 1e-12
"""Smallest eps: 1 - eps has 16 digits, which leave four of eps."""
_LARGEST_POWER = 1e20


def double(value: Tensor | float) -> Tensor:
    """The value as a float64 tensor (on the CPU where the device has no float64)."""
    if isinstance(value, Tensor) and value.dtype == torch.float64:  # the usual case; the device then supports float64
        return value
    # A Python float must not pass through torch's default dtype: float32 would keep 7 of its digits.
    tensor = value if isinstance(value, Tensor) else torch.as_tensor(value, dtype=torch.float64)
    return (tensor if has_float64(tensor.device) else tensor.cpu()).to(torch.float64)


def check_time(t: Time) -> Tensor:
    """t as float64, refused unless every entry lies in [0, 1]."""
    time = double(t)
    if time.numel():
        ends = time.aminmax()  # both are nan if one of the times is
        # Together, because reading from a GPU synchronizes.
        low, high = (end.item() for end in (ends if time.is_cpu else torch.stack(ends).cpu()))
        if not (low >= 0 and high <= 1):
            bad = time[~((time >= 0) & (time <= 1))].flatten()[0].item()
            raise ValueError(f"time t must be in [0, 1], where 0 is data and 1 is noise (got {bad!r})")
    return time


def check_times(t: Time, x: Tensor, name: str) -> Tensor:
    """t as float64, for sequences x [B, L] of this name: one time for all, one per sequence [B], or one per position
    [B, L]."""
    time = check_time(t)
    if time.shape != x.shape[: time.dim()]:
        raise ValueError(
            "t must be one time, one per sequence or one per position: "
            f"{name} is {list(x.shape)}, t is {list(time.shape)}"
        )
    return time


def _check_eps(eps: float) -> None:
    if not _SMALLEST_EPS <= eps < 1.0:
        raise ValueError(f"eps must be at least {_SMALLEST_EPS:g} and below 1 (default 1e-3) (got {eps!r})")


SCHEDULES: dict[str, type[Schedule]] = {}
"""The schedules by name; those of your own can be added."""


class Schedule(Part, ABC):
    """sigma(t) on [0, 1], increasing; subclasses are frozen dataclasses of plain numbers."""

    table: ClassVar[Table] = Table("schedule", "cedd.schedules.SCHEDULES", SCHEDULES)

    @abstractmethod
    def sigma(self, t: Time) -> Tensor:
        """Total noise at time t."""

    @abstractmethod
    def rate(self, t: Time) -> Tensor:
        """sigma'(t)."""

    @abstractmethod
    def inverse(self, sigma: Tensor | float) -> Tensor:
        """The time at which the total noise is sigma."""

    @property
    def start(self) -> float:
        """sigma(0): zero, except for the geometric schedule."""
        return float(self.sigma(0.0))

    @property
    def end(self) -> float:
        """sigma(1)."""
        return float(self.sigma(1.0))


@dataclass(frozen=True)
class LogLinear(Schedule):
    """sigma = -log(1 - (1-eps) t): the share of untouched tokens falls linearly from 1 to eps."""

    eps: float = 1e-3

    def __post_init__(self) -> None:
        _check_eps(self.eps)

    def sigma(self, t: Time) -> Tensor:
        return -torch.log1p(-(1 - self.eps) * check_time(t))

    def rate(self, t: Time) -> Tensor:
        return (1 - self.eps) / (1 - (1 - self.eps) * check_time(t))

    def inverse(self, sigma: Tensor | float) -> Tensor:
        return (-torch.expm1(-double(sigma)) / (1 - self.eps)).clamp(0.0, 1.0)


@dataclass(frozen=True)
class Polynomial(Schedule):
    """sigma = -power * log(1 - (1-eps) t), that is exp(-sigma) = (1 - (1-eps) t)^power.

    With power k and eps -> 0 it is the path kappa = (flow time)^k of discrete flow matching.
    """

    power: float = 2.0
    eps: float = 1e-3

    def __post_init__(self) -> None:
        _check_eps(self.eps)
        if not 0 < self.power <= _LARGEST_POWER:
            raise ValueError(f"power must be positive and at most {_LARGEST_POWER:g} (got {self.power!r})")

    def sigma(self, t: Time) -> Tensor:
        return self.power * LogLinear(self.eps).sigma(t)

    def rate(self, t: Time) -> Tensor:
        return self.power * LogLinear(self.eps).rate(t)

    def inverse(self, sigma: Tensor | float) -> Tensor:
        return LogLinear(self.eps).inverse(double(sigma) / self.power)


@dataclass(frozen=True)
class Cosine(Schedule):
    """exp(-sigma) = 1 - (1-eps) (1 - cos(pi t / 2)), where 1 - cos(x) is computed as 2 sin(x/2)^2."""

    eps: float = 1e-3

    def __post_init__(self) -> None:
        _check_eps(self.eps)

    def sigma(self, t: Time) -> Tensor:
        return -torch.log1p(-(1 - self.eps) * 2 * torch.sin(math.pi / 4 * check_time(t)) ** 2)

    def rate(self, t: Time) -> Tensor:
        time = check_time(t)
        untouched = 1 - (1 - self.eps) * 2 * torch.sin(math.pi / 4 * time) ** 2
        return (1 - self.eps) * (math.pi / 2) * torch.sin(math.pi / 2 * time) / untouched

    def inverse(self, sigma: Tensor | float) -> Tensor:
        half_versine = -torch.expm1(-double(sigma)) / (2 * (1 - self.eps))
        return (4 / math.pi * torch.asin(half_versine.clamp(0.0, 1.0).sqrt())).clamp(0.0, 1.0)


@dataclass(frozen=True)
class Geometric(Schedule):
    """sigma = sigma_min^(1-t) sigma_max^t.

    It starts at sigma_min: data are clean at exactly t = 0, and have at least sigma_min of noise at any t > 0.
    """

    sigma_min: float
    sigma_max: float

    def __post_init__(self) -> None:
        if not 0.0 < self.sigma_min < self.sigma_max <= _LARGEST_SIGMA:
            raise ValueError(
                f"a geometric schedule needs 0 < sigma_min < sigma_max <= {_LARGEST_SIGMA:g}; "
                f"got {self.sigma_min!r}, {self.sigma_max!r}"
            )

    @property
    def _log_ratio(self) -> float:
        return math.log(self.sigma_max / self.sigma_min)

    def sigma(self, t: Time) -> Tensor:
        return self.sigma_min * torch.exp(self._log_ratio * check_time(t))

    def rate(self, t: Time) -> Tensor:
        return self._log_ratio * self.sigma(t)

    def inverse(self, sigma: Tensor | float) -> Tensor:
        return (torch.log(double(sigma) / self.sigma_min) / self._log_ratio).clamp(0.0, 1.0)


SCHEDULES.update({"log-linear": LogLinear, "polynomial": Polynomial, "cosine": Cosine, "geometric": Geometric})


def schedule_from_config(config: JSONMapping) -> Schedule:
    """The schedule whose `config()` was this record."""
    return Schedule.from_config(config)
