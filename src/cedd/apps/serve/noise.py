"""A sentence under noise as a function of t alone, so that a page can show every time from one response.

With one uniform number u per token, the token is itself while u < keep(t), a random token while u < alive(t), and then
the mask (`Kernel.move`); keep and alive decrease in t. The response therefore holds, for each token, u and a random
token, and for each process its two curves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from cedd.apps.serve.pieces import whole_characters
from cedd.data.text import encode_verbatim
from cedd.data.tokenizers import Tokenizer
from cedd.process import (
    TokenProcess,
    absorb,
    hybrid,
    roulette,
    seeded_generator,
    uniform,
    uniform_noise,
    uniform_tokens,
)
from cedd.storage import JSONObject

PROCESSES_SHOWN: Mapping[str, Callable[[int], TokenProcess]] = {
    "absorb": absorb,
    "uniform": uniform,
    "roulette": lambda vocab_size: roulette(vocab_size, p_m=0.5),
    "hybrid": lambda vocab_size: hybrid(vocab_size, p_u=0.3),
}
"""The processes shown, with parameters at which both kinds of noise are visible."""
TIMES = 101


def noise_curves(tokenizer: Tokenizer, text: str, seed: int) -> JSONObject:
    """The tokens of a text, a uniform number and a random token for each, and the curves of the processes."""
    ids, size = torch.from_numpy(encode_verbatim(tokenizer, text)), tokenizer.vocab_size
    generator, host = seeded_generator(seed), torch.device("cpu")
    u = uniform_noise(ids.shape, host, generator)
    others = uniform_tokens(ids.shape, size, host, generator)
    t = torch.linspace(0, 1, TIMES, dtype=torch.float64)
    kernels = {name: make(size).kernel(t) for name, make in PROCESSES_SHOWN.items()}
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
