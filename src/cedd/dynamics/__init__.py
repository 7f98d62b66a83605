"""Dynamics, the process that a model runs backwards: time reversal, flow matching, or the next token."""

from cedd.dynamics.causal import Causal
from cedd.dynamics.dynamics import BOUNDS, DYNAMICS, Bound, Dynamics
from cedd.dynamics.flow import Corrector, Flow
from cedd.dynamics.reverse import Reversal
from cedd.dynamics.rules import StepRule
from cedd.parameterization import Leap

DYNAMICS.update({"reversal": Reversal, "flow": Flow, "causal": Causal})

__all__ = ["BOUNDS", "DYNAMICS", "Bound", "Causal", "Corrector", "Dynamics", "Flow", "Leap", "Reversal", "StepRule"]
