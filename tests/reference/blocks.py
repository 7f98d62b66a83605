"""Texts generated block by block: each block has its own law given the text before it, and its own bound."""

from collections.abc import Callable, Iterator

import numpy as np

from tests.reference.chain import Array, Tokens, sequences

Measured = Callable[[Tokens, Array], float]
"""(the text before a block, the law of the block given it) -> nats of the block."""


def given_past(p0: Array, vocab_size: int, length: int, block: int) -> Iterator[tuple[float, Tokens, Array]]:
    """(the probability of a text before a block, that text, the law of the block after it), for p0 over V^L."""
    for start in range(0, length, block):
        for past in sequences(vocab_size, start):
            law = np.zeros(vocab_size**block)
            for number, text in enumerate(sequences(vocab_size, length)):
                if text[:start] == past:
                    law[sequences(vocab_size, block).index(text[start : start + block])] += p0[number]
            if law.sum() > 0:
                yield float(law.sum()), past, law / law.sum()


def over_blocks(p0: Array, vocab_size: int, length: int, block: int, measured: Measured) -> float:
    """sum_k E_past [measured], in nats per text."""
    return sum(chance * measured(past, law) for chance, past, law in given_past(p0, vocab_size, length, block))
