"""A method of your own: bayes with a weight that grows towards t = 0."""

# region method
import torch
from torch import Tensor
from toy import V, counting, train

import cedd
from cedd.objectives import WEIGHTS
from cedd.objectives.cross_entropy import CrossEntropy
from cedd.process import Noise


def towards_data(noise: Noise, x_t: Tensor) -> Tensor:
    """w = 1/(t + 0.1): the end of sampling, near t = 0, has the largest weight."""
    return 1 / (noise.t + 0.1)


WEIGHTS["towards-data"] = towards_data
mine = cedd.Method("bayes-late", cedd.Bayes(), CrossEntropy(towards_data))
# endregion

# region use
if __name__ == "__main__":
    process = cedd.uniform(V)
    rivals = [cedd.METHODS["bayes"], cedd.METHODS["sedd"], mine]
    networks = [train(method, process) for method in rivals]

    held_out, values = counting(128), []
    for method, network in zip(rivals, networks, strict=True):
        same_noise = torch.Generator().manual_seed(1)
        bound = cedd.estimate_bound(network, process, held_out, method=method, generator=same_noise, batch=1024)
        values.append(bound.per_sequence)
        difference = values[-1] - values[0]  # per sequence, on the same times and noise
        error = 1.96 * float(difference.std()) / len(difference) ** 0.5
        print(f"{method.name:<10}  {bound.nats_per_token:.3f}  difference {difference.mean():+.3f} ± {error:.3f}")
# endregion
