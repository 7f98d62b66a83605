"""Step rules: the law of one step back from t to s, as data. The loop is written once for all rules.

Shapes: [*S] any common shape of positions, V vocabulary, n states.

A rule has two forms. For a network that gives probabilities f (Denoiser, Bayes), a `Leap`: four numbers per position.
Only `stay` needs the network, and of its outputs only f at the current token:

    p(stays) = stay,    p(is masked again) = remask,    p(becomes y != x) proportional to max(floor + slope f_y, 0).

For a network that gives ratios (Score), the whole law over the n states; and, if the rule provides it, the probability
that a position stays as a function of the sum of its ratios, so that the law is computed only where a jump is possible.

A rule is always drawn from its law. If it declares `jump_first`, the loop decides which positions may jump before it
calls the network; otherwise it evaluates every position.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from cedd.parameterization import Affine, AffineScore, Leap, Parameterization
from cedd.process import Noise, TokenProcess
from cedd.row_sums import log_probabilities

AffineLaw = Callable[[AffineScore, Noise], Leap]
DenseLaw = Callable[[Parameterization, Tensor, Tensor, Noise, Noise], Tensor]
StayBySum = Callable[[Tensor, Tensor, Noise, Noise], Tensor]


def believing(sampler: str, parameterization: Parameterization) -> Affine:
    """The parameterization by probabilities that a sampler needs; raises a ValueError for others."""
    if not isinstance(parameterization, Affine):
        raise ValueError(
            f"the sampler {sampler!r} needs probabilities, and this method's network gives ratios; "
            "use cedd or bayes, or sampler='analytic'"
        )
    return parameterization


def _any_process(process: TokenProcess) -> None:
    """Accept any process."""
    del process


@dataclass(frozen=True)
class StepRule:
    """The law of a step, in two forms.

    Args:
        name: the name in the table and in error messages.
        leap: the law for networks that output probabilities, from the noise at both ends and f at the current token.
        law: the law for any outputs, over the n states; `from_leap` derives it from the leap.
        jump_first: a declaration: at a token, `stay` of the leap is monotone in f_x, and `remask` does not depend on
            it; at a mask, neither depends on the network, and for any f a mask that does not stay can become some token
            (`floor` is not too negative). The head then runs only at positions that may jump.
            `cedd.samplers.check_rule` verifies the declaration.
        only_reverses: a declaration: only positions that the process may have changed can move: masks, and tokens if it
            shuffles.
        check: raises a ValueError for unsupported processes.
        of_tensors: a declaration: the leap consists of tensor operations and never reads values on the host, so that a
            GPU can record it.
        needs_probabilities: a declaration: there is no law for networks that output ratios.
        stay: (sum of s_y over y != x_t, x_t, noise, earlier) -> the probability of staying that `law` has for ratios s,
            or a lower bound on it, decreasing in the sum. A value that is too large keeps positions from moving; this
            is not checked.
    """

    name: str
    leap: AffineLaw
    law: DenseLaw
    jump_first: bool = False
    only_reverses: bool = False
    check: Callable[[TokenProcess], None] = _any_process
    of_tensors: bool = False
    needs_probabilities: bool = False
    stay: StayBySum | None = None

    def check_method(self, parameterization: Parameterization) -> None:
        """Raise a ValueError for networks that output ratios, if there is only a leap."""
        if self.needs_probabilities:
            believing(self.name, parameterization)

    @staticmethod
    def from_leap(
        name: str, leap: AffineLaw, jump_first: bool = False, check: Callable[[TokenProcess], None] = _any_process
    ) -> StepRule:
        """A rule for networks that output probabilities, from its leap alone."""

        def law(
            parameterization: Parameterization, outputs: Tensor, x_t: Tensor, noise: Noise, earlier: Noise
        ) -> Tensor:
            log_probs = log_probabilities(outputs)
            score = believing(name, parameterization).score(log_probs, x_t, noise)
            return leap(score, earlier).law(log_probs.exp(), x_t, noise)

        return StepRule(name, leap, law, jump_first, check=check, needs_probabilities=True)
