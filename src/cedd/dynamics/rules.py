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
    """The parameterization by probabilities that a sampler needs; others are refused."""
    if not isinstance(parameterization, Affine):
        raise ValueError(
            f"the sampler {sampler!r} needs probabilities, and this method's network gives ratios; "
            "use cedd or bayes, or sampler='analytic'"
        )
    return parameterization


def _any_process(process: TokenProcess) -> None:
    """Nothing to object to."""
    del process


@dataclass(frozen=True)
class StepRule:
    """The law of a step, said twice.

    Args:
        name: what the table and error messages call it.
        leap: the law for networks that give probabilities, from what is known of the step and f at the token that is
            there.
        law: the law for any outputs, over the n states; `from_leap` makes it of the leap.
        jump_first: a declaration: at a token, `stay` of the leap rises or falls with f_x, never both, and `remask` does
            not depend on it; at a mask, neither depends on the network, and a mask that does not stay has a token to
            become whatever f is (no `floor` so negative that none is left). Then the vocabulary is only asked where
            something happens. `cedd.samplers.check_rule` finds out whether it is true.
        only_reverses: a declaration: nothing moves but what the process has moved, masks, and tokens if it shuffles.
        check: raises a ValueError for processes on which it makes no sense.
        of_tensors: a declaration: the leap is made of operations on tensors alone and never looks at their values, so
            that a GPU can record it.
        needs_probabilities: a declaration: there is no law for networks that give ratios.
        stay: (sum of s_y over y != x_t, x_t, noise, earlier) -> the probability of staying that `law` has for ratios s,
            or less; the larger the sum, the less. Too much would keep positions from moving, and nothing checks it.
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
        """Refuse networks that give ratios where only the leap is known."""
        if self.needs_probabilities:
            believing(self.name, parameterization)

    @staticmethod
    def from_leap(
        name: str, leap: AffineLaw, jump_first: bool = False, check: Callable[[TokenProcess], None] = _any_process
    ) -> StepRule:
        """A rule for networks that give probabilities only, which is all that a leap needs."""

        def law(
            parameterization: Parameterization, outputs: Tensor, x_t: Tensor, noise: Noise, earlier: Noise
        ) -> Tensor:
            log_probs = log_probabilities(outputs)
            score = believing(name, parameterization).score(log_probs, x_t, noise)
            return leap(score, earlier).law(log_probs.exp(), x_t, noise)

        return StepRule(name, leap, law, jump_first, check=check, needs_probabilities=True)
