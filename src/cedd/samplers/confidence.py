"""Confidence orders: the masks of which the network is most confident are revealed first. Such a sampler has an exact
likelihood.

Shapes: B batch, L positions, V vocabulary; R masked positions.

Every step computes the network's outputs at all masks and reveals some of each sequence: the most confident ones, as
many as it takes to finish in `steps` steps, or all whose entropy is below a bound (and always one). The confidence,
from f at the position:

    probability    max_y f_y                  margin    the largest f_y less the second           entropy    -H(f)

with f as the network gives it, whatever the temperature and top-p by which tokens are drawn.

The time input of the network is the time at which the expected number of masks equals that of the sequence. Which
positions are revealed depends on the network's outputs only, so the order is deterministic given the tokens, and the
sampler has an exact likelihood (DUEL, arXiv 2603.01367): the product of f at the tokens, each where it was revealed. It
is the likelihood of this sampler, not of the diffusion process, whose bound may be larger or smaller.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import ClassVar, cast

import torch
from torch import Tensor

from cedd.methods import Method, get_method
from cedd.names import check_at_least_one
from cedd.network import AnyModel, Network, Places, evaluating, flat_places, put_at
from cedd.parameterization import at_token
from cedd.process import TokenProcess
from cedd.samplers.choice import Sharpening, check_excluded
from cedd.samplers.first_hitting import RevealSampler, check_reveals
from cedd.samplers.options import SamplingOptions
from cedd.samplers.random_numbers import Use
from cedd.samplers.sampler import SamplingRun


def _probability(log_probs: Tensor) -> Tensor:
    return log_probs.amax(-1).exp()


def _margin(log_probs: Tensor) -> Tensor:
    best, token = log_probs.max(-1, keepdim=True)  # twice: a sort of the vocabulary's two best takes many sweeps
    second = log_probs.scatter(-1, token, -torch.inf).amax(-1, keepdim=True)
    return (best.exp() - second.exp()).squeeze(-1)


def _negative_entropy(log_probs: Tensor) -> Tensor:
    return log_probs.exp().mul_(log_probs.nan_to_num(neginf=0.0)).sum(-1)


@dataclass(frozen=True)
class ConfidenceOrder(RevealSampler):
    """Reveals masks in the order of confidence. A subclass that overrides `chosen` may decide otherwise, for example
    reveal all positions above a threshold.

    Args:
        name: what the table and error messages call it.
        confidence: log f [R, V] -> [R], larger where the network is more confident.
        entropy_bound: reveal all masks whose entropy in nats is at most this, and the most confident one in any case;
            `steps` then has no effect.
    """

    name: str
    confidence: Callable[[Tensor], Tensor]
    entropy_bound: float | None = None
    unused: ClassVar[tuple[str, ...]] = ("grid", "corrector")

    def steps_taken(self, steps: int, length: int) -> int:
        return min(steps, length)

    def chosen(self, log_probs: Tensor, places: Tensor, masked: Tensor, steps_left: int) -> Tensor:
        """Which masks are revealed in this step, [B, L]. Ties are broken in favour of positions that are far apart.

        Args:
            log_probs: log f at the masks, [R, V].
            places: where they are in the flattened batch, [R].
            masked: the same as [B, L].
            steps_left: this one and those that follow.
        """

        def put(values: Tensor) -> Tensor:
            return put_at(values.new_zeros(masked.shape), places, values)

        apart = spread_out(masked.shape[1]).to(masked.device)
        known = put(self.confidence(log_probs)).masked_fill(~masked, -torch.inf)[:, apart]
        ranked = apart[torch.argsort(known, dim=1, descending=True, stable=True)]
        rank = torch.argsort(ranked, dim=1)
        if self.entropy_bound is not None:
            return masked & ((rank == 0) | (put(-_negative_entropy(log_probs)) <= self.entropy_bound))
        quota = -(-masked.sum(1, keepdim=True) // steps_left)
        return masked & (rank < quota)

    def sample(self, run: SamplingRun) -> Tensor:
        x = run.start(run.masks)  # the process would leave some tokens at t = 1
        run.show(0, 1.0, x)

        def drawn(step: int) -> Value:
            v = run.uniform(Use.TARGET, step).flatten()
            return lambda outputs, rows, now: run.draw_tokens(x, rows, outputs, now, v[rows[now]])

        def reveal(rows: Tensor, tokens: Tensor, step: int) -> None:
            nonlocal x
            x = put_at(x, rows, tokens)
            if run.callback is not None:
                run.show(step + 1, float((x == run.process.vocab_size).double().mean()), x)

        def beliefs(outputs: Tensor, rows: Tensor) -> Tensor:
            return run.log_marginals(x, rows, outputs)

        _in_order(run.network, run.process, lambda: x, self, run.steps, beliefs, drawn, reveal)
        return x


@cache
def spread_out(length: int) -> Tensor:
    """All positions [L] by their bit-reversed indices, so that positions early in the order are far apart. For a
    sequence of masks, a network may return the same distribution everywhere, and neighbours that are drawn in one step
    ignore each other.
    """
    bits = max(1, (length - 1).bit_length())
    return torch.tensor(sorted(range(length), key=lambda position: int(f"{position:0{bits}b}"[::-1], 2)))


CONFIDENCE_ORDERS: Mapping[str, ConfidenceOrder] = {
    order.name: order
    for order in (
        ConfidenceOrder("probability", _probability),
        ConfidenceOrder("margin", _margin),
        ConfidenceOrder("entropy", _negative_entropy),
    )
}


Value = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(outputs [M, V] at masks, their flat positions [M], which of them are revealed [C]) -> a value for each of those."""


def check_order(
    order: str | ConfidenceOrder, method: Method, process: TokenProcess, steps: int | None
) -> ConfidenceOrder:
    """The order by this name; raises a ValueError if its sampler has no likelihood."""
    method.check(process)
    if not method.dynamics.noisy:
        raise ValueError(f"{method.name} has the order of its text; its bound is its exact likelihood")
    if not isinstance(order, ConfidenceOrder) and order not in CONFIDENCE_ORDERS:
        raise ValueError(f"unknown order {order!r}; use one of {', '.join(CONFIDENCE_ORDERS)}, or a ConfidenceOrder")
    check_at_least_one("steps", steps)
    how = order if isinstance(order, ConfidenceOrder) else CONFIDENCE_ORDERS[order]
    check_reveals(how.name, method, process)
    return how


def order_nats(
    model: AnyModel, process: TokenProcess, data: Tensor, *, method: str | Method, options: SamplingOptions
) -> Tensor:
    """-log p(x) in nats of each sequence of data [B, L], [B] float64: the exact likelihood of the sampler that begins
    with masks only and reveals them in the order `options.sampler`. Infinite if it never draws the sequence.

    Which of equally confident masks is first is decided by rounding. A sequence's likelihood is therefore that of the
    sampler, and does not depend on the other sequences, only if both are deterministic.

    Args:
        model: any callable `(x_t [B, L], sigma [B]) -> [B, L, V]`.
        process: absorb.
        data: token ids.
        method: what the network's outputs mean.
        options: the sampler, a name of `CONFIDENCE_ORDERS` or a `ConfidenceOrder`, its steps (by default one per
            token), temperature, top_p, excluded tokens, and whether it is deterministic.
    """
    how, steps = options.sampler, options.steps
    assert isinstance(how, str | ConfidenceOrder)
    how = check_order(how, get_method(method), process, steps)
    if data.dim() != 2:
        raise ValueError(f"data must be sequences [B, L] (got {list(data.shape)})")
    process.check_tokens(data)
    network = Network.of(model, process.vocab_size, None, None, len(data)).reading(options.deterministic)
    x0 = data.to(network.device)
    x, nats = torch.full_like(x0, process.vocab_size), torch.zeros(len(x0), dtype=torch.float64, device=x0.device)
    temperature, top_p = (1.0 if value is None else value for value in (options.temperature, options.top_p))
    sharpening = Sharpening(temperature, top_p, check_excluded(options.exclude, process.vocab_size))

    def beliefs(outputs: Tensor, rows: Tensor) -> Tensor:
        del rows
        return sharpening.plain.log_probs(outputs)

    def cost(outputs: Tensor, rows: Tensor, now: Tensor) -> Tensor:
        return -at_token(sharpening.log_probs(outputs[now].double()), x0.flatten()[rows[now]])

    def reveal(rows: Tensor, costs: Tensor, step: int) -> None:
        nonlocal x
        del step
        nats.index_add_(0, rows // x.shape[1], costs)
        x = put_at(x, rows, x0.flatten()[rows])

    with evaluating(model):
        _in_order(network, process, lambda: x, how, steps or x0.shape[1], beliefs, lambda _: cost, reveal)
    network.check_outputs()
    return nats


def _in_order(
    network: Network,
    process: TokenProcess,
    state: Callable[[], Tensor],
    order: ConfidenceOrder,
    steps: int,
    beliefs: Callable[[Tensor, Tensor], Tensor],
    value: Callable[[int], Value],
    reveal: Callable[[Tensor, Tensor, int], None],
) -> None:
    """Until no mask is left, call reveal(rows [R], their values, step) for the masks that are revealed in this step.

    The confidence of every mask comes from the log-probabilities beliefs(outputs [M, V] float64, rows [M]), one chunk
    of whole sequences at a time. Only revealed positions are sharpened and drawn.
    """
    least, most = float(-torch.expm1(-process.alpha_just_after_zero)), float(process.kernel(1.0).a)
    step = 0
    while True:
        masked = (x := state()) == process.vocab_size
        counts = cast(list[int], masked.sum(1).tolist())  # pyright: ignore[reportUnknownMemberType]
        if not any(counts):
            return
        rows, ends = flat_places(masked), [*accumulate(counts)]
        share = masked.double().mean(1).clamp(least, most)  # a(t) = share
        outputs = network.rows(x, -torch.log1p(-share), Places(rows), full_precision=True)
        valued, places, values = value(step), list[Tensor](), list[Tensor]()
        for said, part in outputs.chunks(counts):
            first, last = bisect_right(ends, part.start), bisect_left(ends, part.stop) + 1
            local = rows[part] - first * x.shape[1]
            turn = order.chosen(beliefs(said.double(), rows[part]), local, masked[first:last], max(1, steps - step))
            now = flat_places(turn.flatten()[local])
            places.append(rows[part][now])
            values.append(valued(said, rows[part], now))
        reveal(torch.cat(places), torch.cat(values), step)
        step += 1
