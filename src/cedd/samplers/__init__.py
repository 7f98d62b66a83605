"""Samplers: one interface (`Sampler`), its implementations by name (`SAMPLERS`), constraints, random numbers.

Names are imported when first used: the command line reads `cedd.samplers.options` without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cedd.dynamics import Corrector, Leap, StepRule
    from cedd.dynamics.flow import flow_rules
    from cedd.dynamics.remask import remask_capped, remask_rescaled
    from cedd.dynamics.reverse import RULES
    from cedd.samplers.check import check_rule
    from cedd.samplers.choice import Sharpening, inverse_cdf
    from cedd.samplers.confidence import CONFIDENCE_ORDERS, ConfidenceOrder, order_nats
    from cedd.samplers.constraints import Constraint, Fixed, JointConstraint, prompt
    from cedd.samplers.decoding import ConfidenceDecoding
    from cedd.samplers.first_hitting import FirstHitting
    from cedd.samplers.gibbs import Gibbs
    from cedd.samplers.graphs import GraphedBlocks, GraphedNetwork
    from cedd.samplers.grid_sampler import GridSampler
    from cedd.samplers.grids import GRIDS, time_grid
    from cedd.samplers.next_token import NextToken
    from cedd.samplers.options import Callback, SamplingOptions, SamplingSettings, default_steps
    from cedd.samplers.random_numbers import text_seeds
    from cedd.samplers.registry import SAMPLERS, get_sampler
    from cedd.samplers.remask_confidence import RemaskByConfidence
    from cedd.samplers.sampler import Sampler, SamplingRun
    from cedd.samplers.sampling import sample
    from cedd.samplers.stratified import Stratified

__all__ = [
    "CONFIDENCE_ORDERS",
    "GRIDS",
    "RULES",
    "SAMPLERS",
    "Callback",
    "ConfidenceDecoding",
    "ConfidenceOrder",
    "Constraint",
    "Corrector",
    "FirstHitting",
    "Fixed",
    "Gibbs",
    "GraphedBlocks",
    "GraphedNetwork",
    "GridSampler",
    "JointConstraint",
    "Leap",
    "NextToken",
    "RemaskByConfidence",
    "Sampler",
    "SamplingOptions",
    "SamplingRun",
    "SamplingSettings",
    "Sharpening",
    "StepRule",
    "Stratified",
    "check_rule",
    "default_steps",
    "flow_rules",
    "get_sampler",
    "inverse_cdf",
    "order_nats",
    "prompt",
    "remask_capped",
    "remask_rescaled",
    "sample",
    "text_seeds",
    "time_grid",
]

_HOMES = {
    "dynamics": ("Corrector", "Leap", "StepRule"),
    "dynamics.flow": ("flow_rules",),
    "dynamics.remask": ("remask_capped", "remask_rescaled"),
    "dynamics.reverse": ("RULES",),
    "samplers.check": ("check_rule",),
    "samplers.choice": ("Sharpening", "inverse_cdf"),
    "samplers.confidence": ("CONFIDENCE_ORDERS", "ConfidenceOrder", "order_nats"),
    "samplers.constraints": ("Constraint", "Fixed", "JointConstraint", "prompt"),
    "samplers.decoding": ("ConfidenceDecoding",),
    "samplers.first_hitting": ("FirstHitting",),
    "samplers.gibbs": ("Gibbs",),
    "samplers.graphs": ("GraphedBlocks", "GraphedNetwork"),
    "samplers.grid_sampler": ("GridSampler",),
    "samplers.grids": ("GRIDS", "time_grid"),
    "samplers.next_token": ("NextToken",),
    "samplers.options": ("Callback", "SamplingOptions", "SamplingSettings", "default_steps"),
    "samplers.random_numbers": ("text_seeds",),
    "samplers.registry": ("SAMPLERS", "get_sampler"),
    "samplers.remask_confidence": ("RemaskByConfidence",),
    "samplers.sampler": ("Sampler", "SamplingRun"),
    "samplers.sampling": ("sample",),
    "samplers.stratified": ("Stratified",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'cedd.samplers' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"cedd.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value
