"""A process of your own: tokens are shuffled early and masked late, on a schedule of your own."""

# region process
from dataclasses import dataclass

import torch
from torch import Tensor
from toy import ENTROPY, L, V, counting, counts, train

import cedd
from cedd.schedules import check_time, double


@dataclass(frozen=True)
class Quadratic(cedd.Schedule):
    """sigma = total t²: most of the noise comes late."""

    total: float = 8.0

    def sigma(self, t: Tensor | float) -> Tensor:
        return self.total * check_time(t) ** 2

    def rate(self, t: Tensor | float) -> Tensor:
        return 2 * self.total * check_time(t)

    def inverse(self, sigma: Tensor | float) -> Tensor:
        return (double(sigma) / self.total).sqrt()


def late_masks(t: Tensor) -> Tensor:
    """The share of the noise at time t that masks; the rest shuffles."""
    return torch.sigmoid(10 * (t - 0.5))


process = cedd.eroulette(V, schedule=Quadratic(), mask_share=late_masks)
# endregion

# region use
for t in (0.25, 0.5, 0.75, 1.0):
    noise = process.kernel(t)
    keep, shuffled, masked = noise.keep, noise.alive - noise.keep, noise.a
    print(f"t = {t:.2f}: kept {keep:.3f}, shuffled {shuffled:.3f}, masked {masked:.3f}")

network = train("bayes", process)
bound = cedd.estimate_bound(network, process, counting(256), method="bayes", batch=1024)
print(f"bound {bound.nats_per_token:.3f} ± {1.96 * bound.stderr:.3f} nats per token, entropy {ENTROPY:.3f}")

fast = {"method": "bayes", "steps": 64, "deterministic": False}  # run the network on the whole batch
drawn = cedd.sample(network, process, (256, L), **fast)
print(f"{counts(drawn):.0%} of the samples are correct")

wrong = counting(256)
wrong[:, 3] = torch.randint(V, (256,))
fixed = cedd.sample(network, process, (256, L), **fast, t_start=0.3, x_start=wrong)
print(f"with one random token, {counts(wrong):.0%} are correct; after denoising from t = 0.3, {counts(fixed):.0%}")
# endregion
