"""Samplers: step rules as data, one loop, time grids, constraints, first-hitting, token by token."""

from cedd.bounds.flow_matching import Corrector
from cedd.samplers.choice import Sharpening, inverse_cdf
from cedd.samplers.constraints import Constraint, Fixed, prompt
from cedd.samplers.grids import GRIDS, default_steps, time_grid
from cedd.samplers.loop import SAMPLERS, sample
from cedd.samplers.network import GraphedNetwork, Network
from cedd.samplers.rules import RULES, Chances, Leap, StepRule, chances, flow_rules

__all__ = [
    "GRIDS",
    "RULES",
    "SAMPLERS",
    "Chances",
    "Constraint",
    "Corrector",
    "Fixed",
    "GraphedNetwork",
    "Leap",
    "Network",
    "Sharpening",
    "StepRule",
    "chances",
    "default_steps",
    "flow_rules",
    "inverse_cdf",
    "prompt",
    "sample",
    "time_grid",
]
