"""The analytic sampler as textbooks and published code write it: the yardstick for `cedd bench sample`.

Every step runs the network on the whole batch, forms the law of every position over all V + 1 states, and draws from
it by Gumbel noise (an exponential race) over the whole vocabulary. Absorb and uniform with the log-linear schedule, for
a network that gives p(x_0 | x_t). Nothing here is shared with the library; nothing is made slow on purpose.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

EPS = 1e-3


def sigma_of(t: Tensor) -> Tensor:
    """The log-linear schedule."""
    return -torch.log1p(-(1 - EPS) * t)


def draw(probs: Tensor) -> Tensor:
    """argmax of p / Exp(1), the published draw, in the precision of `probs`."""
    return (probs / (1e-10 - torch.log(torch.rand_like(probs) + 1e-10))).argmax(-1)


def absorb_step(f: Tensor, x: Tensor, t: Tensor, s: Tensor) -> Tensor:
    """Masks stay with probability a_s / a_t, otherwise they become a token by f; tokens stay. All [B, L, V + 1]."""
    V = f.shape[-1]
    a_t, a_s = -torch.expm1(-sigma_of(t)), -torch.expm1(-sigma_of(s))
    revealed = torch.cat([f * (a_t - a_s) / a_t, (a_s / a_t).expand(f[..., :1].shape)], -1)
    kept = torch.nn.functional.one_hot(x, V + 1).to(f)
    return draw(torch.where((x == V)[..., None], revealed, kept))


def uniform_step(f: Tensor, x: Tensor, t: Tensor, s: Tensor) -> Tensor:
    """P(x|z) (e^{-dQ} r)(z) with ratios r_y = sum_h f_h p(y|h) / p(x|h). All [B, L, V]."""
    V = f.shape[-1]
    sigma, step = sigma_of(t), sigma_of(t) - sigma_of(s)
    gap = torch.expm1(sigma)
    f_x = f.gather(-1, x[..., None])
    ratios = 1 + f * V / gap - f_x * V / (gap + V)
    ratios.scatter_(-1, x[..., None], 1.0)
    total = ratios.sum(-1, keepdim=True)
    back = torch.exp(step) * ratios - torch.expm1(step) / V * total
    likelihood = (-torch.expm1(-step) / V).expand_as(f).clone()
    likelihood.scatter_add_(-1, x[..., None], torch.exp(-step).expand(x.shape)[..., None].to(f))
    return draw((likelihood * back).clamp_min(0.0))


STEPS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {"absorb": absorb_step, "uniform": uniform_step}


@torch.no_grad()
def textbook_sample(
    model: Callable[[Tensor, Tensor], Tensor],
    process: str,
    vocab_size: int,
    shape: tuple[int, int],
    times: Tensor,
    device: torch.device,
) -> Tensor:
    """Samples [B, L] by the steps between `times` (falling); probabilities and noise in float64."""
    times = times.to(device, torch.float64)
    if process == "absorb":
        x = torch.full(shape, vocab_size, device=device)
    else:
        x = torch.randint(vocab_size, shape, device=device)
    for k in range(len(times) - 1):
        sigma = sigma_of(times[k]).float().expand(shape[0])
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            outputs = model(x, sigma)
        x = STEPS[process](torch.softmax(outputs.double(), -1), x, times[k], times[k + 1])
    return x
