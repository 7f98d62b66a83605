"""Small random networks and data for tests, and their counterparts for the oracle."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

import cedd
from cedd.network import Capabilities
from cedd.process import TokenProcess
from tests import reference

Model = Callable[[Tensor, Tensor], Tensor]


def random_data(vocab_size: int, length: int, seed: int) -> Tensor:
    """A random p0 of shape [V] * L, all entries positive."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(vocab_size**length, generator=generator, dtype=torch.float64)
    return torch.softmax(logits, 0).reshape((vocab_size,) * length)


def random_network(process: TokenProcess, length: int, seed: int, size: float = 1.0) -> Model:
    """A smooth float64 function of (x_t, sigma), different at every noisy sequence."""
    n, V = process.num_states, process.vocab_size
    generator = torch.Generator().manual_seed(seed)
    shape = (3, n**length, length, V)
    level, slope, phase = size * torch.randn(shape, generator=generator, dtype=torch.float64)
    place = n ** torch.arange(length - 1, -1, -1)

    def model(x: Tensor, sigma: Tensor) -> Tensor:
        index = (x * place).sum(-1)
        return level[index] + slope[index] * torch.sin(sigma.double()[:, None, None] + phase[index])

    return model


def matching_chain(process: TokenProcess, length: int, times: Sequence[float] = ()) -> reference.Chain:
    """The oracle's chain with the process's clocks, each evaluated once per time and at `times` in one call."""
    first = torch.tensor(times, dtype=torch.float64)

    def clock(f: Callable[[Tensor | float], Tensor]) -> Callable[[float], float]:
        known = dict(zip(times, f(first).tolist(), strict=True)) if times else {}

        def at(t: float) -> float:
            if t not in known:
                known[t] = float(f(t))
            return known[t]

        return at

    clocks = (process.alpha, process.beta, process.alpha_rate, process.beta_rate)
    return reference.Chain(process.vocab_size, length, process.has_mask, *map(clock, clocks))


def as_score(
    method: str, process: TokenProcess, model: Model, length: int, times: Sequence[float] = ()
) -> reference.Score:
    """A network as the oracle's score: ratios [L, V] per sequence and time, computed for all sequences at once and
    cached; those at `times` are computed in one call."""
    states = torch.tensor(reference.sequences(process.num_states, length))

    def ratios(times: Sequence[float]) -> np.ndarray:
        t = torch.tensor(times, dtype=torch.float64).repeat_interleave(len(states))
        x = states.repeat(len(times), 1)
        outputs = model(x, process.sigma(t))
        found = cedd.log_scores(outputs, process, x, t, method=method).exp().numpy()
        return found.reshape(len(times), len(states), length, -1)

    known = dict(zip(times, ratios(times), strict=True)) if times else {}

    def table(t: float) -> np.ndarray:
        if t not in known:
            (known[t],) = ratios([t])
        return known[t]

    return reference.TableScore(matching_chain(process, length), table)


def every_process(V: int) -> dict[str, TokenProcess]:
    """One process of each kind, by name."""
    return {
        "absorb": cedd.absorb(V),
        "uniform": cedd.uniform(V),
        "roulette": cedd.roulette(V, 0.7),
        "eroulette": cedd.eroulette(V, mask_share=cedd.PowerShare(0.2, 0.9)),
        "hybrid": cedd.hybrid(V, 0.3),
    }


class BlockNetwork:
    """A smooth float64 function of a noisy block, its sigma and the clean text before it, distinct for each input.

    Called as the package calls a function of blocks: model(x_t [B, L], sigma [B, L], clean=x_0 [B, L]); `after` is the
    network of one block after one text.
    """

    def __init__(self, process: TokenProcess, length: int, block: int, seed: int, time_free: bool = False) -> None:
        n, V = process.num_states, process.vocab_size
        generator = torch.Generator().manual_seed(seed)
        pasts = sum(V**known for known in range(0, length, block))
        shape = (3, pasts, n**block, block, V)
        self.level, self.slope, self.phase = torch.randn(shape, generator=generator, dtype=torch.float64)
        self.slope = 0 * self.slope if time_free else self.slope
        self.process, self.length, self.block = process, length, block
        self.capabilities = Capabilities(time_conditioned=False) if time_free else None

    def after(self, past: Sequence[int]) -> Model:
        """(x_t [B, b], sigma [B]) -> [B, b, V]."""
        text = torch.tensor([past], dtype=torch.int64)
        return lambda x_t, sigma: self._outputs(text.expand(len(x_t), -1), x_t, sigma)

    def _outputs(self, past: Tensor, x_t: Tensor, sigma: Tensor) -> Tensor:
        """[B, b, V] for x_t [B, b] after texts [B, P]."""
        n, V = self.process.num_states, self.process.vocab_size
        first = sum(V**known for known in range(0, past.shape[1], self.block))
        row = first + (past * V ** torch.arange(past.shape[1] - 1, -1, -1)).sum(-1)
        place = row, (x_t * n ** torch.arange(self.block - 1, -1, -1)).sum(-1)
        return self.level[place] + self.slope[place] * torch.sin(sigma.double()[:, None, None] + self.phase[place])

    def __call__(self, x_t: Tensor, sigma: Tensor, *, clean: Tensor) -> Tensor:
        parts: list[Tensor] = []
        for start in range(0, x_t.shape[1], self.block):
            here = slice(start, start + self.block)
            assert torch.equal(sigma[:, here], sigma[:, start : start + 1].expand(-1, self.block))
            parts.append(self._outputs(clean[:, :start], x_t[:, here], sigma[:, start]))
        return torch.cat(parts, 1)
