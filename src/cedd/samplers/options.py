"""How to sample: the options that `cedd.sample`, `LanguageModel`, the command line and the server share.

The command line makes its flags from this file, and prints its help without importing torch. So torch, and what needs
it, is imported for type checkers only.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

from cedd.names import changed

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from cedd.dynamics import Corrector
    from cedd.samplers.particle_set import ParticleSet

    Device = torch.device | str
else:  # what the command line, which evaluates the annotations, reads in their place
    Corrector = Device = Tensor = ParticleSet = object

Callback = Callable[[int, float, "Tensor"], None]
"""Called with the number of the step, the time reached and x [B, L], first with (0, start, x) and after each step."""


Reward = Callable[[Any], Any]
"""Texts -> as many finite numbers."""


class NamedSampler(Protocol):
    """A `Sampler` or a `StepRule`."""

    @property
    def name(self) -> str: ...


PYTHON_ONLY: Mapping[str, Any] = {"hidden": True}
"""Metadata of fields that are not options of the command line."""


@dataclass(frozen=True)
class SamplingOptions:
    """How to sample.

    None stands for a default: a model's own (`sampling` in its config.json) or the usual one.
    """

    sampler: str | NamedSampler = "analytic"
    """analytic, euler, tau-leaping, remask-capped, remask-rescaled, remask-confidence, gibbs, stratified,
    first-hitting, probability, margin, entropy, threshold, the rules of other projects (llada, llada-random,
    sdar-sequential, dream-origin, dream-maskgit-plus, dream-topk-margin, dream-entropy, sdar-static, sdar-dynamic),
    next-token (autoregressive models), or package:NAME of your own."""
    steps: int | None = None
    """Steps from noise to data. By default the model's own number, or one step per four tokens, from 64 to 256 (256 in
    cedd.sample). first-hitting and next-token take one step per token and do not take this option. Models that write
    blocks take the steps for each block, by default one per token."""
    grid: str | Tensor | None = None
    """Where the steps lie: kept (equal steps in the share of untouched tokens, the default), flow (the default for
    dfm), jumps (equally many jumps per step) or uniform (equal steps in time)."""
    temperature: float | None = None
    """Below 1, likely tokens are drawn more often than the network says; 0 always takes the likeliest. By default the
    model's own, or 1."""
    top_p: float | None = None
    """Draw only from the likeliest tokens that together have this probability. By default the model's own, or 1, which
    is all of them."""
    block_length: int | None = None
    """llada, sdar and threshold samplers: write the text in stretches of this many tokens from left to right."""
    threshold: float | None = None
    """sdar-dynamic and threshold samplers: keep every token that is more probable than this, by default 0.85 and
    0.9."""
    corrector: float | Corrector | None = None
    """Strength of flow matching's corrector (dfm only; the paper's is 1)."""
    guidance: float | None = None
    """Weight of the condition, a label or what is given of the text: 1 is the model as it is, more overstates it."""
    particles: int | None = None
    """Draw each text from so many weighted ones, so that its law is that of the model given the constraint."""
    batch: int | None = None
    """Sequences at once. By default all, and half as many whenever the memory does not suffice."""
    deterministic: bool | None = None
    """Run the network on one sequence at a time, so that no bit of it depends on the others; the default on a CPU."""
    seed: int | None = field(default=None, metadata=PYTHON_ONLY)
    """Sequence i depends on (seed, i) alone."""
    seeds: Sequence[int] | None = field(default=None, metadata=PYTHON_ONLY)
    """One seed per sequence, instead of `seed`; `text_seeds(seed, n)` are those of n sequences."""
    reward: Reward | None = field(default=None, metadata=PYTHON_ONLY)
    """Steer by a number for each text: a function of tokens [N, L] in cedd.sample, of a list of texts elsewhere."""
    strength: float = field(default=1.0, metadata=PYTHON_ONLY)
    """The samples' law is proportional to p(x) exp(strength reward(x)), approached with the number of particles."""
    on_particles: Callable[[ParticleSet], None] | None = field(default=None, metadata=PYTHON_ONLY)
    """Called with the particles of each text, in order."""
    exclude: Sequence[int] = field(default=(), metadata=PYTHON_ONLY)
    """Tokens that are never drawn, neither as noise nor from the network's probabilities."""
    final_denoise: bool = field(default=True, metadata=PYTHON_ONLY)
    """End with a step to clean data; without it a few masks may be left."""
    t_start: float = field(default=1.0, metadata=PYTHON_ONLY)
    """The time to start from, where 1 is noise."""
    x_start: Tensor | None = field(default=None, metadata=PYTHON_ONLY)
    """Start from these states [B, L] instead of noise."""
    stop: Sequence[int] = field(default=(), metadata=PYTHON_ONLY)
    """Tokens that end a text, in block diffusion and autoregression: what follows the first one that is drawn is the
    same token."""
    context: int | None = field(default=None, metadata=PYTHON_ONLY)
    """Tokens that the network reads at once, in block diffusion: longer texts are written in a window that slides. By
    default as many as it can read."""
    cache: bool = field(default=True, metadata=PYTHON_ONLY)
    """Keep the keys and values of finished blocks. Without, they are computed again in every call: the same result."""
    callback: Callback | None = field(default=None, metadata=PYTHON_ONLY)
    """Called with the step's number, the time reached and x, before the first step and after each."""
    device: Device | None = field(default=None, metadata=PYTHON_ONLY)
    """Where to sample; by default where the network's parameters are."""

    def __post_init__(self) -> None:
        """Raise a ValueError for values that no sampler takes."""
        check_sharpening(self.temperature, self.top_p)
        if self.steps is not None:
            check_steps(self.steps)
        if self.guidance is not None and not math.isfinite(self.guidance):
            raise ValueError(f"guidance must be a finite number; got {self.guidance}")
        if self.particles is not None and self.particles < 1:
            raise ValueError(f"particles must be at least 1; got {self.particles}")
        if self.reward is not None and self.particles is None:
            raise ValueError("a reward steers particles; give their number, for example particles=16")
        if self.block_length is not None and self.block_length < 1:
            raise ValueError(f"block_length must be at least 1; got {self.block_length}")
        if self.threshold is not None and not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold must lie in [0, 1]; got {self.threshold}")
        if self.batch is not None and self.batch < 1:
            raise ValueError(f"batch must be at least 1; got {self.batch}")
        if not 0 < self.t_start <= 1:
            raise ValueError(f"sampling starts at a time in (0, 1], where 1 is noise; got {self.t_start:g}")
        if self.seed is not None and self.seeds is not None:
            raise ValueError("give a seed, or seeds for each of the texts, not both")

    def changed(self, settings: Mapping[str, Any]) -> SamplingOptions:
        """The options with those of the settings that are not None in their place; unknown names are refused."""
        return changed(self, settings, "the options of sampling")

    def with_defaults(self, length: int, own: Mapping[str, Any], block: int | None = None) -> SamplingOptions:
        """The options with defaults where None stands: a model's own, or the usual ones for this length."""
        usual = {"steps": default_steps(length, block), "temperature": 1.0, "top_p": 1.0}
        for name, value in own.items():
            if name not in usual or not isinstance(value, int | float):
                known = ", ".join(usual)
                raise ValueError(f"the sampling of the model's folder has numbers for {known}; got {name}={value!r}")
        if self.particles is not None:  # they weight the probabilities that top_p would cut off
            own = {name: value for name, value in own.items() if name != "top_p"}
        missing = {name: own.get(name, value) for name, value in usual.items() if getattr(self, name) is None}
        return replace(self, **missing)

    def seeds_of(self, n: int) -> Sequence[int]:
        """A seed for each of n sequences: those given, or made from one seed, which is random if none is given."""
        from cedd.samplers.random_numbers import check_seeds, text_seeds

        if self.seeds is None:
            return text_seeds(secrets.randbits(64) if self.seed is None else self.seed, n)
        return check_seeds(self.seeds, n)

    def record(self) -> dict[str, Any]:
        """The options of the command line and the seed, as JSON values: how samples in a file were drawn."""
        names = ["seed", *(one.name for one in fields(self) if not one.metadata)]
        return {name: getattr(self, name) for name in names}


class SamplingSettings(TypedDict, total=False):
    """The fields of `SamplingOptions` as keyword arguments."""

    sampler: str | NamedSampler
    steps: int | None
    grid: str | Tensor | None
    temperature: float | None
    top_p: float | None
    block_length: int | None
    threshold: float | None
    corrector: float | Corrector | None
    guidance: float | None
    particles: int | None
    batch: int | None
    deterministic: bool | None
    seed: int | None
    seeds: Sequence[int] | None
    reward: Reward | None
    strength: float
    on_particles: Callable[[ParticleSet], None] | None
    exclude: Sequence[int]
    final_denoise: bool
    t_start: float
    x_start: Tensor | None
    stop: Sequence[int]
    context: int | None
    cache: bool
    callback: Callback | None
    device: Device | None


def default_steps(length: int, block: int | None = None) -> int:
    """Steps for sequences of `length` tokens: one per four tokens, from 64 to 256; those of a block of so many tokens,
    which takes a step per token at most.

    Tokens drawn in the same step do not see each other, but they lie far apart: judged by another model, texts drawn
    with one step per token were not measurably better (docs/results/samplers.md). Every step is a network call.
    """
    usual = min(max((block or length) // 4, 64), 256)
    return usual if block is None else min(block, usual)


def check_steps(steps: int) -> None:
    """Refuse a number of steps that is not a positive whole number."""
    if not isinstance(steps, Integral):
        raise ValueError(f"steps must be a whole number; got {steps}")
    if steps < 1:
        raise ValueError(f"steps must be at least 1; got {steps}")


def check_sharpening(temperature: float | None, top_p: float | None) -> None:
    """Refuse a temperature below 0 and a top-p outside of (0, 1]."""
    if temperature is not None and not (math.isfinite(temperature) and temperature >= 0):
        raise ValueError(f"temperature must be a number >= 0 (1 leaves the model as it is); got {temperature}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must lie in (0, 1] (1 leaves the model as it is); got {top_p}")
