"""The forward process, dense: rate matrices by loops, transition matrices by expm or by an ODE.

Q(x, y) is the rate from y to x: columns sum to zero, and P(x, y) = p(x | y) has columns that sum to one.
Tokens are 0..V-1, the mask (where there is one) is V; n is the number of token states. Sequences are tuples,
enumerated in the order of itertools.product, the last position moving fastest.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.integrate import solve_ivp
from scipy.linalg import expm

Array = NDArray[np.float64]
Tokens = tuple[int, ...]
Clock = Callable[[float], float]


@dataclass(frozen=True)
class Chain:
    """L tokens that move independently, each with Q_t = alpha'(t) Q_absorb + beta'(t) Q_uniform."""

    vocab_size: int
    length: int
    has_mask: bool
    alpha: Clock
    beta: Clock
    alpha_rate: Clock
    beta_rate: Clock

    def __post_init__(self) -> None:
        if not (2 <= self.vocab_size <= 8 and 1 <= self.length <= 3):
            raise ValueError("the reference enumerates all sequences: use 2 <= V <= 8 and 1 <= L <= 3")

    @cached_property
    def num_states(self) -> int:
        """n: the tokens, and the mask where there is one."""
        return self.vocab_size + 1 if self.has_mask else self.vocab_size

    @cached_property
    def states(self) -> tuple[Tokens, ...]:
        """All n^L noisy sequences."""
        return sequences(self.num_states, self.length)

    @cached_property
    def clean(self) -> tuple[Tokens, ...]:
        """All V^L sequences without a mask."""
        return sequences(self.vocab_size, self.length)

    @cached_property
    def place(self) -> dict[Tokens, int]:
        """The index of each sequence in `states`."""
        return {x: k for k, x in enumerate(self.states)}

    @cached_property
    def tokens(self) -> NDArray[np.int64]:
        """The noisy sequences as an array, [n^L, L]."""
        return np.array(self.states)

    @cached_property
    def neighbours(self) -> NDArray[np.int64]:
        """neighbours[k, i, y]: the place in `states` of the k-th sequence with token y put at position i."""
        return np.array(
            [
                [[self.place[(*x[:i], y, *x[i + 1 :])] for y in range(self.vocab_size)] for i in range(self.length)]
                for x in self.states
            ]
        )

    @cached_property
    def moves(self) -> NDArray[np.bool_]:
        """Whether y is another token than the k-th sequence has at position i, [n^L, L, V]."""
        return np.arange(self.vocab_size) != self.tokens[..., None]


@lru_cache(maxsize=64)
def sequences(num_states: int, length: int) -> tuple[Tokens, ...]:
    """All sequences, in the order of itertools.product."""
    return tuple(itertools.product(range(num_states), repeat=length))


# ---- chains of the paper ------------------------------------------------------------------------------------


def log_linear(eps: float = 1e-3) -> tuple[Clock, Clock]:
    """sigma(t) = -log(1 - (1-eps) t) and its derivative."""
    return (lambda t: -math.log1p(-(1 - eps) * t), lambda t: (1 - eps) / (1 - (1 - eps) * t))


def _zero(t: float) -> float:
    return 0.0


def absorb_chain(vocab_size: int, length: int, schedule: tuple[Clock, Clock] | None = None) -> Chain:
    """alpha = sigma, beta = 0."""
    sigma, rate = schedule or log_linear()
    return Chain(vocab_size, length, True, sigma, _zero, rate, _zero)


def uniform_chain(vocab_size: int, length: int, schedule: tuple[Clock, Clock] | None = None) -> Chain:
    """alpha = 0, beta = sigma, and no mask state."""
    sigma, rate = schedule or log_linear()
    return Chain(vocab_size, length, False, _zero, sigma, _zero, rate)


def roulette_chain(vocab_size: int, length: int, p_m: float, schedule: tuple[Clock, Clock] | None = None) -> Chain:
    """alpha = p_m sigma, beta = (1-p_m) sigma at sigma = schedule / p_m: the mask clock is the schedule."""
    sigma, rate = schedule or log_linear()
    odds = (1 - p_m) / p_m
    return Chain(vocab_size, length, True, sigma, lambda t: odds * sigma(t), rate, lambda t: odds * rate(t))


def eroulette_chain(
    vocab_size: int, length: int, p_m: Clock, p_m_rate: Clock, schedule: tuple[Clock, Clock] | None = None
) -> Chain:
    """alpha = p_m(t) sigma, beta = (1-p_m(t)) sigma; the caller must ensure that both are monotone."""
    sigma, rate = schedule or log_linear()
    return Chain(
        vocab_size,
        length,
        True,
        lambda t: p_m(t) * sigma(t),
        lambda t: (1 - p_m(t)) * sigma(t),
        lambda t: p_m_rate(t) * sigma(t) + p_m(t) * rate(t),
        lambda t: -p_m_rate(t) * sigma(t) + (1 - p_m(t)) * rate(t),
    )


# ---- one token ----------------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def absorb_matrix(vocab_size: int, has_mask: bool = True) -> Array:
    """Q_absorb: every token moves to the mask at rate 1. All zero where there is no mask."""
    n = vocab_size + 1 if has_mask else vocab_size
    matrix = np.zeros((n, n))
    if has_mask:
        for y in range(vocab_size):
            matrix[vocab_size, y] += 1.0
            matrix[y, y] -= 1.0
    matrix.setflags(write=False)
    return matrix


@lru_cache(maxsize=64)
def uniform_matrix(vocab_size: int, has_mask: bool = False) -> Array:
    """Q_uniform: every token is redrawn from the V tokens at rate 1; the mask, if any, stays."""
    n = vocab_size + 1 if has_mask else vocab_size
    matrix = np.zeros((n, n))
    for y in range(vocab_size):
        for x in range(vocab_size):
            matrix[x, y] += 1.0 / vocab_size
        matrix[y, y] -= 1.0
    matrix.setflags(write=False)
    return matrix


def rate_matrix(chain: Chain, t: float) -> Array:
    """Q_t of one token, [n, n]."""
    masking = chain.alpha_rate(t) * absorb_matrix(chain.vocab_size, chain.has_mask)
    shuffling = chain.beta_rate(t) * uniform_matrix(chain.vocab_size, chain.has_mask)
    return masking + shuffling


def transition_at_clocks(vocab_size: int, has_mask: bool, alpha: float, beta: float) -> Array:
    """expm(alpha Q_absorb + beta Q_uniform), [n, n]; negative clocks give the inverse matrix."""
    generator = alpha * absorb_matrix(vocab_size, has_mask) + beta * uniform_matrix(vocab_size, has_mask)
    return np.asarray(expm(generator), dtype=np.float64)


@lru_cache(maxsize=8192)
def transition(chain: Chain, t: float, s: float = 0.0) -> Array:
    """P(x, y) = p(x_t = x | x_s = y) of one token by expm, [n, n] (read-only: it is cached)."""
    matrix = transition_at_clocks(
        chain.vocab_size, chain.has_mask, chain.alpha(t) - chain.alpha(s), chain.beta(t) - chain.beta(s)
    )
    matrix.setflags(write=False)
    return matrix


def transition_by_ode(chain: Chain, t: float, s: float = 0.0) -> Array:
    """The same matrix from dP/dt = Q_t P, P_s = I, which uses the rates and never the clocks."""
    n = chain.num_states

    def slope(time: float, flat: Array) -> Array:
        return (rate_matrix(chain, time) @ flat.reshape(n, n)).ravel()

    return solve_ode(slope, s, t, np.eye(n).ravel()).reshape(n, n)


# ---- sequences ----------------------------------------------------------------------------------------------


def sequence_matrix(token_matrix: Array, length: int) -> Array:
    """The rate matrix on n^L sequences, where one position moves at a time, by loops."""
    states = sequences(len(token_matrix), length)
    matrix = np.zeros((len(states), len(states)))
    for row, x in enumerate(states):
        for column, y in enumerate(states):
            different = [i for i in range(length) if x[i] != y[i]]
            if len(different) == 1:
                i = different[0]
                matrix[row, column] = token_matrix[x[i], y[i]]
    for column in range(len(states)):
        matrix[column, column] = -sum(matrix[row, column] for row in range(len(states)) if row != column)
    return matrix


def sequence_rate_matrix(chain: Chain, t: float) -> Array:
    """Q_t on sequences, [n^L, n^L]."""
    return sequence_matrix(rate_matrix(chain, t), chain.length)


def sequence_transition(chain: Chain, t: float, s: float = 0.0) -> Array:
    """p(x_t | x_s) on sequences by expm of the sequence-level generator, [n^L, n^L]."""
    absorb = sequence_matrix(absorb_matrix(chain.vocab_size, chain.has_mask), chain.length)
    uniform = sequence_matrix(uniform_matrix(chain.vocab_size, chain.has_mask), chain.length)
    generator = (chain.alpha(t) - chain.alpha(s)) * absorb + (chain.beta(t) - chain.beta(s)) * uniform
    return np.asarray(expm(generator), dtype=np.float64)


def product_transition(chain: Chain, t: float, s: float = 0.0) -> Array:
    """p(x_t | x_s) = prod_i p(x_t^i | x_s^i), [n^L, n^L]."""
    token = transition(chain, t, s)
    matrix = np.ones((len(chain.states), len(chain.states)))
    for row, x in enumerate(chain.states):
        for column, y in enumerate(chain.states):
            for i in range(chain.length):
                matrix[row, column] *= token[x[i], y[i]]
    return matrix


def solve_ode(slope: Callable[[float, Array], Array], start: float, stop: float, value: Array) -> Array:
    """Integrates d value / d time = slope(time, value) from start to stop, to tight tolerances."""
    if start == stop:
        return value
    solution = solve_ivp(slope, (start, stop), value, method="DOP853", rtol=1e-12, atol=1e-14)
    if not solution.success:
        raise RuntimeError(f"the reference ODE did not reach its end: {solution.message}")
    return solution.y[:, -1]
