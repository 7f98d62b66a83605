"""Samplers that step through a time grid, each step drawn from the law of a `StepRule`.

Shapes: B batch, L positions, V vocabulary, K steps; R candidate rows.

    x ~ prior, constrained
    for each step from t to s:    x <- a draw from the rule's law of x_s given x_t;    x <- constraint(x)

Jump-first path: if the network outputs probabilities and the rule declares `jump_first`, the positions that may jump
are decided before any row of outputs is computed, so the head runs on a few rows only (see `plan`). Dense path:
networks that output ratios, and other rules, need all rows to decide whether anything jumps; they are computed in
chunks. Both paths draw from the same law.

In the jump-first path, sequences do not wait for each other: one network call processes the next event of each. With a
callback, or a constraint that may change x after every step, all sequences take every step together.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import groupby
from typing import ClassVar

import torch
from torch import Tensor

from cedd.dynamics import StepRule
from cedd.dynamics.reverse import Reversal
from cedd.dynamics.rules import believing
from cedd.methods import Method
from cedd.network import Places, flat_places, put_at
from cedd.parameterization import Affine, can_jump, shifted_outputs, step_law
from cedd.process import Noise, TokenProcess
from cedd.samplers.choice import Sharpening, inverse_cdf, is_surely_mask, jump_weights, leap_of, may_move
from cedd.samplers.constraints import Constraint, Fixed
from cedd.samplers.feature_cache import with_cached_features
from cedd.samplers.plan import BLOCK_STEPS, MOST_FOLLOWED, Candidates, Chances, Plan, blocks, chances, check_leaps
from cedd.samplers.random_numbers import Use
from cedd.samplers.sampler import RevealCall, Sampler, SamplingRun

FEW_OUTPUTS = 1 << 16
"""Number of ratios [R, V] below which all positions are drawn from their full distributions."""
_SUMMED_BY = 1e-4
"""Upper bound on the relative error of a sum of ratios in float32."""

States = tuple[int, bool]
"""V, and whether the process has a mask."""

PlainStep = Callable[[Tensor, int], Tensor]
"""(x [B, L], number of the step) -> x, a step of the rule."""
GridStep = Callable[[Tensor, int, Noise, Noise], Tensor]
"""(x [B, L], number of the step, noise at t, noise at s) -> x at s."""


def _ends(states: States, levels: Tensor) -> tuple[Noise, Noise]:
    """The noise of a step's two ends, from levels [*S, 2, F] (see `Kernel.stacked`)."""
    noise, earlier = levels.unbind(-2)
    return Noise.of_stacked(*states, noise), Noise.of_stacked(*states, earlier)


class GridSampler(Sampler):
    """A sampler over a time grid. Each step is drawn from a rule's law, or computed by `own_step`."""

    unused: ClassVar[tuple[str, ...]] = ("corrector",)
    has_own_step: ClassVar[bool] = False
    """Whether `own_step` replaces the rule, except in the step to t = 0."""

    @abstractmethod
    def rule(self, method: Method) -> StepRule:
        """The step rule for a method."""

    def own_step(self, run: GridRun, x: Tensor, plain: PlainStep) -> GridStep:
        """The step function for a run that starts at x [B, L]."""
        raise NotImplementedError

    def check(self, method: Method, process: TokenProcess, constraint: Constraint | None = None) -> None:
        super().check(method, process, constraint)
        rule = self.rule(method)
        rule.check(process)
        rule.check_method(method.parameterization)

    def sample(self, run: SamplingRun) -> Tensor:
        parts = {one.name: getattr(run, one.name) for one in fields(SamplingRun)}
        last_rule = run.dynamics.last_rule(run.parameterization, run.process)
        grid_run = GridRun(
            **parts,
            sampler=self,
            rule=self.rule(run.method),
            last_rule=last_rule,
            grid=run.once((self, "grid"), run.times),
        )
        dense = grid_run.is_dense
        if run.network.conditions is None and (dense or not run.dynamics.only_reveals(run.process)):
            # Unlike samplers that reveal a token per call, the network also runs on unchanged sequences.
            grid_run = replace(grid_run, network=replace(run.network, model=with_cached_features(run.network.model)))
        return denoise(grid_run, run.start())


@dataclass(frozen=True)
class RuleSampler(GridSampler):
    """The sampler of one step rule."""

    own_rule: StepRule
    draws_jointly: ClassVar[bool] = True

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.own_rule.name

    def rule(self, method: Method) -> StepRule:
        return self.own_rule

    def tokens_are_final(self, method: Method, process: TokenProcess) -> bool:
        return self.own_rule.only_reverses and method.dynamics.only_reveals(process)


@dataclass(frozen=True)
class DynamicsRule(GridSampler):
    """The rule of this name in the dynamics of a method."""

    name: str
    unused: ClassVar[tuple[str, ...]] = ()
    draws_jointly: ClassVar[bool] = True

    def rule(self, method: Method) -> StepRule:
        rules = method.dynamics.rules()
        if self.name not in rules:
            raise ValueError(
                f"{self.name} runs a process backwards, which {method.name} does not; use sampler='analytic'"
            )
        return rules[self.name]

    def tokens_are_final(self, method: Method, process: TokenProcess) -> bool:
        return self.rule(method).only_reverses and method.dynamics.only_reveals(process)


class BackwardSampler(GridSampler):
    """Base class of samplers that define `own_step` for networks that output probabilities."""

    has_own_step: ClassVar[bool] = True

    def rule(self, method: Method) -> StepRule:
        return method.dynamics.rules()["analytic"]

    def check(self, method: Method, process: TokenProcess, constraint: Constraint | None = None) -> None:
        super().check(method, process, constraint)
        believing(self.name, method.parameterization)
        if not isinstance(method.dynamics, Reversal):
            raise ValueError(
                f"{self.name} runs a process backwards, which {method.name} does not; use sampler='analytic'"
            )


@dataclass(frozen=True, kw_only=True)
class GridRun(SamplingRun):
    """A run over a time grid."""

    sampler: GridSampler
    rule: StepRule
    last_rule: StepRule
    """The rule of the step to t = 0, which draws clean tokens."""
    grid: Tensor
    """The times [K + 1]."""

    def rule_of(self, k: int) -> StepRule:
        return self.last_rule if float(self.grid[k + 1]) == 0 else self.rule

    @property
    def affine(self) -> Affine:
        """The parameterization, which must be affine in probabilities."""
        return believing(self.sampler.name, self.parameterization)

    @property
    def has_known_chances(self) -> bool:
        """Whether the rules determine the positions that may jump without the network."""
        return isinstance(self.parameterization, Affine) and self.rule.jump_first and self.last_rule.jump_first

    @property
    def is_dense(self) -> bool:
        """Whether the dense path is used."""
        return self.sampler.has_own_step or not self.has_known_chances

    def chances(self, noise: Noise, earlier: Noise) -> Chances:
        """The probabilities in the steps from noise [K] to earlier [K]."""
        steps = chances(self.rule, self.affine, noise, earlier)
        if self.last_rule is self.rule:
            return steps
        return steps.where(earlier.t > 0, chances(self.last_rule, self.affine, noise, earlier))

    def stretches(self) -> Iterator[tuple[StepRule, int, int]]:
        """The consecutive ranges of steps with one rule: (rule, first step, the step after the last)."""
        for rule, steps in groupby(range(len(self.grid) - 1), self.rule_of):
            first, *others = steps
            yield rule, first, first + 1 + len(others)

    @property
    def has_opaque_constraint(self) -> bool:
        """Whether an arbitrary constraint may change x after every step."""
        return not (self.constraint is None or isinstance(self.constraint, Fixed))

    @property
    def is_watched(self) -> bool:
        """Whether x is read between the steps."""
        return self.callback is not None or self.has_opaque_constraint

    def jump(self, rule: StepRule) -> Jump:
        return Jump(rule, self.affine, self.sharpening, self.states)

    @property
    def states(self) -> States:
        return self.process.vocab_size, self.process.has_mask

    @cached_property
    def free(self) -> Tensor:
        """Which positions may change, [B, L] bool on the device."""
        return ~self.held.to(self.device)

    def evaluate(
        self, x: Tensor, where: Tensor, noise: Noise, function: Callable[[Tensor, Tensor, Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The flat rows [R] of `where` [B, L], and function(outputs [R, V] float64, x [R], rows [R]) there."""
        rows = flat_places(where)
        if not len(rows):
            return rows, rows
        flat = x.flatten()
        outputs = self.network.rows(x, noise.sigma.to(torch.float32), Places(rows), full_precision=True)
        return rows, outputs.map(lambda part, at: function(part.double(), flat[rows[at]], rows[at]))


def denoise(run: GridRun, x: Tensor) -> Tensor:
    """x [B, L] from the first time of the grid to the last."""
    levels, sigma, known = run.once((run.sampler, "levels"), lambda: _levels(run))
    run.show(0, float(run.grid[0]), x)
    plan = None if run.is_dense or known is None else _plan(run, x, known)
    if run.joint is not None and not (run.sampler.has_own_step or (plan is not None and plan.only_reveals)):
        raise ValueError(_cannot_constrain(run))
    if plan is None or run.is_watched:
        return _in_step(run, x, plan, levels, sigma, known)
    planned = ((rule, each) for rule, first, last in run.stretches() for each in plan.calls(first, last, x.device))
    if plan.never_remasks:
        calls = (RevealCall(sigma.index_select(0, one.steps), one.places, one.v) for _, one in planned)
        x = run.revealed_in_turn(x, (call for call in calls if len(call.places)))
    else:
        for rule, candidates in planned:
            x = _jump_step(run, rule, x, candidates, levels, sigma)
    return _possible(run, x)


def _cannot_constrain(run: GridRun) -> str:
    """The error for a step that cannot draw its tokens jointly."""
    what = "a constraint on the text (a regular expression, choices, a JSON schema)"
    if run.process.can_shuffle:
        return f"{what} needs a model that only masks (process absorb); this one also replaces tokens"
    if not isinstance(run.parameterization, Affine):
        return f"{what} needs a model that predicts probabilities, such as cedd; this one gives ratios"
    return f"the sampler {run.sampler.name} cannot write texts under {what}; use sampler='first-hitting'"


def _levels(run: GridRun) -> tuple[Tensor, Tensor, Chances | None]:
    """The levels of all steps [K, 2, F], sigma [K], and the probabilities in them where they are known beforehand."""
    noise, earlier = run.process.noise(run.grid[:-1]), run.process.noise(run.grid[1:])
    levels = torch.stack([noise.stacked(), earlier.stacked()], 1).to(run.device)
    sigma = noise.sigma.to(device=run.device, dtype=torch.float32)
    if isinstance(run.parameterization, Affine):
        check_leaps(run.rule, run.parameterization, noise, earlier)
    return levels, sigma, run.chances(noise, earlier) if run.has_known_chances else None


def _in_step(
    run: GridRun, x: Tensor, plan: Plan | None, levels: Tensor, sigma: Tensor, known: Chances | None
) -> Tensor:
    """Run all sequences step by step together."""
    # The probability that a mask stays in each step; 0 if it depends on the network.
    stay = torch.zeros_like(levels[:, 0, 0]) if known is None else (1 - known.reveal).to(levels.device)

    def plain(x: Tensor, k: int) -> Tensor:
        if run.joint is not None:  # the step to t = 0
            rows = flat_places(x == run.process.vocab_size)
            v = run.uniform(Use.TARGET, k).flatten()[rows]
            return put_at(x, rows, run.reveal(x, sigma[k], Places(rows), v)) if len(rows) else x
        return _dense_step(run, k, x, levels[k], sigma[k], stay[k])

    own_step = run.sampler.own_step(run, x, plain) if run.sampler.has_own_step else None
    for start, stop in blocks(len(run.grid) - 1, 1 if run.has_opaque_constraint else BLOCK_STEPS):
        planned = list(plan.block(start, stop, x.device)) if plan is not None else [None] * (stop - start)
        for k, candidates in zip(range(start, stop), planned, strict=True):
            if own_step is not None and float(run.grid[k + 1]) > 0:
                x = own_step(x, k, *_ends(run.states, levels[k]))
            elif candidates is None:
                x = plain(x, k)
            else:
                x = _jump_step(run, run.rule_of(k), x, candidates, levels, sigma)
            x = run.constrained(x)
            if k + 2 == len(run.grid):
                x = _possible(run, x)
            if plan is not None and run.has_opaque_constraint:
                plan.observe(x == run.process.vocab_size)
            run.show(k + 1, float(run.grid[k + 1]), x)
    return x


def _possible(run: GridRun, x: Tensor) -> Tensor:
    """Data x [B, L], with tokens that are not allowed at their positions drawn again.

    The network's probabilities exclude them, but ratios rescaled near t = 0 may leave noise tokens.
    """
    only, parameterization = run.network.only, run.parameterization
    if only is None or not run.process.can_shuffle or float(run.grid[-1]) > 0:
        return x
    rows = flat_places(only.where & ~only.tokens[x])
    if not len(rows) or not isinstance(parameterization, Affine):  # for other networks the noise never contains them
        return x
    noise, here = run.process.noise(run.grid[-2]), x.flatten()[rows]
    v = run.uniform(Use.REDRAW, -1).flatten()[rows]

    def drawn(outputs: Tensor, part: slice) -> Tensor:
        now = noise.like(here[part])
        return run.sharpening.draw(parameterization.posterior_logits(outputs.double(), here[part], now), v[part])

    outputs = run.network.rows(x, noise.sigma.to(x.device, torch.float32), Places(rows), full_precision=True)
    return put_at(x, rows, outputs.map(drawn))


def _plan(run: GridRun, x: Tensor, known: Chances) -> Plan:
    masked, follows = x == run.process.vocab_size, run.joint is not None and x.numel() <= MOST_FOLLOWED
    return Plan(known, masked, run.held, run.random, run.network.has_head, follows=follows)


# ----------------------------------------------------------------------------------------------------------------
# One step, jump-first


def _jump_step(
    run: GridRun, rule: StepRule, x: Tensor, candidates: Candidates, levels: Tensor, sigma: Tensor
) -> Tensor:
    """One call of the network; levels [K, 2, F] and sigma [K] are those of all steps."""
    if len(candidates.places):
        rows, u, v = candidates.places.rows, candidates.u, candidates.v
        own_sigma = sigma.index_select(0, candidates.steps)
        if candidates.only_reveals:
            x = run.revealed(x, own_sigma, candidates.places, v)
        else:
            outputs = run.network.rows(x, own_sigma, candidates.places, full_precision=True)
            own_levels = levels.index_select(0, candidates.of_rows)
            x = put_at(x, rows, outputs.apply(run.jump(rule), (x.flatten().index_select(0, rows), u, v, own_levels)))
    if len(candidates.masked_again):
        x = x.flatten().index_fill(0, candidates.masked_again, run.process.vocab_size).view(x.shape)
    return x


@dataclass(frozen=True)
class Jump:
    """Candidates x [R] with outputs [R, V]: each jumps if u < 1 - stay, to the token that v selects.

    levels: the noise of the two ends of each one's step, [R, 2, F] (see `Kernel.stacked`).
    """

    rule: StepRule
    parameterization: Affine
    sharpening: Sharpening
    states: States

    @property
    def of_tensors(self) -> bool:
        return self.rule.of_tensors and not self.sharpening.active

    def __call__(self, outputs: Tensor, x: Tensor, u: Tensor, v: Tensor, levels: Tensor) -> Tensor:
        now, next_ = _ends(self.states, levels)
        leap, probs = leap_of(self.rule, self.parameterization, self.sharpening, outputs.double(), x, now, next_)
        weights = jump_weights(leap, probs, x, now, self.sharpening)
        # Masks among the candidates are always revealed; a token jumps if u is below its exact probability.
        moves = now.is_mask(x) | (u < 1 - leap.stay)
        return torch.where(moves & (weights.sum(-1) > 0), inverse_cdf(weights, v), x)


# ----------------------------------------------------------------------------------------------------------------
# One step, dense


def _dense_step(run: GridRun, k: int, x: Tensor, levels: Tensor, sigma: Tensor, stay: Tensor) -> Tensor:
    """Draw every position that can change from its full distribution over the n states.

    stay: a lower bound on the probability that a mask stays; masks that stay by this bound are not computed.
    """
    flat, rule = x.flatten(), run.rule_of(k)
    noise, earlier = _ends(run.states, levels)
    numbers = run.uniform(Use.TARGET, k)
    moves = run.free & ~(noise.is_mask(x) & is_surely_mask(numbers, stay))
    if rule.only_reverses:
        moves = moves & can_jump(x, noise.like(x))
    rows = flat_places(moves)
    if not len(rows):
        return x
    v = numbers.flatten()[rows]

    is_last = float(run.grid[k + 1]) == 0  # t = 0, where no mask may remain

    def drawn(outputs: Tensor, part: slice) -> Tensor:
        here, u = flat[rows[part]], v[part]
        moving = None if is_last else _moving(rule, run, outputs, here, noise, earlier, u)
        if moving is None or 2 * len(moving) > len(here):
            return _draw_dense(rule, run, outputs.double(), here, noise, earlier, u)
        if not len(moving):
            return here
        few = _draw_dense(rule, run, outputs[moving].double(), here[moving], noise, earlier, u[moving])
        return here.index_copy(0, moving, few)

    outputs = run.network.rows(x, sigma, Places(rows), full_precision=True)
    return put_at(x, rows, outputs.map(drawn))


def _moving(
    rule: StepRule, run: GridRun, outputs: Tensor, x: Tensor, noise: Noise, earlier: Noise, v: Tensor
) -> Tensor | None:
    """The positions x [R] with ratios [R, V] that may change for numbers v, found without their distributions; None if
    unknown.

    All distributions are computed if a current token is excluded, and for few outputs, where it is as fast.
    """
    meaning = shifted_outputs(run.parameterization)
    if rule.stay is None or meaning is None or run.sharpening.excluded:
        return None
    if outputs.numel() < FEW_OUTPUTS:
        return None
    now, next_ = noise.like(x), earlier.like(x)
    # The margin on the sum of ratios ensures that rounding does not hide a position that changes.
    stay = rule.stay(meaning.others(outputs, x, now) * (1 + _SUMMED_BY), x, now, next_)
    return flat_places(may_move(v, stay, now.is_mask(x)))


def _draw_dense(
    rule: StepRule, run: GridRun, outputs: Tensor, x: Tensor, noise: Noise, earlier: Noise, v: Tensor
) -> Tensor:
    parameterization, now, next_ = run.parameterization, noise.like(x), earlier.like(x)
    believes = isinstance(parameterization, Affine)
    if believes:
        leap, probs = leap_of(rule, parameterization, run.sharpening, outputs, x, now, next_)
        law = step_law(leap.stay, leap.remask, jump_weights(leap, probs, x, now, run.sharpening), x, now)
    else:
        law = rule.law(parameterization, run.sharpening.ratios(outputs, now.is_mask(x)), x, now, next_)
    if rule is run.last_rule and noise.has_mask:
        law[:, -1] = torch.where(earlier.t == 0, 0.0, law[:, -1])  # clean data have no masks
    if not believes:
        law = run.sharpening.jumps(law, x)
    return torch.where(law.sum(-1) > 0, inverse_cdf(law, v), x)
