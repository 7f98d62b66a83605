"""The law of the sampler that reveals one mask after another, by following every order of every sequence.

Position i is revealed at the level a_i = u_i a(1) of the mask clock, u_i ~ U(0, 1), the largest first; the network is
called with sigma = -log(1 - a_i). Positions with a_i below `least` = a(0+) are revealed together there.
"""

import itertools
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.integrate import solve_ivp

from tests.reference.chain import Tokens

Array = NDArray[np.float64]
Logits = Callable[[list[Tokens], float], Array]
"""(C noisy sequences, sigma) -> [C, L, V]."""


def softmax(logits: Array) -> Array:
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def order_weight(logits: Logits, x: Tokens, order: Tokens, mask: int) -> float:
    """The product of the probabilities of the tokens in this order, for a network that does not depend on sigma."""
    seen, weight = [mask] * len(x), 1.0
    for position in order:
        weight *= softmax(logits([tuple(seen)], 1.0))[0, position, x[position]]
        seen[position] = x[position]
    return weight


def time_free_law(logits: Logits, x: Tokens, mask: int) -> float:
    """p(x): the mean over all L! orders."""
    orders = list(itertools.permutations(range(len(x))))
    return sum(order_weight(logits, x, order, mask) for order in orders) / len(orders)


def time_conditioned_law(logits: Logits, x: Tokens, mask: int, most: float, least: float = 0.0) -> float:
    """p(x): the sum over orders of the positions that are not revealed together, of integrals over
    u_1 > u_2 > ... > least / most, each an ODE in the level u.
    """
    total, positions = 0.0, range(len(x))
    for count in range(len(x) + 1) if least > 0 else (len(x),):
        for order in itertools.permutations(positions, count):
            seen = tuple(x[i] if i in order else mask for i in positions)
            weight = _integral(logits, x, order, mask, most, least) if order else 1.0
            f = softmax(logits([seen], float(-np.log1p(-least))))[0] if count < len(x) else None
            for i in positions:
                weight *= 1.0 if f is None or i in order else float(f[i, x[i]]) * least / most
            total += weight
    return total


def _integral(logits: Logits, x: Tokens, order: Tokens, mask: int, most: float, least: float) -> float:
    """y_l(u) = integral from least / most to u of f_l(v) y_(l+1)(v) dv, y_(L+1) = 1; y_1(1)."""
    contexts = [tuple(x[i] if i in order[:step] else mask for i in range(len(x))) for step in range(len(order))]

    def slopes(u: float, y: Array) -> list[float]:
        sigma = float(-np.log1p(-u * most))
        f = softmax(logits(contexts, sigma))[range(len(order)), order, [x[i] for i in order]]
        return [f[step] * (y[step + 1] if step + 1 < len(order) else 1.0) for step in range(len(order))]

    start = np.zeros(len(order))
    solution = solve_ivp(slopes, (least / most, 1.0), start, method="DOP853", rtol=1e-6, atol=1e-9)
    return float(solution.y[0, -1])
