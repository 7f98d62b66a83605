"""What is estimated: a bound as a path integral, a reading at its end, and what is known without a network.

    tight   E int l + KL(p_{1|0} || p_r)                         a true bound
    j1      E int l                                              the paper's J1
    j2      E int lbar - int E[out-rate] + H(p_r)                the paper's J2

each divided by L. All three are one integral, E int l, plus constants that no model influences: with
E int (K + out-rate) = H(p_{1|0}) - H(p_{0+|0}), J2 is E int l + H(p_{0+|0}) - H(p_{1|0}) + H(p_r). A schedule that
starts at sigma_min > 0 adds E[-log p(x_0 | x_{0+})] to `tight`: the path ends at x_{0+}, and the data are read off it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cedd.bounds.exact import BOUNDS, Bound
from cedd.bounds.flow_matching import Corrector, FlowPath
from cedd.bounds.proposal import case_probabilities
from cedd.bounds.rows import PathCost, Reading, ScorePath
from cedd.names import suggestion
from cedd.objectives import Method, get_method
from cedd.objectives.flow_matching import FlowMatching
from cedd.process import Kernel, TokenProcess

JUST_AFTER_ZERO = torch.finfo(torch.float64).tiny


@dataclass(frozen=True)
class Target:
    """A bound in parts: `scale` times the path from t = 1 to `low`, the reading at its end, and what is known."""

    path: PathCost
    low: float
    scale: float
    reading: PathCost | None
    terminal: float


def score_target(process: TokenProcess, method: Method, bound: Bound, with_entropy: bool, low: float) -> Target:
    """The bound of a method with ratios, on any process; the path's integrand is l, or lbar without its entropy.

    Times below `low` are left out, and the mean over the others stands for the mean over all, as in the paper.
    """
    parameterization, end = method.require_scores(), process.terminal()
    jumps_to = _entropy(process.kernel(JUST_AFTER_ZERO))
    known_mean = end.conditional_entropy - jumps_to  # E int (K + out-rate)
    constants = {"tight": end.kl, "j1": 0.0, "j2": end.paper_prior_entropy - known_mean}
    return Target(
        path=ScorePath(parameterization, with_entropy),
        low=low,
        scale=1 / (1 - low),
        reading=Reading(parameterization) if bound == "tight" and process.schedule.start > 0 else None,
        terminal=constants[bound] + (0.0 if with_entropy else known_mean - process.integrated_out_rate()),
    )


def flow_target(process: TokenProcess, method: Method, low: float, corrector: Corrector) -> Target:
    """Discrete flow matching's own bound (bounds/flow_matching.py)."""
    stops_short = low > 0 or process.schedule.start > 0
    reading = Reading(method.parameterization) if stops_short else None
    return Target(FlowPath(corrector), low, 1.0, reading, process.terminal().kl)


def _entropy(kernel: Kernel) -> float:
    """H of the law of one token after a kernel."""
    p, others = case_probabilities(kernel), kernel.vocab_size - 1
    return -float(
        torch.xlogy(p.same, p.same) + torch.xlogy(p.moved, p.moved / others) + torch.xlogy(p.masked, p.masked)
    )


def check_bound(method: str | Method, bound: str) -> None:
    """Refuse a bound that a method has not."""
    chosen = get_method(method)
    if bound not in BOUNDS:
        raise ValueError(f"unknown bound {bound!r}{suggestion(bound, BOUNDS)}")
    if bound != "tight" and chosen.causal:
        raise ValueError(f"{chosen.name} has an exact likelihood and no {bound}; ask for the bound tight")
    if bound != "tight" and isinstance(chosen.objective, FlowMatching):
        raise ValueError(f"{chosen.name} has its own bound and no {bound}; ask for the bound tight")
