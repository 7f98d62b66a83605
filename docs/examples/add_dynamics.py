"""Dynamics of your own: time reversal that stops early, where the data are drawn from the posterior."""

# --8<-- [start:dynamics]
from dataclasses import dataclass, replace
from typing import Any

from toy import ENTROPY, L, V, counting, counts, train

import cedd
from cedd.dynamics import Reversal
from cedd.dynamics.path import Reconstruction, Target
from cedd.parameterization import Parameterization


@dataclass(frozen=True)
class StopsEarly(Reversal):
    """The path ends at t = 0.01, and E[-log p(x_0 | x_t)] is paid there: a true bound, and finite for any ratios."""

    stop = 0.01
    bounds = ("tight",)

    def target(self, parameterization: Parameterization, *parts: Any, **options: Any) -> Target:
        """The parts of the bound."""
        whole = super().target(parameterization, *parts, **options)
        return replace(whole, scale=1.0, reconstruction=Reconstruction(parameterization))


sedds = cedd.METHODS["sedds"]
stops_early = cedd.Method("sedds-early", sedds.parameterization, sedds.objective, StopsEarly())
# --8<-- [end:dynamics]

# --8<-- [start:use]
process = cedd.uniform(V)
network = train(stops_early, process)
for method in (sedds, stops_early):
    bound = cedd.estimate_bound(network, process, counting(256), method=method)
    print(f"{method.name:<11}  {bound.nats_per_token:.3f} ± {1.96 * bound.stderr:.3f}, entropy {ENTROPY:.3f}")

drawn = cedd.sample(network, process, (256, L), method=stops_early, steps=64)  # which end at t = 0.01, too
print(f"{counts(drawn):.0%} of the samples count")
# --8<-- [end:use]
