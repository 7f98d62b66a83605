"""The likelihood of a few positions given the others, exactly: a sum over all orders by a recursion over subsets.

Shapes: B sequences, L positions, b of them scored, C = 2^b - 1 contexts, V vocabulary; T noise levels. In block
diffusion K blocks of each sequence, of which M are scored together.

The first-hitting sampler reveals the b positions one at a time, each order with probability 1/b!. What a position costs
depends on the set S of those that are known, not on their order, so the sum over b! orders is one over 2^b sets. With
c_S[i] = f(x_i | x_S, the rest) and g(empty) = 1,

    g(S + i) += g(S) c_S[i] / (b - |S|)        for i not in S;        p = g(all).

For a time-conditioned network the reveal times matter as well. Position i is revealed at the level u_i a(1) of the
mask clock, u_i ~ U(0, 1), the largest first (bounds/importance.py). With h_S(u) the probability that the rest of the
text is written when the positions outside of S have levels below u,

    h_all = 1,        h_S(u) = integral from 0 to u of sum_i c_S[i](v) h_(S + i)(v) dv,        p = h_empty(1).

Where a schedule has sigma(0) > 0, positions with levels below r = a(0+) / a(1) are revealed together, at t = 0+. With
c_S[i](0+) the chances there,

    h_S(u) = r^(b - |S|) product of c_S[i](0+) over i not in S + integral from r to u of the same;

for a time-free network, g(S + i) += g(S) c_S[i] / (|S| + 1) is the mean over the orders of S, and

    p = sum over S of (1 - r)^|S| g(S) r^(b - |S|) product of c_S[i] over i not in S.

In block diffusion a text is written block by block, and its likelihood is the product of theirs, each given the clean
text before it. All blocks of a text in which the same positions are scored are evaluated at once, with the same S known
in each: 2^b - 1 passes for the whole text.

The integrals are taken at the Gauss nodes of sigma = -log(1 - u a(1)), in which networks are smooth, by interpolating
polynomials; the number of nodes doubles until the result changes by at most 1e-6 nats.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from cedd.block_layout import as_block_sequences
from cedd.bounds.drawing import parts_of
from cedd.bounds.importance import check_reveal_orders, level_at_zero, token_nats, tokens_at_once
from cedd.bounds.options import Progress
from cedd.device import model_device
from cedd.methods import Method, get_method, model_first
from cedd.names import check_at_least_one
from cedd.network import AnyModel, Network, Places, capabilities_of, evaluating
from cedd.process import TokenProcess

MOST_POSITIONS = 12
"""Positions whose orders are summed: 4,095 contexts."""
_NODES = (12, 24, 48, 96)
_STILL = 1e-6
"""Largest change of the likelihood, in nats, when the nodes are doubled for the last time."""


@model_first("cedd.exact_likelihood(model, process, x, positions, method=...)")
def exact_likelihood(
    model: AnyModel,
    process: TokenProcess,
    x: Tensor,
    positions: Sequence[int] | Tensor,
    *,
    method: str | Method,
    block: int | None = None,
    batch: int | None = None,
    device: torch.device | str | None = None,
    progress: Progress | None = None,
    **conditions: Tensor,
) -> Tensor:
    """-log p(x at the positions | the rest of x) in nats, [B] float64: the likelihood of the first-hitting sampler that
    starts with masks at these positions and reveals one per network call.

    It takes 2^b - 1 network evaluations per sequence for b positions. A time-conditioned network takes 36 to 180 times
    as many, because reveal times are integrated out to 1e-6 nats.

    Args:
        model: any callable `(x_t [B, L] int64, sigma [B] float32) -> [B, L, V]`.
        process: a process that only masks (absorb).
        x: token ids [B, L].
        positions: at most 12 of 0..L-1, the same for all sequences; in block diffusion at most 12 per block. In block
            diffusion, the rest is the text before a block and the other positions of the block.
        method: what the model's outputs mean.
        block: tokens per block, for block diffusion; by default that of the method.
        batch: evaluations per network call; by default chosen for the device.
        device: the device of the network; by default that of its parameters.
        progress: called with the number of evaluations done and the number known to be needed.
        conditions: other inputs of the network, one entry per sequence [B, ...].
    """
    chosen = get_method(method).in_blocks(block)
    check_reveal_orders(chosen, process)
    process.check_tokens(x)
    check_at_least_one("batch", batch)
    if x.dim() != 2 or 0 in x.shape:
        raise ValueError(f"x must be sequences [B, L], at least one of at least one token (got {list(x.shape)})")
    blocks = chosen.blocks_of(x.shape[1])
    parts = [Scored(which, places) for places, which in _same_places(positions, x.shape[1], blocks).items()]
    home = torch.device(model_device(model, x.device) if device is None else device)
    network = Network.of(model, process.vocab_size, home, conditions, len(x))
    clean = x.detach().to(device="cpu", dtype=torch.int64)
    if blocks > 1:
        network, clean = as_block_sequences(network, clean, blocks)
    texts = _Texts(network, clean.view(len(x), blocks, -1), batch or max(1, tokens_at_once(home) // x.shape[1]))
    texts.plan(sum(context_count(model, len(part.places)) for part in parts), progress)
    least, most = level_at_zero(process), float(process.noise(1.0).a)
    total = torch.zeros(len(x), dtype=torch.float64)
    with evaluating(model):
        for part in parts:
            total += _nats(texts, part, least, most, capabilities_of(model).time_conditioned)
    return total


def _nats(texts: _Texts, part: Scored, least: float, most: float, timed: bool) -> Tensor:
    """-log p of the scored positions, [B]; least and most are a(0+) and a(1)."""
    if not timed:
        costs = texts.context_nats(part, torch.full((1,), -math.log1p(-most)).double())
        return -_sum_over_orders(-costs[..., 0], least / most).view(len(texts.x), -1).sum(1)
    found, at_zero = None, torch.full((int(least > 0),), -math.log1p(-least)).double()
    for nodes in _NODES:
        sigma, before, at_end = _integration(nodes, least, most)
        costs = texts.context_nats(part, torch.cat([sigma, at_zero]))
        last, found = found, -_integrate(-costs, before, at_end, least / most)
        if last is not None and bool(torch.isclose(last, found, rtol=0.0, atol=_STILL).all()):
            return found.view(len(texts.x), -1).sum(1)
    raise ValueError(
        f"the likelihood is not smooth in the noise level: it still changes with {_NODES[-1]} times; use "
        "estimate_bound(bound='importance')"
    )


def context_count(model: object, positions: int) -> int:
    """Smallest number of network evaluations for the exact likelihood of this number of positions."""
    return (2**positions - 1) * (_NODES[0] + _NODES[1] if capabilities_of(model).time_conditioned else 1)


@dataclass(frozen=True)
class Scored:
    """The blocks [M] of each text in which the positions `places` [b] of a block are scored."""

    blocks: Sequence[int]
    places: tuple[int, ...]


def _same_places(
    positions: Sequence[int] | Tensor, length: int, blocks: int
) -> Mapping[tuple[int, ...], Sequence[int]]:
    """Maps each set of scored positions within a block to the blocks with that set. Raises a ValueError for invalid
    positions, or too many."""
    given = np.asarray(positions.cpu() if isinstance(positions, Tensor) else positions)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise ValueError(f"positions must be a list of integers, such as [3, 4] (got {positions})")
    scored = sorted(given.tolist())
    each, found = length // blocks, dict[tuple[int, ...], list[int]]()
    for number, here in groupby(scored, lambda position: position // each):
        found.setdefault(tuple(position % each for position in here), []).append(number)
    if not 1 <= (most := max(map(len, found), default=0)) <= MOST_POSITIONS:
        where = "" if blocks == 1 else " in a block"
        raise ValueError(
            f"the number of positions{where} must be 1 to {MOST_POSITIONS} (got {most}): the exact likelihood takes "
            "2^b network evaluations; for more use estimate_bound(bound='importance')"
        )
    if scored[0] < 0 or scored[-1] >= length or len(set(scored)) < len(scored):
        raise ValueError(f"positions must be distinct and in 0..{length - 1} (got {scored})")
    return found


@dataclass
class _Texts:
    """Texts as blocks x [B, K, b'], b' = L if there is one block, and the network of the blocks as sequences."""

    network: Network
    x: Tensor
    batch: int
    """Texts shown to the network at once."""
    progress: Progress | None = None
    planned: int = 0
    done: int = 0

    def plan(self, evaluations: int, progress: Progress | None) -> None:
        """Set the planned number of evaluations per text."""
        self.planned, self.progress = evaluations * len(self.x), progress

    def context_nats(self, part: Scored, sigma: Tensor) -> Tensor:
        """-log c_S[i] of every set S but all, [B M, C, b, T] for the levels sigma [T]; 0 where i is in S."""
        texts, blocks, each = self.x.shape
        places, chosen = torch.tensor(part.places), torch.tensor(part.blocks)
        size, scored = len(places), torch.zeros(blocks, dtype=torch.bool)
        scored[chosen] = True
        contexts, levels = 2**size - 1, len(sigma)
        known = (torch.arange(contexts)[:, None] >> torch.arange(size)) & 1 == 1  # [C, b]
        nats = torch.zeros(texts, blocks, contexts, levels, size, dtype=torch.float64)
        for passes in parts_of(texts * contexts * levels, self.batch):
            text, context, level = passes // (contexts * levels), passes // levels % contexts, passes % levels
            hidden = scored[None, :, None] & ~known[context][:, None]  # [R, K, b]
            x_t = self.x[text]
            x_t[:, :, places] = torch.where(hidden, self.network.vocab_size, x_t[:, :, places])
            row, block, number = hidden.nonzero(as_tuple=True)
            rows = (row * blocks + block) * each + places[number]
            found = self._token_nats(text, x_t, sigma[level], rows, self.x[text[row], block, places[number]])
            nats[text[row], block, context[row], level[row], number] = found
            self.done += len(passes)
            if self.progress is not None:
                self.progress(self.done, max(self.done, self.planned))
        self.network.check_outputs()
        return nats[:, chosen].flatten(0, 1).transpose(2, 3)

    def _token_nats(self, text: Tensor, x_t: Tensor, sigma: Tensor, rows: Tensor, targets: Tensor) -> Tensor:
        """-log f of the target tokens at flat rows of x_t [R, K, b'], at one level sigma [R] for each text."""
        blocks, device = x_t.shape[1], self.network.device
        sequences = (text[:, None] * blocks + torch.arange(blocks)).flatten()
        network, targets = self.network.of_sequences(sequences), targets.to(device)
        level, places = sigma.repeat_interleave(blocks).to(device), Places(rows.to(device))
        outputs = network.rows(x_t.flatten(0, 1).to(device), level, places, full_precision=True)
        return outputs.map(lambda said, some: token_nats(said, targets[some])).cpu()


def _by_size(size: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(i, sets without i, the same with i), small sets first, of b = size positions."""
    sets = torch.arange(2**size)
    counts = sum((sets >> i) & 1 for i in range(size))
    for known in range(size):
        for i in range(size):
            without = sets[(counts == known) & ((sets >> i) & 1 == 0)]
            yield i, without, without | (1 << i)


def _sizes(size: int) -> Tensor:
    """|S| of every set of b = size positions, [2^b] float64: integers times a Python float would be float32."""
    return torch.tensor([known.bit_count() for known in range(2**size)], dtype=torch.float64)


def _sum_over_orders(log_chances: Tensor, together: float = 0.0) -> Tensor:
    """log p of the head's recursion, from log c_S[i] [B, C, b], 0 where i is in S, and r: [B]."""
    count, _, size = log_chances.shape
    total = torch.full((count, 2**size), -math.inf, dtype=torch.float64)
    total[:, 0] = 0.0
    known = _sizes(size)
    ways = size - known if together == 0 else known + 1
    for i, without, with_it in _by_size(size):
        gained = total[:, without] + log_chances[:, without, i] - ways[without].log()
        total[:, with_it] = torch.logaddexp(total[:, with_it], gained)
    if together == 0:
        return total[:, -1]
    ends = known * math.log1p(-together) + (size - known) * math.log(together)
    return (total + ends + torch.nn.functional.pad(log_chances.sum(2), (0, 1))).logsumexp(1)


def _integrate(log_chances: Tensor, before: Tensor, at_end: Tensor, together: float = 0.0) -> Tensor:
    """log p of the head's integrals, from log c_S[i] at T nodes (and at 0+ if r > 0) [B, C, b, T], and r: [B].

    Chances are taken relative to the largest of their position, so that products of small ones do not underflow.
    """
    count, _, size, _ = log_chances.shape
    unknown = torch.tensor([[not known >> i & 1 for i in range(size)] for known in range(2**size - 1)])
    largest = log_chances.masked_fill(~unknown[None, :, :, None], -math.inf).amax((1, 3))  # [B, b]
    largest = torch.where(largest.isfinite(), largest, 0.0)
    chances = (log_chances - largest[:, None, :, None]).exp()
    at_zero = torch.zeros(count, 2**size - 1, dtype=torch.float64)
    if together > 0:
        left = size - _sizes(size)[:-1]
        at_zero = together**left * torch.where(unknown, chances[..., -1], 1.0).prod(2)
        chances = chances[..., :-1]
    integral = torch.ones(count, 2**size, len(at_end), dtype=torch.float64)
    for known in range(2**size - 2, -1, -1):
        others = [i for i in range(size) if not known >> i & 1]
        slope = sum(chances[:, known, i] * integral[:, known | 1 << i] for i in others)
        assert isinstance(slope, Tensor)
        if known == 0:
            return (at_zero[:, 0] + slope @ at_end).log() + largest.sum(1)
        integral[:, known] = at_zero[:, known, None] + slope @ before.T
    raise AssertionError


def _integration(nodes: int, least: float, most: float) -> tuple[Tensor, Tensor, Tensor]:
    """sigma at the nodes [T]; [T, T], integrals of du from r to each node, and [T], to 1, of values at the nodes."""
    points, _ = np.polynomial.legendre.leggauss(nodes)
    start, end = -math.log1p(-least), -math.log1p(-most)
    # Polynomials of degree T - 1 through values at the nodes, as Legendre series, and their integrals from -1.
    series = np.linalg.inv(np.polynomial.legendre.legvander(points, nodes - 1))
    integrals = np.polynomial.legendre.legint(series, lbnd=-1)
    sigma = start + (points + 1) / 2 * (end - start)
    du = np.exp(-sigma) / most * (end - start) / 2
    before = np.polynomial.legendre.legval(points, integrals).T * du
    at_end = np.polynomial.legendre.legval(1.0, integrals) * du
    return torch.as_tensor(sigma), torch.as_tensor(before), torch.as_tensor(at_end)
