"""Entropies, divergences, and the paper's functions K, l and l-bar, with 0 log 0 = 0."""

from collections.abc import Iterable

import numpy as np

from tests.reference.chain import Array

Numbers = float | Array
"""A number, or an array of numbers."""


def times_log(a: Numbers, b: Numbers) -> Array:
    """a log b, with 0 log 0 = 0 and a log 0 = -inf."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(np.equal(a, 0), 0.0, a * np.log(b))


def entropy(p: Array) -> float:
    """H(p)."""
    return cross_entropy(p, p)


def cross_entropy(p: Array, q: Array) -> float:
    """H(p, q) = -sum p log q."""
    return -float(times_log(np.asarray(p), np.asarray(q)).sum())


def kl(p: Array, q: Array) -> float:
    """KL(p || q)."""
    return cross_entropy(p, q) - entropy(p)


def generalised_kl(a: Iterable[float], b: Iterable[float]) -> float:
    """sum a log(a/b) - a + b for non-negative a, b that need not sum to one; 0 only where they agree."""
    left, right = np.asarray(a), np.asarray(b)
    return float((times_log(left, left) - times_log(left, right) + (right - left)).sum())


def constant_k(a: Numbers) -> Array:
    """K(a) = a (log a - 1)."""
    return times_log(a, a) - a


def score_entropy(a: Numbers, b: Numbers) -> Array:
    """l-bar(a, b) = b - a log b."""
    return b - times_log(a, b)


def bregman(a: Numbers, b: Numbers) -> Array:
    """l(a, b) = l-bar(a, b) + K(a), which is >= 0 and 0 only at a = b."""
    return score_entropy(a, b) + constant_k(a)
