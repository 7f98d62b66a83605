"""The end of paths that have to end before t = 0: the time with the smallest bound.

An early end leaves more for the last step to reconstruct; a late end adds the cost of clean tokens for each e-fold of
time. Any time gives a valid bound. The best one is chosen on a grid, on text that is not evaluated afterwards, so that
the bound with the chosen time remains valid.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cedd.bounds.estimator import bounds_with_stops
from cedd.methods import Method, get_method
from cedd.network import AnyModel
from cedd.process import TokenProcess

STOPS = tuple(float(f"{10 ** (k / 2):.1e}") for k in range(-12, 0))
"""1e-6 to 0.32, two per decade."""


def choose_stop(
    model: AnyModel, process: TokenProcess, data: Tensor, *, method: str | Method, draws: int = 8
) -> Method:
    """The method with the time of `STOPS` at which its bound on data [N, L] is smallest; unchanged if its path ends at
    t = 0.

    All times share the draws of the path; only the last step is evaluated for each.
    """
    chosen = get_method(method)
    if not chosen.stops_short(process):
        return chosen
    generator = torch.Generator().manual_seed(0)
    found = bounds_with_stops(model, process, data, STOPS, method=chosen, draws=draws, generator=generator)
    return chosen.with_stop(min(zip(found, STOPS, strict=True), key=lambda pair: pair[0].nats_per_token)[1])
