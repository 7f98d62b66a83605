"""From a belief at one position to ratios, by explicit sums over the clean token h, never by a closed form.

P is the [n, n] transition matrix from 0 to t (so P[x, h] = p(x | h)), x the noisy token at the position.
"""

import numpy as np

from tests.reference.chain import Array


def denoiser_scores(matrix: Array, denoised: Array, x: int) -> Array:
    """s_y = sum_h P(y|h) / P(x|h) f_h, [V]; an h that cannot have become x is left out."""
    vocab = range(len(denoised))
    result = np.zeros(len(denoised))
    for y in vocab:
        for h in vocab:
            if matrix[x, h] > 0:
                result[y] += matrix[y, h] / matrix[x, h] * denoised[h]
    return result


def bayes_scores(matrix: Array, belief: Array, x: int) -> Array:
    """s_y = sum_h P(y|h) g_h / sum_h P(x|h) g_h, [V]."""
    vocab = range(len(belief))
    here = sum(matrix[x, h] * belief[h] for h in vocab)
    return np.array([sum(matrix[y, h] * belief[h] for h in vocab) / here for y in vocab])


def bayes_posterior(matrix: Array, belief: Array, x: int) -> Array:
    """f_h = P(x|h) g_h / sum_h' P(x|h') g_h', [V]."""
    weights = np.array([matrix[x, h] * belief[h] for h in range(len(belief))])
    return weights / weights.sum()


def scaled_shift(matrix: Array, vocab_size: int, x: int) -> Array:
    """log mean_h P(y|h) / P(x|h), [V]: what the scaled score adds to the network's output. Needs P(x|h) > 0."""
    result = np.zeros(vocab_size)
    for y in range(vocab_size):
        result[y] = np.log(sum(matrix[y, h] / matrix[x, h] for h in range(vocab_size)) / vocab_size)
    return result
