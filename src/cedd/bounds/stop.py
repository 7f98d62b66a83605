"""Where a path that has to stop short of t = 0 does so: at the time that makes its bound least.

Stopping early leaves more for the last step to reconstruct, stopping late lets tokens that are clean pay once more for
each e-fold of time. Any time gives a true bound. The best is sought on a grid, on text that is not evaluated
afterwards: a time that was chosen by other text is as good as one that was given.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cedd.bounds.estimator import bounds_with_stops
from cedd.methods import Method, get_method
from cedd.network import AnyModel
from cedd.process import TokenProcess

STOPS = tuple(float(f"{10 ** (k / 2):.1e}") for k in range(-12, 0))
"""1e-6 to 0.32, two to a decade."""


def choose_stop(
    model: AnyModel, process: TokenProcess, data: Tensor, *, method: str | Method, draws: int = 8
) -> Method:
    """The method with the stop of `STOPS` at which its bound on data [N, L] is least; as it is where there is none.

    All times share the draws of the path; only the last step is evaluated for each.
    """
    chosen = get_method(method)
    if not chosen.stops_short(process):
        return chosen
    generator = torch.Generator().manual_seed(0)
    found = bounds_with_stops(model, process, data, STOPS, method=chosen, draws=draws, generator=generator)
    return chosen.with_stop(min(zip(found, STOPS, strict=True), key=lambda pair: pair[0].nats_per_token)[1])
