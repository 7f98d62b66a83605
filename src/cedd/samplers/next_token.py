"""Next token: autoregressive models are sampled token by token, from left to right.

Shapes: B batch, L positions, V vocabulary.

Keys and values are cached if the network supports it (`Capabilities.cache`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from cedd.dynamics.causal import shift_right, start_symbol
from cedd.methods import Method
from cedd.network import FullPrecisionHead, Network, Places, capabilities_of, has_cache
from cedd.process import TokenProcess
from cedd.samplers.constraints import Constraint
from cedd.samplers.random_numbers import Use
from cedd.samplers.sampler import Sampler, SamplingRun


class NextToken(Sampler):
    """x_i ~ p(. | x_<i) for i = 0..L-1; a constraint gets the start symbol at positions that are not drawn yet. A text
    that has ended, with one of the options' `stop` tokens, is not continued."""

    name = "next-token"
    noisy: ClassVar[bool] = False
    unused: ClassVar[tuple[str, ...]] = ("sampler", "steps", "grid")
    draws_jointly: ClassVar[bool] = True

    def check(self, method: Method, process: TokenProcess, constraint: Constraint | None = None) -> None:
        super().check(method, process, constraint)
        if method.dynamics.noisy:
            raise ValueError(f"{self.name} is for autoregressive models, and {method.name} is not; use 'analytic'")

    def steps_taken(self, steps: int, length: int) -> int:
        return length

    def tokens_are_final(self, method: Method, process: TokenProcess) -> bool:
        return True

    def sample(self, run: SamplingRun) -> Tensor:
        (batch, length), held, device = run.shape, run.held, run.device
        if run.options.x_start is not None:
            raise ValueError(
                f"{run.method.name} is autoregressive and has no noisy text to start from; give a prompt instead"
            )
        run.dynamics.check_held(held)
        if run.network.one_by_one and batch > 1:  # the network's cache is for a whole batch
            return torch.cat([self.sample(run.of_sequences(i, i + 1)) for i in range(batch)])
        start, known = start_symbol(run.process), int(held[0].sum())
        x = run.start(lambda: torch.full(run.shape, start, dtype=torch.int64, device=device))
        first, numbers = torch.arange(batch, device=device) * length, run.uniform(Use.TARGET)
        run.show(0, 1.0, x)
        skipped = int(known > 0 and capabilities_of(run.network.model).optional_start)
        next_outputs = _next_outputs(run.network, batch, length, skipped)
        stop = torch.tensor(run.options.stop, dtype=torch.int64, device=device)
        ended = torch.zeros(batch, dtype=torch.bool, device=device)
        for i in range(known, length):
            outputs = next_outputs(shift_right(x, start), i).double()
            drawn = run.draw_tokens(x, first + i, outputs, slice(None), numbers[:, i])
            x[:, i] = torch.where(ended, x[:, i - 1], drawn) if i else drawn
            if len(stop):
                ended |= torch.isin(x[:, i], stop)
                if bool(ended.all()):  # texts that have ended repeat their last token
                    x[:, i + 1 :] = x[:, i, None]
            x = run.constrained(x)
            run.show(i + 1 - known, 1 - (i + 1) / length, x)
            if bool(ended.all()):
                break
        return x


def _next_outputs(network: Network, batch: int, length: int, skipped: int) -> Callable[[Tensor, int], Tensor]:
    """(inputs [B, L], i) -> the outputs at position i, [B, V], to be called for i in increasing order. The network
    does not read the first `skipped` inputs."""
    model, device = network.model, network.device
    if has_cache(model) and capabilities_of(model).causal and network.home == device:
        cache, head, seen = model.new_cache(batch, length), FullPrecisionHead(model.head), skipped

        def cached(inputs: Tensor, i: int) -> Tensor:
            nonlocal seen
            hidden = model.features(inputs[:, seen : i + 1], cache=cache, **network.condition_inputs())[:, -1]
            seen = i + 1
            outputs = network.checked(head(hidden), (batch, network.vocab_size))
            return network.possible(outputs, torch.arange(batch, device=device) * length + i)

        return cached

    sigma, first = torch.zeros(batch, device=device), torch.arange(batch, device=device) * length
    unrestricted = replace(network, only=None)

    def recomputed(inputs: Tensor, i: int) -> Tensor:
        # The network is causal, so positions to the right of i have no effect.
        rows = unrestricted.rows(inputs.roll(-skipped, 1), sigma, Places(first + i - skipped))
        return network.possible(rows.map(lambda outputs, _: outputs), first + i)

    return recomputed
