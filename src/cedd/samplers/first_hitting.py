"""First-hitting: absorb without discretization, one network call per position that is revealed.

Shapes: B batch, L positions, V vocabulary.

The time at which a mask is revealed does not depend on the network: a mask at t is still a mask at s < t with
probability a_s / a_t, a = 1 - alive, independently of all others. So all reveal times are drawn at once, a_s = u a_t,
and processed in order: the network is called at each of them, and one position is drawn from f (Zheng et al. 2024, who
draw the times between reveals). Samples follow the continuous reverse process exactly, in at most L calls. Each
sequence of a batch has its own time.

A schedule with sigma(0) > 0 masks a share a_{0+} at once. Masks with a_s below a_{0+} remain at 0+ and are drawn
together in one call. The bound pays -log p(x_0 | x_{0+}) for that.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from cedd.dynamics.rules import believing
from cedd.methods import Method
from cedd.network import HostPlaces, Places, flat_places, put_at
from cedd.process import TokenProcess
from cedd.samplers.constraints import Constraint, Fixed
from cedd.samplers.random_numbers import Use
from cedd.samplers.sampler import RevealCall, Sampler, SamplingRun


def check_reveals(name: str, method: Method, process: TokenProcess, constraint: Constraint | None = None) -> None:
    """Refuse methods and processes for which masks cannot be revealed in an arbitrary order."""
    if not process.has_mask:
        raise ValueError(f"{name} reveals masks, and this process has none; use sampler='analytic'")
    if process.can_shuffle:
        raise ValueError(f"{name} needs tokens that never change once revealed (absorb); use sampler='analytic' here")
    believing(name, method.parameterization)  # the sum of ratios would set the reveal times
    if constraint is not None and not isinstance(constraint, Fixed):
        raise ValueError(f"the sampler {name} only supports Fixed constraints; use 'analytic' for others")


class RevealSampler(Sampler):
    """Base class of samplers that reveal each mask once, in an order of their own."""

    draws_jointly: ClassVar[bool] = True

    def check(self, method: Method, process: TokenProcess, constraint: Constraint | None = None) -> None:
        super().check(method, process, constraint)
        check_reveals(self.name, method, process, constraint)

    def tokens_are_final(self, method: Method, process: TokenProcess) -> bool:
        return True


class FirstHitting(RevealSampler):
    """The first-hitting sampler: all reveal times are drawn in advance, and each call reveals one token."""

    name = "first-hitting"
    unused: ClassVar[tuple[str, ...]] = ("steps", "grid", "corrector")

    def steps_taken(self, steps: int, length: int) -> int:
        return length

    def sample(self, run: SamplingRun) -> Tensor:
        x, process, (batch, length), device = run.start(), run.process, run.shape, run.device
        masked = (x == process.vocab_size).cpu()
        start = process.noise(run.options.t_start)
        reached = run.random.uniform(Use.JUMP).masked_fill_(~masked, -1.0) * start.a  # a at the reveal
        order = reached.argsort(dim=1, descending=True)
        alpha = -torch.log1p(-reached.gather(1, order).clamp_min(0.0))
        alpha_at_0 = process.alpha_just_after_zero
        counts = (masked.gather(1, order) & (alpha > alpha_at_0) if process.jumps_at_zero else masked).sum(1)
        fewest, calls = int(counts.min()), int(counts.max())
        run.show(0, run.options.t_start, x)

        # Of each call, [calls, B]: all of it is known before the first, and nothing has to come back from the device.
        starts, chosen = torch.arange(batch) * length, run.random.uniform(Use.TARGET)
        joint, follows = run.joint is not None, masked.flatten().numpy().copy()
        rows_of, sigmas, numbers = (part.T.contiguous().to(device) for part in (starts[:, None] + order, alpha, chosen))

        def call(k: int) -> RevealCall:
            rows, v, left = rows_of[k], numbers[k], slice(None)
            places = Places(rows)
            if k >= fewest:  # some are finished
                left = (counts > k).nonzero().squeeze(1)
                sequences, local = left.to(device), (starts[: len(left)] + order[left, k]).to(device)
                rows, v = rows[sequences], v[sequences]
                places = Places(rows, sequences, local)
            if joint:
                here = (starts + order[:, k])[left].numpy()
                places = replace(places, host=HostPlaces(here, np.flatnonzero(follows)))
                follows[here] = False
            return RevealCall(sigmas[k], places, v)

        if run.callback is None:
            x = run.revealed_in_turn(x, map(call, range(calls)))
        else:
            for k in range(calls):
                x = run.revealed(x, *call(k))
                run.show(k + 1, float(process.axis.inverse(alpha[:, k].max())), x)
        if process.jumps_at_zero and len(rows := flat_places(x == process.vocab_size)):
            sigma, v = alpha_at_0.to(device, torch.float32), run.uniform(Use.TARGET, 1).flatten().index_select(0, rows)
            x = put_at(x, rows, run.reveal(x, sigma, Places(rows), v))
            run.show(calls + 1, 0.0, x)
        return x
