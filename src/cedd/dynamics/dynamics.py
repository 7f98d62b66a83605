"""The interface of dynamics, the process that a model runs backwards, for losses, bounds and samplers.

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
    """Whether the network's input is noisy text. Otherwise the model has an exact likelihood, `token_nats`, instead of
    a path, and its own sampler instead of step rules."""
    sampler: ClassVar[str] = "analytic"
    """The name of the default sampler (`samplers.SAMPLERS`)."""
    bounds: ClassVar[tuple[Bound, ...]] = BOUNDS
    """The available bounds."""
    grid: ClassVar[str] = "kept"
    """The default time grid, with the smallest error for a given number of steps (`samplers.grids`)."""
    stop: float = 0.0
    """The time at which the path ends if it has to end before t = 0."""

    # What can be combined

    def check_parts(self, parameterization: Parameterization, objective: Objective) -> None:
        """Raise a ValueError for parts that these dynamics do not support; the message names an alternative."""
        del parameterization, objective

    def check_process(self, process: TokenProcess) -> None:
        """Raise a ValueError for a process that these dynamics do not support; the message names an alternative."""
        del process

    def check_held(self, held: Tensor) -> None:
        """Raise a ValueError if these dynamics cannot sample with the positions `held` [B, L] (bool) given."""
        del held

    def with_corrector(self, corrector: object) -> Dynamics:
        """The same dynamics with a corrector."""
        raise ValueError("the corrector belongs to flow matching; use method='dfm', or leave it out")

    # Where the path ends

    def end(self, parameterization: Parameterization, process: TokenProcess) -> float:
        """The time at which the path of `tight` and of samplers ends, and x_0 is drawn from x_t."""
        del parameterization, process
        return self.stop

    def earliest(self, parameterization: Parameterization, process: TokenProcess, bound: Bound) -> float:
        """The earliest time of a bound: the path's end, and the paper's cut for the paper's bounds."""
        return self.end(parameterization, process) if bound == "tight" else PAPER_CUT

    # Training

    def positions(self, x_t: Tensor, noise: Noise) -> Tensor:
        """The positions at which the network's outputs are used, in the loss and in a step: [*S] bool."""
        return can_jump(x_t, noise)

    def network_input(self, x0: Tensor, x_t: Tensor, process: TokenProcess) -> Tensor:
        """The network's input in training: the noisy tokens."""
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
        """-log p(x_i | ...) of each token, [B, L] float64, if the likelihood is exact."""
        raise NotImplementedError

    # Sampling

    @abstractmethod
    def rules(self) -> Mapping[str, StepRule]:
        """The step rules by name, including `analytic`."""

    def last_rule(self, parameterization: Parameterization, process: TokenProcess) -> StepRule:
        """The rule of the step to t = 0, which denoises."""
        del parameterization, process
        return self.rules()["analytic"]

    def only_reveals(self, process: TokenProcess) -> bool:
        """Whether tokens never change once they are revealed."""
        return not process.can_shuffle

    # Enumeration

    def jump_rates(self, parameterization: Parameterization, outputs: Tensor, x_t: Tensor, noise: Noise) -> Tensor:
        """The rates at which the learned process goes from x_t to each state, [*S, n]; 0 at x_t itself."""
        return pad(parameterization.jump_rates(outputs, x_t, noise), (0, int(noise.has_mask)))
