"""The autoregressive baseline: -log p(x_i | x_<i), the exact negative log-likelihood of a causal network.

The network is shown a start symbol and then the tokens but the last; its row i is the law of token i.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cedd.objectives.cross_entropy import CrossEntropy
from cedd.objectives.objective import CrossEntropyRows, Rows
from cedd.objectives.times import shift_right
from cedd.parameterization import Parameterization
from cedd.process import Noise, TokenProcess


def start_symbol(process: TokenProcess) -> int:
    """The symbol before the first token: the mask, or token 0 where there is none (any constant will do)."""
    return process.vocab_size if process.has_mask else 0


@dataclass(frozen=True)
class Autoregressive(CrossEntropy):
    """Next-token cross entropy at every position; the noise plays no part."""

    def positions(self, x_t: Tensor, noise: Noise) -> Tensor:
        return torch.ones_like(x_t, dtype=torch.bool)

    def network_input(self, x0: Tensor, x_t: Tensor, process: TokenProcess) -> Tensor:
        return shift_right(x0, start_symbol(process))

    def closed_form(self, parameterization: Parameterization, rows: Rows) -> CrossEntropyRows:
        nothing = torch.zeros_like(rows.noise.t)
        return CrossEntropyRows(rows.x0, torch.ones_like(nothing), torch.zeros_like(rows.x0), nothing)
