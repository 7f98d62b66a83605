"""The importance-weighted bound: an upper bound on -log p(x) under the first-hitting sampler, from K random orders.

Shapes: N sequences, L positions, K orders per sequence, V vocabulary; P pairs of a sequence and an order. In block
diffusion each sequence has G blocks with separate orders, which take the place of sequences below.

On a process that only masks, the first-hitting sampler (samplers/first_hitting.py) draws u_i ~ U(0, 1) for every
position of a fully masked text and reveals position i at the time with a(t_i) = u_i a(1), the largest u first. Its
distribution is a mixture over u, that is, over orders and, for a time-conditioned network, over times:

    p(x) = E_u [w],        w(x, u) = prod_i f(x_i | positions with a larger u, sigma(t_i)).

For independent draws u_1, ..., u_K,

    -E log 1/K sum_k w(x, u_k)  >=  -log p(x)

by Jensen's inequality: the negative ELBO of the sampler for K = 1, decreasing in K, exact in the limit (Burda, Grosse
and Salakhutdinov 2016; over orders: Sahoo et al. 2025, arXiv 2506.01928). Every u is paired with the antithetic 1 - u,
the reversed order. Both have the right distribution, so the bound holds, and their mean has a smaller variance.

A schedule with sigma(0) > 0 masks a share a(0+) of the tokens immediately. The sampler draws all positions whose level
is below a(0+) in one call at t = 0+, and so do the weights.

The bound holds in expectation: the value of a single sequence can lie below -log p(x), and the interval is that of the
mean over sequences. It applies to the first-hitting sampler that starts from masks only and reveals one position per
network call, not to samplers that reveal several positions at once.

The same weights also give a lower bound on -log p (TUBE, arXiv 2605.24292). For any psi > 0 that is independent of an
unbiased estimate p' of p, log p <= log psi + E p' / psi - 1, since log r <= r - 1. Here psi and p' are the mean weights
of the two halves of the orders, in both roles. If a few orders have most of the weight, the mean of p' / psi depends on
rare draws, and its estimate is too low: `informative` is then False.

f is softmax(outputs) at a mask. For networks that output ratios (sedd, sedds), f is the ratios at the mask divided by
their sum, which is the distribution of a sampler that draws the token from them at the process's own reveal times. The
network's own reveal rate, the sum of the ratios, is not used.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cedd.block_layout import as_block_sequences
from cedd.bounds.estimate import BoundEstimate, cannot_narrow, is_within, mean_and_stderr
from cedd.bounds.options import BoundOptions, Progress
from cedd.bounds.order_weights import OrderWeights, WeightFile
from cedd.device import model_device
from cedd.methods import Method
from cedd.network import AnyModel, Network, Places, capabilities_of, evaluating
from cedd.parameterization import Affine
from cedd.process import TokenProcess
from cedd.row_sums import at_token, log_sum_exp

ORDERS = 64
"""Default number of orders per sequence."""
MOST_ORDERS = 4096
"""Default limit on the number of orders with a tolerance or a time limit."""
_FEW_SEQUENCES = 8
_ENOUGH_ORDERS = 10.0
"""Smallest effective sample size at which the mean of p' / psi is reliable."""
_TOKENS_AT_ONCE = 2048
"""Tokens per network call on devices other than GPUs."""


@dataclass(frozen=True)
class TwoSidedEstimate:
    """A lower and an upper bound on -log p, in expectation; nats per token.

    Args:
        at_least: the lower bound, the mean of `per_sequence`.
        at_least_stderr: its standard error over sequences.
        at_most: the upper bound, which is the importance-weighted bound.
        at_most_stderr: its standard error.
        per_sequence: the lower bound of each sequence, [N] float64.
        least_effective_sample_size: the smallest effective sample size of a sequence.
        informative: whether every sequence has an effective sample size of at least 10. Otherwise the lower bound is
            far from the true value, and its estimate is not reliable.
    """

    at_least: float
    at_least_stderr: float
    at_most: float
    at_most_stderr: float
    per_sequence: Tensor
    least_effective_sample_size: float
    informative: bool


@dataclass(frozen=True, kw_only=True)
class ImportanceEstimate(BoundEstimate):
    """The importance-weighted bound of a model on data.

    Args:
        log_weights: log w of every order, [N, K] float64; in block diffusion of every order of a block, [N, G, K].
        per_token: -log f of each token when it is revealed, averaged over orders, [N, L] float64. The sum is the bound
            for K = 1.
    """

    log_weights: Tensor
    per_token: Tensor

    @property
    def orders(self) -> int:
        """K."""
        return self.log_weights.shape[-1]

    @property
    def by_orders(self) -> dict[int, float]:
        """Nats per token for 1, 2, 4, ... and K orders. The value for k orders is the mean over all disjoint groups of
        k orders, an unbiased estimate of the bound for k that uses all orders."""
        return {orders: self.of_orders(orders).nats_per_token for orders in nested_orders(self.orders)}

    @property
    def effective_sample_size(self) -> float:
        """(sum w)^2 / sum w^2, from 1 to K; the mean over sequences (or blocks) with nonzero probability."""
        return float(self._effective_sample_sizes.nanmean())

    @property
    def _effective_sample_sizes(self) -> Tensor:
        shares = torch.log_softmax(self.log_weights, -1)
        return torch.logsumexp(2 * shares, -1).neg().exp()

    @property
    def log_weight_variance(self) -> float:
        """The variance of log w over the orders of a sequence or a block (NaN for one order); the mean over them."""
        return float(self.log_weights.var(-1).mean()) if self.orders > 1 else math.nan

    def two_sided(self) -> TwoSidedEstimate:
        """Bounds on -log p from both sides, in nats per token; four orders are the fewest."""
        pairs = self.orders // 4  # a half has whole antithetic pairs, so that the halves are independent
        if pairs < 1:
            raise ValueError(f"a lower bound needs at least 4 orders (got {self.orders})")
        first, second = (-_negative_log_means(self.log_weights[..., : 4 * pairs], 2 * pairs)).unbind(-1)
        ratio = second - first
        above = (first + second) / 2 + torch.cosh(ratio) - 1  # the mean over both roles
        below = -above.reshape(len(above), -1).sum(1) / self.length
        mean, error = mean_and_stderr(below)
        least = float(self._effective_sample_sizes.min())
        return TwoSidedEstimate(mean, error, self.nats_per_token, self.stderr, below, least, least >= _ENOUGH_ORDERS)

    def of_orders(self, orders: int) -> BoundEstimate:
        """The bound for a number of orders that divides K, with its errors, from the same weights."""
        if orders < 1 or self.orders % orders:
            raise ValueError(f"the number of orders must divide {self.orders} (got {orders})")
        return _estimate(self.log_weights, orders, self.length, self.fixed_set)


def nested_orders(orders: int) -> list[int]:
    """The powers of two that divide K, and K itself."""
    powers = [1 << power for power in range(orders.bit_length()) if orders % (1 << power) == 0]
    return sorted({*powers, orders})


def importance_bound(
    model: AnyModel,
    process: TokenProcess,
    data: Tensor,
    method: Method,
    options: BoundOptions,
    conditions: Mapping[str, Tensor],
    antithetic: bool = True,
) -> ImportanceEstimate:
    """The importance-weighted bound on data [N, L], in nats per token: the arguments of `cedd.estimate_bound`.

    It costs K L network evaluations per sequence for K orders, or K b in blocks of b tokens; fewer for short sequences
    and networks without time conditioning, since orders share contexts. The orders of a sequence
    depend only on the generator and on the place of the sequence in the data.

    antithetic: draw orders in pairs, each the reverse of the other.
    """
    check_reveal_orders(method, process)
    process.check_tokens(data)
    if data.dim() != 2 or 0 in data.shape:
        raise ValueError(f"data must be sequences [N, L], at least one of at least one token (got {list(data.shape)})")
    generator, tolerance, seconds = options.generator, options.tolerance, options.seconds
    adapts = tolerance is not None or seconds is not None
    most = options.orders or (MOST_ORDERS if adapts else ORDERS)
    home = torch.device(model_device(model, data.device) if options.device is None else options.device)
    network = Network.of(model, process.vocab_size, home, conditions, len(data))
    clean = data.detach().to(device="cpu", dtype=torch.int64)
    batch = options.batch or max(1, tokens_at_once(home) // data.shape[1])
    seed = int(torch.randint(2**62, (1,), generator=generator, device=generator.device if generator else "cpu"))
    blocks = method.blocks_of(data.shape[1])
    if blocks > 1:
        network, clean = as_block_sequences(network, clean, blocks)
    rows, width = clean.shape
    weights = OrderWeights.none(rows, width)
    if options.checkpoint is not None:
        described: dict[str, object] = {"seed": seed, "antithetic": antithetic, "blocks": blocks, "method": method.name}
        described["data"] = _digest(clean)
        described["conditions"] = {name: _digest(value) for name, value in conditions.items()}
        weights = options.checkpoint.load(described, rows, width, most)
    work = _Weighing(network, process, clean, blocks, seed, antithetic, batch, options.progress, options.checkpoint)
    goal = min(most, max(2, weights.complete)) if adapts else most
    goal = weights.log_weights.shape[1] if weights.passes else goal  # a round that was interrupted is finished first
    started = time.monotonic()
    with evaluating(model):
        while True:
            work.extend(weights, goal)
            found = _settled(weights, len(data), data.shape[1], blocks, options.fixed_set)
            reached = tolerance is None or is_within(found, tolerance)
            late = seconds is not None and 2 * (time.monotonic() - started) > seconds
            if goal >= most or late or (tolerance is not None and (reached or cannot_narrow(found))):
                return replace(found, reached=reached)
            goal = min(2 * goal, most) if adapts else most


def _digest(values: Tensor) -> str:
    return hashlib.sha256(values.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def _settled(weights: OrderWeights, texts: int, length: int, blocks: int, fixed_set: bool) -> ImportanceEstimate:
    """The estimate from complete orders."""
    log_weights, per_token = weights.log_weights, weights.nats / weights.complete
    if blocks > 1:
        log_weights, per_token = log_weights.view(texts, blocks, -1), per_token.view(texts, length)
    found = _estimate(log_weights, weights.complete, length, fixed_set)
    return ImportanceEstimate(**vars(found), log_weights=log_weights, per_token=per_token)


def check_reveal_orders(method: Method, process: TokenProcess) -> None:
    """Raise a ValueError for methods and processes that the first-hitting sampler does not support."""
    method.check(process)
    if not method.dynamics.noisy:
        raise ValueError(f"the likelihood of {method.name} is exact; use bound='tight'")
    if not process.has_mask or process.can_shuffle:
        raise ValueError(
            "importance-weighted and exact likelihoods need a process on which a revealed token never changes "
            "(absorb); use bound='tight'"
        )


def first_hitting_law(method: Method) -> str:
    """Description of the sampler whose likelihood `importance` bounds."""
    law = "the first-hitting sampler, which starts from masks only and reveals one position per network call"
    if isinstance(method.parameterization, Affine):
        return law
    return f"{law}, drawn from the ratios at its mask divided by their sum"


def reveal_levels(seed: int, sequence: int, orders: int, length: int, antithetic: bool = True) -> Tensor:
    """u [K, L] of one sequence. The first k rows do not depend on K."""
    numbers = np.random.default_rng((seed, sequence))
    if not antithetic:
        return torch.as_tensor(numbers.random((orders, length)))
    u = torch.as_tensor(numbers.random((-(-orders // 2), length)))
    return torch.stack([u, 1 - u], 1).flatten(0, 1)[:orders]


@dataclass(frozen=True)
class _Weighing:
    """State shared by all rounds of orders: data [R, L] in groups of G rows, which a pass evaluates with one order
    each."""

    network: Network
    process: TokenProcess
    data: Tensor
    group: int
    seed: int
    antithetic: bool
    batch: int
    progress: Progress | None
    file: WeightFile | None

    def extend(self, weights: OrderWeights, orders: int) -> None:
        """Compute the weights of further orders, up to this number."""
        count, length = self.data.shape
        texts, new = count // self.group, orders - weights.complete
        least, most = level_at_zero(self.process), float(self.process.noise(1.0).a)
        known, done = dict[int, Tensor](), (weights.complete * texts + weights.passes) * length
        weights.grow(orders)

        def report(evaluations: int) -> None:
            nonlocal done
            done += evaluations // self.group
            if self.progress is not None:
                self.progress(done, texts * orders * length)

        for start in range(weights.passes, texts * new, self.batch):
            passes = torch.arange(start, min(start + self.batch, texts * new))
            rows = (passes[:, None] // new * self.group + torch.arange(self.group)).flatten()
            order = (weights.complete + passes % new).repeat_interleave(self.group)
            here = range(int(rows[0]), int(rows[-1]) + 1)
            known = {n: known[n] if n in known else self._levels(n, orders) for n in here}
            levels = torch.stack([*known.values()])[rows - here[0], order]
            nats = pair_nats(self.network.of_sequences(rows), self.data[rows], most * levels, report, least)
            weights.log_weights[rows, order] = -nats.sum(1)
            weights.nats.index_add_(0, rows, nats)
            weights.passes = start + len(passes)
            if self.file is not None:
                self.file.save(weights)
        weights.complete, weights.passes = orders, 0
        if self.file is not None:
            self.file.save(weights, final=True)

    def _levels(self, row: int, orders: int) -> Tensor:
        return reveal_levels(self.seed, row, orders, self.data.shape[1], self.antithetic)


def level_at_zero(process: TokenProcess) -> float:
    """a(0+): the share of tokens that a schedule with sigma(0) > 0 masks immediately; otherwise 0."""
    return -math.expm1(-float(process.alpha_just_after_zero)) if process.jumps_at_zero else 0.0


def pair_nats(
    network: Network, x0: Tensor, reached: Tensor, report: Callable[[int], None], least: float = 0.0
) -> Tensor:
    """-log f of every token when it is revealed, [P, L] float64 on the host.

    Orders of a text that have revealed the same positions share a network evaluation, if it does not depend on time.

    Args:
        network: the network for these sequences.
        x0: the tokens, [P, L].
        reached: a(t) at the reveal time of every position, [P, L] float64; the largest is revealed first.
        report: called after each step with its number of pairs.
        least: a(0+). Positions with a lower value are revealed together, at t = 0+.
    """
    (pairs, length), device = x0.shape, network.device
    order = reached.argsort(dim=1, descending=True)
    levels, tokens = reached.gather(1, order), x0.gather(1, order)
    sigma = -torch.log1p(-levels.clamp_min(least))
    shown = torch.where(levels > least, tokens, network.vocab_size)  # for the following calls
    places = torch.arange(pairs)[:, None] * length + order
    steps = (part.T.contiguous().to(device) for part in (places, tokens, shown, sigma))
    keys = _context_keys(order, tokens, levels > least) if _shares_contexts(network) else places // length
    flat = torch.full((pairs * length,), network.vocab_size, device=device)
    terms: list[Tensor] = []
    for call, rows, targets, seen, level in zip(_calls(keys, order, device), *steps, strict=True):
        x_t = flat.view(pairs, length).index_select(0, call.contexts)
        places, targets = Places(call.rows), targets.index_select(0, call.asked)
        outputs = network.rows(x_t, level.index_select(0, call.contexts), places, full_precision=True)
        nats = outputs.map(lambda said, part, targets=targets: token_nats(said, targets[part]))
        terms.append(nats.index_select(0, call.answers))
        flat = flat.index_copy(0, rows, seen)
        report(pairs)
    network.check_outputs()
    return torch.empty(pairs, length, dtype=torch.float64).scatter_(1, order, torch.stack(terms, 1).cpu())


class _StepCall(NamedTuple):
    """A network call for one step of all pairs."""

    contexts: Tensor
    """[C], a pair for each context."""
    asked: Tensor
    """[R], a pair for each position of a context that is revealed."""
    rows: Tensor
    """[R], these positions in the flattened batch of contexts [C * L]."""
    answers: Tensor
    """[P], the place of each pair in [R]."""


def _calls(keys: Tensor, order: Tensor, device: torch.device) -> list[_StepCall]:
    """The calls of all steps, in one transfer to the device, from keys of the contexts and the order [P, L]."""
    parts: list[Tensor] = []
    for key, position in zip(keys.T.numpy(), order.T.numpy(), strict=True):
        _, contexts, context = np.unique(key, return_index=True, return_inverse=True)
        rows, asked, answers = np.unique(context * len(keys.T) + position, return_index=True, return_inverse=True)
        parts += [torch.as_tensor(part) for part in (contexts, asked, rows, answers)]
    on_device = torch.cat(parts).to(device).tensor_split(np.cumsum([len(part) for part in parts])[:-1].tolist())
    return [_StepCall(*on_device[start : start + 4]) for start in range(0, len(parts), 4)]


def _shares_contexts(network: Network) -> bool:
    """Whether the outputs depend on x_t alone."""
    timed = capabilities_of(network.model).time_conditioned
    return not timed and network.conditions is None and network.only is None


def _context_keys(order: Tensor, tokens: Tensor, known: Tensor) -> Tensor:
    """Hashes [P, L] of each text and the positions that are known before each step: sums of 64-bit numbers, which
    differ with a probability of 1 - 2^-64 where these differ."""
    text = _mixed(_mixed(order << 32 | tokens).sum(1, keepdim=True))
    reveals = torch.where(known, _mixed(order), 0).cumsum(1)
    return text + torch.nn.functional.pad(reveals, (1, -1))


def _mixed(numbers: Tensor) -> Tensor:
    """splitmix64."""
    numbers = numbers - 7046029254386353131
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        numbers = (numbers ^ (numbers >> shift)) * factor
    return numbers ^ (numbers >> 31)


def token_nats(outputs: Tensor, tokens: Tensor) -> Tensor:
    """-log softmax(outputs) at the tokens: [R, V] -> [R] float64."""
    return log_sum_exp(outputs) - at_token(outputs, tokens).double()


def tokens_at_once(device: torch.device) -> int:
    """Tokens per network call; on a GPU one per MiB of its memory."""
    if device.type != "cuda":
        return _TOKENS_AT_ONCE
    _, total = torch.cuda.mem_get_info(device)
    return total >> 20


def _estimate(log_weights: Tensor, orders: int, length: int, fixed_set: bool) -> BoundEstimate:
    """The bound for groups of `orders` of the weights [N, K].

    The Monte Carlo error for these sequences is estimated from the variance over the groups of a sequence. With a
    single group, it is estimated from its halves, or from its eighths if there are few sequences. This overestimates
    it, because more orders have a smaller variance.
    """
    count, available = len(log_weights), log_weights.shape[-1]
    groups = available // orders
    values = _nats_of_texts(log_weights, orders) / length  # [N, groups]
    per_sequence = values.mean(1)
    mean, error = mean_and_stderr(per_sequence)
    parts = 8 if count < _FEW_SEQUENCES and orders >= 16 else 2
    apart = values if groups > 1 else _nats_of_texts(log_weights, max(1, orders // parts)) / length
    # With an odd number of orders, the last one is not used.
    variance = float(apart.var(1).mean()) / groups / count if apart.shape[1] > 1 else math.nan
    return BoundEstimate(
        bound="importance",
        nats_per_token=mean,
        per_sequence=per_sequence,
        sequence_stderr=error,
        monte_carlo_stderr=math.sqrt(variance),
        monte_carlo_freedom=count * (apart.shape[1] - 1),
        fixed_set=fixed_set or count < 2,
        terminal=0.0,
        evaluations=count * available * length // (log_weights.shape[1] if log_weights.dim() == 3 else 1),
        draws=orders,
        length=length,
        why_infinite="the network gives a text probability zero" if math.isinf(mean) else None,
    )


def _negative_log_means(log_weights: Tensor, orders: int) -> Tensor:
    """-log of the mean weight of each group of `orders` orders: [..., K] -> [..., K // orders]."""
    groups = log_weights.shape[-1] // orders
    grouped = log_weights[..., : groups * orders].reshape(*log_weights.shape[:-1], groups, orders)
    return math.log(orders) - torch.logsumexp(grouped, -1)


def _nats_of_texts(log_weights: Tensor, orders: int) -> Tensor:
    """The same of whole texts, the sums of those of their blocks: [N, K // orders]."""
    nats = _negative_log_means(log_weights, orders)
    return nats.sum(1) if nats.dim() == 3 else nats
