"""What a model has learned to run backwards: the questions that losses, bounds and samplers ask.

Shapes: B batch, L positions, V vocabulary; [*S] any common shape.

    Reversal    the time reversal of the process, by its ratios            dynamics/reverse.py
    Flow        discrete flow matching's velocity                          dynamics/flow.py
    Causal      no noise at all: the next token                            dynamics/causal.py
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Literal

from torch import Tensor
from torch.nn.functional import pad

from cedd.dynamics.path import Target
from cedd.dynamics.rules import StepRule
from cedd.network import Network
from cedd.objectives.objective import Objective
from cedd.parameterization import Parameterization, can_jump
from cedd.parts import Part, Table
from cedd.process import Noise, TokenProcess

Bound = Literal["tight", "j1", "j2"]
BOUNDS: tuple[Bound, ...] = ("tight", "j1", "j2")
PAPER_CUT = 1e-4
"""The earliest time of the paper's j1 and j2."""

DYNAMICS: dict[str, type[Dynamics]] = {}
"""The dynamics by name; those of your own can be added."""


class Dynamics(Part, ABC):
    """One of the parts of a method, next to its parameterization and its objective."""

    table: ClassVar[Table] = Table("dynamics", "cedd.dynamics.DYNAMICS", DYNAMICS)

    noisy: ClassVar[bool] = True
    """Whether the network sees noisy text. If not, the model has an exact likelihood, `token_nats`, instead of a path,
    and a sampler of its own instead of step rules."""
    sampler: ClassVar[str] = "analytic"
    """The name of the sampler that is used unless another is asked for (`samplers.SAMPLERS`)."""
    bounds: ClassVar[tuple[Bound, ...]] = BOUNDS
    """The bounds that there are."""
    grid: ClassVar[str] = "kept"
    """The time grid on which a sampler comes closest to the path with a given number of steps (`samplers.grids`)."""
    stop: float = 0.0
    """The time at which a path that has to stop short of t = 0 does so."""

    # What can be combined

    def check_parts(self, parameterization: Parameterization, objective: Objective) -> None:
        """Refuse parts that make no sense with these dynamics, saying what to use instead."""
        del parameterization, objective

    def check_process(self, process: TokenProcess) -> None:
        """Refuse a process that makes no sense with these dynamics, saying what to use instead."""
        del process

    def check_held(self, held: Tensor) -> None:
        """Refuse to sample around what is given, held [B, L] bool, where these dynamics cannot."""
        del held

    def with_corrector(self, corrector: object) -> Dynamics:
        """The same with a corrector, where there is one."""
        raise ValueError("the corrector belongs to flow matching; use method='dfm', or leave it out")

    # Where the path ends

    def end(self, parameterization: Parameterization, process: TokenProcess) -> float:
        """The time at which the path ends, of the bound `tight` as of a sampler: there x_0 is drawn from x_t."""
        del parameterization, process
        return self.stop

    def earliest(self, parameterization: Parameterization, process: TokenProcess, bound: Bound) -> float:
        """The earliest time of a bound: the path's end, and the paper's cut for the paper's bounds."""
        return self.end(parameterization, process) if bound == "tight" else PAPER_CUT

    # Training

    def positions(self, x_t: Tensor, noise: Noise) -> Tensor:
        """Where the network's outputs matter, in the loss as in a step: [*S] bool."""
        return can_jump(x_t, noise)

    def network_input(self, x0: Tensor, x_t: Tensor, process: TokenProcess) -> Tensor:
        """What the network is shown in training: the noisy tokens."""
        return x_t

    # Bounds

    @abstractmethod
    def target(
        self, parameterization: Parameterization, process: TokenProcess, bound: Bound, *, with_entropy: bool, low: float
    ) -> Target:
        """A bound in parts. Its path is integrated from t = 1 to `low`.

        with_entropy: the integrand is l = lbar + K, else lbar, with the same mean (see dynamics/reverse.py).
        """

    def token_nats(self, network: Network, process: TokenProcess, x0: Tensor) -> Tensor:
        """-log p(x_i | ...) of each token, [B, L] float64, where the likelihood is known exactly."""
        raise NotImplementedError

    # Sampling

    @abstractmethod
    def rules(self) -> Mapping[str, StepRule]:
        """The laws of one step back, by name; there is always `analytic`."""

    def last_rule(self, parameterization: Parameterization, process: TokenProcess) -> StepRule:
        """The law of the step to t = 0, which denoises whatever the rule."""
        del parameterization, process
        return self.rules()["analytic"]

    def only_reveals(self, process: TokenProcess) -> bool:
        """Whether tokens never change once they are revealed."""
        return not process.can_shuffle

    # Enumeration

    def jump_rates(self, parameterization: Parameterization, outputs: Tensor, x_t: Tensor, noise: Noise) -> Tensor:
        """The rates at which the learned process goes from x_t to each state, [*S, n]; 0 at x_t itself."""
        return pad(parameterization.jump_rates(outputs, x_t, noise), (0, int(noise.has_mask)))
