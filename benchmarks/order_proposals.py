"""Ways to draw the reveal orders of the importance-weighted bound, compared at equal numbers of network evaluations.

    python benchmarks/order_proposals.py english --data FOLDER --length 64 --orders 64 --texts 64

Each of them gives unbiased weights, so all of them bound the same likelihood from above, and the lower value is better.
The value for K / 2 is that of the first half of the orders (`late` has none). Differences are paired over texts. u
[K, L] are the levels of `cedd.bounds.importance`: the largest is revealed first.

    independent   u ~ U(0, 1).
    antithetic    pairs u and 1 - u, which is the default of `cedd.estimate_bound`.
    quadruples    u, 1 - u, and both with the first and the second half of all levels exchanged.
    rotations     u + k / K modulo 1 for k = 0, ..., K - 1: every position is revealed once in each K-th of the order.
    stratified    u_i = (pi_i(k) + U(0, 1)) / K with a random permutation pi_i of the K orders for each position.
    tilted        each round of orders doubles their number. A ridge regression of log w on u over the earlier rounds
                  predicts log w = b u, and the next round draws u_i from the density e^(b_i u_i), in antithetic pairs.
    late          antithetic pairs, but in the last third of the steps the orders of a text are particles with the score
                  w p~, where w is the weight so far and p~ the product of the chances of all masked tokens, each given
                  the known ones. If the effective sample size of the scores is below K / 2, orders are resampled, and
                  the copies reveal the rest in new random orders. late-half starts after half of the steps.

The chances in a context are computed once for all proposals if the network is not time-conditioned.
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
from cedd.bounds.importance import check_reveal_orders, token_nats, tokens_at_once
from cedd.cli.parser import argument
from cedd.device import pick_device
from cedd.evaluation.perplexity import choose_sequences, load_data
from cedd.models.folder import load_folder
from cedd.network import Network, Places, capabilities_of, evaluating, flat_places

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
    """Seed of the orders."""
    device: str = "auto"
    """auto, cpu or cuda."""


@dataclass(frozen=True)
class Weigh:
    """Weights of the orders of texts [N, L] under a network, whose a(1) is `most`."""

    network: Network
    texts: Tensor
    most: float
    known: dict[tuple[int, bytes, float], Tensor] = field(default_factory=dict)
    """-log f [L] of the masked tokens of a text, by the text, the masked positions and the noise level."""

    def __call__(self, u: Tensor) -> Tensor:
        """log w [N, K] of levels u [N, K, L]."""
        return self.resampled(u, math.inf, None)

    def resampled(self, u: Tensor, start: float, numbers: np.random.Generator | None) -> Tensor:
        """The same if orders are resampled from the step `start` on, with random numbers."""
        texts, orders, length = u.shape
        u, hidden, log_weights = u.clone(), torch.ones(u.shape, dtype=torch.bool), torch.zeros(u.shape[:2]).double()
        level = torch.ones(u.shape[:2]).double()
        for step in range(length):
            nats, resampled = self.masked_nats(hidden, u.masked_fill(~hidden, 0).amax(2)), False
            for n in range(texts) if step >= start else ():
                assert numbers is not None
                rest = nats[n].sum(1)
                scores = log_weights[n] - rest
                shares = scores.softmax(0)
                if float(shares.square().sum()) * orders <= 2:  # an effective sample size of at least K / 2
                    continue
                resampled = True
                points = torch.as_tensor((np.arange(orders) + numbers.random()) / orders)
                chosen = torch.searchsorted(shares.cumsum(0), points).clamp(max=orders - 1)
                log_weights[n] = scores.logsumexp(0) - math.log(orders) + rest[chosen]
                hidden[n], level[n] = hidden[n, chosen], level[n, chosen]
                again = torch.as_tensor(numbers.random((orders, length))) * level[n, :, None]
                u[n] = torch.where(hidden[n], again, u[n, chosen])
            level, place = u.masked_fill(~hidden, -1).max(2)
            nats = self.masked_nats(hidden, level) if resampled else nats
            log_weights -= nats.gather(2, place[..., None]).squeeze(2)
            hidden.scatter_(2, place[..., None], False)
        return log_weights

    def masked_nats(self, hidden: Tensor, level: Tensor) -> Tensor:
        """-log f of the hidden tokens [N, K, L], given the others and the level [N, K]; 0 elsewhere."""
        texts, orders, length = hidden.shape
        timed = capabilities_of(self.network.model).time_conditioned
        keys = [
            (n, hidden[n, k].numpy().tobytes(), float(level[n, k]) if timed else 0.0)
            for n in range(texts)
            for k in range(orders)
        ]
        new = [number for number, key in enumerate(keys) if key not in self.known]
        new = list({keys[number]: number for number in new}.values())
        batch = max(1, tokens_at_once(self.network.device) // length)
        for part in torch.tensor(new).split(batch) if new else ():
            where, clean = hidden.flatten(0, 1)[part], self.texts[part // orders]
            x_t = torch.where(where, self.network.vocab_size, clean).to(self.network.device)
            sigma = -torch.log1p(-self.most * level.flatten()[part]).to(self.network.device)
            outputs = self.network.rows(x_t, sigma, Places(flat_places(where).to(x_t.device)), full_precision=True)
            targets = clean[where].to(x_t.device)
            found = torch.zeros(where.shape, dtype=torch.float64)
            found[where] = outputs.map(lambda said, rows, targets=targets: token_nats(said, targets[rows])).cpu()
            self.known.update(zip((keys[number] for number in part.tolist()), found, strict=True))
        return torch.stack([self.known[key] for key in keys]).view(hidden.shape)


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


def late(weigh: Weigh, uniform: Uniform, orders: int, start: float = 2 / 3) -> Tensor:
    """Resampled in the last third; the log of the mean of the weights estimates log p(x)."""
    u = _with_reverse(uniform(orders // 2))
    return weigh.resampled(u, start * u.shape[2], np.random.default_rng(orders))


def late_half(weigh: Weigh, uniform: Uniform, orders: int) -> Tensor:
    """Resampled in the last half."""
    return late(weigh, uniform, orders, 1 / 2)


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


_WAYS = (independent, antithetic, quadruples, rotations, stratified, tilted, late, late_half)
PROPOSALS = {way.__name__.replace("_", "-"): way for way in _WAYS}


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
    weigh = Weigh(network, texts, float(folder.process.noise(1.0).a))
    found: dict[str, Tensor] = {}
    print(f"{arguments.model}, {len(texts)} texts of {arguments.length} tokens, nats per token")
    print(f"{'proposal':12s} " + " ".join(f"{f'K = {k}':>9s}" for k in (orders // 2, orders)) + "   less antithetic")
    for name in sorted(names, key=lambda name: name != "antithetic"):
        uniform = partial(_uniform, np.random.default_rng(arguments.seed), len(texts), texts.shape[1])
        on_gpu = device.type == "cuda"
        with evaluating(folder.model), torch.autocast(device.type, dtype=torch.bfloat16, enabled=on_gpu):
            log_weights = PROPOSALS[name](weigh, uniform, orders)
        parts = [math.log(k) - log_weights[:, :k].logsumexp(1) for k in (orders // 2, orders)]
        parts[0] = parts[0] * math.nan if name.startswith("late") else parts[0]
        found[name] = torch.stack(parts, 1) / texts.shape[1]
        line = f"{name:12s} " + " ".join(f"{value:9.4f}" for value in found[name].mean(0))
        if "antithetic" in found and name != "antithetic":
            pairs = (mean_and_stderr(part) for part in (found[name] - found["antithetic"]).T)
            line += "   " + "  ".join(f"{mean:+.4f} ± {error:.4f}" for mean, error in pairs)
        print(line, flush=True)


if __name__ == "__main__":
    sys.exit(command(__file__, Arguments, run))
