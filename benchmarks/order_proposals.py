"""Ways to draw the reveal orders of the importance-weighted bound, compared at equal numbers of network evaluations.

    python benchmarks/order_proposals.py english --data FOLDER --length 64 --orders 64 --texts 64

Each of them gives unbiased weights, so all of them bound the same likelihood from above, and the lower value is better.
The value for K / 2 is that of the first half of the orders. Differences are paired over texts. u [K, L] are the levels
of `cedd.bounds.importance`: the largest is revealed first.

    independent   u ~ U(0, 1).
    antithetic    pairs u and 1 - u, which is the default of `cedd.estimate_bound`.
    quadruples    u, 1 - u, and both with the first and the second half of all levels exchanged.
    rotations     u + k / K modulo 1 for k = 0, ..., K - 1: every position is revealed once in each K-th of the order.
    stratified    u_i = (pi_i(k) + U(0, 1)) / K with a random permutation pi_i of the K orders for each position.
    tilted        each round of orders doubles their number. A ridge regression of log w on u over the earlier rounds
                  predicts log w = b u, and the next round draws u_i from the density e^(b_i u_i), in antithetic pairs.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from command_line import command
from torch import Tensor

from cedd.bounds.estimate import mean_and_stderr
from cedd.bounds.importance import check_reveal_orders, pair_nats, tokens_at_once
from cedd.cli.parser import argument
from cedd.device import pick_device
from cedd.evaluation.perplexity import choose_sequences, load_data
from cedd.models.folder import load_folder
from cedd.network import Network, evaluating

Weigh = Callable[[Tensor], Tensor]
"""log w [N, K] of levels u [N, K, L]."""
Uniform = Callable[[int], Tensor]
"""Uniform numbers [N, K, L] for this K."""


@dataclass(frozen=True)
class Arguments:
    """example: python benchmarks/order_proposals.py english --data FOLDER --length 64

    Compare ways to draw the orders of the importance-weighted bound.
    """

    model: str = field(default="english", metadata=argument("[MODEL]"))
    """A run's folder, or a model by its name."""
    data: Path | None = None
    """Folder of the evaluation sets (default: CEDD_DATA)."""
    set: str = "wikitext2"
    """An evaluation set, or a text file."""
    length: int = 32
    """Tokens per text."""
    texts: int = 16
    """Texts, evenly spaced over the set."""
    orders: int = 16
    """Orders per text, a power of two."""
    proposals: tuple[str, ...] = ()
    """Ways to draw orders (default: all)."""
    seed: int = 0
    """Of the orders."""
    device: str = "auto"
    """auto, cpu or cuda."""


def independent(weigh: Weigh, uniform: Uniform, orders: int) -> Tensor:
    """Log weights [N, K], as those of the other functions."""
    return weigh(uniform(orders))


def antithetic(weigh: Weigh, uniform: Uniform, orders: int) -> Tensor:
    """Pairs."""
    return weigh(_with_reverse(uniform(orders // 2)))


def quadruples(weigh: Weigh, uniform: Uniform, orders: int) -> Tensor:
    """Pairs, and their halves exchanged."""
    u = uniform(orders // 4)
    return weigh(_with_reverse(torch.stack([u, (u + 0.5) % 1], 2).flatten(1, 2)))


def rotations(weigh: Weigh, uniform: Uniform, orders: int) -> Tensor:
    """One order that begins at K points of itself."""
    return weigh((uniform(1) + torch.arange(orders)[:, None] / orders) % 1)


def stratified(weigh: Weigh, uniform: Uniform, orders: int) -> Tensor:
    """A Latin hypercube."""
    return weigh((uniform(orders).argsort(1) + uniform(orders)) / orders)


def tilted(weigh: Weigh, uniform: Uniform, orders: int) -> Tensor:
    """Rounds that learn from the earlier ones."""
    u = _with_reverse(uniform(1))
    likelihoods = log_weights = weigh(u)
    while (known := u.shape[1]) < orders:
        drawn, log_density = tilted_levels(slopes_of(u, likelihoods), _with_reverse(uniform(known // 2)))
        found = weigh(drawn)
        u, likelihoods = torch.cat([u, drawn], 1), torch.cat([likelihoods, found], 1)
        log_weights = torch.cat([log_weights, found - log_density], 1)
    return log_weights


def slopes_of(u: Tensor, log_weights: Tensor) -> Tensor:
    """b [N, L] of ridge regressions of log weights [N, K] on u [N, K, L], with as much noise as signal."""
    centred, values = u - u.mean(1, keepdim=True), log_weights - log_weights.mean(1, keepdim=True)
    products = centred @ centred.mT
    noise = products.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] * torch.eye(u.shape[1]).double()
    return (centred.mT @ torch.linalg.solve(products + noise, values[..., None])).squeeze(2)


def tilted_levels(slopes: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Levels [N, K, L] with densities b e^(b u) / (e^b - 1) from uniform numbers, and the log densities [N, K]."""
    b = torch.where(slopes.abs() < 1e-6, 1e-6, slopes)[:, None]
    u = torch.log1p(uniform * torch.expm1(b)) / b
    return u, (b * u - torch.log(torch.expm1(b) / b)).sum(2)


def _uniform(numbers: np.random.Generator, texts: int, length: int, orders: int) -> Tensor:
    return torch.as_tensor(numbers.random((texts, orders, length)))


def _with_reverse(u: Tensor) -> Tensor:
    return torch.stack([u, 1 - u], 2).flatten(1, 2)


PROPOSALS = {way.__name__: way for way in (independent, antithetic, quadruples, rotations, stratified, tilted)}


def run(arguments: Arguments) -> None:
    """Print the bound of each way, and its difference to antithetic pairs."""
    names, orders = arguments.proposals or tuple(PROPOSALS), arguments.orders
    if unknown := sorted(set(names) - set(PROPOSALS)):
        raise ValueError(f"--proposals: invalid choice: {', '.join(unknown)} (choose from {', '.join(PROPOSALS)})")
    if orders < 4 or orders & (orders - 1):
        raise ValueError(f"--orders must be a power of two, at least 4 (got {orders})")
    device = pick_device(arguments.device)
    folder = load_folder(arguments.model, device)
    check_reveal_orders(folder.method, folder.process)
    data = load_data(arguments.set, folder.tokenizer, arguments.length, root=arguments.data)
    texts, _ = choose_sequences(data, arguments.texts, folder.tokenizer)
    network = Network.of(folder.model, folder.process.vocab_size, device)
    most, batch = float(folder.process.noise(1.0).a), max(1, tokens_at_once(device) // arguments.length)

    def weigh(u: Tensor) -> Tensor:
        levels, rows = most * u.flatten(0, 1), texts.repeat_interleave(u.shape[1], 0)
        parts = zip(rows.split(batch), levels.split(batch), strict=True)
        return -torch.cat([pair_nats(network, *part, lambda _: None).sum(1) for part in parts]).view(u.shape[:2])

    found: dict[str, Tensor] = {}
    print(f"{arguments.model}, {len(texts)} texts of {arguments.length} tokens, nats per token")
    print(f"{'proposal':12s} " + " ".join(f"{f'K = {k}':>9s}" for k in (orders // 2, orders)) + "   less antithetic")
    for name in sorted(names, key=lambda name: name != "antithetic"):
        uniform = partial(_uniform, np.random.default_rng(arguments.seed), len(texts), texts.shape[1])
        with evaluating(folder.model), torch.autocast(device.type, dtype=torch.bfloat16):
            log_weights = PROPOSALS[name](weigh, uniform, orders)
        parts = [math.log(k) - log_weights[:, :k].logsumexp(1) for k in (orders // 2, orders)]
        found[name] = torch.stack(parts, 1) / texts.shape[1]
        line = f"{name:12s} " + " ".join(f"{value:9.4f}" for value in found[name].mean(0))
        if "antithetic" in found and name != "antithetic":
            pairs = (mean_and_stderr(part) for part in (found[name] - found["antithetic"]).T)
            line += "   " + "  ".join(f"{mean:+.4f} ± {error:.4f}" for mean, error in pairs)
        print(line, flush=True)


if __name__ == "__main__":
    sys.exit(command(__file__, Arguments, run))
