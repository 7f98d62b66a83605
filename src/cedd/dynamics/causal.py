"""Autoregression: -log p(x_i | x_<i), the exact negative log-likelihood of a causal network; no noise, no path.

Shapes: B batch, L positions, V vocabulary.

The network is shown a start symbol and then the tokens but the last; its row i is the law of token i. Samples are drawn
token by token from left to right, with the keys and values kept where the network can.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn, Protocol, TypeGuard

import torch
from torch import Tensor

from cedd.dynamics.dynamics import Bound, Drawing, Dynamics
from cedd.dynamics.path import Target
from cedd.dynamics.rules import StepRule
from cedd.network import FullPrecisionHead, Network, Places, has_head
from cedd.objectives.cross_entropy import CrossEntropy
from cedd.objectives.objective import Objective
from cedd.parameterization import Denoiser, Parameterization, at_token
from cedd.process import Noise, TokenProcess
from cedd.row_sums import log_sum_exp


class HasCache(Protocol):
    """A causal network that can continue from the keys and values it has already computed."""

    @property
    def head(self) -> Callable[[Tensor], Tensor]: ...

    def new_cache(self, batch: int, length: int | None = None) -> Any:
        """An empty cache."""
        ...

    @property
    def features(self) -> Callable[..., Tensor]:
        """(new tokens [B, n], sigma=None, cache=None, **extras) -> [B, n, D]."""
        ...


def has_cache(model: object) -> TypeGuard[HasCache]:
    """Whether a network can continue from what it has computed."""
    return has_head(model) and hasattr(model, "new_cache")


def start_symbol(process: TokenProcess) -> int:
    """The symbol before the first token: the mask, or token 0 where there is none (any constant will do)."""
    return process.vocab_size if process.has_mask else 0


def shift_right(x0: Tensor, start: int) -> Tensor:
    """The input of a causal network that predicts x0: a start symbol, then all tokens but the last."""
    return torch.cat([torch.full_like(x0[:, :1], start), x0[:, :-1]], 1)


@dataclass(frozen=True)
class Causal(Dynamics):
    """The next token, given those before it."""

    noisy: ClassVar[bool] = False
    bounds: ClassVar[tuple[Bound, ...]] = ("tight",)

    def check_parts(self, parameterization: Parameterization, objective: Objective) -> None:
        if not (isinstance(parameterization, Denoiser) and isinstance(objective, CrossEntropy)):
            raise ValueError("an autoregressive model learns p(x_i | x_<i); use it with Denoiser and CrossEntropy")

    def positions(self, x_t: Tensor, noise: Noise) -> Tensor:
        return torch.ones_like(x_t, dtype=torch.bool)

    def network_input(self, x0: Tensor, x_t: Tensor, process: TokenProcess) -> Tensor:
        return shift_right(x0, start_symbol(process))

    def target(self, *_: Any, **__: Any) -> Target:
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

    def draw(self, network: Network, process: TokenProcess, how: Drawing) -> Tensor:
        """x_i ~ p(. | x_<i) for i = 0..L-1; the constraint sees the start symbol where nothing is drawn yet."""
        self.check_held(how.held)
        (batch, length), known = how.held.shape, int(how.held[0].sum())
        start = start_symbol(process)
        x = how.constraint(torch.full((batch, length), start, dtype=torch.int64, device=network.device))
        if how.callback is not None:
            how.callback(0, 1.0, x)
        next_outputs = _next_outputs(network, batch, length)
        for i in range(known, length):
            outputs = next_outputs(shift_right(x, start), i)
            x[:, i] = how.choose(outputs.double(), how.numbers[:, i])
            x = how.constraint(x)
            if how.callback is not None:
                how.callback(i + 1 - known, 1 - (i + 1) / length, x)
        return x


def _next_outputs(network: Network, batch: int, length: int) -> Callable[[Tensor, int], Tensor]:
    """(inputs [B, L], i) -> the outputs at position i, [B, V], asked for i in increasing order."""
    model, device = network.model, network.device
    if has_cache(model) and network.home == device:
        cache, head, seen = model.new_cache(batch, length), FullPrecisionHead(model.head), 0

        def continued(inputs: Tensor, i: int) -> Tensor:
            nonlocal seen
            hidden = model.features(inputs[:, seen : i + 1], cache=cache, **network.given())[:, -1]
            seen = i + 1
            outputs = network.checked(head(hidden), (batch, network.vocab_size))
            return network.possible(outputs, torch.arange(batch, device=device) * length + i)

        return continued

    sigma, first = torch.zeros(batch, device=device), torch.arange(batch, device=device) * length

    def anew(inputs: Tensor, i: int) -> Tensor:
        # The network is causal, so what stands to the right of i cannot matter.
        return network.rows(inputs, sigma, Places(first + i)).map(lambda outputs, _: outputs)

    return anew
