"""Confidence orders: of the masks, those are revealed first of which the network is surest; and what such a sampler's
likelihood is, exactly.

Shapes: B batch, L positions, V vocabulary; R masked positions.

Every step asks the network about all masks and reveals some of each text: the surest, as many as make `steps` steps
come out, or all whose entropy is below a bound (and always one). How sure it is, by f at the position:

    probability    max_y f_y                  margin    the largest f_y less the second           entropy    -H(f)

with f as the network says it, whatever the temperature and top-p by which tokens are drawn.

The network is told the time at which as many masks are expected as the text has. Which positions are revealed depends
only on what the network says, so the order is deterministic given the tokens, and the sampler has an exact likelihood
(DUEL, arXiv 2603.01367): the product of f at the tokens, each where it was revealed. It is the likelihood of this
sampler, not of the diffusion process, whose bound may be larger or smaller.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import cast

import torch
from torch import Tensor

from cedd.dynamics.dynamics import Callback
from cedd.methods import Method, get_method
from cedd.network import AnyModel, Network, Places, evaluating, flat_places, put_at
from cedd.parameterization import at_token
from cedd.process import TokenProcess
from cedd.samplers.choice import Sharpening, inverse_cdf
from cedd.samplers.constraints import Constraint
from cedd.samplers.draws import Draws, Use
from cedd.samplers.first_hitting import check_reveals


def _probability(log_probs: Tensor) -> Tensor:
    return log_probs.amax(-1).exp()


def _margin(log_probs: Tensor) -> Tensor:
    best, token = log_probs.max(-1, keepdim=True)  # twice: a sort of the vocabulary's two best takes many sweeps
    second = log_probs.scatter(-1, token, -torch.inf).amax(-1, keepdim=True)
    return (best.exp() - second.exp()).squeeze(-1)


def _negative_entropy(log_probs: Tensor) -> Tensor:
    return log_probs.exp().mul_(log_probs.nan_to_num(neginf=0.0)).sum(-1)


@dataclass(frozen=True)
class Order:
    """In which order masks are revealed.

    Args:
        name: what the table and error messages call it.
        sureness: log f [R, V] -> [R], larger where the network is surer.
        entropy_bound: reveal all masks whose entropy in nats is at most this, and the surest in any case, instead of as
            many as make the steps come out; then `steps` says nothing.
    """

    name: str
    sureness: Callable[[Tensor], Tensor]
    entropy_bound: float | None = None

    def chosen(self, log_probs: Tensor, places: Tensor, masked: Tensor, steps_left: int) -> Tensor:
        """Which of the masks are revealed now, [B, L], of equally sure ones those that lie apart.

        Args:
            log_probs: log f at the masks, [R, V].
            places: where they are in the flattened batch, [R].
            masked: the same as [B, L].
            steps_left: this one and those that follow.
        """

        def put(values: Tensor) -> Tensor:
            return put_at(values.new_zeros(masked.shape), places, values)

        apart = spread_out(masked.shape[1]).to(masked.device)
        known = put(self.sureness(log_probs)).masked_fill(~masked, -torch.inf)[:, apart]
        ranked = apart[torch.argsort(known, dim=1, descending=True, stable=True)]
        rank = torch.argsort(ranked, dim=1)
        if self.entropy_bound is not None:
            return masked & ((rank == 0) | (put(-_negative_entropy(log_probs)) <= self.entropy_bound))
        quota = -(-masked.sum(1, keepdim=True) // steps_left)
        return masked & (rank < quota)


@cache
def spread_out(length: int) -> Tensor:
    """All positions, [L], in an order of which every beginning lies apart: by the reversed bits of their numbers.

    Of a text of masks a network may say the same everywhere, and neighbours drawn in one step do not see each other.
    """
    bits = max(1, (length - 1).bit_length())
    return torch.tensor(sorted(range(length), key=lambda position: int(f"{position:0{bits}b}"[::-1], 2)))


ORDERS: Mapping[str, Order] = {
    order.name: order
    for order in (Order("probability", _probability), Order("margin", _margin), Order("entropy", _negative_entropy))
}


Value = Callable[[Tensor, Tensor], Tensor]
"""(log f [R, V], sharpened; flat positions [R]) -> what these masks come to, [R]."""


def reveal_in_order(
    network: Network,
    process: TokenProcess,
    x: Tensor,
    order: Order,
    steps: int,
    sharpening: Sharpening,
    constraint: Constraint | None,
    draws: Draws,
    callback: Callback | None = None,
) -> Tensor:
    """Reveal all masks of x [B, L]."""
    x = constraint(x) if constraint is not None else x.clone()
    if callback is not None:
        callback(0, 1.0, x)

    def drawn(step: int) -> Value:
        v = draws.uniform(Use.TARGET, step).flatten().to(x.device)
        return lambda log_probs, rows: inverse_cdf(log_probs, v[rows], log=True)

    def reveal(rows: Tensor, tokens: Tensor, step: int) -> None:
        nonlocal x
        x = put_at(x, rows, tokens)
        if callback is not None:
            callback(step + 1, float((x == process.vocab_size).double().mean()), x)

    _in_order(network, process, lambda: x, order, steps, sharpening, drawn, reveal)
    return x


def check_order(order: str | Order, method: Method, process: TokenProcess, steps: int | None) -> Order:
    """The order meant; refused where a sampler by it has no likelihood to be asked for."""
    method.check(process)
    if not method.dynamics.noisy:
        raise ValueError(f"{method.name} has the order of its text; its bound is its exact likelihood")
    if not isinstance(order, Order) and order not in ORDERS:
        raise ValueError(f"unknown order {order!r}; use one of {', '.join(ORDERS)}, or an Order")
    if steps is not None and steps < 1:
        raise ValueError(f"steps must be at least 1; got {steps}")
    how = order if isinstance(order, Order) else ORDERS[order]
    check_reveals(how.name, method, process, None)
    return how


def order_nats(
    model: AnyModel,
    process: TokenProcess,
    data: Tensor,
    *,
    method: str | Method,
    order: str | Order = "probability",
    steps: int | None = None,
    temperature: float = 1.0,
    top_p: float = 1.0,
    deterministic: bool | None = None,
) -> Tensor:
    """-log p(x) in nats of each sequence of data [B, L], [B] float64: the exact likelihood of the sampler that begins
    with masks only and reveals them in this order.

    Args:
        model: any callable `(x_t [B, L], sigma [B]) -> [B, L, V]`.
        process: absorb.
        data: token ids.
        method: what the network's outputs mean.
        order: a name of `ORDERS`, or one of your own.
        steps: in how many steps all are revealed; by default one a token.
        temperature: the sampler's.
        top_p: the sampler's; what it cuts off has probability 0.
        deterministic: the sampler's. Of masks that are equally sure, rounding says which is first: so a sequence's
            likelihood is that of the sampler, and does not depend on the others, only if both read it alone.
    """
    how = check_order(order, get_method(method), process, steps)
    if data.dim() != 2:
        raise ValueError(f"data must be sequences [B, L]; got {list(data.shape)}")
    process.check_tokens(data)
    network = Network.of(model, process.vocab_size, None, None, len(data)).reading(deterministic)
    x0 = data.to(network.device)
    x, nats = torch.full_like(x0, process.vocab_size), torch.zeros(len(x0), dtype=torch.float64, device=x0.device)

    def pays(step: int) -> Value:
        del step
        return lambda log_probs, rows: -at_token(log_probs, x0.flatten()[rows])

    def reveal(rows: Tensor, cost: Tensor, step: int) -> None:
        nonlocal x
        del step
        nats.index_add_(0, rows // x.shape[1], cost)
        x = put_at(x, rows, x0.flatten()[rows])

    with evaluating(model):
        length = x0.shape[1]
        _in_order(network, process, lambda: x, how, steps or length, Sharpening(temperature, top_p), pays, reveal)
    network.check_outputs()
    return nats


def _in_order(
    network: Network,
    process: TokenProcess,
    state: Callable[[], Tensor],
    order: Order,
    steps: int,
    sharpening: Sharpening,
    value: Callable[[int], Value],
    reveal: Callable[[Tensor, Tensor, int], None],
) -> None:
    """Until no mask is left: reveal(rows [R], value(step) of them, step) of those whose turn it is.

    Every mask is judged, a chunk of whole texts at a time; only what is revealed is sharpened and drawn.
    """
    most = float(process.kernel(1.0).a)
    plain = Sharpening(excluded=sharpening.excluded)  # sharpened to the end, all beliefs are equally sure
    step = 0
    while True:
        masked = (x := state()) == process.vocab_size
        counts = cast(list[int], masked.sum(1).tolist())  # pyright: ignore[reportUnknownMemberType]
        if not any(counts):
            return
        rows, ends = flat_places(masked), [*accumulate(counts)]
        share = masked.double().mean(1).clamp_max(most)  # a(t) = share
        outputs = network.rows(x, -torch.log1p(-share), Places(rows), full_precision=True)
        valued, places, values = value(step), list[Tensor](), list[Tensor]()
        for said, part in outputs.chunks(counts):
            first, last = bisect_right(ends, part.start), bisect_left(ends, part.stop) + 1
            local = rows[part] - first * x.shape[1]
            turn = order.chosen(plain.log_probs(said.double()), local, masked[first:last], max(1, steps - step))
            now = flat_places(turn.flatten()[local])
            places.append(rows[part][now])
            values.append(valued(sharpening.log_probs(said[now].double()), places[-1]))
        reveal(torch.cat(places), torch.cat(values), step)
        step += 1
