"""Both sides of Theorems 1 to 4, by quadrature over t and by the learned reverse process as an ODE.

Everything is in nats for the whole sequence (not divided by L).
"""

import itertools
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from scipy.special import expit, logit

from tests.reference.chain import Array, Chain, Tokens, rate_matrix, solve_ode, transition
from tests.reference.information import bregman, constant_k, cross_entropy, entropy, generalised_kl, kl, score_entropy
from tests.reference.marginals import (
    Score,
    all_ratios,
    conditional,
    conditionals,
    marginal,
    point_mass,
    prior,
    rates_back,
    reverse_rate_matrix,
    scores_at,
    true_score,
)

# t = 1/(1+exp(-w)). In w the rates near both ends are of order one and log t is linear, so that the integrands of
# the paper, singular or nearly so at the ends of [0, 1], become smooth. exp(-40) is 4e-18.
END = 40.0
Loss = Callable[[Array, Array], Array]
"""loss(true ratio, learned ratio), entry by entry."""


class Sides(NamedTuple):
    """The two sides of an inequality left <= right, or of an identity."""

    left: float
    right: float

    @property
    def slack(self) -> float:
        """right - left."""
        return self.right - self.left


class Integrand(NamedTuple):
    """The parts of the bound's integrand at one (x0, x_t, t), one number for each position: [L] each."""

    score_entropy: Array
    constant: Array
    out_rate: Array


# ---- integrals over t ---------------------------------------------------------------------------------------


@lru_cache(maxsize=16)
def time_nodes(nodes: int = 256, breaks: tuple[float, ...] = ()) -> tuple[tuple[float, float], ...]:
    """(t, weight) of Gauss-Legendre quadrature in logit t over (0, 1), with `nodes` nodes between any two breaks.

    `breaks` are times at which the integrand has a kink.
    """
    points, weights = np.polynomial.legendre.leggauss(nodes)
    edges = [-END, *(float(logit(t)) for t in sorted(breaks)), END]
    result: list[tuple[float, float]] = []
    for low, high in itertools.pairwise(edges):
        for point, weight in zip(points, weights, strict=True):
            w = (low + high) / 2 + (high - low) / 2 * point
            # expit(-w) is 1 - t without the cancellation.
            result.append((float(expit(w)), float((high - low) / 2 * weight * expit(w) * expit(-w))))
    return tuple(result)


def integrate(f: Callable[[float], float], nodes: int = 256, breaks: Sequence[float] = ()) -> float:
    """The integral of f(t) over (0, 1)."""
    return float(sum(weight * f(t) for t, weight in time_nodes(nodes, tuple(breaks))))


def mean_loss(chain: Chain, distribution: Array, t: float, score: Score, loss: Loss) -> Array:
    """E_{x ~ p} sum_{i, y != x^i} Q_t(x^i, y) loss(p(y)/p(x), s_y) for any distribution p over chain.states; [*S] for
    several, [*S, n^L].

    Only pairs with Q_t(x^i, y) > 0 are visited: the score need not be defined elsewhere.
    """
    rates, chance = rates_back(chain, t), distribution[..., None, None]
    visited = chain.moves & (rates > 0) & (chance > 0)
    scores = np.broadcast_to(scores_at(chain, score, t), visited.shape)
    costs = np.zeros(visited.shape)
    costs[visited] = loss(all_ratios(chain, distribution)[visited], scores[visited])
    return (chance * rates * costs).sum((-3, -2, -1))


def loss_integral(
    chain: Chain, p0: Array, score: Score, loss: Loss, nodes: int = 256, breaks: Sequence[float] = ()
) -> float:
    """int E_{x_t ~ p_t} sum_y Q_t(x_t, y) loss(p_t(y)/p_t(x_t), s_y) dt, with the ratios of the marginals of p0."""
    return integrate(lambda t: float(mean_loss(chain, marginal(chain, p0, t), t, score, loss)), nodes, breaks)


def conditional_loss_integral(
    chain: Chain, p0: Array, score: Score, loss: Loss, nodes: int = 256, breaks: Sequence[float] = ()
) -> float:
    """int E_{x_0} E_{x_t | x_0} sum_y Q_t(x_t, y) loss(p(y|x_0)/p(x_t|x_0), s_y) dt."""
    known = p0 > 0  # data that never occur may cost infinitely much

    def at(t: float) -> float:
        return float(p0[known] @ mean_loss(chain, conditionals(chain, t)[known], t, score, loss))

    return integrate(at, nodes, breaks)


def out_rate_integral(chain: Chain, p0: Array, nodes: int = 256, breaks: Sequence[float] = ()) -> float:
    """int E_{x_t} sum_{y != x_t} Q_t(y, x_t) dt."""

    def at(t: float) -> float:
        rate = rate_matrix(chain, t)
        leaving = (rate - np.diag(np.diag(rate))).sum(0)  # [n], of one token
        return float(np.sum(marginal(chain, p0, t) * leaving[chain.tokens].sum(1)))

    return integrate(at, nodes, breaks)


def path_kl(chain: Chain, p0: Array, score: Score, nodes: int = 256, breaks: Sequence[float] = ()) -> float:
    """The path-space KL of the true reverse process from the learned one, without the term at t = 1.

    The generalised KL of the two rates out of x_t, averaged over p_t and integrated; 0 iff the rates agree.
    """
    ratio = true_score(chain, p0)

    def at(t: float) -> float:
        true, learned = reverse_rate_matrix(chain, ratio, t), reverse_rate_matrix(chain, score, t)
        here = marginal(chain, p0, t)
        others = ~np.eye(len(here), dtype=np.bool_) & (here > 0)
        weight = np.broadcast_to(here, others.shape)[others]
        return generalised_kl(weight * true[others], weight * learned[others])

    return integrate(at, nodes, breaks)


def integrand(chain: Chain, x0: Tokens, x: Tokens, t: float, scores: Array) -> Integrand:
    """The bound's integrand at one (x0, x_t = x, t) for scores [L, V], position by position.

    score_entropy = sum_y Q_t(x, y) (s_y - r_y log s_y), constant = sum_y Q_t(x, y) K(r_y), out_rate =
    sum_y Q_t(y, x), all over y != x, with r_y = p(y|x0)/p(x|x0).
    """
    token_rate, token = rate_matrix(chain, t), transition(chain, t)
    parts = Integrand(np.zeros(chain.length), np.zeros(chain.length), np.zeros(chain.length))
    for i in range(chain.length):
        for y in range(chain.num_states):
            if y == x[i]:
                continue
            parts.out_rate[i] += token_rate[y, x[i]]
            rate = token_rate[x[i], y]
            if rate > 0:
                r = token[y, x0[i]] / token[x[i], x0[i]]
                parts.score_entropy[i] += rate * score_entropy(r, float(scores[i, y]))
                parts.constant[i] += rate * constant_k(r)
    return parts


# ---- the learned reverse process ----------------------------------------------------------------------------


def learned_marginal(chain: Chain, score: Score, start: Array, t: float = 0.0, s: float = 1.0) -> Array:
    """The distribution over chain.states at time t of the learned reverse process that starts at s as `start`.

    It solves -dp/dt = Qbar_t p with Qbar_t(y, x) = Q_t(x, y) s(x, t)_y, in the variable logit t.
    """

    return _learned_marginal(chain, score, tuple(map(float, start)), t, s)


@lru_cache(maxsize=64)
def _learned_marginal(chain: Chain, score: Score, start: tuple[float, ...], t: float, s: float) -> Array:
    def slope(w: float, p: Array) -> Array:
        time, derivative = float(expit(w)), float(expit(w) * expit(-w))
        return -derivative * (reverse_rate_matrix(chain, score, time) @ p)

    high = END if s >= 1 else float(logit(s))
    low = -END if t <= 0 else float(logit(t))
    found = solve_ode(slope, high, low, np.array(start))
    found.setflags(write=False)
    return found


def learned_data(chain: Chain, score: Score, start: Array | None = None) -> Array:
    """p_0^theta over chain.clean. What is missing from a sum of one is left on masks at t = 0.

    `start` is the distribution over chain.states at t = 1: p_r unless given.
    """
    if start is None:
        start = prior(chain)
    end = learned_marginal(chain, score, start)
    return np.array([end[chain.place[x0]] for x0 in chain.clean])


def exact_cross_entropy(chain: Chain, p0: Array, score: Score, start: Array | None = None) -> float:
    """H(p_0, p_0^theta)."""
    return cross_entropy(p0, learned_data(chain, score, start))


# ---- the theorems -------------------------------------------------------------------------------------------


def theorem_1(chain: Chain, p0: Array, score: Score, start: Array | None = None, breaks: Sequence[float] = ()) -> Sides:
    """KL(p_0 || p_0^theta) <= int E_{p_t} sum Q_t l(p_t(y)/p_t(x), s_y) dt + KL(p_1 || p_r)."""
    start = prior(chain) if start is None else start
    learned = learned_data(chain, score, start)
    right = loss_integral(chain, p0, score, bregman, breaks=breaks) + kl(marginal(chain, p0, 1.0), start)
    return Sides(kl(p0, learned), right)


def theorem_2(
    chain: Chain, x0: Tokens, score: Score, start: Array | None = None, breaks: Sequence[float] = ()
) -> Sides:
    """-log p_0^theta(x0) <= int E_{x_t|x0} sum Q_t l(p(y|x0)/p(x|x0), s_y) dt + KL(p_{1|0} || p_r)."""
    start = prior(chain) if start is None else start
    alone = point_mass(chain, x0)
    right = loss_integral(chain, alone, score, bregman, breaks=breaks) + kl(conditional(chain, x0, 1.0), start)
    return Sides(cross_entropy(alone, learned_data(chain, score, start)), right)


def theorem_3(chain: Chain, p0: Array) -> Sides:
    """H(p_0) = H(p_1) - int E_{p_t} sum_y Q_t(x_t, y) K(p_t(y)/p_t(x_t)) dt, where y = x_t is part of the sum.

    At y = x_t, K(1) = -1 and Q_t(x_t, x_t) is minus the out-rate: the diagonal contributes the out-rate.
    """
    off_diagonal = loss_integral(chain, p0, true_score(chain, p0), lambda r, _: constant_k(r))
    diagonal = out_rate_integral(chain, p0)
    return Sides(entropy(p0), entropy(marginal(chain, p0, 1.0)) - off_diagonal - diagonal)


def theorem_4(chain: Chain, p0: Array, score: Score, start: Array | None = None, breaks: Sequence[float] = ()) -> Sides:
    """H(p_0, p_0^theta) <= int E_{p_t} sum Q_t l-bar dt - int E out-rate dt + H(p_1, p_r)."""
    start = prior(chain) if start is None else start
    right = (
        loss_integral(chain, p0, score, score_entropy, breaks=breaks)
        - out_rate_integral(chain, p0)
        + cross_entropy(marginal(chain, p0, 1.0), start)
    )
    return Sides(exact_cross_entropy(chain, p0, score, start), right)


# ---- the two bounds -----------------------------------------------------------------------------------------


def j1_integral(chain: Chain, p0: Array, score: Score, breaks: Sequence[float] = ()) -> float:
    """int E_{x_0, x_t} sum Q_t l(p(y|x_0)/p(x_t|x_0), s_y) dt: L times the paper's J1."""
    return conditional_loss_integral(chain, p0, score, bregman, breaks=breaks)


def j2_integral(chain: Chain, p0: Array, score: Score, breaks: Sequence[float] = ()) -> float:
    """int E_{x_0, x_t} sum Q_t l-bar(p(y|x_0)/p(x_t|x_0), s_y) dt: the part of J2 that needs the network."""
    return conditional_loss_integral(chain, p0, score, score_entropy, breaks=breaks)


def conditional_terminal_kl(chain: Chain, p0: Array, start: Array | None = None) -> float:
    """E_{x_0} KL(p_{1|0} || p_r), which the paper drops from J1."""
    start = prior(chain) if start is None else start
    return sum(
        float(probability) * kl(conditional(chain, x0, 1.0), start)
        for probability, x0 in zip(p0, chain.clean, strict=True)
    )


def conditional_terminal_entropy(chain: Chain, p0: Array) -> float:
    """E_{x_0} H(p_{1|0})."""
    return sum(
        float(probability) * entropy(conditional(chain, x0, 1.0))
        for probability, x0 in zip(p0, chain.clean, strict=True)
    )


def tight_bound(
    chain: Chain, p0: Array, score: Score, start: Array | None = None, breaks: Sequence[float] = ()
) -> Sides:
    """The same bound on H(p_0, p_0^theta) twice: as J1 (left) and as J2 (right), with the terminal terms kept."""
    start = prior(chain) if start is None else start
    as_j1 = j1_integral(chain, p0, score, breaks) + conditional_terminal_kl(chain, p0, start)
    as_j2 = (
        j2_integral(chain, p0, score, breaks)
        - out_rate_integral(chain, p0)
        + cross_entropy(marginal(chain, p0, 1.0), start)
    )
    return Sides(as_j1, as_j2)
