"""The registry of samplers by name.

    SAMPLERS["mine"] = MySampler()        # or a StepRule
    cedd.sample(..., sampler="mine")      # cedd sample --sampler mypackage:MySampler imports yours

A name of the form package:NAME is imported, so such a name may only come from the user and never from a file.
"""

from __future__ import annotations

from collections.abc import Mapping

from cedd.dynamics import StepRule
from cedd.dynamics.reverse import RULES
from cedd.methods import Method
from cedd.names import suggestion
from cedd.parts import import_named
from cedd.samplers.confidence import CONFIDENCE_ORDERS
from cedd.samplers.decoding import DECODING_RULES
from cedd.samplers.first_hitting import FirstHitting
from cedd.samplers.gibbs import Gibbs
from cedd.samplers.grid_sampler import DynamicsRule, RuleSampler
from cedd.samplers.next_token import NextToken
from cedd.samplers.options import NamedSampler
from cedd.samplers.remask_confidence import RemaskByConfidence
from cedd.samplers.sampler import Sampler
from cedd.samplers.stratified import Stratified

SAMPLERS: dict[str, Sampler | StepRule] = {
    sampler.name: sampler
    for sampler in (
        *(DynamicsRule(name) for name in RULES),
        RemaskByConfidence(),
        Gibbs(),
        Stratified(),
        FirstHitting(),
        *CONFIDENCE_ORDERS.values(),
        *DECODING_RULES.values(),
        NextToken(),
    )
}
"""Samplers by name, looked up when used; add your own."""


ORIGINAL_NAMES: Mapping[str, str] = {
    "low-confidence": "llada",
    "random": "llada-random",
    "low-confidence-static": "sdar-static",
    "low-confidence-dynamic": "sdar-dynamic",
    "fast-dllm": "threshold",
    "mdlm": "analytic",
    "sedd": "analytic",
    "ddpm-cache": "analytic",
    "remdm": "remask",
    "autoregressive": "next-token",
}
"""Names of samplers in other projects, with hyphens, and ours or the words that ours contain."""


def _implementations(name: str) -> list[str]:
    """The samplers that other projects call by this name, such as dream or low_confidence_dynamic."""
    plain = name.casefold().replace("_", "-")
    ours = ORIGINAL_NAMES.get(plain, plain)
    words = set(ours.split("-"))
    return [ours] if ours in SAMPLERS else [known for known in SAMPLERS if words <= set(known.split("-"))]


def named_sampler(name: str) -> Sampler | StepRule:
    """The entry of a name in `SAMPLERS`, or package:NAME, imported."""
    if ":" in name:
        found = import_named(name, "sampler", _is_sampler)
        return found() if isinstance(found, type) else found
    if name not in SAMPLERS:
        meant = _implementations(name)
        use = f"; use {' or '.join(meant)}" if meant else suggestion(name, SAMPLERS)
        raise ValueError(f"unknown sampler {name!r}{use}")
    return SAMPLERS[name]


def _is_sampler(value: object) -> bool:
    return isinstance(value, Sampler | StepRule) or (isinstance(value, type) and issubclass(value, Sampler))


def get_sampler(sampler: str | NamedSampler, method: Method) -> Sampler:
    """The sampler by this name for a method.

    A name may also be that of a rule of the method's dynamics. Dynamics without noise replace samplers that go from
    noise to data by their own: autoregressive models are always sampled token by token.
    """
    found: object = sampler
    if isinstance(sampler, str):
        is_own_rule = sampler not in SAMPLERS and method.dynamics.noisy and sampler in method.dynamics.rules()
        found = DynamicsRule(sampler) if is_own_rule else named_sampler(sampler)
    if isinstance(found, StepRule):
        found = RuleSampler(found)
    if not isinstance(found, Sampler):
        raise ValueError(f"sampler must be a name, a Sampler or a StepRule (got {sampler!r})")
    if found.noisy and not method.dynamics.noisy:
        return get_sampler(method.dynamics.sampler, method)
    return found
