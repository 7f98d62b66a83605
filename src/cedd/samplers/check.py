"""Checks that a step rule has the properties that it declares, for tests of your own rules.

Shapes: P probabilities, R rows, V vocabulary, n states.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from cedd.dynamics.rules import StepRule
from cedd.methods import Method, get_method
from cedd.parameterization import Affine, Leap, Parameterization, can_jump
from cedd.process import TokenProcess
from cedd.row_sums import log_probabilities

_PROBABILITIES = 201
_TOLERANCE = 1e-9


def check_rule(
    rule: StepRule, process: TokenProcess, *, method: str | Method = "cedd", steps: int = 8, seed: int = 0
) -> None:
    """Raise a ValueError if a rule is not a probability distribution, or lacks a property that it declares.

    At the steps of a time grid it checks that the law sums to one and equals that of its leap; `jump_first` at 201
    probabilities of the current token; and `only_reverses` where the process cannot have jumped. Violations between
    these points are not found.

    Args:
        rule: the rule.
        process: a process with a small vocabulary.
        method: what a network's outputs mean.
        steps: number of steps from t = 1 to 0.01 that are checked.
        seed: seed of the outputs for which laws are compared.
    """
    parameterization = get_method(method).parameterization
    times = [1.0 - 0.99 * k / steps for k in range(steps + 1)]
    generator = torch.Generator().manual_seed(seed)
    for t, s in itertools.pairwise(times):
        step = _Step(rule, process, t, s)
        step.check_law(parameterization, generator)
        if isinstance(parameterization, Affine):
            step.check_leap(parameterization)


class _Step:
    """A rule at one step from t to s."""

    def __init__(self, rule: StepRule, process: TokenProcess, t: float, s: float) -> None:
        self._rule, self._process = rule, process
        self._noise, self._earlier = process.noise(t), process.noise(s)
        self._where = f"the rule {rule.name!r}, from t = {t:g} to {s:g}"

    def check_law(self, parameterization: Parameterization, generator: torch.Generator) -> None:
        """Check that probabilities sum to one and agree between law and leap, and that fixed states stay."""
        size = self._process.num_states
        x = torch.arange(size).repeat(4)
        outputs = torch.randn(len(x), self._process.vocab_size, generator=generator, dtype=torch.float64)
        now, next_ = self._noise.like(x), self._earlier.like(x)
        law = self._rule.law(parameterization, outputs, x, now, next_)
        if bool((law < -_TOLERANCE).any()) or not _same(law.sum(-1), torch.ones(len(x), dtype=law.dtype)):
            raise ValueError(f"{self._where}: its law is not one: probabilities are negative or do not sum to 1")
        if isinstance(parameterization, Affine):
            log_probs = log_probabilities(outputs)
            leap = self._rule.leap(parameterization.score(log_probs, x, now), next_)
            if not _same(leap.law(log_probs.exp(), x, now), law):
                raise ValueError(f"{self._where}: its leap has another law than its law")
        staying = law.gather(-1, x[:, None]).squeeze(-1)
        if self._rule.only_reverses and bool((staying[~can_jump(x, now)] < 1 - _TOLERANCE).any()):
            raise ValueError(f"{self._where}: only_reverses is false: a token moves that the process cannot have moved")

    def check_leap(self, parameterization: Affine) -> None:
        """Check `jump_first`."""
        probs = torch.linspace(0.0, 1.0, _PROBABILITIES, dtype=torch.float64)

        def leap(state: int) -> Leap:
            x = torch.full(probs.shape, state)
            score = parameterization.coefficients(probs.log(), x, self._noise.like(x))
            return self._rule.leap(score, self._earlier.like(x))

        if not self._rule.jump_first:
            return
        token = leap(0)
        rises = token.stay.diff()
        if bool((rises > _TOLERANCE).any()) and bool((rises < -_TOLERANCE).any()):
            raise ValueError(f"{self._where}: jump_first is false: `stay` both rises and falls with f at the token")
        if not _same(token.remask, token.remask[:1].expand_as(token.remask)):
            raise ValueError(f"{self._where}: jump_first is false: `remask` depends on the network")
        if self._process.has_mask:
            mask = leap(self._process.vocab_size)
            if not _same(mask.stay, mask.stay[:1].expand_as(mask.stay)):
                raise ValueError(f"{self._where}: jump_first is false: whether a mask stays depends on the network")
            if not _same(mask.remask, torch.zeros_like(mask.remask)):
                raise ValueError(f"{self._where}: a mask cannot be masked again: `remask` must be 0 there")
            # The largest f_y is at least 1/V, so its slope or the floor leaves a token to jump to.
            becomes = torch.maximum(mask.floor, mask.floor + mask.slope / self._process.vocab_size)
            if bool(((mask.stay < 1 - _TOLERANCE) & (becomes <= 0)).any()):
                raise ValueError(
                    f"{self._where}: jump_first is false: a mask that is revealed may find no token to become, where "
                    "floor + slope f is negative for all of them, and stays"
                )


def _same(one: Tensor, other: Tensor) -> bool:
    return bool(((one - other).abs() <= _TOLERANCE).all())
