"""First-hitting: absorb without discretization, one network call for each position that is revealed.

Shapes: B batch, L positions, V vocabulary.

When a mask is revealed does not depend on the network: from t, it is still there at s < t with probability a_s / a_t,
a = 1 - alive, independently of all others. So draw every reveal time at once, a_s = u a_t, and go through them in
order: at each the network is called at that very time, and one position is drawn from f (Zheng et al. 2024, there by
the times between reveals). The law is that of the continuous reverse process; there are at most L calls. The sequences
of a batch are each at their own time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cedd.dynamics.rules import believing
from cedd.methods import Method
from cedd.network import Network, Places
from cedd.process import TokenProcess
from cedd.samplers.choice import Reveal, Sharpening
from cedd.samplers.constraints import Constraint, Fixed
from cedd.samplers.draws import Draws, Use


def check_reveals(name: str, method: Method, process: TokenProcess, constraint: Constraint | None) -> None:
    """Refuse what a sampler that reveals masks in an order of its own cannot be used with."""
    if not process.has_mask:
        raise ValueError(f"{name} reveals masks, and this process has none; use sampler='analytic'")
    if process.can_shuffle:
        raise ValueError(f"{name} needs tokens that never change once revealed (absorb); use sampler='analytic' here")
    believing(name, method.parameterization)  # the sum of ratios would set the reveal times
    if constraint is not None and not isinstance(constraint, Fixed):
        raise ValueError(f"{name} fixes what is revealed when; give a Fixed constraint or use 'analytic'")


def first_hitting(
    network: Network,
    process: TokenProcess,
    x: Tensor,
    sharpening: Sharpening,
    constraint: Constraint | None,
    draws: Draws,
    callback: Callable[[int, float, Tensor], None] | None = None,
    t_start: float = 1.0,
) -> Tensor:
    """Reveal all masks of x [B, L]."""
    x = constraint(x) if constraint is not None else x.clone()
    batch, length = x.shape
    device = x.device
    masked = (x == process.vocab_size).cpu()
    start = process.noise(t_start)
    reached = draws.uniform(Use.JUMP).masked_fill_(~masked, -1.0) * start.a  # a at the reveal
    order = reached.argsort(dim=1, descending=True)
    alpha = -torch.log1p(-reached.gather(1, order).clamp_min(0.0))
    chosen = draws.uniform(Use.TARGET)
    calls = int(masked.sum(1).max()) if x.numel() else 0
    if callback is not None:
        callback(0, t_start, x)

    flat, counts = x.flatten(), masked.sum(1)
    # Of each call, [calls, B]: all of it is known before the first, and nothing has to come back from the device.
    starts = torch.arange(batch) * length
    rows_of, sigmas, numbers = (part.T.contiguous().to(device) for part in (starts[:, None] + order, alpha, chosen))
    for k in range(calls):
        rows, v, left = rows_of[k], numbers[k], (counts > k).nonzero().squeeze(1)
        places = Places(rows)
        if len(left) < batch:
            sequences, local = left.to(device), (starts[: len(left)] + order[left, k]).to(device)
            rows, v = rows[sequences], v[sequences]
            places = Places(rows, sequences, local)
        outputs = network.rows(flat.view(batch, length), sigmas[k], places, full_precision=True)
        flat = flat.index_copy(0, rows, outputs.apply(Reveal(sharpening), (v,)))
        if callback is not None:
            callback(k + 1, float(process.axis.inverse(alpha[:, k].max())), flat.view(batch, length))
    return flat.view(batch, length)
