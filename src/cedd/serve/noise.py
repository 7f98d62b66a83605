"""A sentence under noise, as a function of t alone: what a page needs to show every time without asking again.

A token whose number is u becomes another at time t in one order only: it is itself while u < keep(t), a random token
while u < alive(t), and then the mask (`Kernel.move`). As t grows, keep and alive fall. So a sentence, a number and a
random token for each of its tokens, and both curves of each process are enough.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from cedd.data.text import encode_given
from cedd.data.tokenizers import Tokenizer
from cedd.process import TokenProcess, absorb, hybrid, roulette, uniform, uniform_noise, uniform_tokens
from cedd.serve.work import whole_characters

SHOWN: Mapping[str, Callable[[int], TokenProcess]] = {
    "absorb": absorb,
    "uniform": uniform,
    "roulette": lambda vocab_size: roulette(vocab_size, p_m=0.5),
    "hybrid": lambda vocab_size: hybrid(vocab_size, p_u=0.3),
}
"""With shares at which both kinds of noise can be seen."""
TIMES = 101


def noise_curves(tokenizer: Tokenizer, text: str, seed: int) -> dict[str, Any]:
    """The tokens of a text with their numbers and random tokens, and the curves of the processes."""
    ids, size = torch.from_numpy(encode_given(tokenizer, text)), tokenizer.vocab_size
    generator, host = torch.Generator().manual_seed(seed), torch.device("cpu")
    u = uniform_noise(ids.shape, host, generator)
    others = uniform_tokens(ids.shape, size, host, generator)
    t = torch.linspace(0, 1, TIMES, dtype=torch.float64)
    kernels = {name: make(size).kernel(t) for name, make in SHOWN.items()}
    return {
        "tokens": whole_characters(tokenizer, ids.tolist()),
        "others": [tokenizer.decode([token]) for token in others.tolist()],
        "u": [round(value, 6) for value in u.tolist()],
        "t": t.tolist(),
        "seed": seed,
        "processes": {
            name: {"keep": _rounded(kernel.keep), "alive": _rounded(kernel.alive)} for name, kernel in kernels.items()
        },
    }


def _rounded(values: torch.Tensor) -> list[float]:
    return [round(value, 6) for value in values.tolist()]
