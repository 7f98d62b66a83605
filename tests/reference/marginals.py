"""Exact quantities of the noisy data: marginals, ratios, posteriors, beliefs, and the exact reverse process.

A data distribution p0 is a vector over chain.clean, a marginal p_t a vector over chain.states.
A score is a callable (x, t) -> [L, V]: s[i, y] stands for p_t(x with y at i) / p_t(x). Only tokens y appear, since no
process of the paper ever leaves the mask forwards; the entry at y = x[i] is never used.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from tests.reference.chain import Array, Chain, Tokens, product_transition, rate_matrix, transition

Score = Callable[[Tokens, float], Array]


def random_data(chain: Chain, generator: np.random.Generator, sharpness: float = 1.0) -> Array:
    """A random p0 with all entries positive."""
    weights = np.exp(sharpness * generator.standard_normal(len(chain.clean)))
    return weights / weights.sum()


def point_mass(chain: Chain, x0: Tokens) -> Array:
    """The p0 that always yields x0."""
    p0 = np.zeros(len(chain.clean))
    p0[chain.clean.index(tuple(x0))] = 1.0
    return p0


# ---- marginals and ratios -----------------------------------------------------------------------------------


def conditional(chain: Chain, x0: Tokens, t: float) -> Array:
    """p(x_t | x_0) over chain.states."""
    token, result = transition(chain, t), np.ones(1)
    for i in range(chain.length):
        result = np.outer(result, token[:, x0[i]]).ravel()
    return result


@lru_cache(maxsize=8192)
def conditionals(chain: Chain, t: float) -> Array:
    """`conditional` for every x_0, [V^L, n^L] (read-only: it is cached)."""
    token, result = transition(chain, t)[:, : chain.vocab_size].T, np.ones((1, 1))
    for _ in range(chain.length):
        result = np.einsum("ax,by->abxy", result, token).reshape(len(result) * len(token), -1)
    result.setflags(write=False)
    return result


def marginal(chain: Chain, p0: Array, t: float) -> Array:
    """p_t(x) = sum_x0 p_0(x0) p(x | x0) over chain.states, summed over one position of x0 after the other."""
    token = transition(chain, t)[:, : chain.vocab_size]
    result = np.reshape(p0, (chain.vocab_size,) * chain.length)
    for _ in range(chain.length):
        result = np.tensordot(result, token, (0, 1))
    return result.ravel()


def ratios(chain: Chain, distribution: Array, x: Tokens) -> Array:
    """p(x with y at i) / p(x) for any distribution over chain.states, [L, V]; 0 where p(x) = 0."""
    here = distribution[chain.place[x]]
    if here == 0:
        return np.zeros((chain.length, chain.vocab_size))
    return distribution[chain.neighbours[chain.place[x]]] / here


def true_score(chain: Chain, p0: Array) -> Score:
    """The score p_t(y) / p_t(x) of the data distribution p0."""
    return at_each_time(chain, lambda t: all_ratios(chain, marginal(chain, p0, t)))


def conditional_score(chain: Chain, x0: Tokens) -> Score:
    """The score p(y | x0) / p(x | x0): the true score of data that are always x0."""
    return true_score(chain, point_mass(chain, x0))


@dataclass(frozen=True)
class TableScore:
    """A score from t -> [n^L, L, V], all states at once, in the order of chain.states."""

    chain: Chain
    table: Callable[[float], Array]

    def __call__(self, x: Tokens, t: float) -> Array:
        return self.table(t)[self.chain.place[x]]


def at_each_time(chain: Chain, table: Callable[[float], Array]) -> Score:
    """A score from a table of all states, cached per time."""
    return TableScore(chain, lru_cache(maxsize=2048)(table))


def random_score(chain: Chain, generator: np.random.Generator, size: float = 1.0) -> Score:
    """A positive score that is unrelated to the data: exp of a random, smooth function of x and t."""
    shape = (len(chain.states), chain.length, chain.vocab_size)
    level, slope, phase = (size * generator.standard_normal(shape) for _ in range(3))

    return at_each_time(chain, lambda t: np.exp(level + slope * np.sin(2 * t + phase)))


def all_ratios(chain: Chain, distribution: Array) -> Array:
    """`ratios` at every state, [n^L, L, V]; of several distributions [*S, n^L] at once, [*S, n^L, L, V]."""
    here, others = distribution[..., None, None], distribution[..., chain.neighbours]
    return np.divide(others, here, out=np.zeros_like(others), where=here > 0)


def scores_at(chain: Chain, score: Score, t: float) -> Array:
    """A score at every state, [n^L, L, V]."""
    return score.table(t) if isinstance(score, TableScore) else np.stack([score(x, t) for x in chain.states])


@lru_cache(maxsize=8192)
def rates_back(chain: Chain, t: float) -> Array:
    """Q_t(x^i, y) of every state and token y, [n^L, L, V] (read-only: it is cached)."""
    rates = rate_matrix(chain, t)[chain.tokens, : chain.vocab_size]
    rates.setflags(write=False)
    return rates


# ---- beliefs about the clean token --------------------------------------------------------------------------


def posterior(chain: Chain, p0: Array, x: Tokens, t: float) -> Array:
    """f[i, h] = p(x_0^i = h | x_t = x), [L, V]."""
    token = transition(chain, t)
    result = np.zeros((chain.length, chain.vocab_size))
    for probability, x0 in zip(p0, chain.clean, strict=True):
        weight = probability
        for j in range(chain.length):
            weight *= token[x[j], x0[j]]
        for i in range(chain.length):
            result[i, x0[i]] += weight
    return _normalised(result)


def leave_one_out(chain: Chain, p0: Array, x: Tokens, t: float) -> Array:
    """g[i, h] = p(x_0^i = h | x_t^j = x^j for all j != i), [L, V]: the belief before looking at x^i itself."""
    token = transition(chain, t)
    result = np.zeros((chain.length, chain.vocab_size))
    for probability, x0 in zip(p0, chain.clean, strict=True):
        for i in range(chain.length):
            weight = probability
            for j in range(chain.length):
                if j != i:
                    weight *= token[x[j], x0[j]]
            result[i, x0[i]] += weight
    return _normalised(result)


def _normalised(rows: Array) -> Array:
    total = rows.sum(axis=-1, keepdims=True)
    return np.divide(rows, total, out=np.zeros_like(rows), where=total > 0)


# ---- the reverse process ------------------------------------------------------------------------------------


def reverse_transition(chain: Chain, p0: Array, t: float, s: float) -> Array:
    """R(z, x) = p(x_s = z | x_t = x) on sequences, by Bayes, [n^L, n^L]; columns with p_t(x) = 0 are 0."""
    forward = product_transition(chain, t, s)
    earlier, later = marginal(chain, p0, s), marginal(chain, p0, t)
    result = np.zeros_like(forward)
    for column in range(len(chain.states)):
        for row in range(len(chain.states)):
            if later[column] > 0:
                result[row, column] = forward[column, row] * earlier[row] / later[column]
    return result


def token_reverse_from_belief(chain: Chain, belief: Array, x: int, t: float, s: float) -> Array:
    """p(x_s = z | x_t = x) of one token whose clean value has the prior belief g [V]; [n] over z.

    p(z | x) = P_{t|s}(x | z) m_s(z) / m_t(x) with m_s(z) = sum_h P_s(z | h) g_h.
    """
    forward, early, late = transition(chain, t, s), transition(chain, s), transition(chain, t)
    result = np.zeros(chain.num_states)
    evidence = sum(late[x, h] * belief[h] for h in range(chain.vocab_size))
    for z in range(chain.num_states):
        reached = sum(early[z, h] * belief[h] for h in range(chain.vocab_size))
        result[z] = forward[x, z] * reached / evidence
    return result


def token_reverse_from_posterior(chain: Chain, denoised: Array, x: int, t: float, s: float) -> Array:
    """p(x_s = z | x_t = x) = sum_h f_h p(z | x, x_0 = h) for a posterior f [V]; [n] over z.

    p(z | x, h) = P_{t|s}(x | z) P_s(z | h) / P_t(x | h). An h that cannot have become x is left out.
    """
    forward, early, late = transition(chain, t, s), transition(chain, s), transition(chain, t)
    result = np.zeros(chain.num_states)
    for z in range(chain.num_states):
        for h in range(chain.vocab_size):
            if late[x, h] > 0:
                result[z] += denoised[h] * forward[x, z] * early[z, h] / late[x, h]
    return result


def reverse_rate_matrix(chain: Chain, score: Score, t: float) -> Array:
    """Qbar_t(y, x) = Q_t(x, y) s(x, t)_y on sequences, [n^L, n^L], columns sum to zero."""
    rates, size = rates_back(chain, t), len(chain.states)
    visited = chain.moves & (rates != 0)
    flow, column = rates[visited] * scores_at(chain, score, t)[visited], np.nonzero(visited)[0]
    result = np.zeros((size, size))
    result[chain.neighbours[visited], column] = flow
    result[np.arange(size), np.arange(size)] = -np.bincount(column, flow, size)
    return result


# ---- the distribution at t = 1 ------------------------------------------------------------------------------


def token_prior(chain: Chain) -> Array:
    """p_r of one token, [n]: (1-e) mask + e uniform with e = exp(-alpha(1)); uniform where there is no mask."""
    result = np.zeros(chain.num_states)
    alive = np.exp(-chain.alpha(1.0)) if chain.has_mask else 1.0
    for token in range(chain.vocab_size):
        result[token] = alive / chain.vocab_size
    if chain.has_mask:
        result[chain.vocab_size] = 1 - alive
    return result


def prior(chain: Chain) -> Array:
    """p_r over chain.states: independent tokens."""
    token = token_prior(chain)
    result = np.ones(len(chain.states))
    for k, x in enumerate(chain.states):
        for i in range(chain.length):
            result[k] *= token[x[i]]
    return result
