"""Autoregression: -log p(x_i | x_<i), the exact negative log-likelihood of a causal network; no noise, no path.

Shapes: B batch, L positions, V vocabulary.

The network's input is a start symbol and then all tokens but the last; row i of its output is the law of token i.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NoReturn

import torch
from torch import Tensor

from cedd.dynamics.dynamics import Bound, Dynamics
from cedd.dynamics.path import Target
from cedd.dynamics.rules import StepRule
from cedd.network import Network, Places
from cedd.objectives.cross_entropy import CrossEntropy
from cedd.objectives.objective import Objective
from cedd.parameterization import Denoiser, Parameterization, at_token
from cedd.process import Noise, TokenProcess
from cedd.row_sums import log_sum_exp


def start_symbol(process: TokenProcess) -> int:
    """The symbol before the first token: the mask, or token 0 if there is no mask (any constant works)."""
    return process.vocab_size if process.has_mask else 0


def shift_right(x0: Tensor, start: int) -> Tensor:
    """The input of a causal network that predicts x0: a start symbol, then all tokens but the last."""
    return torch.cat([torch.full_like(x0[:, :1], start), x0[:, :-1]], 1)


@dataclass(frozen=True)
class Causal(Dynamics):
    """The next token, given those before it."""

    noisy: ClassVar[bool] = False
    sampler: ClassVar[str] = "next-token"
    bounds: ClassVar[tuple[Bound, ...]] = ("tight",)

    def check_parts(self, parameterization: Parameterization, objective: Objective) -> None:
        if not (isinstance(parameterization, Denoiser) and isinstance(objective, CrossEntropy)):
            raise ValueError("an autoregressive model learns p(x_i | x_<i); use it with Denoiser and CrossEntropy")

    def positions(self, x_t: Tensor, noise: Noise) -> Tensor:
        return torch.ones_like(x_t, dtype=torch.bool)

    def network_input(self, x0: Tensor, x_t: Tensor, process: TokenProcess) -> Tensor:
        return shift_right(x0, start_symbol(process))

    def target(self, *_: object, **__: object) -> Target:
        self._no_process()

    def rules(self) -> Mapping[str, StepRule]:
        self._no_process()

    def _no_process(self) -> NoReturn:
        raise ValueError("an autoregressive model has no noise process; use a diffusion method")

    def token_nats(self, network: Network, process: TokenProcess, x0: Tensor) -> Tensor:
        inputs, targets = self.network_input(x0, x0, process), x0.reshape(-1)

        def nats(outputs: Tensor, part: slice) -> Tensor:
            return log_sum_exp(outputs) - at_token(outputs, targets[part]).double()

        places = Places(torch.arange(x0.numel(), device=x0.device))
        rows = network.rows(inputs, torch.zeros(len(x0), device=x0.device), places)
        return rows.map(nats).reshape(x0.shape)

    def check_held(self, held: Tensor) -> None:
        prompt = torch.arange(held.shape[1], device=held.device) < held[0].sum()
        if not bool((held == prompt).all()):
            raise ValueError("an autoregressive model writes left to right: it takes a prompt, not text after a blank")
