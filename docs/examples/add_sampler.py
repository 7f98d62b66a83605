"""A sampler of your own: tokens are masked again now and then, so that mistakes are not for ever."""

# --8<-- [start:rule]
import torch
from toy import L, V, counts, train

import cedd
from cedd.parameterization import AffineScore
from cedd.process import Noise
from cedd.samplers import Leap, StepRule


def remasking(strength: float) -> StepRule:
    """Absorb's step in which a token is masked again with probability `remask`, and as many masks more are revealed.

    Of the positions, alive(t) are tokens and a(t) = 1 - alive(t) masks. For a(s) masks to be left at s,
    a(t) stay + alive(t) remask = a(s): the share of masks at every time is that of the process.
    """

    def leap(score: AffineScore, earlier: Noise) -> Leap:
        noise, masked = score.noise, score.masked
        remask = (strength * (noise.t - earlier.t)).clamp(max=earlier.a / noise.alive)
        stay = torch.where(masked, (earlier.a - noise.alive * remask) / noise.a, 1 - remask)
        nothing = torch.zeros_like(stay)
        return Leap(stay, torch.where(masked, nothing, remask), floor=nothing, slope=masked.double())

    return StepRule.from_leap("remasking", leap, jump_first=True)


# --8<-- [end:rule]

# --8<-- [start:use]
process = cedd.absorb(V)
network = train("cedd", process)
for steps in (8, 32, 128):
    for rule in ("analytic", remasking(8.0)):
        generator = torch.Generator().manual_seed(0)
        drawing = {"steps": steps, "generator": generator, "deterministic": False}  # the network reads all at once
        drawn = cedd.sample(network, process, (1000, L), method="cedd", sampler=rule, **drawing)
        name = rule if isinstance(rule, str) else rule.name
        print(f"{steps:>4} steps, {name:<10} {counts(drawn):.1%} of the samples count")
# --8<-- [end:use]
