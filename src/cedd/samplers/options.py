"""How to sample: the options that `cedd.sample`, `LanguageModel`, the command line and the server share.

The command line makes its flags from this file, and prints its help without importing torch. So torch, and what needs
it, is imported for type checkers only.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Real
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

from cedd.names import changed, check_at_least_one
from cedd.storage import JSONMapping, JSONObject

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from cedd.dynamics import Corrector
    from cedd.samplers.particle_set import ParticleSet

    Device = torch.device | str
else:  # placeholders for the command line, which evaluates the annotations
    Corrector = Device = Tensor = ParticleSet = object

Callback = Callable[[int, float, "Tensor"], None]
"""Called with the number of the step, the time reached and x [B, L], first with (0, start, x) and after each step."""


Reward = Callable[[Any], object]
"""Texts -> a finite number per text: a list of str, or tokens [N, L] where the sampler has no tokenizer."""


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
    cedd.sample). first-hitting and next-token always take one step per token. For block diffusion models: steps per
    block, by default one per token."""
    grid: str | Tensor | None = None
    """Time grid of the steps: kept (equal steps in the share of tokens without noise, the default), flow (the default
    for dfm), jumps (equally many jumps per step) or uniform (equal steps in time)."""
    temperature: float | None = None
    """Temperature of the token distribution; 0 always takes the most probable token. By default the model's own, or
    1."""
    top_p: float | None = None
    """Nucleus sampling: draw only from the most probable tokens that together have this probability. By default the
    model's own, or 1 (all tokens)."""
    block_length: int | None = None
    """llada, sdar and threshold samplers: write the text from left to right in parts of this many tokens."""
    threshold: float | None = None
    """sdar-dynamic and threshold samplers: keep every token whose probability exceeds this (default: 0.85 for
    sdar-dynamic, 0.9 for threshold)."""
    place_temperature: float | None = None
    """dream samplers, except dream-origin: randomness in the choice of positions to reveal, which have
    probabilities proportional to exp(confidence / this), as Dream's alg_temp; 0 reveals the most confident (default:
    0)."""
    corrector: float | Corrector | None = None
    """Strength of the flow-matching corrector (dfm only; 1 in the paper)."""
    label: str | int | None = None
    """Label of the texts, for models trained with cedd train --labels; by default, texts of any label."""
    guidance: float | None = None
    """Guidance weight of the condition (a label, the prompt or the given text). 1 is the unguided conditional model;
    larger values follow the condition more closely."""
    particles: int | None = None
    """Particles of sequential Monte Carlo: draw this many weighted candidates per text, so that the text follows the
    model's distribution given the constraint more closely."""
    batch: int | None = None
    """Sequences per batch. By default all; halved when memory runs out."""
    deterministic: bool | None = None
    """Run the network on one sequence at a time, so that each text is bit-identical whatever else is in the batch; the
    default on a CPU."""
    seed: int | None = field(default=None, metadata=PYTHON_ONLY)
    """Sequence i depends on (seed, i) alone."""
    seeds: Sequence[int] | None = field(default=None, metadata=PYTHON_ONLY)
    """One seed per sequence, instead of `seed`; `text_seeds(seed, n)` returns those that `seed` gives n sequences."""
    reward: Reward | None = field(default=None, metadata=PYTHON_ONLY)
    """Reward for steering, one number per text: a function of tokens [N, L] in cedd.sample, elsewhere of a list of
    texts. In block diffusion it is also called with texts that end after the current block."""
    strength: float = field(default=1.0, metadata=PYTHON_ONLY)
    """Target distribution of steering: proportional to p(x) exp(strength · reward(x)), approached as the number of
    particles grows."""
    on_particles: Callable[[ParticleSet], None] | None = field(default=None, metadata=PYTHON_ONLY)
    """Called with the particles of each text, in order."""
    exclude: Sequence[int] = field(default=(), metadata=PYTHON_ONLY)
    """Tokens that are never drawn, neither as noise nor from the network's probabilities."""
    final_denoise: bool = field(default=True, metadata=PYTHON_ONLY)
    """End with a step to clean data; without it a few masks may be left."""
    t_start: float = field(default=1.0, metadata=PYTHON_ONLY)
    """Time at which sampling starts; 1 is pure noise."""
    x_start: Tensor | None = field(default=None, metadata=PYTHON_ONLY)
    """Start from these states [B, L] instead of noise."""
    stop: Sequence[int] = field(default=(), metadata=PYTHON_ONLY)
    """Tokens that end a text, in block diffusion and autoregression. After the first of them, the text is filled with
    this token."""
    context: int | None = field(default=None, metadata=PYTHON_ONLY)
    """Context length in tokens, in block diffusion; longer texts are written in a sliding window. By default the
    network's maximum."""
    cache: bool = field(default=True, metadata=PYTHON_ONLY)
    """Cache the keys and values of finished blocks. Without a cache they are recomputed in every call, with the same
    result."""
    callback: Callback | None = field(default=None, metadata=PYTHON_ONLY)
    """Called with the step's number, the time reached and x, before the first step and after each."""
    device: Device | None = field(default=None, metadata=PYTHON_ONLY)
    """Device to sample on; by default that of the network's parameters."""

    def __post_init__(self) -> None:
        """Raise a ValueError for values that no sampler takes."""
        check_sharpening(self.temperature, self.top_p)
        for name in ("steps", "particles", "block_length", "batch"):
            check_at_least_one(name, getattr(self, name))
        if self.guidance is not None and not (isinstance(self.guidance, Real) and math.isfinite(self.guidance)):
            raise ValueError(f"guidance must be a finite number (got {self.guidance!r})")
        self._check_reward()
        if self.place_temperature is not None and not 0 <= self.place_temperature < math.inf:
            raise ValueError(f"place_temperature must be at least 0 and finite (got {self.place_temperature})")
        if self.threshold is not None and not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold must be in [0, 1] (got {self.threshold})")
        if not 0 < self.t_start <= 1:
            raise ValueError(f"t_start must be in (0, 1], where 1 is noise (got {self.t_start:g})")
        if self.seed is not None and self.seeds is not None:
            raise ValueError("give a seed, or seeds for each of the texts, not both")

    def _check_reward(self) -> None:
        if self.reward is not None and self.particles is None:
            raise ValueError("a reward steers particles; give their number, for example particles=16")
        if self.reward is not None and not callable(self.reward):
            raise ValueError(f"reward must be a function of texts (got {self.reward!r})")
        if not isinstance(self.strength, Real) or not math.isfinite(self.strength):
            raise ValueError(f"the strength of a reward must be a finite number (got {self.strength!r})")
        if self.strength != 1 and self.reward is None:
            raise ValueError("strength has no effect without a reward")

    def changed(self, settings: JSONMapping) -> SamplingOptions:
        """The options with those of the settings that are not None in their place; unknown names are refused."""
        if settings.get("sampler", self.sampler) is None:
            raise ValueError("sampler must be a name, a Sampler or a StepRule (got None)")
        return changed(self, settings, "the options of sampling")

    def with_defaults(self, length: int, own: JSONMapping, block: int | None = None) -> SamplingOptions:
        """The options with defaults where None stands: a model's own, or the usual ones for this length."""
        usual = {"steps": default_steps(length, block), "temperature": 1.0, "top_p": 1.0}
        for name, value in own.items():
            if name not in usual or not isinstance(value, int | float):
                known = ", ".join(usual)
                raise ValueError(f"the model's sampling defaults must be numbers for {known} (got {name}={value!r})")
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

    def record(self) -> JSONObject:
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
    place_temperature: float | None
    corrector: float | Corrector | None
    label: str | int | None
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
    """Default number of steps for `length` tokens: one per four tokens, from 64 to 256. For a block of `block` tokens,
    the same with the length of the block, and at most one step per token.

    Tokens drawn in the same step are independent of each other, but usually far apart: with `english` and its top-p,
    128 tokens in 64 steps were not measurably worse than in 128 (docs/results/samplers.md).
    """
    usual = min(max((block or length) // 4, 64), 256)
    return usual if block is None else min(block, usual)


def check_sharpening(temperature: float | None, top_p: float | None) -> None:
    """Refuse a temperature below 0 and a top-p outside of (0, 1]."""
    if temperature is not None and not (math.isfinite(temperature) and temperature >= 0):
        raise ValueError(f"temperature must be finite and at least 0 (got {temperature})")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be in (0, 1] (got {top_p})")
