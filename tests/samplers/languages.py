"""Small languages over tokens, and the tilted laws of samplers, by enumeration.

Shapes: L positions, V vocabulary.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cedd.constraints import TokenAutomaton, TokenLanguage, compile_tokens, regex
from cedd.data.tokenizers import CharTokenizer
from cedd.samplers.languages import LanguageConstraint, Span

Array = NDArray[np.float64]
State = tuple[int, ...]
Laws = Callable[[State], Array]
"""The network's laws of a sequence with masks, [L, V]."""
LETTERS = "abcd"


def automaton(pattern: str, vocab_size: int) -> TokenAutomaton:
    """The tokens are the first letters of the alphabet."""
    return compile_tokens(regex(pattern).automaton, CharTokenizer(LETTERS[:vocab_size]).texts, may_end=False)


def span(pattern: str, vocab_size: int, start: int, stop: int, **others: Any) -> Span:
    return Span(start, stop, TokenLanguage(automaton(pattern, vocab_size)), name=f"regex({pattern!r})", **others)


def constraint(pattern: str, vocab_size: int, length: int) -> LanguageConstraint:
    """Constrain the whole sequence to the language."""
    return LanguageConstraint.of(length, [span(pattern, vocab_size, 0, length)])


def members(pattern: str, vocab_size: int, length: int) -> list[State]:
    """The sequences of the language."""
    language = automaton(pattern, vocab_size)
    return [x for x in itertools.product(range(vocab_size), repeat=length) if language.matches(x)]


def product_law(f: Array, seen: State, texts: Sequence[State], mask: int) -> dict[State, float]:
    """The product of the laws f [L, V] at the masks, for the texts consistent with `seen`; not normalised."""
    agreeing = [x for x in texts if all(token in (own, mask) for own, token in zip(x, seen, strict=True))]
    return {x: float(np.prod([f[i, x[i]] for i in range(len(x)) if seen[i] == mask])) for x in agreeing}


def marginals(f: Array, seen: State, texts: Sequence[State], mask: int) -> Array:
    """The product law's marginals given the language, [L, V]."""
    law, found = product_law(f, seen, texts, mask), np.zeros(f.shape)
    for x, weight in law.items():
        found[np.arange(len(x)), x] += weight / sum(law.values())
    return found


def tilted_law(laws: Laws, length: int, texts: Sequence[State], mask: int) -> dict[State, float]:
    """The law of the sampler that reveals one mask at a time, at random, from the marginals given the language."""
    reached: dict[State, float] = {(mask,) * length: 1.0}
    for masks in range(length, 0, -1):
        following: dict[State, float] = {}
        for seen, chance in reached.items():
            own = marginals(laws(seen), seen, texts, mask)
            for i in [i for i in range(length) if seen[i] == mask]:
                for v in np.flatnonzero(own[i]).tolist():
                    after = (*seen[:i], v, *seen[i + 1 :])
                    following[after] = following.get(after, 0.0) + chance * own[i, v] / masks
        reached = following
    return reached


def plain_law(laws: Laws, length: int, vocab_size: int) -> dict[State, float]:
    """The same without a language: p(x)."""
    return tilted_law(laws, length, list(itertools.product(range(vocab_size), repeat=length)), vocab_size)
