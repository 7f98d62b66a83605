"""The result of a particle sampler.

Shapes: N particles, L positions.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ParticleSet:
    """The particles of one text at the end of a run."""

    tokens: Tensor
    """[N, L], on the host."""
    log_weights: Tensor
    """[N], normalised: their exponentials sum to 1."""
    log_normalizer: float
    """An estimate of log Z. That of Z is unbiased; its logarithm is too low on average."""
    effective_sizes: tuple[float, ...]
    """The effective sample size before each network call and in the end, before resampling."""
    chosen: int
    """Index of the returned particle, drawn by the weights."""

    @property
    def effective_sample_size(self) -> float:
        """The effective sample size at the end."""
        return self.effective_sizes[-1]
