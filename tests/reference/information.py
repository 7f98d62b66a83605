"""Entropies, divergences, and the paper's functions K, l and l-bar, with 0 log 0 = 0."""

import math
from collections.abc import Iterable

import numpy as np

from tests.reference.chain import Array


def times_log(a: float, b: float) -> float:
    """a log b, with 0 log 0 = 0 and a log 0 = -inf."""
    if a == 0:
        return 0.0
    return a * math.log(b) if b > 0 else -math.inf


def entropy(p: Array) -> float:
    """H(p)."""
    return cross_entropy(p, p)


def cross_entropy(p: Array, q: Array) -> float:
    """H(p, q) = -sum p log q."""
    return -sum(times_log(float(a), float(b)) for a, b in zip(p, q, strict=True))


def kl(p: Array, q: Array) -> float:
    """KL(p || q)."""
    return cross_entropy(p, q) - entropy(p)


def generalised_kl(a: Iterable[float], b: Iterable[float]) -> float:
    """sum a log(a/b) - a + b for non-negative a, b that need not sum to one; 0 only where they agree."""
    total = 0.0
    for left, right in zip(np.asarray(a).ravel(), np.asarray(b).ravel(), strict=True):
        total += times_log(float(left), float(left)) - times_log(float(left), float(right))
        total += float(right) - float(left)
    return total


def constant_k(a: float) -> float:
    """K(a) = a (log a - 1)."""
    return times_log(a, a) - a


def score_entropy(a: float, b: float) -> float:
    """l-bar(a, b) = b - a log b."""
    return b - times_log(a, b)


def bregman(a: float, b: float) -> float:
    """l(a, b) = l-bar(a, b) + K(a), which is >= 0 and 0 only at a = b."""
    return score_entropy(a, b) + constant_k(a)
