"""The law of texts generated block by block, where each block reveals its masks one at a time in uniformly random
order, and this law under constraints, rewards and guidance: sums over all orders of all blocks of all texts.

Shapes: V vocabulary, b tokens of a block.
"""

import itertools
from collections.abc import Callable, Iterable

import numpy as np

from tests.reference.chain import Array, Tokens
from tests.reference.reveals import softmax

Laws = Callable[[Tokens, Tokens], Array]
"""(the text before a block, the block with masks) -> the law of each position, [b, V]."""


def block_probability(laws: Laws, past: Tokens, block: Tokens, mask: int, held: Tokens = ()) -> float:
    """p(block | past) of the positions that are not held: the mean over their orders."""
    free = [i for i in range(len(block)) if i not in held]
    total, count = 0.0, 0
    for order in itertools.permutations(free):
        seen, weight = [token if i in held else mask for i, token in enumerate(block)], 1.0
        for i in order:
            weight *= laws(past, tuple(seen))[i, block[i]]
            seen[i] = block[i]
        total, count = total + weight, count + 1
    return total / count


def text_probability(laws: Laws, text: Tokens, block: int, mask: int, prompt: int = 0) -> float:
    """p(text | its first tokens)."""
    found = 1.0
    for start in range(0, len(text), block):
        held = tuple(i for i in range(block) if start + i < prompt)
        if len(held) < block:
            found *= block_probability(laws, text[:start], text[start : start + block], mask, held)
    return found


def text_law(laws: Laws, vocab_size: int, length: int, block: int, prompt: Tokens = ()) -> dict[Tokens, float]:
    """p of every text that begins with a prompt."""
    ends = itertools.product(range(vocab_size), repeat=length - len(prompt))
    texts = [prompt + end for end in ends]
    return {text: text_probability(laws, text, block, vocab_size, len(prompt)) for text in texts}


def until(law: dict[Tokens, float], stop: int, prompt: int = 0) -> dict[Tokens, float]:
    """The law of the texts in which the first `stop` after the prompt is repeated to the end."""
    found: dict[Tokens, float] = {}
    for text, chance in law.items():
        end = text.index(stop, prompt) if stop in text[prompt:] else len(text)
        ended = text[:end] + (stop,) * (len(text) - end)
        found[ended] = found.get(ended, 0.0) + chance
    return found


def tilted(
    law: dict[Tokens, float],
    members: Iterable[Tokens] | None = None,
    reward: Callable[[Tokens], float] | None = None,
    strength: float = 0.0,
) -> dict[Tokens, float]:
    """p(x) [x in the language] exp(strength r(x)), not normalised."""
    kept = law if members is None else {text: law[text] for text in members}
    return {text: chance * float(np.exp(strength * reward(text) if reward else 0.0)) for text, chance in kept.items()}


def guided_laws(laws: Laws, prompt: int, block: int, weight: float, mask: int) -> Laws:
    """f_c^w f_u^(1 - w), normalised: f_u is the model of a text that begins after the blocks with tokens of the prompt,
    in which these are masks."""
    first = -(-prompt // block) * block

    def mixed(past: Tokens, seen: Tokens) -> Array:
        hidden = tuple(mask if len(past) + i < prompt else token for i, token in enumerate(seen))
        logits = weight * np.log(laws(past, seen)) + (1 - weight) * np.log(laws(past[first:], hidden))
        return softmax(logits)

    return mixed
