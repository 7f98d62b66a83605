"""Dynamics of your own: time reversal that stops at t = 0.01, where the data are drawn from x_t."""

# region dynamics
from dataclasses import dataclass

from toy import ENTROPY, L, V, counting, counts, train

import cedd
from cedd.dynamics import DYNAMICS, Reversal
from cedd.parameterization import Parameterization


@dataclass(frozen=True)
class StopsEarly(Reversal):
    """The path ends at t = 0.01 with the cost E[-log p(x_0 | x_t)]: a valid bound, finite for any ratios."""

    def end(self, parameterization: Parameterization, process: cedd.TokenProcess) -> float:
        """The time at which bound and sampler draw the data."""
        return 0.01


sedds = cedd.METHODS["sedds"]
stops_early = cedd.Method("sedds-early", sedds.parameterization, sedds.objective, StopsEarly())
DYNAMICS["stops-early"] = StopsEarly
# endregion

# region use
if __name__ == "__main__":
    process = cedd.uniform(V)
    network = train(stops_early, process)
    for method in (sedds, stops_early):  # sedds stops at t = 0.001
        bound = cedd.estimate_bound(network, process, counting(256), method=method, batch=1024)
        print(f"{method.name:<11}  {bound.nats_per_token:.3f} ± {1.96 * bound.stderr:.3f}, entropy {ENTROPY:.3f}")

    drawn = cedd.sample(network, process, (256, L), method=stops_early, steps=64, deterministic=False)
    print(f"{counts(drawn):.0%} of the samples are correct")
# endregion
