"""Samplers: one loop that runs any step rule, time grids, constraints, first-hitting."""

from cedd.dynamics import Corrector, Leap, StepRule
from cedd.dynamics.flow import flow_rules
from cedd.dynamics.remask import remask_capped, remask_rescaled
from cedd.dynamics.reverse import RULES
from cedd.samplers.check import check_rule
from cedd.samplers.choice import Sharpening, inverse_cdf
from cedd.samplers.constraints import Constraint, Fixed, prompt
from cedd.samplers.draws import text_seeds
from cedd.samplers.graphs import GraphedNetwork
from cedd.samplers.grids import GRIDS, default_steps, time_grid
from cedd.samplers.loop import SAMPLERS, sample
from cedd.samplers.orders import ORDERS, Order, order_nats
from cedd.samplers.plan import Chances, chances
from cedd.samplers.steppers import STEPPERS, Stepper, gibbs, remask_by_confidence, stratified

__all__ = [
    "GRIDS",
    "ORDERS",
    "RULES",
    "SAMPLERS",
    "STEPPERS",
    "Chances",
    "Constraint",
    "Corrector",
    "Fixed",
    "GraphedNetwork",
    "Leap",
    "Order",
    "Sharpening",
    "StepRule",
    "Stepper",
    "chances",
    "check_rule",
    "default_steps",
    "flow_rules",
    "gibbs",
    "inverse_cdf",
    "order_nats",
    "prompt",
    "remask_by_confidence",
    "remask_capped",
    "remask_rescaled",
    "sample",
    "stratified",
    "text_seeds",
    "time_grid",
]
