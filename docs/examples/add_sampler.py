"""Samplers of your own, compared with those of the package."""

# region use
import torch
from my_samplers import REMASKING, AboveThreshold
from toy import L, V, counts, train

import cedd

process = cedd.absorb(V)
network = train("cedd", process)
for steps in (8, 32):
    for sampler in ("analytic", REMASKING):
        generator = torch.Generator().manual_seed(0)
        drawing = {"steps": steps, "generator": generator, "deterministic": False}  # run on the whole batch
        drawn = cedd.sample(network, process, (1000, L), method="cedd", sampler=sampler, **drawing)
        name = sampler if isinstance(sampler, str) else sampler.name
        print(f"{steps:>4} steps, {name:<10} {counts(drawn):.1%} of the samples are correct")
drawn = cedd.sample(network, process, (1000, L), method="cedd", sampler=AboveThreshold(), seed=0, deterministic=False)
print(f"above-threshold        {counts(drawn):.1%} of the samples are correct")
# endregion
