"""Particles: sequential Monte Carlo that corrects the tilted law to p(x | language), and steers by rewards.

Shapes: B texts, N particles of a text, L positions, V vocabulary; M masks, of which C are drawn.

The base law p(x) is that of the sampler which reveals masks in uniformly random order, in `steps` network calls (by
default one per mask, as first-hitting does): with x_k the state before call k, p_k the product law of its masks and S_k
the positions that are revealed, p(x) = E prod_k p_k(x_{S_k}) over the random S_k. The target is

    p(x) [x in the language] exp(strength r(x)) / Z.

Tokens are drawn from p_k given the language. With Z_k(x) the probability that p_k gives to the language, where the
tokens of x are known, that proposal has the weight p_k / q_k = Z_k(x_k) / Z_k(x_{k+1}). So a particle's weight gains

    log Z_k(x_k) - log Z_{k-1}(x_k)              before call k     (Z_{-1} = 1, and 1 after the last call)
    phi_k - phi_{k-1}                            with a reward: phi_k = log of the mean of exp(strength r(y)) over
                                                 `guesses` texts y, in which all masks of x_k are drawn at once, and
                                                 strength r(x) in the end: the sum telescopes, whatever y are

In block diffusion, p(x) is the product of this law over blocks, with calls for each block. The particles are those of
whole texts: the weights go on from block to block, and resampling replaces the text before the block too. Z_k(x) is the
probability that the text up to the end of the block can be continued to one in the language; the texts y end with the
block, and r(x) is that of the whole text in the end.

Where the effective sample size falls below half of N, or a weight is 0, particles are resampled (systematic
resampling) in proportion to their weights, which are then equal. The mean weight estimates Z without bias; without a
reward it is p(language). The sampler returns one particle per text, drawn by the weights: its law approaches the target
as N grows, and with N = 1 and no reward it is the tilted law.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from cedd.methods import Method
from cedd.network import Places, flat_places, put_at
from cedd.process import TokenProcess
from cedd.samplers.constraints import Constraint, Fixed
from cedd.samplers.first_hitting import RevealSampler
from cedd.samplers.languages import BlockLanguages, LanguageConstraint, impossible
from cedd.samplers.options import Reward
from cedd.samplers.particle_set import ParticleSet
from cedd.samplers.random_numbers import RandomNumbers, Use, text_seeds
from cedd.samplers.sampler import Sampler, SamplingRun, sample_at_once

LEAST_ESS = 0.5
"""Share of the particles below which the effective sample size leads to resampling."""


@dataclass(frozen=True)
class Particles(RevealSampler):
    """The sampler of the module's head.

    Args:
        count: N.
        reward: r, of texts as tokens; in block diffusion, of their beginnings too.
        strength: what the reward is multiplied by.
        guesses: number of texts that each particle is completed to in each step, to rate it by their rewards.
        steps: network calls; by default one per mask.
        report: called with the particles of each text, in order.
    """

    count: int
    reward: Reward | None = None
    strength: float = 1.0
    guesses: int = 4
    steps: int | None = None
    report: Callable[[ParticleSet], None] | None = None
    name: str = field(default="particles", init=False)
    unused: ClassVar[tuple[str, ...]] = ("grid", "corrector", "steps")

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"the number of particles must be at least 1 (got {self.count})")
        if self.guesses < 1:
            raise ValueError(f"the number of guesses must be at least 1 (got {self.guesses})")
        if not math.isfinite(self.strength):
            raise ValueError(f"the strength of a reward must be a finite number (got {self.strength})")

    def check(self, method: Method, process: TokenProcess, constraint: Constraint | None = None) -> None:
        if process.can_shuffle or not process.has_mask:
            raise ValueError("particles need a model that only masks (process absorb); this one also replaces tokens")
        super().check(method, process, constraint)
        if constraint is not None and not isinstance(constraint, LanguageConstraint) and type(constraint) is not Fixed:
            raise ValueError(f"particles take languages and fixed tokens (got a {type(constraint).__name__})")

    def sample(self, run: SamplingRun) -> Tensor:
        return self.texts(run, sample_at_once)

    def texts(self, run: SamplingRun, write: Callable[[Sampler, SamplingRun], Tensor]) -> Tensor:
        if run.sharpening.temperature == 0 or run.sharpening.top_p < 1:
            raise ValueError(
                "particles weight texts by their probabilities; they need a temperature above 0 and top_p 1"
            )
        return torch.cat([self._draw(run.of_sequences(i, i + 1), write) for i in range(len(run.seeds))])

    def _draw(self, run: SamplingRun, write: Callable[[Sampler, SamplingRun], Tensor]) -> Tensor:
        """One text [1, L]. The callback is shown the first particle, and in the end the chosen one."""
        filter_, shown, each = _Filter(self, run), itertools.count(), _repeated(run, self.count)

        def show(step: int, t: float, x: Tensor) -> None:
            del step
            run.show(next(shown), t, x[:1])

        if run.callback is not None:
            each = replace(each, options=replace(each.options, callback=show))
        found = filter_.result(write(filter_, each))
        if self.report is not None:
            self.report(found)
        text = found.tokens[found.chosen][None].to(run.device)
        run.show(next(shown), 0.0, text)
        return text


def _repeated(run: SamplingRun, count: int) -> SamplingRun:
    """A run of one sequence as a run of `count` copies with separate random numbers."""
    constraint, start = run.constraint, run.options.x_start
    if isinstance(constraint, Fixed) and constraint.where.dim() == 2:
        only = constraint.only and replace(constraint.only, where=constraint.only.where[0])
        constraint = replace(constraint, tokens=constraint.tokens[0], where=constraint.where[0], only=only)
    return replace(
        run,
        network=run.network.of_sequences(torch.zeros(count, dtype=torch.int64)),
        seeds=text_seeds(run.seeds[0], count),
        constraint=constraint,
        options=run.options if start is None else replace(run.options, x_start=start.expand(count, -1)),
    )


class _Filter(RevealSampler):
    """Draws the particles of one text, at once or in parts, and keeps their weights."""

    name = "particles"
    draws_together = True

    def __init__(self, sampler: Particles, run: SamplingRun) -> None:
        self._sampler, self._random, self._device = sampler, RandomNumbers(run.seeds, 1), run.device
        zeros = torch.zeros(sampler.count, dtype=torch.float64, device=run.device)
        self._log_weights, self._old_promise = zeros, zeros
        self._log_normalizer, self._sizes, self._calls = 0.0, list[float](), 0

    def sample(self, run: SamplingRun) -> Tensor:
        """The particles [N, L] of a run, from masks to the end."""
        self._run, self._x, self._mask = run, run.start(run.masks), run.process.vocab_size
        self._log_old = torch.zeros_like(self._log_weights)
        masks = int((self._x == self._mask).sum(1).max())
        self._steps = min(masks, self._sampler.steps or masks)
        run.show(0, 1.0, self._x)
        for k in range(self._steps):
            rows = flat_places(self._x == self._mask)
            if not len(rows):
                break  # all have been replaced by texts that have ended
            outputs = self._outputs(rows)
            self._log_weights = self._log_weights + self._log_chances(rows, outputs) - self._log_old
            size = math.inf
            if bool(torch.isneginf(self._log_weights).any()):
                size = self._effective_size()
                rows, outputs = self._resampled(self._steps + k, outputs)  # nothing can be drawn for these particles
            if len(rows):
                self._foresee(k, rows, outputs)
            self._sizes.append(min(size, self._effective_size()))
            if self._sampler.count > 1 and self._sizes[-1] < LEAST_ESS * self._sampler.count:
                rows, outputs = self._resampled(k, outputs)
            if len(rows):
                self._reveal(k, rows, outputs)
            self._run.show(k + 1, float((self._x == self._mask).double().mean()), self._x)
        self._calls += 2 * self._steps
        return self._x

    def _outputs(self, rows: Tensor) -> Tensor:
        """The network's at all masks, [M, V]."""
        run = self._run
        least, most = float(-torch.expm1(-run.process.alpha_just_after_zero)), float(run.process.kernel(1.0).a)
        share = (self._x == self._mask).double().mean(1).clamp(least, most)
        found = run.network.rows(self._x, -torch.log1p(-share), Places(rows), full_precision=True)
        return found.map(lambda outputs, _: outputs)

    def _log_chances(self, rows: Tensor, outputs: Tensor) -> Tensor:
        """log Z of the languages given what is known, [N]."""
        languages = self._run.constraint
        if not isinstance(languages, LanguageConstraint | BlockLanguages):
            return torch.zeros_like(self._log_weights)
        return languages.log_normalizers(self._x, rows, outputs, self._run.sharpening)

    def _foresee(self, k: int, rows: Tensor, outputs: Tensor) -> None:
        if self._sampler.reward is None:
            return
        texts: list[Tensor] = []
        for guess in range(self._sampler.guesses):
            v = self._run.uniform(Use.GUESS, k * self._sampler.guesses + guess).flatten()[rows]
            tokens = self._run.draw_tokens(self._x, rows, outputs, slice(None), v)
            texts.append(put_at(self._x, rows, tokens))
        part = self._run.part
        self._promise(torch.cat(texts) if part is None else part.texts(torch.cat(texts)))

    def _promise(self, texts: Tensor) -> None:
        """The weights' gain by texts [G * N, n] that the particles may become, or begin with."""
        if self._sampler.reward is None:
            return
        rewards = self._sampler.reward(texts)
        wanted = f"the reward must return one number for each of the {len(texts)} texts"
        try:
            found = torch.as_tensor(rewards, dtype=torch.float64, device=self._device)
        except (TypeError, ValueError, RuntimeError):
            raise ValueError(f"{wanted} (got {rewards!r:.60})") from None
        if found.shape != (len(texts),):
            raise ValueError(f"{wanted} (got the shape {tuple(found.shape)})")
        if bad := int((~torch.isfinite(found)).sum()):
            raise ValueError(f"the reward returned nan or infinity for {bad} of {len(texts)} texts; it must be finite")
        tilts = (self._sampler.strength * found).view(-1, self._sampler.count)
        if not bool(torch.isfinite(tilts).all()):
            raise ValueError(f"strength {self._sampler.strength:g} times the reward is infinite; reduce the strength")
        promise = tilts.logsumexp(0) - math.log(len(tilts))
        self._log_weights = self._log_weights + promise - self._old_promise
        self._old_promise = promise

    def _normalised(self) -> Tensor:
        """The weights as shares, [N]."""
        if not bool(torch.isfinite(self._log_weights).any()):
            spans = getattr(self._run.constraint, "spans", ())  # without a language, no weight is 0
            raise impossible(" and ".join(span.name for span in spans))
        return torch.softmax(self._log_weights, 0)

    def _effective_size(self) -> float:
        return float(1 / self._normalised().square().sum())

    def _resampled(self, number: int, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Replace the particles by equally weighted ones: all masks of these, and the outputs there."""
        count, u = self._sampler.count, float(self._random.uniform(Use.RESAMPLE, self._calls + number)[0, 0])
        ancestors = systematic(self._normalised(), u)
        self._log_normalizer += float(self._log_weights.logsumexp(0)) - math.log(count)
        self._log_weights = torch.zeros_like(self._log_weights)
        masks = self._x == self._mask
        place = masks.flatten().cumsum(0).view(masks.shape) - 1
        kept = place[ancestors][masks[ancestors]]
        self._x, self._old_promise = self._x[ancestors], self._old_promise[ancestors]
        if self._run.part is not None:
            self._run = self._run.part.of_ancestors(ancestors)
        return flat_places(self._x == self._mask), outputs[kept]

    def _reveal(self, k: int, rows: Tensor, outputs: Tensor) -> None:
        run, masks = self._run, self._x == self._mask
        quota = -(-masks.sum(1, keepdim=True) // (self._steps - k))
        order = run.uniform(Use.PLACE, k).masked_fill(~masks, 2.0)
        turn = masks & (order.argsort(1).argsort(1) < quota)
        chosen = flat_places(turn.flatten()[rows])
        v = run.uniform(Use.TARGET, k).flatten()[rows[chosen]]
        tokens = run.draw_tokens(self._x, rows, outputs, chosen, v)
        self._x = put_at(self._x, rows[chosen], tokens)
        left = flat_places(~turn.flatten()[rows])
        self._log_old = self._log_chances(rows[left], outputs[left])

    def result(self, x: Tensor) -> ParticleSet:
        """The weighted texts, [N, L]."""
        self._promise(x)
        shares = self._normalised()
        self._sizes.append(self._effective_size())
        u = float(self._random.uniform(Use.CHOOSE)[0, 0])
        chosen = min(int(torch.searchsorted(shares.cumsum(0), u * float(shares.sum()), right=True)), len(shares) - 1)
        total = self._log_normalizer + float(self._log_weights.logsumexp(0)) - math.log(len(shares))
        return ParticleSet(x.cpu(), torch.log(shares).cpu(), total, tuple(self._sizes), chosen)


def systematic(shares: Tensor, u: float) -> Tensor:
    """N ancestors [N] by one uniform number: particle j is one floor(N share_j) or ceil(N share_j) times, and N share_j
    times on average."""
    count = len(shares)
    goals = (torch.arange(count, dtype=torch.float64, device=shares.device) + u) / count
    edges = shares.cumsum(0)
    return torch.searchsorted(edges / edges[-1], goals, right=True).clamp_max(count - 1)
